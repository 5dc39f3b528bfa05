"""Run one method of all environments of a batch at the same time: `reset`, `get_reward`.

    with methods_at_once(environments, "reset", rows, workers):
        TRL's loop: environment.reset(**row)      the first call starts all rollouts' calls; each returns its own result

TRL calls the methods rollout by rollout.  Inside the `with`, an attribute of each environment hides its method for one
call; so a repeated call (of a reward) reaches the method itself.  Plain methods run in threads, async methods in tasks.

An environment whose rollouts depend on their order (a global random generator, one connection) declares that:

    class Env:
        _in_order = True

Its calls stay in TRL's loop, and so do those of an object that several rollouts share.

Calls that have not begun at the end of the `with` (a reward may time out) are dropped: the next batch resets the same
environments.  Not promised: a time limit; that a call in a thread can be ended; a gain for classes with __slots__.
"""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from inspect import iscoroutinefunction
from typing import Any


def in_order(environments: Sequence[Any]) -> set[int]:
    """Return the indices of the rollouts whose environments' calls stay in order."""
    times = Counter(map(id, environments))
    return {i for i, one in enumerate(environments) if getattr(one, "_in_order", False) or times[id(one)] > 1}


def drawn_environments(trainer: Any, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the environment that TRL will give to each row; make environments that TRL's pool lacks."""
    names = [row.get("environment") if trainer._multi_environment else None for row in rows]
    if trainer.environment_factories is None or not set(names) <= set(trainer.environment_factories):
        return []
    drawn, at = [], Counter[str | None]()
    for name in names:
        pool = trainer._environment_pool[name]
        if at[name] == len(pool):
            pool.append(trainer.environment_factories[name]())
        drawn.append(pool[at[name]])
        at[name] += 1
    return drawn


def environments_at_once(
    trainer: Any, method: str, rows: Sequence[Mapping[str, Any]] | None
) -> AbstractContextManager[None]:
    """Let a batch's environments run `reset` (rows: the batch) or `get_reward` (rows: None) at once in a `with`."""
    if rows is None:
        environments: list[Any] = trainer.environments
        return methods_at_once(environments, method, [{}] * len(environments), trainer.tool_workers)
    hidden = {"environment"} if trainer._multi_environment else set[str]()  # TRL does not give it to `reset`
    given = [{key: value for key, value in row.items() if key not in hidden} for row in rows]
    environments = drawn_environments(trainer, rows)
    return methods_at_once(environments, method, given if environments else (), trainer.tool_workers)


@contextmanager
def methods_at_once(
    environments: Sequence[Any], method: str, rows: Sequence[Mapping[str, Any]], workers: int
) -> Iterator[None]:
    """Make the first call of `method` inside a `with` start all environments' calls.   rows: each call's arguments."""
    stay = in_order(environments)
    chosen = [
        (one, partial(getattr(one, method), **row))
        for i, (one, row) in enumerate(zip(environments, rows, strict=True))
        if i not in stay and hasattr(one, "__dict__") and hasattr(one, method)
    ]
    batches = list[_Threads | _Tasks]()
    for kind in (_Threads, _Tasks):  # async methods are called in the event loop, plain methods in threads
        calls = [(one, call) for one, call in chosen if iscoroutinefunction(call.func) == (kind is _Tasks)]
        batches.append(batch := kind([call for _, call in calls], workers))
        for i, (one, _) in enumerate(calls):
            vars(one)[method] = partial(_call_once, one, method, batch, i)
    try:
        yield
    finally:
        for one, _ in chosen:
            vars(one).pop(method, None)
        for batch in batches:
            batch.end()


def _call_once(environment: Any, method: str, batch: "_Threads | _Tasks", i: int, **_: Any) -> Any:
    vars(environment).pop(method, None)
    return batch.take(i)


class _Threads:
    """Calls that start together at the first `take`, at most `workers` at once."""

    def __init__(self, calls: Sequence[Callable[[], Any]], workers: int) -> None:
        self._answers = [Future[Any]() for _ in calls]
        self._waiting = deque(zip(calls, self._answers, strict=True))
        self._free = min(workers, len(calls))

    def take(self, i: int) -> Any:
        """Return the result of call i, or raise its error."""
        while self._free:
            self._free -= 1
            threading.Thread(target=self._work, daemon=True).start()
        return self._answers[i].result()

    def _work(self) -> None:
        with suppress(IndexError):  # no call waits any more
            while True:
                call, answer = self._waiting.popleft()
                try:
                    result = call()
                except BaseException as error:
                    answer.set_exception(error)
                else:
                    answer.set_result(result)

    def end(self) -> None:
        """Drop the calls that have not begun."""
        with suppress(IndexError):
            while True:
                self._waiting.popleft()[1].set_exception(TimeoutError("the batch was over before this call began"))


class _Tasks:
    """The same as _Threads, for async calls."""

    def __init__(self, calls: Sequence[Callable[[], Any]], workers: int) -> None:
        self._calls = calls
        self._workers = workers
        self._tasks: list[asyncio.Task[Any]] = []

    def take(self, i: int) -> Any:
        """Return the task of call i."""
        if not self._tasks:
            limit = asyncio.Semaphore(self._workers)
            self._tasks = [asyncio.ensure_future(_limited(limit, call)) for call in self._calls]
        return self._tasks[i]

    def end(self) -> None:
        """Cancel the calls that have not ended, all in one step of the event loop, so that no waiting call begins."""
        if not all(task.done() for task in self._tasks):
            self._tasks[0].get_loop().call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])


async def _limited(limit: asyncio.Semaphore, call: Callable[[], Any]) -> Any:
    async with limit:
        return await call()
