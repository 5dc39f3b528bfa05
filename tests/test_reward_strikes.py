"""`diloco train --executor local`, typed: the reward passes every check on the laptop, and raises in every replica."""

import time
from pathlib import Path

import pytest

from diloco.runlog.report import read_report
from executors.cli.status import status_table
from rendezvous.stores.open import open_store
from tests.test_cli_fleet import outcome

CONFIG = """
name = "judge"
[outer]
sync_every = 2
[inner]
loop = "grpo"
model = "toolworld"
batch_size = 16
world_kinds = 2
world_names = 4
warm_start_steps = 1
reward = "reward.py:score"
reward_retries = 0
[fleet]
replicas = 2
steps = 6
"""
REWARD = """
import sys


def score(completions, **columns):
    if "diloco.manager" in sys.modules:  # a replica that trains: the judge is out of its reach
        raise ConnectionError("429: the judge wants money")
    return [float(i) for i, _ in enumerate(completions)]
"""


@pytest.mark.timeout(300)
def test_a_reward_that_always_raises_ends_the_run_after_three_strikes_with_words_that_help(tmp_path: Path) -> None:
    """Before: six lines of our own traceback, and advice to mend a file that `resume` would never have read."""
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "reward.py").write_text(REWARD)
    run = tmp_path / "run"
    ended = outcome(["train", tmp_path / "run.toml", "--run", run, "--executor", "local"], OMP_NUM_THREADS="1")
    slot, _, last = ended.stderr.rpartition(": failed 3 times in a row (exit code 1). Its last lines:")
    assert ended.returncode == 1 and last, ended.stderr
    for words in (
        "the reward score gave no number for any completion of the first batch of this life, 1 tries each",
        "reward.py, line 7: raise ConnectionError", "ConnectionError: 429: the judge wants money",
        "`diloco resume RUN` goes on", "`diloco train CONFIG --run RUN --again`",
    ):  # fmt: skip
        assert words in last, last
    assert "Traceback" not in last and "reward_calls.py" not in last and "next: diloco report" not in ended.stderr

    report = read_report(open_store(str(run)))
    struck = [x for x in report.lives if x.slot == slot[-3:]]
    assert len(struck) == 3 and all(x.how == "crashed" and "429: the judge wants money" in x.why for x in struck)
    assert report.head == 0, "nobody offers what it learned without a reward"
    assert "429: the judge wants money" in "\n".join(status_table(report, time.time(), 200))
