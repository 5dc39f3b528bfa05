"""The protocol of all platforms that run replicas: six methods, and further methods that a supervisor needs.

    ServerlessExecutor
      launch_replicas ──▶ handles ──poll──▶ statuses     PENDING ─▶ STARTING ─▶ RUNNING ─┬▶ SUCCEEDED
                             ├──cancel──▶ (asked to leave)                               ├▶ FAILED    its own fault
                             ├──collect─▶ results                                        ├▶ CANCELLED we asked
                             └──logs, follow ─▶ lines                                    └▶ LOST      killed, gone
    FleetExecutor(ServerlessExecutor)
      specs ──plan──▶ effects and price      find(run) ──▶ handles, also in another process without local state

A replica needs only the run's URL and its slot as input.  Specs, handles and statuses can be stored as JSON.
An executor only reports the end of a replica; the supervisor replaces it.

Not promised: that a RUNNING replica makes progress; its heartbeat in the bucket shows that.
"""

import hashlib
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from importlib import import_module
from typing import Annotated, Any, Protocol, Self, runtime_checkable

from rendezvous.records.records import Count, Holder, Key, Pid, UnixTime, Usd, Word
from rendezvous.records.schema import Longest, Where, Within

RANK_ENV = "REPLICA_RANK"
REPLICA = "diloco.replica:main"
LAUNCH = "launch"  # in place of a platform's name, in an outage of launches
LEASE_S = 1800.0  # seconds after which replicas of a run without a supervisor end, so that they are not billed longer


class ExecutorError(ValueError):
    """A platform cannot do what was asked.  The text says what happened, what was seen, and what to do next."""


class Unavailable(ExecutorError):
    """A platform does not answer now; the same request may work later."""


class Refused(ExecutorError):
    """A platform denies access (401, 403): the user must give other credentials or rights."""


class State(StrEnum):
    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    LOST = "LOST"

    @property
    def ended(self) -> bool:
        return self in (State.SUCCEEDED, State.FAILED, State.CANCELLED, State.LOST)


def short_name(run: str, digits: int = 8) -> str:
    """Return a run's URL as a name of letters, digits and dashes: the readable end of the URL, and its digest."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", run.partition("://")[2] or run).strip("-")[-40:].strip("-")
    return f"{words}-{run_digest(run, digits)}".lstrip("-")


def run_digest(run: str, digits: int) -> str:
    return hashlib.sha256(run.encode()).hexdigest()[:digits]


def load_name(name: str) -> Any:
    """Import the function of "package.module:function", or `main` of "package.module"."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function or "main")


class Plain:
    """A dataclass that converts to and from JSON."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in raw.items() if k in known})


@dataclass(frozen=True)
class ReplicaSpec(Plain):
    """One process to start.

    entrypoint: "package.module[:function]"; without a function, `main`.
    argv: the call is function(list(argv)), and its return value is the exit code (None: 0).
    kwargs: if given, the call is function(**kwargs), and its return value is the result.
    env: environment variables; set before heavy imports only if `fresh`.   fresh: start a new interpreter.
    gpu: the platform's names of GPUs, in order of preference; (): CPU only.   secrets: names, never values.
    timeout_s: longest run time (0: the executor's limit); the process ends by itself before that time is over.
    lease_s: the process also ends if its launcher has not renewed its lease for lease_s (short_form.py); 0: no lease.
    """

    run: str
    slot: str
    attempt: int = 1
    entrypoint: str = REPLICA
    argv: tuple[str, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    fresh: bool = False
    gpu: tuple[str, ...] = ()
    timeout_s: float = 0.0
    secrets: tuple[str, ...] = ()
    lease_s: float = 0.0


def _is_id(native: str) -> bool:
    """Whether an id is empty, or is a word that no command line would parse as an option."""
    return re.fullmatch(r"|[A-Za-z0-9][\w.:/-]*", native, re.ASCII) is not None


@dataclass(frozen=True)
class Handle(Plain):
    """One launched process; any launcher on the same platform can find it again.

    host, pid, started (clock ticks since boot): these three identify a process of a machine (process/processes.py).
    files: path of its files, for people to read; "" if only its claim was found.   native: the platform's id (a
    FunctionCall, a job; "" if the launch failed).   launched_at: Unix time.   usd_per_hour: its price, None if
    unknown.

    `from_json` checks types and ranges of the fields.  Only the platform knows whether the process belongs to the
    run.
    """

    run: Key
    slot: Holder
    attempt: Annotated[int, Within(0, 10**9)]
    executor: Annotated[str, Longest(64), Where(_is_id, "name of an executor")]
    host: Word = ""
    pid: Pid = 0
    started: Count = 0
    files: str = ""
    native: Annotated[str, Longest(128), Where(_is_id, "id on a platform")] = ""
    launched_at: UnixTime = 0.0
    usd_per_hour: Usd | None = 0.0

    @property
    def place(self) -> str:
        """The host name in the process's claim and heartbeats if it runs on a platform (container.py), else ""."""
        return f"{self.executor}/{self.slot}.{self.attempt}" if self.native else ""


@dataclass(frozen=True)
class Status(Plain):
    """An executor's present knowledge about a process.  exit_code: negative for a signal, None if unknown.

    stale: the platform did not answer; this is an earlier status.   trouble: the reason.   refused: access was denied.
    began_at, ended_at: Unix times between which the platform ran an ended process; 0 if the platform does not say.
    """

    handle: Handle
    state: State
    reason: str = ""
    exit_code: int | None = None
    stale: bool = False
    trouble: str = ""
    refused: bool = False
    began_at: float = 0.0
    ended_at: float = 0.0


def unanswered(known: Status, why: Exception | str) -> Status:
    """Return the known status, marked as stale, with the reason why the platform did not answer."""
    return replace(known, stale=True, trouble=str(why), refused=isinstance(why, Refused))


def last_lines(lines: Sequence[str], tail: int | None) -> list[str]:
    """Return the last `tail` lines; all lines for None."""
    return list(lines if tail is None else lines[-tail:] if tail > 0 else ())


@dataclass(frozen=True)
class Result(Plain):
    """The end of one replica.   value: the function's return value.   tail: the last log lines of a failure."""

    handle: Handle
    state: State
    reason: str = ""
    exit_code: int | None = None
    value: Any = None
    tail: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.state is State.SUCCEEDED


@dataclass(frozen=True)
class LaunchPlan(Plain):
    """The effects and the price of a launch.   usd_per_hour: sum over all specs, None if one price is unknown.

    refused: a sentence for each reason why some specs could not be launched.
    """

    lines: tuple[str, ...]
    usd_per_hour: float | None = 0.0
    refused: tuple[str, ...] = ()


@runtime_checkable
class ServerlessExecutor(Protocol):
    """Starts processes on a platform, and reports their statuses and results.

    The answer to a launch may be lost, and a platform's list may be out of date, so two processes of one (slot,
    attempt) may run.  Their launch has one handle: a poll reports the process that counts, in Status.handle, and ends
    the other processes.
    """

    @abstractmethod
    def launch_replicas(
        self,
        specs: Sequence[ReplicaSpec] | None = None,
        *,
        n_replicas: int = 0,
        entrypoint: str | Callable[..., Any] = REPLICA,
        entrypoint_args: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        rank_env: str = RANK_ENV,
        run: str = "",
        lease: bool = True,
    ) -> list[Handle]:
        """Launch these specs, all at once; or, in the short form (short_form.py), the same function n times.

        A repeated launch of one (run, slot, attempt) returns the same handle, in any process.  If only some specs can
        start, the others get FAILED handles.  If none can start, raise ExecutorError and start nothing: no credentials,
        an unknown GPU, a run that the platform cannot reach.
        """

    @abstractmethod
    def poll(self, handles: Iterable[Handle]) -> list[Status]:
        """Return the status of each process; do not wait for processes to end, and do not raise for a dead process."""

    @abstractmethod
    def cancel(self, handles: Iterable[Handle], grace_s: float = 15.0) -> None:
        """Ask the processes to end, and return at once.  After `grace_s`, a poll kills processes that still run."""

    @abstractmethod
    def collect(self, handles: Sequence[Handle], timeout: float | None = None) -> list[Result]:
        """Wait for all processes, at most `timeout` s; return results in the order of handles, or "still running"."""

    @abstractmethod
    def logs(self, handle: Handle, tail: int | None = None) -> list[str]:
        """Return the process's output so far, or only its last `tail` lines."""

    @abstractmethod
    def follow(self, handle: Handle, tail: int | None = None) -> Iterator[str]:
        """Yield the process's lines so far (the last `tail`) and then each new line, until it has ended.  After a
        dropped connection, connect again; each line comes once."""


class FleetExecutor(ServerlessExecutor, Protocol):
    """The further methods that a run's supervisor needs; the short form needs none of these methods.

    labelled: the platform labels each process with its run, so it also finds processes of other launchers.
    hosts_supervisor: a run's supervisor can run on the platform (`start_supervisor`).

    The default methods here suit a platform without these abilities.
    """

    name: str
    labelled: bool = False
    hosts_supervisor: bool = False

    @abstractmethod
    def plan(self, specs: Sequence[ReplicaSpec]) -> LaunchPlan:
        """Return what a launch of these specs would do, without side effects."""

    @abstractmethod
    def find(self, run: str) -> list[Handle]:
        """Find the newest process of each slot of a run, from durable data alone, not from this executor's memory."""

    def expect(self, specs: Sequence[ReplicaSpec]) -> None:
        """Note specs of later launches, so that the next launch also prepares for them (only Modal needs this)."""

    def start_supervisor(self, spec: ReplicaSpec, replicas: Sequence[ReplicaSpec]) -> Handle:
        """Start a run's supervisor on small hardware; without spec.timeout_s its limit is the platform's longest.

        replicas: one spec of each kind that the supervisor may launch.
        """
        raise ExecutorError(f"{self.name} has no place for a supervisor; `diloco train --detach` starts one here")

    def orphans(self, run: str, known: Collection[Handle]) -> list[Handle]:
        """Return the run's live processes, as the last poll or find saw them, that are not in `known`."""
        return []

    def sweep_all(self, dry_run: bool = False) -> list[str]:
        """End this project's processes on the platform, of all runs and launchers; return a description of each.

        dry_run: only describe them.   Raise ExecutorError if the platform cannot list them.
        """
        raise ExecutorError(f"{self.name} cannot list the processes started there; `diloco stop RUN` ends one run")

    def sweep(self, run: str) -> list[str]:
        """End all processes of the run, of any launcher; return a description of each.  Raises ExecutorError."""
        return []

    def purge(self, run: str) -> list[str]:
        """Remove the objects that the platform keeps for a run without live processes; return a description of each."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Release local resources.  Never stops a replica."""


def require_fleet(executor: object) -> None:
    """Raise ExecutorError, which names the missing members, if `executor` is not a FleetExecutor."""
    asked = [name for kind in (ServerlessExecutor, FleetExecutor) for name in (*kind.__annotations__, *vars(kind))]
    if missing := sorted({name for name in asked if name[0] != "_" and not hasattr(executor, name)}):
        raise ExecutorError(
            f"{type(executor).__name__} cannot be supervised: it has no {', '.join(missing)}. "
            "You can still call launch_replicas and collect. For `train`, make it a subclass of FleetExecutor, which "
            "defines all but plan, find and close, or of Executor, which needs six methods (docs/executors.md)"
        )
