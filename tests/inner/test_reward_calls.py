"""A user's reward that raises, hangs, or returns no number: what is asked again, what counts, what ends a life."""

import asyncio
import errno
import functools
import json
import math
import signal
import socket
import sqlite3
import ssl
import threading
import time
import urllib.error
from collections.abc import Callable
from email.message import Message
from typing import Any
from unittest.mock import Mock

import httpx
import httpx2
import numpy as np
import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from inner.connections import is_connection_error
from inner.settings.inner import InnerConfig, InnerError
from inner.usercode.attempts import (
    LARGEST,
    Again,
    Ask,
    AtMostWorst,
    Failure,
    Scored,
    Values,
    plan_attempts,
    read_values,
)
from inner.usercode.broken import BrokenRewards
from inner.usercode.deadline import TimedOut, call_within
from inner.usercode.forgiving import ForgivingHint
from inner.usercode.reward_calls import RewardCalls, RewardFailed
from inner.usercode.reward_form import weighted_sum
from inner.usercode.userfiles import checked_rewards, guard_reward
from tests.inner.test_toolworld import WORLD
from tests.inner.test_trainer import B, make, rollouts

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")


class Panic(BaseException):
    """As pyo3's PanicException, and pytest's fail()."""


class Listener:
    """A Host that remembers; its pauses are over at once."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        self.pauses: list[float] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def emit(self, event: str, text: str, **fields: Any) -> None:
        self.events.append((event, text, fields))

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


def make_reward_calls(
    retries: int = 3, timeout_s: float = 5.0, group: int = 4, broken: str | float = "worst"
) -> tuple[RewardCalls, Listener]:
    listener = Listener()
    return RewardCalls(retries, timeout_s, group, time.monotonic, listener, broken), listener


def score_batch(reward: Any, n: int = 16, **settings: Any) -> tuple[Any, RewardCalls, Listener]:
    found, listener = make_reward_calls(**settings)
    return (
        found.wrap_reward(reward)(prompts=["q"] * n, completions=list(range(n)), answer=[str(i) for i in range(n)]),
        found,
        listener,
    )


# -------------------------------------------------------------------- the decision


def play_attempts(
    answer: Callable[[Ask], Any], n: int = 16, group: int = 4, tries: int = 4
) -> tuple[list[Any], Scored]:
    """Every step that `plan_attempts` asks for, and its result."""
    steps, said = plan_attempts(n, group, tries), None
    seen: list[Any] = []
    while True:
        try:
            step = steps.send(said)
        except StopIteration as end:
            return seen, end.value
        seen.append(step)
        said = answer(step) if isinstance(step, Ask) else None


def all_of(rows: Any) -> Values:
    return Values([float(row) for row in rows])


def test_a_reward_that_works_is_asked_once_for_the_whole_batch() -> None:
    seen, result = play_attempts(lambda step: all_of(step.rows))
    assert [list(step.rows) for step in seen] == [list(range(16))] and seen[0].first
    assert result.values == [float(i) for i in range(16)] and result.failed == () and result.why == ""


def test_one_bad_completion_costs_itself_and_no_pause() -> None:
    seen, result = play_attempts(lambda step: Failure(ValueError("no number")) if 5 in step.rows else all_of(step.rows))
    assert result.failed == (5,) and result.values == [None if i == 5 else float(i) for i in range(16)]
    asked = [list(step.rows) for step in seen if isinstance(step, Ask)]
    assert asked[1:5] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]], "group by group"
    assert asked[-4:] == [[4], [5], [6], [7]], "the last try: one by one"
    assert [s.pause_s for s in seen if isinstance(s, Again)] == [1.0, 0.0, 4.0**2], "a pause where nothing came back"


def test_a_service_that_is_away_is_waited_for_ever_longer_and_then_nothing_counts() -> None:
    seen, result = play_attempts(lambda step: Failure(ConnectionError("429")), tries=5)
    assert [s.pause_s for s in seen if isinstance(s, Again)] == [1.0, 4.0, 16.0, 60.0]
    assert result.failed == tuple(range(16)) and result.values == [None] * 16 and "429" in result.why


def test_a_part_that_hangs_ends_its_try_and_goes_last_in_the_next() -> None:
    def answer(step: Ask) -> Any:
        return Failure(TimedOut("slow")) if 0 in step.rows else all_of(step.rows)

    seen, result = play_attempts(answer)
    asked = [list(step.rows) for step in seen if isinstance(step, Ask)]
    assert asked[1] == [0, 1, 2, 3] and asked[2] == [4, 5, 6, 7], "no second part was risked in the try that hung"
    assert sum(0 in rows for rows in asked) == 4 and 0 in result.failed and set(result.failed) <= {0, 1, 2, 3}


@pytest.mark.parametrize("tries", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("bad", [set(), {0}, {3, 4, 15}, set(range(16))])
def test_whatever_fails_each_completion_has_its_own_reward_or_none(tries: int, bad: set[int]) -> None:
    _, result = play_attempts(lambda s: Failure(ValueError("x")) if bad & set(s.rows) else all_of(s.rows), tries=tries)
    good = set(range(16)) - set(result.failed)
    assert all(result.values[i] == i for i in good) and all(result.values[i] is None for i in result.failed)
    assert bad <= set(result.failed), "nobody invents a reward"
    assert tries == 1 or set(result.failed) == bad, "with a second try only those that fail by themselves are lost"


# -------------------------------------------------------------------- the blame


def blamed_by(fails: dict[int, BaseException], n: int = 16, **settings: Any) -> tuple[set[int], set[int], list[Any]]:
    """Completions that are to blame, those without a number, and the calls, if some raise when they are asked for."""

    def answer(step: Ask) -> Any:
        bad = [row for row in step.rows if row in fails]
        return Failure(fails[bad[0]]) if bad else all_of(step.rows)

    seen, result = play_attempts(answer, n, **settings)
    return set(result.blamed), set(result.failed), [list(step.rows) for step in seen if isinstance(step, Ask)]


def test_a_completion_that_fails_by_itself_while_others_get_numbers_is_to_blame() -> None:
    assert blamed_by({5: ValueError("no number"), 9: KeyError("x")})[:2] == ({5, 9}, {5, 9})


@pytest.mark.parametrize("error", [ConnectionError("429"), ConnectionResetError(), socket.gaierror("no such host")])
def test_a_connections_error_is_no_completions_fault(error: BaseException) -> None:
    assert blamed_by({5: error, 9: ValueError("no number")})[:2] == ({9}, {5, 9})


def test_a_group_that_fails_whole_is_to_blame_if_a_witness_is_still_answered() -> None:
    own, failed, asked = blamed_by({row: ValueError("no number") for row in range(4, 8)})
    assert own == failed == {4, 5, 6, 7} and asked[-1] == [0]


def test_a_reward_that_stops_answering_in_the_middle_blames_none() -> None:
    calls = [0]

    def answer(step: Ask) -> Any:
        calls[0] += 1
        return Failure(ValueError("out of credit")) if calls[0] in (1, 3) or calls[0] > 5 else all_of(step.rows)

    seen, result = play_attempts(answer)
    asked = [list(step.rows) for step in seen if isinstance(step, Ask)]
    assert result.failed == (4, 5, 6, 7) and result.blamed == () and asked[-1] == [0], "the witness got no number"


def test_a_reward_that_stops_answering_in_the_last_try_blames_none_behind_that() -> None:
    """A service whose limit is reached there, and whose client has an error of its own type for it."""
    calls = [0]

    def answer(step: Ask) -> Any:
        calls[0] += 1
        spent = len(step.rows) == 1 and calls[0] > 9
        return Failure(ValueError("x")) if spent or {1, 5} & {*step.rows} else all_of(step.rows)

    _, result = play_attempts(answer, n=8)
    assert result.failed == (1, 4, 5, 6, 7) and result.blamed == (1,), "1 was followed by numbers, the others by none"


def test_a_batch_without_one_number_blames_none() -> None:
    assert blamed_by({row: ValueError("x") for row in range(16)})[0] == set()


@pytest.mark.parametrize("tries", [2, 3, 4])
@pytest.mark.parametrize("hangs", [{0}, {1, 2}, {5, 6, 9}])
def test_a_completion_that_hangs_the_reward_is_to_blame_and_costs_no_sibling(hangs: set[int], tries: int) -> None:
    own, failed, _ = blamed_by({row: TimedOut("slow") for row in hangs}, tries=tries)
    assert own == failed == hangs
    assert blamed_by({0: TimedOut("slow")}, n=4, tries=tries)[1] == {0}, "a batch of one group"


def test_a_reward_that_hangs_for_everything_ends_the_last_try_too() -> None:
    _, failed, asked = blamed_by({row: TimedOut("slow") for row in range(16)})
    assert len(failed) == 16 and len(asked) == 6, "one time-out in each try, three in the last"
    own, _, asked = blamed_by({row: TimedOut("slow") for row in range(4, 16)})
    assert own == {12, 13, 14} and asked[-4:] == [[12], [13], [14], [0]], "three in a row, then the witness"


def test_no_number_is_to_blame_where_others_have_one() -> None:
    _, result = play_attempts(lambda step: read_values([math.nan, *[1.0] * 13, 1e39, 10**400], 16))
    assert result.blamed == result.failed == (0, 14, 15)
    assert play_attempts(lambda step: read_values([math.nan] * 16, 16))[1].blamed == ()


def error_of(module: str, name: str, **about: Any) -> Exception:
    return type(name, (Exception,), {"__module__": module, **about})()


def caused_by(cause: BaseException, base: type[Exception] = RuntimeError) -> Exception:
    try:
        raise base("the judge") from cause
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("error", "connections"),
    [
        (ConnectionRefusedError(), True),
        (OSError(errno.ENETUNREACH, "no route"), True),
        (ssl.SSLError("handshake"), True),
        (urllib.error.URLError("no such host"), True),
        (urllib.error.HTTPError("u", 503, "busy", Message(), None), True),
        (urllib.error.HTTPError("u", 429, "slow down", Message(), None), True),
        (urllib.error.HTTPError("u", 400, "too long", Message(), None), False),
        (httpx.ConnectTimeout("t"), True),
        (httpx.RemoteProtocolError("t"), True),
        (httpx.ReadTimeout("t"), False),
        (httpx2.ConnectTimeout("t"), True),
        (httpx2.HTTPStatusError("t", request=Mock(), response=Mock(status_code=503)), True),
        (error_of("openai", "RateLimitError", status_code=429), True),
        (error_of("openai", "BadRequestError", status_code=400), False),
        (error_of("openai", "APIConnectionError"), True),
        (error_of("openai", "LengthFinishReasonError"), False),
        (error_of("requests.exceptions", "JSONDecodeError"), False),
        (error_of("requests.exceptions", "ConnectionError"), True),
        (error_of("aiohttp.client_exceptions", "ServerDisconnectedError"), True),
        (caused_by(ConnectionResetError()), True),
        (caused_by(caused_by(httpx.ReadTimeout("t"))), False),
        (FileNotFoundError("answer.py"), False),
        (TimeoutError("the program ran too long"), False),
        (ValueError("no number"), False),
        (MemoryError(), False),
    ],
)
def test_whose_fault_an_error_is(error: BaseException, connections: bool) -> None:
    assert is_connection_error(error) is connections


def test_a_coroutine_of_a_function_behind_a_plain_wrapper_is_awaited() -> None:
    """Before: `check` awaited it, and each replica refused it, as TRL takes the wrapper for a plain function."""

    async def judge(completions: list[int], **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(one) for one in completions]

    @functools.wraps(judge)
    def logged(*args: Any, **columns: Any) -> Any:
        return judge(*args, **columns)

    values, _, listener = score_batch(logged)
    assert values == [float(i) for i in range(16)] and not listener.events


def test_a_chain_of_errors_that_bites_its_tail_ends() -> None:
    one, other = ValueError("a"), ValueError("b")
    one.__context__, other.__context__ = other, one
    assert not is_connection_error(one)


# -------------------------------------------------------------------- what a broken completion counts


def settled(
    rewards: list[list[float]], blamed: dict[int, float | None], counts: str | float = "worst", group: int = 4
) -> list[Any]:
    """The rewards that count, of a batch in which the first function blames completions (with a value: AtMostWorst)."""
    broken = BrokenRewards(counts)
    first: list[Any] = [row[0] for row in rewards]
    for row, value in blamed.items():
        first[row] = None if value is None else AtMostWorst(value)
    failed = tuple(row for row, value in blamed.items() if value is None)
    values, missing = broken.note(Scored(first, failed, "", 1, blamed=tuple(blamed)))
    given = torch.tensor([[math.nan if v is None else v, *row[1:]] for v, row in zip(values, rewards, strict=True)])
    given[sorted(missing)] = math.nan
    out = broken.settle(given, torch.ones(given.shape[1]), group)
    assert broken.share == (len(blamed) / len(rewards) if counts != "none" else 0.0)
    return out[:, 0].tolist() if out.shape[1] == 1 else out.tolist()


def test_a_broken_completion_counts_as_the_worst_of_its_group() -> None:
    rewards = [[1.0], [0.5], [0.0], [0.0], [1.0], [-3.0], [0.0], [0.0]]
    assert settled(rewards, {3: None})[3] == 0.0 and settled(rewards, {2: None, 3: None})[2:4] == [0.5, 0.5]
    assert settled(rewards, {3: None}, counts=-2.0)[3] == -2.0
    assert math.isnan(settled(rewards, {3: None}, counts="none")[3])


def test_among_siblings_that_do_not_differ_it_counts_as_the_batchs_worst() -> None:
    assert settled([[1.0]] * 4 + [[1.0], [-3.0], [0.0], [0.0]], {3: None})[3] == -3.0
    assert settled([[1.0]] * 4 + [[1.0], [-3.0], [0.0], [0.0]], dict.fromkeys(range(4)))[:4] == [-3.0] * 4
    assert settled([[1.0]] * 8, {3: None})[3] == 1.0, "none has had less"


def test_where_the_batch_does_not_differ_it_counts_as_the_worst_that_was_seen() -> None:
    calls, _ = make_reward_calls()
    weights = torch.ones(1)
    calls.settle(torch.tensor([[1.0], [-0.5]]), weights, 2)
    with calls.uncounted():
        calls.settle(torch.tensor([[1.0], [-9.0]]), weights, 1)  # an evaluation changes nothing of training
    calls.wrap_reward(lambda completions, **columns: [1.0, math.nan])(prompts=[], completions=["a", "b"])
    assert calls.settle(torch.tensor([[1.0], [math.nan]]), weights, 2).tolist() == [[1.0], [-0.5]]


def test_a_bonus_beside_the_broken_reward_pays_nothing() -> None:
    rewards = [[1.0, 0.0], [0.0, 0.2], [0.0, 0.1], [9.0, 5.0]]
    assert settled(rewards, {3: None})[3] == pytest.approx([0.0, 0.1]), "the row of the worst"


def test_what_was_earned_stands_but_not_above_the_worst() -> None:
    rewards = [[1.0], [0.0], [0.5], [9.0]]
    assert settled(rewards, {3: -1.0})[3] == -1.0 and settled(rewards, {3: 0.7})[3] == 0.0
    assert settled(rewards, {3: 0.7}, counts=0.1)[3] == pytest.approx(0.1)
    assert math.isnan(settled(rewards, {3: -1.0}, counts="none")[3])


def test_the_largest_reward_leaves_its_group_a_signal() -> None:
    """With larger ones the variance is infinite in float32, and every advantage 0."""

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        return [LARGEST if i == 0 else 0.0 for i in range(len(completions))]

    advantages = rollouts(make(reward=reward, reward_calls=forgiving()[0], config=GRPO))["advantages"]
    assert advantages[0] > 2 and advantages[1] < -0.3
    assert read_values([LARGEST * 1.01], 1).invalid == {0: "returned 1.01e+18"}


# -------------------------------------------------------------------- what a reward may return


def test_nan_infinity_and_words_count_as_none_and_are_named() -> None:
    found = read_values([1.0, float("nan"), None, math.inf, "good", True], 6)
    assert found.values == [1.0, None, None, None, None, True]
    assert found.invalid == {1: "returned nan", 3: "returned inf", 4: "returned 'good'"}
    assert read_values(torch.tensor([1.0, 2.0]), 2).values == [1.0, 2.0]
    with pytest.raises(ValueError, match="3 values for 2"):
        read_values([1, 2, 3], 2)
    with pytest.raises(ValueError, match="returned a float"):
        read_values(1.0, 2)


@pytest.mark.parametrize("scalar", [np.float32, np.int64, np.bool_, torch.tensor])
def test_the_check_before_a_run_takes_the_scalars_that_a_replica_takes(scalar: Any) -> None:
    values = [scalar(1), None, scalar(0)]
    checked = guard_reward(lambda **columns: values, "r.py:f")(completions=["a", "b", "c"])
    assert checked == read_values(values, 3).values == [1, None, 0]
    for array in (np.ones(2), torch.ones(2)):
        assert read_values([1.0, array], 2).invalid.keys() == {1}, "it costs that completion alone"
        with pytest.raises(InnerError, match=r"reward r\.py:f returned .* for completion 0\. Return a finite number"):
            checked_rewards([array], 1, "r.py:f")


def test_a_nan_is_said_and_is_not_asked_for_again() -> None:
    asked = []

    def reward(completions: list[int], **columns: Any) -> list[float]:
        asked.append(completions)
        return [float("nan") if c == 3 else 1.0 for c in completions]

    values, found, listener = score_batch(reward)
    assert values == [None if i == 3 else 1.0 for i in range(16)] and len(asked) == 1
    assert found.take_failed() == [3] and found.take_missing() == 1
    assert listener.events[0][0] == "reward_failed" and "returned nan (1 of 16 completions" in listener.events[0][1]


# -------------------------------------------------------------------- asked again


def test_an_exception_is_tried_again_and_said_in_the_note_while_it_lasts() -> None:
    fails = iter([True, True, False])

    def judge(completions: list[int], **columns: Any) -> list[float]:
        if next(fails, False):
            raise ConnectionError("429 Too Many Requests")
        return [float(c) for c in completions]

    values, found, listener = score_batch(judge)
    assert values == [float(i) for i in range(16)] and found.take_failed() == []
    assert (
        listener.notes[0]
        == "reward failed: ConnectionError: 429 Too Many Requests (16 of 16 completions, try 1 of 4); again in 1 s"
    )
    assert listener.notes[-1] == "" and listener.pauses == [1.0], (
        "the second failure was of one group, others came back"
    )
    assert "0 of 16 completions are without a reward" in listener.events[0][1]


def test_columns_and_environments_are_cut_with_the_completions() -> None:
    def reward(completions: list[int], answer: list[str], prompts: list[str], **columns: Any) -> list[float]:
        assert [int(a) for a in answer] == completions and len(prompts) == len(completions)
        if 7 in completions and len(completions) > 1:
            raise ValueError("only alone")
        return [float(a) for a in answer]

    assert score_batch(reward)[0] == [float(i) for i in range(16)]


def test_a_reward_may_change_the_lists_and_the_messages_that_it_gets() -> None:
    """An emptied list ended the session; an edited message was what the log, the traces and the next reward saw."""

    def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        values = [float(reply.pop()["content"] == right) for reply, right in zip(completions, answer, strict=True)]
        for given in (completions, answer, columns["prompts"], columns["completion_ids"]):
            given.clear()
        return values

    given: dict[str, Any] = {
        "prompts": [[{"role": "user", "content": "1 or 2?"}]] * 8, "answer": ["1"] * 8, "completion_ids": [[4]] * 8,
        "completions": [[{"role": "assistant", "content": str(i % 2)}] for i in range(8)],
    }  # fmt: skip
    before = repr(given)
    found, _ = make_reward_calls()
    assert found.wrap_reward(reward)(**given) == [0.0, 1.0] * 4
    assert repr(given) == before


def test_what_a_reward_logs_is_passed_on_once_it_has_worked() -> None:
    logged: list[Any] = []
    turns = iter([True, False])

    def reward(completions: list[int], log_metric: Any, **columns: Any) -> list[float]:
        log_metric("mean", 1.0)
        if next(turns, False):
            raise ValueError("after it logged")
        return [0.0] * len(completions)

    found, _ = make_reward_calls()
    log = lambda *said: logged.append(said)  # noqa: E731
    for _ in range(2):
        found.wrap_reward(reward)(prompts=[], completions=[1] * 8, log_metric=log)
    assert logged == [("mean", 1.0)], "not by the call that failed, not by a part of a batch"


class Mute(Exception):
    def __str__(self) -> str:
        raise LookupError


@pytest.mark.parametrize("fault", [SystemExit(2), Panic("rust"), asyncio.CancelledError(), Mute()], ids=repr)
@pytest.mark.parametrize("is_async", [False, True])
def test_no_fault_of_a_reward_ends_the_replica(fault: BaseException, is_async: bool) -> None:
    """Before: a Rust panic, pytest's fail() or a CancelledError of a library ended the session, and then the run."""

    def reward(completions: list[int], **columns: Any) -> list[float]:
        if 2 in completions:
            raise fault
        return [0.0] * len(completions)

    async def later(completions: list[int], **columns: Any) -> list[float]:
        return reward(completions)

    found, _ = make_reward_calls()
    call = found.wrap_reward(later if is_async else reward)(prompts=[""] * 16, completions=list(range(16)))
    values = asyncio.run(call) if is_async else call
    assert found.take_failed() == [2] and values[3:] == [0.0] * 13


@pytest.mark.parametrize("handles", [True, False])
def test_an_interrupt_is_the_rewards_own_where_ctrl_c_raises_none(handles: bool) -> None:
    """Before: `raise KeyboardInterrupt` in a reward ended the replica's session, without an event."""

    def reward(completions: list[int], **columns: Any) -> list[float]:
        if 2 in completions:
            raise KeyboardInterrupt
        return [0.0] * len(completions)

    found, _ = make_reward_calls()
    call = lambda: found.wrap_reward(reward)(prompts=[""] * 16, completions=list(range(16)))  # noqa: E731
    before = signal.signal(signal.SIGINT, (lambda *_: None) if handles else signal.default_int_handler)
    try:
        if handles:
            assert call()[3:] == [0.0] * 13 and found.take_failed() == [2]
        else:
            with pytest.raises(KeyboardInterrupt):
                call()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_cancelled_async_reward_is_cancelled() -> None:
    async def reward(completions: list[int], **columns: Any) -> list[float]:
        raise asyncio.CancelledError

    async def cancelled() -> Any:
        task = asyncio.create_task(make_reward_calls()[0].wrap_reward(reward)(prompts=[""], completions=[1]))
        task.cancel()
        return await asyncio.gather(task, return_exceptions=True)

    assert isinstance(asyncio.run(cancelled())[0], asyncio.CancelledError)


@pytest.mark.slow
def test_an_async_reward_is_tried_again_interrupted_and_cut_the_same_way() -> None:
    async def judge(completions: list[int], **columns: Any) -> list[float]:
        if 3 in completions:
            await asyncio.sleep(60)
        if 9 in completions:
            raise ValueError("no")
        return [float(c) for c in completions]

    found, listener = make_reward_calls(timeout_s=0.5)
    values = asyncio.run(found.wrap_reward(judge)(prompts=[""] * 16, completions=list(range(16))))
    assert set(found.take_failed()) >= {3, 9} and values[12:] == [12.0, 13.0, 14.0, 15.0]
    assert any("no answer within 0.5 s" in note for note in listener.notes)


# -------------------------------------------------------------------- no end to a hang, without us


def test_a_reward_that_hangs_once_is_interrupted_where_it_stands_and_asked_again() -> None:
    hangs = iter([True])

    def reward(completions: list[int], **columns: Any) -> list[float]:
        if next(hangs, False):
            threading.Event().wait()
        return [1.0] * len(completions)

    began = time.monotonic()
    values, _, listener = score_batch(reward, timeout_s=1.5)
    assert values == [1.0] * 16 and 1.5 <= time.monotonic() - began < 60, "the reward itself never ends"
    assert listener.notes[0].startswith("waits for the reward reward, 0 s so far; interrupted after 1.5 s")
    assert "TimedOut: no answer within 1.5 s (16 of 16 completions, try 1 of 4)" in listener.notes[1]


def test_code_that_catches_everything_is_interrupted_until_it_gives_in() -> None:
    caught = []

    def stubborn() -> None:
        while len(caught) < 2:
            try:
                time.sleep(60)
            except BaseException as error:
                caught.append(error)
        time.sleep(60)

    with pytest.raises(TimedOut, match=r"within 0\.1 s"):
        call_within(0.1, stubborn)
    assert len(caught) == 2


def test_a_reward_stays_in_the_main_thread_with_its_alarms_and_its_database() -> None:
    """math_verify's time-outs are alarms, which no other thread may set; sqlite3's connections serve one thread."""
    database, rang = sqlite3.connect(":memory:"), []

    def reward(completions: list[int], **columns: Any) -> list[float]:
        before = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        while not rang:
            time.sleep(0.01)
        signal.signal(signal.SIGALRM, before)
        return [float(database.execute("select 1").fetchone()[0]) for _ in completions]

    assert score_batch(reward)[0] == [1.0] * 16 and score_batch(reward)[1].take_failed() == []


def test_the_signal_of_the_deadline_is_given_back_and_harms_nobody_later() -> None:
    before = signal.getsignal(signal.SIGURG)
    assert call_within(0.5, lambda: 7) == 7
    time.sleep(0.7)
    assert signal.getsignal(signal.SIGURG) == before
    signal.raise_signal(signal.SIGURG)


def test_a_reader_is_told_what_a_replica_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inner.usercode.deadline.REMIND_S", 0.05)
    said, waited = threading.Event(), []
    call_within(120.0, lambda: said.wait(60), lambda seconds: (waited.append(seconds), said.set())[1])
    assert waited == [0.05]


# -------------------------------------------------------------------- when it is enough


def broken(completions: list[int], **columns: Any) -> list[float]:
    raise ConnectionError("the judge is gone")


def test_the_first_batch_of_a_life_without_any_reward_ends_it_and_shows_the_line() -> None:
    with pytest.raises(RewardFailed, match="the first batch of this session") as caught:
        score_batch(broken)
    assert "test_reward_calls.py, line" in str(caught.value) and "the judge is gone" in str(caught.value)
    assert isinstance(caught.value.__cause__, ConnectionError)


class Broken(WORLD.environment()):
    def get_reward(self) -> float:
        return float(json.loads("no number"))  # the last frames are Python's own


class BrokenObject:
    def __call__(self, completions: list[int], **columns: Any) -> list[float]:
        raise ValueError("no number")


def test_an_environments_own_reward_ends_with_the_line_of_its_class() -> None:
    """Before: "grpo_trainer.py, line 725: return [e.get_reward() …", and "`python grpo_trainer.py` runs the file"."""
    with pytest.raises(RewardFailed) as caught:
        rollouts(make(reward=None, environment_factory=Broken, reward_calls=forgiving()[0]))
    assert "test_reward_calls.py, line" in str(caught.value) and 'json.loads("no number")' in str(caught.value)
    assert "`python test_reward_calls.py` runs" in str(caught.value)


def test_an_object_ends_with_its_line_and_a_packages_reward_without_one() -> None:
    """Before: `python '?'` and `python toolworld.py`."""
    with pytest.raises(
        RewardFailed, match=r"line .*: raise ValueError.*\n.*\n  next: correct the line; `python test_rew"
    ):
        score_batch(BrokenObject())
    with pytest.raises(RewardFailed, match="no line of your files was running; check the settings") as caught:
        score_batch(WORLD.reward)  # it asks for columns that these prompts lack
    assert "python " not in str(caught.value)


def test_a_life_that_has_seen_rewards_ends_at_the_third_batch_without_any() -> None:
    found, _ = make_reward_calls()
    works = iter([True, False, False, True, False, False, False])

    def reward(completions: list[int], **columns: Any) -> list[float]:
        return [1.0] * len(completions) if working else broken(completions)

    asked = found.wrap_reward(reward)
    for working in [next(works) for _ in range(6)]:  # noqa: B007
        asked(prompts=[], completions=[0] * 8)
    working = next(works)
    with pytest.raises(RewardFailed, match="3 batches in a row"):
        asked(prompts=[], completions=[0] * 8)


def test_often_failing_is_told_once_a_minute_with_the_count() -> None:
    now, listener = [0.0], Listener()
    found = RewardCalls(0, 0.0, 4, lambda: now[0], listener)
    asked = found.wrap_reward(lambda completions, **columns: [float("nan"), *[1.0] * (len(completions) - 1)])
    for _ in range(100):
        asked(prompts=[], completions=[0] * 8)
        now[0] += 1.0
    assert len(listener.events) == 2 and "60 batches with failures" in listener.events[1][1]


# -------------------------------------------------------------------- inside TRL's trainer


def forgiving(**settings: Any) -> tuple[RewardCalls, Listener]:
    return make_reward_calls(group=8, **settings)


def test_a_reward_that_works_gives_the_bits_of_trl_itself() -> None:
    ends = []
    for build in (lambda: make(cls=GRPOTrainer), lambda: make(reward_calls=forgiving()[0])):
        trainer = build()
        trainer.train()
        ends.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert torch.equal(ends[0], ends[1])


GRPO = {"grpo": {"objective": "grpo"}}


@pytest.mark.parametrize("broken", ["none", "a connection", "worst"])
def test_a_completion_without_a_reward_has_no_advantage_and_one_that_broke_it_has_the_worst(broken: str) -> None:
    error = ConnectionError("429") if broken == "a connection" else ValueError("cannot read this one")

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        return [float(sum(map(ord, str(c))) % 7) for c in completions]

    def flaky(completions: list[Any], **columns: Any) -> list[float]:
        if any(str(c) in lost for c in completions):
            raise error
        return reward(completions)

    lost: set[str] = set()
    whole = make(reward=reward)
    full = rollouts(whole)
    rewards = torch.tensor(rewards_of(whole))
    found, _ = forgiving(broken="none" if broken == "none" else "worst")
    trainer = make(reward=flaky, reward_calls=found)
    row = int(rewards.argmax())
    spied = spy_completions(trainer, lost, row)
    batch = rollouts(trainer)
    assert torch.equal(batch["completion_ids"], full["completion_ids"]), "the same rollouts"
    failed = [i for i, mark in enumerate(spied) if mark in lost]
    assert row in failed and batch["advantages"].isfinite().all()
    siblings = range(row // 8 * 8, row // 8 * 8 + 8)
    group = [i for i in siblings if i not in failed]
    assert rewards[group].min() < rewards[group].max()
    if broken == "worst":
        rewards[[i for i in failed if i in siblings]] = rewards[group].min()
        group = [*siblings]
        assert found.take_missing() == len(failed) and batch["advantages"][row] == batch["advantages"][group].min() < 0
    else:
        assert (batch["advantages"][failed] == 0).all()
    expected = rewards[group] - rewards[group].mean()
    assert torch.allclose(batch["advantages"][group], expected, atol=1e-6)


def rewards_of(trainer: Any) -> list[float]:
    return list(trainer._logs["rewards"]["reward"])


def spy_completions(trainer: Any, lost: set[str], row: int) -> list[str]:
    """Fills `lost` with the completion in that row once it is generated; -> all of them, as text."""
    marks: list[str] = []
    original = trainer._calculate_rewards

    def calculate(inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
        marks.extend(str(c) for c in completions)
        lost.add(marks[row])
        return original(inputs, prompts, completions, ids)

    trainer._calculate_rewards = calculate
    return marks


@pytest.mark.parametrize("objective", ["grpo", "lite_ppo", "dr_grpo", "dapo"])  # scaled by group, by batch, not at all
@pytest.mark.parametrize("missing", ["one", "a group but one", "a group", "all but one", "all"])
def test_whatever_has_no_reward_advantages_are_finite_and_zero_there(objective: str, missing: str) -> None:
    count = {"one": 1, "a group but one": 7, "a group": 8, "all but one": B - 1, "all": B}[missing]

    def reward(completions: list[Any], **columns: Any) -> list[float | None]:
        return [None if i < count else float(i % 3) for i in range(len(completions))]

    found, more = forgiving()[0], {"dynamic_sampling": 0} if objective == "dapo" else {}  # dapo has a penalty, too
    trainer = make(reward=reward, reward_calls=found, config={"grpo": {"objective": objective, **more}})
    advantages = rollouts(trainer)["advantages"]
    assert advantages.isfinite().all() and (advantages[:count] == 0).all()
    assert found.rewardless == (missing == "all")
    assert missing != "one" or advantages.abs().sum() > 0


def test_of_two_rewards_one_that_failed_leaves_no_half_a_sum() -> None:
    """TRL sums what there is: a completion without its main reward would have 0 there, and lose to its siblings."""

    def main(completions: list[Any], **columns: Any) -> list[float]:
        return [float("nan") if i == 0 else 1.0 for i in range(len(completions))]

    def bonus(completions: list[Any], **columns: Any) -> list[float]:
        return [0.0] * len(completions)

    found, _ = forgiving()
    advantages = rollouts(make(reward=[main, bonus], reward_calls=found))["advantages"]
    assert (advantages == 0).all(), "all known rewards are equal, so nothing is better or worse"


def test_an_environments_own_reward_that_raises_for_one_rollout_costs_that_rollout() -> None:
    base = WORLD.environment()
    seen: list[Any] = []

    class Own(base):
        def get_reward(self) -> float:
            seen.append(self)
            if len({id(s) for s in seen}) and id(self) == id(seen[0]):
                raise RuntimeError("its session is gone")
            return 1.0

    found, listener = forgiving()
    trainer = make(reward=None, environment_factory=Own, reward_calls=found)
    batch = rollouts(trainer)
    assert batch["advantages"].isfinite().all()
    assert listener.events and "1 of 16 completions" in listener.events[0][1], listener.events


@pytest.mark.parametrize("fault", [KeyError("tool"), SystemExit("tool"), Panic("tool")], ids=repr)
def test_a_hint_that_raises_costs_the_hint_and_is_told(fault: BaseException) -> None:
    listener = Listener()

    def hint(row: Any, error: str) -> str:
        raise fault

    guarded = ForgivingHint(hint, listener, time.monotonic)
    assert guarded({}, "Tool x not found.") is None and guarded({}, "again") is None
    assert len(listener.events) == 1 and f"the hint hint failed: {type(fault).__name__}: " in listener.events[0][1]
    assert ForgivingHint(lambda row, error: 7, listener, lambda: 1e9)({}, "") is None  # type: ignore


def test_what_a_broken_completion_counts_is_a_part_of_what_a_run_learns() -> None:
    from diloco.run.config import RunConfig

    one, other = (RunConfig(inner=InnerConfig(rewards={"broken": b})) for b in ("worst", -1))
    assert one.mathematics() != other.mathematics()
    with pytest.raises(InnerError, match=r"inner.rewards.broken = 'wurst' is not known"):
        InnerConfig(rewards={"broken": "wurst"})


def test_the_settings_are_no_part_of_what_a_run_learns(tmp_path: Any) -> None:
    from diloco.run.config import RunConfig

    one, other = (RunConfig(inner=InnerConfig(rewards={"retries": n, "timeout_s": n})) for n in (1, 7))
    assert one.mathematics() == other.mathematics() and "reward_retries" not in one.mathematics()["inner"]


# -------------------------------------------------------------------- a reward of weight 0 decides nothing


def measured(fails: Callable[[int], float | None], score: list[float | None], **settings: Any) -> tuple[Any, Any, Any]:
    """-> trainer, its RewardCalls and a batch: `score` has weight 1, and `length`, whose values `fails` makes, 0."""

    def length(completions: list[Any], **columns: Any) -> list[float | None]:
        return [fails(i) for i in range(len(completions))]

    found, _ = forgiving(**settings)
    more = {"trl": {"reward_weights": [1.0, 0.0]}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inner.settings.trl._check_reward_weights", lambda config: None)
        trainer = make(reward=[lambda **_: score, length], reward_calls=found, config=more)
    return trainer, found, rollouts(trainer)


def test_what_is_logged_only_gives_no_completion_a_reward() -> None:
    score = [1.0, 1.0, None, *[1.0] * (B - 3)]
    trainer, found, batch = measured(lambda i: 10.0 * i, score)
    assert (batch["advantages"] == 0).all(), "before: .125, and -.875 for the one of which the score says nothing"
    assert trainer._metrics["train"]["reward"] == [1.0] and not found.rewardless
    logged = trainer._metrics["train"]["rewards/length/mean"]
    assert logged == [pytest.approx(sum(10.0 * i for i in range(B) if i != 2) / (B - 1))]


def test_a_batch_with_nothing_but_logged_rewards_is_rewardless() -> None:
    trainer, found, _ = measured(lambda i: 10.0 * i, [None] * B)
    assert found.rewardless
    rollouts(trainer)
    with pytest.raises(RewardFailed, match="3 generations in a row"):
        rollouts(trainer)


@pytest.mark.parametrize("counts", ["worst", "none", -5.0])
def test_what_is_logged_only_blames_none(counts: str | float) -> None:
    score = [1.0, 0.0, *[1.0] * (B - 2)]
    trainer, found, batch = measured(lambda i: math.nan if i == 0 else 0.5, score, broken=counts)
    assert trainer._rewards_by_function[:, 0].tolist() == score, "before: the right answer's was 0"
    assert batch["advantages"][0] == batch["advantages"][2] > 0 and found.take_missing() == 0
    assert trainer._metrics["train"]["rewards/broken"] == [0.0]


def test_a_logged_reward_that_always_fails_ends_no_session() -> None:
    def fails(i: int) -> float:
        raise ValueError("no length")

    score = [float(i % 2) for i in range(B)]
    trainer, found, batch = measured(fails, score)
    assert trainer._rewards_by_function[:, 0].tolist() == score and batch["advantages"].abs().min() > 0
    assert trainer._rewards_by_function[:, 1].isnan().all() and found.take_missing() == 0
    found, listener = forgiving()
    asked = found.wrap_reward(broken, 0.0)
    assert [asked(prompts=[], completions=[0] * 8) for _ in range(4)] == [[None] * 8] * 4
    assert not listener.pauses, "before: 1, 4 and 16 s of each batch, for a number that changes nothing"
    assert weighted_sum([None, 37.0], [1.0, 0.0]) is None and weighted_sum([2.0, 37.0], [1.0, 0.0]) == 2.0


def test_a_prompt_that_breaks_the_reward_in_an_evaluation_ends_no_session() -> None:
    """Before: a last batch of one held-out prompt was "no number for any completion of the first batch"."""

    def breaks(completions: list[int], **columns: Any) -> list[float]:
        raise ValueError("no number")

    calls, _ = make_reward_calls(retries=0)
    reward = calls.wrap_reward(breaks)
    for _ in range(4):
        with calls.uncounted():
            assert reward(prompts=["q"], completions=[0], answer=["0"]) == [None]
    with pytest.raises(RewardFailed):
        reward(prompts=["q"], completions=[0], answer=["0"])


@pytest.mark.parametrize("is_run", [True, False])
def test_a_reward_reads_where_the_run_stands_in_trls_trainer_state(is_run: bool) -> None:
    """Before: max_steps was 1,000,000,000, and global_step began at 0 in each session."""
    seen: list[tuple[int, int]] = []

    def curriculum(completions: list[Any], trainer_state: Any, **columns: Any) -> list[float]:
        seen.append((trainer_state.global_step, trainer_state.max_steps))
        return [0.0] * len(completions)

    async def later(completions: list[Any], **columns: Any) -> list[float]:
        return curriculum(completions, **columns)

    for calls in (forgiving()[0], None):
        trainer = make(reward=[curriculum, later], reward_calls=calls)
        trainer.progress = (lambda: {"global_step": 40, "max_steps": 60}) if is_run else None
        trainer.state.global_step = 3
        rollouts(trainer)
        assert trainer.state.global_step == 3
    assert seen == [(40, 60) if is_run else (3, 0)] * 4
