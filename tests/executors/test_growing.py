"""The operator changes their mind while a run goes on: more replicas, fewer, more again.

    wanted   2 ──▶ 4 ──▶ 1 ──▶ 3         a control record each; the supervisor follows, the chain has no gap

Slots are launched, drained, and launched again in a new generation; no replica is ever needed that was sent away.
"""

from pathlib import Path

import pytest

from diloco.process import exitcodes
from diloco.runlog.reader import Report, read_report
from diloco.runlog.summary import checks
from executors.platforms.on_host.executor import LocalProcessExecutor
from executors.platforms.places import PRELOAD
from executors.supervision.slots.plan import Limits
from executors.supervision.supervisor import Supervisor
from rendezvous.agreement.membership import write_control
from rendezvous.clock import SystemClock
from rendezvous.store import Store
from tests.executors.test_supervisor import HERE, found, supervisor_for
from tests.support.audit import check_run
from tests.support.fleet import Fleet

FOREVER = 100_000  # outer steps; the last wish is to end


class Wishes:
    """The next number of replicas once so many as are wanted have counted in one outer step; after the last the end."""

    def __init__(self, store: Store, *counts: int) -> None:
        self._store, self._counts, self.fulfilled = store, list(counts), list[int]()

    def __call__(self, supervisor: Supervisor, report: Report) -> None:
        wanted = report.wanted
        if wanted.steps < FOREVER or not report.steps or len(report.steps[-1].fresh) != wanted.replicas:
            return
        self.fulfilled.append(wanted.replicas)
        if self._counts:
            write_control(self._store, SystemClock(), replicas=self._counts.pop(0))
        else:
            write_control(self._store, SystemClock(), steps=report.head + 2)


@pytest.mark.slow
def test_a_fleet_grows_shrinks_and_grows_again(tmp_path: Path) -> None:
    run, executor = found(tmp_path, steps=FOREVER, min_replicas=1), LocalProcessExecutor([HERE])
    wishes = Wishes(run.store, 4, 1, 3)
    try:
        assert supervisor_for(run, executor, each_tick=wishes).supervise().code == exitcodes.DONE
    finally:
        executor.close()
    report = read_report(run.store)
    assert all(c.ok for c in checks(report)), checks(report)
    assert wishes.fulfilled == [2, 4, 1, 3], "each wish came true in one outer step at least"
    assert set(report.steps[-1].fresh) == {"r00", "r01", "r02"}, "and the last one too"
    how = {x.name: x.how for x in report.sessions}
    assert how["r00-1"] == "done" and {how[f"r0{i}-1"] for i in (1, 2, 3)} == {"left"}
    assert how["r01-2"] == how["r02-2"] == "done", "who comes back is a new generation"
    assert not any(name.startswith("r03-2") for name in how)


@pytest.mark.slow
def test_a_training_fleet_grows_and_shrinks_and_has_one_theta(tmp_path: Path) -> None:
    """Real replicas: newcomers heal before they train, leavers offer first, and the replay has every replica's bits."""
    fleet = Fleet(tmp_path, outer={"sync_every": 40, "snapshot_every": 4}, fleet={"replicas": 2, "steps": FOREVER})
    wishes, executor = Wishes(fleet.store, 4, 2), LocalProcessExecutor(PRELOAD)
    try:
        supervisor = Supervisor(
            fleet.run, executor, SystemClock(), limits=Limits(backoff_s=0.01), each_tick=wishes
        )  # fmt: skip
        assert supervisor.supervise().code == exitcodes.DONE
    finally:
        executor.close()
    report = read_report(fleet.store)
    audited = check_run(tmp_path / "run", report.head)
    assert wishes.fulfilled == [2, 4, 2]
    assert {slot for _, slot in audited.listed} == {"r00", "r01", "r02", "r03"}
    assert set(report.steps[-1].fresh) == {"r00", "r01"}
    assert {x.name: x.how for x in report.sessions} == {
        "r00-1": "done",
        "r01-1": "done",
        "r02-1": "left",
        "r03-1": "left",
    }
