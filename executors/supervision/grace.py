"""Computes, from a replica's heartbeat, the time that it may take to leave, and the work that a kill would lose.

    request ─▶ inner step ends ─▶ offer is stored ─▶ leave record      grace = usual + inner steps · rate
             └─ rate: seconds per inner step (0: not known yet)        a kill loses the inner steps since the last offer
    usual = GRACE_S, and on a slow store the time of one turn of requests to hear the request, and of one to leave

Not promised: that a replica which hangs but sends heartbeats ends before FINISH_S; a second Ctrl-C ends it.
"""

from contextlib import suppress

from diloco.run.config import ConfigError
from diloco.run.record import Run
from rendezvous.agreement.membership import REQUESTS
from rendezvous.records.records import Beat

GRACE_S = 20.0
FINISH_S = 300.0  # time for an upload (of an offer or a last snapshot) while heartbeats come
EVALUATION_S = 86400.0  # time for the last evaluation; if it hangs, the replica's own watchdog ends it
LAST_STEPS = 3.0  # inner steps that a training replica may take before it sees that the run has ended
AT_WORK = "train"  # the phase of a replica that takes inner steps or uploads their offer


def usual_s(request_s: float, least: float) -> float:
    """Return the seconds to leave without an inner step.   request_s: seconds of a request to the store."""
    return least + 2 * REQUESTS * request_s


def finish_s(beat: Beat, steps: int, usual: float) -> float:
    """Return the seconds that a replica with heartbeats may take to end, once the run has all its `steps`.

    Writing a last snapshot may take long, and the last evaluation may take longer.  A replica that still trains for a
    decided step has nothing to write: it sees the run's end after its inner step.
    """
    if beat.phase == "left":
        return usual
    if beat.step >= steps and beat.evaluates:
        return EVALUATION_S
    still_trains = beat.phase == AT_WORK and beat.step < steps
    return min(FINISH_S, usual + LAST_STEPS * beat.rate) if still_trains else FINISH_S


def leave_s(beat: Beat | None, asked: Beat | None, boundary: int, usual: float) -> float:
    """Return the seconds that a replica with heartbeats may take to leave an unfinished run after a request.

    asked: the heartbeat at the request; a replica that has ended an inner step since then uploads.   boundary: inner
    steps per generation of completions; the first one samples, and may last as long as all at the mean `beat.rate`.
    """
    if beat is None or beat.phase != AT_WORK:
        return usual
    place = lambda b: (b.generation, b.step, b.inner)  # noqa: E731
    uploads = asked is not None and place(asked) != place(beat)
    steps_s = max(LAST_STEPS, boundary) * beat.rate
    return usual + steps_s + FINISH_S if uploads or not beat.rate else usual + steps_s


def boundary_of(run: Run) -> int:
    """Return the number of inner steps per generation of completions; 1 for a run without run.toml."""
    with suppress(ConfigError):
        return run.config.inner.boundary
    return 1


def lost_work(beat: Beat | None) -> str:
    """Describe the work lost with a killed replica; "" if no work is known.   beat: the replica's last heartbeat."""
    if beat is None or beat.phase != AT_WORK:
        return ""
    if not beat.inner:
        return "the inner step that it was in" + (f" (about {beat.rate:.0f} s of work)" if beat.rate else "")
    steps = f"{beat.inner} inner step{'s' * (beat.inner > 1)} ({beat.inner * beat.rate:.0f} s of work)"
    return f"{steps} and the one that it was in"
