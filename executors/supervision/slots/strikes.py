"""Counts the ends of a slot in a row, which determine the pause before its next start.

    an end ──▶ count_end ──▶ Strikes ──▶ Limits (plan.py): pause, give up

    steps that counted its session's work     losses         failures           reward_failures
    ---------------------------------------   ------------   ----------------   -------------------------------
    none                                      one more       one more if own    one more if by the reward
    some, fewer than ENOUGH                   1              1 if own, or 0     one more if by the reward
    ENOUGH or more                            1              1 if own, or 0     1 if by the reward, or 0

An end is `by_reward` if the reward returned no more numbers in a run that has committed outer steps.  Its judge may be
down for a while, so pauses grow to half an hour.  Or it fails in every session after some batches, so a session with a
little counted work does not reset the count (decision 034).  Such an end is no `own_fault`.

Not promised: an end of restarts if each session brings ENOUGH steps; then only the run's number of steps limits them.
"""

from dataclasses import dataclass

ENOUGH = 10  # outer steps; a session that brought so many was worth its start


@dataclass(frozen=True)
class Strikes:
    """Ends in a row.   losses: of any kind.   failures: by the replica's own fault.   reward_failures: by its reward.

    by_reward: whether the latest end was by the reward.
    """

    losses: int = 0
    failures: int = 0
    reward_failures: int = 0
    by_reward: bool = False


NO_STRIKES = Strikes()


@dataclass(frozen=True)
class SessionEnd:
    """An end that was not requested.   counted: outer steps that counted the session's work."""

    counted: int = 0
    own_fault: bool = False
    by_reward: bool = False


def count_end(before: Strikes, end: SessionEnd) -> Strikes:
    """Return the strikes after one more end."""
    fresh = NO_STRIKES if end.counted else before
    streak = 0 if end.counted >= ENOUGH else before.reward_failures
    return Strikes(
        losses=fresh.losses + 1,
        failures=fresh.failures + end.own_fault,
        reward_failures=streak + end.by_reward,
        by_reward=end.by_reward,
    )
