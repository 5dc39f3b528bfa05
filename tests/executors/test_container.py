"""platforms/container.py with real processes: what a rented container does, without the platform around it."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from diloco.process import exitcodes, processes
from executors.platforms import container
from executors.platforms.base import REPLICA, ReplicaSpec
from executors.platforms.container import (
    CRASHED,
    ENDED,
    PIECE,
    _time_left,
    end_lines,
    read_end,
    replica_lines,
    run_replica,
    why_unreachable,
)
from executors.platforms.time_limit import staggered_s
from rendezvous.layout import slot_name
from tests.support.s3_server import S3Server

HERE = __name__
WAIT_S = 120.0  # only a hang takes so long

# -------------------------------------------------------------------- what the children do


@pytest.fixture(autouse=True)
def output_is_buffered_as_it_is_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


def greets(name: str, folder: str = "") -> dict[str, Any]:
    print(f"hello {name}")
    return {"name": name, "place": os.environ["DILOCO_PLACE"], "word": os.environ.get("WORD"), "pid": os.getpid()}


def no_proxy_here() -> list[str | None]:
    return [os.environ.get("NO_PROXY"), os.environ.get("no_proxy")]


def long_answer(length: int) -> str:
    return "é" * length


def crashes() -> None:
    for i in range(30):
        print("line", i)
    raise ValueError("this is how it ends")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def polite(folder: str, code: int = exitcodes.LEFT) -> None:
    signal.signal(signal.SIGTERM, lambda *_: _goodbye(folder, code))
    _sleep(folder)


def stubborn(folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _sleep(folder)


def finishes_when_asked(folder: str) -> str:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    (Path(folder) / "pid").write_text(str(os.getpid()))
    while not asked:
        time.sleep(0.01)
    return "done after all"


def _goodbye(folder: str, code: int) -> None:
    (Path(folder) / "goodbye").touch()
    print("goodbye", flush=True)
    sys.exit(code)


def _sleep(folder: str) -> None:
    (Path(folder) / "pid").write_text(str(os.getpid()))
    time.sleep(600)


# -------------------------------------------------------------------- the tests


def spec(function: str, **more: Any) -> ReplicaSpec:
    kwargs = {k: more.pop(k) for k in list(more) if k in ("folder", "name", "length", "code")}
    return ReplicaSpec("s3://bucket/run", "r01", 3, f"{HERE}:{function}", kwargs=kwargs, **more)


def start(wanted: ReplicaSpec) -> subprocess.Popen[str]:
    """As a platform that starts a command does."""
    command = [sys.executable, "-m", "executors.platforms.container", json.dumps(wanted.to_dict()), "somewhere"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def child_of(folder: Path) -> int:
    wait_for(lambda: (folder / "pid").exists() and bool((folder / "pid").read_text()))
    return int((folder / "pid").read_text())


def wait_for(happens: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.01)


def gone(pid: int) -> bool:
    started = processes.start_ticks(pid)
    return started is None or not processes.is_alive(pid, started)


def ended(container: subprocess.Popen[str]) -> tuple[dict[str, Any], list[str]]:
    """(the end that its log tells, what the replica said)"""
    lines = container.communicate(timeout=WAIT_S)[0].splitlines()
    end = read_end(lines)
    assert end is not None and lines[0] == "diloco-started: r01.3" and lines[-1].startswith(ENDED)
    return end, replica_lines(lines)


def test_it_runs_the_entry_point_in_a_process_of_its_own() -> None:
    end = run_replica(spec("greets", name="you", env={"WORD": "kept"}).to_dict(), "somewhere")
    assert (end["exit_code"], end["reason"], end["tail"]) == (0, "exit code 0 (done)", [])
    assert end["value"] == {"name": "you", "place": "somewhere/r01.3", "word": "kept", "pid": end["value"]["pid"]}
    assert end["value"]["pid"] != os.getpid() and json.loads(json.dumps(end)) == end


def test_a_crash_is_an_exit_code_and_its_last_lines() -> None:
    end = run_replica(spec("crashes").to_dict(), "somewhere")
    assert (end["exit_code"], end["value"], len(end["tail"])) == (1, None, 12)
    assert end["tail"][-1] == "ValueError: this is how it ends" and "line 29" in end["tail"]


class Mute(io.StringIO):
    """An output of ours that takes nothing."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str, /) -> int:
        raise self._error


def talks(length: int) -> int:
    for i in range(length):
        print(i, "é" * 100)
    return length


@pytest.mark.quick(1)
@pytest.mark.timeout(WAIT_S)
@pytest.mark.parametrize(
    "error",
    [UnicodeEncodeError("ascii", "é", 0, 1, "no"), ValueError("I/O operation on closed file"), RuntimeError("theirs")],
)
def test_a_child_that_talks_a_lot_ends_although_our_own_output_takes_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """At decbfac this test did not end in time; by reading, the pump ended with the first line and the pipe filled."""
    monkeypatch.setattr(sys, "stdout", Mute(error))
    end = run_replica(spec("talks", length=5000).to_dict(), "somewhere")
    assert (end["exit_code"], end["value"]) == (0, 5000)


def test_an_interruption_while_the_child_starts_leaves_nobody_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start_and_interrupt(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: made.append(real(*a, **k)) or made[-1])
    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_replica(spec("greets", name="you").to_dict(), "somewhere")
    assert len(made) == 1 and made[0].returncode is not None


def test_a_killed_child_is_told_with_its_signal() -> None:
    end = run_replica(spec("killed").to_dict(), "somewhere")
    assert (end["exit_code"], end["reason"]) == (-signal.SIGKILL, "killed by SIGKILL")


def test_a_replicas_requests_to_its_own_machine_pass_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    here = ".corp,localhost,127.0.0.1,::1"
    assert run_replica(spec("no_proxy_here", env={"NO_PROXY": ".corp"}).to_dict(), "x")["value"] == [here, here]


def test_as_a_command_its_end_is_the_end_of_its_log() -> None:
    container = start(spec("greets", name="you"))
    end, said = ended(container)
    assert (container.returncode, end["value"]["name"], said) == (0, "you", ["hello you"])
    container = start(spec("crashes"))
    end, said = ended(container)
    assert container.returncode == end["exit_code"] == 1 and said[0] == "line 0" and len(said) > 30


def test_a_long_value_comes_in_lines_that_log_collectors_do_not_cut() -> None:
    end = run_replica(spec("long_answer", length=5000).to_dict(), "somewhere")
    lines = end_lines(end)
    assert len(lines) > 1 and max(map(len, lines)) <= len(ENDED) + PIECE
    assert read_end(["before", *lines]) == end and read_end(lines[:-1]) is None and read_end(["before"]) is None


def test_sigterm_goes_on_to_the_child_which_leaves(tmp_path: Path) -> None:
    container = start(spec("polite", folder=str(tmp_path)))
    pid = child_of(tmp_path)
    container.terminate()
    end, said = ended(container)
    assert (container.returncode, end["exit_code"], said) == (exitcodes.LEFT, exitcodes.LEFT, ["goodbye"])
    assert gone(pid) and (tmp_path / "goodbye").exists()


def test_a_replica_that_was_done_when_asked_to_leave_is_done(tmp_path: Path) -> None:
    container = start(spec("finishes_when_asked", folder=str(tmp_path)))
    child_of(tmp_path)
    container.terminate()
    end, _ = ended(container)
    assert (container.returncode, end["exit_code"], end["value"]) == (0, 0, "done after all")


def test_an_interruption_reaches_the_child_and_then_the_platform(tmp_path: Path) -> None:
    """As in a function of Modal's, where the runtime raises in the main thread."""
    wanted = spec("stubborn", folder=str(tmp_path)).to_dict()
    child: list[int] = []

    def interrupt(*_: object) -> None:
        child.append(child_of(tmp_path))
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_replica(wanted, "somewhere", grace_s=0.2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert gone(child[0])  # it ignored SIGTERM; SIGKILL came after the grace


@pytest.fixture
def heeds_sigint() -> Iterator[None]:
    """Also where the tests are a shell's background job, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interruption_that_another_thread_took_is_heard_too(tmp_path: Path, heeds_sigint: None) -> None:
    """Which thread a signal goes to is the kernel's choice; a platform's runtime has many."""
    release = threading.Event()
    other = threading.Thread(target=release.wait, daemon=True)
    other.start()

    def interrupt() -> None:
        child_of(tmp_path)
        assert other.ident is not None
        signal.pthread_kill(other.ident, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_replica(spec("polite", folder=str(tmp_path)).to_dict(), "somewhere")
    release.set()
    assert (tmp_path / "goodbye").exists() and time.monotonic() - began < WAIT_S, "not after the child's own end"


def test_an_interruption_amid_popen_waits_until_there_is_a_child_to_pass_it_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heeds_sigint: None
) -> None:
    real = subprocess.Popen

    def popen(*args: Any, **options: Any) -> Any:
        made = real(*args, **options)
        child_of(tmp_path)  # it works already
        signal.raise_signal(signal.SIGINT)
        return made

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt):
        run_replica(spec("polite", folder=str(tmp_path)).to_dict(), "somewhere")
    assert (tmp_path / "goodbye").exists()


def test_the_child_ends_with_a_container_that_was_killed(tmp_path: Path) -> None:
    container = start(spec("polite", folder=str(tmp_path)))
    pid = child_of(tmp_path)
    container.kill()
    wait_for(lambda: gone(pid))
    lines = container.communicate(timeout=WAIT_S)[0].splitlines()
    assert (tmp_path / "goodbye").exists() and container.returncode == -signal.SIGKILL and read_end(lines) is None


@pytest.mark.quick(2)
@pytest.mark.parametrize(("function", "left"), [("polite", True), ("stubborn", False)])
def test_it_leaves_before_the_platforms_time_limit_to_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, left: bool
) -> None:
    started = lambda *asked: child_of(tmp_path) and _time_left(*asked)  # noqa: E731 — by then it handles signals
    monkeypatch.setattr(container, "_time_left", started)
    began = time.monotonic()
    end = run_replica(
        spec(function, folder=str(tmp_path), timeout_s=3.0).to_dict(), "somewhere", grace_s=WAIT_S if left else 0.2
    )
    assert end["exit_code"] == exitcodes.RESUME and (tmp_path / "goodbye").exists() is left
    assert 2.5 < time.monotonic() - began < WAIT_S


def test_a_replica_has_the_margin_of_its_time_limit_to_leave() -> None:
    """Before: 12 s, of 180 that were kept free, so a long inner step lost all since the last offer."""
    kind = ReplicaSpec("s3://b/r", "r00", entrypoint=REPLICA, timeout_s=3600.0)
    assert container._late_grace_s(kind, 12.0) == 168.0
    assert container._late_grace_s(replace(kind, timeout_s=60.0), 12.0) == 12.0
    assert container._late_grace_s(replace(kind, entrypoint="executors.supervision:main"), 12.0) == 12.0


@pytest.mark.slow
def test_a_crash_at_the_time_limit_is_a_crash(tmp_path: Path) -> None:
    end = run_replica(spec("polite", folder=str(tmp_path), code=1, timeout_s=3.0).to_dict(), "somewhere")
    assert end["exit_code"] == 1


# -------------------------------------------------------------------- the store, seen from inside


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIDTEST",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)


def test_a_replica_looks_at_its_store_first_and_tells_why_it_cannot_run(keys, monkeypatch, capfd) -> None:
    with S3Server(overwrites=True, access_key="AKIDTEST") as s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
        end = run_replica(ReplicaSpec("s3://bucket/run", "r00", entrypoint=REPLICA).to_dict(), "somewhere")
        assert s3.keys("bucket", "") == [], "what the look wrote is gone"
    assert end["exit_code"] == exitcodes.USER_ERROR
    assert end["reason"].startswith("r00: from inside somewhere: silently overwrites") and end["tail"] == [
        end["reason"]
    ]
    assert end["reason"] in capfd.readouterr().err


def test_a_good_store_is_reachable(keys, monkeypatch) -> None:
    with S3Server(access_key="AKIDTEST") as s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
        assert why_unreachable("s3://bucket/run") is None


@pytest.mark.parametrize(
    ("url", "key", "why"),
    [
        ("s3://bucket/run", "WRONG", "InvalidAccessKeyId"),
        ("s3://no-such-bucket/run", "AKIDTEST", "NoSuchBucket"),
        ("nowhere://bucket/run", "AKIDTEST", "no store for nowhere://"),
    ],
)
def test_a_refusal_is_the_users_to_mend(keys, monkeypatch, url: str, key: str, why: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    with S3Server(access_key="AKIDTEST") as s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
        found = why_unreachable(url)
    assert found is not None and found[0] == exitcodes.USER_ERROR and why in found[1]


def test_a_store_that_does_not_answer_is_waited_for_and_then_a_crash_like_others(keys, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    found = why_unreachable("s3://bucket/run", patience_s=0.0)
    assert found is not None and found[0] == CRASHED and "gave no answer for 0 s" in found[1]


@pytest.mark.slow
def test_a_store_that_comes_back_is_good(keys, monkeypatch) -> None:
    with S3Server(access_key="AKIDTEST") as s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
        s3.fault("503", op="GetObject", key="run.json", times=12)
        assert why_unreachable("s3://bucket/run") is None and s3.count("GetObject", "run.json") > 12


@pytest.mark.parametrize("n", [2, 3, 8, 32])
def test_the_replicas_of_a_fleet_do_not_end_together_at_the_platforms_limit(n: int) -> None:
    """Before: at 24 h all of them, in one outer step."""
    day_s = 24 * 3600.0
    ends = sorted(staggered_s(day_s, slot_name(i)) for i in range(n))
    assert ends[-1] == day_s == staggered_s(day_s, "supervisor") and ends[0] > 0.9 * day_s
    assert min(b - a for a, b in pairwise(ends)) > 0.1 * day_s / (3 * n)
    left = [_time_left(ReplicaSpec("", slot_name(i), timeout_s=day_s), time.monotonic()) or 0.0 for i in range(n)]
    assert len({round(s / 60) for s in left}) == n
    own = ReplicaSpec("", "r01", entrypoint="a.function", timeout_s=day_s)
    assert (_time_left(own, time.monotonic()) or 0.0) == pytest.approx(max(left), abs=1.0), "its time is its own"
