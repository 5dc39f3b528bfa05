"""Decides the supervisor's next actions: a pure function of the desired and the observed state.

    desired ─┐                    Launch    no replica runs this slot
             ├─▶ plan ─▶ actions  Replace   its replica has ended, or is silent
    observed ┘                    Fence     the silent replica was asked to end, and does not end
                                  Drain     the replica runs, and is not wanted any more
                                  Cancel    an unwanted replica cannot read the request to leave, or does not leave
                                  Wait      nothing can be done yet; has the reason
                                  GiveUp    another start would change nothing

A slot is the place of one replica.  While the run has steps left, a wanted slot whose process has ended is started
again after every kind of end: after DONE, because the run then had fewer steps, and after another user's cancel, which
counts as a loss.  A slot with a newer generation is left alone while that generation sends heartbeats.  A platform may
restart a process by itself.  So while it reports RUNNING, wait for `restart_grace_s` of silence; then end or fence the
process, and only then start a new one.  A replica that waits for a machine (PENDING) is not silent.

The number of a slot's consecutive ends determines the pause before its next start:

    an end ──▶ count_end ──▶ Strikes ──▶ Limits: pause, give up

    steps that counted its session's work     losses         failures           reward_failures
    ---------------------------------------   ------------   ----------------   -------------------------------
    none                                      one more       one more if own    one more if by the reward
    some, fewer than ENOUGH                   1              1 if own, or 0     one more if by the reward
    ENOUGH or more                            1              1 if own, or 0     1 if by the reward, or 0

An end is `by_reward` if the reward stopped returning numbers in a run that has committed outer steps.  A judge may be
down for a while, so pauses grow to half an hour.  Or the reward fails in every session after some batches, so a session
with a little counted work does not reset the count (decision 034).  Such an end is not an `own_fault`.

Not promised: an end of restarts if each session brings ENOUGH steps; then only the run's number of steps limits them.
Not promised either: that two supervisors never launch one slot twice.  The supervisor's claim prevents two supervisors,
and as a last resort the claim of the slot fences the older replica.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from executors.platforms.base import State

ENOUGH = 10  # a session whose work counted in this many outer steps was worth its start
Holder = Literal["none", "unknown", "beating", "silent", "left"]


@dataclass(frozen=True)
class Limits:
    """Limits and times of a supervisor.

    failures: consecutive ends by a replica's own fault, without a counted pseudogradient, that end the run.
    losses: the same for ends of any kind.   backoff_s: pause before the second replacement in a row; it then doubles.
    reward_failures: consecutive ends by a reward that has worked before (Strikes).   reward_backoff_s: pause before the
    first replacement after such an end; then four times that, …: 60, 240, 960, 1800, 1800 s, 81 minutes in all.
    silent_s: a process of this machine is replaced if its heartbeat does not change for silent_s.
    restart_grace_s: silent_s on a platform, which may restart the process.   boot_s: time to the first heartbeat on a
    platform. fence_s: time from the request to end to the fence.   drain_s: time from the request to the cancel.
    """

    failures: int = 3
    losses: int = 10
    reward_failures: int = 6
    backoff_s: float = 1.0
    backoff_most_s: float = 60.0
    reward_backoff_s: float = 60.0
    reward_backoff_most_s: float = 1800.0
    silent_s: float = 120.0
    restart_grace_s: float = 600.0
    boot_s: float = 1800.0
    fence_s: float = 60.0
    drain_s: float = 60.0

    def pause(self, losses: int) -> float:
        """Return seconds between the latest of `losses` ends in a row and the next start."""
        return 0.0 if losses < 2 else min(self.backoff_most_s, self.backoff_s * 2 ** (losses - 2))

    def reward_pause(self, failures: int) -> float:
        """Return seconds between the latest of `failures` ends in a row by the reward and the next start."""
        return 0.0 if failures < 1 else min(self.reward_backoff_most_s, self.reward_backoff_s * 4 ** (failures - 1))


@dataclass(frozen=True)
class Strikes:
    """Consecutive ends.   losses: any kind.   failures: the replica's own fault.   reward_failures: the reward failed.

    by_reward: whether the reward caused the latest end.
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


@dataclass(frozen=True)
class Desired:
    """The desired state.   slots: slots that should run.   done: the run has all its steps.   ending: stop earlier."""

    slots: frozenset[str]
    done: bool = False
    ending: bool = False


@dataclass(frozen=True)
class Observation:
    """The observed state of a slot.   state, exit_code, reason: status of the newest process (None: unknown).

    holder: what the slot's newest session does, by its heartbeat; another launcher may have started it.
    silent_s: seconds without a new heartbeat.   losses, failures: ends in a row (see Limits).
    reward_failures: consecutive ends by the reward; 0 if the latest end was of another kind.
    native: whether a platform runs it.   beaten: whether a heartbeat was sent.
    replacing_s, draining_s: seconds since we asked it to end, for a replacement or for good (None: not asked).
    leave_s: seconds that the replica may take to leave, computed from the pace of its inner steps.
    """

    slot: str
    state: State | None = None
    exit_code: int | None = None
    ended_at: float = 0.0
    holder: Holder = "none"
    silent_s: float = 0.0
    losses: int = 0
    failures: int = 0
    reward_failures: int = 0
    reason: str = ""
    native: bool = False
    beaten: bool = True
    replacing_s: float | None = None
    draining_s: float | None = None
    leave_s: float = 0.0

    @property
    def running(self) -> bool:
        return self.state is not None and not self.state.ended


@dataclass(frozen=True)
class Action:
    slot: str
    why: str


class Launch(Action):
    """Start a replica for the slot."""


class Replace(Action):
    """End the slot's process if it still runs, and start a new replica."""


class Fence(Action):
    """Claim the slot of a replica that does not end."""


class Drain(Action):
    """Ask the replica to leave."""


class Cancel(Action):
    """Cancel the process, without a replacement."""


class Wait(Action):
    """Do nothing yet."""


class GiveUp(Action):
    """Do not start this slot again, because no start can succeed: the run ends, or continues without the actor."""


def plan(desired: Desired, observed: Iterable[Observation], now: float, limits: Limits = Limits()) -> list[Action]:
    """Return one action per slot that needs one; a slot in its desired state needs no action."""
    found = [_action_for(desired, one, now, limits) for one in observed]
    return [action for action in found if action is not None]


def _action_for(desired: Desired, s: Observation, now: float, limits: Limits) -> Action | None:
    if s.running:
        return _about_running(desired, s, limits)
    if desired.done or desired.ending or s.slot not in desired.slots:
        return None
    if s.holder == "beating":
        return Wait(s.slot, "a process that was launched elsewhere has the slot")
    if s.holder == "unknown":
        return Wait(s.slot, "checking whether its heartbeat changes")
    return _about_ended(s, now, limits)


def _about_running(desired: Desired, s: Observation, limits: Limits) -> Action | None:
    unwanted = s.slot not in desired.slots and not desired.done
    if desired.ending or unwanted or (desired.done and s.state is State.PENDING):
        return _about_unwanted(s, limits)
    if desired.done:  # the replica may write a last snapshot
        return None
    if s.replacing_s is not None:
        if s.replacing_s >= limits.fence_s:
            return Fence(s.slot, f"it has not ended within {s.replacing_s:.0f} s")
        return Wait(s.slot, "asked to end, then it is started again")
    if s.state is State.RUNNING and s.silent_s >= _silence_limit_s(s, limits):
        what = "its heartbeat does not change" if s.beaten else "it runs without a heartbeat"
        return Replace(s.slot, f"{what} for {s.silent_s:.0f} s")
    return None


def _about_unwanted(s: Observation, limits: Limits) -> Action:
    if s.state is State.PENDING:
        return Cancel(s.slot, "no longer wanted, and still waiting for a machine")
    if s.draining_s is not None and s.draining_s >= max(limits.drain_s, s.leave_s):
        return Cancel(s.slot, f"no longer wanted, and it has not left within {s.draining_s:.0f} s")
    return Drain(s.slot, "no longer wanted")


def _silence_limit_s(s: Observation, limits: Limits) -> float:
    if not s.native:
        return limits.silent_s
    return limits.restart_grace_s if s.beaten else limits.boot_s


def _about_ended(s: Observation, now: float, limits: Limits) -> Action:
    if s.state is None:
        return Launch(s.slot, "no process runs it")
    from executors.supervision.slots.ended import end_in_words, give_up_reason

    if (hopeless := give_up_reason(s, limits, enough=ENOUGH)) is not None:
        return GiveUp(s.slot, hopeless)
    left = s.ended_at + max(limits.pause(s.losses), limits.reward_pause(s.reward_failures)) - now
    if left > 0:
        return Wait(s.slot, f"{end_in_words(s)}; trying again in {left:.0f} s")
    return Replace(s.slot, end_in_words(s))
