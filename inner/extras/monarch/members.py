"""Call an actor by its role: find the process that has the role now, and call again if that process is lost.

    ask(question) ─▶ the actor ─▶ its answer
                     └ its process is gone ─▶ wait until the ReplicaActor has the next incarnation ─▶ ask that one

Monarch reports the end of a process about five seconds after it, as a SupervisionError.  If Monarch reports nothing
(exit code 0 is not a failure for Monarch), the waiting caller checks the process itself and tells the ReplicaActor.  An
error that an actor raises is an answer: the caller gets it.

Not promised: an end of the wait if an actor never answers but its process runs.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import (  # pyright: ignore[reportMissingImports]
    SupervisionError,
)
from monarch.actor import Actor, ActorError, endpoint  # pyright: ignore[reportMissingImports]

from inner.errors import InnerError

TRAINER, GENERATOR, SDPO_TEACHER = "trainer", "generator", "sdpo_teacher"
PAUSE_S = 0.1
LOOK_EVERY_S = 5.0  # seconds between two checks of a process that has not answered
TELL_AFTER_S = 20.0  # after this, tell the ReplicaActor that the old incarnation is lost
START_S = 600.0  # longest time for a new process to load its model
PATIENCE_S = 120.0  # longest wait for the next incarnation


def replay_role(index: int) -> str:
    return f"replay_client_{index}"


class RoleActor(Actor):
    """One actor in its own process, which `ps` and `pkill` show under its role: `pkill -9 -x generator`."""

    def __init__(self, role: str) -> None:
        with suppress(OSError):  # not every system lets a process set its name
            Path("/proc/self/comm").write_text(role[:15])

    @endpoint
    def process_id(self) -> int:
        return os.getpid()


class Member:
    """One role.   replica: a reference to the ReplicaActor.   incarnation: counts the role's processes, from 1."""

    def __init__(self, replica: Any, role: str) -> None:
        self._replica = replica
        self._role = role
        self._actor: Any = None
        self._process_id = 0
        self.incarnation = 0

    def ask(self, question: Callable[[Any], Any]) -> Any:
        """Ask the actor of this role.   question: (actor) -> answer; uses `wait` for each call; repeatable.

        Raises the actor's error: an InnerError as it is, other errors inside Monarch's ActorError."""
        while True:
            with suppress(SupervisionError, ProcessLookupError), _own_errors():
                if self._actor is None:
                    self._find_next()
                return question(self._actor)
            self._actor = None

    def wait(self, future: Any) -> Any:
        """Return the answer, however long it takes.   Raises ProcessLookupError if the process ends before that."""
        while True:
            with suppress(TimeoutError):
                return future.get(timeout=LOOK_EVERY_S)
            if not is_running(self._process_id):
                with suppress(TimeoutError):
                    return future.get(timeout=0)  # the process answered before it ended
                raise ProcessLookupError(self._role)

    def _find_next(self) -> None:
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            incarnation, actor = self._look_up(lost=self.incarnation if waited > TELL_AFTER_S else 0)
            if incarnation > self.incarnation:
                self.incarnation = incarnation
                self._process_id = _process_of(actor, self._role)
                self._actor = actor
                return
            if waited > PATIENCE_S:
                raise InnerError(
                    f"the process of the {self._role} has ended, and within {PATIENCE_S:.0f} s its ReplicaActor has "
                    "not started another. Look at this replica's output; start the replica again."
                )
            time.sleep(PAUSE_S)

    def _look_up(self, lost: int) -> tuple[int, Any]:
        """Return the newest incarnation from the ReplicaActor; 0 if it does not answer in time."""
        try:
            return self._replica.member.call_one(self._role, lost).get(timeout=TELL_AFTER_S)
        except TimeoutError:
            return 0, None
        except SupervisionError as error:
            raise InnerError(
                f"the {self._role} has ended, and so has the ReplicaActor that would start another one. Start this "
                "replica again: it joins its run at the last outer step."
            ) from error


def _process_of(actor: Any, role: str) -> int:
    try:
        return actor.process_id.call_one().get(timeout=START_S)
    except TimeoutError:
        raise ProcessLookupError(role) from None


def is_running(pid: int) -> bool:
    """Whether the process runs.  An ended process stays in /proc until its parent reads its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        if Path("/proc/self/stat").exists():
            return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise an actor's InnerError itself. Raise any other error as Monarch's ActorError, which shows its traceback."""
    try:
        yield
    except ActorError as error:
        raise (error.exception if isinstance(error.exception, InnerError) else error) from None
