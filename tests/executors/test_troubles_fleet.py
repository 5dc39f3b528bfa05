"""Troubles of real fleets: a reward that is the same for all, and a replica that is killed three times."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from diloco.runlog.reader import Report, read_report
from diloco.views.troubles import find_troubles
from executors.platforms.on_host.executor import LocalProcessExecutor
from executors.supervision.notices.messages import message_lines
from executors.supervision.supervisor import Supervisor
from rendezvous.stores.open import open_store
from tests.executors.test_alerts import SECRET, listening
from tests.executors.test_supervisor import HERE, found, supervisor_for
from tests.support.fleet import ENDLESS, Fleet

GRPO: dict[str, Any] = {
    "loop": "grpo",
    "model": "toolworld",
    "data": {"text": None},
    "batch_size": 8,
    "toolworld": {"kinds": 2, "names": 4, "warm_start_steps": 1},
    "rewards": {"function": "same.py:score"},
}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_fleet_whose_rewards_are_all_equal_says_that_it_learns_nothing(tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text("def score(completions, **columns):\n    return [0.5] * len(completions)\n")
    fleet = Fleet(tmp_path, inner=GRPO, outer={"sync_every": 1}, fleet={"replicas": 2, "steps": 6})
    fleet.start_all()
    assert fleet.wait(240.0) == {"r00": [0], "r01": [0]}, fleet.logs()
    report = read_report(open_store(fleet.url))
    assert all(numbers["equal_groups"] == 1.0 for step in report.steps for numbers in step.learned.values())
    seen = {t.kind: t for t in find_troubles(report, time.time())}
    assert "every group's rewards are equal (mean 0.50)" in seen["no_signal"].text
    assert any(line.startswith("! the mean was zero in the newest 6") for line in message_lines(report, time.time()))
    for step in report.steps:
        step.empty = False  # as where another channel of the loss moves θ
    seen = {t.kind: t for t in find_troubles(report, time.time())}
    assert "equal rewards (mean 0.5) in the newest 6 outer steps" in seen["no_signal"].text


@pytest.mark.slow
def test_a_replica_that_is_killed_three_times_is_told_to_a_webhook_once(tmp_path: Path) -> None:
    run = found(tmp_path, steps=ENDLESS, min_replicas=1)
    killed = set[int]()

    def kill_thrice(supervisor: Supervisor, report: Report) -> None:
        supervisor._alerts._check_s = 0.2
        handle, beat = supervisor.handle("r01"), report.beats.get("r01")
        counted = {x.pid for x in report.sessions if x.commits} - killed
        if handle and beat and beat.pid == handle.pid and len(killed) < 3 and handle.pid in counted:
            os.kill(handle.pid, signal.SIGKILL)
            killed.add(handle.pid)
        if report.of_kind("alerted"):
            supervisor.leave()

    executor = LocalProcessExecutor([HERE])
    try:
        with listening() as hook:
            supervisor_for(run, executor, each_tick=kill_thrice, alert=hook.url).supervise()
    finally:
        executor.close()
    begun = [body for body in hook.heard if body["state"] == "begun"]
    assert [(body["kind"], body["slot"]) for body in begun] == [("slot_lost", "r01")]
    assert "lost 3 times in a row" in begun[0]["text"] and "diloco logs RUN r01" in begun[0]["text"]
    everything = b"".join(p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file())
    assert SECRET.encode() not in everything and b"127.0.0.1" in everything
