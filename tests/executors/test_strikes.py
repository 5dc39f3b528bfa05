"""Ends in a row: every short history against an independent count; hours without a judge, in virtual time."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from diloco.process import exitcodes
from executors.platforms.base import State
from executors.supervision.slots.plan import (
    ENOUGH,
    Desired,
    GiveUp,
    Limits,
    Observation,
    Replace,
    SessionEnd,
    Strikes,
    Wait,
    count_end,
    plan,
)
from executors.supervision.slots.slot_state import past

KINDS = {"crash": {"own_fault": True}, "reward": {"by_reward": True}, "preempted": {}}
ENDS = [(kind, counted) for kind in KINDS for counted in (0, 1, ENOUGH - 1, ENOUGH)]


def end_of(kind: str, counted: int) -> SessionEnd:
    return SessionEnd(counted, **KINDS[kind])


def fold(history: Sequence[tuple[str, int]]) -> Strikes:
    strikes = Strikes()
    for kind, counted in history:
        strikes = count_end(strikes, end_of(kind, counted))
    return strikes


def reference(history: Sequence[tuple[str, int]]) -> Strikes:
    """From the whole history at once: what lies behind the newest session that counts (for each number its own)."""
    useful = max((i for i, (_, counted) in enumerate(history) if counted), default=0)
    worth_it = max((i for i, (_, counted) in enumerate(history) if counted >= ENOUGH), default=0)
    return Strikes(
        losses=len(history[useful:]),
        failures=[kind for kind, _ in history[useful:]].count("crash"),
        reward_failures=[kind for kind, _ in history[worth_it:]].count("reward"),
        by_reward=history[-1][0] == "reward",
    )


def test_every_history_of_four_ends_against_a_count_of_the_whole() -> None:
    for length in range(1, 5):
        for history in itertools.product(ENDS, repeat=length):
            assert fold(history) == reference(history), history


def lost(attempt: int, end: SessionEnd) -> dict[str, Any]:
    fields = {"counted": end.counted, "own_fault": end.own_fault, "by_reward": end.by_reward}
    who = {"who": "supervisor-1", "slot": "r00", "generation": attempt, "at": float(attempt), "attempt": attempt}
    return {**who, "event": "lost", "useful": end.counted > 0, "state": "FAILED", "exit_code": 9, **fields}


def test_the_next_supervisor_counts_the_same_from_the_log() -> None:
    for history in itertools.product(ENDS, repeat=3):
        log = [lost(i + 1, end_of(*end)) for i, end in enumerate(history)]
        assert past(log)["r00"].strikes == fold(history), history


def test_a_word_of_an_older_release_counts_as_it_did() -> None:
    event = {k: v for k, v in lost(1, SessionEnd(own_fault=True)).items() if k not in ("counted", "by_reward")}
    assert past([event])["r00"].strikes == Strikes(losses=1, failures=1)
    assert past([event, {**event, "attempt": 2, "useful": True}])["r00"].strikes == Strikes(losses=1, failures=1)


# -------------------------------------------------------------------- in virtual time

BOOT_S, BATCH_S = 120.0, 30.0  # from a start to the first batch; three tries of a batch with their pauses


def starts_of(session: Callable[[float], tuple[float, SessionEnd | None]], until: float) -> tuple[list[float], str]:
    """When one slot is started, and how that ended: "given up", "runs", or "time".

    session(start) -> (when it ended, how), with None for one that runs on.
    """
    now = 0.0
    starts = [now]
    strikes = Strikes()
    while now < until:
        ended, end = session(now)
        if end is None:
            return starts, "runs"
        strikes = count_end(strikes, end)
        count = strikes.reward_failures if strikes.by_reward else 0
        seen = Observation(
            "r00", State.FAILED, exitcodes.NO_REWARD, ended, "silent", losses=strikes.losses,
            failures=strikes.failures, reward_failures=count,
        )  # fmt: skip
        now = ended
        while isinstance(action := plan(Desired(frozenset({"r00"})), [seen], now)[0], Wait):
            now += 1.0
        if isinstance(action, GiveUp):
            return starts, "given up"
        assert isinstance(action, Replace)
        starts.append(now)
    return starts, "time"


def judge_away(since: float, seconds: float) -> Callable[[float], tuple[float, SessionEnd | None]]:
    """A judge that does not answer for so long; a session counts once a minute while it does."""

    def session(start: float) -> tuple[float, SessionEnd | None]:
        trains = start + BOOT_S
        if trains < since:
            return since + 3 * BATCH_S, SessionEnd(int((since - trains) / 60), by_reward=True)
        return (trains + BATCH_S, SessionEnd(0, by_reward=True)) if trains < since + seconds else (0.0, None)

    return session


@pytest.mark.parametrize("minutes", range(1, 76, 5))
def test_a_judge_that_is_away_for_an_hour_ends_no_run_and_costs_few_starts(minutes: int) -> None:
    starts, how = starts_of(judge_away(since=3600.0, seconds=60.0 * minutes), until=1e6)
    assert how == "runs" and len(starts) <= 6, (starts, how)


def test_a_judge_that_never_comes_back_ends_the_run_after_six_starts() -> None:
    starts, how = starts_of(judge_away(since=3600.0, seconds=1e9), until=1e6)
    assert how == "given up" and len(starts) == 6 and starts[-1] - starts[1] >= 79 * 60


@pytest.mark.parametrize("counted", range(15))
def test_a_reward_that_fails_after_some_batches_of_every_session_is_not_started_for_ever(counted: int) -> None:
    """Before: each session whose work was counted once began the count anew, so nothing ever ended these starts."""
    starts, how = starts_of(
        lambda start: (start + BOOT_S + 60.0 * counted, SessionEnd(counted, by_reward=True)), until=1e5
    )
    if counted < ENOUGH:
        assert how == "given up" and len(starts) == 6
    else:
        assert how == "time" and min(b - a for a, b in itertools.pairwise(starts)) > 60.0 * counted


def test_the_words_of_the_reward_s_end_name_the_pauses_that_the_supervisor_makes() -> None:
    limits = Limits()
    assert [limits.reward_pause(n) / 60 for n in range(1, limits.reward_failures)] == [1, 4, 16, 30, 30]
    assert limits.reward_pause(0) == 0.0 and limits.failures == 3
