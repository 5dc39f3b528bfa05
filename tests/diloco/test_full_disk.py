"""A disk that fills and is enlarged: no replica ends, `status` says it, and the run goes on by itself.

The real thing: a small tmpfs that is filled, and enlarged by a remount.  Where mounting is not allowed these skip.
"""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from diloco.model.publish import publish
from diloco.process import exitcodes
from diloco.process.disk import remove_left_behind, retry_when_full
from diloco.process.signals import asking_signals
from diloco.run.founding import open_run
from diloco.runlog.reader import read_report
from executors.cli.looking.status import status_table
from executors.cli.main import main
from executors.cli.starting import verbs
from executors.platforms.base import ReplicaSpec, Unavailable
from executors.platforms.container import run_replica
from executors.platforms.on_host.executor import LocalProcessExecutor
from executors.platforms.on_host.forkserver import ForkServer
from executors.platforms.platform import room_for
from executors.supervision.notices.messages import full_words
from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import Timing
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import GaveUp, StoreFull
from rendezvous.store import PatientStore
from rendezvous.stores.memory import MemoryStore
from rendezvous.stores.open import open_store
from tests.support.audit import check_run
from tests.support.fakes import ManualClock
from tests.support.fleet import Fleet
from tests.support.fleet import config as fleet_config


class Disk:
    """A file system of its own.   enlarge: by a remount, as an administrator would."""

    def __init__(self, folder: Path, kilobytes: int) -> None:
        self.folder = folder
        folder.mkdir()
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)])
        if made.returncode:
            pytest.skip("mounting a file system is not allowed here")

    def fill(self, but: int = 0) -> None:
        """All of it, or all but so many bytes."""
        with open(self.folder / "filler", "wb", buffering=0) as filler:
            for size in (1 << 16, 1 << 12):
                try:
                    while filler.write(b"x" * size) == size:
                        pass
                except OSError as error:
                    assert error.errno == errno.ENOSPC
            filler.truncate(filler.tell() - but)

    def enlarge(self, kilobytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Disk]]:
    mounted: list[Disk] = []

    def mount(kilobytes: int) -> Disk:
        if os.geteuid() != 0 or not Path("/proc/mounts").exists():
            pytest.skip("mounting a file system is not allowed here")
        mounted.append(Disk(tmp_path / f"disk{len(mounted)}", kilobytes))
        return mounted[-1]

    yield mount
    for each in mounted:
        subprocess.run(["umount", "-l", str(each.folder)], check=True)


def status_of(url: str) -> str:
    return "\n".join(status_table(read_report(open_store(url)), time.time()))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_fleet_whose_disk_fills_says_so_and_goes_on_once_it_is_enlarged(
    tmp_path: Path, disk: Callable[[int], Disk]
) -> None:
    small = disk(16 << 10)
    fleet = Fleet(tmp_path, str(small.folder / "run"), outer={"sync_every": 20}, fleet={"steps": 6})
    fleet.start_all()
    fleet.wait_for(lambda: fleet.commit(1) is not None)
    small.fill()
    stood = len(fleet.commits())
    full = "the run's disk is full (0 bytes left of 17 MB), and all replicas wait. Free some space, and they continue"
    assert full in status_of(fleet.url)
    fleet.wait_for(lambda: all("store_trouble" in fleet.log(slot).read_text() for slot in fleet.sessions))
    assert all(lives[-1].is_alive() for lives in fleet.sessions.values()), fleet.logs()
    assert len(fleet.commits()) <= stood + 1, "nothing is committed that is not written"
    small.enlarge(64 << 10)
    assert fleet.wait(120.0) == {"r00": [0], "r01": [0], "r02": [0]}, fleet.logs()
    assert "disk is full" not in status_of(fleet.url)
    check_run(small.folder / "run", 6)
    told = [e["trouble"] for e in read_report(open_store(fleet.url)).of_kind("store_trouble")]
    assert told and all("Free some space on that disk; trying again until 120 s" in text for text in told)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("left", [0, 8 << 10])
def test_a_replica_whose_own_disk_is_full_says_so_and_joins_once_it_is_enlarged(
    tmp_path: Path, disk: Callable[[int], Disk], left: int
) -> None:
    """The disk fills while its replica trains, which needs none of it; the replica's next session finds no room.

    Before, with no byte left: "No usable temporary directory found", exit code 1, and after three of them the end.
    """
    scratch = disk(16 << 10)
    fleet = Fleet(tmp_path, fleet={"steps": 1000, "give_up_s": 120.0})
    own_disk = {"TMPDIR": str(scratch.folder), "TEST_ONE_DISK": "1"}

    def counted_since(t: int) -> bool:
        return any(o.slot == "r01" for commit in fleet.seen_commits()[t:] for o in commit.fresh_offers)

    try:
        for slot, environ in (("r00", {}), ("r01", own_disk), ("r02", {})):
            fleet.start(slot, **environ)
        fleet.wait_for(lambda: counted_since(0))
        scratch.fill(but=left)
        filled = len(fleet.commits())
        fleet.wait_for(lambda: counted_since(filled + 1))

        fleet.sessions["r01"][0].kill()
        fleet.sessions["r01"][0].join()
        remove_left_behind(scratch.folder)  # as its next session does; another process is quicker to use that space
        scratch.fill(but=left)
        fleet.start("r01", **own_disk)
        words = "no space left on this machine's disk for "
        said = fleet.wait_for(lambda: text if words in (text := status_of(fleet.url)) else "")
        assert f"r01: {words}" in said and str(scratch.folder) in said
        stood = len(fleet.commits())
        fleet.wait_for(lambda: fleet.head() >= stood + 3)
        assert not counted_since(stood + 1), "the others go on without it"

        scratch.enlarge(64 << 10)
        enlarged = len(fleet.commits())
        fleet.wait_for(lambda: counted_since(enlarged))
        write_control(fleet.run.store, SystemClock(), steps=len(fleet.commits()) + 3)
        assert fleet.wait(120.0) == {"r00": [0], "r01": [-9, 0], "r02": [0]}, fleet.logs()
        report = read_report(open_store(fleet.url))
        assert "no space left" not in status_of(fleet.url) and report.done
        assert [e["who"] for e in report.of_kind("disk_full")] == ["r01-2"]
        check_run(tmp_path / "run", report.head)
    finally:
        fleet.kill_all()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_inner_loop_writes_where_its_replica_has_made_room(tmp_path: Path) -> None:
    """Before: a temporary folder of its own, not one that waits for space, and exit code 1 where there was none."""
    inner = {
        "loop": "grpo",
        "model": "toolworld",
        "data": {"text": None},
        "batch_size": 16,
        "toolworld": {"kinds": 2, "names": 4, "warm_start_steps": 1},
    }
    fleet = Fleet(tmp_path, outer={"sync_every": 1}, inner=inner, fleet={"replicas": 1, "steps": 1})
    fleet.start("r00", die="full:inner-")
    assert fleet.wait(200.0) == {"r00": [0]}, fleet.logs()


# -------------------------------------------------------------------- processes that do not wait: words, and advice


@pytest.fixture
def no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No temporary folder can be made."""

    def mkdtemp(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/scratch/folder")

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)


WORDS = "no space left on this machine's disk for {} (/scratch)"


def test_a_container_without_space_ends_with_the_reason(no_folder: None) -> None:
    """Before: a traceback of tempfile's."""
    spec = ReplicaSpec("memory://x", "r00", entrypoint="tests.support.entrypoints:returns")
    end = run_replica(spec.to_dict(), "somewhere")
    assert end["exit_code"] == exitcodes.CRASHED
    assert f"r00: from inside somewhere: {WORDS.format('temporary files')}" in end["reason"]


def test_the_child_that_publishes_says_so_and_may_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: exit code 2, as if files, settings or model were wrong."""
    run = open_run(fleet_config(tmp_path), str(tmp_path / "run"), SystemClock())
    of_a_save = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    for error, where in ((OSError(errno.ENOSPC, "", "/s/x"), "/s"), (of_a_save, tempfile.gettempdir())):
        monkeypatch.setattr(tempfile, "mkdtemp", lambda *_, error=error, **__: (_ for _ in ()).throw(error))
        assert publish(run.url) == exitcodes.GAVE_UP
        words = f"no space left on this machine's disk for it ({where}); free some space, then `diloco resume"
        assert words in capsys.readouterr().err


def test_a_command_says_so_and_may_be_typed_again(
    no_folder: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: "[Errno 28] No space left on device", and exit code 2."""
    monkeypatch.setattr(verbs, "_demo", lambda args: tempfile.mkdtemp())
    assert main(["demo"]) == exitcodes.GAVE_UP
    assert capsys.readouterr().err == f"diloco demo: {WORDS.format(MINE)}; free some space, then repeat the command\n"


MINE = "the command's files"
NONE_LEFT = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FULL_STORE = StoreFull("cannot write control/000001.json: No space left on device. Free some space on that disk")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NONE_LEFT, "disk for the command's files; free some space, then repeat the command"),
        (FULL_STORE, f"{FULL_STORE}, then repeat the command"),
        (
            FileNotFoundError(2, "No usable temporary directory found in ['/a', '/b']"),
            "for the command's files ('/a', '/b'); ",
        ),
    ],
    ids=["a write() that names no file", "the run's own store", "no temporary folder"],
)
def test_a_command_names_no_disk_that_has_room(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: `export` to a full disk spoke of /tmp, and a full store was exit code 2."""

    def fail(args: Any) -> Any:
        raise error

    monkeypatch.setattr(verbs, "_demo", fail)
    assert main(["demo"]) == exitcodes.GAVE_UP
    assert words in capsys.readouterr().err


def test_a_launch_without_space_is_asked_for_again(no_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: an OSError, which ended the supervisor."""

    def nothing(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/scratch/forkserver-1")

    executor = LocalProcessExecutor()
    with pytest.raises(Unavailable, match="for the processes' files"):
        executor.launch_replicas(n_replicas=1, entrypoint="tests.support.entrypoints:main")
    monkeypatch.setattr(tempfile, "TemporaryFile", nothing)
    with pytest.raises(Unavailable, match="no space left on this machine's disk for the fork server's log"):
        ForkServer((), {})


PRINTS = """
import sys
from diloco.process.output import survive_lost_output
survive_lost_output()
for i in range(2000):
    print("word" * 40, i, flush=True)
    print("err" * 40, i, file=sys.stderr, flush=True)
open(sys.argv[1], "w").write("done")
sys.exit(7)
"""


def test_a_process_does_not_end_of_what_it_prints_to_a_full_disk(tmp_path: Path, disk: Callable[[int], Disk]) -> None:
    small = disk(64)
    with open(small.folder / "log", "ab") as log:
        command = [sys.executable, "-c", PRINTS, str(tmp_path / "end")]
        ended = subprocess.run(command, stdout=log, stderr=log, cwd=Path(__file__).parents[2])
    assert ended.returncode == 7 and (tmp_path / "end").read_text() == "done"
    assert (small.folder / "log").read_text().startswith("wordword"), "what fits is there"


def test_a_process_does_not_end_with_the_reader_of_its_output(tmp_path: Path) -> None:
    """`diloco train … | head` ended the run."""
    end = tmp_path / "end"
    command = [sys.executable, "-c", PRINTS, str(end)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[2])
    assert child.stdout is not None and child.stdout.readline().startswith(b"wordword")
    child.stdout.close()
    assert child.wait(120) == 7 and end.read_text() == "done"


def test_a_closed_terminal_asks_like_a_sigterm_and_nohup_is_heeded() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if these tests were started with another one
    try:
        assert signal.SIGHUP in asking_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert asking_signals() == [signal.SIGTERM, signal.SIGINT]
    finally:
        signal.signal(signal.SIGHUP, before)


FORKS = """
import multiprocessing, os, signal, time
from diloco.process.signals import hear_asking
heard = []
hear_asking(lambda: heard.append(1))
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, 2]) == [1, 2]
busy = multiprocessing.get_context("fork").Process(target=pow, args=(3, 10**9))  # in C: no handler of Python would run
busy.start()
busy.terminate()
busy.join()
assert busy.exitcode == -signal.SIGTERM and not heard
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0)
assert heard == [1]
"""


def test_a_rewards_own_processes_end_when_it_ends_them() -> None:
    """Before: a worker of multiprocessing.Pool took SIGTERM for the replica's, and the reward waited for ever."""
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=60, cwd=Path(__file__).parents[2])


def test_nothing_is_launched_where_its_files_find_no_room(tmp_path: Path, disk: Callable[[int], Disk]) -> None:
    small = disk(64)
    small.fill()
    executor = LocalProcessExecutor(folder=small.folder / "processes")
    with pytest.raises(Unavailable, match="no space left on this machine's disk for the processes' files"):
        executor.launch_replicas([ReplicaSpec("memory://x", "r00", entrypoint="tests.support.entrypoints:main")])
    with pytest.raises(Unavailable):
        room_for(small.folder)
    executor.close()


def test_a_run_that_is_no_folder_and_a_disk_with_room_need_no_word(tmp_path: Path) -> None:
    assert full_words("s3://bucket/run") == full_words("memory://x") == full_words(str(tmp_path)) == ""
    assert full_words(str(tmp_path / "gone")) == "" and full_words(f"file://{tmp_path}") == ""


# -------------------------------------------------------------------- how long, and what then


class Full(MemoryStore):
    def __init__(self, clock: ManualClock, until: float) -> None:
        super().__init__()
        self.clock, self.until = clock, until

    def put(self, key: str, body: Any) -> None:
        if self.clock.now() < self.until:
            raise StoreFull("no space left")
        super().put(key, body)


def patient(until: float) -> tuple[PatientStore, list[str]]:
    clock, said = ManualClock(), list[str]()
    full = Full(clock, until)
    return PatientStore(
        full, clock, 10.0, on_trouble=said.append, full_s=100.0, on_recovered=lambda: said.append("over")
    ), said


def test_a_full_store_is_waited_for_longer_than_a_bad_moment_and_its_end_is_said() -> None:
    store, said = patient(until=60.0)
    store.put("k", b"v")
    assert store.get("k") == b"v" and said[-1] == "over" and "trying again until 100 s" in said[0]
    store.put("k", b"w")
    assert said.count("over") == 1, "what works at once needs no word"


def test_but_not_for_ever() -> None:
    store, _ = patient(until=1e9)
    with pytest.raises(GaveUp, match="no usable answer for 100 s"):
        store.put("k", b"v")


class FakeSession:
    """The part of a Session that retry_when_full uses."""

    def __init__(self) -> None:
        self.clock: Clock = ManualClock()
        self.timing = Timing(give_up=30.0)
        self.emitted: list[str] = []
        self.rv: Any = type("Rv", (), {})()
        self.rv.members = type("Members", (), {})()
        self.rv.members.status = type("Status", (), {"note": ""})()

    def emit(self, event: str, **fields: Any) -> None:
        self.emitted.append(event)

    def flush_soon(self) -> None: ...


def test_room_is_waited_for_and_other_errors_are_not() -> None:
    session: Any = FakeSession()

    def full(until: float) -> str:
        if session.clock.now() < until:
            raise OSError(errno.ENOSPC, "No space left on device", "/disk/model/w")
        return "there"

    assert retry_when_full(session, "the start model", lambda: full(9.0)) == "there"
    assert session.emitted == ["disk_full"] and "(/disk/model)" in session.rv.members.status.note
    with pytest.raises(GaveUp, match="no space left on this machine's disk"):
        retry_when_full(session, "the start model", lambda: full(1e9))
    with pytest.raises(PermissionError):
        retry_when_full(session, "it", lambda: (_ for _ in ()).throw(PermissionError(errno.EACCES, "no")))
