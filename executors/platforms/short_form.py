"""The short form: one function, n times, with its rank in an environment variable; and the lease of its processes.

    launch_replicas(n_replicas=4, entrypoint="pkg.work", entrypoint_args={"x": 1}, run="sweep-3") ─▶ specs
    launcher   every quarter of LEASE_S     Platform.renew(handles, until)       a dict on Modal, labels on Hugging
                                                                                 Face, a file on Slurm
    container  every quarter of LEASE_S     `until` is over and not renewed ─▶ asked to leave, then killed

Such a fleet has no supervisor.  Without a lease the fleet's GPUs could run for a day after the script that launched it
was killed. On this machine a process leaves within seconds of the end of its last launcher.

Not promised: a lease on a platform that cannot store one (SkyPilot); a launch there warns about it.
"""

import json
import math
import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from executors.platforms.base import (
    LEASE_S,
    RANK_ENV,
    REPLICA,
    ExecutorError,
    Handle,
    ReplicaSpec,
    Result,
    State,
    Status,
)
from rendezvous.clock import Clock
from rendezvous.layout import slot_name

if TYPE_CHECKING:
    from executors.platforms.executor import Executor
    from executors.platforms.platform import Platform

FIRST_PAUSE_S = 0.02
TAIL = 12  # lines of a failed process's log that its result shows
LOOKS = 4  # renewals within the time of one lease
Arguments = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


def entrypoint_name(entrypoint: str | Callable[..., Any]) -> str:
    """Return "package.module:function", by which a container imports the function.   Raises ValueError."""
    if isinstance(entrypoint, str):
        return entrypoint
    module, name = getattr(entrypoint, "__module__", None), getattr(entrypoint, "__qualname__", "")
    if not callable(entrypoint) or module in (None, "__main__") or not name.isidentifier():
        raise ValueError(
            f"entrypoint = {entrypoint!r}: a container imports its entry point by name, and that is not a function at "
            "the top of a module. Move it into a module of yours and name it: entrypoint='my_module:function'"
        )
    return f"{module}:{name}"


def arguments_per_rank(arguments: Arguments, n: int) -> list[dict[str, Any]]:
    """Return the keyword arguments of each rank.   Raises ValueError."""
    rows = [arguments or {}] * n if arguments is None or isinstance(arguments, Mapping) else list(arguments)
    if len(rows) != n or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(
            f"entrypoint_args must be one mapping of keywords for all ranks, or a list with one mapping per rank. {n} "
            f"ranks are launched, and the list has {len(rows)} values "
            f"(types: {', '.join(sorted({type(row).__name__ for row in rows})) or 'none'})"
        )
    try:
        json.dumps(rows)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"entrypoint_args go to other machines as JSON, and these cannot: {error}. Give names, paths or numbers, "
            "and load the rest there"
        ) from None
    return [dict(row) for row in rows]


def rank_specs(
    name: str,
    *,
    n_replicas: int = 0,
    entrypoint: str | Callable[..., Any] = REPLICA,
    entrypoint_args: Arguments = None,
    rank_env: str = RANK_ENV,
    run: str = "",
    lease: bool = True,
) -> list[ReplicaSpec]:
    """Return specs for the short form, one for each rank.   Raises ExecutorError.

    name: the executor's name, for a run without a URL.   entrypoint_args: keywords for all ranks, or a list of one
    dict per rank.   run: a name ("": a new run); an earlier name returns that run's processes.   lease: processes end
    half an hour after this process has died; on this machine they end at once, on SkyPilot never.
    """
    try:
        each = arguments_per_rank(entrypoint_args, n_replicas)
        called = entrypoint_name(entrypoint)
    except ValueError as error:
        raise ExecutorError(str(error)) from None
    where = run if "://" in run else f"{name}://{run or uuid4().hex}"
    lease_s = LEASE_S if lease else 0.0
    return [
        ReplicaSpec(where, slot_name(i), 1, called, kwargs=kwargs, env={rank_env: str(i)}, lease_s=lease_s)
        for i, kwargs in enumerate(each)
    ]


class Leash:
    """The launcher's lease of the processes of one platform, renewed in a thread."""

    def __init__(self, platform: "Platform", clock: Clock) -> None:
        self._platform = platform
        self._clock = clock
        self._handles: list[Handle] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, specs: Sequence[ReplicaSpec], lease_s: float) -> bool:
        """Write the lease before the start; return whether the platform supports leases, and warn if it does not."""
        with suppress(OSError):  # the disk is full: `submit` reports that
            if self._platform.renew([self._platform.new_handle(s) for s in specs], self._clock.wall() + lease_s):
                return True
            words = f"warning: the launch continues when this process dies, because {self._platform.name} has no leases"
            stop = f"diloco stop {shlex.quote(specs[0].run)}"
            print(f"{words}. `with` ends it, and so does: {stop}", file=sys.stderr, flush=True)
        return False

    def hold(self, handles: Sequence[Handle], lease_s: float) -> None:
        """Renew the lease from now on, until `let_go` or the end of this process."""
        self._handles += [h for h in handles if h not in self._handles]
        if self._thread is None and self._handles:
            self._thread = threading.Thread(target=self._hold_on, args=(lease_s,), name="leash", daemon=True)
            self._thread.start()

    def let_go(self) -> None:
        self._over.set()

    def _hold_on(self, lease_s: float) -> None:
        while not self._over.wait(lease_s / LOOKS):
            try:
                self._platform.renew(list(self._handles), self._clock.wall() + lease_s)
            except Exception as error:  # any error of an SDK; the next renewal comes before the lease ends
                print(f"warning: the lease was not renewed; again in {lease_s / LOOKS:.0f} s: {error}", flush=True)


def wait_for_all(poll: Callable[[], list[Status]], clock: Clock, timeout: float | None, pause_s: float) -> list[Status]:
    """Poll until all have ended or `timeout` s are over; return the last statuses.   pause_s: the longest pause."""
    until = math.inf if timeout is None else clock.now() + timeout
    pause = min(FIRST_PAUSE_S, pause_s)
    while True:
        statuses = poll()
        left = until - clock.now()
        if left <= 0 or all(s.state.ended for s in statuses):
            return statuses
        clock.sleep(min(pause, left))
        pause = min(pause_s, 1.5 * pause)


def result_of(executor: "Executor", status: Status) -> Result:
    """Return the result of a process, with its value or its last lines."""
    result = Result(status.handle, status.state, status.reason, status.exit_code)
    if status.state is State.SUCCEEDED:
        return replace(result, value=executor.read_value(status.handle))
    if status.state.ended:
        with suppress(ExecutorError):  # the log is optional: the end is known without it
            return replace(result, tail=tuple(executor.logs(status.handle, TAIL)))
    return result
