"""Real fleets whose outer step is made safe: gated, weighed, tuned, timed; and the words that people read of it.

The independent replay (tests/support/audit.py) decides the same as the fleet, in every case, and has the same bits.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco.model.export import state_at
from diloco.outer.make import make_diloco
from diloco.outer.managers.manager import MockManager
from diloco.outer.rounds import is_alone
from diloco.runlog.reader import read_report
from diloco.runlog.summary import summary
from executors.cli.looking.status import status_dict, status_table
from rendezvous import layout
from rendezvous.agreement.rules import Rules
from rendezvous.errors import BadCommit
from rendezvous.records.records import Commit, Listed
from rendezvous.store import Store
from tests.rendezvous.test_engine import Seat, bucket
from tests.support.audit import check_run
from tests.support.fakes import ManualClock
from tests.support.fleet import Fleet

DONE = {"r00": [0], "r01": [0], "r02": [0]}
GATED = Rules(sync_every=2, norm_gate=3.0)


def events(fleet: Fleet, kind: str) -> list[dict[str, Any]]:
    lines = [line for path in Path(fleet.url).glob("log/*/*.jsonl") for line in path.read_text().splitlines()]
    return sorted((e for e in map(json.loads, lines) if e["event"] == kind), key=lambda e: e["at"])


def warned(fleet: Fleet, kind: str) -> list[dict[str, Any]]:
    return [e for e in events(fleet, "warning") if e.get("kind") == kind]


def three_have_offered(clock: ManualClock) -> tuple[Store, list[Seat]]:
    """r02's pseudogradient is a thousand times too long."""
    store = bucket(clock, replicas=4, m=3)
    seats = [Seat(store, f"r{i:02d}", clock, GATED).join() for i in range(3)]
    for i, seat in enumerate(seats):
        seat.offer(*[1000.0 if i == 2 else 1.0] * 3)
    return store, seats


def test_the_committer_decides_and_all_step_alike() -> None:
    _, seats = three_have_offered(ManualClock())
    commits = [seat.step() for seat in seats]
    assert [o.factor for o in commits[0].offers] == [1.0, 1.0, float(np.float32(1e-3))]
    theta = seats[0].state.theta
    assert all(np.array_equal(seat.state.theta, theta) for seat in seats)
    assert theta.tolist() == pytest.approx([100 - 3 / 2.001] * 3), "two whole ones, and a third of the same length"


def test_a_commit_with_other_weights_than_its_offers_give_ends_who_reads_it() -> None:
    """Live, and in the replay of a later replica.  No replica has averaged anything by then."""
    clock = ManualClock()
    store, seats = three_have_offered(clock)
    commit = seats[0].rv.settle()
    heavy = replace(commit, offers=(*commit.offers[:2], replace(commit.offers[2], weight=1.0, factor=1.0)))
    store.put(layout.commit_key(0), heavy.encode())
    with pytest.raises(BadCommit, match=r"gives r02's offer for step 0 the weight 1.0 .* by the run's rules"):
        seats[1].step()
    with pytest.raises(BadCommit):
        Seat(store, "r03", clock, GATED).join()
    assert seats[1].state.theta.tolist() == [100.0] * 3


def test_a_replica_with_far_too_long_pseudogradients_is_gated_and_named(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, fleet={"replicas": 4, "min_replicas": 4})
    for slot in ("r00", "r01", "r02"):
        fleet.start(slot)
    fleet.start("r03", TEST_POISON="3e4")
    assert fleet.wait() == {**DONE, "r03": [0]}, fleet.logs()
    found = check_run(tmp_path / "run", 6)
    assert found.gated and {slot for _, slot in found.gated} == {"r03"}
    honest = [o.norm for c in fleet.commits() for o in c.offers if o.slot != "r03"]
    means = [e["mean_norm"] for e in events(fleet, "step")]
    assert max(means) < 2 * max(honest), "one that is 30,000 times too long counts as one"
    told = {e["text"] for e in warned(fleet, "gated")}  # the closer says it, counting the commits it has seen
    assert told and all("r03's pseudogradient" in text and "look at that replica's loss" in text for text in told)
    report = read_report(fleet.store)
    assert "r03@" in summary(report) and "counted as one of typical length" in summary(report)


def test_an_honest_fleet_is_not_gated_and_its_numbers_are_told(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, fleet={"min_replicas": 3})
    fleet.start_all()
    assert fleet.wait() == DONE, fleet.logs()
    assert check_run(tmp_path / "run", 6).gated == []
    steps, report = events(fleet, "step"), read_report(fleet.store)
    assert all({"mean_norm", "delta_norm", "outer_lr", "cos_pair", "moved"} <= set(e) for e in steps)
    told = [e for e in steps if "rho" in e]
    worth = [0.7 * (1 + sum(0.5 ** (k + 1) * e["rho"] ** k for k in range(e["step"] + 1))) for e in told]
    assert len(told) == 15 and [e["effective_step"] for e in told] == pytest.approx(worth)
    assert "ρ " in summary(report) and any("η_eff" in line for line in status_table(report))
    shown = status_dict(report, report.ended)
    assert not shown["solo"] and shown["outer"]["rho"] == pytest.approx(steps[-1]["rho"], abs=1e-6)
    assert events(fleet, "warning") == []


@pytest.mark.slow
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_auto_lr_and_every_weighting_survive_kills_other_cpus_and_replay(tmp_path: Path, weighting: str) -> None:
    """Two fragments, a replica of other kernels, one killed with its offer durable: one θ, also in the replay."""
    fleet = Fleet(
        tmp_path, fleet={"steps": 10},
        outer={"sync_every": 20, "fragments": 2, "lr": "auto", "momentum": 0.9, "weighting": weighting},
    )  # fmt: skip
    fleet.start("r00")
    fleet.start("r01", die="after:create:/offer/@5")
    fleet.start("r02", ATEN_CPU_CAPABILITY="default")
    fleet.wait_for(lambda: not fleet.sessions["r01"][0].is_alive())
    fleet.start("r01")
    assert fleet.wait() == {"r00": [0], "r01": [-9, 0], "r02": [0]}, fleet.logs()
    found = check_run(tmp_path / "run", 10)
    assert found.lrs[0] == found.lrs[1] == float(np.float32(0.1)), "careful at first"
    assert len(set(found.lrs)) > 2 and all(0.1 <= lr + 1e-7 <= 1.0 / 1.9 + 1e-6 for lr in found.lrs)
    assert {e["outer_lr"] for e in events(fleet, "step")} <= {float(f"{lr:.7g}") for lr in found.lrs}
    for t in (3, 10):
        assert state_at(fleet.run, fleet.model, t)[1].digest() == found.digests[t]


def test_a_sync_is_due_when_its_seconds_are_over(tmp_path: Path) -> None:
    """H would last for minutes; the clock ends each round, and the work counts as what it is: h/H."""
    fleet = Fleet(tmp_path, outer={"sync_every": 100_000, "sync_seconds": 0.3}, fleet={"steps": 4})
    fleet.start_all()
    assert fleet.wait() == DONE, fleet.logs()
    check_run(tmp_path / "run", 4)
    offers = [o for c in fleet.commits() for o in c.offers]
    assert all(1 <= o.h < 100_000 and o.weight == float(np.float32(o.h / 100_000)) for o in offers)
    spent = [e["inner_s"] for e in events(fleet, "step") if e["step"]]
    assert np.median(spent) < 30.0, spent


def test_a_replica_that_is_left_alone_goes_on_and_says_so(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, fleet={"replicas": 2, "min_replicas": 1, "steps": 8})
    fleet.start("r00")
    assert fleet.wait() == {"r00": [0]}, fleet.logs()
    check_run(tmp_path / "run", 8)
    said = warned(fleet, "solo")
    assert [e["steps"] for e in said] == [1, 3, 6], "said, and not in every step"
    assert "r00 alone, of 2 replicas" in said[0]["text"]
    report = read_report(fleet.store)
    assert status_dict(report, report.ended)["solo"]
    assert any("solo: outer step 7" in line and "unconfirmed" in line for line in status_table(report))
    assert "by one replica alone (unconfirmed): 8 of 8" in summary(report)


def test_replicas_with_the_same_data_are_told_so(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, fleet={"replicas": 2}, outer={"sync_every": 1})  # no slow machine takes fewer inner steps
    for slot in ("r00", "r01"):
        fleet.start(slot, TEST_ONE_SEED="1")
    assert fleet.wait() == {"r00": [0], "r01": [0]}, fleet.logs()
    assert all(len({o.digest for o in c.offers}) == 1 for c in fleet.commits())
    told = warned(fleet, "identical")
    assert [e["steps"] for e in told] == [3, 6] and "same data with the same seed" in told[0]["text"]
    assert all(e["cos_pair"] > 0.999 for e in events(fleet, "step"))


def test_bf16_weights_that_do_not_move_are_told() -> None:
    """One weight of 4,096 is 0 and can move by any amount; the others would need a larger step."""
    model = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)[0, 0] = 0.0
    optimizer, told = torch.optim.SGD(model.parameters(), lr=1e-6), list[str]()
    manager = MockManager("bf16-stuck", replicas=1)
    manager.session.emit = lambda event, **fields: told.append(f"{fields.get('kind')} {fields.get('text')}")
    with make_diloco(model, optimizer, manager, sync_every=2):
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.ones(8, 64, dtype=torch.bfloat16)).float().sum().backward()
            optimizer.step()
    assert any("bf16_stuck only 0.024 % of the 16-bit weights moved" in text for text in told), told
    manager.shutdown()


def test_a_session_is_not_alone_with_an_offer_of_its_predecessor() -> None:
    """The predecessor's inner steps are in the mean and not in this session's model, which is then written anew."""
    listed = Listed(3, "r00", 1, "n", layout.delta_blob(3, "r00", 1, "n"), 12, "d", 4, 1.0)
    commit = Commit(3, "p", "base", (listed,), {"r00": 1}, 2, 1.5, 0, "r00-2", "n", 9.0)
    assert is_alone(commit, ("r00", 1), "fp32") and not is_alone(commit, ("r00", 2), "fp32")
    assert not is_alone(commit, ("r00", 1), "int8") and not is_alone(commit, ("r01", 1), "fp32")
