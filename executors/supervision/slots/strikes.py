"""How often a slot has ended in a row, and how long its next start waits.

    an end ──▶ count_end ──▶ Strikes ──▶ Limits (plan.py): pause, give up

    steps that counted its session's work     losses         failures           reward_failures
    ---------------------------------------   ------------   ----------------   -------------------------------
    none                                      one more       one more if own    one more if by the reward
    some, fewer than ENOUGH                   1              1 if own, or 0     one more if by the reward
    ENOUGH or more                            1              1 if own, or 0     1 if by the reward, or 0

An end is `by_reward` if the reward gave no numbers any more in a run that has committed outer steps: its judge may be
away and come back, so pauses grow to half an hour; or it fails in every session after some batches, so a session whose
work counted a little does not begin the count anew (decision 034).  Such an end is no `own_fault`.

Not promised: that sessions which each bring ENOUGH steps ever stop being started again; the run's steps bound them.
"""

from dataclasses import dataclass

ENOUGH = 10  # outer steps; a session that brought them was worth its start


@dataclass(frozen=True)
class Strikes:
    """Ends in a row.   losses: of any kind.   failures: by the replica's own fault.   reward_failures: by its reward.

    by_reward: the latest end was.
    """

    losses: int = 0
    failures: int = 0
    reward_failures: int = 0
    by_reward: bool = False


NO_STRIKES = Strikes()


@dataclass(frozen=True)
class SessionEnd:
    """An end that was not asked for.   counted: outer steps that counted its work."""

    counted: int = 0
    own_fault: bool = False
    by_reward: bool = False


def count_end(before: Strikes, end: SessionEnd) -> Strikes:
    """The strikes after one more end."""
    fresh = NO_STRIKES if end.counted else before
    streak = 0 if end.counted >= ENOUGH else before.reward_failures
    return Strikes(
        losses=fresh.losses + 1,
        failures=fresh.failures + end.own_fault,
        reward_failures=streak + end.by_reward,
        by_reward=end.by_reward,
    )
