"""Replicas as processes of this machine, which can be killed with kill -9.

    launch ──▶ fork server (heavy modules already imported) ──▶ process r00, its own session, group and log file
                    or, where forking is not safe: a fresh interpreter

    their files: {run folder}/processes/{slot}.{attempt}.log .json .exit .result
                 (in the user's own ~/.local/state/diloco when the run is not a folder of this machine)

From the files, the claims in the bucket and the start times, another process can `find` the replicas' processes.
Another user may have written these data, or copied them with the run.  So signals go only to our own children, and
to processes that are marked as working for this run (diloco/process/processes.py).
A process first writes its process file (.json), and there is one such file per (slot, attempt).  So one process runs
the launch, even if several launchers start it or a launcher dies.
Replicas survive the end of their launcher; with `python -m diloco.replica --parent` they notice this end and can leave.

Not promised: an exit code for a process whose launcher and fork server are both gone (then it is LOST).
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.process import own_files, processes
from diloco.process.own_files import appended, make_plain, make_state_folder, read_json, state_folder
from executors.platforms import entrypoint as child
from executors.platforms.base import Handle, ReplicaSpec, State, Status, short_name, unanswered
from executors.platforms.executor import Executor
from executors.platforms.machine import oom
from executors.platforms.on_host.forkserver import ForkServer
from executors.platforms.platform import NotStarted, launches_named, launches_wait, read_card, room_for
from rendezvous.agreement.membership import newest_claim
from rendezvous.agreement.salvage import read_standing_control
from rendezvous.background import fetch_together, together_on
from rendezvous.clock import Clock
from rendezvous.layout import is_actor
from rendezvous.machine import machine_name
from rendezvous.records.records import Claim
from rendezvous.store import Readable
from rendezvous.stores.open import folder_of
from rendezvous.stores.run_key import open_signed

if TYPE_CHECKING:
    from executors.platforms.machine.logfile import LogFile

THREADS = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS",
)  # fmt: skip
ONE_THREAD = dict.fromkeys(THREADS, "1") | {"TOKENIZERS_PARALLELISM": "false"}
# Without this variable, torch.cuda.is_available() in the fork server would make CUDA unusable in its children.
FORK_ENV = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
FORK = hasattr(os, "fork") and sys.platform != "darwin"  # macOS frameworks do not survive a fork
REAP_S = 5.0  # longest time from a process's end until its parent has written its exit code


Born = tuple[int, int]  # a process: its pid and its start


class Children:
    """The processes that one executor has started: forked by its server, or fresh interpreters.

    preload: modules that the server imports.   env: variables of each process.
    """

    def __init__(self, preload: Sequence[str], env: Mapping[str, str]) -> None:
        self._preload, self._env = preload, env
        self._server: ForkServer | None = None
        self._forked = set[Born]()  # by the present server
        self._spawned: dict[Born, subprocess.Popen[bytes]] = {}
        self.all = set[Born]()

    def fork(self, requests: Sequence[Mapping[str, Any]]) -> list[Born | OSError]:
        if not requests:
            return []
        if self._server is None or not self._server.alive:  # children of a dead server run on
            self._server = ForkServer(self._preload, {**self._env, **FORK_ENV})
            self._forked.clear()
        found = self._server.fork(requests)
        self._forked |= {pid for pid in found if isinstance(pid, tuple)}
        self.all |= self._forked
        return found

    def spawn(self, request: Mapping[str, Any]) -> Born | OSError:
        env = {**os.environ, **self._env, **request["env"], "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-P", "-c", child.START, json.dumps(request)]
        try:
            with appended(request["files"] + ".log") as log:
                process = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        except OSError as error:
            return error
        born = process.pid, processes.start_ticks(process.pid) or 0
        self._spawned[born] = process
        self.all.add(born)
        return born

    def listen(self) -> None:
        """Hear of the ends that the server has seen."""
        if self._server is not None:
            self._server.listen()

    def end_of(self, born: Born) -> tuple[int | None, bool] | None:
        """Return (exit code, whether the process has ended); None if only its files can tell."""
        if born in self._spawned:
            code = _reap_group(self._spawned[born])
            return code, code is not None
        server = self._server
        if server is None or born not in self._forked or not (born in server.exits or server.alive):
            return None  # a live server will report the end once it has reaped the process
        return server.exits.get(born), born in server.exits

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for process in self._spawned.values():
            process.returncode = process.poll() or 0  # the process may run on; Popen must not warn about that


class LocalProcessExecutor(Executor):
    """The executor for this machine.   preload: modules that the fork server imports once, before the first launch.

    folder: where logs go (default: below the run's folder).   method: "fork" or "spawn" (default: "fork" if it works).
    env: variables for every child; added to settings for one BLAS thread per child, so that replicas share the cores
    fairly. cores, gpus: cores and GPUs that each replica may use (executors/platforms/on_host/affinity.py).
    devices: how many processes train a replica's model together; with `gpu`, each process gets one GPU.
    """

    name = "local"
    first_state = State.RUNNING
    pause_s = 0.05

    def __init__(
        self,
        preload: Sequence[str] | str = (),
        *,
        folder: str | Path | None = None,
        method: str | None = None,
        env: Mapping[str, str] | None = None,
        cores: int = 0,
        gpus: Sequence[str | int] | str | int | None = None,
        devices: int = 1,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(clock)
        names = preload.split(",") if isinstance(preload, str) else preload  # a text: of --option
        self._folder = None if folder is None else Path(folder)
        self._method = method or ("fork" if FORK else "spawn")
        self._cores, self._gpus, self._devices = cores, gpus, devices
        if cores or devices != 1:
            from executors.platforms.on_host.affinity import check_cores, check_devices

            check_cores(cores)
            check_devices(devices)
        self._children = Children(tuple(filter(None, names)), {**ONE_THREAD, **(env or {})})
        self._kills = oom.Kills()
        self._starved = dict[Handle, str]()
        self._dead: dict[Handle, float] = {}  # when a poll first found the process dead, still without an exit code

    # ------------------------------------------------------------------ starting

    def plan_line(self, spec: ReplicaSpec) -> str:
        gpu, cores = self._share_of(spec)
        where = (f" on GPU {gpu}" if gpu else "") + (f" on cores {', '.join(map(str, cores))}" if cores else "")
        who = "a process" if self._devices == 1 or is_actor(spec.slot) else f"{self._devices} processes"
        return f"{who} on this machine{where}, log {self._file_stem(spec)}.log"

    def plan_notes(self, specs: Sequence[ReplicaSpec]) -> list[str]:
        return ["no cost beyond this machine"]

    def nameless_run(self) -> str:
        with launches_wait("the processes' files"):
            return f"file://{tempfile.mkdtemp(prefix='diloco-')}"  # not as_uri(): no reader of a run's URL unquotes it

    def new_handle(self, spec: ReplicaSpec) -> Handle:
        return replace(super().new_handle(spec), host=machine_name(), files=str(self._file_stem(spec)))

    def submit(self, specs: Sequence[ReplicaSpec]) -> list[Handle | NotStarted]:
        """Start the processes.  Do not start a launch that has a process file already, even if its launcher is gone."""
        found: dict[int, Handle | OSError] = {}
        requests: dict[int, dict[str, Any]] = {}
        for i, request in enumerate([self._make_request(s) for s in specs]):  # an unknown GPU raises before any start
            try:
                room_for(make_folder(Path(request["files"]).parent))
                os.close(own_files.open_own(request["files"] + ".log", own_files.APPENDED))
            except OSError as error:
                found[i] = error
                continue
            if (known := _read_card(request["files"], Handle.from_dict(request["handle"]))) is not None:
                found[i] = known
            else:
                requests[i] = request
        fresh = {i for i, r in requests.items() if r["fresh"] or self._method != "fork" or len(r["cores"]) > 1}
        forks = [i for i in requests if i not in fresh]
        pids = dict(zip(forks, self._children.fork([requests[i] for i in forks]), strict=True))
        pids |= {i: self._children.spawn(requests[i]) for i in fresh}
        found |= {i: _registered_handle(requests[i], pid) for i, pid in pids.items()}
        answers = [found[i] for i in range(len(specs))]
        return [x if isinstance(x, Handle) else NotStarted(str(x)) for x in answers]

    def renew(self, handles: Sequence[Handle], until: float) -> bool:
        """Note this process as a launcher: a replica leaves when its last launcher has ended; `until` is unused."""
        for handle in handles:
            make_folder((stem := self._file_stem(handle)).parent)
            with appended(f"{stem}{child.LAUNCHERS}") as file:
                file.write(f"{processes.process_name(os.getpid())}\n".encode())
        return True

    def _make_request(self, spec: ReplicaSpec) -> dict[str, Any]:
        gpu, cores = self._share_of(spec)
        handle = replace(self.new_handle(spec), launched_at=self._clock.wall())
        env = {**spec.env, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})}
        threads = dict.fromkeys(THREADS, str(len(cores))) if len(cores) > 1 else {}
        more = {"files": handle.files, "cores": cores, "path": sys.path, "env": {**threads, **env}}
        return {**spec.to_dict(), **more, "handle": handle.to_dict()}

    def _share_of(self, spec: ReplicaSpec) -> tuple[str, list[int]]:
        """Return the replica's CUDA devices ("" if the spec asks for no device) and its cores ([]: all cores)."""
        if not (spec.gpu or self._cores):
            return "", []
        from executors.platforms.on_host.affinity import cores_of, gpu_of

        return gpu_of(spec, self._gpus, self._devices), cores_of(spec.slot, self._cores)

    def _file_stem(self, one: ReplicaSpec | Handle) -> Path:
        """Return the path of its files without their endings.  A handle's `files` is not used: it may be forged."""
        return (self._folder or process_folder(one.run)) / f"{one.slot}.{one.attempt}"

    # ------------------------------------------------------------------ watching

    def is_started(self, handle: Handle) -> bool:
        return True

    def needs_look(self, handle: Handle) -> bool:
        """Whether a poll looks at the process; True shortly after its end, too, if the exit code may be missing."""
        return self.known.why_not_started(handle) is None

    def observe(self, handles: Sequence[Handle]) -> list[Status]:
        self._children.listen()
        return [self._look_at(handle) for handle in handles]

    def _look_at(self, handle: Handle) -> Status:
        if handle.host != machine_name():
            elsewhere = f"it may run elsewhere: it is not on this machine ({handle.host or 'unknown'})"
            return unanswered(Status(handle, State.RUNNING, elsewhere), elsewhere)
        code, ended = self._exit_of(handle)
        if not ended:
            return Status(handle, State.RUNNING)
        reason = processes.describe_exit(code, ours=handle not in self._functions)
        if code == 0:
            return Status(handle, State.SUCCEEDED, reason, code)
        if handle in self._cancelled:
            return Status(handle, State.CANCELLED, reason, code)
        if handle not in self._starved:  # computed once, so that repeated calls agree
            self._starved[handle] = self._kills.explain(code)
        if starved := self._starved[handle]:  # the kernel killed the process for its memory
            return Status(handle, State.FAILED, starved, code)
        outside = code is None or -code in (signal.SIGKILL, signal.SIGTERM)
        return Status(handle, State.LOST if outside else State.FAILED, reason, code)

    def _exit_of(self, handle: Handle) -> tuple[int | None, bool]:
        """Return (exit code, whether the process has ended)."""
        if (end := self._children.end_of((handle.pid, handle.started))) is not None:
            return end
        if self.may_run(handle):
            return None, False
        code = _written_code(self._file_stem(handle), handle) if handle.files else None
        if code is None and handle.files:  # the process is dead; its parent reaps it, then writes the code
            return None, self._clock.now() - self._dead.setdefault(handle, self._clock.now()) > REAP_S
        return code, True

    def log_file(self, handle: Handle) -> "LogFile | None":
        from executors.platforms.machine.logfile import LogFile

        return LogFile(Path(f"{self._file_stem(handle)}.log")) if handle.files else None  # only its claim was found

    def follow(self, handle: Handle, tail: int | None = None) -> Iterator[str]:
        return super().follow(handle, tail) if handle.files else iter(())

    def read_value(self, handle: Handle) -> Any:
        return read_json(f"{self._file_stem(handle)}.result")

    # ------------------------------------------------------------------ ending

    def may_run(self, handle: Handle) -> bool:
        """Whether the handle's process may still run.  A process that is marked for another run is not this process."""
        own = (handle.pid, handle.started) in self._children.all
        return _is_here(handle) and (own or processes.works_for(handle.pid, handle.run) is not False)

    def stop(self, handles: Sequence[Handle], kill: bool) -> None:
        for handle in handles:
            number = signal.SIGKILL if kill else signal.SIGTERM
            run = None if (handle.pid, handle.started) in self._children.all else handle.run
            processes.send_signal(handle.pid, handle.started, number, run=run, group=kill)

    def discover(self, run: str) -> list[Handle]:
        """Find processes.  The last process of each slot is the running process, or else the newest launch."""
        names = (p.stem for p in (self._folder or process_folder(run)).glob("*.*.json"))
        launches = launches_named(run, self.name, names)
        cards = [_read_card(self._file_stem(launch), launch) for launch in launches]
        on_file = [c for c in cards if c is not None and c.host == machine_name()]
        claimed = [h for claim in newest_claims(open_signed(run)) if (h := claimed_process(run, claim)) is not None]
        alive = {h: self.may_run(h) for h in (*claimed, *on_file)}
        return sorted(alive, key=lambda h: (alive[h], h.attempt))  # the handle from the file comes last

    def close(self) -> None:
        super().close()
        self._children.close()


def process_folder(run: str) -> Path:
    """Return the folder on this machine for the files of this user's processes of a run."""
    own = folder.absolute() / "processes" if (folder := folder_of(run)) else None
    if own and (os.access(own, os.R_OK | os.X_OK) or not own.is_dir()):
        return own
    return state_folder("processes", short_name(str(own or run.rstrip("/"))))


def make_process_folder(run: str) -> Path:
    """Make, check and return that folder.   Raise OSError if another kind of file has its path."""
    return make_folder(process_folder(run))


def make_folder(folder: Path) -> Path:
    """Make a process folder."""
    if not folder.is_relative_to(state_folder()):
        return make_plain(folder)
    return make_state_folder("processes", folder.name)


def newest_claims(store: Readable) -> list[Claim]:
    """Return the newest claim of each slot and of each actor that has claims."""
    slots = read_standing_control(store)[0].member_names
    newest = fetch_together(together_on(store), partial(newest_claim, store), slots)
    return [claim for slot in slots if (claim := newest[slot]) is not None]


def claimed_process(run: str, claim: Claim) -> Handle | None:
    """Return the running process of this machine that wrote the claim, if it is marked as working for the run."""
    handle = _handle_of(run, claim)
    return handle if _is_here(handle) and processes.works_for(handle.pid, run) else None


def unproven_process(run: str, claim: Claim) -> Handle | None:
    """Return the running process that the claim names, if it has no mark of any run: it must not be killed."""
    handle = _handle_of(run, claim)
    return handle if _is_here(handle) and processes.works_for(handle.pid, run) is None else None


def _handle_of(run: str, claim: Claim) -> Handle:
    where = {"host": claim.host, "pid": claim.pid, "started": claim.started}
    return Handle(run=run, slot=claim.slot, attempt=claim.generation, executor=LocalProcessExecutor.name, **where)


def _is_here(handle: Handle) -> bool:
    return handle.host == machine_name() and processes.is_alive(handle.pid, handle.started)


def _read_card(stem: Path | str, known: Handle) -> Handle | None:
    """Read the handle from a launch's process file."""
    card = read_card(f"{stem}.json", known, str(stem))
    return card and replace(card, native="")


def _registered_handle(request: Mapping[str, Any], pid: tuple[int, int] | OSError) -> Handle | OSError:
    """Return the process in the process file: our new process, unless another launcher was faster."""
    stem, mine = request["files"], Handle.from_dict(request["handle"])
    if isinstance(pid, OSError):
        return _read_card(stem, mine) or pid  # the process may run although the answer was lost
    mine = replace(mine, pid=pid[0], started=pid[1])
    try:
        child.create_process_file(stem, mine.to_dict())
    except OSError as error:
        return error
    return _read_card(stem, mine) or mine


def _written_code(stem: Path, handle: Handle) -> int | None:
    raw = read_json(f"{stem}.exit")
    if not isinstance(raw, dict) or (raw.get("pid"), raw.get("started")) != (handle.pid, handle.started):
        return None
    return code if isinstance(code := raw.get("code"), int) else None


def _reap_group(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a process if it has ended, and then kill the rest of its group; else None."""
    if process.returncode is None and hasattr(os, "waitid"):
        with suppress(ChildProcessError, ProcessLookupError):
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.poll()
