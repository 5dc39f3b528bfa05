"""`reset`, `get_reward` and async tools of all rollouts at the same time, and the serial loop's results."""

import asyncio
import copy
import json
import pickle
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from inner.rollouts.at_once.environments import drawn_environments, methods_at_once, replace_hung
from inner.rollouts.at_once.lanes import Lanes, in_order
from inner.rollouts.at_once.tools import ToolsAtOnce
from inner.settings.inner import InnerConfig, InnerError, Seeds
from inner.train.build import build_inner
from inner.train.task import load_task
from inner.usercode.check import check_data, check_inner, lost_tools_warning
from tests.inner.test_tools_at_once import LIMIT_S, PATIENCE_S, asks
from tests.inner.test_toolworld import WORLD, small_folder

torch.set_num_threads(1)
GOOD, OTHER = WORLD.right_name(0), WORLD.right_name(1)

WORLD_FILE = f'''
import threading

class World:
    """Tools of both kinds, and a reward of its own. The class counts how many wait at once."""

    at_once, most, lock = 0, {{}}, threading.Lock()

    def reset(self, **row):
        self.calls = 0
        self._meet("reset")

    async def {GOOD}(self, a: int, b: int) -> str:
        """The one.

        Args:
            a: first
            b: second
        """
        self.calls += 1
        return str((a + b) % 20)

    def {OTHER}(self, a: int, b: int) -> str:
        """The other.

        Args:
            a: first
            b: second
        """
        self.calls += 1
        return str((2 * a + b) % 20)

    def get_reward(self) -> float:
        self._meet("get_reward")
        return float(self.calls)

    def _meet(self, where):
        with self.lock:
            World.at_once += 1
            self.most[where] = max(self.most.get(where, 0), World.at_once)
        threading.Event().wait(0.02)
        with self.lock:
            World.at_once -= 1
'''


class One:
    """An environment that answers with its number."""

    _in_order = False

    def __init__(self, number: int, meet: Any = None) -> None:
        self.number, self.meet, self.times = number, meet or (lambda: None), 0

    def reset(self, **row: Any) -> Any:
        self.meet()
        self.times += 1
        if row.get("bad") == self.number:
            raise ValueError(f"no {self.number}")
        return self.number, row

    async def get_reward(self) -> int:
        await self.meet()
        self.times += 1
        return self.number


def test_a_whole_run_is_that_of_the_serial_loop_and_the_environments_meet(tmp_path: Path) -> None:
    serial, at_once = trained(tmp_path, 1), trained(tmp_path, 8)
    assert torch.equal(serial[0], at_once[0]) and serial[1] == at_once[1]
    assert serial[2] == {"reset": 1, "get_reward": 1}
    assert all(2 <= most <= 8 for most in at_once[2].values()), at_once[2]


def trained(
    folder: Path, workers: int, text: str = WORLD_FILE, limits: Any = MappingProxyType({"tool_timeout_s": 60.0})
) -> tuple[torch.Tensor, dict[str, float], dict[str, int]]:
    """Return the parameters after two steps, the last metrics, and how many environments were at once in a method."""
    (folder / "world.py").write_text(text)
    (folder / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "op0 3 4"}]}\n' * 4)
    config = InnerConfig(
        model=str(small_folder()),
        data={"prompts": "rows.jsonl"},
        sampling={"environment": "world.py:World", "tool_workers": workers, **limits},
        batch_size=16,
    )
    files = {"prompts": folder / "rows.jsonl", "environment": folder / "world.py"}
    loop: Any = build_inner(config, small_folder(), files, Seeds(data=0, noise=0))
    stops = iter((False, True))
    loop.train(lambda: next(stops))
    parameters = torch.cat([p.detach().flatten() for p in loop.model.parameters()])
    metrics = {name: value for name, value in loop.pop_metrics().items() if "time" not in name}
    return parameters, metrics, dict(loop.trainer.environments[0].most)


@pytest.mark.parametrize("workers", [1, 8])
def test_an_observation_that_is_no_text_is_named(tmp_path: Path, workers: int) -> None:
    """As of Gym's reset. Before: can only concatenate str (not "tuple") to str."""
    text = WORLD_FILE.replace('        self._meet("reset")\n', '        return "seen", {}\n')
    with pytest.raises(InnerError, match=r"`reset` of World returned a tuple\. Return None, or a text"):
        trained(tmp_path, workers, text)


@pytest.mark.parametrize(
    ("text", "rewards"), [(WORLD_FILE, 0), (WORLD_FILE.replace("get_reward", "_score"), 1)], ids=["own", "none"]
)
def test_a_reward_of_the_users_environment_replaces_toolworlds(text: str, rewards: int, tmp_path: Path) -> None:
    """ToolWorld's own reward asked the user's prompts for a column, and ended each session."""
    (tmp_path / "world.py").write_text(text)
    config = InnerConfig(model="toolworld", sampling={"environment": "world.py:World"}, batch_size=8)
    assert len(load_task(config, {"environment": tmp_path / "world.py"}).rewards) == rewards


OWN_ROWS = {"prompt": [{"role": "user", "content": "op0 3 4"}]}
FACTORY = WORLD_FILE + "\ndef make():\n    return World()\n"
UNSCORED = WORLD_FILE.replace("get_reward", "_score")


@pytest.mark.parametrize(
    ("text", "named", "row", "refused"),
    [
        (UNSCORED, "World", OWN_ROWS, "no column 'answer', .* for its own reward. Set inner.rewards.function"),
        (UNSCORED, "World", {**OWN_ROWS, "answer": 3}, ""),
        (WORLD_FILE, "World", OWN_ROWS, ""),
        (FACTORY, "make", OWN_ROWS, ""),
        ("", "", {**OWN_ROWS, "answer": 3}, "no column 'kind', .* for its own tools. Set inner.sampling.environment"),
        ("", "", {**OWN_ROWS, "answer": 3, "kind": 0}, ""),
    ],
    ids=["unscored", "answers", "own", "factory", "no tools", "toolworlds"],
)
def test_own_rows_that_toolworlds_parts_cannot_read_are_refused(
    text: str, named: str, row: dict[str, Any], refused: str, tmp_path: Path
) -> None:
    """Before: three sessions ended with a TypeError of ToolWorld.reward, after a minute and a half."""
    (tmp_path / "world.py").write_text(text)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    sampling = {"environment": f"world.py:{named}"} if named else {}
    config = InnerConfig(model="toolworld", data={"prompts": "rows.jsonl"}, sampling=sampling, batch_size=8)
    files = {"environment": tmp_path / "world.py", "prompts": tmp_path / "rows.jsonl"}
    for check in (check_inner, check_data, load_task):
        if refused and (check is not check_data or not named):  # check_data runs no code
            with pytest.raises(InnerError, match=refused):
                check(config, files)
        else:
            check(config, files)
    task = None if refused else load_task(config, files)
    assert task is None or len(task.rewards) == ("get_reward" not in text)
    assert task is None or isinstance(task.environment, type), "its class says whether it is _in_order"


@pytest.mark.parametrize("named", ["World", "make"])
def test_the_checks_of_a_load_make_one_environment(named: str, tmp_path: Path) -> None:
    """A function was called once more, for its class, and a constructor may open a server or take a licence."""
    made = tmp_path / "made"
    text = f"    def __init__(self):\n        open({str(made)!r}, 'a').write('x')\n    def reset"
    (tmp_path / "world.py").write_text(FACTORY.replace("    def reset", text, 1))
    (tmp_path / "rows.jsonl").write_text(json.dumps(OWN_ROWS))
    sampling = {"environment": f"world.py:{named}"}
    config = InnerConfig(model="toolworld", data={"prompts": "rows.jsonl"}, sampling=sampling, batch_size=8)
    files = {"environment": tmp_path / "world.py", "prompts": tmp_path / "rows.jsonl"}
    for check in (load_task, check_inner, lost_tools_warning):
        made.write_text("")
        check(config, files)
        assert made.read_text() == "x", check


@pytest.mark.parametrize("number", [16, 3])
def test_calls_that_wait_for_each_other_all_return_with_their_own_row(number: int) -> None:
    gate = threading.Barrier(number)
    ones = [One(i, lambda: gate.wait(PATIENCE_S)) for i in range(number)]
    rows = [{"a": i} for i in range(number)]
    with methods_at_once(ones, "reset", rows, Lanes(16)):
        assert [one.reset(a=i) for i, one in enumerate(ones)] == list(enumerate(rows))
    assert all("reset" not in vars(one) for one in ones)


def test_no_more_begin_than_workers_and_all_are_made_once() -> None:
    pair = threading.Barrier(2)
    ones = [One(i, lambda: pair.wait(PATIENCE_S)) for i in range(6)]  # a third would break it
    with methods_at_once(ones, "reset", [{}] * 6, Lanes(2)):
        assert [one.reset()[0] for one in ones] == list(range(6))
    assert [one.times for one in ones] == [1] * 6


def test_async_calls_wait_for_each_other_and_again_reaches_the_method() -> None:
    async def score() -> list[int]:
        gate = asyncio.Barrier(5)
        ones = [One(i, gate.wait) for i in range(5)]
        with methods_at_once(ones, "get_reward", [{}] * 5, Lanes(5)):
            first = [await one.get_reward() for one in ones]
            again = await asyncio.gather(*(one.get_reward() for one in ones))
        assert [one.times for one in ones] == [2] * 5
        return first + list(again)

    assert asyncio.run(score()) == [0, 1, 2, 3, 4] * 2


def test_calls_that_have_not_begun_when_the_batch_is_over_are_not_made() -> None:
    """A reward that hangs, and a limit that ends the batch. The next one resets the environments."""
    begun, release = threading.Event(), threading.Event()
    ones = [One(0, lambda: (begun.set(), release.wait(PATIENCE_S))), One(1), One(2)]
    lanes = Lanes(1)
    with pytest.raises(KeyboardInterrupt), methods_at_once(ones, "reset", [{}] * 3, lanes):
        waiting = threading.Thread(target=until_it_is_over, args=(ones[0].reset,))
        waiting.start()
        assert begun.wait(PATIENCE_S)
        late = ones[1].reset
        raise KeyboardInterrupt  # as deadline.py interrupts
    with pytest.raises(TimeoutError, match="the batch was over"):
        late()
    release.set()
    waiting.join(PATIENCE_S)
    while lanes.of(ones[0]).is_busy:
        pass
    assert [one.times for one in ones] == [1, 0, 0]


def until_it_is_over(call: Any) -> None:
    with suppress(TimeoutError):
        call()


def test_async_calls_that_wait_when_the_batch_is_over_are_cancelled(loop: Any) -> None:
    async def wait() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def nothing() -> None: ...

    begun = threading.Event()
    ones = [One(0, wait), One(1, nothing), One(2, nothing)]

    async def first() -> Any:
        return await ones[0].get_reward()

    with methods_at_once(ones, "get_reward", [{}] * 3, Lanes(1)):
        asked = asyncio.run_coroutine_threadsafe(first(), loop)
        assert begun.wait(PATIENCE_S)
    with pytest.raises(TimeoutError, match="the batch was over"):
        asked.result(PATIENCE_S)
    ask(loop, nothing())
    assert [one.times for one in ones] == [0, 0, 0]


def test_an_error_is_its_rollouts_and_the_others_have_their_results() -> None:
    ones = [One(i) for i in range(3)]
    with methods_at_once(ones, "reset", [{"bad": 1}] * 3, Lanes(4)):
        assert ones[0].reset(bad=1)[0] == 0
        with pytest.raises(ValueError, match="no 1"):
            ones[1].reset(bad=1)
        assert ones[2].reset(bad=1)[0] == 2


def test_environments_that_say_so_or_are_shared_stay_in_order() -> None:
    said, shared = One(0), One(2)
    said._in_order = True
    ones = [said, One(1), shared, shared]
    assert in_order(ones) == {0, 2, 3}
    with methods_at_once(ones, "reset", [{}] * 4, Lanes(4)):
        assert ones[1].reset()[0] == 1
        assert said.times == shared.times == 0, "they wait for TRL's own call"
        assert [ones[row].reset(row=row) for row in (0, 2, 3)] == [(0, {"row": 0}), (2, {"row": 2}), (2, {"row": 3})]


@pytest.mark.parametrize("shared", [True, False])
def test_a_call_in_order_that_hangs_costs_its_rollout_alone(shared: bool) -> None:
    gate, lanes, many = threading.Event(), Lanes(2, limit_s=LIMIT_S), [One(i) for i in range(4)]
    calls = iter(range(8))
    ones = [many[0]] * 4 if shared else many
    for one in many:
        one._in_order = True
        one.meet = lambda: next(calls) != 1 or gate.wait(PATIENCE_S)
    with methods_at_once(ones, "reset", [{}] * 4, lanes):
        assert [one.reset() is None for one in ones] == [False, True, False, False]
    assert lanes.hung == {1}
    with methods_at_once(ones, "reset", [{}] * 4, lanes):
        assert [one.reset() is None for one in ones] == [False, True, False, False], "it still hangs"
    gate.set()


def test_a_method_that_is_the_objects_own_attribute_stays_one() -> None:
    """The second batch called the class's method, because the attribute was removed with what hid it."""
    one = One(0)
    one.reset = lambda **row: "its own"  # type: ignore[method-assign]
    for _ in range(2):
        with methods_at_once([one], "reset", [{}], Lanes(2)):
            assert one.reset() == "its own"


def interrupted(call: Any) -> None:
    """Call it while a reward's limit interrupts the waiting thread, as deadline.py does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGURG, interrupt)
    timer = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGURG))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        timer.join()
        signal.signal(signal.SIGURG, before)


@pytest.mark.parametrize("limit_s", [None, PATIENCE_S])
def test_a_reward_that_is_interrupted_costs_its_rollout_alone(limit_s: float | None) -> None:
    """It kept the place of its worker, so that no other environment was asked, and was called again beside itself."""
    release, lanes = threading.Event(), Lanes(1, None, limit_s)
    ones = [One(i, release.wait if i == 0 else None) for i in range(3)]
    with methods_at_once(ones, "reset", [{}] * 3, lanes):  # a plain method stands for get_reward
        interrupted(ones[0].reset)
        assert ones[0].reset is not None and [one.reset() is None for one in ones] == [True, False, False]
        assert lanes.hung == {0} and [one.times for one in ones] == [0, 1, 1]
    release.set()


def test_a_reward_that_exits_in_the_event_loop_has_made_an_error(loop: Any) -> None:
    """It ended TRL's event loop, and the caller waited for ever."""

    async def leave() -> None:
        sys.exit(3)

    async def first() -> Any:
        return await one.get_reward()

    one = One(0, leave)
    with methods_at_once([one], "get_reward", [{}], Lanes(1)), pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
        ask(loop, first())
    assert loop.is_running()


def test_an_object_that_lost_its_thread_is_replaced() -> None:
    """Objects in order share one thread: when one call hung, the others' SQLite connections failed for ever."""
    release, lanes = threading.Event(), Lanes(1, LIMIT_S)
    pool = [lanes.make(partial(One, i, release.wait if i == 0 else None), ordered=True) for i in range(3)]
    for one in pool:
        one._in_order = True
    old, trainer = list(pool), SimpleNamespace(
        lanes=lanes, environments=list(pool), _environment_pool={None: pool},
        environment_factories={None: partial(lanes.make, partial(One, 9), ordered=True)},
    )  # fmt: skip
    for one in old:
        assert not lanes.has_moved(one)
    own = [{"reset": one.reset} for one in old]
    tools = ToolsAtOnce(own, [[asks(("reset", {}))] for _ in old], lanes, environments=old).tools()
    with pytest.raises(TimeoutError):
        tools[0]["reset"]()
    assert tools[1]["reset"]()[0] == 1 and all(map(lanes.has_moved, old))
    replace_hung(trainer)
    assert [one.number for one in pool] == [9, 9, 9] and not any(map(lanes.has_moved, pool))
    assert not lanes.hung_tools
    release.set()


def test_environments_may_call_each_other_and_their_own_methods() -> None:
    ones = [One(0), One(1)]
    ones[0].meet = lambda: ones[1].reset()
    with methods_at_once(ones, "reset", [{}] * 2, Lanes(1)):
        assert [one.reset()[0] for one in ones] == [0, 1] and ones[1].times == 2


def test_an_async_tool_may_call_its_own_hidden_method(loop: Any) -> None:
    """It waited for its lane, which waited for the tool: in another thread, and with the event loop blocked."""
    threads = list[int]()

    async def tool() -> str:
        threads.append(threading.get_ident())
        return one.again()

    class Again(One):
        def again(self) -> str:
            return str(self.reset()[0])

    one, lanes = Again(7, lambda: threads.append(threading.get_ident())), Lanes(1, PATIENCE_S)
    with methods_at_once([one], "reset", [{}], lanes):
        one.reset()
        lane = lanes.of(one).thread
        found = ToolsAtOnce([{"t": tool}], [[asks(("t", {}))]], lanes, environments=[one], loop=loop)
        assert ask(loop, found.tools(asynchronous=True)[0]["t"]()) == "7"
    assert threads[1] == threads[2] and lanes.of(one).thread is lane


def test_an_async_reward_that_is_cancelled_may_be_asked_again(loop: Any) -> None:
    begun, go = threading.Event(), []

    async def wait() -> None:
        begun.set()
        if not go:
            await asyncio.Event().wait()

    async def first() -> Any:
        return await one.get_reward()

    one, lanes = One(5, wait), Lanes(1)
    with methods_at_once([one], "get_reward", [{}], lanes):
        asked = asyncio.run_coroutine_threadsafe(first(), loop)
        assert begun.wait(PATIENCE_S)
        asked.cancel()
        go.append(1)
        assert ask(loop, first()) == 5 and not lanes.hung


class Slotted:
    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def reset(self, **row: Any) -> bool:
        return threading.get_ident() == self.thread != threading.main_thread().ident


def test_a_class_with_slots_is_made_where_its_reset_runs() -> None:
    """Before: its `reset` could not be hidden, so it had no lane."""
    lanes = Lanes(2)
    make = lanes.wrap(Slotted, Slotted)
    ones = [make(), make()] if make else []
    with methods_at_once(ones, "reset", [{}, {}], lanes):
        assert [one.reset() for one in ones] == [True, True]
    assert lanes.wrap(None, None) is None


class Copying:
    """An environment that looks ahead in a copy of itself, writes itself down, and clears itself."""

    def reset(self, **row: Any) -> None:
        vars(self).clear()
        self.x = row["x"]

    def tool(self) -> tuple[int, int, str, int]:
        shallow, deep, read = copy.copy(self), copy.deepcopy(self), pickle.loads(pickle.dumps(self))
        for number, one in enumerate((shallow, deep, read)):
            one.reset(x=self.x + number)  # a copy's own `reset`
        return shallow.x, deep.x, json.dumps(vars(self)), read.x

    def get_reward(self) -> Any:
        return self.tool()


class Above(Copying):
    def reset(self, **row: Any) -> None:
        super().reset(**row)
        self.x += 10


def test_an_environment_may_copy_pickle_and_clear_itself() -> None:
    """Before: with tool_workers, each tool that copied its environment failed, and the reward was 0."""
    ones, lanes = [Copying(), Above(), Copying(), Above()], Lanes(4)
    rows = [{"x": row} for row in range(4)]
    with methods_at_once(ones, "reset", rows, lanes):
        for one, row in zip(ones, rows, strict=True):
            one.reset(**row)
        assert [one.x for one in ones] == [0, 11, 2, 13]
        assert ones[2].tool() == (2, 3, '{"x": 2}', 4) and ones[1].tool() == (21, 22, '{"x": 11}', 23)
        with methods_at_once(ones, "get_reward", [{}] * 4, lanes):
            assert ones[2].get_reward() == (2, 3, '{"x": 2}', 4)
    assert "reset" not in vars(Above) or vars(Above)["reset"].__qualname__ == "Above.reset"
    assert "get_reward" not in vars(Above) and vars(Copying)["reset"].__qualname__ == "Copying.reset"


def test_a_proxy_that_has_every_attribute_is_not_in_order() -> None:
    class Proxy:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: None

    assert in_order([Proxy(), One(0)]) == set()


@pytest.mark.parametrize("value", [True, False])
def test_a_property_or_a_slot_says_by_its_value_whether_it_is_in_order(value: bool) -> None:
    """Before: True, whatever it held."""

    class Slotted:
        __slots__ = ("_in_order",)

    class Computed:
        _in_order = property(lambda self: value)

    slotted = Slotted()
    slotted._in_order = value
    assert in_order([slotted, Computed(), Slotted()]) == ({0, 1} if value else set())


class Tidy:
    """An environment that may only be used in the thread that made it, as a SQLite connection, or a browser."""

    _in_order = False

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def reset(self, **row: Any) -> str:
        return self._mine("reset")

    def tool(self) -> str:
        self.reset()  # its own method, in the middle of a batch
        return self._mine("tool")

    def get_reward(self) -> str:
        return self._mine("get_reward")

    def _mine(self, name: str) -> str:
        assert threading.get_ident() == self.thread != threading.main_thread().ident
        return name


class TidyInOrder(Tidy):
    _in_order = True


@pytest.mark.parametrize("limit_s", [None, PATIENCE_S])
@pytest.mark.parametrize("kind", [Tidy, TidyInOrder])
def test_all_calls_of_an_environment_run_in_the_thread_that_made_it(kind: type[Tidy], limit_s: float | None) -> None:
    lanes, rows = Lanes(2, limit_s, limit_s), range(3)
    ones = [lanes.make(kind, ordered=kind._in_order) for _ in rows]
    for _ in range(2):
        messages = [[asks(("tool", {}))] for _ in rows]
        with methods_at_once(ones, "reset", [{}] * 3, lanes):
            assert [one.reset() for one in ones] == ["reset"] * 3
            own = [{"tool": one.tool} for one in ones]
            found = ToolsAtOnce(own, messages, lanes, environments=ones).tools()
            assert [of_row["tool"]() for of_row in found] == ["tool"] * 3
        with methods_at_once(ones, "get_reward", [{}] * 3, lanes):
            assert [one.get_reward() for _ in range(2) for one in ones] == ["get_reward"] * 6, "also when asked again"
    assert len({one.thread for one in ones}) == (1 if kind._in_order else 3)


@pytest.mark.slow
def test_a_class_in_order_runs_as_the_serial_loop_in_one_thread(tmp_path: Path) -> None:
    """A SQLite connection of the class fails in every thread but its own."""
    serial = trained(tmp_path, 1, limits={})
    text = (
        WORLD_FILE.replace("import threading\n", "import sqlite3\nimport threading\n", 1)
        .replace(
            "    def reset(self, **row):\n",
            "    _in_order, store = True, None\n\n    def reset(self, **row):\n"
            "        World.store = World.store or sqlite3.connect(':memory:')\n"
            "        World.store.execute('select 1')\n",
        )
        .replace("        return str((2 * a", "        World.store.execute('select 1')\n        return str((2 * a")
    )
    text = text.replace('self._meet("get_reward")', 'self._meet("get_reward"), World.store.execute("select 1")')
    one_thread = trained(tmp_path, 4, text=text, limits={"environment_timeout_s": 60.0})
    assert torch.equal(serial[0], one_thread[0]) and serial[1] == one_thread[1]
    assert one_thread[2] == {"reset": 1, "get_reward": 1}, "one after the other"


def test_environments_are_drawn_from_the_pools_as_trl_draws_them() -> None:
    pools: dict[str, list[Any]] = {"a": [One(0)], "b": [One(1)]}
    trainer = SimpleNamespace(
        _multi_environment=True, _environment_pool=pools, environment_factories={"a": lambda: One(2), "b": One}
    )
    drawn = drawn_environments(trainer, [{"environment": name} for name in "aba"])
    assert [one.number for one in drawn] == [0, 1, 2] and drawn[2] is pools["a"][1]
    assert drawn_environments(trainer, [{"environment": "c"}]) == [], "TRL names the wrong one"


@pytest.fixture
def loop() -> Any:
    """TRL's event loop, in a thread."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def both(
    tools: list[dict[str, Any]], turns: list[dict[str, Any]], loop: Any, workers: int = 16, limit_s: float | None = None
):
    found = ToolsAtOnce(tools, [[turn] for turn in turns], Lanes(workers, limit_s), loop=loop)
    return found.tools(), found.tools(asynchronous=True)


def ask(loop: Any, coroutine: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(PATIENCE_S)


def test_async_tools_of_all_rollouts_wait_for_each_other(loop: Any) -> None:
    gate = asyncio.Barrier(16)

    async def wait(row: int) -> int:
        await gate.wait()
        return row

    _, found = both([{"wait": wait}] * 16, [asks(("wait", {"row": row})) for row in range(16)], loop)
    assert [ask(loop, of_row["wait"](row=row)) for row, of_row in enumerate(found)] == list(range(16))


def test_async_calls_follow_the_others_of_their_rollout(loop: Any) -> None:
    order: list[str] = []

    async def later() -> str:
        order.append("later")
        return "l"

    def first() -> str:
        order.append("first")
        return "f"

    (plain,), (of_loop,) = both([{"later": later, "first": first}], [asks(("later", {}), ("first", {}))], loop)
    waiting = of_loop["later"]()
    assert (plain["first"](), ask(loop, waiting), order) == ("f", "l", ["first", "later"])


def test_an_async_call_that_hangs_is_cancelled_at_its_limit(loop: Any) -> None:
    ended: list[str] = []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def late() -> None:
        raise TimeoutError("the server is slow")

    _, (tools, own) = both([{"t": hang}, {"t": late}], [asks(("t", {}))] * 2, loop, limit_s=LIMIT_S, workers=1)
    with pytest.raises(TimeoutError, match=r"gave no answer within 0\.5 s"):
        ask(loop, tools["t"]())
    with pytest.raises(TimeoutError, match="the server is slow"):
        ask(loop, own["t"]())
    assert ended == ["cancelled"]


def test_a_plain_call_that_hangs_ends_the_async_ones_of_its_rollout(loop: Any) -> None:
    release = threading.Event()

    async def later() -> None: ...

    tools = {"later": later, "hang": lambda: release.wait(PATIENCE_S)}
    (plain,), (of_loop,) = both([tools], [asks(("later", {}), ("hang", {}), ("later", {}))], loop, limit_s=LIMIT_S)
    before = of_loop["later"]()
    with pytest.raises(TimeoutError, match="gave no answer"):
        plain["hang"]()
    with pytest.raises(TimeoutError, match="still hangs"):
        ask(loop, before)
    with pytest.raises(TimeoutError, match="still hangs"):
        of_loop["later"]()
    release.set()


# ---------------------------------------------------------------------- a limit


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_call_that_hangs_costs_its_rollout_alone(workers: int) -> None:
    gate, lanes = threading.Event(), Lanes(workers, limit_s=LIMIT_S)
    ones = [One(i, gate.wait if i in (1, 2) else None) for i in range(5)]
    with methods_at_once(ones, "reset", [{}] * 5, lanes):
        assert [one.reset() for one in ones] == [(0, {}), None, None, (3, {}), (4, {})]
    assert lanes.hung == {1, 2}
    gate.set()


def test_calls_within_their_limit_are_as_without() -> None:
    ones, lanes = [One(i) for i in range(3)], Lanes(1, limit_s=PATIENCE_S)
    with methods_at_once(ones, "reset", [{"a": 1}] * 3, lanes):
        assert [one.reset(a=1) for one in ones] == [(i, {"a": 1}) for i in range(3)] and not lanes.hung


def test_an_async_call_that_ignores_its_cancellation_is_left_behind(loop: asyncio.AbstractEventLoop) -> None:
    over = asyncio.Event()

    async def stubborn() -> None:
        while not over.is_set():
            with suppress(asyncio.CancelledError):
                await over.wait()

    async def nothing() -> None: ...

    ones, lanes = [One(0, nothing), One(1, stubborn), One(2, nothing)], Lanes(2, limit_s=LIMIT_S)
    lanes.hung.add(2)

    async def all_of_them() -> list[Any]:
        return [await one.get_reward() for one in ones]

    with methods_at_once(ones, "get_reward", [{}] * 3, lanes):
        assert ask(loop, all_of_them()) == [0, None, None] and lanes.hung == {1, 2}
    loop.call_soon_threadsafe(over.set)


HANGS = WORLD_FILE.replace(
    '        self.calls = 0\n        self._meet("reset")\n',
    "        self.calls, World.resets = 0, getattr(World, 'resets', 0) + 1\n"
    "        if World.resets == 3:\n            World.left = self\n            threading.Event().wait()\n",
)


@pytest.mark.parametrize("workers", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_reset_that_hangs_costs_one_rollout_of_the_run(tmp_path: Path, workers: int) -> None:
    """It held the session until the watchdog ended it."""
    (tmp_path / "world.py").write_text(HANGS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "op0 3 4"}]}\n' * 4)
    sampling = {"environment": "world.py:World", "tool_workers": workers, "environment_timeout_s": 0.5}
    config = InnerConfig(model=str(small_folder()), data={"prompts": "rows.jsonl"}, sampling=sampling, batch_size=16)
    files = {"prompts": tmp_path / "rows.jsonl", "environment": tmp_path / "world.py"}
    loop: Any = build_inner(config, small_folder(), files, Seeds(data=0, noise=0))
    seen, stops = [], iter((False, False, True))
    kept = loop.trainer._calculate_rewards

    def rewards(*args: Any) -> Any:
        seen.append(kept(*args).isnan().any(dim=1).tolist())
        return kept.__self__._rewards_by_function

    loop.trainer._calculate_rewards = rewards
    with pytest.warns(UserWarning, match=r"1 of 16 rollouts have no reward: `reset` or `get_reward`"):
        loop.train(lambda: next(stops))
    assert sum(seen[0]) == 1 and len(seen) > 1 and not any(map(any, seen[1:]))
    assert workers > 1 or seen[0][2]
    one = loop.trainer.environments[seen[0].index(True)]
    assert one is not type(one).left
