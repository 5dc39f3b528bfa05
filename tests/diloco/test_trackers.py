"""The real trackers, offline: written by a process that is killed between two rows, started again, and read back.

    make test-trackers            an environment of its own: trackio's pins and ours do not agree

Each test runs where its package is installed.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco.runlog.reader import read_report
from diloco.views.curves import curve_point, read_logged_steps
from rendezvous.stores.files import FileStore
from tests.diloco.test_curves import rollouts
from tests.support.long_run import LongRun

ROOT = Path(__file__).parents[2]
STEPS = 16
LABEL, NONCE = "long-a-run-of", "a-run-of-its-own"  # of tests/support/long_run.py
Rows = list[tuple[int, dict[str, float]]]  # in the order in which they were written


class Fleet:
    """A run in a folder that grows, and writers of its curves, each on a machine of its own where that is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.head = folder, LongRun(STEPS, 2), 0
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TRACKIO_", "HF_"))},
            "HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT),
            "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "TRACKIO_DIR": str(folder / "trackio"),
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.grow(STEPS)

    @property
    def url(self) -> str:
        return str(self.folder / "run")

    def grow(self, steps: int) -> None:
        for t in range(self.head, self.head + steps):
            self.run.step(t)
            rollouts(self.run.store, "r00", t, t, f"one | of {t}\nin two lines", f"two of {t}")
        if not self.head:
            self.run.lose("r01", 30.0 * steps + 1)
        self.head += steps
        store = FileStore(self.folder / "run")
        for key in self.run.store.list(""):
            store.put(key, self.run.store.get(key) or b"")

    def track(self, name: str, *, dies_at: int = -1, **environ: str) -> subprocess.CompletedProcess[str]:
        """Write what is new; SIGKILL before the write number `dies_at`."""
        files = str(self.folder / "tensorboard")
        command = [sys.executable, "-m", "tests.support.tracker_victim", str(dies_at), "track", self.url, "--to", name]
        done = subprocess.run(
            [*command, "--folder", files], cwd=self.folder, env={**self.environ, **environ}, text=True,
            capture_output=True, timeout=180,
        )  # fmt: skip
        assert done.returncode == (0 if dies_at < 0 else -signal.SIGKILL), done.stderr
        return done

    def expected(self) -> Rows:
        """By the bucket."""
        report = read_report(self.run.store)
        points = [curve_point(report, read_logged_steps(report.events), row) for row in range(1, self.head + 1)]
        return [(p.step, p.numbers) for p in points if p is not None]


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    (tmp_path / "home").mkdir()
    return Fleet(tmp_path)


def assert_equal_rows(found: Rows, wanted: Rows) -> None:
    assert [step for step, _ in found] == [step for step, _ in wanted]
    for (step, mine), (_, theirs) in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6), step


def killed_again_and_again(fleet: Fleet, name: str, read: Callable[[Fleet], Rows], *, keeps: bool = True) -> None:
    """Four kills, the run growing on the way; the rows there at any time are a beginning of the curve, once.

    keeps: every row that a killed process has written is there."""
    wrote = 0
    for dies_at, grown in ((5, 0), (0, 2), (7, 0), (2, 3)):
        fleet.track(name, dies_at=dies_at)
        there = read(fleet)
        wrote += dies_at
        assert len(there) == wrote or (not keeps and len(there) < wrote)
        assert_equal_rows(there, fleet.expected()[: len(there)])
        fleet.grow(grown)
    fleet.track(name)
    fleet.grow(2)
    fleet.track(name)
    fleet.track(name)
    assert_equal_rows(read(fleet), fleet.expected())
    assert len(fleet.expected()) == fleet.head == STEPS + 7


# -------------------------------------------------------------------- TensorBoard


def tensorboard_rows(fleet: Fleet) -> Rows:
    """As TensorBoard itself accumulates them: every scalar of every tag, in the order of the files."""
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    folder = fleet.folder / "tensorboard" / LABEL
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    if not folder.exists() or not list(folder.iterdir()):
        return []
    board.Reload()
    by_tag = {tag: board.Scalars(tag) for tag in board.Tags()["scalars"]} or {
        tag: board.Tensors(tag) for tag in board.Tags()["tensors"] if tag not in ("samples", "config")
    }
    steps = [e.step for e in by_tag["fleet/reward"]] if by_tag else []
    value = lambda e: getattr(e, "value", None) if hasattr(e, "value") else e.tensor_proto.float_val[0]  # noqa: E731
    for tag, events in by_tag.items():
        assert len({e.step for e in events}) == len(events), f"{tag}: a step twice"
    of = {tag: {e.step: value(e) for e in events} for tag, events in by_tag.items()}
    return [(step, {tag: numbers[step] for tag, numbers in of.items() if step in numbers}) for step in steps]


def test_tensorboard_has_each_row_once_through_kills(fleet: Fleet) -> None:
    pytest.importorskip("tensorboard")
    killed_again_and_again(fleet, "tensorboard", tensorboard_rows)


def test_tensorboard_goes_on_after_a_torn_record_and_on_another_machine(fleet: Fleet) -> None:
    pytest.importorskip("tensorboard")
    fleet.track("tensorboard", dies_at=6)
    (file,) = (fleet.folder / "tensorboard" / LABEL).iterdir()
    file.write_bytes(file.read_bytes()[:-40])
    assert [step for step, _ in tensorboard_rows(fleet)] == [1, 2, 3, 4, 5]
    fleet.track("tensorboard", HOME=str(fleet.folder), XDG_CACHE_HOME=str(fleet.folder / "other"))
    assert_equal_rows(tensorboard_rows(fleet), fleet.expected())


def test_tensorboard_has_samples_as_a_table_and_the_config(fleet: Fleet) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    fleet.track("tensorboard")
    board = EventAccumulator(str(fleet.folder / "tensorboard" / LABEL), size_guidance={"tensors": 0})
    board.Reload()
    tables = board.Tensors("samples")
    assert [e.step for e in tables] == list(range(1, STEPS + 1))
    text = tables[3].tensor_proto.string_val[0].decode()
    assert "| 4 | r00 | q one \\| of 3<br>in two lines | one \\| of 3<br>in two lines | 0.5 |" in text.splitlines()
    (config,) = board.Tensors("config")
    assert '"model": "Qwen/Qwen2.5-0.5B"' in config.tensor_proto.string_val[0].decode()


def test_a_folder_that_cannot_be_written_is_said_in_a_sentence(fleet: Fleet) -> None:
    pytest.importorskip("tensorboard")
    (fleet.folder / "tensorboard").write_text("a file")
    command = [sys.executable, "-m", "executors.cli", "track", fleet.url, "--to", "tensorboard", "--folder"]
    files = str(fleet.folder / "tensorboard")
    done = subprocess.run([*command, files], env=fleet.environ, text=True, capture_output=True, timeout=180)
    assert done.returncode == 2 and "Name another folder with --folder" in done.stderr


# -------------------------------------------------------------------- trackio


def trackio_rows(fleet: Fleet, folder: str = "trackio") -> Rows:
    """By the database itself."""
    import sqlite3

    path = fleet.folder / folder / "diloco.db"
    if not path.exists():
        return []
    with sqlite3.connect(path) as database:
        found = database.execute("SELECT step, metrics FROM metrics WHERE run_id = ? ORDER BY id", (NONCE,)).fetchall()
    return [(step, {k: v for k, v in json.loads(text).items() if k != "samples"}) for step, text in found]


def test_trackio_has_each_row_once_through_kills(fleet: Fleet) -> None:
    pytest.importorskip("trackio")
    killed_again_and_again(fleet, "trackio", trackio_rows)


def test_trackio_has_samples_as_a_table_the_config_and_the_commits_time(fleet: Fleet) -> None:
    pytest.importorskip("trackio")
    import sqlite3

    fleet.track("trackio")
    with sqlite3.connect(fleet.folder / "trackio" / "diloco.db") as database:
        rows = database.execute("SELECT metrics, timestamp FROM metrics ORDER BY step").fetchall()
        ((config,),) = database.execute("SELECT config FROM configs").fetchall()
    table = json.loads(rows[3][0])["samples"]
    assert table["_type"] == "trackio.table"
    assert table["_value"][1] == {
        "step": 4, "replica": "r00", "prompt": "q two of 3", "completion": "two of 3", "reward": 0.5
    }  # fmt: skip
    assert rows[3][1].startswith("2027-01-15T08:02:00")
    assert json.loads(config)["inner"]["model"] == "Qwen/Qwen2.5-0.5B"


@pytest.fixture
def trackio_server(fleet: Fleet) -> Iterator[str]:
    """trackio's own server, on loopback."""
    pytest.importorskip("trackio")
    code = (
        "import sys, trackio, time\n"
        "found = trackio.show(project='diloco', open_browser=False, block_thread=False)\n"
        "print('URL', found[-1] if isinstance(found, tuple) else found, flush=True)\n"
        "time.sleep(600)"
    )
    environ = {**fleet.environ, "TRACKIO_DIR": str(fleet.folder / "server")}
    child = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        yield next(line.split()[1] for line in child.stdout if line.startswith("URL"))
    finally:
        child.kill()
        child.wait()


def test_trackios_server_has_each_row_once_whichever_machine_writes(fleet: Fleet, trackio_server: str) -> None:
    for i, dies_at in enumerate((5, 3, -1)):
        cache = str(fleet.folder / f"machine{i}")
        fleet.track(
            "trackio", dies_at=dies_at, TRACKIO_SERVER_URL=trackio_server, TRACKIO_DIR=cache, XDG_CACHE_HOME=cache
        )
        there = trackio_rows(fleet, "server")
        assert_equal_rows(there, fleet.expected()[: len(there)])
    assert len(there) == STEPS


def test_trackio_ignores_a_row_that_it_has(fleet: Fleet, monkeypatch) -> None:
    """The answer to a write may be lost, and two machines may write at once."""
    pytest.importorskip("trackio")
    code = (
        "from diloco.views.trackers.tracker import TrackedRun\n"
        "from diloco.views.trackers.on_trackio import TrackioTracker\n"
        "from diloco.views.curves import CurvePoint\n"
        "one, two = TrackioTracker(), TrackioTracker()\n"
        f"run = TrackedRun('long', {NONCE!r})\n"
        "assert one.open(run) == two.open(run) == -1\n"
        "for tracker in (one, two, one):\n"
        "    for step in (1, 2, 3):\n"
        "        tracker.write(CurvePoint(step, 1.8e9, {'fleet/reward': step / 4}), [])\n"
        "assert one.open(run) == 3"
    )
    done = subprocess.run([sys.executable, "-c", code], env=fleet.environ, text=True, capture_output=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert trackio_rows(fleet) == [(step, {"fleet/reward": step / 4}) for step in (1, 2, 3)]


# -------------------------------------------------------------------- wandb


def wandb_rows(fleet: Fleet) -> Rows:
    """The rows of all its offline files of this run, in the order in which `wandb sync` would take them."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    from diloco.views.trackers.on_wandb import read_records

    found: Rows = []
    for path in sorted(fleet.folder.glob("wandb/offline-run-*/*.wandb")):
        for body in read_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(body)
            if record.WhichOneof("record_type") == "history":
                row = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
                numbers = {k: v for k, v in row.items() if k[0] != "_" and not k.startswith("samples")}
                found.append((row["_step"], numbers))
    return found


def test_wandb_has_each_row_once_through_kills(fleet: Fleet) -> None:
    pytest.importorskip("wandb")
    killed_again_and_again(fleet, "wandb", wandb_rows, keeps=False)


def test_a_wandb_file_is_read_over_blocks_and_up_to_a_torn_record(fleet: Fleet) -> None:
    pytest.importorskip("wandb")
    from diloco.views.trackers.on_wandb import BLOCK, history_steps, newest_step_of, run_id

    fleet.track("wandb")
    (path,) = fleet.folder.glob("wandb/offline-run-*/*.wandb")
    raw = path.read_bytes()
    assert len(raw) > 2 * BLOCK and list(history_steps(path)) == list(range(1, STEPS + 1))
    path.write_bytes(raw[: len(raw) * 2 // 3])
    torn = list(history_steps(path))
    assert 1 < len(torn) < STEPS and torn == list(range(1, len(torn) + 1))
    fleet.track("wandb")
    assert [step for step, _ in wandb_rows(fleet)] == list(range(1, STEPS + 1))
    assert path.parent.name.endswith(f"-diloco-{NONCE}")
    assert newest_step_of(fleet.folder / "wandb", f"diloco-{NONCE}") == STEPS and callable(run_id)


def test_wandb_has_samples_as_a_table_the_config_and_the_commits_time(fleet: Fleet) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    from diloco.views.trackers.on_wandb import read_records

    fleet.track("wandb")
    (path,) = fleet.folder.glob("wandb/offline-run-*/*.wandb")
    records = list[wandb_internal_pb2.Record]()
    for body in read_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(body)
        records.append(record)
    (run,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["inner"]["model"] == "Qwen/Qwen2.5-0.5B" and run.project == "diloco" and run.display_name == "long"
    rows = [r.history for r in records if r.WhichOneof("record_type") == "history"]
    fourth = {(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in rows[3].item}
    assert fourth["_timestamp"] == 1_800_000_120.0
    samples = fourth.get("samples") or {"path": fourth["samples.path"]}  # one item or several, by wandb's version
    shown = json.loads((path.parent / "files" / samples["path"]).read_text())
    assert shown["columns"] == ["step", "replica", "prompt", "completion", "reward"]
    assert shown["data"][1] == [4, "r00", "q two of 3", "two of 3", 0.5]


# -------------------------------------------------------------------- in a supervisor


def test_a_supervisor_writes_every_step_of_its_run(tmp_path, monkeypatch) -> None:
    pytest.importorskip("tensorboard")
    from diloco.views.trackers.on_tensorboard import newest_step
    from executors.platforms.on_host.executor import LocalProcessExecutor
    from tests.executors import test_supervisor as toys

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    log = {"to": ["tensorboard"], "folder": str(tmp_path / "tensorboard")}
    run = toys.found(tmp_path, log=log)
    executor = LocalProcessExecutor([toys.HERE])
    try:
        assert toys.supervisor_for(run, executor).supervise().code == 0
    finally:
        executor.close()
    (folder,) = (tmp_path / "tensorboard").iterdir()
    assert newest_step(folder) == 6
    assert "6 rows written" in (tmp_path / "run" / "processes" / "track.log").read_text()
