"""A run of three real processes while a foreign writer puts bytes other than records into every register of its bucket.

    every register that is not taken yet       offers, means of coming steps, claims, leaves, manifests, control/*
    every object that is overwritten anyway    beats, logs
    names that the run does not have           r07, "zz", .DS_Store, control/999999

docs/internals/protocol.md, "What is not a record, and what is gone": all of it is passed over, and takes its number.
Garbage in the commit of a coming step is not: each replica that reads it ends with exit code 2, and nothing is
decided anew.

Not promised: that garbage is written at the same moments in every run; what is written, and where, follows the seed.
"""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.process import exitcodes
from diloco.runlog.reader import read_report
from diloco.runlog.summary import checks
from executors.cli import main as cli
from rendezvous import layout
from rendezvous.agreement.membership import newest_claim, read_control, write_control
from rendezvous.clock import SystemClock
from rendezvous.errors import KeyExists
from tests.sim.adversary import is_record, mangled, random_json
from tests.support.audit import check_run
from tests.support.fleet import Fleet

SLOTS = ("r00", "r01", "r02")
ENDLESS = {"steps": 5000, "give_up_s": 120.0}
LEASE_S = 4.0
BYTES = [
    b"", b"{}", b"null", b"[]", b"[1", b"\xff\xfe\x00", b"[" * 100_000, b'{"a":' * 50_000, b"1e999", b"0" * 300_000,
    b'{"kind":"beat","wire":2,"x":' + b"[" * 900 + b"]" * 900 + b"}", '{"kind":"offer"}'.encode("utf-16"),
]  # fmt: skip
FOREIGN = (
    "control/zz.json", "control/.DS_Store", "replicas/zz/000001.json", "replicas/r00/x.json", "alive/zz.json",
    "alive/r07.json", "leave/zz-1.json", "log/.DS_Store", "log/r00-x/000000.jsonl", "steps/x/commit.json",
    "snapshots/x/manifest.json", "snapshots/0000099999/manifest.json", "residuals/r00-1-x.bin", "votes/0.json",
)  # fmt: skip


TRUE = {
    "offer": layout.offer_key(0, "r00", 0), "mean": layout.mean_key(0, 0), "commit": layout.commit_key(0),
    "beat": layout.beat_key("r00"), "claim": layout.claim_key("r00", 1), "snapshot": layout.snapshot_key(0),
    "control": layout.control_key(0),
}  # fmt: skip
KIND = {**{kind: kind for kind in (*TRUE, "leave")}, "snapshot": "manifest"}  # as tests/sim/adversary.py calls them


class Litter:
    """Writes garbage wherever a register may be taken or a mutable object be overwritten."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet, self.store, self.random = fleet, fleet.run.store, random.Random(seed)
        self.written = 0

    def once(self) -> None:
        for key in self.free_keys():
            try:
                self.store.create(key, self.garbage(key))
                self.written += 1
            except KeyExists:
                continue  # a record of the run stands there, or garbage already
        for key in self.mutable_keys():
            self.store.put(key, self.garbage(key))
            self.written += 1

    def free_keys(self) -> Iterator[str]:
        head = self.fleet.head()
        for step in range(head, head + 3):
            for slot in (*SLOTS, "r07", "zz"):
                yield from (layout.offer_key(step, slot, attempt) for attempt in range(self.random.randrange(1, 4)))
            yield from (layout.mean_key(step, part) for part in range(4))
            yield layout.snapshot_key(step + 1)
        for slot in SLOTS:
            held = getattr(newest_claim(self.store, slot), "generation", 0)
            yield from (
                layout.claim_key(slot, held + 1),
                layout.leave_key(slot, held),
                layout.leave_key(slot, held + 1),
            )
        wishes = read_control(self.store).records
        yield from (layout.control_key(n) for n in (wishes, wishes + 1, wishes + 3, 999_999))
        yield from FOREIGN

    def mutable_keys(self) -> Iterator[str]:
        yield from map(layout.beat_key, SLOTS)
        yield from (key for key in self.store.list(layout.LOGS) if self.random.random() < 0.5)

    def garbage(self, key: str) -> bytes:
        """Not JSON, too deep, or JSON that is not a record: a true one with a wrong field among them."""
        kind, how = layout.record_kind(key) or "", self.random.random()
        body = self.random.choice(BYTES)
        if how < 0.3:
            body = json.dumps(random_json(self.random)).encode()
        elif how < 0.7:
            body = mangled(self.random, self.store.get(TRUE.get(kind, layout.control_key(0))) or b"")
        return b"{}" if kind in KIND and is_record(KIND[kind], body) else body


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, outer={"sync_every": 10, "snapshot_every": 2}, fleet=ENDLESS)
    fleet.start_all()
    yield fleet
    fleet.kill_all()


def among_garbage(fleet: Fleet, seed: int, rounds: int) -> None:
    """The run goes on: each round waits for a step that was open, and littered, from its beginning."""
    litter = Litter(fleet, seed)
    for _ in range(rounds):
        head = fleet.head()
        litter.once()
        fleet.wait_for(lambda head=head: fleet.head() >= head + 2)
    assert litter.written > 40 * rounds


def sound(fleet: Fleet) -> None:
    """One chain without a gap, nothing counted twice, the same θ on all replicas."""
    assert all(check.ok for check in checks(read_report(fleet.store)))
    by_all = [commit for commit in fleet.commits() if {o.slot for o in commit.fresh_offers} == set(SLOTS)]
    assert by_all, "offers of all three count"


@pytest.mark.slow
def test_three_processes_go_on_and_one_is_replaced_and_a_stop_is_heard(fleet: Fleet, capsys) -> None:
    fleet.wait_for(lambda: fleet.commit(1))
    among_garbage(fleet, seed=1, rounds=3)
    fleet.sessions["r02"][0].kill()
    among_garbage(fleet, seed=2, rounds=2)
    fleet.start("r02")
    fleet.wait_for(lambda: fleet.counted("r02", 2))
    among_garbage(fleet, seed=3, rounds=2)
    assert cli.main(["stop", fleet.url, "--grace", "120"]) == 0, capsys.readouterr().out
    assert fleet.wait() == {"r00": [exitcodes.LEFT], "r01": [exitcodes.LEFT], "r02": [-9, exitcodes.LEFT]}
    assert "killed" not in capsys.readouterr().out, "they left by themselves"
    sound(fleet)


@pytest.mark.slow
def test_the_budgets_lease_holds_among_garbage(fleet: Fleet) -> None:
    fleet.wait_for(lambda: fleet.commit(1))
    clock = SystemClock()
    until = clock.wall() + LEASE_S
    write_control(fleet.run.store, clock, until=until)
    litter = Litter(fleet, seed=4)
    while clock.wall() < until:
        litter.once()
        alive = all(session.exitcode is None for lives in fleet.sessions.values() for session in lives)
        assert alive or clock.wall() >= until, fleet.logs()
        time.sleep(0.2)
    assert fleet.wait() == {slot: [exitcodes.LEFT] for slot in SLOTS}
    assert all("the supervisor did not extend the budget's lease" in fleet.log(slot).read_text() for slot in SLOTS)
    sound(fleet)


@pytest.mark.slow
def test_a_stop_is_heard_where_the_first_control_record_was_overwritten(fleet: Fleet, capsys) -> None:
    """Before: `diloco stop` ended with exit code 2, and three processes trained on."""
    fleet.wait_for(lambda: fleet.commit(1))
    litter = Litter(fleet, seed=5)
    litter.once()
    first = fleet.run.store.get(layout.control_key(0)) or b""
    fleet.run.store.put(layout.control_key(0), b'{"kind":"control","wire":2,"n":[]}')
    head = fleet.head()
    fleet.wait_for(lambda: fleet.head() >= head + 2)
    assert cli.main(["stop", fleet.url, "--grace", "120"]) == 0
    assert "control/000000.json is not a control record" in capsys.readouterr().out
    assert fleet.wait() == {slot: [exitcodes.LEFT] for slot in SLOTS}
    fleet.run.store.put(layout.control_key(0), first)  # the operator restores it
    sound(fleet)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_garbage_commit_ends_all_loudly_and_the_run_goes_on_once_it_is_gone(tmp_path: Path, seed: int) -> None:
    fleet = Fleet(tmp_path, outer={"sync_every": 20, "snapshot_every": 2}, fleet={"steps": 8})
    fleet.start_all()
    fleet.wait_for(lambda: fleet.commit(1))
    head, garbage = len(fleet.commits()), Litter(fleet, seed).garbage(layout.commit_key(99))
    fleet.run.store.create(layout.commit_key(head + 1), garbage)
    assert fleet.wait() == {slot: [exitcodes.USER_ERROR] for slot in SLOTS}, fleet.logs()
    assert fleet.commit(head) is not None, "the step before it was closed"
    for slot in SLOTS:
        said = fleet.log(slot).read_text()
        assert f"{layout.commit_key(head + 1)}: expected a commit, found" in said and "Restore the object" in said
    assert fleet.run.store.get(layout.commit_key(head + 1)) == garbage, "nothing is decided anew"
    assert fleet.run.store.get(layout.commit_key(head + 2)) is None
    fleet.run.store.delete([layout.commit_key(head + 1)])
    fleet.start_all()
    assert fleet.wait() == {slot: [exitcodes.USER_ERROR, exitcodes.DONE] for slot in SLOTS}, fleet.logs()
    check_run(tmp_path / "run", 8)
