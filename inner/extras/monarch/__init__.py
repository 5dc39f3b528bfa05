"""One replica's work, split over processes that Monarch (torchmonarch 0.7) watches over.

    the outer loop ──θ_t──▶ TrainerActor ── prompts, random state ──▶ GeneratorActor          completions
                    ◀──θ──      │       ── rows with a hint ───────▶ SDPOTeacherActor        logits
                                └───────── states ─────────────────▶ TeacherReplayActor × K  teachers' actions

    ReplicaActor   owns them; `__supervise__` starts a killed one again, and its caller asks the new one the same thing

    rounds.py    a round of H inner steps as a function: (t, θ_t, carried state) -> θ          no monarch in it
    wire.py      the requests, and the functions that answer them                              no monarch in it
    members.py   an actor by its role, in the process that has it now
    actors.py    the four actors: a process around each of those functions
    replica.py   ReplicaActor, and Replica, which a script holds

Every answer is a function of its question, randomness included, so a kill costs time and no bits: the outer steps of a
run are those of a run without it.  examples/monarch/replica.py is a whole replica; docs/backends.md says how to run it.
Importing this package imports neither torch nor monarch: a name is loaded when it is first asked for.

Not promised: anything between replicas, which meet in the bucket as ever; several hosts; a process that hangs.
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
    "GeneratorActor",
    "ReplayPool",
    "Replica",
    "ReplicaActor",
    "ReplicaPlan",
    "Round",
    "SDPOTeacherActor",
    "TeacherReplayActor",
    "TrainerActor",
    "ask_pool",
    "read_weights",
    "write_weights",
]

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
            "'serverless-diloco[monarch]' (the package that PyPI calls monarch is another one)",
            name=missing.name,
        ) from missing
