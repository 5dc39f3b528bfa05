"""`diloco train --executor local`, typed: the reward passes every check on the laptop, and raises in every replica.

Then one that works for some batches of every session, and one that is away for a while, under a supervisor whose pauses
are short."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.process import exitcodes
from diloco.run.config import load_config
from diloco.run.founding import open_run
from diloco.runlog.reader import Report, read_report
from executors.cli.looking.status import status_table
from executors.platforms.on_host.executor import LocalProcessExecutor
from executors.platforms.places import PRELOAD
from executors.supervision.slots.plan import Limits
from executors.supervision.supervisor import Supervisor
from rendezvous.clock import SystemClock
from rendezvous.stores.open import open_store
from tests.executors.test_cli_fleet import outcome

CONFIG = """
name = "judge"
[outer]
sync_every = 2
[inner]
loop = "grpo"
model = "toolworld"
batch_size = 16
toolworld.kinds = 2
toolworld.names = 4
toolworld.warm_start_steps = 1
rewards.function = "reward.py:score"
rewards.retries = 0
[fleet]
replicas = 2
steps = 6
"""
REWARD = """
import sys


def score(completions, **columns):
    if "diloco.outer.managers.manager" in sys.modules:  # a replica that trains: the judge is out of its reach
        raise ConnectionError("429: the judge wants money")
    return [float(i) for i, _ in enumerate(completions)]
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_reward_that_always_raises_ends_the_run_after_three_strikes_with_words_that_help(tmp_path: Path) -> None:
    """Before: six lines of our own traceback, and advice to mend a file that `resume` would never have read."""
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "reward.py").write_text(REWARD)
    run = tmp_path / "run"
    ended = outcome(["train", tmp_path / "run.toml", "--run", run, "--executor", "local"], OMP_NUM_THREADS="1")
    slot, _, last = ended.stderr.rpartition(": failed 3 times in a row (exit code 9 (no reward)). Its last lines:")
    assert ended.returncode == 1 and last, ended.stderr
    for words in (
        "the reward score gave no number for any completion of the first batch of this session, 1 tries each",
        "reward.py, line 7: raise ConnectionError", "ConnectionError: 429: the judge wants money",
        "`diloco resume RUN` continues", "`diloco train CONFIG --run RUN --again`",
    ):  # fmt: skip
        assert words in last, last
    assert "Traceback" not in last and "reward_calls.py" not in last and "next: diloco report" not in ended.stderr

    report = read_report(open_store(str(run)))
    struck = [x for x in report.sessions if x.slot == slot[-3:]]
    assert len(struck) == 3 and all(x.how == "crashed" and "429: the judge wants money" in x.why for x in struck)
    assert report.head == 0, "nobody offers what it learned without a reward"
    assert "429: the judge wants money" in "\n".join(status_table(report, time.time(), 200))


FAILS_LATER = """
import os, sys

batches = 0


def score(completions, **columns):
    global batches
    batches += "diloco.outer.managers.manager" in sys.modules
    {body}
    return [float(i) for i, _ in enumerate(completions)]
"""
EACH_SESSION = "if batches > 5: raise MemoryError('out of file handles')"


def supervised(
    folder: Path, reward: str, steps: int, strikes: int, each_tick: Callable[[Supervisor, Report], None]
) -> Supervisor:
    """strikes: by the reward, in a row, that end the run."""
    (folder / "run.toml").write_text(CONFIG.replace("steps = 6", f"steps = {steps}"))
    (folder / "reward.py").write_text(reward)
    run = open_run(load_config(folder / "run.toml"), str(folder / "run"), SystemClock())
    executor = LocalProcessExecutor(PRELOAD)
    limits = Limits(reward_failures=strikes, reward_backoff_s=0.5, reward_backoff_most_s=1.0)
    return Supervisor(run, executor, SystemClock(), limits=limits, each_tick=each_tick)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_reward_that_fails_in_every_session_after_some_batches_ends_the_run(tmp_path: Path) -> None:
    """Before: every session was counted in a step or two, so its end was the first in a row, for ever."""
    seen: list[str] = []

    def watch(supervisor: Supervisor, report: Report) -> None:
        seen.append("\n".join(status_table(report, time.time(), 200)))
        if len(report.of_kind("lost")) > 8:
            supervisor.leave("it is started again for ever")

    supervisor = supervised(tmp_path, FAILS_LATER.format(body=EACH_SESSION), 2000, 3, watch)
    try:
        outcome = supervisor.supervise()
    finally:
        supervisor.executor.close()
    assert outcome.code == 1 and "its reward failed in 3 sessions in a row" in outcome.text, outcome.text
    assert "out of file handles" in outcome.text
    report = read_report(supervisor.run.store)
    lost = report.of_kind("lost")
    assert report.head > 0 and any(e["counted"] for e in lost), "sessions that fail are counted in steps"
    assert {(e["exit_code"], e["by_reward"], e["own_fault"]) for e in lost} <= {
        (exitcodes.NO_REWARD, True, False), (exitcodes.GAVE_UP, True, False)
    }  # fmt: skip
    assert any("! the reward failed: " in text and " 1 of 3 times in a row, again in " in text for text in seen)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_reward_that_is_away_and_comes_back_ends_nothing(tmp_path: Path) -> None:
    """Before: three starts within seconds, and the end of the run."""
    away = tmp_path / "away"
    body = f"if os.path.exists({str(away)!r}): raise ConnectionError('503: the judge is away')"

    def meddle(supervisor: Supervisor, report: Report) -> None:
        ends = [e["slot"] for e in report.of_kind("lost")]
        if report.head >= 1 and not ends:
            away.touch()
        if len(ends) >= 6 and max(ends.count(slot) for slot in ends) >= 3:
            away.unlink(missing_ok=True)

    supervisor = supervised(tmp_path, FAILS_LATER.format(body=body), 12, 8, meddle)
    try:
        outcome = supervisor.supervise()
    finally:
        supervisor.executor.close()
    assert outcome.code == 0, outcome.text
    report = read_report(supervisor.run.store)
    assert report.done and len(report.of_kind("lost")) >= 6
    assert "the reward failed" not in "\n".join(status_table(report, time.time(), 200))
