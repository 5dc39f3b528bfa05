"""The supervisor's decisions, as a table."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.process import exitcodes
from executors.platforms.base import State
from executors.supervision.slots.plan import (
    Cancel,
    Desired,
    Drain,
    Fence,
    GiveUp,
    Launch,
    Limits,
    Observation,
    Replace,
    Wait,
    plan,
)

WANTED = Desired(frozenset({"r00"}))
NOBODY = Desired(frozenset())
DONE = Desired(frozenset({"r00"}), done=True)
ENDING = Desired(frozenset({"r00"}), ending=True)
NOW = 1000.0


def lost(code: int | None, state: State = State.LOST, losses: int = 1, failures: int = 0, **more) -> Observation:
    return Observation("r00", state, code, NOW, more.pop("holder", "silent"), 0.0, losses, failures, **more)


def there(state: State = State.RUNNING, silent_s: float = 0.0, **more) -> Observation:
    """On a platform, that restarts it by itself."""
    return Observation("r00", state, silent_s=silent_s, native=True, **more)


RUNNING = Observation("r00", State.RUNNING)
TABLE = [
    # what was seen                                    wanted   action   a word of the reason
    (Observation("r00"), WANTED, Launch, "no process runs it"),
    (Observation("r00", holder="silent"), WANTED, Launch, "no process"),
    (Observation("r00", holder="left"), WANTED, Launch, "no process"),
    (Observation("r00", holder="unknown"), WANTED, Wait, "heartbeat"),
    (Observation("r00", holder="beating"), WANTED, Wait, "elsewhere"),
    (Observation("r00"), NOBODY, None, ""),
    (Observation("r00"), DONE, None, ""),
    (Observation("r00"), ENDING, None, ""),
    (Observation("r00", State.PENDING), WANTED, None, ""),
    (Observation("r00", State.STARTING), WANTED, None, ""),
    (RUNNING, WANTED, None, ""),
    (RUNNING, DONE, None, ""),
    (RUNNING, NOBODY, Drain, "no longer wanted"),
    (RUNNING, ENDING, Drain, "no longer wanted"),
    (Observation("r00", State.RUNNING, silent_s=119), WANTED, None, ""),
    (Observation("r00", State.RUNNING, silent_s=121), WANTED, Replace, "does not change"),
    (Observation("r00", State.RUNNING, silent_s=121), DONE, None, ""),
    (Observation("r00", State.RUNNING, silent_s=121, beaten=False), WANTED, Replace, "without a heartbeat"),
    (there(silent_s=121), WANTED, None, ""),  # perhaps the platform is starting it again
    (there(silent_s=599), WANTED, None, ""),
    (there(silent_s=601), WANTED, Replace, "does not change"),
    (there(silent_s=601, beaten=False), WANTED, None, ""),  # a large image
    (there(silent_s=1801, beaten=False), WANTED, Replace, "without a heartbeat"),
    (there(State.PENDING, silent_s=9999, beaten=False), WANTED, None, ""),
    (there(State.PENDING, silent_s=9999), WANTED, None, ""),
    (there(replacing_s=59.0), WANTED, Wait, "asked to end"),
    (there(silent_s=601, replacing_s=59.0), WANTED, Wait, "asked to end"),
    (there(silent_s=661, replacing_s=61.0), WANTED, Fence, "not ended within 61 s"),
    (there(State.PENDING, replacing_s=61.0), WANTED, Fence, "not ended"),
    (there(State.CANCELLED, replacing_s=5.0), WANTED, Replace, "silent"),
    (there(State.LOST, replacing_s=5.0), WANTED, Replace, "silent"),
    (there(State.CANCELLED, replacing_s=5.0, holder="beating"), WANTED, Wait, "elsewhere"),
    (there(State.CANCELLED, replacing_s=5.0), NOBODY, None, ""),
    (there(replacing_s=61.0), NOBODY, Drain, "no longer wanted"),
    (there(State.PENDING), NOBODY, Cancel, "waiting for a machine"),
    (there(State.PENDING), ENDING, Cancel, "waiting for a machine"),
    (there(State.PENDING), DONE, Cancel, "waiting for a machine"),
    (there(draining_s=59.0), NOBODY, Drain, "no longer wanted"),
    (there(draining_s=61.0), NOBODY, Cancel, "not left within 61 s"),
    (Observation("r00", State.RUNNING, draining_s=61.0), ENDING, Cancel, "not left within 61 s"),
    (there(draining_s=61.0), DONE, None, ""),
    (there(State.FAILED, failures=1, reason="no such image"), WANTED, Replace, "no such image"),
    (there(State.FAILED, failures=3, reason="no such image"), WANTED, GiveUp, "3 times in a row (no such image)"),
    (lost(exitcodes.RESUME, State.FAILED), WANTED, Replace, "time limit near"),
    (lost(-9), WANTED, Replace, "SIGKILL"),
    (lost(None), WANTED, Replace, "was not seen"),
    (lost(1, State.FAILED, failures=1), WANTED, Replace, "exit code 1"),
    (lost(exitcodes.DIVERGED, State.FAILED), WANTED, Replace, "diverged"),
    (lost(exitcodes.LEFT, State.FAILED), WANTED, Replace, "left"),  # not because we asked: a platform's SIGTERM
    (lost(exitcodes.LEFT, State.CANCELLED), WANTED, Replace, "cancelled, and not by this run"),
    (lost(None, State.CANCELLED, losses=10), WANTED, GiveUp, "10 times in a row before its work counted"),
    (lost(None, State.CANCELLED), NOBODY, None, ""),
    (lost(None, State.CANCELLED), ENDING, None, ""),
    (lost(exitcodes.DONE, State.SUCCEEDED), WANTED, Replace, "more outer steps are wanted"),
    (lost(exitcodes.DONE, State.SUCCEEDED), DONE, None, ""),
    (lost(-9), NOBODY, None, ""),
    (lost(-9), DONE, None, ""),
    (lost(-9), ENDING, None, ""),
    (lost(-9, holder="beating"), WANTED, Wait, "elsewhere"),
    (lost(exitcodes.FENCED, State.FAILED, holder="beating"), WANTED, Wait, "elsewhere"),
    (lost(exitcodes.FENCED, State.FAILED, holder="unknown"), WANTED, Wait, "heartbeat"),
    (lost(exitcodes.FENCED, State.FAILED, holder="silent"), WANTED, Replace, "silent now"),
    (lost(exitcodes.USER_ERROR, State.FAILED, failures=1), WANTED, GiveUp, "wrong"),
    (lost(exitcodes.GAVE_UP, State.FAILED), WANTED, GiveUp, "no progress"),
    (lost(1, State.FAILED, losses=2, failures=2), WANTED, Wait, "trying again in 1 s"),
    (lost(1, State.FAILED, losses=3, failures=3), WANTED, GiveUp, "3 times in a row"),
    (lost(9, State.FAILED, reward_failures=1), WANTED, Wait, "no reward); trying again in 60 s"),
    (lost(9, State.FAILED, reward_failures=2), WANTED, Wait, "trying again in 240 s"),
    (lost(9, State.FAILED, reward_failures=5, losses=5), WANTED, Wait, "trying again in 1800 s"),
    (lost(9, State.FAILED, reward_failures=6), WANTED, GiveUp, "its reward failed in 6 sessions in a row"),
    (lost(9, State.FAILED, reward_failures=6), NOBODY, None, ""),
    (lost(exitcodes.GAVE_UP, State.FAILED, reward_failures=1), WANTED, Wait, "gave up); trying again in 60 s"),
    (lost(exitcodes.GAVE_UP, State.FAILED, reward_failures=6), WANTED, GiveUp, "its reward failed in 6"),
    (lost(-9, losses=9), WANTED, Wait, "trying again in 60 s"),
    (lost(-9, losses=10), WANTED, GiveUp, "10 times in a row"),
]


@pytest.mark.parametrize(("seen", "desired", "kind", "word"), TABLE)
def test_plan(seen, desired, kind, word):
    actions = plan(desired, [seen], NOW)
    assert [type(a) for a in actions] == ([] if kind is None else [kind])
    assert all(word in a.why and a.slot == "r00" for a in actions)


def test_a_replacement_comes_after_its_pause_and_not_before():
    seen = lost(-9, losses=3)  # 1 s after the second end, 2 s after the third
    assert isinstance(plan(WANTED, [seen], NOW + 1.9)[0], Wait)
    assert isinstance(plan(WANTED, [seen], NOW + 2.1)[0], Replace)


def test_an_actor_that_gave_up_is_started_again_until_it_has_failed_too_often():
    """Its own machine had lost the bucket for a while, and the run went on without it to its end."""
    desired = Desired(frozenset({"a00"}))
    again = Observation("a00", State.FAILED, exitcodes.GAVE_UP, NOW, "silent", losses=1)
    assert isinstance(plan(desired, [again], NOW)[0], Replace)
    assert isinstance(plan(desired, [replace(again, losses=10)], NOW)[0], GiveUp)


def test_pauses_grow_and_are_bounded():
    limits = Limits(backoff_s=1.0, backoff_most_s=60.0)
    assert [limits.pause(n) for n in (0, 1, 2, 3, 4, 20)] == [0, 0, 1, 2, 4, 60]


def test_slots_are_judged_one_by_one():
    desired = Desired(frozenset({"r00", "r01"}))
    seen = [Observation("r00", State.RUNNING), Observation("r01"), Observation("r02", State.RUNNING)]
    assert plan(desired, seen, NOW) == [Launch("r01", "no process runs it"), Drain("r02", "no longer wanted")]


# -------------------------------------------------------------------- docs/reference/operations.md

PAGE = (Path(__file__).parents[2] / "docs/reference/operations.md").read_text()
ROWS = re.findall(r"^\| (\d+)(?:, a signal)? \| ([^|]*) \| ([^|]*?) ?\|$", PAGE.partition("ends with one of")[2], re.M)
ANSWERS = {Replace: "starts the slot again", GiveUp: "ends the run"}


@pytest.mark.parametrize(("code", "meaning", "answer"), ROWS, ids=[row[0] for row in ROWS])
def test_the_page_says_what_the_supervisor_does_after_each_exit_code(code: str, meaning: str, answer: str) -> None:
    state = State.SUCCEEDED if int(code) == exitcodes.DONE else State.LOST
    (action,) = plan(WANTED, [lost(int(code), state)], NOW + 1e6)
    assert answer.startswith(ANSWERS[type(action)]), action
    assert meaning.startswith(exitcodes.NAMES.get(int(code), "crashed"))
    (meanwhile,) = plan(WANTED, [lost(int(code), state, holder="beating")], NOW + 1e6)
    assert isinstance(meanwhile, Wait), "what stands above the table"
    assert plan(DONE, [lost(int(code), state)], NOW + 1e6) == plan(ENDING, [lost(int(code), state)], NOW + 1e6) == []


def test_the_page_has_each_exit_code_and_the_two_limits() -> None:
    assert [int(row[0]) for row in ROWS] == sorted({exitcodes.CRASHED, *exitcodes.NAMES})
    assert "If a slot ends ten times in a row" in PAGE and Limits().losses == 10
    assert "Three crashes in a row" in PAGE and Limits().failures == 3


def test_the_page_has_the_pauses_after_a_reward_that_failed() -> None:
    limits = Limits()
    *first, last = [f"{limits.reward_pause(n) / 60:.0f}" for n in range(1, limits.reward_failures)]
    page = (Path(__file__).parents[2] / "docs/rewards.md").read_text()
    assert f"the supervisor waits {', '.join(first)} and {last} minutes before the restarts" in page


def test_a_drain_waits_as_long_as_the_page_says() -> None:
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    assert f"`drain` waits as long, and at least {Limits().drain_s:.0f} s" in page
    told = Observation("r00", State.RUNNING, draining_s=Limits().drain_s - 1, leave_s=20.0)
    assert isinstance(plan(NOBODY, [told], NOW)[0], Drain)
