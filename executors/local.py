"""Replicas as processes of this machine: real ones, that can be killed with -9.

    launch ──▶ fork server (heavy modules already imported) ──▶ process r00, its own session and log file
                    or, where forking is not safe: a fresh interpreter

    where their files are: {run folder}/processes/{slot}.{attempt}.log .json .exit .result
                           (a temporary folder when the run is not a folder of this machine)

The files, the claims in the bucket and the processes' start times are enough for another process to `find` them.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from executors import child, processes
from executors.base import (
    RANK_ENV,
    REPLICA,
    Handle,
    LaunchPlan,
    ReplicaSpec,
    Result,
    State,
    Status,
    ranked_specs,
)
from executors.forkserver import ForkServer
from rendezvous import layout
from rendezvous.clock import Clock, SystemClock
from rendezvous.membership import claims, read_control
from rendezvous.records import Claim
from rendezvous.seal import open_sealed

ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
) | {"TOKENIZERS_PARALLELISM": "false"}
FORK_ENV = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1"
}  # else torch.cuda.is_available() in the server spoils CUDA after a fork
FORK = hasattr(os, "fork") and sys.platform != "darwin"  # macOS frameworks do not survive a fork
TAIL = 12
FOLLOW_S = 0.1


class LocalProcessExecutor:
    """preload: modules that the fork server imports at once, in the background.

    folder: where logs go, when not below the run's own folder.   method: "fork" or "spawn" (default: what works).
    env: for every child; on top of one BLAS thread each, so that replicas share the cores fairly.
    """

    name = "local"

    def __init__(
        self,
        preload: Sequence[str] = (),
        *,
        folder: Path | None = None,
        method: str | None = None,
        env: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._preload, self._folder, self._clock = tuple(preload), folder, clock or SystemClock()
        self._method = method or ("fork" if FORK else "spawn")
        self._env = {**ONE_THREAD, **(env or {})}
        self._server = self._start_server() if self._method == "fork" else None
        self._forked: set[int] = set()  # children of the present server, still running as far as we know
        self._spawned: dict[int, subprocess.Popen[bytes]] = {}
        self._handles: dict[tuple[str, str, int], Handle] = {}
        self._failed: dict[Handle, str] = {}
        self._deadlines: dict[Handle, float] = {}

    # ------------------------------------------------------------------ starting

    def plan(self, specs: Sequence[ReplicaSpec]) -> LaunchPlan:
        lines = [f"{s.slot}: a process on this machine, log {self._stem(s)}.log" for s in specs]
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
            slots = [layout.slot_name(i) for i in range(n_replicas)]
            run = Path(tempfile.mkdtemp(prefix="diloco-")).as_uri()
            specs = ranked_specs(run, slots, entrypoint, entrypoint_args, rank_env)
        for spec in specs:
            key = (spec.run, spec.slot, spec.attempt)
            self._handles[key] = self._handles.get(key) or self._launch(spec)
        return [self._handles[spec.run, spec.slot, spec.attempt] for spec in specs]

    def _launch(self, spec: ReplicaSpec) -> Handle:
        stem = self._stem(spec)
        if (known := _card(stem)) is not None:  # launched before, by somebody who is gone
            return known
        handle = Handle(spec.run, spec.slot, spec.attempt, self.name, socket.gethostname(), files=str(stem))
        request = {**spec.to_dict(), "files": str(stem), "handle": handle.to_dict(), "path": sys.path}
        try:
            stem.parent.mkdir(parents=True, exist_ok=True)
            pid, started = self._spawn(request) if spec.fresh or self._server is None else self._fork(request)
        except OSError as error:
            self._failed[handle] = str(error)
            return handle
        handle = replace(handle, pid=pid, started=started)
        child.write_json(f"{stem}.json", handle.to_dict())  # the child does so too, for the case that we die here
        return handle

    def _start_server(self) -> ForkServer:
        return ForkServer(self._preload, {**self._env, **FORK_ENV})

    def _fork(self, request: Mapping[str, Any]) -> tuple[int, int]:
        if self._server is None or not self._server.alive:  # somebody killed it; its children run on
            self._server, self._forked = self._start_server(), set()
        pid, started = self._server.fork(request)
        self._forked.add(pid)
        return pid, started

    def _spawn(self, request: Mapping[str, Any]) -> tuple[int, int]:
        env = {**os.environ, **self._env, **request["env"], "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", child.START, json.dumps(request)]
        with open(request["files"] + ".log", "ab") as log:
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._spawned[process.pid] = process
        return process.pid, processes.start_ticks(process.pid) or 0

    def _stem(self, spec: ReplicaSpec) -> Path:
        return (self._folder or process_folder(spec.run)) / f"{spec.slot}.{spec.attempt}"

    # ------------------------------------------------------------------ watching

    def poll(self, handles: Iterable[Handle]) -> list[Status]:
        if self._server is not None:
            self._server.listen()
        self._enforce_deadlines()
        return [self._status(h) for h in handles]

    def _status(self, handle: Handle) -> Status:
        if handle in self._failed:
            return Status(handle, State.FAILED, self._failed[handle])
        code, ended = self._end(handle)
        if not ended:
            return Status(handle, State.RUNNING)
        reason = processes.describe(code)
        if code == 0:
            return Status(handle, State.SUCCEEDED, reason, code)
        if handle in self._deadlines:
            return Status(handle, State.CANCELLED, reason, code)
        outside = code is None or -code in (signal.SIGKILL, signal.SIGTERM)
        return Status(handle, State.LOST if outside else State.FAILED, reason, code)

    def _end(self, handle: Handle) -> tuple[int | None, bool]:
        """(exit code, has it ended?)"""
        server = self._server
        if server is not None and handle.pid in self._forked:
            code = server.exits.get(handle.pid)
            if code is not None or server.alive:  # a living server will tell; until then it has not been reaped
                return code, code is not None
        if handle.pid in self._spawned:
            code = self._spawned[handle.pid].poll()
            return code, code is not None
        if processes.alive(handle.pid, handle.started):
            return None, False
        return _written_code(handle), True

    def logs(self, handle: Handle, tail: int | None = None) -> list[str]:
        if not handle.files:  # found by its claim alone
            return []
        try:
            lines = Path(handle.files + ".log").read_text(errors="replace").splitlines()
        except OSError:
            return []
        return lines if tail is None else lines[-tail:] if tail > 0 else []

    def follow(self, handle: Handle, tail: int | None = None) -> Iterator[str]:
        shown = 0 if tail is None else max(0, len(self.logs(handle)) - tail)
        while True:
            ended = self.poll([handle])[0].state.ended  # before the look, so that nothing is missed
            lines = self.logs(handle)
            yield from lines[shown:]
            shown = max(shown, len(lines))
            if ended:
                return
            self._clock.sleep(FOLLOW_S)

    def collect(self, handles: Sequence[Handle], timeout: float | None = None) -> list[Result]:
        began = self._clock.now()
        while True:
            statuses = self.poll(handles)
            late = timeout is not None and self._clock.now() - began >= timeout
            if late or all(s.state.ended for s in statuses):
                return [self._result(s, timeout) for s in statuses]
            self._clock.sleep(0.02)

    def _result(self, status: Status, timeout: float | None) -> Result:
        handle, reason = status.handle, status.reason
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
            if processes.alive(handle.pid, handle.started):
                self._deadlines[handle] = min(until, self._deadlines.get(handle, until))
                if grace_s > 0 and not asked:
                    processes.send(handle.pid, handle.started, signal.SIGTERM)
        self._enforce_deadlines()

    def _enforce_deadlines(self) -> None:
        for handle, until in self._deadlines.items():
            if self._clock.now() >= until:
                processes.send(handle.pid, handle.started, signal.SIGKILL, group=True)

    def find(self, run: str) -> list[Handle]:
        """Per slot the process that runs, else the one that was launched last."""
        found: dict[str, Handle] = {}
        for handle in [*self._carded(run), *self._claimed(run)]:
            best = found.get(handle.slot)
            rank = (processes.alive(handle.pid, handle.started), handle.attempt)
            if best is None or rank > (processes.alive(best.pid, best.started), best.attempt):
                found[handle.slot] = handle
        return [found[slot] for slot in sorted(found)]

    def _carded(self, run: str) -> list[Handle]:
        folder = self._folder or process_folder(run)
        cards = (_card(p.with_suffix("")) for p in folder.glob("*.json"))
        return [c for c in cards if c is not None and c.host == socket.gethostname()]

    def _claimed(self, run: str) -> list[Handle]:
        return [h for claim in newest_claims(run) if (h := claimed_process(run, claim)) is not None]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for process in self._spawned.values():
            process.returncode = process.poll() or 0  # it may live on: no warning about that


def process_folder(run: str) -> Path:
    """Where the local files of a run's processes are."""
    scheme, colon, rest = run.partition("://")
    if not colon or scheme == "file":
        return Path(rest if colon else run).absolute() / "processes"
    name = re.sub(r"[^\w.-]+", "_", run.rstrip("/"))
    return Path(tempfile.gettempdir()) / f"diloco-processes-{getpass.getuser()}" / name


def newest_claims(run: str) -> list[Claim]:
    """The present holder of each slot."""
    store = open_sealed(run)
    newest = [max(claims(store, slot), default=None) for slot in read_control(store).slots]
    return [Claim.decode(taken[1]) for taken in newest if taken is not None]


def claimed_process(run: str, claim: Claim) -> Handle | None:
    """The running process of this machine that wrote the claim; a younger one with its pid is another."""
    if claim.host != socket.gethostname() or not claim.pid:
        return None
    started = processes.start_ticks(claim.pid)
    if started is None or processes.started_at(started) > claim.at + 2.0:
        return None
    return Handle(run, claim.slot, claim.generation, "local", claim.host, claim.pid, started)


def _card(stem: Path) -> Handle | None:
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
