"""Run one method of all environments of a batch at the same time: `reset`, `get_reward`.

    with methods_at_once(environments, "reset", rows, Lanes(workers=8)):
        TRL's loop: environment.reset(**row)      the first call starts all rollouts' calls; each returns its own result

TRL calls the methods rollout by rollout.  Inside the `with`, the environments' classes have another method, whose calls
run in the environments' lanes (lanes.py): plain methods there, async methods in the event loop of the caller.  The
objects themselves do not change, so an environment may copy, pickle or clear itself.

An environment whose rollouts depend on their order (a global random generator, one connection) declares that:

    class Env:
        _in_order = True

Calls of such an environment, and of an object that several rollouts share, begin when TRL's loop makes them.

A call without an answer after Lanes.limit_s seconds costs its rollout: it has no observation and no reward, its tools
fail, and the next batch gets a new object in its place.  Another rollout's call begins instead.

Calls that have not begun at the end of the `with` (a reward may time out) are dropped: the next batch resets the same
environments.  Not promised: that a call in a thread can be ended.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import getattr_static, iscoroutinefunction, isfunction
from typing import Any

import torch
from torch import Tensor

from inner.rollouts.at_once.lanes import Call, Lane, Lanes, NoAnswer, Workers, WorkItem, in_order, is_in_lane


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
        replace_hung(trainer)
        hidden = {"environment"} if trainer._multi_environment else set[str]()  # TRL does not give this key to `reset`
        environments = drawn_environments(trainer, rows)
        given = [{key: value for key, value in row.items() if key not in hidden} for row in rows if environments]
    return methods_at_once(environments, method, given, trainer.lanes)


def replace_hung(trainer: Any) -> None:
    """Replace environments that hung in the last batch, or whose tool hung, by new objects."""
    lanes: Lanes = trainer.lanes
    bad = {id(trainer.environments[row]) for row in lanes.hung | lanes.hung_tools}
    bad |= {id(one) for pool in trainer._environment_pool.values() for one in pool if lanes.has_moved(one)}
    for name, pool in trainer._environment_pool.items() if bad else ():
        for i, one in enumerate(pool):
            if id(one) in bad:
                lanes.forget(one)
                pool[i] = trainer.environment_factories[name]()
    lanes.hung.clear()
    lanes.hung_tools.clear()


def forget_hung(trainer: Any, rewards_B_F: Tensor, rows: int) -> None:
    """Make the rewards of rollouts that hung, on all ranks, NaN; report it.   rows: this rank's number of rows."""
    lanes: Lanes = trainer.lanes
    hung_B = torch.tensor([row in lanes.hung for row in range(rows)], device=rewards_B_F.device)
    rewards_B_F[trainer.accelerator.gather(hung_B)] = torch.nan
    if lanes.hung and trainer._reward_calls is not None:
        trainer._reward_calls.host.emit(
            "warning",
            f"{len(lanes.hung)} of {rows} rollouts have no reward: `reset` or `get_reward` of their environment gave "
            f"no answer {_in_time(lanes.limit_s)}",
        )


@contextmanager
def methods_at_once(
    environments: Sequence[Any], method: str, rows: Sequence[Mapping[str, Any]], lanes: Lanes
) -> Iterator[None]:
    """Make the first call of `method` inside a `with` start all environments' calls.   rows: each call's arguments.

    A call without an answer after lanes.limit_s returns None, and its rollout goes into lanes.hung. Each call of a
    rollout that is already in lanes.hung returns None, too."""
    of_object, waits = dict[int, deque[int]](), dict[int, _Waits]()
    for row, one in enumerate(environments):
        if isfunction(getattr(type(one), method, None)):
            of_object.setdefault(id(one), deque()).append(row)
    by_kind = {kind: Workers(lanes.workers) for kind in (False, True)}  # plain and async calls
    late = in_order(environments) | lanes.hung
    for its_rows in of_object.values():
        row, one = its_rows[0], environments[its_rows[0]]
        function = getattr(one, method)
        workers = by_kind[iscoroutinefunction(function)]
        waits[id(one)] = found = _Waits(function, its_rows, lanes, lanes.of(one), workers)
        if row not in late:
            found.add_early(rows[row])
    try:
        with _replaced(method, [environments[its_rows[0]] for its_rows in of_object.values()], waits):
            yield
    finally:
        for workers in by_kind.values():
            workers.close()


@contextmanager
def _replaced(method: str, ones: Iterable[Any], waits: Mapping[int, "_Waits"]) -> Iterator[None]:
    """Let calls of `method` on these objects reach their waits, by id.   If an object has an attribute of this name, it
    hides the class's method, so the attribute is replaced, too."""
    own = [(vars(one), vars(one)[method], waits[id(one)]) for one in ones if method in getattr(one, "__dict__", ())]
    kinds = {type(one): getattr_static(type(one), method) for one in ones}
    inherited = {kind for kind in kinds if method not in vars(kind)}
    for kind, function in kinds.items():
        type.__setattr__(kind, method, _instead_of(kind, function, waits))
    for attributes, _, found in own:
        attributes[method] = found
    try:
        yield
    finally:
        for kind, function in kinds.items():
            type.__delattr__(kind, method) if kind in inherited else type.__setattr__(kind, method, function)
        for attributes, attribute, _ in own:
            attributes[method] = attribute


def _instead_of(kind: type, function: Any, waits: Mapping[int, "_Waits"]) -> Callable[..., Any]:
    """Return a method of `kind` for its objects in `waits`. Copies, and subclasses by super(), reach the function."""

    def call(self: Any, /, *args: Any, **given: Any) -> Any:
        found = waits.get(id(self)) if type(self) is kind else None
        return (found or function.__get__(self, type(self)))(*args, **given)

    return call


class _Waits:
    """Replaces a method and waits for the calls in the environment's lane.   rows: the object's rollouts, in order."""

    def __init__(
        self, function: Callable[..., Any], rows: deque[int], lanes: Lanes, lane: Lane, workers: Workers
    ) -> None:
        self._function, self._order, self._lanes, self._lane, self._workers = function, rows, lanes, lane, workers
        self._rows = deque(rows)
        self._early: WorkItem | None = None
        self._newest: tuple[int, WorkItem] | None = None

    def add_early(self, given: Mapping[str, Any]) -> None:
        """Add a call before TRL makes it, so that it starts with the batch's first call and not when TRL makes it."""
        self._early = WorkItem([Call(self._function, given)], self._lanes.limit_s)
        self._workers.add(self._lane, self._early)

    def __call__(self, /, *args: Any, **given: Any) -> Any:
        if is_in_lane():
            return self._function(*args, **given)
        row = self._rows[0]
        self._rows.rotate(-1)
        if iscoroutinefunction(self._function):
            return self._later(row, args, given)
        if self._hangs(row):
            return None
        item = self._started(row, args, given)
        try:
            return item.take(item.calls[0])
        except NoAnswer:
            self._lanes.hung.add(row)
            return None
        except BaseException:  # the loop gives up this batch's calls, and may repeat all of them
            self._rows = deque(self._order)
            raise

    async def _later(self, row: int, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        if row in self._lanes.hung:  # a cancelled call has ended, so it may be repeated
            return None
        item = self._started(row, args, given, asyncio.get_running_loop())
        try:
            return await item.wait(item.calls[0])
        except NoAnswer:
            self._lanes.hung.add(row)
            return None

    def _hangs(self, row: int) -> bool:
        """Whether the rollout hangs: an earlier call took too long, or was interrupted and still runs."""
        if self._newest is not None and self._newest[0] == row and self._newest[1].is_running:
            self._lanes.hung.add(row)
        return row in self._lanes.hung

    def _started(
        self, row: int, args: tuple[Any, ...], given: Mapping[str, Any], loop: asyncio.AbstractEventLoop | None = None
    ) -> WorkItem:
        item, self._early = self._early, None
        if item is not None:
            self._workers.start(loop)
        else:  # the calls are repeated, or they run in order
            item = WorkItem([Call(self._function, given, *args)], self._lanes.limit_s, loop)
            self._lane.run(item)
        self._newest = row, item
        return item


def _in_time(limit_s: float | None) -> str:
    if limit_s is None:
        return "before a reward's limit (inner.rewards.timeout_s)"
    return f"for {limit_s:g} s (inner.sampling.environment_timeout_s)"
