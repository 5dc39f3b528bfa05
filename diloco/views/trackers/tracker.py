"""The trackers that a run's curves are written to: Weights & Biases, trackio, TensorBoard.

    open(run) ──▶ the newest row that it has, by its own account ──▶ write(point, samples), row after row ──▶ close()

A tracker is asked what it has, and nothing of that is kept anywhere else: so a writer may be killed between any two
rows, and the next one goes on where the tracker stands.  Numbers and samples of a row go in one write, which is there
whole or not at all.

    wandb         the run's id is derived from its nonce; the server says the step after its newest; offline: the files
    trackio       each row has an id (nonce, step) that its database takes once, here or on a server
    tensorboard   event files of the folder are read back; a row is one record

Not promised: that two writers at the same time, on two machines, leave each row once in wandb and TensorBoard.  On one
machine the second is refused (runlog/feed.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from diloco.run.config import ConfigError
from diloco.run.log_config import PROJECT
from diloco.views.curves import CurvePoint
from diloco.views.samples import Sample


class TrackerError(ConfigError):
    """A tracker cannot be written to as things stand: a package, a login or a folder is missing."""


class TrackerBusy(TrackerError):
    """The tracker is taken: another process of this machine writes to it; the same command may work later."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it.   nonce: of run.json, the same wherever the run is read from."""

    name: str
    nonce: str
    project: str = PROJECT
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def label(self) -> str:
        """A name for a folder, which no other run has."""
        plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in self.name).strip(".") or "run"
        return f"{plain}-{self.nonce[:8]}"


class CurveTracker(Protocol):
    name: str

    def open(self, run: TrackedRun) -> int:
        """Begin, or go on; -> the newest row that it has, −1 for none.  Raises TrackerError for a fault to mend."""
        ...

    def write(self, point: CurvePoint, samples: Sequence[Sample]) -> None:
        """Write one row, with its table.  Rows come in order, each later than the newest that it has."""
        ...

    def close(self) -> None:
        """Hand over all written rows."""
        ...
