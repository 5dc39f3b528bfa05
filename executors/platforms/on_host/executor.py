"""Replicas as processes of this machine: real ones, that can be killed with -9.

    launch ──▶ fork server (heavy modules already imported) ──▶ process r00, its own session, group and log file
                    or, where forking is not safe: a fresh interpreter

    where their files are: {run folder}/processes/{slot}.{attempt}.log .json .exit .result
                           (a temporary folder when the run is not a folder of this machine)

The files, the claims in the bucket and the processes' start times are enough for another process to `find` them.
A process writes its name card before anything else, and there is one card per (slot, attempt): whenever a launcher
dies, and however many there are, one process runs it.
Replicas neither die nor hang with whoever launched them; `diloco.replica --parent` is how they notice.

Not promised: an exit code for a process whose launcher and fork server are both gone (it is LOST, then).
"""

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from executors.platforms import entrypoint as child
from executors.platforms import oom, processes
from executors.platforms.base import (
    RANK_ENV,
    REPLICA,
    Handle,
    LaunchPlan,
    ReplicaSpec,
    Result,
    State,
    Status,
    ranked_specs,
    unanswered,
    wait_for_all,
)
from executors.platforms.full_disk import launches_wait, room_for
from executors.platforms.logfile import LogFile
from executors.platforms.on_host.affinity import Affinity
from executors.platforms.on_host.forkserver import ForkServer
from rendezvous.clock import Clock, SystemClock
from rendezvous.membership import newest_claim
from rendezvous.records import Claim
from rendezvous.salvage import read_standing_wishes
from rendezvous.seal import open_signed

THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
ONE_THREAD = dict.fromkeys(THREADS, "1") | {"TOKENIZERS_PARALLELISM": "false"}
FORK_ENV = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1"
}  # else torch.cuda.is_available() in the server spoils CUDA after a fork
FORK = hasattr(os, "fork") and sys.platform != "darwin"  # macOS frameworks do not survive a fork
TAIL = 12
FOLLOW_S = 0.1
REAP_S = 2.0  # from a death until its exit code is written down, if anybody does


class LocalProcessExecutor:
    """preload: modules that the fork server imports, once, before the first launch.

    folder: where logs go, when not below the run's own folder.   method: "fork" or "spawn" (default: what works).
    env: for every child; on top of one BLAS thread each, so that replicas share the cores fairly.
    cores, gpus: what each replica may use of this machine (executors/platforms/on_host/affinity.py).
    """

    name = "local"

    def __init__(
        self,
        preload: Sequence[str] = (),
        *,
        folder: Path | None = None,
        method: str | None = None,
        env: Mapping[str, str] | None = None,
        cores: int = 0,
        gpus: Sequence[str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._preload = tuple(preload)
        self._folder = folder
        self._clock = clock or SystemClock()
        self._method = method or ("fork" if FORK else "spawn")
        self._env = {**ONE_THREAD, **(env or {})}
        self._affinity = Affinity(cores, gpus)
        self._server: ForkServer | None = None
        self._forked: set[int] = set()  # children of the present server, still running as far as we know
        self._spawned: dict[int, subprocess.Popen[bytes]] = {}
        self._handles: dict[tuple[str, str, int], Handle] = {}
        self._failed: dict[Handle, str] = {}
        self._deadlines: dict[Handle, float] = {}
        self._kills = oom.Kills()
        self._starved = dict[Handle, bool]()
        self._dead: dict[Handle, float] = {}  # since when; its exit code is not written yet

    # ------------------------------------------------------------------ starting

    def plan(self, specs: Sequence[ReplicaSpec]) -> LaunchPlan:
        lines = [
            f"{s.slot}: a process on this machine{self._affinity.text(s)}, log {self._file_stem(s)}.log" for s in specs
        ]
        return LaunchPlan((*lines, "no cost beyond this machine"))

    def launch_replicas(
        self,
        specs: Sequence[ReplicaSpec] | None = None,
        *,
        n_replicas: int = 0,
        entrypoint: str = REPLICA,
        entrypoint_args: Mapping[str, Any] | None = None,
        rank_env: str = RANK_ENV,
    ) -> list[Handle]:
        if specs is None:
            with launches_wait("the processes' files"):
                run = Path(tempfile.mkdtemp(prefix="diloco-")).as_uri()
            specs = ranked_specs(run, n_replicas, entrypoint, entrypoint_args, rank_env)
        keys = [(s.run, s.slot, s.attempt) for s in specs]
        new = {key: spec for key, spec in zip(keys, specs, strict=True) if key not in self._handles}
        self._handles |= dict(zip(new, self._launch_new(list(new.values())), strict=True))
        return [self._handles[key] for key in keys]

    def _launch_new(self, specs: Sequence[ReplicaSpec]) -> list[Handle]:
        """All of them start at once; one that was launched before, by somebody who is gone, does not."""
        found: dict[int, Handle | OSError] = {}
        requests: dict[int, dict[str, Any]] = {}
        for i, request in enumerate([self._make_request(s) for s in specs]):  # an unknown GPU is told before any starts
            try:
                room_for(Path(request["files"]).parent)
                Path(request["files"]).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                found[i] = error
                continue
            if (known := _read_process_file(request["files"])) is not None:
                found[i] = known
            else:
                requests[i] = request
        found |= self._start_processes(requests)
        return [self._handle_or_failure(spec, found[i]) for i, spec in enumerate(specs)]

    def _make_request(self, spec: ReplicaSpec) -> dict[str, Any]:
        stem = str(self._file_stem(spec))
        gpu = self._affinity.gpu(spec)
        cores = self._affinity.cores(spec)
        handle = Handle(spec.run, spec.slot, spec.attempt, self.name, socket.gethostname(), files=stem)
        env = {**spec.env, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})}
        threads = dict.fromkeys(THREADS, str(len(cores))) if len(cores) > 1 else {}
        more = {"files": stem, "cores": cores, "path": sys.path, "env": {**threads, **env}}
        return {**spec.to_dict(), **more, "handle": replace(handle, launched_at=self._clock.wall()).to_dict()}

    def _start_processes(self, requests: Mapping[int, dict[str, Any]]) -> dict[int, Handle | OSError]:
        fresh = {i for i, r in requests.items() if r["fresh"] or self._method != "fork" or len(r["cores"]) > 1}
        forks = [i for i in requests if i not in fresh]
        pids = dict(zip(forks, self._fork([requests[i] for i in forks]), strict=True))
        pids |= {i: self._spawn(requests[i]) for i in fresh}
        return {i: _registered_handle(requests[i], pid) for i, pid in pids.items()}

    def _handle_or_failure(self, spec: ReplicaSpec, found: Handle | OSError) -> Handle:
        if isinstance(found, Handle):
            return found
        host = socket.gethostname()
        stem = str(self._file_stem(spec))
        now = self._clock.wall()
        handle = Handle(spec.run, spec.slot, spec.attempt, self.name, host, files=stem, launched_at=now)
        self._failed[handle] = str(found)
        return handle

    def _start_server(self) -> ForkServer:
        return ForkServer(self._preload, {**self._env, **FORK_ENV})

    def _fork(self, requests: Sequence[Mapping[str, Any]]) -> list[tuple[int, int] | OSError]:
        if not requests:
            return []
        if self._server is None or not self._server.alive:  # somebody killed it; its children run on
            self._server = self._start_server()
            self._forked = set()
        found = self._server.fork(requests)
        self._forked |= {pid[0] for pid in found if isinstance(pid, tuple)}
        return found

    def _spawn(self, request: Mapping[str, Any]) -> tuple[int, int] | OSError:
        env = {**os.environ, **self._env, **request["env"], "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", child.START, json.dumps(request)]
        try:
            with open(request["files"] + ".log", "ab") as log:
                process = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        except OSError as error:
            return error
        self._spawned[process.pid] = process
        return process.pid, processes.start_ticks(process.pid) or 0

    def _file_stem(self, spec: ReplicaSpec) -> Path:
        return (self._folder or process_folder(spec.run)) / f"{spec.slot}.{spec.attempt}"

    # ------------------------------------------------------------------ watching

    def poll(self, handles: Iterable[Handle]) -> list[Status]:
        if self._server is not None:
            self._server.listen()
        self._enforce_deadlines()
        return [self._status_of(h) for h in handles]

    def _status_of(self, handle: Handle) -> Status:
        if handle in self._failed:
            return Status(handle, State.FAILED, self._failed[handle])
        if handle.executor != self.name or handle.host != socket.gethostname():
            elsewhere = f"it is not on this machine ({handle.host})"
            return unanswered(Status(handle, State.RUNNING, elsewhere), elsewhere)
        code, ended = self._exit_of(handle)
        if not ended:
            return Status(handle, State.RUNNING)
        reason = processes.describe_exit(code)
        if code == 0:
            return Status(handle, State.SUCCEEDED, reason, code)
        if handle in self._deadlines:
            return Status(handle, State.CANCELLED, reason, code)
        if self._starved_by(handle, code):
            return Status(handle, State.FAILED, oom.TEXT, code)
        outside = code is None or -code in (signal.SIGKILL, signal.SIGTERM)
        return Status(handle, State.LOST if outside else State.FAILED, reason, code)

    def _starved_by(self, handle: Handle, code: int | None) -> bool:
        """Did the kernel kill it for memory?  Asked again, the same answer."""
        if handle not in self._starved:
            self._starved[handle] = self._kills.explain(code)
        return self._starved[handle]

    def _exit_of(self, handle: Handle) -> tuple[int | None, bool]:
        """(exit code, has it ended?)"""
        server = self._server
        if server is not None and handle.pid in self._forked:
            code = server.exits.get(handle.pid)
            if code is not None or server.alive:  # a living server will tell; until then it has not been reaped
                return code, code is not None
        if handle.pid in self._spawned:
            code = _reap_group(self._spawned[handle.pid])
            return code, code is not None
        if processes.is_alive(handle.pid, handle.started):
            return None, False
        code = _written_code(handle)
        if code is None and processes.start_ticks(handle.pid) == handle.started:  # dead, and about to be reaped
            since = self._dead.setdefault(handle, self._clock.now())
            return None, self._clock.now() - since > REAP_S
        return code, True

    def logs(self, handle: Handle, tail: int | None = None) -> list[str]:
        return _log_file(handle).lines(tail) if handle.files else []  # without: found by its claim alone

    def follow(self, handle: Handle, tail: int | None = None) -> Iterator[str]:
        if not handle.files:
            return iter(())
        return _log_file(handle).follow(tail, lambda: self.poll([handle])[0].state.ended, self._clock, FOLLOW_S)

    def collect(self, handles: Sequence[Handle], timeout: float | None = None) -> list[Result]:
        statuses = wait_for_all(lambda: self.poll(handles), self._clock, timeout, 0.02)
        return [self._make_result(s, timeout) for s in statuses]

    def _make_result(self, status: Status, timeout: float | None) -> Result:
        handle = status.handle
        reason = status.reason
        if not status.state.ended:
            reason = f"still running after {timeout:g} s"
        value = _read_json(handle.files + ".result") if status.state is State.SUCCEEDED else None
        tail = () if status.state is State.SUCCEEDED else tuple(self.logs(handle, TAIL))
        return Result(handle, status.state, reason, status.exit_code, value, tail)

    # ------------------------------------------------------------------ ending

    def cancel(self, handles: Iterable[Handle], grace_s: float = 15.0) -> None:
        until = self._clock.now() + grace_s
        for handle in handles:
            asked = handle in self._deadlines
            if processes.is_alive(handle.pid, handle.started):
                self._deadlines[handle] = min(until, self._deadlines.get(handle, until))
                if grace_s > 0 and not asked:
                    processes.send_signal(handle.pid, handle.started, signal.SIGTERM)
        self._enforce_deadlines()

    def _enforce_deadlines(self) -> None:
        for handle, until in self._deadlines.items():
            if self._clock.now() >= until:
                processes.send_signal(handle.pid, handle.started, signal.SIGKILL, group=True)

    def find(self, run: str) -> list[Handle]:
        """Per slot the process that runs, else the one that was launched last."""
        found: dict[str, Handle] = {}
        for handle in [*self._handles_on_file(run), *self._handles_by_claim(run)]:
            best = found.get(handle.slot)
            rank = (processes.is_alive(handle.pid, handle.started), handle.attempt)
            if best is None or rank > (processes.is_alive(best.pid, best.started), best.attempt):
                found[handle.slot] = handle
        return [found[slot] for slot in sorted(found)]

    def _handles_on_file(self, run: str) -> list[Handle]:
        folder = self._folder or process_folder(run)
        cards = (_read_process_file(p.with_suffix("")) for p in folder.glob("*.json"))
        return [c for c in cards if c is not None and c.host == socket.gethostname()]

    def _handles_by_claim(self, run: str) -> list[Handle]:
        return [h for claim in newest_claims(run) if (h := claimed_process(run, claim)) is not None]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for process in self._spawned.values():
            process.returncode = process.poll() or 0  # it may live on: no warning about that


def _log_file(handle: Handle) -> LogFile:
    return LogFile(Path(handle.files + ".log"))


def process_folder(run: str) -> Path:
    """Where the local files of a run's processes are."""
    scheme, colon, rest = run.partition("://")
    if not colon or scheme == "file":
        return Path(rest if colon else run).absolute() / "processes"
    name = re.sub(r"[^\w.-]+", "_", run.rstrip("/"))
    return Path(tempfile.gettempdir()) / f"diloco-processes-{getpass.getuser()}" / name


def newest_claims(run: str) -> list[Claim]:
    """The present holder of each slot."""
    store = open_signed(run)
    newest = [newest_claim(store, slot) for slot in read_standing_wishes(store)[0].slot_names]
    return [taken for taken in newest if taken is not None]


def claimed_process(run: str, claim: Claim) -> Handle | None:
    """The running process of this machine that wrote the claim; a younger one with its pid is another."""
    if claim.host != socket.gethostname() or not claim.pid:
        return None
    started = processes.start_ticks(claim.pid)
    if started is None or processes.started_at(started) > claim.at + 2.0:
        return None
    return Handle(
        run=run,
        slot=claim.slot,
        attempt=claim.generation,
        executor="local",
        host=claim.host,
        pid=claim.pid,
        started=started,
    )


def _registered_handle(request: Mapping[str, Any], pid: tuple[int, int] | OSError) -> Handle | OSError:
    """The process that the name card names: the one just started, unless another launcher was faster."""
    stem = request["files"]
    if isinstance(pid, OSError):
        return _read_process_file(stem) or pid  # perhaps it was started, and the answer lost
    try:
        card = child.create_process_file(stem, {**request["handle"], "pid": pid[0], "started": pid[1]})
    except OSError as error:
        return error
    return Handle.from_dict(card)


def _reap_group(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit code once it has ended; whatever it has left in its group ends too."""
    if process.returncode is None and hasattr(os, "waitid"):
        with suppress(ChildProcessError, ProcessLookupError):
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.poll()


def _read_process_file(stem: Path | str) -> Handle | None:
    """The handle that a launched process wrote down."""
    raw = _read_json(f"{stem}.json")
    return None if raw is None else Handle.from_dict(raw)


def _written_code(handle: Handle) -> int | None:
    raw = _read_json(handle.files + ".exit") if handle.files else None
    if raw is None or (raw["pid"], raw["started"]) != (handle.pid, handle.started):
        return None
    return raw["code"]


def _read_json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return None
