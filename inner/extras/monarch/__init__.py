"""Splits one replica's work over processes that Monarch (torchmonarch 0.7) supervises.

    the outer loop ──θ_t──▶ TrainerActor ── prompts, random state ──▶ GeneratorActor          completions
                    ◀──θ──      │       ── rows with a hint ───────▶ SDPOTeacherActor        logits
                                └───────── states ─────────────────▶ TeacherReplayActor × K  teachers' actions

    ReplicaActor   owns the actors; `__supervise__` restarts a killed actor, and the caller repeats its request to it

    rounds.py    a round of H inner steps as a function: (t, θ_t, carried state) -> θ          no monarch in it
    wire.py      the requests, and the functions that answer them                              no monarch in it
    members.py   finds the process that has an actor's role now
    actors.py    the four actors: a process for each of wire.py's and rounds.py's functions
    replica.py   ReplicaActor, and Replica, for scripts

Each answer, with its random numbers, is a function of its request. So a kill costs time but changes no bits: the outer
steps are the same as without a kill.  examples/monarch/replica.py is a whole replica; docs/backends.md says how to run
it.  Importing this package loads neither torch nor monarch: Python loads a name's module at the first access.

Not promised: communication between replicas (they meet in the bucket as usual); several hosts; help if a process hangs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inner.extras.monarch.actors import (
        GeneratorActor,
        ReplayPool,
        ReplicaPlan,
        SDPOTeacherActor,
        TeacherReplayActor,
        TrainerActor,
        ask_pool,
    )
    from inner.extras.monarch.replica import Replica, ReplicaActor
    from inner.extras.monarch.rounds import Round, read_weights, write_weights

__all__ = [
    "GeneratorActor", "ReplayPool", "Replica", "ReplicaActor", "ReplicaPlan", "Round", "SDPOTeacherActor",
    "TeacherReplayActor", "TrainerActor", "ask_pool", "read_weights", "write_weights",
]  # fmt: skip

_HOME = {
    **dict.fromkeys(("Replica", "ReplicaActor"), "replica"),
    **dict.fromkeys(("Round", "read_weights", "write_weights"), "rounds"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOME.get(name, 'actors')}"), name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "monarch":
            raise
        raise ModuleNotFoundError(
            f"{name} needs torchmonarch, and {missing.name} cannot be imported: pip install "
            "'serverless-diloco[monarch]' (on PyPI, the name monarch is another package)",
            name=missing.name,
        ) from missing
