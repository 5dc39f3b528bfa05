"""The methods that a platform implements; executor.py has the common code that calls them.

    submit(specs) ─▶ handles      observe(handles) ─▶ statuses      stop(handles)      read_log(handle) ─▶ lines
    discover(run) ─▶ handles      plan_line(spec) ─▶ words

Every platform implements these six methods.  The other methods have defaults that fit most platforms.

    room_for(folder), launches_wait("…") ──▶ Unavailable     a full disk: a process without room would die; launch later

    class ToyExecutor(Executor): name = "toy" …          examples/toy_platform/toy.py is a complete example

Not promised: an order of calls, except one: a launcher (this or another launcher) has submitted a process before the
other methods get the process's handle.
"""

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.process.disk import is_full
from diloco.process.output import FULL
from diloco.process.own_files import read_json
from executors.platforms.base import ExecutorError, Handle, ReplicaSpec, State, Status, Unavailable
from rendezvous.records.schema import from_json

if TYPE_CHECKING:
    from executors.platforms.machine.logfile import LogFile

CARD = b" " * 4096  # as large as a process file and the first lines of its log; `room_for` tries to write this


@dataclass(frozen=True)
class NotStarted:
    """The reason why a spec has no process.   state: LOST if the spec is not at fault (no answer, access, capacity)."""

    reason: str
    state: State = State.FAILED


class Platform(ABC):
    """A service or machine that runs processes.

    first_state: the state of a process before the platform's first answer about it.
    pause_s: longest pause between two polls of `collect`, or two reads of `follow`.
    id_form: a regular expression for the platform's ids; any other text is not an id there.
    usd_per_hour: the price of a replica, if all cost the same; None if it is unknown.
    own_grace: the platform itself kills a process some time after asking it, so `stop` is called only once.
    """

    name: str
    first_state = State.STARTING
    pause_s = 2.0
    usd_per_hour: float | None = 0.0
    own_grace = False
    id_form = r"[A-Za-z0-9][\w.:/-]*"

    # ------------------------------------------------------------------ required methods

    @abstractmethod
    def plan_line(self, spec: ReplicaSpec) -> str:
        """Describe what a launch of this spec would start."""

    @abstractmethod
    def submit(self, specs: Sequence[ReplicaSpec]) -> Sequence[Handle | NotStarted]:
        """Start processes for the specs, all at once; return one answer per spec, in the same order.

        If a process of the same (run, slot, attempt) was started before, return it, and start no second one.
        Raise ExecutorError if no spec could be started.
        """

    @abstractmethod
    def observe(self, handles: Sequence[Handle]) -> Sequence[Status | ExecutorError]:
        """Return the status of each process, from one batch; an error for each process without an answer.

        Raise ExecutorError if the platform did not answer: Unavailable, or Refused if it rejects the credentials.
        """

    @abstractmethod
    def stop(self, handles: Sequence[Handle], kill: bool) -> Collection[Handle] | None:
        """Ask these processes to leave, or kill them; return the handles that were not reached, to try again later.

        A handle may come from a forged log: leave a process alone if the platform says that it is of another run.
        """

    @abstractmethod
    def discover(self, run: str) -> Iterable[Handle]:
        """Find the processes of a run, from durable data alone; of each slot's processes, the best comes last.

        run: the run's URL, spelled as in the specs of its launches."""

    def read_log(self, handle: Handle, tail: int | None = None) -> list[str]:
        """Return the lines that the process printed, or at least the last `tail` of them."""
        file = self.log_file(handle)
        return [] if file is None else file.lines(tail)

    # ------------------------------------------------------------------ methods with a default for most platforms

    def log_file(self, handle: Handle) -> "LogFile | None":
        """Return the log if it is a file that can be read here; then `read_log` needs no override."""
        return None

    def fault_of(self, spec: ReplicaSpec) -> str:
        """Return why this spec cannot be started, or "".  Raise ExecutorError if no spec of the launch can start."""
        return ""

    def price_of(self, spec: ReplicaSpec) -> float | None:
        """Return dollars per hour; None if the price is unknown."""
        return self.usd_per_hour

    def plan_notes(self, specs: Sequence[ReplicaSpec]) -> Iterable[str]:
        """Return more lines of a plan, about all specs together."""
        return ()

    def nameless_run(self) -> str:
        """Return a URL for an unnamed run in the short form; "" to let the base class make the usual URL."""
        return ""

    def new_handle(self, spec: ReplicaSpec) -> Handle:
        """Return a handle for a spec without a process."""
        return Handle(spec.run, spec.slot, spec.attempt, self.name)

    def is_ours(self, handle: Handle) -> bool:
        """Whether the handle belongs to this platform; a handle from a log may belong to any platform."""
        return handle.executor == self.name

    def is_started(self, handle: Handle) -> bool:
        """Whether the handle names a process.  Override this if a process is not named by its id in `native`."""
        return bool(handle.native)

    def memory_key(self, handle: Handle) -> Hashable:
        """Return the key of the handle's last status: the handle, or its launch if several jobs may run one launch."""
        return handle

    def read_value(self, handle: Handle) -> Any:
        """Return the return value of the function, for a process that has succeeded."""
        return None

    def stream_log(self, handle: Handle) -> Iterable[str]:
        """Return the lines from the first on, until the connection ends.  Raises Unavailable if it breaks."""
        return self.read_log(handle)

    def renew(self, handles: Sequence[Handle], until: float) -> bool:
        """Renew the launcher's lease of these processes until a Unix time; return whether the platform supports
        leases."""
        return False

    def alive(self, run: str) -> Collection[Handle]:
        """Return the run's processes that were alive at the last request to the platform, by a poll or `discover`."""
        return ()


def answer_or_error(ask: Callable[[], Status]) -> Status | ExecutorError:
    """Return a status or an ExecutorError, for an `observe` that needs a request per process."""
    try:
        return ask()
    except ExecutorError as error:
        return error


def launches_named(run: str, platform: str, names: Iterable[str]) -> list[Handle]:
    """Return a handle for each file name such as "r00.1" (slot r00, attempt 1); skip other names."""
    parts = [name.rpartition(".") for name in names]
    return [Handle(run, slot, int(n), platform) for slot, _, n in parts if n.isascii() and n.isdecimal()]


def read_card(file: str | Path, known: Handle, files: str) -> Handle | None:
    """Read the handle in a launch's file; None if it has no valid handle.  Take run, slot and attempt from `known`."""
    try:
        card = from_json(Handle, read_json(file))
    except ValueError:
        return None
    about = {"run": known.run, "slot": known.slot, "attempt": known.attempt, "executor": known.executor}
    return replace(card, **about, files=files)


def missing_secret(spec: ReplicaSpec) -> str:
    """Return an error text for a secret of the spec that is not an environment variable here, or ""."""
    missing = [name for name in spec.secrets if name not in os.environ]
    return f"the secret {missing[0]} is not set here; `export {missing[0]}=…` before the launch" if missing else ""


def room_for(folder: Path) -> None:
    """Raise Unavailable if `folder` has no room for the files of a process."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(CARD)
    except OSError as error:
        if error.errno in FULL:
            raise no_launch(error, "the processes' files", str(folder)) from error


@contextmanager
def launches_wait(what: str) -> Iterator[None]:
    """Raise Unavailable if a launch finds no space for `what`.  The launch is tried later, and counts as no failure."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise no_launch(error, what) from error
        raise


def no_launch(error: OSError, what: str, folder: str = "") -> Unavailable:
    """Return an error for a launch without disk space.   folder: the folder without space, if `error` names no file."""
    from diloco.process.full_disk import full_disk_words

    words = f"no space left on this machine's disk for {what} ({folder})" if folder else full_disk_words(error, what)
    return Unavailable(f"{words}. Free some space. Until then, no replica is started; running replicas continue")
