"""The protocol of every platform that runs replicas, in plain data: six verbs, and a supervisor's further questions.

    ServerlessExecutor
      launch_replicas ──▶ handles ──poll──▶ statuses     PENDING ─▶ STARTING ─▶ RUNNING ─┬▶ SUCCEEDED
                             ├──cancel──▶ (asked to go)                                  ├▶ FAILED    its own fault
                             ├──collect─▶ results                                        ├▶ CANCELLED we asked
                             └──logs, follow ─▶ lines                                    └▶ LOST      killed, gone
    FleetExecutor, of which those are a part
      specs ──plan──▶ what it would do       find(run) ──▶ handles, from another process and with no local state

A replica's whole input is the run's URL and its slot.  Specs, handles and statuses survive JSON.
An executor reports; only the supervisor replaces.

Not promised: that a RUNNING replica makes progress; its heartbeat in the bucket tells.
"""

import hashlib
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from importlib import import_module
from typing import Annotated, Any, Protocol, Self

from rendezvous.clock import Clock
from rendezvous.records.records import Count, Holder, Key, Pid, UnixTime, Usd, Word
from rendezvous.records.schema import Longest, Where, Within

RANK_ENV = "REPLICA_RANK"
REPLICA = "diloco.replica:main"
FIRST_PAUSE_S = 0.02


class ExecutorError(ValueError):
    """A platform cannot do this as asked: what happened, what was seen, and the next thing to do."""


class Unavailable(ExecutorError):
    """A platform does not answer now; the same may work later."""


class Refused(ExecutorError):
    """A platform answers, and does not let us in (401, 403): a person must give other credentials or rights."""


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
    """A run's URL in letters, digits and dashes, as names and labels may have them: its end for people, its digest."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", run.partition("://")[2] or run).strip("-")[-40:].strip("-")
    return f"{words}-{run_digest(run, digits)}".lstrip("-")


def run_digest(run: str, digits: int) -> str:
    return hashlib.sha256(run.encode()).hexdigest()[:digits]


def load_name(name: str) -> Any:
    """ "package.module:function" -> the function; `main` where none is named."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function or "main")


class Plain:
    """A dataclass that goes to JSON and back."""

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
    argv: called as function(list(argv)), and its return value is the exit code (None: 0).
    kwargs: called as function(**kwargs) instead, and its return value is the result.
    env: set before anything heavy is imported only where `fresh`, which asks for a new interpreter.
    gpu: kinds in order of preference, in the platform's words; none: CPU only.   secrets: names, never values.
    timeout_s: how long the process may live (0: as long as the executor allows); it leaves by itself before that.
    lease_s: it leaves, too, once its launcher has said nothing for so long (short_form.py); 0: it asks for no word.
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
    """Whether it is empty, or a word that no command takes for an option."""
    return re.fullmatch(r"|[A-Za-z0-9][\w.:/-]*", native, re.ASCII) is not None


@dataclass(frozen=True)
class Handle(Plain):
    """One launched process, as any launcher on the same platform can find it again.

    host, pid and started (clock ticks since boot) together name a process of a machine for ever (process/host.py).
    files: where its files are, for people; "" if it was found by its claim alone.   native: its id on a platform (a
    FunctionCall, a job; "" if the launch failed).   launched_at: Unix time.   usd_per_hour: its price, None where
    it is unknown.

    A handle that was read (`from_json`) has fields of these types and ranges.  The platform tells whether it is the
    run's.
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
        """The host that its claim and beats name, where that is not this machine (container.py)."""
        return f"{self.executor}/{self.slot}.{self.attempt}" if self.native else ""


@dataclass(frozen=True)
class Status(Plain):
    """The present knowledge of an executor about a handle.  exit_code: negative for a signal, None if it is unknown.

    stale: the platform gave no news; this is the status known before.   trouble: why.   refused: it did not let us in.
    began_at, ended_at: Unix times between which the platform ran it, once it has ended; 0 where it does not tell.
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
    """The status known before, marked as stale, with the reason why there is no news."""
    return replace(known, stale=True, trouble=str(why), refused=isinstance(why, Refused))


@dataclass(frozen=True)
class Result(Plain):
    """The end of one replica.  value: its function's return value; tail: its last log lines if it failed."""

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
    """The effects and the price of a launch.   usd_per_hour: of all together, None when one of the prices is unknown.

    refused: why some of them could not be launched, in sentences.
    """

    lines: tuple[str, ...]
    usd_per_hour: float | None = 0.0
    refused: tuple[str, ...] = ()


class ServerlessExecutor(Protocol):
    """Starts processes somewhere, and reports how they are and how they ended: six verbs.

    The answer to a launch may be lost, and a platform's list may lag behind, so two processes of one (slot, attempt)
    may live.  There a handle means its launch: a poll reports the process that runs it, in Status.handle, and ends the
    others.
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

        The same (run, slot, attempt) again gives the same handle, from any process.  A failed start is a FAILED handle,
        so that some may start.  Raises ExecutorError before anything was started if nothing could be: no credentials,
        an unknown GPU, a run that the platform cannot reach.
        """
        ...

    @abstractmethod
    def poll(self, handles: Iterable[Handle]) -> list[Status]:
        """Report all at once; never blocks, never raises for a dead one."""
        ...

    @abstractmethod
    def cancel(self, handles: Iterable[Handle], grace_s: float = 15.0) -> None:
        """Ask the processes to leave; returns at once.  A later poll kills those that remain after `grace_s`."""
        ...

    @abstractmethod
    def collect(self, handles: Sequence[Handle], timeout: float | None = None) -> list[Result]:
        """Wait for all; -> results in the order of handles.  After `timeout` seconds, those that still run say so."""
        ...

    @abstractmethod
    def logs(self, handle: Handle, tail: int | None = None) -> list[str]:
        """Its output so far; the last `tail` lines only."""
        ...

    @abstractmethod
    def follow(self, handle: Handle, tail: int | None = None) -> Iterator[str]:
        """Its output so far and its further lines, until it has ended.  A dropped connection is opened again, and each
        line comes once."""
        ...


class FleetExecutor(ServerlessExecutor, Protocol):
    """The further questions of a run's supervisor; the short form needs none of them.

    labelled: it labels every process with its run, so that it finds also those of other launchers.
    hosts_supervisor: a run's supervisor can live there (`start_supervisor`).

    A method with a body here is right for a platform without these abilities.
    """

    name: str
    labelled: bool = False
    hosts_supervisor: bool = False

    @abstractmethod
    def plan(self, specs: Sequence[ReplicaSpec]) -> LaunchPlan:
        """Say what a launch of these specs would do; no side effects."""
        ...

    @abstractmethod
    def find(self, run: str) -> list[Handle]:
        """Find the newest process of each slot of a run, from durable data alone."""
        ...

    def expect(self, specs: Sequence[ReplicaSpec]) -> None:
        """Hear of launches that follow later, so that the next one prepares for them, too (Modal)."""

    def start_supervisor(self, spec: ReplicaSpec, replicas: Sequence[ReplicaSpec]) -> Handle:
        """Start a run's supervisor on something small; its time limit is the platform's longest where spec has none.

        replicas: one of each kind that it may launch.
        """
        raise ExecutorError(f"{self.name} has no place for a supervisor; `diloco train --detach` starts one here")

    def orphans(self, run: str, known: Collection[Handle]) -> list[Handle]:
        """Live processes of the run that none of `known` names, as the last poll or find saw them."""
        return []

    def sweep_all(self, dry_run: bool = False) -> list[str]:
        """End all processes of this project there, of any run and any launcher; -> what they are, in words.

        dry_run: only say it.   Raises ExecutorError where the platform cannot list it.
        """
        raise ExecutorError(f"{self.name} keeps no list of what was started there; `diloco stop RUN` ends one run")

    def sweep(self, run: str) -> list[str]:
        """End all that lives of the run, of any launcher; -> what that was, in words.  Raises ExecutorError."""
        return []

    def purge(self, run: str) -> list[str]:
        """Remove what the platform keeps of a run without live processes; -> what that was, in words."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Let go.  Never stops a replica."""
        ...


def require_fleet(executor: object) -> None:
    """Raise ExecutorError, which names the missing parts, where this is not a FleetExecutor."""
    asked = [name for kind in (ServerlessExecutor, FleetExecutor) for name in (*kind.__annotations__, *vars(kind))]
    if missing := sorted({name for name in asked if name[0] != "_" and not hasattr(executor, name)}):
        raise ExecutorError(
            f"{type(executor).__name__} cannot be supervised: it has no {', '.join(missing)}. "
            "launch_replicas … collect work without; for `train` make it a subclass of FleetExecutor, which answers "
            "all but plan, find and close, or of Executor, which needs a platform's six verbs (docs/executors.md)"
        )


def wait_for_all(poll: Callable[[], list[Status]], clock: Clock, timeout: float | None, pause_s: float) -> list[Status]:
    """Poll until all have ended, or `timeout` seconds are over; -> their statuses then.   pause_s: the longest."""
    until = math.inf if timeout is None else clock.now() + timeout
    pause = min(FIRST_PAUSE_S, pause_s)
    while True:
        statuses = poll()
        left = until - clock.now()
        if left <= 0 or all(s.state.ended for s in statuses):
            return statuses
        clock.sleep(min(pause, left))
        pause = min(pause_s, 1.5 * pause)
