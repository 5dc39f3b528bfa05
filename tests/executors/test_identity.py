"""Nothing is signalled or cancelled that is not this run's, even if a claim, a card or a log says so.

Real processes: `bystander` is the operator's own and says nothing, `worker` says for which runs it works.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from diloco.process import processes
from diloco.process.journal import Journal
from diloco.process.processes import host_words
from executors.platforms.base import Handle, ReplicaSpec, State
from executors.platforms.entrypoint import create_process_file
from executors.platforms.on_host.executor import LocalProcessExecutor, make_process_folder
from executors.supervision.holder import supervisor_of
from executors.supervision.lease import SUPERVISOR, Lease, Supervised
from executors.supervision.shutdown import stop_run
from executors.supervision.slots.slot_state import handle_in, past
from rendezvous import layout
from rendezvous.agreement.membership import claim, write_control
from rendezvous.clock import SystemClock
from rendezvous.errors import StoreFull, StoreGone, StoreReadOnly, StoreRefused
from rendezvous.machine import is_alive, machine_name, start_ticks
from rendezvous.records.records import Beat, Leave, new_nonce
from rendezvous.store import Body, Buffer
from rendezvous.stores.files import FileStore
from tests.support.fakes import ManualClock
from tests.support.workers import identity, worker

Start = Callable[..., subprocess.Popen]


class NoWait(SystemClock):
    """Seconds are short: a killed process needs some milliseconds to vanish."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds
        super().sleep(min(seconds, 0.005))


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process for these runs; it is ended afterwards."""
    children = list[subprocess.Popen]()

    def start_one(*urls: str) -> subprocess.Popen:
        children.append(worker(*urls))
        return children[-1]

    yield start_one
    for child in children:
        child.kill()
        child.communicate()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    made = FileStore(tmp_path / "run")
    write_control(made, SystemClock(), replicas=1, min_replicas=1, steps=9)
    return made


def stop(store: FileStore) -> dict[str, tuple[bool, str]]:
    """`diloco stop`: who still lives by its word, and its words."""
    ends = stop_run(store, NoWait(), 0.0, lambda text: None)
    return {e.name: (e.live, e.text) for e in ends}


def lives(child: subprocess.Popen) -> bool:
    with suppress(subprocess.TimeoutExpired):
        return child.wait(0.3) is None
    return True


# -------------------------------------------------------------------- claims


def test_a_process_that_says_it_is_the_run_s_is_killed(store: FileStore, start: Start) -> None:
    child = start(store.url)
    claim(store, SystemClock(), "r00", **identity(child.pid))
    assert stop(store)["r00-1"] == (False, "gone without a leave record")
    assert child.wait(10) == -signal.SIGKILL


def test_a_leave_record_counts_though_a_late_request_overwrote_the_last_beat(store: FileStore) -> None:
    generation = claim(store, SystemClock(), "r00", host="elsewhere", pid=4711, started=5)
    store.put(layout.beat_key("r00"), Beat("r00", generation, 9, "wait", 3, 0, 1.0, 9.0).encode())
    left = Leave("r00", generation, 4, "0" * 16, "asked to leave", new_nonce(), 9.0)
    store.put(layout.leave_key("r00", generation), left.encode())
    assert stop(store)["r00-1"] == (False, "left at outer step 4")


class Unwritable(FileStore):
    """As on a full disk: reads succeed."""

    error: type[StoreRefused] = StoreFull
    below = ""  # keys that cannot be written

    def put(self, key: str, body: Body) -> None:
        if not key.startswith(self.below):
            return super().put(key, body)
        raise self.error("cannot write it: No space left on device. Free some space on that disk")

    def create(self, key: str, body: Buffer) -> None:
        self.put(key, body) if key.startswith(self.below) else super().create(key, body)


def test_stop_ends_this_machine_s_processes_though_no_record_can_be_written(store: FileStore, start: Start) -> None:
    """Before: exit 2, "cannot write control/000001.json", and a detached fleet that computed on."""
    supervisor, replica, bystander = start(store.url), start(store.url), start()
    claim(store, SystemClock(), SUPERVISOR, **identity(supervisor.pid))
    claim(store, SystemClock(), "r00", **identity(replica.pid))
    full, said = Unwritable(store.root), list[str]()
    ends = stop_run(full, NoWait(), 0.0, said.append)
    assert [(e.name, e.live) for e in ends] == [("r00-1", False)]
    assert supervisor.wait(10) == replica.wait(10) == -signal.SIGTERM and lives(bystander)
    assert "could not be written: cannot write it: No space left" in said[0]
    assert "replicas elsewhere do not know" in said[0]


@pytest.mark.parametrize("full_at", [layout.CONTROLS, layout.CLAIMS], ids=["the request", "the lease"])
def test_an_unchanged_heartbeat_on_a_full_disk_is_no_end(store: FileStore, full_at: str) -> None:
    """Before: "no replica runs any more" and exit 0, while a replica of another machine trained on."""
    write_control(store, SystemClock(), replicas=3)
    there, here = f"gpu-box~{'5f' * 6}", machine_name()
    for slot, host, phase in [("r00", there, "train"), ("r01", there, "left"), ("r02", here, "train")]:
        claim(store, SystemClock(), slot, host=host, pid=2**22 + 1, started=3)
        store.put(layout.beat_key(slot), Beat(slot, 1, 9, phase, 3, 0, 0.0, 1.0, host, 2**22 + 1).encode())
    claim(store, SystemClock(), SUPERVISOR, host=there, pid=2**22 + 2, started=3)
    full = Unwritable(store.root)
    full.below = full_at
    ends = {e.name: e for e in stop_run(full, NoWait(), 0.0, lambda text: None)}
    assert [ends[name].live for name in ("r00-1", "r01-1", "r02-1")] == [True, False, False]
    assert "it may run elsewhere: pid 4194305 on gpu-box. Free some space" in ends["r00-1"].text


@pytest.mark.parametrize("who", ["r00", SUPERVISOR])
def test_a_process_that_stays_is_killed_though_the_lease_cannot_be_taken(
    store: FileStore, start: Start, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start(store.url)
    claim(store, SystemClock(), who, **identity(child.pid))
    send = processes.send_signal
    monkeypatch.setattr(
        processes, "send_signal", lambda pid, at, sig, **how: sig == signal.SIGKILL and send(pid, at, sig, **how)
    )  # as if it ignored SIGTERM
    assert not [e for e in stop_run(Unwritable(store.root), NoWait(), 0.0, lambda text: None) if e.live]
    assert child.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("error", [StoreGone, StoreReadOnly])
def test_another_store_s_fault_still_ends_stop(store: FileStore, start: Start, error: type[StoreRefused]) -> None:
    """A key that may only read is not a permission to stop."""
    child = start(store.url)
    claim(store, SystemClock(), "r00", **identity(child.pid))
    gone = Unwritable(store.root)
    gone.error = error
    with pytest.raises(error):
        stop_run(gone, NoWait(), 0.0, lambda text: None)
    assert lives(child)


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGKILL], ids=["leaves", "stays"])
def test_a_process_without_a_claim_ends_though_its_exit_code_cannot_be_written(
    store: FileStore, start: Start, asked: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: `publish` got no SIGTERM, and once killed it "may still run"."""
    child, clock = start(store.url), NoWait()
    card = Handle(store.url, "publish", 1, "local", **identity(child.pid))
    create_process_file(str(make_process_folder(store.url) / "publish.1"), card.to_dict())
    journal = Journal(store, clock, SUPERVISOR, 1)
    journal.emit("launched", slot="publish", attempt=1, executor="local", handle=card.to_dict())
    journal.flush()
    send = processes.send_signal
    monkeypatch.setattr(
        processes, "send_signal", lambda pid, at, sig, **how: sig == asked and send(pid, at, sig, **how)
    )  # as if it ignored the other one
    executor = LocalProcessExecutor([], method="spawn", clock=clock)
    ends = stop_run(Unwritable(store.root), clock, 2.0, lambda text: None, executor)
    assert ends and not [e for e in ends if e.live], ends
    assert child.wait(10) == -asked


def test_stop_does_not_name_the_publisher_of_a_model_that_is_there(store: FileStore, start: Start) -> None:
    """Before: "publish.1    local (no process): SUCCEEDED" beside the replicas of each detached run."""
    child = start(store.url)
    card = Handle(store.url, "publish", 1, "local", **identity(child.pid))
    stem = make_process_folder(store.url) / "publish.1"
    create_process_file(str(stem), card.to_dict())
    Path(f"{stem}.exit").write_text(json.dumps({"pid": card.pid, "started": card.started, "code": 0}))
    child.kill()
    child.wait(10)
    assert list(stop(store)) == ["publish.1"]
    store.put(layout.MODEL_MANIFEST, b"{}")
    assert stop(store) == {}


HOSTILE: dict[str, Callable[[subprocess.Popen], dict[str, Any]]] = {
    "an unrelated process": lambda p: identity(p.pid),
    "another machine of this name": lambda p: {**identity(p.pid), "host": f"{socket.gethostname()}~0123456789ab"},
    "a claim of an older release": lambda p: {"host": socket.gethostname(), "pid": p.pid},
    "an older release, this machine": lambda p: {"host": machine_name(), "pid": p.pid},
    "a pid that was another's before": lambda p: {**identity(p.pid), "started": identity(p.pid)["started"] - 1},
    "the first process of a container": lambda p: {"host": socket.gethostname(), "pid": 1, "started": 1},
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("of_another_run", [False, True])
def test_no_claim_kills_what_is_not_the_run_s(store: FileStore, start: Start, case: str, of_another_run: bool) -> None:
    bystander = start(*(["s3://bucket/another-run"] if of_another_run else []))
    claim(store, SystemClock(), "r00", **HOSTILE[case](bystander))
    found = stop(store)
    assert lives(bystander)
    proven_alive = case == "an unrelated process" and not of_another_run
    assert found["r00-1"][0] is proven_alive and ("was not killed" in found["r00-1"][1]) is proven_alive


@pytest.mark.parametrize("of_another_run", [False, True])
def test_no_claim_of_a_supervisor_keeps_a_run_that_its_process_does_not_supervise(
    store: FileStore, start: Start, of_another_run: bool
) -> None:
    """ "supervised by pid 1", of another container; or the supervisor of the run of which this one is a copy."""
    bystander = start(*(["s3://bucket/another-run"] if of_another_run else []))
    claim(store, SystemClock(), SUPERVISOR, **identity(bystander.pid))
    assert Lease.take(store, NoWait(), fresh_s=0.1).generation == 2


# -------------------------------------------------------------------- copies


def test_a_process_of_a_folder_that_was_renamed_is_no_end(store: FileStore, start: Start, tmp_path: Path) -> None:
    """`stop` said that no replica runs any more."""
    child = start(store.url)
    claim(store, SystemClock(), "r00", **identity(child.pid))
    card = Handle(store.url, "r00", 1, "local", **identity(child.pid))
    create_process_file(str(make_process_folder(store.url) / "r00.1"), card.to_dict())
    (store.root / "processes" / "r00.0.json").write_text("[]")
    copy = FileStore(shutil.copytree(store.root, tmp_path / "copy"))
    assert stop(copy)["r00-1"][0] is False and lives(child)
    renamed = FileStore(store.root.rename(tmp_path / "renamed"))
    live, text = stop(renamed)["r00-1"]
    assert live and f"`kill {child.pid}`" in text and str(tmp_path / "run") in text and lives(child)


def test_a_copy_of_a_live_run_is_a_run_of_its_own(store: FileStore, start: Start, tmp_path: Path) -> None:
    replica, supervisor = start(store.url), start(store.url)
    claim(store, SystemClock(), "r00", **identity(replica.pid))
    claim(store, SystemClock(), SUPERVISOR, **identity(supervisor.pid))
    beat = Beat("r00", 1, 7, "train", 1, 0, 0.1, 0.0, machine_name(), replica.pid)
    store.put(layout.beat_key("r00"), beat.encode())
    card = Handle(store.url, "r00", 1, "local", **identity(replica.pid))
    create_process_file(str(make_process_folder(store.url) / "r00.1"), card.to_dict())
    journal = Journal(store, SystemClock(), SUPERVISOR, 1)
    journal.emit("launched", slot="r00", attempt=1, executor="local", handle=card.to_dict())
    journal.flush()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = FileStore(tmp_path / "copy")
    assert supervisor_of(copy) is None and supervisor_of(store) is not None
    with pytest.raises(Supervised):
        Lease.take(store, NoWait())
    assert LocalProcessExecutor([], method="spawn").find(copy.url) != [] and [
        s.state.ended for s in LocalProcessExecutor([], method="spawn").poll([Handle(copy.url, **_rest(card))])
    ] == [True], "nothing runs it there"
    assert stop(copy)["r00-1"][0] is False
    assert lives(replica) and lives(supervisor)
    assert stop(store)["r00-1"][0] is False and replica.wait(10) == -signal.SIGKILL


def _rest(handle: Handle) -> dict[str, Any]:
    return {name: value for name, value in handle.to_dict().items() if name != "run"}


def test_a_run_is_the_same_by_every_name_of_its_folder_and_another_on_another_server(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    child = start(str(tmp_path / "run"), "s3://bucket/run")
    assert processes.works_for(child.pid, f"file://{tmp_path}/link/") and processes.works_for(
        child.pid, "s3://bucket/run/"
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://another-server")
    assert processes.works_for(child.pid, "s3://bucket/run") is False


def test_a_forked_child_does_not_write_into_its_parent_s_marks() -> None:
    processes.mark_run("s3://bucket/of-the-parent")
    if (pid := os.fork()) == 0:
        processes.mark_run("s3://bucket/of-the-child")
        os._exit(not processes.works_for(os.getpid(), "s3://bucket/of-the-child"))
    assert os.waitpid(pid, 0)[1] == 0
    assert processes.works_for(os.getpid(), "s3://bucket/of-the-parent")
    assert processes.works_for(os.getpid(), "s3://bucket/of-the-child") is False


SHOW = [sys.executable, "-c", "from rendezvous.machine import machine_name; print(machine_name())"]


def test_two_containers_of_one_name_are_two_machines() -> None:
    here = subprocess.run(SHOW, capture_output=True, text=True, check=True).stdout.strip()
    there = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", *SHOW], capture_output=True, text=True)
    if there.returncode:
        pytest.skip(f"no PID namespace here: {there.stderr}")
    assert here == machine_name() != there.stdout.strip()
    assert host_words(here) == host_words(there.stdout.strip()) == socket.gethostname()


def test_macos_is_asked_for_a_start_in_no_language_and_no_time_zone(tmp_path: Path, monkeypatch) -> None:
    """Before: strptime's ValueError for "Mo 30 Nov", and another start for a command in another time zone."""
    ps = tmp_path / "ps"
    ps.write_text('#!/bin/sh\n[ "$LC_ALL $TZ" = "C UTC" ] && echo "Ss  Mon Nov 30 13:54:20 2026" || echo "S Mo 30"\n')
    ps.chmod(0o755)
    for name, value in {"PATH": str(tmp_path), "LC_ALL": "de_DE.UTF-8", "TZ": "Europe/Berlin"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert start_ticks(os.getpid()) == 1796046860 and is_alive(os.getpid(), 1796046860)


# -------------------------------------------------------------------- cards and logs


def test_no_card_in_the_folder_kills_a_process_or_reads_a_file(store: FileStore, start: Start) -> None:
    bystander = start()
    stem = make_process_folder(store.url) / "r00.1"
    card = Handle(store.url, "r00", 1, "local", **identity(bystander.pid), files="/etc/passwd")
    create_process_file(str(stem), card.to_dict())
    executor = LocalProcessExecutor([], method="spawn")
    (found,) = executor.find(store.url)
    executor.cancel([found], grace_s=0.0)
    executor.poll([found])
    assert stop(store) and lives(bystander)
    assert executor.logs(found) == [] and found.files == str(stem)


@pytest.mark.parametrize(
    "wrong",
    [
        {"native": "--me"}, {"native": "-1"}, {"native": "a b"}, {"native": "1\n2"}, {"native": 7}, {"pid": -1},
        {"pid": "7"}, {"started": 1.5}, {"usd_per_hour": -4.0}, {"usd_per_hour": 1e308}, {"executor": "../x"},
        {"slot": "r01"}, {"attempt": 2}, {"attempt": "1"}, {"run": ["r"]}, {"host": 7},
    ],
)  # fmt: skip
def test_a_log_s_handle_has_types_and_speaks_of_its_own_launch(wrong: dict[str, Any]) -> None:
    raw = Handle("s3://b/another-run", "r00", 1, "slurm", native="77").to_dict()
    e = {"event": "launched", "who": "supervisor-1", "slot": "r00", "attempt": 1, "at": 1.0}
    assert handle_in({**e, "handle": {**raw, **wrong}}, "s3://b/run") is None
    found = handle_in({**e, "handle": raw}, "s3://b/run")
    assert found is not None and found.run == "s3://b/run", "it can name no other run's job"
    assert [h.run for h in past([{**e, "handle": raw}], "s3://b/run")["r00"].open] == ["s3://b/run"]


def test_a_handle_of_another_platform_is_not_answered_for(tmp_path: Path, start: Start) -> None:
    bystander = start()
    foreign = Handle(f"file://{tmp_path}", "r00", 1, "slurm", **identity(bystander.pid), native="77")
    executor = LocalProcessExecutor([], method="spawn")
    executor.cancel([foreign], grace_s=0.0)
    (status,) = executor.poll([foreign])
    assert status.stale and "one of the run's places" in status.trouble and lives(bystander)


# -------------------------------------------------------------------- signals


def test_a_group_is_signalled_only_where_the_process_leads_it(store: FileStore, tmp_path: Path) -> None:
    """A replica that a shell started shares the shell's group."""
    script = (
        "import subprocess, sys, tests.support.workers as w\n"
        "subprocess.Popen([sys.executable, '-c', w.WORKS, sys.argv[1]], stdin=subprocess.PIPE)\ninput()"
    )
    shell = subprocess.Popen(
        [sys.executable, "-c", script, store.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert shell.stdout is not None and shell.stdout.readline() == b".\n"
    (child,) = map(int, Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split())
    ticks = processes.start_ticks(child) or 0
    assert processes.send_signal(child, ticks, signal.SIGKILL, run=store.url, group=True)
    assert lives(shell)
    shell.communicate(b"\n")


def test_replicas_that_a_supervisor_finds_again_can_be_ended(tmp_path: Path) -> None:
    """As before: a launcher that dies leaves processes that the next one ends, by their own word."""
    run = f"file://{tmp_path}"
    spec = ReplicaSpec(run, "r00", entrypoint="tests.executors.test_local:sleeps")
    first = LocalProcessExecutor(["tests.executors.test_local"], method="fork")
    (handle,) = first.launch_replicas([spec])
    while not first.logs(handle):
        SystemClock().sleep(0.01)
    second = LocalProcessExecutor([], method="spawn")
    (found,) = second.find(run)
    assert not second._children.all and processes.works_for(found.pid, run)
    second.cancel([found], grace_s=0.0)
    (result,) = second.collect([found], timeout=60.0)
    assert result.state is State.CANCELLED
    first.close()


class Elsewhere(ManualClock):
    """A clock in whose time a replica on another machine sends a heartbeat every 5 s, until its end."""

    def __init__(self, store: FileStore, ends_at: float, leaves: bool) -> None:
        super().__init__()
        self._store, self._ends_at, self._leaves = store, ends_at, leaves
        self._generation = claim(store, self, "r00", host="elsewhere", pid=4711, started=5)
        self.sleep(0.0)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        over = self.at >= self._ends_at
        if not over or self._leaves:
            beat = Beat(
                "r00", self._generation, int(self.at / 5) + over, "left" if over else "train", 3, 1, 1.0, self.wall()
            )
            self._store.put(layout.beat_key("r00"), beat.encode())


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("ends_at", "leaves", "live", "text"),
    [
        (1e9, False, True, "its heartbeat changes, so it may run elsewhere"),
        (0.0, False, False, "gone without a leave record"),
        (17.0, False, False, "gone without a leave record"),
        (17.0, True, False, "left at outer step 3"),
    ],
    ids=["lives", "is dead", "dies", "leaves"],
)
def test_stop_waits_for_a_replica_elsewhere_whose_heartbeats_are_rare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_at: float, leaves: bool, live: bool, text: str
) -> None:
    """Before: in a bucket, where a heartbeat takes 5 s, it was "gone" after one second, while it trained on."""
    store = FileStore(str(tmp_path))
    monkeypatch.setattr(FileStore, "near", False)
    clock = Elsewhere(store, ends_at, leaves)
    if ends_at == 0.0:
        store.put(layout.beat_key("r00"), Beat("r00", 1, 0, "train", 3, 1, 1.0, clock.wall()).encode())
    write_control(store, clock, replicas=1)
    (end,) = stop_run(store, clock, None, lambda text: None)
    assert (end.live, text in end.text) == (live, True), (end, clock.at)
    assert clock.at < 60.0
