"""inner.schedule.lr_replicas: the rate follows how many replicas an outer step really averaged."""

from pathlib import Path

import pytest

from diloco.runlog.reader import read_report
from rendezvous.stores.open import open_store
from tests.support.fleet import Fleet

LR = 1e-3


def test_the_rate_is_that_of_two_until_one_of_them_is_gone(tmp_path: Path) -> None:
    inner = {"lr": LR, "schedule": {"lr_replicas": "linear"}}
    fleet = Fleet(tmp_path, inner=inner, fleet={"replicas": 2, "min_replicas": 1, "steps": 4})
    fleet.start("r00")
    fleet.start("r01", die="before:create:/offer/@2")  # in outer step 1
    assert fleet.wait() == {"r00": [0], "r01": [-9]}, fleet.logs()
    report = read_report(open_store(fleet.url))
    counted = [len(step.fresh) for step in report.steps]
    assert counted == [2, 1, 1, 1]
    rates = {e["step"]: e["lr"] for e in report.of_kind("step") if e["slot"] == "r00"}
    # wanted: 2; step 0 averaged 2; step 1 averaged 1; …
    assert [rates[t] for t in range(4)] == pytest.approx([2 * LR, 2 * LR, LR, LR], rel=1e-6)
