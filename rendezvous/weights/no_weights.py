"""The writer of weights where a run broadcasts none.

    WeightsWriter (writer.py) ◀── [fleet] broadcast_weights ──▶ NoWeights

Not promised: anything; it does nothing.
"""

from rendezvous.records.state import ReplicatedState


class NoWeights:
    """The writer of a run that does not broadcast weights: it does nothing."""

    def note_step(self, state: ReplicatedState, t: int, fragments: int, *, base: str, closed: bool) -> None: ...
    def wait_until_read(self) -> None: ...
    def drain(self) -> None: ...
