"""The Weights & Biases tracker: one run with an id from the nonce.  A restarted writer resumes that run on any machine.

    open   online:   wandb.init(id, resume="allow"); the server returns the next step, which is its newest row + 1
           offline:  there is no server, so the .wandb files of this id in wandb's folder are read
    write  one row = one history record with _step = the outer step, and its time

    WANDB_PROJECT, WANDB_ENTITY, WANDB_DIR, WANDB_MODE as always.   `wandb sync` sends the files of one run in order.

A killed writer loses the rows that its helper process had not sent or written. The next writer writes them again,
because the server does not have them.

Not promised: offline, that writers with different folders continue one curve; each folder gets the whole curve, so
sync only one of them.  Online, that a killed writer's helper process has sent all rows before the next writer opens the
run; both may send the same row, with the same number.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from diloco.views.curves import CurvePoint
from diloco.views.samples import COLUMNS, Sample
from diloco.views.trackers.tracker import TrackedRun, TrackerError

OFFLINE = ("offline", "dryrun")  # values of WANDB_MODE with which wandb writes files here
BLOCK, HEAD = 32 * 1024, struct.Struct("<IHB")  # a .wandb file is a LevelDB log: checksum, length, part of a record
FILE_HEAD = 7  # bytes: ":W&B", a magic number, a version
WHOLE, FIRST, LAST = 1, 2, 4  # a whole record, its first part, its last part


class WandbTracker:
    name = "wandb"

    def __init__(self) -> None:
        self._about = TrackedRun("", "")
        self._run: Any = None

    def open(self, run: TrackedRun) -> int:
        import wandb  # pyright: ignore[reportMissingImports]

        self._about = run
        settings = wandb.setup().settings
        if settings.mode in OFFLINE:
            return newest_step_of(Path(settings.wandb_dir), run_id(run))
        return self._begin().step - 1

    def write(self, point: CurvePoint, samples: Sequence[Sample]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        row: dict[str, Any] = {**point.numbers, "_timestamp": point.at}
        if samples:
            row["samples"] = wandb.Table(columns=list(COLUMNS), data=[list(sample) for sample in samples])
        self._begin().log(row, step=point.step, commit=True)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _begin(self) -> Any:
        """Return wandb's run, and begin it if needed (offline not before the first row: each begin makes a folder)."""
        import wandb  # pyright: ignore[reportMissingImports]

        if self._run is not None:
            return self._run
        about = {"project": self._about.project, "name": self._about.name, "config": dict(self._about.config)}
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
        try:
            self._run = wandb.init(**about, id=run_id(self._about), resume="allow", settings=settings)
        except wandb.errors.AuthenticationError as error:
            raise TrackerError(f"wandb refused the login: {error}. Run `wandb login`") from None
        return self._run


def run_id(run: TrackedRun) -> str:
    """Return the run's id in wandb: the same id for every reader of the run, another id for a new run under its URL."""
    return f"diloco-{run.nonce}"[:64]


def newest_step_of(folder: Path, wandb_id: str) -> int:
    """Return the newest row of a run in wandb's folder of offline runs; −1 if there is none."""
    files = sorted(folder.glob(f"*run-*-{wandb_id}/run-{wandb_id}.wandb"))
    return max((step for path in files for step in history_steps(path)), default=-1)


def history_steps(path: Path) -> Iterator[int]:
    """Yield the step of each row in a .wandb file."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    for body in read_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        with suppress(Exception):  # protobuf's DecodeError
            record.ParseFromString(body)
            if record.WhichOneof("record_type") == "history":
                yield int(record.history.step.num)


def read_records(raw: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file up to the first incomplete record."""
    at = FILE_HEAD
    body = b""
    while at + HEAD.size <= len(raw):
        room = BLOCK - at % BLOCK
        if room < HEAD.size:
            at += room
            continue
        _, length, part = HEAD.unpack_from(raw, at)
        piece = raw[at + HEAD.size : at + HEAD.size + length]
        if part == 0 or len(piece) < length:
            return
        at += HEAD.size + length
        body = piece if part in (WHOLE, FIRST) else body + piece
        if part in (WHOLE, LAST):
            yield body
