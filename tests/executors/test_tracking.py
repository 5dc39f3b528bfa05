"""The trackers of a supervised run: a child that may crash, hang or be missing something, and harms nothing."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.process import exitcodes
from diloco.process.processes import is_alive, start_ticks
from diloco.run.config import ConfigError, RunConfig
from diloco.runlog.reader import read_report
from executors.platforms.on_host.executor import LocalProcessExecutor
from executors.preflight.checks import preflight
from executors.preflight.run_url import UsageError
from executors.supervision.notices import tracking
from executors.supervision.notices.asked_for import tracker_child
from executors.supervision.notices.tracking import TrackerChild, pause_after, track_command
from rendezvous.clock import SystemClock
from tests.executors import test_supervisor as toys

LONG_S = 120.0


class Hours(SystemClock):
    """This machine's clock, which a test may put forward."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


class Child(TrackerChild):
    def __init__(self, folder: Path, code: str) -> None:
        self.warned = list[str]()
        self.hours = Hours()
        super().__init__([sys.executable, "-c", code], folder / "track.log", self.hours, self.warned.append)

    @property
    def pid(self) -> int:
        return 0 if self._child is None else self._child.pid

    def until(self, found: Callable[[], object]) -> None:
        began = SystemClock().now()
        while not found():
            assert SystemClock().now() - began < LONG_S
            self.tick()
            self.hours.sleep(0.02)


def test_a_package_or_login_that_is_missing_is_a_warning_once(tmp_path) -> None:
    child = Child(tmp_path, "import sys; print('no login to wandb', file=sys.stderr); sys.exit(2)")
    child.until(lambda: child.warned)
    child.hours.ahead = 1e6
    for _ in range(5):
        child.tick()
    assert child.pid == 0 and len(child.warned) == 1
    assert "no login to wandb" in child.warned[0] and "the run continues" in child.warned[0]


def test_a_crash_is_tried_again_after_a_pause(tmp_path) -> None:
    child = Child(tmp_path, "import os; os.kill(os.getpid(), 9)")
    child.until(lambda: child.warned)
    child.tick()
    assert child.pid == 0 and "killed by SIGKILL" in child.warned[0] and "again in 15 s" in child.warned[0]
    child.hours.ahead = 16.0
    child.until(lambda: len(child.warned) == 2)
    assert "again in 30 s" in child.warned[1]


def test_pauses_grow_and_some_ends_are_final() -> None:
    assert [pause_after(1, n) for n in (1, 2, 3, 9)] == [15.0, 30.0, 60.0, 900.0]
    assert pause_after(exitcodes.DONE, 1) is pause_after(exitcodes.USER_ERROR, 1) is None
    assert pause_after(exitcodes.GAVE_UP, 1) == 15.0, "the child of a supervisor that was killed may write for a moment"


def test_a_command_that_cannot_be_started_is_a_warning(tmp_path) -> None:
    (tmp_path / "a file").write_text("")
    warned = list[str]()
    child = TrackerChild([sys.executable], tmp_path / "a file" / "track.log", SystemClock(), warned.append)
    child.tick()
    assert len(warned) == 1 and "could not be started" in warned[0]
    child.end(done=False)


def test_a_run_without_trackers_has_no_child(tmp_path) -> None:
    run: Any = SimpleNamespace(config=config(tmp_path), url=str(tmp_path))
    there = [*tmp_path.iterdir()]
    child = tracker_child(run, SystemClock(), pytest.fail)
    child.tick()
    child.end(done=True)
    assert not isinstance(child, TrackerChild) and [*tmp_path.iterdir()] == there


def config(folder: Path, **log: object) -> RunConfig:
    (folder / "text.txt").write_text("a text that nobody reads")
    inner = {"loop": "supervised", "model": "tiny", "data": {"text": "text.txt"}}
    return RunConfig.from_dict({"inner": inner, "log": log}, folder)


def test_log_to_is_checked_where_the_config_is_read_and_by_plan(tmp_path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"log.to has 'mlflow'.*wandb, trackio, tensorboard"):
        config(tmp_path, to=["mlflow"])
    with pytest.raises(ConfigError, match=r"log.samples"):
        config(tmp_path, samples=65)
    monkeypatch.setattr("diloco.views.trackers.make.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"run.toml: log.to has wandb: .*pip install 'serverless-diloco\[wandb\]'"):
        preflight(config(tmp_path, to=["wandb"]), "run.toml", "", [])


def test_log_to_is_in_run_json_where_there_is_any(tmp_path) -> None:
    assert "log" not in config(tmp_path).to_dict()
    with_log = config(tmp_path, to=["wandb"], project="sums")
    assert RunConfig.from_dict(with_log.to_dict(), tmp_path).log == with_log.log
    assert with_log.mathematics() == config(tmp_path).mathematics()
    words = track_command("s3://b/mine", with_log.log)
    assert words[4:8] == ["track", "s3://b/mine", "--to", "wandb"] and "--follow" in words and "sums" in words


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.kill(os.getpid(), 9)",
        pytest.param("import sys; sys.exit('no login')", marks=pytest.mark.slow),
        pytest.param("0", marks=pytest.mark.slow),
    ],
)
def test_a_run_ends_as_it_would_whatever_its_tracker_does(tmp_path, monkeypatch, code) -> None:
    monkeypatch.setattr(tracking, "track_command", lambda url, log: [sys.executable, "-c", code])
    run = toys.found(tmp_path, log={"to": ["tensorboard"]})
    executor = LocalProcessExecutor([toys.HERE])
    try:
        outcome = toys.supervisor_for(run, executor).supervise()
    finally:
        executor.close()
    report = read_report(run.store)
    assert outcome.code == exitcodes.DONE and report.head == 6
    warned = [e for e in report.of_kind("warning") if e.get("kind") == "trackers"]
    assert len(warned) == (code != "0")


WRITES = """
import pathlib, signal, sys, time
def end(*_): pathlib.Path("left").touch(); sys.exit(0)
signal.signal(signal.SIGTERM, end)
pathlib.Path("ready").touch()
time.sleep(600)
"""


def test_the_end_asks_it_to_leave(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    child = Child(tmp_path, WRITES)
    child.until((tmp_path / "ready").exists)
    child.end(done=False)
    assert (tmp_path / "left").exists() and child.pid == 0 and not child.warned


def test_a_child_that_hangs_is_killed_with_its_helpers(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking, "FINISH_S", 0.05)
    monkeypatch.setattr(tracking, "LEAVE_S", 0.3)
    code = (
        "import pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path('part').write_text(str(helper.pid)); pathlib.Path('part').rename('helper')\n"
        "time.sleep(600)\n"
    )
    child = Child(tmp_path, code)
    child.until((tmp_path / "helper").exists)
    helper = int((tmp_path / "helper").read_text())
    pid, started, helper_started = child.pid, start_ticks(child.pid) or 0, start_ticks(helper) or 0
    child.end(done=True)
    child.until(lambda: not is_alive(pid, started) and not is_alive(helper, helper_started))
    child.hours.ahead = 1e6
    child.tick()
    assert child.pid == 0, "nothing is started after the end"
