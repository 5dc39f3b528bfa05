"""A chain with a hole: `report`, `status` and `costs` say so, and `gc` deletes nothing."""

import json
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from diloco.runlog.reached import lost_commit
from executors.cli.main import main
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.clock import SystemClock
from rendezvous.records.records import Beat, Leave, WireError
from rendezvous.stores.files import FileStore
from tests.support.puppets import PuppetRun

STEPS = 8
CLOCK = SystemClock()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> PuppetRun:
    run = PuppetRun(tmp_path_factory.mktemp("played"), fleet={"keep": "all"}, outer={"snapshot_every": 2})
    run.rounds(STEPS)
    beat = Beat(slot="r00", generation=1, n=9, phase="left", step=STEPS, inner=0, rate=0.0, at=1.0)
    run.run.store.put(layout.beat_key("r00"), beat.encode())
    write_control(run.run.store, CLOCK, stop=True)
    return run


@pytest.fixture
def run(played: PuppetRun, tmp_path: Path) -> Path:
    return Path(shutil.copytree(played.folder, tmp_path / "run"))


def told(verb: str, run: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    code = main([verb, str(run), *more])
    out = capsys.readouterr()
    return code, out.out + out.err


def key(run: Path, t: int) -> Path:
    return run / layout.commit_key(t)


@pytest.mark.parametrize("gone", [[2], [2, 3, 4], [0]])
def test_a_hole_is_no_end_of_the_chain(run: Path, capsys: pytest.CaptureFixture[str], gone: list[int]) -> None:
    """The report said "none lost, the chain has no gap", and status nothing."""
    for t in gone:
        key(run, t).unlink()
    missing = f"commit {gone[0]} is missing, though "
    code, report = told("report", run, capsys, "--to", str(run.parent / "page"))
    assert code == 0 and f"NO  {gone[0]} of 100 outer steps committed so far, commit {gone[0]} is" in report, report
    assert "none lost" not in report
    assert f"! {missing}" in told("status", run, capsys)[1]
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    code, why = told("gc", run, capsys, "--keep", "window", "--yes")
    assert code == 2 and missing in why and "Nothing was deleted" in why
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("gone", [[0], list(range(STEPS))])
def test_steps_of_a_log_are_no_commits(run: Path, capsys: pytest.CaptureFixture[str], gone: list[int]) -> None:
    """Without a commit that can be read, the report took the log's steps for the chain's."""
    line = json.dumps({"at": 2.0, "event": "step", "step": STEPS - 1, "reward": 1.0, "inner": 3}) + "\n"
    (run / "log" / "r00-1").mkdir(parents=True)
    (run / layout.log_key("r00", 1, 0)).write_text(line)
    for t in gone:
        key(run, t).unlink()
    report = told("report", run, capsys, "--to", str(run.parent / "page"))[1]
    assert "commit 0 is missing, though " in report and "none lost" not in report
    assert "! commit 0 is missing, though " in told("status", run, capsys)[1]


def test_a_run_over_a_lighthouse_has_lost_no_commit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It writes none; `explain` and `blame` told its owner to restore them from a backup, and then `verify`, too."""
    record = json.loads((run / layout.RUN).read_text())
    record["config"]["rendezvous"] = "lighthouse://127.0.0.1:29510"
    (run / layout.RUN).write_text(json.dumps(record))
    for t in range(STEPS):
        key(run, t).unlink()
    for verb in (("explain", "--step", "0"), ("blame", "--no-metric"), ("export", "--to", str(run.parent / "model"))):
        assert "is missing" not in told(verb[0], run, capsys, *verb[1:])[1]
    (run / "log" / "r00-1").mkdir(parents=True)
    line = json.dumps({"at": 2.0, "event": "step", "step": STEPS - 1, "theta": "0"}) + "\n"
    for logged in ("", line):
        (run / layout.log_key("r00", 1, 0)).write_text(logged)
        for looks in (("status",), ("report", "--to", str(run.parent / "page"))):
            assert "is missing" not in told(looks[0], run, capsys, *looks[1:])[1]
        code, said = told("verify", run, capsys)
        assert code == 0 and "is missing" not in said
        assert "not checked: the outer steps: replicas average over a lighthouse, which records none" in said
        assert "differs" not in said
    (run / layout.RUN).write_text("[[]]")
    with pytest.raises(WireError, match=f"{run}/run.json"):  # before: "this run/run.json"
        lost_commit(FileStore(run))


def test_a_listing_shows_a_hole_below_what_an_earlier_look_has_read(run: Path) -> None:
    """A cached commit was taken for one that stands."""
    key(run, 2).unlink()
    found: Any = lost_commit(FileStore(run), STEPS)
    assert (found.step, found.reached, found.witness) == (2, STEPS, layout.commit_key(STEPS - 1))


@pytest.mark.parametrize(
    ("gone", "verb", "more"),
    [
        (STEPS - 1, "explain", ["--step", str(STEPS - 1)]),
        (STEPS - 1, "export", ["--to", "out"]),
        (2, "blame", ["--from", "0", "--to", str(STEPS)]),
    ],
)
def test_commands_that_end_at_a_hole_say_so(
    run: Path, capsys: pytest.CaptureFixture[str], gone: int, verb: str, more: list[str]
) -> None:
    """They said that the step was not taken, exported an older one, or fell over it."""
    leave = Leave("r00", 1, STEPS, "0" * 32, "done", "n", 1.0)
    (run / "leave").mkdir(exist_ok=True)
    (run / layout.leave_key("r00", 1)).write_bytes(leave.encode())
    for snapshot in (run / "snapshots").glob("*"):
        if int(snapshot.name) > gone:
            shutil.rmtree(snapshot)
    key(run, gone).unlink()
    with chdir(run.parent):
        code, why = told(verb, run, capsys, *more)
    assert code != 0 and f"commit {gone} is missing, though " in why and "Traceback" not in why, why
    assert "is of step" not in why and f" shows step {STEPS} reached" in why, "before: θ of step 8 is of step 8"
    assert not (run.parent / "out").exists()


def test_a_finished_run_with_a_hole_starts_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was finished, and then three replicas were started."""
    write_control(FileStore(run), CLOCK, steps=STEPS, resume=True)
    key(run, 2).unlink()
    code, why = told("resume", run, capsys, "--yes")
    assert code != 0 and "commit 2 is missing, though " in why and "started" not in why


def test_commits_in_each_others_place(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two, three = key(run, 2).read_bytes(), key(run, 3).read_bytes()
    key(run, 2).write_bytes(three)
    key(run, 3).write_bytes(two)
    assert "! commit 2 names step 3" in told("status", run, capsys)[1]
    assert told("gc", run, capsys, "--keep", "window", "--yes")[0] == 2


def test_an_altered_commit_is_a_trouble_of_status_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = json.loads(key(run, 2).read_bytes())
    key(run, 2).write_text(json.dumps({**raw, "at": 1.0}, sort_keys=True, separators=(",", ":")))
    assert "! commit 3 does not follow commit 2" in told("status", run, capsys)[1]
    code, why = told("gc", run, capsys, "--keep", "window", "--yes")
    assert code == 2 and "commit 3 does not follow commit 2" in why


@pytest.mark.parametrize(
    "at",
    ["steps/0000000011/commit.json", "steps/9999999999/commit.json", "snapshots/0000000099/manifest.json",
     "steps/0000000099/offer/r00.0.json", "steps/00000000099/offer/x", "leave/README"],
)  # fmt: skip
def test_what_is_no_record_of_its_key_shows_no_hole(run: Path, at: str) -> None:
    (run / at).parent.mkdir(parents=True, exist_ok=True)
    copied = {"snapshots": layout.snapshot_key(0), "leave": layout.RUN}.get(at.split("/")[0], layout.commit_key(4))
    (run / at).write_bytes((run / copied).read_bytes())
    assert lost_commit(FileStore(run), STEPS) is None


def test_a_run_that_goes_on_during_the_look_has_no_hole(played: PuppetRun) -> None:
    assert lost_commit(FileStore(played.folder), 3) is None  # five more were written since the caller looked


def test_a_leave_record_alone_shows_the_step_that_was_reached(run: Path) -> None:
    leave = Leave("r00", 1, STEPS + 2, "0" * 32, "done", "n", 1.0)
    (run / "leave").mkdir(exist_ok=True)
    (run / layout.leave_key("r00", 1)).write_bytes(leave.encode())
    found: Any = lost_commit(FileStore(run), STEPS)
    assert (found.step, found.reached, found.witness) == (STEPS, STEPS + 2, "leave/r00-1.json")


def test_costs_count_commits_and_no_stray_object(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for t in range(5, STEPS):
        key(run, t).unlink()
    key(run, 7).write_bytes(key(run, 4).read_bytes())
    beat = run / layout.beat_key("r00")
    beat.write_bytes(beat.read_bytes().replace(b'"step":8', b'"step":5'))
    assert "; 5 outer steps" in told("costs", run, capsys)[1]


def test_more_steps_than_are_wanted_are_not_said_to_be_of_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It said "8 of 3 outer steps"."""
    write_control(FileStore(run), CLOCK, steps=3)
    said = told("report", run, capsys, "--to", str(run.parent / "page"))[1]
    assert f"ok  {STEPS} outer steps committed" in said


def test_a_run_that_has_lost_its_snapshots_is_not_told_to_wait(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before: "this run has no readable snapshot yet; wait for its first outer step", after its last one."""
    shutil.rmtree(run / layout.SNAPSHOTS)
    code, text = told("export", run, capsys, "--to", str(run.parent / "out"))
    assert code == 2 and "though outer steps are committed" in text and "Restore the snapshots" in text, text
