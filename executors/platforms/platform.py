"""The verbs that a place for replicas has to offer; the life of a process around them is written once (executor.py).

    submit(specs) ─▶ handles      observe(handles) ─▶ statuses      stop(handles)      read_log(handle) ─▶ lines
    discover(run) ─▶ handles      plan_line(spec) ─▶ words

Six methods make a platform.  The others have an answer that fits most of them; a platform overrides what differs.

    class ToyExecutor(Executor): name = "toy" …          examples/toy_platform/toy.py is a whole one

Not promised: an order between calls of the verbs, but that `submit` of a process comes before the rest of its verbs or
another launcher has started it.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from executors.platforms.base import ExecutorError, Handle, ReplicaSpec, State, Status

if TYPE_CHECKING:
    from executors.platforms.machine.logfile import LogFile


@dataclass(frozen=True)
class NotStarted:
    """The reason why a spec has no process.   state: LOST where the platform may have started it all the same."""

    reason: str
    state: State = State.FAILED


class Platform(ABC):
    """A place where processes run.

    first_state: the state of a process before the platform has told one.
    pause_s: between two polls of `collect` and two reads of `follow`, at most.
    id_form: the platform's spelling of an id; another spelling names nothing there.
    own_grace: the platform waits between asking and killing by itself, and `stop` is called once for a cancellation.
    """

    name: str
    first_state = State.STARTING
    pause_s = 2.0
    own_grace = False
    id_form = r"[A-Za-z0-9][\w.:/-]*"

    # ------------------------------------------------------------------ the six

    @abstractmethod
    def plan_line(self, spec: ReplicaSpec) -> str:
        """Say what a launch of this spec would start."""

    @abstractmethod
    def submit(self, specs: Sequence[ReplicaSpec]) -> Sequence[Handle | NotStarted]:
        """Start them, all at once; -> one answer each, in their order.

        A process of the same (run, slot, attempt) that was started before is the answer; none is started twice.
        Raises ExecutorError if nothing could be started at all.
        """

    @abstractmethod
    def observe(self, handles: Sequence[Handle]) -> Sequence[Status | ExecutorError]:
        """Ask for all of them in one batch; an error stands for each that got no answer.

        Raises ExecutorError if none of them got one: Unavailable, or Refused where credentials are the reason.
        """

    @abstractmethod
    def stop(self, handles: Sequence[Handle], kill: bool) -> Collection[Handle] | None:
        """Ask these processes to leave, or kill them; -> those that could not be told, and are told again.

        A log may have named them: one that is not of its handle's run, by the platform's own word, is left alone.
        """

    @abstractmethod
    def discover(self, run: str) -> Iterable[Handle]:
        """Find the processes of a run from durable data alone; of each slot the best one comes last."""

    def read_log(self, handle: Handle, tail: int | None = None) -> list[str]:
        """Read the lines that the process printed; at least the last `tail` of them."""
        file = self.log_file(handle)
        return [] if file is None else file.lines(tail)

    # ------------------------------------------------------------------ what is as usual on most platforms

    def log_file(self, handle: Handle) -> "LogFile | None":
        """The log, where it is a file that can be read here: then `read_log` is written already."""
        return None

    def fault_of(self, spec: ReplicaSpec) -> str:
        """Say why this spec cannot be started, or "".  Raises ExecutorError if no spec of this launch can."""
        return ""

    def price_of(self, spec: ReplicaSpec) -> float | None:
        """Dollars per hour; None where the price is unknown."""
        return 0.0

    def plan_notes(self, specs: Sequence[ReplicaSpec]) -> Iterable[str]:
        """More lines of a plan, about all specs together."""
        return ()

    def new_handle(self, spec: ReplicaSpec) -> Handle:
        """The handle of a spec that has no process."""
        return Handle(spec.run, spec.slot, spec.attempt, self.name)

    def is_ours(self, handle: Handle) -> bool:
        """Whether it is of this platform.  A log may name any."""
        return handle.executor == self.name

    def is_started(self, handle: Handle) -> bool:
        """Whether the handle names a process.  Where that is not `native`, the platform's id of it, override this."""
        return bool(handle.native)

    def memory_key(self, handle: Handle) -> Hashable:
        """The key of its last status in memory: the process, or the launch where a handle means its launch."""
        return handle

    def read_value(self, handle: Handle) -> Any:
        """The value that the function returned, of a process that has succeeded."""
        return None

    def stream_log(self, handle: Handle) -> Iterable[str]:
        """The lines from the first on, until the connection ends.  Raises Unavailable if it breaks."""
        return self.read_log(handle)

    def renew(self, handles: Sequence[Handle], until: float) -> bool:
        """Tell these processes that their launcher lives, which counts until then (Unix time); -> whether they can be
        told."""
        return False

    def alive(self, run: str) -> Collection[Handle]:
        """The processes of the run that lived when the platform was asked last, by a poll or by `discover`."""
        return ()


def answer_or_error(ask: Callable[[], Status]) -> Status | ExecutorError:
    """One answer of `observe`: where a process costs a request of its own, its trouble is not that of the others."""
    try:
        return ask()
    except ExecutorError as error:
        return error


def missing_secret(spec: ReplicaSpec) -> str:
    """Say which of the spec's secrets is not an environment variable here, or ""."""
    missing = [name for name in spec.secrets if name not in os.environ]
    return f"the secret {missing[0]} is not set here; `export {missing[0]}=…` before the launch" if missing else ""
