"""Commands on a run in a bucket that has a bad day, over the wire: the same words, codes and patience for all of them.

    may only be read (403 for every write)    looks work; drain, scale, stop and --publish say so, and what still works
    503 for a moment                          no effect, except a line on stderr
    503 for good                              exit code 75, what it is and what to do; within the patience
    no key (403 for everything)               exit code 2 at once
    silence                                   a line on stderr; Ctrl-C ends the command

The rest of the commands is marked slow.
"""

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from executors.cli import opening
from executors.cli.main import main
from executors.preflight import quote
from rendezvous.stores.open import open_store
from tests.executors.test_unreadable_runs import COMMANDS
from tests.support.puppets import PuppetRun
from tests.support.s3_server import S3Server

FOREVER = 10**9
URL = "s3://bucket/run"
LOOKS = {
    "status": r"outer step 3 of 100",
    "verify": r"computed again: 0 to 3",
    "explain": r"the outer step moved",
    "blame": r"without step",
    "gc": r"nothing was deleted",
    "diff": r"the configs and files are the same",
    "diff, the other": r"the configs and files are the same",
    "export": r"wrote the model after 3 outer steps",
    "report": r"3 of 100 outer steps",
    "costs": r"so far",
}
CHANGES = {
    "drain": ["drain", "RUN", "r00"],
    "scale": ["scale", "RUN", "2"],
    "stop": ["stop", "RUN", "--grace", "0"],
    "publish": ["report", "RUN", "--to", "OUT", "--publish"],
}
VIEWS = {"watch": ["watch", "RUN"], "web": ["watch", "RUN", "--web"]}
ALL = {**COMMANDS, **CHANGES, "costs": ["costs", "RUN"], "report": ["report", "RUN", "--to", "OUT"], **VIEWS}
FAST = ("status", "verify", "drain", "publish")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> PuppetRun:
    run = PuppetRun(tmp_path_factory.mktemp("good"))
    run.rounds(3)
    return run


@pytest.fixture
def s3(good: PuppetRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    keys = {"AWS_ACCESS_KEY_ID": "AKIDTEST", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1"}
    with S3Server(access_key="AKIDTEST") as server:
        for name, value in {**keys, "AWS_ENDPOINT_URL": server.endpoint}.items():
            monkeypatch.setenv(name, value)
        store = open_store(URL)
        for path in (p for p in good.folder.rglob("*") if p.is_file()):
            store.put(path.relative_to(good.folder).as_posix(), path.read_bytes())
        yield server


def called(command: str, good: PuppetRun, folder: Path) -> int:
    words = {"RUN": URL, "GOOD": good.url, "OUT": str(folder / "out")}
    return main([words.get(word, word) for word in ALL[command]])


def some_slow(commands: dict[str, object]) -> list[object]:
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in commands]


def test_a_bucket_that_may_only_be_read(good: PuppetRun, s3: S3Server, tmp_path: Path, capsys) -> None:
    s3.fault("403", op="Put|Post|Delete|Create", times=FOREVER)
    for command, words in LOOKS.items():
        assert called(command, good, tmp_path) == 0, (command, capsys.readouterr())
        assert re.search(words, capsys.readouterr().out), command
    for command in CHANGES:
        assert called(command, good, tmp_path) == 2, command
        told = capsys.readouterr().err
        assert "403 AccessDenied. The store does not let this key" in told, (command, told)
        assert command != "publish" or "still works: diloco watch RUN --web, diloco report RUN" in told


@pytest.mark.parametrize("command", some_slow({**LOOKS, **CHANGES}))
def test_a_bad_moment_is_waited_for(good: PuppetRun, s3: S3Server, tmp_path: Path, capsys, command: str) -> None:
    s3.fault("503", key="steps/0000000000/commit", times=5)  # one more than the client itself tries
    assert called(command, good, tmp_path) == 0, capsys.readouterr()
    told = capsys.readouterr()
    assert "503 SlowDown; asking again for 20 s" in told.err and "Traceback" not in told.err
    assert re.search(LOOKS.get(command, "."), told.out)


@pytest.mark.parametrize("command", some_slow(ALL))
def test_a_bucket_without_an_answer_is_no_mistake_of_the_command(
    good: PuppetRun, s3: S3Server, tmp_path: Path, monkeypatch, capsys, command: str
) -> None:
    monkeypatch.setattr(opening, "PATIENCE_S", 0.0)
    s3.fault("503", times=FOREVER)
    assert called(command, good, tmp_path) == 75
    told = capsys.readouterr()
    assert "503 SlowDown" in told.err and "repeat it later" in told.err, told.err
    assert "Traceback" not in told.err and not told.out


@pytest.mark.slow
@pytest.mark.parametrize("at", ["steps/.*mean", "snapshots", "steps/.*bin"])
def test_one_that_fails_in_the_middle_says_so_too(
    good: PuppetRun, s3: S3Server, tmp_path: Path, monkeypatch, capsys, at: str
) -> None:
    monkeypatch.setattr(opening, "PATIENCE_S", 0.1)
    monkeypatch.setattr("diloco.model.export.STATE_PATIENCE_S", 0.1)
    s3.fault("503", key=at, times=FOREVER)
    for command in ("verify", "export"):
        code = called(command, good, tmp_path)
        told = capsys.readouterr()
        assert "Traceback" not in told.err
        if code:
            assert code == 75 and "503 SlowDown" in told.err, (command, code, told)


@pytest.mark.parametrize("command", some_slow(ALL))
def test_a_key_that_may_not_read_is_said_at_once(
    good: PuppetRun, s3: S3Server, tmp_path: Path, capsys, command: str
) -> None:
    s3.fault("403", times=FOREVER)
    assert called(command, good, tmp_path) == 2
    assert "403 AccessDenied. The store does not let this key read there" in capsys.readouterr().err


def test_a_silent_bucket_is_named_while_the_command_waits(
    good: PuppetRun, s3: S3Server, tmp_path: Path, monkeypatch, capsys
) -> None:
    said = threading.Event()
    monkeypatch.setattr(opening, "NOTICE_S", 0.01)
    monkeypatch.setattr(opening, "say", lambda text: (print(text, file=sys.stderr), said.set()))
    s3.fault("slow", op="GetObject", until=said)
    assert called("status", good, tmp_path) == 0
    assert "waiting for the bucket: 0 s without a result" in capsys.readouterr().err


def test_a_silent_platform_is_named_while_plan_waits(tmp_path: Path, monkeypatch, capsys) -> None:
    """Before: without a network, `plan` for Modal said nothing for two minutes."""
    said, real = threading.Event(), quote.quote_start
    monkeypatch.setattr(opening, "NOTICE_S", 0.01)
    monkeypatch.setattr(opening, "say", lambda text: (print(text, file=sys.stderr), said.set()))
    monkeypatch.setattr(quote, "quote_start", lambda *args, **more: (said.wait(30), real(*args, **more))[1])
    (tmp_path / "run.toml").write_text('name = "quiet"\n')
    assert main(["plan", str(tmp_path / "run.toml")]) == 0
    assert "waiting for the platform: 0 s without a result" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "stop"])  # requests from other threads, and from the main thread
def test_ctrl_c_ends_a_command_that_waits_for_a_silent_bucket(s3: S3Server, monkeypatch, command: str) -> None:
    """Seen: nothing happened for up to two minutes, and the next Ctrl-C printed a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        words = [sys.executable, "-m", "executors.cli", command, URL]
        # this process may ignore SIGINT (a job in the background), which children inherit
        hears = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, preexec_fn=hears)
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(1)  # the request is under way
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=25)
    assert process.returncode == 130 and "Traceback" not in told
