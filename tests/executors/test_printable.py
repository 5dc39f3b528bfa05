"""A writer into a bucket steers no terminal: what a command prints is plain text."""

import io
import json
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from diloco.process.output import PlainOutput, print_plainly, survive_lost_output
from diloco.runlog.opening import open_view
from diloco.runlog.reader import shown
from diloco.runlog.scope import COSTS
from executors.cli.checking import verbs
from executors.cli.looking import lines, logs, status
from executors.cli.main import main
from executors.cli.watch.app import WatchApp
from executors.cli.watch.looks import RunLooks
from executors.cli.watch.windows import TextSource, TextWindow
from inner.printable import printable
from rendezvous.clock import SystemClock
from tests.executors.test_watch_view import play, screen, until, whole, window_text
from tests.support.puppets import PuppetRun

STEERING = "\x1b[2J\x1b]0;owned\x07\x9b1A\u202eba\u2066\r\x08\x7f"
UNPLAIN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run in whose name, config, beats, logs and rollouts such text stands."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = PuppetRun(tmp_path, replicas=2)
    run.rounds(2)
    record = json.loads((path := run.folder / "run.json").read_text())
    record["config"]["name"] = f"mine{STEERING}"
    path.write_text(json.dumps(record))
    for path in run.folder.glob("alive/*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "note": f"n{STEERING}", "host": f"h{STEERING}"}))
    (log := run.folder / "log" / "r00-1").mkdir(parents=True)
    events = [{"at": 1.0, "event": kind, "text": f"t{STEERING}", "path": STEERING} for kind in ("warning", "crashed")]
    (log / "000000.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run.url


@pytest.mark.parametrize(
    "argv",
    [
        ["status"], ["report", "--to", "OUT"], ["costs"], ["logs", "r00-1"], ["diff", "RUN"],
        ["explain", "--step", "0"], ["verify"],
    ],
)  # fmt: skip
def test_no_command_prints_it(written: str, tmp_path: Path, capsys: Any, argv: list[str]) -> None:
    main([{"OUT": str(tmp_path), "RUN": written}.get(word, word) for word in [argv[0], written, *argv[1:]]])
    told = capsys.readouterr()
    assert told.out and not UNPLAIN.search(told.out + told.err)


def test_a_log_is_plain_lines(written: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A replica's own output, with all that a rollout or a library wrote there."""

    @contextmanager
    def log_of(*_: Any) -> Any:
        yield logs.bucket_log((f"a{STEERING}b\tc", "tür 漢字 😀"))

    monkeypatch.setattr(logs, "log_of", log_of)
    for more in ([], ["-f"]):
        assert main(["logs", written, "r00", *more]) == 0
        told = capsys.readouterr().out
        assert not UNPLAIN.search(told) and told.startswith("a\ufffd[2J") and told.endswith("b\tc\ntür 漢字 😀\n")


def test_neither_an_error_nor_a_defect_prints_it(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fail(_: Any) -> int:
        raise OSError(STEERING)

    monkeypatch.setattr(verbs, "_objectives", fail)
    assert main(["objectives"]) == 2
    assert isinstance(sys.stderr, PlainOutput), "a traceback goes the same way"
    assert "owned" in (told := capsys.readouterr().err) and not UNPLAIN.search(told)


def test_the_table_that_draws_over_itself_has_no_escapes_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(status, "status_table", lambda *_, **__: [f"a{STEERING}b"])
    view = lines.view_for(PlainOutput(out))  # type: ignore[arg-type]
    view.show(None)  # type: ignore[arg-type]
    assert out.getvalue() == f"{printable(f'a{STEERING}b')}\x1b[K\n\x1b[J"


def test_the_terminal_of_watch_draws_it_plain(written: str) -> None:
    looks = RunLooks(open_view(written, COSTS), SystemClock())

    source = TextSource(f"log{STEERING}", lambda: [f"line{STEERING}"])

    async def script(app: WatchApp, pilot: Any) -> None:
        assert not UNPLAIN.search("".join(screen(app)))
        app.push_screen(TextWindow(source))
        await until(pilot, lambda: bool(app.screen.pages))
        await pilot.pause()
        drawn = window_text(app)
        assert "line[2J" in drawn and "log[2J" in drawn and not UNPLAIN.search("".join(screen(app)))

    play(looks, (160, 50), script, whole(looks))


def test_a_stream_stays_plain_when_its_reader_may_go(monkeypatch: pytest.MonkeyPatch) -> None:
    here = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", here)
    monkeypatch.setattr(sys, "__stdout__", here)
    print_plainly()
    print_plainly()
    survive_lost_output()
    assert isinstance(sys.stdout, PlainOutput) and not isinstance(sys.stdout.raw, PlainOutput)
    assert sys.stdout.raw is not here


def test_code_that_closes_the_output_ends_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reward's `sys.stdout.close()`, the replica's next line raised ValueError."""
    here = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", here)
    monkeypatch.setattr(sys, "__stdout__", here)
    survive_lost_output("stdout")
    sys.stdout.close()
    print(end="", flush=True)
    assert not sys.stdout.closed


@pytest.mark.parametrize(
    ("text", "plain"),
    [("a\nb", "a b"), ("\x1b\u202e", "\ufffd\ufffd"), ("\u00a0\u2028\t", "   "), ("é漢😀", "é漢😀"), ("", "")],
)  # fmt: skip
def test_one_line_of_plain_characters(text: str, plain: str) -> None:
    assert printable(text) == plain and shown({text: [text]}) == {plain: [plain]}
    assert printable(f"{text}\n", keep="\n") == (plain.replace("a b", "a\nb")) + "\n"
