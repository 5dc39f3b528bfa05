"""Run the tool calls of one turn at the same time, in threads and tasks.

    completions: every rollout whose newest message calls tools ──▶ a thread each, `workers` at once ──▶ results by row
                                                                     └ then its async calls, tasks of TRL's event loop

TRL's loop calls tools rollout by rollout.  Here the first call of a turn starts the calls of all rollouts, and each
later call finds its result.  So tokens, masks and the order of messages are those of the serial loop.  The calls of one
rollout stay in their order, because they share an environment.  Rollouts begin in the loop's order.

A call without an answer after `limit_s` seconds is an error of its rollout; later calls of that rollout fail at once,
because its environment is still busy.  The next rollout gets its place.  An async call is cancelled instead.
A tool that calls sys.exit() has made an error, in the serial loop, too.

Not promised: locks around tools that several rollouts share; an end of a thread that hangs, or of an async tool that
ignores its cancellation (both are left behind); an async tool that blocks the event loop.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoResult
from contextlib import contextmanager
from inspect import iscoroutinefunction
from typing import Any

from inner.rollouts.environments_at_once import in_order

Tools = Mapping[str, Callable[..., Any]]
Message = Mapping[str, Any]
CLEAN_S = 1.0  # seconds for a cancelled async call to end
_STILL = "an earlier call of this rollout still hangs"


def prepare_tools(trainer: Any, completions: Sequence[Sequence[Message]]) -> None:
    """Make sys.exit() an error in a trainer's tools, and let them run at once if it asks for that; for a generation."""
    synchronous, later = (
        [{name: _without_exit(tool) for name, tool in of_row.items()} for of_row in tools]
        for tools in (trainer._sync_tool_dicts, trainer._async_tool_dicts)
    )
    trainer._sync_tool_dicts, trainer._async_tool_dicts = synchronous, later
    if trainer.tool_workers == 1 and trainer.tool_limit_s is None and not trainer.hung:
        return
    together = ToolsAtOnce(
        [{**plain, **of_loop} for plain, of_loop in zip(synchronous, later, strict=True)],
        completions,
        workers=trainer.tool_workers,
        limit_s=trainer.tool_limit_s,
        loop=getattr(trainer, "async_loop", None),  # TRL makes one if there are async tools
        in_order=in_order(trainer.environments or ()),
        hung=trainer.hung,
    )
    trainer._sync_tool_dicts, trainer._async_tool_dicts = together.tools(), together.tools(asynchronous=True)


class ToolsAtOnce:
    """The tools of one generation.   tools, completions: by rollout; TRL appends each turn's messages to completions.

    workers: threads that run at once.   limit_s: seconds that one call may take; None: no limit.
    loop: runs the async tools.   in_order: rollouts whose calls TRL's loop makes.   hung: those whose `reset` hangs.
    """

    def __init__(
        self,
        tools: Sequence[Tools],
        completions: Sequence[Sequence[Message]],
        *,
        workers: int,
        limit_s: float | None,
        loop: asyncio.AbstractEventLoop | None = None,
        in_order: Set[int] = frozenset(),
        hung: Set[int] = frozenset(),
    ) -> None:
        self._tools = tools
        self._completions = completions
        self._limit_s = limit_s
        self._loop = loop
        self._in_order = in_order
        self._free = workers
        self._waiting = deque[tuple[int, Sequence[_Call]]]()  # in the loop's order, so none waits behind a hanging one
        self._begun: dict[int, int] = {}  # rollout -> number of messages at its newest started turn
        self._turns: dict[int, Sequence[_Call]] = {}  # rollout -> the calls of that turn
        self._results: dict[int, list[_Call]] = {}  # rollout -> calls whose results the loop has not taken yet
        self._hanging = set(hung)
        self._lock = threading.Lock()

    def tools(self, *, asynchronous: bool = False) -> list[dict[str, Callable[..., Any]]]:
        """Return the rollouts' tools for TRL's loop: each waits for its result.   asynchronous: the async tools."""
        return [
            {
                name: tool if row in self._in_order else self._instead_of(tool, row)
                for name, tool in of_row.items()
                if iscoroutinefunction(tool) == asynchronous
            }
            for row, of_row in enumerate(self._tools)
        ]

    def _instead_of(self, tool: Callable[..., Any], row: int) -> Callable[..., Any]:
        if iscoroutinefunction(tool):
            return lambda **_: _wait_for(self._next_call(row))
        return lambda **_: self._result(row, self._next_call(row))

    def _next_call(self, row: int) -> "_Call":
        if self._begun.get(row) != len(self._completions[row]):
            self._start_turn()
        if row in self._hanging:
            raise TimeoutError(_STILL)
        return self._results[row].pop(0)

    def _result(self, row: int, call: "_Call") -> Any:
        call.started.wait()
        try:
            return call.answer.result(self._limit_s)
        except NoResult:
            with self._lock:
                if call.answer.done():  # answered just now, or the tool itself raised TimeoutError
                    return call.answer.result()
                self._hanging.add(row)
                for other in self._turns[row]:
                    if not other.answer.done():
                        other.answer.set_exception(TimeoutError(_STILL))
                self._give_back()
            raise TimeoutError(_too_late(self._limit_s)) from None

    def _start_turn(self) -> None:
        for row, messages in enumerate(self._completions):
            asked = messages[-1].get("tool_calls") if messages and row not in self._in_order else None
            if asked and self._begun.get(row) != len(messages):
                self._begun[row] = len(messages)
                self._turns[row] = calls = tuple(filter(None, (self._call(row, one) for one in asked)))
                self._results[row] = list(calls)
                if calls and row not in self._hanging:
                    self._waiting.append((row, calls))
        with self._lock:
            self._start_waiting()

    def _give_back(self) -> None:
        """Give a thread's place to the next rollout.   Call it under the lock."""
        self._free += 1
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            threading.Thread(target=self._run, args=self._waiting.popleft(), daemon=True).start()

    def _call(self, row: int, asked: Mapping[str, Any]) -> "_Call | None":
        """Return the call; None if TRL's loop does not make it: another type, unknown name, arguments without names."""
        function = asked.get("function") if asked.get("type") == "function" else None
        tool = self._tools[row].get(function["name"]) if function else None
        arguments = function.get("arguments") if function else None
        by_name = isinstance(arguments, Mapping) and all(isinstance(key, str) for key in arguments)
        return _Call(tool, dict(arguments)) if tool is not None and by_name else None  # type: ignore[arg-type]

    def _run(self, row: int, calls: Sequence["_Call"]) -> None:
        for call in (call for call in calls if not call.is_async):
            call.started.set()
            found = _answer(call)
            with self._lock:
                if row in self._hanging:  # too late: the next rollout already has this thread's place
                    return
                found(call.answer)
        self._run_async([call for call in calls if call.is_async])
        with self._lock:
            self._give_back()

    def _run_async(self, calls: Sequence["_Call"]) -> None:
        """Run a rollout's async calls together, after its other calls, as TRL does."""
        for call in calls:
            task = asyncio.run_coroutine_threadsafe(_within(self._limit_s, call), self._loop)  # type: ignore[arg-type]
            task.add_done_callback(lambda done, call=call: _copy_result(done, call.answer))
        for call in calls:
            call.answer.exception()


class _Call:
    def __init__(self, tool: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self.tool = tool
        self.arguments = arguments
        self.is_async = iscoroutinefunction(tool)
        self.started = threading.Event()
        self.answer: Future[Any] = Future()


def _answer(call: _Call) -> Callable[[Future[Any]], None]:
    """Make the call. Return a function that puts its result, or its error, into a future."""
    try:
        result = call.tool(**call.arguments)
    except BaseException as error:
        return lambda answer, error=error: answer.set_exception(error)
    return lambda answer: answer.set_result(result)


def _without_exit(tool: Callable[..., Any]) -> Callable[..., Any]:
    if not iscoroutinefunction(tool):
        return _exit_is_error()(tool)

    async def later(**arguments: Any) -> Any:
        with _exit_is_error():
            return await tool(**arguments)

    return later


@contextmanager
def _exit_is_error() -> Iterator[None]:
    try:
        yield
    except SystemExit as end:
        raise RuntimeError(f"the tool called sys.exit({end.code!r})") from end


def _copy_result(done: Future[Any], to: Future[Any]) -> None:
    error = asyncio.CancelledError("the tool was cancelled") if done.cancelled() else done.exception()
    to.set_exception(error) if error else to.set_result(done.result())


async def _within(limit_s: float | None, call: _Call) -> Any:
    task = asyncio.ensure_future(call.tool(**call.arguments))
    done, _ = await asyncio.wait({task}, timeout=limit_s)
    if not done:
        task.cancel()
        await asyncio.wait({task}, timeout=CLEAN_S)
        raise TimeoutError(_too_late(limit_s))
    return task.result()


def _wait_for(call: _Call) -> Coroutine[Any, Any, Any]:
    async def answer() -> Any:
        return await asyncio.wrap_future(call.answer)

    return answer()


def _too_late(limit_s: float | None) -> str:
    return f"the tool gave no answer within {limit_s:g} s"
