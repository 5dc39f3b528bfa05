"""Run the tool calls of one turn at the same time, in threads.

    completions: every rollout whose newest message calls tools ──▶ a thread each, `workers` at once ──▶ results by row

TRL's loop calls tools rollout by rollout.  Its first call of a turn starts those of all rollouts here, and each later
call finds its result.  So tokens, masks and the order of messages are those of the serial loop.  The calls of one
rollout stay in their order, because they share an environment.  Rollouts begin in the loop's order.

A call without an answer after `limit_s` seconds is an error of its rollout; later calls of that rollout fail at once,
because its environment is still busy.  Its place goes to the next rollout.

Not promised: tools that several rollouts share need locks of their own; async tools run as in TRL's loop; a thread
that hangs is left behind.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoResult
from typing import Any

Tools = Mapping[str, Callable[..., Any]]
Message = Mapping[str, Any]


class ToolsAtOnce:
    """The tools of one generation.   tools, completions: by rollout; TRL appends each turn's messages to completions.

    workers: threads that run at once.   limit_s: seconds that one call may take; None: no limit.
    """

    def __init__(
        self, tools: Sequence[Tools], completions: Sequence[Sequence[Message]], workers: int, limit_s: float | None
    ) -> None:
        self._tools = tools
        self._completions = completions
        self._limit_s = limit_s
        self._free = workers
        self._waiting = deque[tuple[int, Sequence[_Call]]]()  # in the loop's order, so none waits behind a hanging one
        self._begun: dict[int, int] = {}  # rollout -> messages at its newest turn that was started
        self._results: dict[int, list[_Call]] = {}
        self._hanging = set[int]()
        self._lock = threading.Lock()

    def tools(self) -> list[dict[str, Callable[..., Any]]]:
        """Return the rollouts' tools as TRL calls them: each waits for its result."""
        return [
            {name: lambda row=row, **_: self._result(row) for name in of_row} for row, of_row in enumerate(self._tools)
        ]

    def _result(self, row: int) -> Any:
        if self._begun.get(row) != len(self._completions[row]):
            self._start_turn()
        if row in self._hanging:
            raise TimeoutError("an earlier tool call of this rollout still hangs")
        call = self._results[row].pop(0)
        call.started.wait()
        try:
            return call.answer.result(self._limit_s)
        except NoResult:
            with self._lock:
                if call.answer.done():  # just now, or it is the tool's own TimeoutError
                    return call.answer.result()
                self._hanging.add(row)
                self._give_back()
            raise TimeoutError(f"the tool gave no answer within {self._limit_s:g} s") from None

    def _start_turn(self) -> None:
        for row, messages in enumerate(self._completions):
            asked = messages[-1].get("tool_calls") if messages else None
            if asked and self._begun.get(row) != len(messages):
                self._begun[row] = len(messages)
                self._results[row] = calls = list(filter(None, (self._call(row, one) for one in asked)))
                if calls and row not in self._hanging:
                    self._waiting.append((row, tuple(calls)))
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
        """Return the call, None if TRL's loop does not make it: another type, an unknown name, no arguments by name."""
        function = asked.get("function") if asked.get("type") == "function" else None
        tool = self._tools[row].get(function["name"]) if function else None
        arguments = function.get("arguments") if function else None
        by_name = isinstance(arguments, Mapping) and all(isinstance(key, str) for key in arguments)
        return _Call(tool, dict(arguments)) if tool is not None and by_name else None  # type: ignore[arg-type]

    def _run(self, row: int, calls: Sequence["_Call"]) -> None:
        for call in calls:
            call.started.set()
            found = _answer(call)
            with self._lock:
                if row in self._hanging:  # too late: the loop has given this thread's place to another
                    return
                found(call.answer)
        with self._lock:
            self._give_back()


class _Call:
    def __init__(self, tool: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self.tool = tool
        self.arguments = arguments
        self.started = threading.Event()
        self.answer: Future[Any] = Future()


def _answer(call: _Call) -> Callable[[Future[Any]], None]:
    """Make the call. Return what puts its result, or its error, into a future."""
    try:
        result = call.tool(**call.arguments)
    except BaseException as error:
        return lambda answer, error=error: answer.set_exception(error)
    return lambda answer: answer.set_result(result)
