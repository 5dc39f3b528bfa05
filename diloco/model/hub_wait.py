"""Wait for the Hub where a run's start model is not in its bucket.

    no answer ─▶ a note in the heartbeat, a pause, again ─▶ GaveUp after the run's give_up_s
    refused   ─▶ RendezvousError with the next steps

Not promised: that the Hub answers before the run's patience ends.
"""

from collections.abc import Callable
from typing import TypeVar

from diloco.process.session import Session
from inner.models.naming import HubError, HubModel
from rendezvous.errors import GaveUp, RendezvousError

T = TypeVar("T")
AGAIN_S = 5.0


def next_steps_text(model: HubModel) -> str:
    """Return the next steps for the user if the Hub does not give the start model."""
    download = f"hf download {model.name} --revision {model.commit}"
    return (
        f"Next: give this machine access to it (HF_TOKEN, HF_ENDPOINT, or a cache under HF_HOME that `{download}` has "
        f"filled), and run the same command again. Or let a new run carry the model through its bucket: `{download} "
        "--local-dir FOLDER`, and inner.model = FOLDER"
    )


def from_hub(session: Session, model: HubModel, act: Callable[[], T], check: Callable[[], None]) -> T:
    """Call `act` until the Hub answers, and return its result.   check: called before each pause; may raise.

    Raises GaveUp after the run's give_up_s without an answer, RendezvousError after a refusal.
    """
    began = session.clock.now()
    while True:
        try:
            return act()
        except HubError as error:
            text = f"{error}. {next_steps_text(model)}"
            if error.final:
                raise RendezvousError(text) from error
            if session.clock.now() - began > session.timing.give_up:
                raise GaveUp(text) from error
            _note_wait(session, f"waits for the Hub: {error}")
            check()
            session.clock.sleep(AGAIN_S)


def _note_wait(session: Session, text: str) -> None:
    if session.rv.members.status.note != text:
        session.emit("warning", kind="hub", text=text)
        session.rv.members.status.note = text
    session.flush_soon()
