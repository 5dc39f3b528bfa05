"""Run one method of all environments of a batch at the same time: `reset`, `get_reward`.

    with methods_at_once(environments, "reset", rows, workers):
        TRL's loop: environment.reset(**row)      the first call starts all rollouts' calls; each returns its own result

TRL calls the methods rollout by rollout.  Inside the `with`, an attribute of each environment hides its method for one
call; so a repeated call (of a reward) reaches the method itself.  Plain methods run in threads, async methods in tasks.

An environment whose rollouts depend on their order (a global random generator, one connection) declares that:

    class Env:
        _in_order = True

Its calls stay in TRL's loop, and so do those of an object that several rollouts share.

A call without an answer after `limit_s` seconds costs its rollout: it has no observation and no reward, its tools fail,
and the next batch gets a new object in its place.  Another call begins instead.

Calls that have not begun at the end of the `with` (a reward may time out) are dropped: the next batch resets the same
environments.  Not promised: that a call in a thread can be ended; a gain, or a limit, for classes with __slots__.
"""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from inspect import iscoroutinefunction
from time import monotonic
from typing import Any

import torch
from torch import Tensor

Calls = Sequence[tuple[int, Callable[[], Any]]]  # each with the number of its rollout


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
        environments, given = trainer.environments, [{}] * len(trainer.environments)
    else:
        _replace_hung(trainer)
        hidden = {"environment"} if trainer._multi_environment else set[str]()  # TRL does not give this key to `reset`
        environments = drawn_environments(trainer, rows)
        given = [{key: value for key, value in row.items() if key not in hidden} for row in rows if environments]
    limits = {"workers": trainer.tool_workers, "limit_s": trainer.environment_limit_s, "hung": trainer.hung}
    return methods_at_once(environments, method, given, **limits)


def _replace_hung(trainer: Any) -> None:
    """Put new objects in the place of those that hung in the last batch."""
    bad = [id(trainer.environments[row]) for row in trainer.hung]
    for name, pool in trainer._environment_pool.items() if bad else ():
        pool[:] = [trainer.environment_factories[name]() if id(one) in bad else one for one in pool]
    trainer.hung.clear()


def forget_hung(trainer: Any, rewards_B_F: Tensor, rows: int) -> None:
    """Make the rewards of all ranks' rollouts that hung unknown, and say so.   rows: this rank's number of rows."""
    hung_B = torch.tensor([row in trainer.hung for row in range(rows)], device=rewards_B_F.device)
    rewards_B_F[trainer.accelerator.gather(hung_B)] = torch.nan
    if trainer.hung and trainer._reward_calls is not None:
        trainer._reward_calls.host.emit(
            "warning",
            f"{len(trainer.hung)} of {rows} rollouts have no reward: `reset` or `get_reward` of their environment gave "
            f"no answer for {trainer.environment_limit_s:g} s (inner.sampling.environment_timeout_s)",
        )


@contextmanager
def methods_at_once(
    environments: Sequence[Any],
    method: str,
    rows: Sequence[Mapping[str, Any]],
    workers: int,
    *,
    limit_s: float | None = None,
    hung: set[int] | None = None,
) -> Iterator[None]:
    """Make the first call of `method` inside a `with` start all environments' calls.   rows: each call's arguments.

    limit_s: seconds that one call may take; None: no limit.   hung: gets the rollouts whose call took longer. Such a
    call returns None, and so does a call of a rollout that is in `hung` already."""
    stay, hung = in_order(environments), set[int]() if hung is None else hung
    chosen = [
        (i, one, partial(getattr(one, method), **row))
        for i, (one, row) in enumerate(zip(environments, rows, strict=True))
        if i not in stay and hasattr(one, "__dict__") and hasattr(one, method)
    ]
    batches = list[_Threads | _Tasks]()
    for kind in (_Threads, _Tasks):  # async methods are called in the event loop, plain methods in threads
        calls = [each for each in chosen if iscoroutinefunction(each[2].func) == (kind is _Tasks)]
        batches.append(batch := kind([(row, call) for row, _, call in calls], workers, limit_s, hung))
        for i, (_, one, _) in enumerate(calls):
            vars(one)[method] = partial(_call_once, one, method, batch, i)
    try:
        yield
    finally:
        for _, one, _ in chosen:
            vars(one).pop(method, None)
        for batch in batches:
            batch.end()


def _call_once(environment: Any, method: str, batch: "_Threads | _Tasks", i: int, **_: Any) -> Any:
    vars(environment).pop(method, None)
    return batch.take(i)


class _Threads:
    """Calls that start together at the first `take`, in its order, at most `workers` at once."""

    def __init__(self, calls: Calls, workers: int, limit_s: float | None, hung: set[int]) -> None:
        self._rows = [row for row, _ in calls]
        self._answers = [Future[Any]() for _ in calls]
        self._began = [Future[float]() for _ in calls]
        self._waiting = deque((i, call) for i, (row, call) in enumerate(calls) if row not in hung)
        self._free = min(workers, len(self._waiting))
        self._limit_s, self._hung = limit_s, hung

    def take(self, i: int) -> Any:
        """Return the result of call i, or raise its error."""
        if self._rows[i] in self._hung:
            return None
        self._start()
        until = None if self._limit_s is None else self._began[i].result() + self._limit_s
        try:
            return self._answers[i].result(None if until is None else max(0.0, until - monotonic()))
        except NoAnswer:
            if self._answers[i].done():  # the call answered just now, or raised TimeoutError itself
                return self._answers[i].result()
        self._hung.add(self._rows[i])
        self._free += 1
        self._start()
        return None

    def _start(self) -> None:
        while self._free:
            self._free -= 1
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        with suppress(IndexError):  # no call waits any more
            while True:
                i, call = self._waiting.popleft()
                self._began[i].set_result(monotonic())
                try:
                    result = call()
                except BaseException as error:
                    self._answers[i].set_exception(error)
                else:
                    self._answers[i].set_result(result)

    def end(self) -> None:
        """Drop the calls that have not begun."""
        with suppress(IndexError):
            while True:
                i, _ = self._waiting.popleft()
                for future in (self._began[i], self._answers[i]):
                    future.set_exception(TimeoutError("the batch was over before this call began"))


class _Tasks:
    """The same as _Threads, for async calls."""

    def __init__(self, calls: Calls, workers: int, limit_s: float | None, hung: set[int]) -> None:
        self._calls = calls
        self._workers, self._limit_s, self._hung = workers, limit_s, hung
        self._tasks: list[asyncio.Task[Any]] = []

    def take(self, i: int) -> Any:
        """Return the task of call i."""
        if not self._tasks:
            places = asyncio.Semaphore(self._workers)
            self._tasks = [asyncio.ensure_future(self._answer(places, *each)) for each in self._calls]
        return self._tasks[i]

    async def _answer(self, places: asyncio.Semaphore, row: int, call: Callable[[], Any]) -> Any:
        if row in self._hung:
            return None
        async with places:
            task = asyncio.ensure_future(call())
            try:
                done, _ = await asyncio.wait({task}, timeout=self._limit_s)
            except asyncio.CancelledError:
                task.cancel()
                raise
            if done:
                return task.result()
            task.cancel()  # the task may ignore that, so do not await it
            self._hung.add(row)
            return None

    def end(self) -> None:
        """Cancel the calls that have not ended, all in one step of the event loop, so that no waiting call begins."""
        if not all(task.done() for task in self._tasks):
            self._tasks[0].get_loop().call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])
