"""Every viewer on every kind of run: sealed, LoRA, fragments, codecs, shards, late work, collected steps; none writes.

    status · costs · report · diff · watch (terminal, lines, page) · explain       the run's bytes before = after

And `watch --publish` under kill -9: it writes below page/, and nothing else of the run changes, whenever it dies.
"""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.model.give_back import collect, plan_gc
from diloco.run.record import read_run
from diloco.runlog.opening import open_view
from diloco.runlog.scope import COSTS
from executors.cli.looking.lines import key_values
from executors.cli.main import main
from executors.cli.watch.app import WatchApp
from executors.cli.watch.looks import RunLooks
from executors.cli.watch.run import write_lines
from executors.cli.web.run import PageLooks
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.clock import SystemClock
from tests.diloco.test_audit_kinds import played  # noqa: F401 - a fixture
from tests.executors.test_watch_view import play, screen, whole
from tests.support.puppets import PuppetRun

COMMANDS = {
    "status": (["status", "RUN"], "outer step 6 of 100"),
    "costs": (["costs", "RUN"], "6 outer steps"),
    "report": (["report", "RUN", "--to", "OUT"], "6 of 100 outer steps"),
    "diff": (["diff", "RUN", "RUN"], "the configs and files are the same"),
    "explain": (["explain", "RUN", "--step", "1"], "missing: r02: its offer came"),
    "verify": (["verify", "RUN"], "computed again: 0 to 6"),
}


def files_of(run: PuppetRun) -> dict[str, bytes]:
    return {p.relative_to(run.folder).as_posix(): p.read_bytes() for p in run.folder.rglob("*") if p.is_file()}


@pytest.mark.quick(2)
def test_commands_see_every_kind_of_run(played: PuppetRun, tmp_path: Path, capsys) -> None:  # noqa: F811
    before = files_of(played)
    for name, (argv, words) in COMMANDS.items():
        folder = tmp_path / "out"
        assert main([{"RUN": played.url, "OUT": str(folder)}.get(word, word) for word in argv]) == 0, name
        assert words in capsys.readouterr().out, name
    assert "counted" in (tmp_path / "out" / "report.html").read_text()
    assert files_of(played) == before


@pytest.mark.quick(2)
def test_the_views_see_every_kind_of_run(played: PuppetRun) -> None:  # noqa: F811
    before = files_of(played)
    page = PageLooks(open_view(played.url, COSTS), SystemClock())
    page.look()
    page.look()
    head = json.loads(page.files["head.json"])
    assert head["step"] == 6 and len(json.loads(page.files["0.json"])["who"]) == 6

    looks = RunLooks(open_view(played.url, COSTS), SystemClock())

    async def script(app: WatchApp, pilot: object) -> None:
        text = "\n".join(screen(app))
        assert "outer step 6 of 100" in text and all(f"{slot}-1" in text for slot in ("r00", "r01", "r02")), text

    play(looks, (160, 50), script, whole(looks))
    assert files_of(played) == before


def test_a_run_whose_steps_were_collected_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = PuppetRun(tmp_path, fleet={"keep": "all"})
    run.rounds(12)
    found = read_run(run.url)
    write_control(found.store, SystemClock(), stop=True)
    collect(found, plan_gc(found, "window", SystemClock()), SystemClock())
    before = files_of(run)
    for argv in (["status", run.url], ["report", run.url, "--to", str(tmp_path)], ["diff", run.url, run.url]):
        assert main(argv) == 0
    assert main(["explain", run.url, "--step", "1"]) == 0 and "not known: " in capsys.readouterr().out
    assert main(["export", run.url, "--step", "1", "--to", str(tmp_path / "x")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "θ_1 cannot be" in told and "reaches back to step" in told, told
    out = io.StringIO()
    assert write_lines(RunLooks(open_view(run.url, COSTS), SystemClock()), out, key_values) == 0
    assert "step=11" in out.getvalue()
    assert files_of(run) == before


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 3))])
def test_a_publisher_that_is_killed_leaves_the_run_as_it_was(tmp_path: Path, after: int) -> None:
    run = PuppetRun(tmp_path)
    run.rounds(3)
    before = files_of(run)
    publish = (
        "import os, signal, sys\n"
        "from executors.cli.main import main\n"
        "from rendezvous.stores.files import FileStore\n"
        f"left, put = [{after}], FileStore.put\n"
        "def mortal(self, key, body):\n"
        "    left[0] -= 1\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if left[0] < 0 else put(self, key, body)\n"
        "FileStore.put = mortal\n"
        f"sys.exit(main(['report', {run.url!r}, '--to', {str(tmp_path / 'out')!r}, '--publish']))\n"
    )
    died = subprocess.run([sys.executable, "-c", publish], capture_output=True, text=True, env={**os.environ})
    assert died.returncode == (-signal.SIGKILL if after < 3 else 0), died.stderr
    written = files_of(run)
    assert {key: body for key, body in written.items() if not key.startswith(layout.PAGE)} == before
    assert len([key for key in written if key.startswith(layout.PAGE)]) == after
    again = [sys.executable, "-m", "executors.cli.main", "report", run.url, "--to", str(tmp_path), "--publish"]
    assert subprocess.run(again, capture_output=True).returncode == 0
    assert {f"{layout.PAGE}{name}" for name in ("index.html", "data/0.json", "data/head.json")} <= files_of(run).keys()
    assert read_run(run.url).record.nonce == run.run.record.nonce
