"""A slot's process that ended, in words, and whether another start could change anything (plan.py decides the rest).

    wrong files, a reward that always fails, too many ends in a row ──▶ the reason to give up      else None

Not promised: the cause of an end; an exit code, or the platform's reason, is repeated as it is.
"""

from typing import TYPE_CHECKING

from diloco.process import exitcodes
from diloco.process.processes import describe_exit
from executors.platforms.base import State
from rendezvous.layout import is_actor

if TYPE_CHECKING:
    from executors.supervision.slots.plan import Limits, Observation, Strikes


def end_in_words(s: "Observation") -> str:
    """Describe the end of the slot's process."""
    if s.replacing_s is not None:
        return "ended because it was silent"
    if s.exit_code == exitcodes.FENCED:
        return "fenced by a generation that is silent now"
    if s.exit_code == exitcodes.DONE:
        return "it ended with exit code 0, and more outer steps are wanted"
    if s.state is State.CANCELLED:
        return "cancelled, and not by this run"
    return s.reason if s.exit_code is None and s.reason else describe_exit(s.exit_code)


def give_up_reason(s: "Observation", limits: "Limits", *, enough: int) -> str | None:
    """Return the reason why another start would change nothing, or None.   enough: see plan.py."""
    if s.exit_code == exitcodes.USER_ERROR:
        return "its configuration, files, model or bucket are wrong"
    if s.reward_failures >= limits.reward_failures:
        rows = f"{s.reward_failures} sessions in a row, each before {enough} outer steps counted its work"
        return f"its reward failed in {rows} ({end_in_words(s)})"
    if s.exit_code == exitcodes.GAVE_UP and not s.reward_failures and not is_actor(s.slot):
        return "it made no progress for too long"
    if s.failures >= limits.failures:
        return f"failed {s.failures} times in a row ({end_in_words(s)})"
    if s.losses >= limits.losses:
        return f"ended {s.losses} times in a row before its work counted ({end_in_words(s)})"
    return None


def reward_wait(strikes: "Strikes", limits: "Limits") -> dict[str, float]:
    """Return fields for `diloco status` about the next start of a slot whose reward has failed."""
    count = strikes.reward_failures
    if not strikes.by_reward:
        return {}
    row: dict[str, float] = {"reward_failures": count, "reward_limit": limits.reward_failures}
    return row if count >= limits.reward_failures else {**row, "again_in_s": limits.reward_pause(count)}
