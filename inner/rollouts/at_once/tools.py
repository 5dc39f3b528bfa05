"""Run the tool calls of one turn at the same time, in threads and tasks.

    completions: every rollout whose newest message calls tools ──▶ a lane each, `workers` at once ──▶ results by row
                                                                     └ then its async calls, tasks of TRL's event loop

TRL's loop calls tools rollout by rollout.  Here the first call of a turn starts the calls of all rollouts, and each
later call finds its result.  So tokens, masks and the order of messages are those of the serial loop.  The calls of one
rollout stay in their order, because they share an environment, and run in its lane (lanes.py).

A call without an answer after `limit_s` seconds is an error of its rollout; later calls of that rollout fail at once,
because its environment is still busy.  The next batch has a new environment in its place.  An async call is cancelled
instead.  TRL's loop does not catch sys.exit() and some other exceptions of a tool.  Here they are errors of the tool,
also if calls are made one after the other.

Not promised: locks around tools that several rollouts share; an end of a thread that hangs, or of an async tool that
ignores its cancellation (both go on running); an async tool that blocks the event loop.
"""

import asyncio
import json
import re
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import iscoroutinefunction
from typing import Any

from inner.rollouts.at_once.lanes import (
    STILL,
    Call,
    Lane,
    Lanes,
    NoAnswer,
    Workers,
    WorkItem,
    in_order,
    is_in_lane,
    within,
)
from inner.usercode.deadline import is_end

Tools = Mapping[str, Callable[..., Any]]
Message = Mapping[str, Any]
PLACE = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")
MOST = 4 << 20  # characters of a result's text: no context holds more, and 2 GB would take an hour to become tokens


def prepare_tools(trainer: Any, completions: Sequence[Sequence[Message]]) -> None:
    """Make each fault of a trainer's tools an error of its call; run them in lanes if the trainer has lanes."""
    synchronous, later = (
        [{name: _guarded(tool) for name, tool in of_row.items()} for of_row in tools]
        for tools in (trainer._sync_tool_dicts, trainer._async_tool_dicts)
    )
    trainer._sync_tool_dicts, trainer._async_tool_dicts = synchronous, later
    if trainer.lanes is None:
        return
    trainer.lanes.hung_tools.clear()  # their environments have been replaced at this generation's `reset`
    together = ToolsAtOnce(
        [{**plain, **of_loop} for plain, of_loop in zip(synchronous, later, strict=True)],
        completions,
        trainer.lanes,
        environments=trainer.environments or (),
        loop=getattr(trainer, "async_loop", None),  # TRL makes one if there are async tools
    )
    trainer._sync_tool_dicts, trainer._async_tool_dicts = together.tools(), together.tools(asynchronous=True)


class ToolsAtOnce:
    """The tools of one generation.   tools, completions: by rollout; TRL appends each turn's messages to completions.

    environments: of each rollout; () for a run without environments.   loop: runs the async tools."""

    def __init__(
        self,
        tools: Sequence[Tools],
        completions: Sequence[Sequence[Message]],
        lanes: Lanes,
        *,
        environments: Sequence[Any] = (),
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._tools, self._completions, self._lanes, self._loop = tools, completions, lanes, loop
        self._in_order = in_order(environments)
        self._lane_of = [lanes.of(one) for one in environments] or [Lane() for _ in tools]
        self._workers = Workers(lanes.workers)
        self._begun: dict[int, int] = {}  # rollout -> number of messages at its newest started turn
        self._asked: dict[int, deque[tuple[WorkItem, Call]]] = {}  # rollout -> calls that the loop has not taken

    def tools(self, *, asynchronous: bool = False) -> list[dict[str, Callable[..., Any]]]:
        """Return the rollouts' tools for TRL's loop: each waits for its result.   asynchronous: the async tools."""
        return [
            {name: self._instead_of(tool, row) for name, tool in of_row.items() if _is_async(tool) == asynchronous}
            for row, of_row in enumerate(self._tools)
        ]

    def _instead_of(self, tool: Callable[..., Any], row: int) -> Callable[..., Any]:
        if row in self._in_order:
            if _is_async(tool):
                return lambda **given: within(self._lanes.tool_limit_s, Call(tool, given))
            return lambda **given: self._result(row, *self._alone(row, tool, given))
        if _is_async(tool):
            return lambda **_: self._awaited(row)
        return lambda **_: self._result(row, *self._next_call(row))

    def _alone(self, row: int, tool: Callable[..., Any], given: Mapping[str, Any]) -> tuple[WorkItem, Call]:
        self._check_free(row)
        item = WorkItem([Call(tool, given)], self._lanes.tool_limit_s)
        self._lane_of[row].run(item)
        return item, item.calls[0]

    def _next_call(self, row: int) -> tuple[WorkItem, Call]:
        if self._begun.get(row) != len(self._completions[row]):
            self._start_turn()
        self._check_free(row)
        return self._asked[row].popleft()

    def _awaited(self, row: int) -> Coroutine[Any, Any, Any]:
        item, call = self._next_call(row)
        return item.wait(call)

    def _check_free(self, row: int) -> None:
        if self._hangs(row):
            raise NoAnswer(STILL)

    def _hangs(self, row: int) -> bool:
        return row in self._lanes.hung or row in self._lanes.hung_tools

    def _result(self, row: int, item: WorkItem, call: Call) -> Any:
        try:
            return item.take(call)
        except NoAnswer:
            self._lanes.hung_tools.add(row)
            raise

    def _start_turn(self) -> None:
        for row, messages in enumerate(self._completions):
            asked = messages[-1].get("tool_calls") if messages and row not in self._in_order else None
            if asked and self._begun.get(row) != len(messages):
                self._begun[row] = len(messages)
                calls = [*filter(None, (self._call(row, one) for one in asked))]
                item = WorkItem(calls, self._lanes.tool_limit_s, self._loop)
                self._asked[row] = deque((item, call) for call in calls)
                if calls and not self._hangs(row):
                    self._workers.add(self._lane_of[row], item)
        self._workers.start()

    def _call(self, row: int, asked: Mapping[str, Any]) -> Call | None:
        """Return the call; None if TRL's loop makes no such call: another type, unknown name, unnamed arguments."""
        function = asked.get("function") if asked.get("type") == "function" else None
        name = function.get("name") if function else None
        tool = self._tools[row].get(name) if isinstance(name, str) else None
        arguments = function.get("arguments") if function else None
        by_name = isinstance(arguments, Mapping) and all(isinstance(key, str) for key in arguments)
        return Call(tool, arguments) if tool is not None and by_name else None  # type: ignore[arg-type]


def _is_async(tool: Callable[..., Any]) -> bool:
    return iscoroutinefunction(tool)


def _guarded(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Return the tool. TRL's loop can catch each of its errors, and each error has a text."""

    async def later(**arguments: Any) -> Any:
        with _faults_are_errors(asyncio.CancelledError, GeneratorExit):
            try:
                return _with_text(await tool(**arguments))
            except asyncio.CancelledError as end:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise RuntimeError("the tool raised CancelledError: it awaited a task that was cancelled") from end

    def now(**arguments: Any) -> Any:
        ends = not is_in_lane() and is_end(KeyboardInterrupt())  # Ctrl-C reaches the main thread
        with _faults_are_errors(*[KeyboardInterrupt] * ends):
            return _with_text(tool(**arguments))

    return later if iscoroutinefunction(tool) else now


@contextmanager
def _faults_are_errors(*passing: type[BaseException]) -> Iterator[None]:
    """Raise a RuntimeError for an exception outside Exception, or without a text.   passing: exceptions that stay."""
    try:
        yield
    except passing:
        raise
    except SystemExit as end:
        raise RuntimeError(f"the tool called sys.exit({end.code!r})") from end
    except Exception as error:
        try:
            str(error)
        except Exception:
            raise RuntimeError(f"the tool raised {type(error).__name__}, which has no text") from None
        raise
    except BaseException as end:  # also a library's own kinds, such as a Rust panic or pytest's fail()
        raise RuntimeError(f"the tool raised {type(end).__name__}") from end


def _with_text(result: Any) -> Any:
    """Return the result as TRL's loop shows it. The text is made here, so that an error of __str__ is the call's error.

    An object's place in memory (`<Image at 0x7f…>`) is left out: no other process could make these rollouts again."""
    if isinstance(result, Awaitable | Generator | AsyncGenerator):  # a decorator may hide an `async` or a `yield`
        raise TypeError(f"the tool returned a {type(result).__name__}, which has not run")
    if isinstance(result, list) and _is_content(result):
        return result
    text = str(result)[:MOST]
    return text if isinstance(result, str) else PLACE.sub("", text)


def _is_content(parts: list[Any]) -> bool:
    """Whether a message can hold the list: no part is an image, and a record of the message can be written."""
    if any(isinstance(part, dict) and part.get("type") == "image" for part in parts):  # TRL reads the key `image`
        return False
    try:
        json.dumps(parts, default=str)
    except (TypeError, ValueError, RecursionError):  # a key that is no text, a circle, 5000 digits
        return False
    return True
