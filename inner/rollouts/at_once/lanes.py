"""Give each environment a thread of its own: its constructor, `reset`, its tools and `get_reward` run there.

    TRL's loop ── work item of rollout 0 ──▶ Workers: so many ──▶ lane of environment 0: call, call, … then its async
               ── work item of rollout 1 ──▶ lanes at once     ──▶ lane of environment 1            calls together
               ◀── answers

So a SQLite connection, or a browser, is used in the thread that made it.  Environments whose rollouts depend on their
order (`_in_order`) share one lane, and TRL's loop starts their calls one by one.

A call that gives no answer within its limit ends its item: the next item begins, and the lane goes on in a new thread.
Items begin in the order in which the loop waits for them, so it never waits for an item that cannot begin.

Not promised: that a call in a thread can be ended; thread-local state after a call that hung.
"""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from inspect import getattr_static, iscoroutinefunction
from queue import SimpleQueue
from time import monotonic
from typing import Any, NamedTuple

CLEAN_S = 1.0  # seconds for a cancelled async call to end
_IN_LANE = ContextVar("in_lane", default=False)  # True in a lane's threads, and in their tasks
STILL = "an earlier call of this rollout still hangs"


class NoAnswer(TimeoutError):
    """A call gave no answer within its limit, or was not made because an earlier call still hangs."""


class Call:
    """One call of a user's method.   began: when its limit begins (s, monotonic)."""

    def __init__(self, function: Callable[..., Any], given: Mapping[str, Any], *args: Any) -> None:
        self.is_async = iscoroutinefunction(function)
        self.make = partial(function, *args, **given)
        self.began = Future[float]()
        self.answer = Future[Any]()


class WorkItem:
    """Calls of one rollout, made in their order: the plain calls one by one, then the async calls together, in `loop`.

    limit_s: seconds that each call may take; None: no limit."""

    def __init__(
        self, calls: Sequence[Call], limit_s: float | None = None, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.calls = calls
        self.is_running = True  # False: the lane's thread is free
        self.release: Callable[[], None] = lambda: None  # lets the next item begin
        self.loop = loop
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self.is_over = False  # True: each call has its answer
        self._tasks: list[Future[Any]] = []
        later = [call for call in calls if call.is_async]
        self._steps = [[call] for call in calls if not call.is_async] + ([later] if later else [])

    def run(self) -> None:
        """Make the calls.   The lane's thread runs this."""
        for step in self._steps:
            with self._lock:
                if self.is_over:
                    break
                for call in step:
                    call.began.set_result(monotonic())
            done = self._await_all(step) if step[0].is_async else [_outcome(step[0].make)]
            with self._lock:
                if self.is_over:
                    break
                if step is self._steps[-1]:  # the loop may start the lane's next item as soon as it has the last answer
                    self.is_over, self.is_running = True, False
                    self.release()
                for call, give in zip(step, done, strict=True):
                    with suppress(InvalidStateError):  # a waiting coroutine that is cancelled cancels its answer
                        give(call.answer)
        self.is_running = False

    def _await_all(self, calls: Sequence[Call]) -> list[Callable[[Future[Any]], None]]:
        self._tasks = [asyncio.run_coroutine_threadsafe(within(self._limit_s, call), self.loop) for call in calls]  # type: ignore[arg-type]
        wait(self._tasks)
        return [_outcome(partial(_result, task)) for task in self._tasks]

    def take(self, call: Call) -> Any:
        """Wait for a plain call. Return its result, or raise its error; NoAnswer if its limit is over."""
        try:
            until = None if self._limit_s is None else call.began.result() + self._limit_s
            return call.answer.result(None if until is None else max(0.0, until - monotonic()))
        except TimeoutError:
            if not call.answer.done():
                self.give_up(too_late(self._limit_s), call)
            return call.answer.result()  # the call's own error may be a TimeoutError, too
        except BaseException as error:
            if not call.answer.done() or error is not call.answer.exception():  # a reward's limit, or Ctrl-C
                self.give_up(TimeoutError("the wait was interrupted"), call)
            raise

    async def wait(self, call: Call) -> Any:
        """Return the answer of a call, or raise its error, without blocking the event loop."""
        try:
            return await asyncio.wrap_future(call.answer)
        except asyncio.CancelledError:
            self.give_up(TimeoutError("the wait was cancelled"), call)
            raise

    def give_up(self, error: TimeoutError, late: Call | None = None) -> None:
        """End the item without its missing answers.   late: the call that gets `error`; None: all calls get it."""
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
            for call in self.calls:
                for future in (call.began, call.answer):
                    if not future.done():
                        future.set_exception(error if late in (call, None) else NoAnswer(STILL))
            for task in self._tasks:
                task.cancel()
            self.release()


class Lane:
    """The thread in which an environment's items run, one after another."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self._items: SimpleQueue[WorkItem | None] = SimpleQueue()
        self._newest: WorkItem | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the newest item still runs.   TRL's loop waits for each item, so it has given up a busy item."""
        return self._newest is not None and self._newest.is_running

    def run(self, item: WorkItem) -> None:
        """Start the item, in a new thread if the old one hangs."""
        if self.thread is None or self.is_busy or not self.thread.is_alive():
            self._items.put(None)  # the old thread ends when its call does
            self._items = SimpleQueue()
            self.thread = threading.Thread(target=_serve, args=(self._items,), daemon=True)
            self.thread.start()
        self._newest = item
        self._items.put(item)

    def __del__(self) -> None:
        self._items.put(None)


class Lanes:
    """The lanes of a trainer's environments, and the limits of their calls (s); None: no limit.

    workers: lanes that run at once.   hung: rollouts of this batch of which `reset` or `get_reward` gave no answer in
    time.   hung_tools: rollouts of this batch of which a tool gave no answer in time."""

    def __init__(self, workers: int, tool_limit_s: float | None = None, limit_s: float | None = None) -> None:
        self.workers, self.tool_limit_s, self.limit_s = workers, tool_limit_s, limit_s
        self.hung, self.hung_tools = set[int](), set[int]()
        self._lanes = dict[int, _Resident]()  # by id(environment)
        self._ordered = Lane()

    def make(self, factory: Callable[[], Any], *, ordered: bool = False) -> Any:
        """Return factory(), called in the lane of the environment that it makes.   ordered: its class is _in_order."""
        lane = self._ordered if ordered else Lane()
        item = WorkItem([Call(factory, {})])
        lane.run(item)
        made = item.take(item.calls[0])
        self._lanes.setdefault(id(made), _Resident(made, lane, lane.thread))
        return made

    def wrap(self, factory: Callable[[], Any] | None, kind: type | None) -> Callable[[], Any] | None:
        """Return a factory that makes each environment of class `kind` in its lane; None without a factory."""
        return None if factory is None else partial(self.make, factory, ordered=is_ordered(kind))

    def of(self, environment: Any) -> Lane:
        """Return the environment's lane."""
        lane = self._ordered if is_ordered(environment) else Lane()
        return self._lanes.setdefault(id(environment), _Resident(environment, lane, None)).lane

    def has_moved(self, environment: Any) -> bool:
        """Whether an earlier call still runs in the thread that made the environment, or another thread replaces it."""
        found = self._lanes.get(id(environment))
        return (
            found is not None
            and found.thread is not None
            and (found.lane.is_busy or found.lane.thread is not found.thread)
        )

    def forget(self, environment: Any) -> None:
        """Drop an environment whose place another one takes."""
        self._lanes.pop(id(environment), None)


class _Resident(NamedTuple):
    """An environment (stored, so that its id is unique), its lane, and the thread that made it (None: no lane did)."""

    environment: Any
    lane: Lane
    thread: threading.Thread | None


class Workers:
    """Starts items in the order in which they were added, at most `number` at once."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting = deque[tuple[Lane, WorkItem]]()
        self._open = set[WorkItem]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.RLock()

    def add(self, lane: Lane, item: WorkItem) -> None:
        self._open.add(item)
        self._waiting.append((lane, item))

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Start the items that may begin.   loop: runs the async calls of items that were made without a loop."""
        with self._lock:
            self._loop = self._loop or loop
            while self._free and self._waiting:
                lane, item = self._waiting.popleft()
                if item.is_over:  # the loop gave up an item that waited
                    self._open.discard(item)
                    continue
                self._free -= 1
                item.release, item.loop = partial(self._end_one, item), item.loop or self._loop
                try:
                    lane.run(item)
                except RuntimeError as error:  # no further thread can be started
                    item.give_up(TimeoutError(str(error)))

    def _end_one(self, item: WorkItem) -> None:
        with self._lock:
            self._free += 1
            self._open.discard(item)  # its answers may be large
            self.start()

    def close(self) -> None:
        """Give up the items that have not ended. Calls that have not begun are not made."""
        with self._lock:
            self._waiting.clear()
        for item in tuple(self._open):
            item.give_up(TimeoutError("the batch was over before this call ended"))


def in_order(environments: Iterable[Any]) -> set[int]:
    """Return the indices of the rollouts whose environments' calls stay in order."""
    found = list(environments)
    times = Counter(map(id, found))
    return {i for i, one in enumerate(found) if is_ordered(one) or times[id(one)] > 1}


def is_ordered(environment: Any) -> bool:
    """Whether an environment, or a class, declares `_in_order = True`.   A __getattr__ for all names does not count."""
    found = getattr_static(environment, "_in_order", False)
    if hasattr(found, "__get__") and not isinstance(environment, type):  # a property, or a slot
        found = getattr(environment, "_in_order", False)
    return found is True


async def _without_exit(make: Callable[[], Any]) -> Any:
    """Await the call.   In a task, sys.exit() would end the event loop."""
    _IN_LANE.set(True)
    try:
        return await make()
    except (SystemExit, KeyboardInterrupt) as end:
        raise RuntimeError(f"the call raised {end!r}") from end


async def within(limit_s: float | None, call: Call) -> Any:
    """Return the result of an async call; cancel it after `limit_s` seconds, and raise NoAnswer."""
    task = asyncio.ensure_future(_without_exit(call.make))
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        await asyncio.wait({task}, timeout=CLEAN_S)  # the task may ignore that, so do not wait longer
        raise too_late(limit_s)
    return task.result()


def is_in_lane() -> bool:
    """Whether a lane, or its async call, runs this: an environment calls its own method, or another environment's."""
    return _IN_LANE.get()


def too_late(limit_s: float | None) -> NoAnswer:
    return NoAnswer(f"the tool gave no answer within {limit_s:g} s")


def _serve(items: "SimpleQueue[WorkItem | None]") -> None:
    _IN_LANE.set(True)
    while (item := items.get()) is not None:
        item.run()
        del item  # this also frees the environment that its calls hold


def _outcome(make: Callable[[], Any]) -> Callable[[Future[Any]], None]:
    """Make a call. Return a function that puts its result, or its error, into a future."""
    try:
        result = make()
    except BaseException as error:
        return lambda answer, error=error: answer.set_exception(error)
    return lambda answer: answer.set_result(result)


def _result(task: Future[Any]) -> Any:
    if task.cancelled():
        raise asyncio.CancelledError("the tool was cancelled")
    return task.result()
