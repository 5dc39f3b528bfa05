"""Owns a replica's actors: `__supervise__` starts killed actors again.

    ReplicaActor ── spawns ──▶ trainer 1   generator 1   sdpo_teacher 1   replay_client_0 1 …
         ▲                        ✗ kill -9
         └── __supervise__(failure): mesh "trainer_1-…" ─▶ spawns trainer 2, and returns it to
                                                                    callers that ask for the trainer

    with Replica(plan) as replica:                  from the outer loop's process
        ended = replica.run_round(t, weights, n)    θ after H inner steps from θ_t, even if actors were killed
        actions = replica.ask_teachers(states)

A role is started again at most `restarts` times; then the next caller gets an error with the last reason.

Not promised: to survive the death of the ReplicaActor, or of the process that made the ReplicaActor. Then start the
replica again; it joins its run at the last outer step.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import monarch.actor  # pyright: ignore[reportMissingImports]
from monarch.actor import endpoint, this_host  # pyright: ignore[reportMissingImports]

from inner.errors import InnerError
from inner.extras.monarch.actors import (
    GeneratorActor,
    ReplayPool,
    ReplicaPlan,
    SDPOTeacherActor,
    TeacherReplayActor,
    TrainerActor,
)
from inner.extras.monarch.members import GENERATOR, SDPO_TEACHER, TRAINER, Member, RoleActor, replay_role
from inner.extras.monarch.rounds import Carried, Round, Weights
from inner.replay.states import TraceState
from inner.replay.teachers import TeacherAction

STOP_S = 30.0
# For 30 s, Monarch keeps a message to a process that has left, then returns it to its sender. If `end` has stopped the
# sender by then, Monarch ends the client's process with exit code 1.  A caller reports a lost process after 20 s.
RETURNED_S = 15.0


class ReplicaActor(RoleActor):
    """Owns one actor per role."""

    def __init__(self, plan: ReplicaPlan) -> None:
        super().__init__("replica_actor")
        self._plan = plan
        self._incarnations: dict[str, int] = {}
        self._actors: dict[str, Any] = {}
        self._processes: dict[str, Any] = {}
        self._last_words: dict[str, str] = {}
        self._ending = False
        self._returned_at = 0.0  # monotonic time until which messages to lost processes may still return

    @endpoint
    def start(self, itself: Any) -> None:
        """Start all actors.   itself: a reference to this actor, with which the trainer looks up other actors."""
        self._itself = itself
        for role in roles_of(self._plan):
            self._spawn(role)

    @endpoint
    def member(self, role: str, lost: int = 0) -> tuple[int, Any]:
        """Return the role's incarnation, and its actor.   Raises InnerError for a role that has died too often.

        lost: an incarnation that the caller knows to be gone, although no failure was reported."""
        if lost and lost == self._incarnations[role]:
            self._returned_at = time.monotonic() + RETURNED_S
            self._replace(role, "it left without a failure, perhaps with exit code 0")
        if self._incarnations[role] > self._plan.restarts + 1:
            raise InnerError(
                f"the {role} was started {self._plan.restarts + 1} times, and ended each time; the last: "
                f"{self._last_words[role]}. Look at what it printed above; if it printed nothing, its machine may have "
                "too little memory."
            )
        return self._incarnations[role], self._actors[role]

    @endpoint
    def end(self) -> None:
        """Stop all actors. From now on a failure counts as a requested end."""
        self._ending = True
        time.sleep(max(0.0, self._returned_at - time.monotonic()))
        for stopping in [processes.stop() for processes in self._processes.values()]:
            with suppress(Exception):  # the actor has already ended
                stopping.get(timeout=STOP_S)

    def __supervise__(self, failure: Any) -> bool:
        """Handle a failure. Monarch calls it for each mesh of the dead process, also for its own loggers."""
        role = next((role for role in self._actors if failure.mesh_name.startswith(f"{self._name(role)}-")), None)
        if role is not None and not self._ending:
            self._replace(role, last_line(str(failure)))
        return True

    def _replace(self, role: str, why: str) -> None:
        self._last_words[role] = why
        print(f"the {role} has ended ({why}); it is started again", file=sys.stderr, flush=True)
        self._spawn(role)

    def _spawn(self, role: str) -> None:
        self._incarnations[role] = self._incarnations.get(role, 0) + 1
        if self._incarnations[role] > self._plan.restarts + 1:
            return
        actor, arguments = {
            TRAINER: (TrainerActor, (self._plan, self._itself)),
            GENERATOR: (GeneratorActor, (self._plan,)),
            SDPO_TEACHER: (SDPOTeacherActor, (self._plan,)),
        }.get(role) or (TeacherReplayActor, (self._plan, int(role.rpartition("_")[2])))
        name = self._name(role)
        self._processes[role] = this_host().spawn_procs(name=f"{name}_process")
        self._actors[role] = self._processes[role].spawn(name, actor, *arguments)

    def _name(self, role: str) -> str:
        return f"{role}_{self._incarnations[role]}"


def roles_of(plan: ReplicaPlan) -> list[str]:
    """Return the roles that this plan needs."""
    teacher = [SDPO_TEACHER] if plan.inner.sdpo.is_used else []
    return [GENERATOR, *teacher, *map(replay_role, range(plan.replay_actors)), TRAINER]


def last_line(text: str) -> str:
    """Return a failure's last line, in which Monarch names the cause."""
    lines = [line.strip() for line in text.removesuffix(")").splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


class Replica:
    """A context manager that runs a plan's actors in processes of this host."""

    def __init__(self, plan: ReplicaPlan) -> None:
        plan.check()
        self._plan = plan
        self._carried: Carried | None = None  # state after the last finished round

    def __enter__(self) -> Self:
        self._processes = this_host().spawn_procs(name="replica_process")
        self.actor: Any = self._processes.spawn("replica", ReplicaActor, self._plan)
        self.actor.start.call_one(self.actor).get()
        self._trainer = Member(self.actor, TRAINER)
        self._asked = 0  # the trainer's incarnation in the last finished round
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        monarch.actor.unhandled_fault_hook = _say_fault  # Monarch's default would exit with code 1
        with suppress(Exception):  # the actors may be gone already
            self.actor.end.call_one().get(timeout=RETURNED_S + STOP_S)
            self._processes.stop().get(timeout=STOP_S)

    def run_round(self, t: int, weights: Weights, replicas: int = 1) -> Round:
        """Take H inner steps from θ_t; return a Round.   weights: θ_t of every trained parameter, on the CPU.

        replicas: how many pseudogradients the newest outer step averaged (inner.schedule.lr_replicas)."""

        def question(trainer: Any) -> Round:
            carried = self._carried if self._trainer.incarnation != self._asked else None
            return self._trainer.wait(trainer.run_round.call_one(t, weights, carried, replicas=replicas))

        ended: Round = self._trainer.ask(question)
        self._asked, self._carried = self._trainer.incarnation, ended.carried
        return ended

    def ask_teachers(self, states: Sequence[TraceState]) -> list[TeacherAction]:
        """Return the actions of the plan's teachers in these states."""
        return ReplayPool(self.actor, self._plan.replay_actors)(states)


def _say_fault(failure: Any) -> None:
    """Print a fault after a Replica's end: if Monarch then misses a process, that is not the script's fault."""
    print(f"monarch, after the replica's end: {last_line(str(failure))}", file=sys.stderr, flush=True)
