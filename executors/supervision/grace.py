"""How long a replica may take to go, by its own heartbeat; and what a kill costs.

    asked ─▶ its inner step ends ─▶ its offer is durable ─▶ goodbye     grace = usual + inner steps · rate
             └─ rate: seconds per inner step (0: not known yet)         killed: the inner steps since its last offer

Not promised: that a replica which beats and hangs ends before FINISH_S; a second Ctrl-C ends it.
"""

from contextlib import suppress

from diloco.run.config import ConfigError
from diloco.run.record import Run
from rendezvous.records.records import Beat

GRACE_S = 20.0
FINISH_S = 300.0  # a replica that beats may take so long for an upload: of its offer, of its last snapshot
LAST_STEPS = 3.0  # inner steps that one which still trains may take until it hears of the end
AT_WORK = "train"  # the phase of inner steps, and of the upload of their offer


def goodbye_s(beat: Beat, steps: int, usual: float) -> float:
    """Seconds that a replica which beats may take to end, once a run has all its `steps`.

    It may write a last snapshot for long.  One that is still in the inner steps of a decided step has nothing to write:
    it hears of the end when its inner step ends, if that does not hang.
    """
    if beat.phase == "left":
        return usual
    still_trains = beat.phase == AT_WORK and beat.step < steps
    return min(FINISH_S, usual + LAST_STEPS * beat.rate) if still_trains else FINISH_S


def leave_s(beat: Beat | None, asked: Beat | None, boundary: int, usual: float) -> float:
    """Seconds that a replica which beats may take to leave a run that is not over, from when it was asked.

    asked: its beat at that time; it uploads once it has ended an inner step since.   boundary: inner steps of one
    generation; `beat.rate` is their mean, and the first of them, which generates, may last as long as all.
    """
    if beat is None or beat.phase != AT_WORK:
        return usual
    place = lambda b: (b.generation, b.step, b.inner)  # noqa: E731
    uploads = asked is not None and place(asked) != place(beat)
    steps_s = max(LAST_STEPS, boundary) * beat.rate
    return usual + steps_s + FINISH_S if uploads or not beat.rate else usual + steps_s


def boundary_of(run: Run) -> int:
    """Inner steps from one fresh generation to the next; 1 in a run that has no run.toml."""
    with suppress(ConfigError):
        return run.config.inner.boundary
    return 1


def lost_work(beat: Beat | None) -> str:
    """The work that died with a replica whose last heartbeat this is, in words; "" if all of it was offered."""
    if beat is None or beat.phase != AT_WORK:
        return ""
    if not beat.inner:
        return "the inner step that it was in" + (f" (about {beat.rate:.0f} s of work)" if beat.rate else "")
    steps = f"{beat.inner} inner step{'s' * (beat.inner > 1)} ({beat.inner * beat.rate:.0f} s of work)"
    return f"{steps} and the one that it was in"
