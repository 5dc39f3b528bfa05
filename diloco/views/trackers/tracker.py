"""The interface of trackers of a run's curves: Weights & Biases, trackio, TensorBoard.

    open(run) ──▶ the newest row that the tracker has ──▶ write(point, samples), row after row ──▶ close()

Only the tracker knows which rows it has. So a writer may be killed between any two rows, and the next writer continues
after the tracker's newest row.  Numbers and samples of a row are one write, which is complete or absent.

    wandb         the run's id is derived from its nonce; the server returns the next step; offline: the files
    trackio       each row has an id (nonce, step) that the database stores once, here or on a server
    tensorboard   the folder's event files are read; a row is one record

Not promised: each row only once in wandb and TensorBoard, if two machines write at the same time.  On one machine, the
second writer is refused (feed.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from diloco.run.config import ConfigError
from diloco.run.sections import PROJECT
from diloco.views.curves import CurvePoint
from diloco.views.samples import Sample


class TrackerError(ConfigError):
    """The error for a tracker that cannot be used: a package, a login or a folder is missing."""


class TrackerBusy(TrackerError):
    """The error for a tracker to which another process of this machine writes; the same command may work later."""


@dataclass(frozen=True)
class TrackedRun:
    """A run for a tracker.   nonce: the nonce in run.json, the same on every machine."""

    name: str
    nonce: str
    project: str = PROJECT
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def label(self) -> str:
        """A folder name that no other run has."""
        plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in self.name).strip(".") or "run"
        return f"{plain}-{self.nonce[:8]}"


class CurveTracker(Protocol):
    name: str

    def open(self, run: TrackedRun) -> int:
        """Open the run. Return its newest row, or −1.   Raises TrackerError for a fault that the user must fix."""
        ...

    def write(self, point: CurvePoint, samples: Sequence[Sample]) -> None:
        """Write one row with its table.  Rows come in order, each after the tracker's newest row."""
        ...

    def close(self) -> None:
        """Finish the writes of all rows."""
        ...
