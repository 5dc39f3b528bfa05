"""Commands that look at a run, where there is none, half of one, or a newer release's: they name it and say what to do.

                      no folder   empty folder   run.json cut off   newer wire version   no control records
    status                ✓            ✓                ✓                   ✓            says what to restore
    verify                ✓            ✓                ✓                   ✓            works
    explain, blame        ✓            ✓                ✓                   ✓            works
    bisect, gc, diff      ✓            ✓                ✓                   ✓            works
    export, report        ✓            ✓                ✓                   ✓            works

Elsewhere: logs with odd lines (diloco/test_foreign_objects), buckets that may only be read (diloco/test_verify,
executors/test_web), collected steps (diloco/test_blame, diloco/test_verify), forks of another model (diloco/test_fork),
judges that agree at both ends (diloco/test_blame), webhooks that hang (executors/test_alerts).
"""

import json
import shutil
from pathlib import Path

import pytest

from diloco.run.library import ensure_slot
from executors.cli.main import main
from rendezvous.clock import SystemClock
from rendezvous.stores.open import open_store
from tests.support.puppets import PuppetRun

COMMANDS = {
    "status": ["status", "RUN"],
    "verify": ["verify", "RUN"],
    "explain": ["explain", "RUN", "--step", "0"],
    "blame": ["blame", "RUN", "--by", "step"],
    "bisect": ["bisect", "RUN", "--", "true"],
    "gc": ["gc", "RUN", "--keep", "window", "--dry-run"],
    "diff": ["diff", "RUN", "GOOD"],
    "diff, the other": ["diff", "GOOD", "RUN"],
    "export": ["export", "RUN", "--to", "OUT"],
    "report": ["report", "RUN"],
}
CASES = {
    "no folder": "there is no run at",
    "empty folder": "there is no run at",
    "cut off": "cannot be read, so the run cannot be read",
    "newer": "found a run of version 99; run the release that started this run",
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> PuppetRun:
    run = PuppetRun(tmp_path_factory.mktemp("good"))
    run.rounds(2)
    return run


def spoiled(good: PuppetRun, folder: Path, case: str) -> Path:
    bad = folder / "bad"
    if case == "empty folder":
        bad.mkdir()
    elif case != "no folder":
        shutil.copytree(good.folder, bad)
        body = (bad / "run.json").read_bytes()
        newer = json.dumps({**json.loads(body), "wire": 99}).encode()
        (bad / "run.json").write_bytes(body[:50] if case == "cut off" else newer)
    return bad


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("command", COMMANDS)
def test_it_says_which_run_what_it_is_and_what_to_do(
    good: PuppetRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, case: str
) -> None:
    bad = spoiled(good, tmp_path, case)
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    words = {"RUN": str(bad), "GOOD": good.url, "OUT": str(tmp_path / "out")}
    assert main([words.get(word, word) for word in COMMANDS[command]]) == 2
    told = capsys.readouterr()
    assert CASES[case] in told.err and str(bad) in told.err and "Traceback" not in told.err, told.err
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before, "nothing was written"


@pytest.mark.parametrize("command", ["verify", "explain", "diff", "export"])
def test_without_control_records_it_can_still_be_looked_back_at(good: PuppetRun, tmp_path: Path, command: str) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(good.folder, bad)
    shutil.rmtree(bad / "control")
    words = {"RUN": str(bad), "GOOD": good.url, "OUT": str(tmp_path / "out")}
    assert main([words.get(word, word) for word in COMMANDS[command]]) == 0


def test_a_run_that_a_script_has_not_joined_is_not_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script whose first start failed: `status` said that run.json is lost, and to restore it from a backup."""
    ensure_slot(open_store(f"file://{tmp_path}/run"), SystemClock(), "r00", replicas=1, min_replicas=1, steps=4)
    assert main(["status", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert "run.json is not there, though control/000000.json is. A script with DiLoCoCallback or make_diloco" in told


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_without_run_json_is_lost_and_neither_missing_nor_of_the_short_form(
    good: PuppetRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, started: bool
) -> None:
    """`status` said "started by launch_replicas, so there is no outer step", and ended with 0."""
    bad = tmp_path / "bad"
    shutil.copytree(good.folder, bad)
    (bad / "run.json").unlink()
    if started:  # by this machine's supervisor
        (bad / "processes").mkdir(exist_ok=True)
        (bad / "processes/r00.1.json").write_text("{}")
    words = {"RUN": str(bad), "GOOD": good.url, "OUT": str(tmp_path / "out")}
    assert main([words.get(word, word) for word in COMMANDS[command]]) == 2
    assert "run.json is lost, though" in capsys.readouterr().err
