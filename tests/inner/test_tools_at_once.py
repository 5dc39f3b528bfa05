"""All tool calls of a turn run at the same time, and nothing that the serial loop makes is another."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inner.rollouts.at_once import lanes
from inner.rollouts.at_once import tools as tools_at_once
from inner.rollouts.at_once.tools import ToolsAtOnce
from tests.benchmarks.bench_tools import run
from tests.inner.test_toolworld import SMALL, small_folder
from tests.support.tables import merge_tables

torch.set_num_threads(1)
PATIENCE_S = 30
LIMIT_S = 0.5  # of calls that hang, and of those beside them: a busy machine lets a thread wait for more than 0.05 s


def asks(*calls: tuple[str, Any]) -> dict[str, Any]:
    made = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    return {"role": "assistant", "tool_calls": made}


def together(tools: list[dict[str, Any]], turns: list[dict[str, Any]], workers: int = 16, limit: float | None = None):
    messages = [[turn] for turn in turns]
    return messages, ToolsAtOnce(tools, messages, lanes.Lanes(workers, limit)).tools()


def test_a_whole_run_is_that_of_the_serial_loop_bit_for_bit() -> None:
    settings = merge_tables(SMALL, {"sampling": {"tool_workers": 8, "tool_timeout_s": 60.0}})
    _, serial, there = run(small_folder(), 16, 3, **SMALL)
    _, rewards, here = run(small_folder(), 16, 3, **settings)
    assert rewards == serial and len(set(rewards)) > 1 and torch.equal(here, there)


def test_sixteen_calls_that_wait_for_each_other_all_return() -> None:
    """One after the other they would never."""
    gate = threading.Barrier(16)
    tools = [{"wait": lambda row=row: gate.wait(PATIENCE_S) * 0 + row} for row in range(16)]
    _, found = together(tools, [asks(("wait", {}))] * 16)
    assert [of_row["wait"]() for of_row in found] == list(range(16))


def test_no_more_run_at_once_than_workers() -> None:
    lock, running, most = threading.Lock(), [0], [0]
    pair = threading.Barrier(4)

    def tool() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        pair.wait(PATIENCE_S)
        with lock:
            running[0] -= 1

    _, found = together([{"t": tool}] * 8, [asks(("t", {}))] * 8, workers=4)
    for of_row in found:
        of_row["t"]()
    assert most[0] == 4


def test_the_calls_of_one_rollout_keep_their_order_and_their_errors() -> None:
    seen: list[str] = []

    def note(text: str) -> str:
        seen.append(text)
        if text == "b":
            raise ValueError("no b")
        return text.upper()

    asked = asks(
        ("note", {"text": "a"}), ("nothing", {}), ("note", "text"), ("note", {"text": "b"}), ("note", {"text": "c"})
    )
    _, (tools,) = together([{"note": note}], [asked])
    assert tools["note"](text="a") == "A" and "nothing" not in tools  # TRL's loop answers for an unknown name
    with pytest.raises(ValueError, match="no b"):
        tools["note"](text="b")  # and for arguments that are no mapping
    assert tools["note"](text="c") == "C" and seen == ["a", "b", "c"]


def test_a_rollout_that_left_the_loop_is_not_called_again() -> None:
    calls: list[int] = []
    tools = [{"t": lambda row=row: calls.append(row)} for row in range(2)]
    messages, found = together(tools, [asks(("t", {}))] * 2)
    for of_row in found:
        of_row["t"]()
    messages[1] += [{"role": "tool", "content": ""}, asks(("t", {}))]  # the answer of rollout 0 was too long for TRL
    found[1]["t"]()
    assert sorted(calls) == [0, 1, 1]


def test_a_call_that_hangs_costs_its_rollout_and_no_more() -> None:
    release = threading.Event()
    tools = [{"t": (lambda: release.wait(PATIENCE_S)) if row == 0 else (lambda row=row: row)} for row in range(3)]
    messages, found = together(tools, [asks(("t", {}), ("t", {}))] + [asks(("t", {}))] * 2, workers=1, limit=0.2)
    with pytest.raises(TimeoutError, match=r"gave no answer within 0\.2 s"):
        found[0]["t"]()
    with pytest.raises(TimeoutError, match="an earlier call of this rollout still hangs"):
        found[0]["t"]()
    assert [found[row]["t"]() for row in (1, 2)] == [1, 2], "its place in the one worker is another's"
    for row in range(3):
        messages[row] += [{"role": "tool", "content": ""}, asks(("t", {}))]
    with pytest.raises(TimeoutError, match="still hangs"):
        found[0]["t"]()
    assert [found[row]["t"]() for row in (1, 2)] == [1, 2]
    release.set()


def test_more_hanging_calls_than_workers_keep_no_rollout_waiting() -> None:
    """A place comes back when the loop has waited for it, and no later rollout begins before an earlier one."""
    release = threading.Event()
    tools = [
        {"t": (lambda: release.wait(PATIENCE_S)) if row in (1, 2, 4) else (lambda row=row: row)} for row in range(6)
    ]
    _, found = together(tools, [asks(("t", {}))] * 6, workers=2, limit=LIMIT_S)
    seen: list[Any] = []
    for of_row in found:
        try:
            seen.append(of_row["t"]())
        except TimeoutError:
            seen.append("late")
    assert seen == [0, "late", "late", 3, "late", 5]
    release.set()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(PATIENCE_S)


def test_an_async_call_that_ignores_its_cancellation_costs_its_rollout_and_no_more(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "CLEAN_S", 0.05)

    async def stays() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(2 * PATIENCE_S)
        await asyncio.sleep(2 * PATIENCE_S)

    async def quick() -> int:
        return 1

    made = ToolsAtOnce([{"t": stays}, {"t": quick}], [[asks(("t", {}))]] * 2, lanes.Lanes(1, LIMIT_S), loop=loop).tools(
        asynchronous=True
    )
    late, answer = (asyncio.run_coroutine_threadsafe(of_row["t"](), loop) for of_row in made)
    with pytest.raises(TimeoutError, match=f"gave no answer within {LIMIT_S} s"):
        late.result(PATIENCE_S)
    assert answer.result(PATIENCE_S) == 1


class Panic(BaseException):
    """As pyo3's PanicException, and pytest's fail()."""


class Odd(Exception):
    def __str__(self) -> str:
        return self.args[1]


class Unprintable:
    def __str__(self) -> str:
        raise OSError("gone")


async def gathered(call: Awaitable[Any]) -> Any:
    return await asyncio.gather(call, return_exceptions=True)


@pytest.mark.parametrize(
    "fault",
    [Panic("rust"), Odd("no second"), asyncio.CancelledError(), KeyboardInterrupt(), None],
    ids=["panic", "odd", "cancelled", "interrupt", "result"],
)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("workers", [1, 4])
def test_a_fault_of_any_kind_is_the_calls_error(
    loop: asyncio.AbstractEventLoop, fault: BaseException | None, is_async: bool, workers: int
) -> None:
    """Before: it ended the session, and after three sessions the run; an async KeyboardInterrupt hung."""

    def now() -> Any:
        if fault is not None:
            raise fault
        return Unprintable()

    async def later() -> Any:
        return now()

    trainer = SimpleNamespace(
        _sync_tool_dicts=[{} if is_async else {"t": now}], _async_tool_dicts=[{"t": later} if is_async else {}],
        environments=None, async_loop=loop, lanes=lanes.Lanes(workers) if workers > 1 else None,
    )  # fmt: skip
    tools_at_once.prepare_tools(trainer, [[asks(("t", {}))]])
    passes = not is_async and workers == 1 and isinstance(fault, KeyboardInterrupt)  # in the main thread: Ctrl-C
    with pytest.raises(KeyboardInterrupt if passes else Exception) as raised:
        if is_async:  # TRL's loop takes an Exception for a failure
            found = asyncio.run_coroutine_threadsafe(gathered(trainer._async_tool_dicts[0]["t"]()), loop)
            raise found.result(PATIENCE_S)[0]
        trainer._sync_tool_dicts[0]["t"]()
    assert passes or str(raised.value)


async def one_later() -> int:
    return 1


def some() -> Iterator[int]:
    yield 1


async def some_later() -> AsyncIterator[int]:
    yield 1


@pytest.mark.filterwarnings("ignore:coroutine 'one_later' was never awaited")
@pytest.mark.parametrize("made", [one_later, some, some_later])
def test_a_result_that_has_not_run_is_the_calls_error(made: Any) -> None:
    """Before: the model read "<generator object …>", and the tool did nothing."""
    trainer = SimpleNamespace(
        _sync_tool_dicts=[{"t": lambda: made()}], _async_tool_dicts=[{}], environments=None, lanes=None
    )
    tools_at_once.prepare_tools(trainer, [[asks(("t", {}))]])
    with pytest.raises(TypeError, match=r"the tool returned a (coroutine|generator|async_generator), which has not"):
        trainer._sync_tool_dicts[0]["t"]()


@pytest.mark.parametrize("workers", [1, 4])
def test_a_tool_that_ends_the_process_has_made_an_error(loop: asyncio.AbstractEventLoop, workers: int) -> None:
    def leaves() -> None:
        sys.exit(3)

    async def leaves_later() -> None:
        sys.exit("bye")

    trainer = SimpleNamespace(
        _sync_tool_dicts=[{"now": leaves}], _async_tool_dicts=[{"later": leaves_later}], environments=None,
        async_loop=loop, lanes=lanes.Lanes(workers) if workers > 1 else None,
    )  # fmt: skip
    tools_at_once.prepare_tools(trainer, [[asks(("now", {}), ("later", {}))]])
    with pytest.raises(RuntimeError, match=r"the tool called sys\.exit\(3\)"):
        trainer._sync_tool_dicts[0]["now"]()
    called = asyncio.run_coroutine_threadsafe(trainer._async_tool_dicts[0]["later"](), loop)
    with pytest.raises(RuntimeError, match=r"the tool called sys\.exit\('bye'\)"):
        called.result(PATIENCE_S)


def test_a_tool_that_hung_costs_its_rollout_in_its_own_generation() -> None:
    """Without an environment, the same row of the next generation has nothing to do with it."""
    release, answers = threading.Event(), iter((False, True))
    trainer = SimpleNamespace(environments=None, async_loop=None, lanes=lanes.Lanes(1, LIMIT_S))
    for hangs in (True, False):
        trainer._sync_tool_dicts = [{"t": lambda: next(answers) or release.wait(PATIENCE_S)}]
        trainer._async_tool_dicts = [{}]
        tools_at_once.prepare_tools(trainer, [[asks(("t", {}))]])
        if hangs:
            with pytest.raises(TimeoutError, match="gave no answer"):
                trainer._sync_tool_dicts[0]["t"]()
        else:
            assert trainer._sync_tool_dicts[0]["t"]() == "True"
    release.set()


@pytest.mark.parametrize("name", ["function", "self", "given", "args", "limit_s", "row"])
def test_an_argument_may_have_any_name(name: str) -> None:
    """One model's argument `self` failed in another rollout, whose next call then waited for ever."""
    _, found = together([{"t": lambda **given: given}] * 2, [asks(("t", {"a": 1})), asks(("t", {name: 2}))])
    assert [found[0]["t"](), found[1]["t"]()] == [{"a": 1}, {name: 2}]


def test_a_name_that_is_no_text_costs_no_other_rollout_its_call() -> None:
    odd = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": ["t"], "arguments": {}}}]}
    _, found = together([{"t": lambda: 1}] * 2, [odd, asks(("t", {}))])
    assert found[1]["t"]() == 1


def test_an_item_that_has_ended_is_not_kept() -> None:
    """160 failed calls kept their frames until the next generation."""
    messages = [[asks(("t", {}))] for _ in range(3)]
    made = ToolsAtOnce([{"t": lambda: 1}] * 3, messages, lanes.Lanes(2))
    for of_row in made.tools():
        of_row["t"]()
    assert not made._workers._open


def test_a_tools_own_timeout_is_its_error() -> None:
    def late() -> None:
        raise TimeoutError("the server is slow")

    _, (tools,) = together([{"late": late}], [asks(("late", {}))], limit=20)
    with pytest.raises(TimeoutError, match="the server is slow"):
        tools["late"]()


def prepared(tool: Any, workers: int) -> Any:
    """Return a plain tool as TRL's loop gets it, its one call asked for."""
    trainer = SimpleNamespace(
        _sync_tool_dicts=[{"t": tool}], _async_tool_dicts=[{}], environments=None,
        lanes=lanes.Lanes(workers) if workers > 1 else None,
    )  # fmt: skip
    tools_at_once.prepare_tools(trainer, [[asks(("t", {}))]])
    return trainer._sync_tool_dicts[0]["t"]


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ([{"type": "image", "name": "a.png"}], "[{'type': 'image', 'name': 'a.png'}]"),
        ([{(1, 2): 3}], "[{(1, 2): 3}]"),
        (CIRCLE, "[[...]]"),
        ([1, {"type": "text", "text": "two"}], [1, {"type": "text", "text": "two"}]),
    ],
    ids=["image", "key", "circle", "content"],
)
def test_a_list_that_no_message_can_hold_is_shown_as_text(result: Any, shown: Any, workers: int) -> None:
    """TRL read the image of each part, and a bundle needs JSON: a KeyError or TypeError ended the session."""
    assert prepared(lambda: result, workers)() == shown


@pytest.mark.parametrize("workers", [1, 4])
def test_an_object_is_shown_without_its_place_in_memory(workers: int) -> None:
    """Before: an image was `<PIL.Image … at 0x7f3c5a10>`, so no other process could make its rollout again."""
    image = [{"type": "image", "image": object()}]
    assert prepared(lambda: image, workers)() == "[{'type': 'image', 'image': <object object>}]"
    assert prepared(object, workers)() == "<object object>"
    assert prepared(lambda: "<f at 0x7f>", workers)() == "<f at 0x7f>", "a text of the tool's own"
    assert len(prepared(lambda: "x" * (5 << 20), workers)()) == tools_at_once.MOST


@pytest.mark.parametrize("workers", [1, 4])
def test_a_list_without_a_text_is_the_calls_error(workers: int) -> None:
    with pytest.raises(ValueError, match="integer string"):
        prepared(lambda: [10**5000], workers)()
