"""Replicas as SkyPilot managed jobs: a dozen clouds, Kubernetes, spot machines, with what SkyPilot has credentials for.

    spec ──▶ Task(run: python -m executors.platforms.container SPEC sky) ──jobs.launch──▶ managed job diloco-{run}-r00-1
                 code: the wheel of this installation, as a file mount              by its name it is found again

    PENDING ▶ PENDING   STARTING, RECOVERING ▶ STARTING   RUNNING, CANCELLING ▶ RUNNING   SUCCEEDED ▶ SUCCEEDED
    CANCELLED ▶ CANCELLED   FAILED ▶ FAILED, with the exit code that its log tells   FAILED_… ▶ LOST, and why

SkyPilot starts a preempted job again by itself, as the same job: the slot stays its own, and the replica takes a new
generation.  It does not start a job again that failed.

Not promised: anything that only a cloud can show.  docs/executors.md lists what was checked without one.
"""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from executors.platforms import oom, processes
from executors.platforms.base import (
    RANK_ENV,
    REPLICA,
    ExecutorError,
    Handle,
    LaunchPlan,
    Refused,
    ReplicaSpec,
    Result,
    State,
    Status,
    Unavailable,
    ranked_specs,
    unanswered,
    wait_for_all,
)
from executors.platforms.container import TAIL, read_end, replica_lines
from executors.platforms.wheel import pack_code
from rendezvous.clock import Clock, SystemClock

NAME = "sky"
MOUNT = "/tmp/diloco-code"
PREFIX = re.compile(r"^\([^()]*pid=\d+[^()]*\) ?")  # of a job's lines in the log
END_LINES = 64
COLLECT_S = 5.0
FIELDS = (
    "job_id",
    "job_name",
    "status",
    "failure_reason",
    "details",
    "recovery_count",
)  # the first answer lacks reasons
REFUSALS = (
    "ApiServerAuthenticationError", "PermissionDeniedError", "NoWorkspaceAccessError", "NoCloudAccessError",
    "InvalidCloudCredentials", "ClusterOwnerIdentityMismatchError",
)  # fmt: skip
LOST = (
    "ApiServerConnectionError", "ServerTemporarilyUnavailableError", "ConcurrentWorkerExhaustedError", "NetworkError",
    "ExecutionRetryableError", "ExecutionPoolFullError", "RequestInterruptedError", "RequestCancelled", "Timeout",
    "ClusterStatusFetchingError", "SkyletUnavailableError", "FetchClusterInfoError", "KubeAPIUnreachableError",
)  # fmt: skip
STATES = {
    "PENDING": State.PENDING,
    "SUBMITTED": State.PENDING,
    "STARTING": State.STARTING,
    "RECOVERING": State.STARTING,
    "RUNNING": State.RUNNING,
    "WINDING_DOWN": State.RUNNING,
    "CANCELLING": State.RUNNING,
    "SUCCEEDED": State.SUCCEEDED,
    "CANCELLED": State.CANCELLED,
    "FAILED": State.FAILED,
}  # every other word of SkyPilot's: FAILED_SETUP, FAILED_NO_RESOURCE, …


@dataclass(frozen=True)
class SkyJob:
    id: int
    name: str
    word: str
    why: str

    @property
    def state(self) -> State:
        return STATES.get(self.word, State.LOST)


class SkyExecutor:
    """resources: sky.Resources' own words: infra="aws", use_spot=True, cpus="8+", disk_size=200, …

    setup: shell lines before the replica starts.   usd_per_hour: of one replica, if you know it; SkyPilot decides late.
    pip: packages that a reward of your own needs, beside those that the project needs.
    """

    name = NAME

    def __init__(
        self,
        *,
        setup: str = "",
        usd_per_hour: float | None = None,
        packages: Sequence[str] = (),
        pip: Sequence[str] = (),
        clock: Clock | None = None,
        **resources: Any,
    ) -> None:
        self._setup = setup
        self._usd = usd_per_hour
        self._packages = tuple(packages)
        self._resources = resources
        self._pip = (pip,) if isinstance(pip, str) else tuple(pip)
        self._clock = clock or SystemClock()
        self._failed: dict[Handle, str] = {}
        self._last: dict[Handle, Status] = {}
        self._listed: list[SkyJob] = []  # all jobs, as of the newest launch or find

    # ------------------------------------------------------------------ starting

    def plan(self, specs: Sequence[ReplicaSpec]) -> LaunchPlan:
        lines = [f"{s.slot}: managed job {job_name(s)} on {' or '.join(s.gpu) or 'no GPU'}" for s in specs]
        price = None if self._usd is None else self._usd * len(specs)
        refused = tuple(dict.fromkeys(why for s in specs if (why := self._why_not(s))))
        return LaunchPlan((*lines, "SkyPilot chooses the cloud, by price", *refused), price, refused)

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
            run = f"{NAME}://ranks-{self._clock.wall():.3f}"
            specs = ranked_specs(run, n_replicas, entrypoint, entrypoint_args, rank_env)
        faults = [self._why_not(s) for s in specs]
        if specs and all(faults):
            raise ExecutorError(faults[0])
        there = self._newest_by_name() if specs else {}
        return [
            self._failed_handle(s, why) if why else self._launch_one(s, there.get(job_name(s)))
            for s, why in zip(specs, faults, strict=True)
        ]

    def _launch_one(self, spec: ReplicaSpec, known: SkyJob | None) -> Handle:
        if known is not None:
            return self._handle_for(spec.run, spec.slot, spec.attempt, known)
        try:
            ids, _ = wait_for_answer(lambda: sky().jobs.launch(self.task(spec), name=job_name(spec)))
            return self._handle_for(spec.run, spec.slot, spec.attempt, SkyJob(ids[0], job_name(spec), "PENDING", ""))
        except Exception as error:  # its answer may be lost, and the job there
            if (job := self._newest_by_name().get(job_name(spec))) is not None:
                return self._handle_for(spec.run, spec.slot, spec.attempt, job)
            return self._failed_handle(
                spec, str(error) if isinstance(error, ExecutorError) else f"{type(error).__name__}: {error}"
            )

    def task(self, spec: ReplicaSpec) -> Any:
        """The sky.Task of one replica."""
        folder = self._code_folder()
        install = shlex.join(["pip", "install", "-q", "-r", f"{MOUNT}/{folder.name}/requirements.txt", *self._pip])
        setup = f"{install}\n{self._setup}".strip()
        told = json.dumps({**spec.to_dict(), "secrets": []})
        task = sky().Task(
            name=job_name(spec),
            setup=setup,
            run=f"exec python -m executors.platforms.container {shlex.quote(told)} {NAME}",
            envs=dict(spec.env),
            secrets=self._secret_values(spec),
            file_mounts={f"{MOUNT}/{folder.name}": str(folder)},
        )
        kinds = spec.gpu or (None,)  # in order of preference
        task.set_resources([sky().Resources(accelerators=kind, **self._resources) for kind in kinds])
        return task

    def _code_folder(self) -> Path:
        shipment = pack_code(MOUNT, self._packages)
        folder = Path.home() / ".diloco" / NAME / shipment.digest
        folder.mkdir(parents=True, exist_ok=True)
        for name, body in shipment.files.items():
            (folder / name).write_bytes(body)
        return folder

    def _secret_values(self, spec: ReplicaSpec) -> dict[str, str]:
        return {name: os.environ[name] for name in spec.secrets}

    def _why_not(self, spec: ReplicaSpec) -> str:
        if missing := [name for name in spec.secrets if name not in os.environ]:
            return f"the secret {missing[0]} is not set here; `export {missing[0]}=…` before the launch"
        if spec.entrypoint == REPLICA and ("://" not in spec.run or spec.run.startswith(("file:", "memory:"))):
            return (
                f"{spec.run} is a folder of this machine; SkyPilot's machines cannot reach it. Use s3://bucket/prefix"
            )
        return ""

    def _failed_handle(self, spec: ReplicaSpec, why: str) -> Handle:
        handle = Handle(spec.run, spec.slot, spec.attempt, NAME, launched_at=self._clock.wall())
        self._failed[handle] = why
        return handle

    def _handle_for(self, run: str, slot: str, attempt: int, job: SkyJob) -> Handle:
        return Handle(run, slot, attempt, NAME, native=str(job.id), usd_per_hour=self._usd)

    # ------------------------------------------------------------------ watching

    def poll(self, handles: Iterable[Handle]) -> list[Status]:
        """One request for all."""
        handles = list(handles)
        asked = [int(h.native) for h in handles if h.native]
        try:
            jobs = {j.id: j for j in self._list_jobs(asked)} if asked else {}
        except ExecutorError as error:
            return [s if s.state.ended else unanswered(s, error) for s in map(self._last_status, handles)]
        for handle in handles:
            if handle.native and not self._has_ended(handle):
                self._last[handle] = self._status_from(handle, jobs.get(int(handle.native)))
        return [self._last_status(h) for h in handles]

    def _last_status(self, handle: Handle) -> Status:
        if not handle.native:
            return Status(handle, State.FAILED, self._failed.get(handle, "it could not be started"))
        return self._last.get(handle, Status(handle, State.STARTING))

    def _has_ended(self, handle: Handle) -> bool:
        return handle in self._last and self._last[handle].state.ended

    def _status_from(self, handle: Handle, job: SkyJob | None) -> Status:
        if job is None:
            return Status(handle, State.LOST, "SkyPilot knows no such job any more")
        if job.state is not State.FAILED:
            return Status(handle, job.state, job.why, 0 if job.state is State.SUCCEEDED else None)
        return self._failed_as(handle, job, read_end(self._read_log(handle, END_LINES)))

    def _failed_as(self, handle: Handle, job: SkyJob, end: Mapping[str, Any] | None) -> Status:
        if end is None:
            why = job.why or "it failed without a last word"
            return Status(handle, State.FAILED if oom.says_out_of_memory(why) else State.LOST, why)
        words = end["reason"] + (f"; {job.why}" if oom.says_out_of_memory(job.why) else "")
        outside = oom.from_outside(end["exit_code"], words)
        return Status(handle, State.LOST if outside else State.FAILED, words, end["exit_code"])

    def _list_jobs(self, ids: list[int] | None = None) -> list[SkyJob]:
        try:
            rows = wait_for_answer(lambda: sky().jobs.queue_v2(refresh=False, job_ids=ids, fields=FIELDS))[0]
        except NoController:  # no job was ever launched
            return []
        return [SkyJob(r.job_id, r.job_name or "", r.status.value, r.failure_reason or r.details or "") for r in rows]

    def _newest_by_name(self) -> dict[str, SkyJob]:
        """Of two of one name (a lost answer) the older counts."""
        self._listed = self._list_jobs()
        return {j.name: j for j in sorted(self._listed, key=lambda j: -j.id)}

    def _read_log(self, handle: Handle, tail: int | None = None) -> list[str]:
        ask = lambda: sky().jobs.tail_logs(  # noqa: E731
            job_id=int(handle.native), follow=False, tail=tail, preload_content=False
        )
        with translated_errors():
            return _whole_lines(ask())

    def logs(self, handle: Handle, tail: int | None = None) -> list[str]:
        if not handle.native:
            return self._failed.get(handle, "").splitlines()
        lines = replica_lines(self._read_log(handle))
        return lines if tail is None else lines[-tail:] if tail > 0 else []

    def follow(self, handle: Handle, tail: int | None = None) -> Iterator[str]:
        told = 0 if tail is None else max(0, len(self.logs(handle)) - tail)
        while True:
            over = self.poll([handle])[0].state.ended
            lines = self.logs(handle)
            yield from lines[told:]
            told = max(told, len(lines))
            if over:
                return
            self._clock.sleep(COLLECT_S)

    def collect(self, handles: Sequence[Handle], timeout: float | None = None) -> list[Result]:
        statuses = wait_for_all(lambda: self.poll(handles), self._clock, timeout, COLLECT_S)
        return [self._make_result(s, timeout) for s in statuses]

    def _make_result(self, status: Status, timeout: float | None) -> Result:
        handle = status.handle
        if not status.state.ended:
            return Result(handle, status.state, f"still running after {timeout:g} s")
        lines = self._read_log(handle) if handle.native else []
        if status.state is State.SUCCEEDED:
            value = (read_end(lines) or {}).get("value")
            return Result(handle, status.state, processes.describe_exit(0), 0, value)
        return Result(handle, status.state, status.reason, status.exit_code, tail=tuple(replica_lines(lines)[-TAIL:]))

    # ------------------------------------------------------------------ ending

    def cancel(self, handles: Iterable[Handle], grace_s: float = 15.0) -> None:
        """SkyPilot has its own grace.  Its answer is awaited: a request that fails later was no cancellation."""
        ids = [int(h.native) for h in handles if h.native and not self._has_ended(h)]
        if ids:
            with suppress(NoController):  # it is gone, and its jobs with it
                wait_for_answer(lambda: sky().jobs.cancel(job_ids=ids))

    def orphans(self, run: str, known: Collection[Handle]) -> list[Handle]:
        """Live jobs of the run, in the newest list of all jobs, that none of `known` names."""
        natives = {h.native for h in known}
        alive = [j for j in self._listed if not j.state.ended and str(j.id) not in natives]
        return [h for j in alive if (h := self._handle_from_name(run, j)) is not None]

    def sweep(self, run: str) -> list[str]:
        """Cancel every job of the run that lives, whoever started it."""
        self._newest_by_name()
        alive = self.orphans(run, ())
        self.cancel(alive)
        return [f"{h.slot}.{h.attempt}: job {h.native} on {NAME}" for h in alive]

    def _handle_from_name(self, run: str, job: SkyJob) -> Handle | None:
        """The handle that a job's name tells, if it is one of the run's."""
        found = re.fullmatch(rf"diloco-{_run_digest(run)}-(\w+)-(\d+)", job.name)
        return self._handle_for(run, found[1], int(found[2]), job) if found else None

    def find(self, run: str) -> list[Handle]:
        newest: dict[str, Handle] = {}
        for job in self._newest_by_name().values():
            found = self._handle_from_name(run, job)
            if found is not None and found.attempt > newest.get(found.slot, replace(found, attempt=0)).attempt:
                newest[found.slot] = found
        return [newest[slot] for slot in sorted(newest)]

    def close(self) -> None:
        """Nothing is held."""


class NoController(ExecutorError):
    """SkyPilot's jobs controller is not up: no job was ever launched, or all are gone."""


def wait_for_answer(request: Callable[[], Any]) -> Any:
    """Wait for the server's answer to a request, since a call returns only a request id; its errors become ours."""
    with translated_errors():
        return sky().get(request())


@contextmanager
def translated_errors() -> Iterator[None]:
    """SkyPilot's errors as ours."""
    try:
        yield
    except ExecutorError:
        raise
    except Exception as error:
        name = type(error).__name__
        if name == "ClusterNotUpError":
            raise NoController(f"SkyPilot's jobs controller is not up: {error}. Next: `sky status`") from error
        if name in REFUSALS:
            raise Refused(f"SkyPilot refuses ({name}): {error}. Next: `sky api login`, `sky check`") from error
        if name in LOST or isinstance(error, OSError):
            raise Unavailable(f"SkyPilot does not answer ({name}): {error}. Next: `sky api status`") from error
        raise ExecutorError(f"SkyPilot refused ({name}): {error}. Next: `sky check` and `sky jobs queue`") from error


def sky() -> Any:
    try:
        module = import_module("sky")
        import_module("sky.jobs")  # not loaded with it
    except ImportError:
        raise ExecutorError("SkyPilot is not installed here: pip install 'serverless-diloco[sky]'") from None
    return module


def job_name(spec: ReplicaSpec) -> str:
    return f"diloco-{_run_digest(spec.run)}-{spec.slot}-{spec.attempt}"


def _run_digest(run: str) -> str:
    return hashlib.sha256(run.encode()).hexdigest()[:8]


def _whole_lines(pieces: Iterable[str | None]) -> list[str]:
    text = "".join(piece for piece in pieces if piece is not None)
    return [PREFIX.sub("", line) for line in text.splitlines()]
