"""The TensorBoard tracker: event files in {folder}/{run}-{nonce}/, which are read before the first write.

    open   all event files of the folder ──▶ the newest step in them
    write  into a new file: one row = one Event = one record with a checksum; readers stop at an incomplete record

    tensorboard --logdir {folder}

Several machines may continue a shared folder (NFS), but only one writer at a time.

Not promised: a row that a full disk cut off. A writer that fails begins a new file.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.views.curves import CurvePoint
from diloco.views.samples import COLUMNS, Sample
from diloco.views.trackers.tracker import TrackedRun, TrackerError

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import (  # pyright: ignore[reportMissingImports]
        EventFileWriter,
    )

FILES = "events.out.tfevents.*"


class TensorBoardTracker:
    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._root = folder
        self._folder = folder
        self._writer: EventFileWriter | None = None
        self._config = ""  # "" after the first row is written

    def open(self, run: TrackedRun) -> int:
        self._folder = self._root / run.label
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            newest = newest_step(self._folder)
        except OSError as error:
            raise TrackerError(
                f"TensorBoard's files cannot be written to {self._folder} ({error.strerror or error}). Name another "
                "folder with --folder"
            ) from None
        self._config = json.dumps(dict(run.config), indent=1) if newest < 0 else ""
        return newest

    def write(self, point: CurvePoint, samples: Sequence[Sample]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportMissingImports]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportMissingImports]

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=v) for tag, v in point.numbers.items()])
        if samples:
            summary.value.extend(_text_values("samples", markdown_table(samples)))
        if self._config:
            summary.value.extend(_text_values("config", f"```\n{self._config}\n```"))
        writer = self._begin()
        writer.add_event(Event(wall_time=point.at, step=point.step, summary=summary))
        writer.flush()
        self._config = ""

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _begin(self) -> "EventFileWriter":
        """Open this writer's own event file, with its first row."""
        from tensorboard.summary.writer.event_file_writer import (  # pyright: ignore[reportMissingImports]
            EventFileWriter,
        )

        self._writer = self._writer or EventFileWriter(str(self._folder))
        return self._writer


def newest_step(folder: Path) -> int:
    """Return the newest step of a folder's event files; −1 if there is none.  Reading stops at an incomplete record."""
    from tensorboard.backend.event_processing.event_file_loader import (  # pyright: ignore[reportMissingImports]
        EventFileLoader,
    )

    files = sorted(folder.glob(FILES))
    return max((e.step for f in files for e in EventFileLoader(str(f)).Load() if e.HasField("summary")), default=-1)


def markdown_table(samples: Sequence[Sample]) -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS), *samples]
    return "\n".join(f"| {' | '.join(map(_cell_of, row))} |" for row in rows)


def _cell_of(value: object) -> str:
    """Return the value as a Markdown cell: on one line, with each | escaped."""
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", "<br>")


def _text_values(tag: str, text: str) -> Any:
    from tensorboard.plugins.text.summary import text_pb  # pyright: ignore[reportMissingImports]

    return text_pb(tag, text).value
