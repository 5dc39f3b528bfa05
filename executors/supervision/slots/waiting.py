"""Logs the wait of a launch for a machine. The wait is not billed.

    PENDING ──▶ pending ── LONG_S, or the platform names a reason ──▶ queued (why) ── a new reason ──▶ queued (why)
    another state ──▶ running

Not promised: a reason (only Slurm and Hugging Face name one); a second line about a reason that comes back.
"""

from executors.platforms.base import State
from executors.supervision.slots.slot_state import SlotState
from rendezvous.background import Emit

LONG_S = 60.0  # most machines come sooner


def log_wait(state: SlotState, emit: Emit, now: float) -> None:
    """Log when this slot's launch begins and stops waiting, and each reason once.   now: the slot's clock."""
    assert state.handle is not None and state.status is not None
    waits = state.status.state is State.PENDING
    about = {"slot": state.slot, "attempt": state.handle.attempt, "native": state.handle.native}
    if waits and not state.pending:
        emit("pending", **about, first=not state.ran)
    elif state.pending and not waits and not state.status.state.ended:
        emit("running", **about)
    since, told = state.waits or (now, ())
    why = state.status.reason
    if waits and (why not in told if why else not told and now - since >= LONG_S):
        told = (*told, why)
        emit("queued", **about, seconds=round(now - since), **({"why": why} if why else {}))
    state.pending, state.waits = waits, (since, told) if waits else None
