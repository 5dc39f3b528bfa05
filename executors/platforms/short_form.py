"""The short form: one function, n times, with its rank in an environment variable; and the leash of what it starts.

    launch_replicas(n_replicas=4, entrypoint="pkg.work", entrypoint_args={"x": 1}, run="sweep-3") ─▶ specs
    launcher   every quarter of LEASE_S     Platform.renew(handles, until)       a dict on Modal, labels on Hugging Face
    container  every quarter of it          nothing newer came, `until` is over ─▶ asked to leave, then killed

Nobody supervises such a fleet, so without a leash three GPUs would live for a day after a script that was killed.

Not promised: a leash on platforms that have no place for the word (this machine, Slurm, SkyPilot).
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from executors.platforms.base import ExecutorError, Handle, ReplicaSpec
from rendezvous.layout import slot_name

LEASE_S = 1800.0
LOOKS = 4  # in one lease
Arguments = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


def short_specs(
    run: str, entrypoint: str | Callable[..., Any], arguments: Arguments, n: int, *, rank_env: str, lease_s: float
) -> list[ReplicaSpec]:
    """One spec per rank.   arguments: for all, or one mapping per rank.   Raises ExecutorError."""
    each = arguments_per_rank(arguments, n)
    name = entrypoint_name(entrypoint)
    return [
        ReplicaSpec(run, slot_name(rank), 1, name, kwargs=kwargs, env={rank_env: str(rank)}, lease_s=lease_s)
        for rank, kwargs in enumerate(each)
    ]


def entrypoint_name(entrypoint: str | Callable[..., Any]) -> str:
    """ "package.module:function".  A function is taken by its name: a container imports it."""
    if isinstance(entrypoint, str):
        return entrypoint
    module, name = getattr(entrypoint, "__module__", None), getattr(entrypoint, "__qualname__", "")
    if not callable(entrypoint) or module in (None, "__main__") or not name.isidentifier():
        raise ExecutorError(
            f"entrypoint = {entrypoint!r}: a container imports its entry point by name, and that is no function at the "
            "top of a module. Move it into a module of yours and name it: entrypoint='my_module:function'"
        )
    return f"{module}:{name}"


def arguments_per_rank(arguments: Arguments, n: int) -> list[dict[str, Any]]:
    """The keywords of each rank."""
    rows = [arguments or {}] * n if arguments is None or isinstance(arguments, Mapping) else list(arguments)
    if len(rows) != n or not all(isinstance(row, Mapping) for row in rows):
        raise ExecutorError(
            f"entrypoint_args must be one mapping of keywords for all, or a list with one per rank: {n} are launched, "
            f"and it has {len(rows)} of {', '.join(sorted({type(row).__name__ for row in rows})) or 'nothing'}"
        )
    try:
        json.dumps(rows)
    except (TypeError, ValueError) as error:
        raise ExecutorError(
            f"entrypoint_args go to other machines as JSON, and these cannot: {error}. Give names, paths or numbers, "
            "and load the rest there"
        ) from None
    return [dict(row) for row in rows]


class Leash:
    """Says again and again that the launcher lives.   renew(handles, lease_s): raises where it is not heard."""

    def __init__(self, renew: Callable[[Sequence[Handle], float], None]) -> None:
        self._renew = renew
        self._handles: list[Handle] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, handles: Sequence[Handle], lease_s: float) -> None:
        """From now on, until `let_go` or the end of this process."""
        self._handles += [h for h in handles if h not in self._handles]
        if self._thread is None and self._handles:
            self._thread = threading.Thread(target=self._hold_on, args=(lease_s,), name="leash", daemon=True)
            self._thread.start()

    def let_go(self) -> None:
        self._over.set()

    def _hold_on(self, lease_s: float) -> None:
        while not self._over.wait(lease_s / LOOKS):
            try:
                self._renew(list(self._handles), lease_s)
            except Exception as error:  # of any client: the next turn says it again, three times within one lease
                print(f"warning: the launcher's lease was not renewed: {error}", flush=True)
