"""Replicas as SkyPilot managed jobs: on a dozen clouds, Kubernetes, spot machines, if SkyPilot has the credentials.

    spec ──▶ Task(run: python -m executors.platforms.container SPEC sky) ──jobs.launch──▶ managed job diloco-{run}-r00-1
                 code: the wheel of this installation, as a file mount              its name lets us find it again

    PENDING ▶ PENDING   STARTING, RECOVERING ▶ STARTING   RUNNING, CANCELLING ▶ RUNNING   SUCCEEDED ▶ SUCCEEDED
    CANCELLED ▶ CANCELLED   FAILED ▶ FAILED, with the exit code in its log   FAILED_… ▶ LOST, with a reason

SkyPilot itself starts a preempted job again, as the same job: it keeps its slot, and its replica takes a new
generation.  SkyPilot does not start a failed job again.

Not promised: behaviour that only a cloud can show.  docs/internals/platforms.md lists the checks without a cloud.
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from diloco.process import processes
from executors.platforms.base import (
    REPLICA,
    ExecutorError,
    Handle,
    Refused,
    ReplicaSpec,
    State,
    Status,
    Unavailable,
    run_digest,
)
from executors.platforms.container import ended_as, read_end, replica_lines
from executors.platforms.executor import Executor
from executors.platforms.machine import oom
from executors.platforms.packages.versions import check_command
from executors.platforms.packages.wheel import left_out, pack_code
from executors.platforms.platform import NotStarted, answer_or_error, launches_wait, missing_secret
from rendezvous.clock import Clock
from rendezvous.stores.open import stays_here

NAME = "sky"
MOUNT = "/tmp/diloco-code"
PREFIX = re.compile(r"^\([^()]*pid=\d+[^()]*\) ?")  # SkyPilot's prefix of a job's log lines
END_LINES = 64
LISTED_S = 30.0  # seconds after which the list of all jobs is requested again
# The fields to request: without this list, SkyPilot's answer has no reasons of failures.
FIELDS = ("job_id", "job_name", "status", "failure_reason", "details", "recovery_count")
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
}  # all other states of SkyPilot are LOST: FAILED_SETUP, FAILED_NO_RESOURCE, …


@dataclass(frozen=True)
class SkyJob:
    id: int
    name: str
    word: str
    why: str

    @property
    def state(self) -> State:
        return STATES.get(self.word, State.LOST)


class SkyExecutor(Executor):
    """The executor for SkyPilot.   resources: arguments of sky.Resources: infra="aws", use_spot=True, cpus="8+", …

    setup: shell lines before the replica starts.   usd_per_hour: price of one replica, if you know it.
    pip: packages that your own reward needs, in addition to those of the project.
    vllm: replicas generate with vLLM, and get the versions of packages/versions.py.
    """

    name = NAME
    pause_s = 5.0
    own_grace = True
    labelled = True
    id_form = r"\d{1,9}"

    def __init__(
        self,
        *,
        setup: str = "",
        usd_per_hour: float | None = None,
        packages: Sequence[str] = (),
        pip: Sequence[str] = (),
        vllm: bool = False,
        clock: Clock | None = None,
        **resources: Any,
    ) -> None:
        super().__init__(clock)
        self._setup = setup
        self.usd_per_hour = usd_per_hour
        self._packages = tuple(packages)
        self._resources = resources
        self._pip = (pip,) if isinstance(pip, str) else tuple(pip)
        self._vllm = vllm
        self._listed: list[SkyJob] = []  # all jobs, as of the newest list
        self._listed_at = float("-inf")

    # ------------------------------------------------------------------ starting

    def plan_line(self, spec: ReplicaSpec) -> str:
        return f"managed job {job_name(spec)} on {' or '.join(spec.gpu) or 'no GPU'}"

    def plan_notes(self, specs: Sequence[ReplicaSpec]) -> list[str]:
        without = [f"not sent with the code: {', '.join(kept)}"] if (kept := left_out(self._packages)) else []
        return ["SkyPilot chooses the cloud, by price", *without]

    def fault_of(self, spec: ReplicaSpec) -> str:
        if spec.entrypoint == REPLICA and stays_here(spec.run):
            return missing_secret(spec) or (
                f"{spec.run} is a folder of this machine; SkyPilot's machines cannot reach it. Use s3://bucket/prefix"
            )
        return missing_secret(spec)

    def submit(self, specs: Sequence[ReplicaSpec]) -> list[Handle | NotStarted]:
        there = self._newest_by_name()
        return [self._launch_one(s, there.get(job_name(s))) for s in specs]

    def _launch_one(self, spec: ReplicaSpec, known: SkyJob | None) -> Handle | NotStarted:
        if known is not None:
            return self._handle_for(spec.run, spec.slot, spec.attempt, known)
        try:
            ids, _ = wait_for_answer(lambda: sky().jobs.launch(self.task(spec), name=job_name(spec)))
            return self._handle_for(spec.run, spec.slot, spec.attempt, SkyJob(ids[0], job_name(spec), "PENDING", ""))
        except Exception as error:  # the job may exist although its answer was lost
            if (job := self._newest_by_name().get(job_name(spec))) is not None:
                return self._handle_for(spec.run, spec.slot, spec.attempt, job)
            words = str(error) if isinstance(error, ExecutorError) else f"{type(error).__name__}: {error}"
            return NotStarted(words, State.LOST if isinstance(error, Unavailable | Refused) else State.FAILED)

    def task(self, spec: ReplicaSpec) -> Any:
        """Return the sky.Task of one replica."""
        folder = self._code_folder()
        install = shlex.join(["pip", "install", "-q", "-r", f"{MOUNT}/{folder.name}/requirements.txt", *self._pip])
        check = check_command() if self._vllm else ""
        setup = "\n".join(filter(None, [install, self._setup.strip(), check]))
        request = json.dumps({**spec.to_dict(), "secrets": []})
        task = sky().Task(
            name=job_name(spec),
            setup=setup,
            run=f"exec python -m executors.platforms.container {shlex.quote(request)} {NAME}",
            envs=dict(spec.env),
            secrets={name: os.environ[name] for name in spec.secrets},
            file_mounts={f"{MOUNT}/{folder.name}": str(folder)},
        )
        kinds = spec.gpu or (None,)  # in order of preference
        task.set_resources([sky().Resources(accelerators=kind, **self._resources) for kind in kinds])
        return task

    def _code_folder(self) -> Path:
        shipment = pack_code(MOUNT, self._packages, vllm=self._vllm)
        folder = Path.home() / ".diloco" / NAME / shipment.digest
        with launches_wait("the code that jobs are sent"):
            folder.mkdir(parents=True, exist_ok=True)
            for name, body in shipment.files.items():
                (folder / name).write_bytes(body)
        return folder

    def _handle_for(self, run: str, slot: str, attempt: int, job: SkyJob) -> Handle:
        return Handle(run, slot, attempt, NAME, native=str(job.id), usd_per_hour=self.usd_per_hour)

    # ------------------------------------------------------------------ watching

    def observe(self, handles: Sequence[Handle]) -> list[Status | ExecutorError]:
        """Return a status per handle, from one request for all jobs, and a request for the log of each failed job."""
        jobs = {j.id: j for j in _list_jobs([int(h.native) for h in handles])}
        return [answer_or_error(lambda h=h: self._status_from(h, jobs.get(int(h.native)))) for h in handles]

    def _status_from(self, handle: Handle, job: SkyJob | None) -> Status:
        if job is None:
            return Status(handle, State.LOST, "SkyPilot knows no such job any more")
        if job.state is State.SUCCEEDED:
            return Status(handle, job.state, processes.describe_exit(0), 0)
        if job.state is not State.FAILED:
            return Status(handle, job.state, job.why)
        starved = oom.says_out_of_memory(job.why)
        if (end := read_end(_read_log(handle, END_LINES))) is not None:
            status = ended_as(handle, end, why=job.why if starved else "")
            return status if status.exit_code else replace(status, state=State.FAILED)  # as SkyPilot says
        why = job.why or "it failed without a report of its end"
        return Status(handle, State.FAILED if starved else State.LOST, why)

    def _newest_by_name(self) -> dict[str, SkyJob]:
        """Return all jobs by name.  If two jobs have one name (after a lost answer), return the older job."""
        self._listed_at = self._clock.now()
        self._listed = sorted(_list_jobs(), key=lambda job: -job.id)
        return {job.name: job for job in self._listed}

    def read_log(self, handle: Handle, tail: int | None = None) -> list[str]:
        return replica_lines(_read_log(handle))

    def read_value(self, handle: Handle) -> Any:
        return (read_end(_read_log(handle)) or {}).get("value")

    # ------------------------------------------------------------------ ending

    def stop(self, handles: Sequence[Handle], kill: bool) -> None:
        """Cancel the jobs, and wait for the answer, because the server may accept a request and fail later."""
        with suppress(NoController):  # without a controller there are no jobs
            names = {job.id: job.name for job in _list_jobs([int(h.native) for h in handles])}
            ids = [int(h.native) for h in handles if names.get(int(h.native)) == job_name(h)]
            if ids:  # only jobs whose name in the queue is this run's
                wait_for_answer(lambda: sky().jobs.cancel(job_ids=ids))

    def alive(self, run: str) -> list[Handle]:
        if self._clock.now() - self._listed_at > LISTED_S:  # polls ask only about known jobs
            with suppress(ExecutorError):  # without an answer there is no news
                self._newest_by_name()
        listed = self._handles_of(run, [job for job in self._listed if not job.state.ended])
        return [handle for handle in listed if not self.known.has_ended(handle)]  # a poll may be newer than the list

    def discover(self, run: str) -> list[Handle]:
        return sorted(self._handles_of(run, self._newest_by_name().values()), key=lambda handle: handle.attempt)

    def _handles_of(self, run: str, jobs: Iterable[SkyJob]) -> list[Handle]:
        """Return handles of the jobs whose names show that they belong to this run."""
        named = [(re.fullmatch(rf"diloco-{run_digest(run, 8)}-(\w+)-(\d+)", job.name), job) for job in jobs]
        return [self._handle_for(run, found[1], int(found[2]), job) for found, job in named if found]


class NoController(ExecutorError):
    """SkyPilot's jobs controller does not run: no job was ever launched, or all jobs are gone."""


def wait_for_answer(request: Callable[[], Any]) -> Any:
    """Return the server's answer to a request (a call itself returns only a request id); translate its errors."""
    with translated_errors():
        return sky().get(request())


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise SkyPilot's errors as ours."""
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


def _list_jobs(ids: list[int] | None = None) -> list[SkyJob]:
    try:
        rows = wait_for_answer(lambda: sky().jobs.queue_v2(refresh=False, job_ids=ids, fields=FIELDS))[0]
    except NoController:  # no job was ever launched
        return []
    return [SkyJob(r.job_id, r.job_name or "", r.status.value, r.failure_reason or r.details or "") for r in rows]


def _read_log(handle: Handle, tail: int | None = None) -> list[str]:
    with translated_errors():
        asked = {"job_id": int(handle.native), "follow": False, "tail": tail}
        pieces = sky().jobs.tail_logs(**asked, preload_content=False)
        return [PREFIX.sub("", line) for line in "".join(filter(None, pieces)).splitlines()]


def sky() -> Any:
    try:
        module = import_module("sky")
        import_module("sky.jobs")  # `import sky` does not load it
    except ImportError:
        raise ExecutorError("SkyPilot is not installed here: pip install 'serverless-diloco[sky]'") from None
    return module


def job_name(one: ReplicaSpec | Handle) -> str:
    return f"diloco-{run_digest(one.run, 8)}-{one.slot}-{one.attempt}"
