"""The past and allowed costs of a run: from a log, as a table."""

import json
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from diloco.process.session import Session as ReplicaLife
from diloco.runlog.reader import Report
from diloco.runlog.sessions import SessionSummary
from diloco.runlog.steps import Step
from diloco.units import dollars
from executors.cli.looking.status import cost_line, costs_dict
from executors.platforms import container
from executors.platforms.container import LauncherWord
from executors.supervision.costs import BOOT_S, END_S, LEASE_S, Bill, Costs, launch_refusal, lease, over
from executors.supervision.money.bills import costs, unpriced
from executors.supervision.money.budget import Budget
from executors.supervision.money.limit import NewLease, SpendLimit, SpendVerdict
from rendezvous import layout
from rendezvous.agreement.membership import Wanted, write_control
from rendezvous.agreement.rules import Timing
from rendezvous.clock import SystemClock
from rendezvous.errors import RecordsLost
from rendezvous.records.records import Beat, Spent
from rendezvous.stores.memory import MemoryStore
from tests.support.fakes import ManualClock

T = 1.7e9
HOUR = 3600.0


def event(kind: str, at: float, slot: str = "r00", attempt: int = 1, **more) -> dict:
    return {
        "who": "supervisor-1",
        "event": kind,
        "slot": slot,
        "generation": 0,
        "at": T + at,
        "attempt": attempt,
        **more,
    }


def launched(at: float = 0.0, slot: str = "r00", attempt: int = 1, executor: str = "modal", usd: float | None = 4.0):
    return event("launched", at, slot, attempt, executor=executor, usd_per_hour=usd, launched_at=T + at, pid=0)


def report(*events: dict, sessions=(), beats=None) -> Report:
    return Report("test", "memory://", {}, Wanted(), [], list(sessions), list(events), beats or {}, 0)


def session(
    slot: str = "r00", generation: int = 1, host: str = "modal/r00.1", ended: float | None = None, how="running"
):
    return SessionSummary(slot, generation, 7, host, T, ended=None if ended is None else T + ended, how=how)


TABLE = [
    # what stands in the log                                                       hours from then   usd   rate
    ([], 1.0, 0.0, 0.0),
    ([launched()], 0.0, 0.0, 4.0),
    ([launched()], 0.5, 2.0, 4.0),
    ([launched(), event("lost", 900.0)], 2.0, 1.0, 0.0),
    ([launched(), event("ended", 900.0)], 2.0, 1.0, 0.0),
    ([launched(), event("fenced_off", 900.0)], 2.0, 8.0, 4.0),  # not seen to end yet
    ([launched(), event("lost", 900.0), launched(1800.0, attempt=2)], 1.0, 3.0, 4.0),
    ([launched(), launched(slot="r01", executor="hf-jobs", usd=2.0)], 1.0, 6.0, 6.0),
    ([launched(usd=None)], 1.0, 0.0, 0.0),
    ([launched(executor="local", usd=0.0)], 1.0, 0.0, 0.0),
    ([launched(), event("pending", 1.0, first=True)], 5.0, 0.0, 0.0),
    ([launched(), event("pending", 1.0, first=True), event("running", HOUR)], 2.0, 4.0, 4.0),
    ([launched(), event("pending", 1.0, first=True), event("ended", HOUR)], 2.0, 0.0, 0.0),
    ([launched(), event("pending", HOUR), event("running", 2 * HOUR)], 3.0, 8.0, 4.0),  # preempted for an hour
    ([launched(), event("ended", 900.0), event("lost", HOUR)], 2.0, 1.0, 0.0),  # the first one who saw it
    ([{**event("launched", 0.0), "who": "r00-1"}], 1.0, 0.0, 0.0),  # a replica's word
    ([event("found", 0.0, executor="modal", usd_per_hour=4.0)], 1.0, 4.0, 4.0),
]


@pytest.mark.parametrize(("events", "hours", "usd", "rate"), TABLE)
def test_costs(events, hours, usd, rate):
    found = costs(report(*events), T + hours * HOUR)
    assert (found.usd, found.rate) == (pytest.approx(usd), pytest.approx(rate))


def test_bills_of_a_run_of_weeks_read_its_sessions_once():
    """Before: for each launch, in each tick: 10,000 launches took two seconds."""

    class Counted(tuple[SessionSummary, ...]):
        read = 0

        def __iter__(self):
            Counted.read += 1
            return super().__iter__()

    many = [launched(60.0 * n, attempt=n + 1) for n in range(50)]
    sessions = Counted(session(generation=n + 1, host=f"modal/r00.{n + 1}", ended=60.0 * n + 30) for n in range(50))
    found = costs(replace(report(*many), sessions=sessions), T + HOUR)
    assert len(found.bills) == 50 and Counted.read <= 3


def test_a_leave_record_ends_a_bill_that_nobody_closed():
    left = report(launched(), sessions=[session(ended=900.0, how="left")])
    assert costs(left, T + HOUR).usd == pytest.approx(1.0)
    lost = report(launched(), sessions=[session(ended=900.0, how="replaced")])
    assert costs(lost, T + HOUR).usd == pytest.approx(4.0)
    beat = Beat("r00", 1, 9, "left", 3, 0, 0.0, T + 1800.0, "modal/r00.1", 7)
    assert costs(report(launched(), sessions=[session()], beats={"r00": beat}), T + HOUR).usd == pytest.approx(2.0)


def test_a_leave_record_of_the_session_before_a_restart_ends_nothing():
    sessions = [session(ended=900.0, how="left"), session(generation=2)]
    assert costs(report(launched(), sessions=sessions), T + HOUR).usd == pytest.approx(4.0)
    elsewhere = [session(ended=900.0, how="left", host="modal/r00.2")]
    assert costs(report(launched(), sessions=elsewhere), T + HOUR).usd == pytest.approx(4.0)


NIGHT = 12 * HOUR
LEFT = Beat("r00", 1, 9, "left", 3, 0, 0.0, T + 1800.0, "modal/r00.1", 7)
KILLED = Beat("r00", 1, 9, "train", 3, 0, 0.0, T + 1800.0, "modal/r00.1", 7)
NIGHTS = [
    # written down in the morning                                                     last beat   usd
    ([event("ended", NIGHT)], LEFT, 2.0),  # before: $48, since the event came after the goodbye
    ([event("lost", NIGHT, ended_at=T + 1830.0)], None, 4.0 * 1830 / HOUR),
    ([event("lost", NIGHT, began_at=T + 900.0, ended_at=T + 1830.0)], LEFT, 4.0 * 930 / HOUR),
    ([event("pending", 1.0, first=True), event("ended", NIGHT, began_at=T + 30.0, ended_at=T + 930.0)], None, 1.0),
    ([event("lost", NIGHT, unseen=True)], KILLED, 2.0),
    ([event("lost", 2400.0)], KILLED, 4.0 * 2400 / HOUR),  # its supervisor saw it alive until then
    ([event("lost", NIGHT, unseen=True)], None, 48.0),  # never heard, no source tells: too much rather than too little
    ([], KILLED, 4.0 * (1800 + LEASE_S) / HOUR),
    ([event("lost", 900.0, began_at="x", ended_at=float("nan"))], None, 1.0),  # any writer may have put that there
]


@pytest.mark.parametrize(("events", "beat", "usd"), NIGHTS)
def test_a_night_in_which_nobody_looked_is_not_billed(events, beat, usd):
    found = report(launched(), *events, sessions=[session()] if beat else [], beats={"r00": beat} if beat else {})
    assert costs(found, T + 12.1 * HOUR).usd == pytest.approx(usd, rel=1e-6)


def test_a_claim_shows_a_machine_whose_beginning_was_not_seen():
    waited = [launched(), event("pending", 1.0, first=True)]
    late = SessionSummary("r00", 1, 7, "modal/r00.1", T + 900.0)
    assert costs(report(*waited, sessions=[late], beats={"r00": LEFT}), T + HOUR).usd == pytest.approx(1.0)
    assert not costs(report(*waited, sessions=[late]), T + HOUR).bills[0].pending


def test_hours_are_the_clock_s_and_gaps_do_not_count():
    events = [
        launched(), launched(slot="r01"), event("ended", HOUR), event("ended", 2 * HOUR, slot="r01"),
        launched(10 * HOUR, attempt=2), event("ended", 11 * HOUR, attempt=2),
    ]  # fmt: skip
    assert costs(report(*events), T + 20 * HOUR).hours == pytest.approx(3.0)


def test_sums_per_slot_and_per_executor():
    events = [launched(), launched(slot="r01", executor="hf-jobs", usd=2.0), launched(slot="r02", usd=None)]
    found = costs(report(*events), T + HOUR)
    assert costs_dict(found)["per_slot"] == pytest.approx({"r00": 4.0, "r01": 2.0, "r02": 0.0})
    assert costs_dict(found)["per_executor"] == pytest.approx({"hf-jobs": 2.0, "modal": 4.0})
    assert [b.slot for b in unpriced(found)] == ["r02"]
    assert json.loads(json.dumps(costs_dict(found)))["unknown_price"] == ["r02"]


def test_without_a_clock_it_is_as_late_as_the_newest_sign_of_life():
    beat = Beat("r00", 1, 9, "train", 3, 0, 0.0, T + 1800.0, "modal/r00.1", 7)
    assert costs(report(launched(), sessions=[session()], beats={"r00": beat})).usd == pytest.approx(2.0)


def dated(
    hours: float, skew_h: float, phase: str = "train", until_h: float = 0.0, steps_h: tuple[float, ...] = ()
) -> Report:
    """A launch of T, its heartbeat after `hours` by a clock that is `skew_h` ahead, and r01's outer steps."""
    beat = Beat("r00", 1, 9, phase, len(steps_h), 0, 0.0, T + (hours + skew_h) * HOUR, "modal/r00.1", 7)
    found = report(launched(), sessions=[session()], beats={"r00": beat})
    steps = [Step(t, T + at * HOUR, "r01-1", ("r01",), (), True) for t, at in enumerate(steps_h)]
    return replace(found, wanted=replace(found.wanted, until=T + until_h * HOUR if until_h else 0.0), steps=steps)


@pytest.mark.parametrize("hours", [0.2, 1.0, 10.0])
@pytest.mark.parametrize("skew_h", [-20.0, -2.1, -2.0, -1.5, -1.0, -0.6, 0.0, 0.5])
@pytest.mark.parametrize("known_by", [{"until_h": 0.3}, {"steps_h": (-0.01,)}], ids=["lease", "steps"])
def test_a_slow_clock_of_a_running_replica_ends_no_bill(hours: float, skew_h: float, known_by: dict) -> None:
    """Before: $0, and a budget without a limit, for a replica whose clock was two hours behind."""
    later = {name: hours + at if name == "until_h" else tuple(hours + x for x in at) for name, at in known_by.items()}
    found = costs(dated(hours, skew_h, **later), T + hours * HOUR)
    assert (found.usd, found.rate_soon, found.rented) == (pytest.approx(4.0 * hours), 4.0, True)


@pytest.mark.parametrize(
    ("dead", "usd"),
    [
        (dated(0.5, 0.0), 4.0 * 1.0),  # its heartbeat, and then a lease
        (dated(0.5, 0.0, until_h=0.8), 4.0 * 1.0),
        (dated(0.5, 0.0, until_h=1.2), 4.0 * 1.2),  # a supervisor wrote a later lease
        (dated(0.5, -2.0, until_h=0.8), 4.0 * 0.8),  # a wrong clock: the written lease alone
        (dated(0.5, -2.0), 4.0 * 12.0),  # no source tells: too much rather than too little
        (dated(0.2, 0.0, "left"), 4.0 * 0.2),
        (dated(0.2, -0.4, "left", until_h=0.6), 4.0 * 0.6),
        (dated(0.2, -0.4, "left"), 4.0 * 12.0),
        (dated(0.5, -0.4, "left", steps_h=(0.1, 0.45)), 4.0 * 0.45),
    ],
    ids=[
        "heartbeat",
        "sooner lease",
        "later lease",
        "slow, lease",
        "slow",
        "left",
        "left, slow, lease",
        "left, slow",
        "left, slow, steps",
    ],
)
def test_the_bill_of_a_dead_replica_ends_where_a_source_tells(dead: Report, usd: float) -> None:
    assert costs(dead, T + 12.0 * HOUR).usd == pytest.approx(usd)


# -------------------------------------------------------------------- what is allowed


def spent(usd: float = 0.0, rate: float = 0.0, hours: float = 0.0) -> Costs:
    """So much is spent, and so much goes on."""
    bill = Bill("r00", 1, "modal", rate, T, 0.0)
    before = Bill("r01", 1, "modal", usd, T, HOUR, ended=T + HOUR)
    return Costs((bill, before), hours)


NONE, TEN, DAY = Budget(), Budget(max_usd=10.0), Budget(max_hours=24.0)
ANY = Budget(allow_unknown_price=True)
END = END_S / HOUR
BOOT = BOOT_S / HOUR
REFUSALS = [
    # budget   spent                         prices          a word of the refusal
    (NONE, spent(1e6, 100.0), [4.0], ""),
    (NONE, spent(), [None], "--allow-unknown-price"),
    (ANY, spent(), [None], ""),
    (TEN, spent(), [4.0, None], "--allow-unknown-price"),
    (Budget(max_usd=10.0, allow_unknown_price=True), spent(), [4.0, None], ""),
    (TEN, spent(), [4.0], ""),
    (TEN, spent(), [11.0], ""),  # for nearly an hour
    (TEN, spent(), [11.0 / END], "max_usd = 10"),
    (TEN, spent(9.99), [4.0], "max_usd = 10"),
    (TEN, spent(10.0 - 4.0 * (END + BOOT) - 0.001), [4.0], ""),
    (TEN, spent(10.0 - 4.0 * (END + BOOT) + 0.001), [4.0], "until it has booted"),
    (TEN, spent(10.0 - 8.0 * END - 4.0 * BOOT + 0.001, 4.0), [4.0], "max_usd = 10"),  # the others must end too
    (TEN, spent(10.0), [0.0], ""),  # this machine
    (DAY, spent(1e6), [4.0], ""),
    (DAY, spent(hours=24.0 - END - 0.001), [0.0], ""),
    (DAY, spent(hours=24.0 - END + 0.001), [0.0], "max_hours = 24"),
]


@pytest.mark.parametrize(("budget", "so_far", "prices", "word"), REFUSALS)
def test_refusal(budget, so_far, prices, word):
    text = launch_refusal(budget, so_far, prices)
    assert word in text and bool(text) == bool(word)


OVERS = [
    (NONE, spent(1e6, 100.0, 1e6), ""),
    (TEN, spent(5.0, 4.0), ""),
    (TEN, spent(10.0 - 4.0 * END - 0.001, 4.0), ""),
    (TEN, spent(10.0 - 4.0 * END + 0.001, 4.0), "max_usd = 10"),
    (TEN, spent(12.0), "max_usd = 10"),
    (DAY, spent(1e6, 4.0, 23.0), ""),
    (DAY, spent(0.0, 0.0, 24.0), "max_hours = 24"),
]


@pytest.mark.parametrize(("budget", "so_far", "word"), OVERS)
def test_over(budget, so_far, word):
    text = over(budget, so_far)
    assert word in text and bool(text) == bool(word)


LEASES = [
    (NONE, spent(5.0, 4.0), None, T + LEASE_S),
    (TEN, spent(), None, T + LEASE_S),  # no replica runs yet
    (TEN, spent(0.0, 4.0), None, T + LEASE_S),
    (TEN, spent(9.0, 4.0), None, T + 900.0 - END_S),
    (TEN, spent(9.0, 4.0), 8.0, T + 450.0 - END_S),  # with one more
    (TEN, spent(11.0, 4.0), None, T),
    (DAY, spent(hours=23.9), None, T + 360.0 - END_S),
    (Budget(10.0, 24.0), spent(9.0, 4.0, 23.99), None, T),
]


def test_a_budget_reckons_with_those_that_wait_for_a_machine():
    waits = costs(report(launched(), event("pending", 1.0, first=True)), T + HOUR)
    assert (waits.usd, waits.rate, waits.rate_soon) == (0.0, 0.0, 4.0)
    assert lease(Budget(max_usd=1.0), waits, T) == pytest.approx(T + 900.0 - END_S)
    assert launch_refusal(Budget(max_usd=7.0 * END), waits, [4.0]) and not launch_refusal(
        Budget(max_usd=8.01 * END + 4.0 * BOOT), waits, [4.0]
    )


@pytest.mark.parametrize(("budget", "so_far", "rate", "until"), LEASES)
def test_lease(budget, so_far, rate, until):
    assert lease(budget, so_far, T, rate) == pytest.approx(until)


def test_a_replica_that_ends_when_told_does_not_pass_the_budget():
    """At every rate: from the moment that `over` speaks there is money for END_S."""
    for rate in (0.1, 4.0, 320.0):
        seconds = range(int(11.0 / rate * HOUR))
        at = bisect_left(seconds, True, key=lambda s: bool(over(TEN, spent(rate * s / HOUR, rate))))
        assert 0 < at < len(seconds) and rate * (at + END_S - 1) / HOUR <= 10.0


# -------------------------------------------------------------------- a log that is gone


def told(*events: dict, sessions=(), **spent_) -> Report:
    """A report whose newest control record has the bill."""
    return replace(report(*events, sessions=sessions), wanted=Wanted(spent=Spent(**spent_)))


LEASE = event("lease", 900.0)
LOST_LOGS = [
    # what the log still shows                    the record: usd, rate, of events   hours   usd
    ([launched(), LEASE], (1.0, 4.0, 1), 1.0, 4.0),  # all of it: the log counts alone
    ([launched(), event("ended", 450.0), LEASE], (1.0, 4.0, 2), 1.0, 0.5),  # also where it says that less was billed
    ([LEASE], (1.0, 4.0, 1), 1.0, 1.0),  # the launch is gone from it
    ([LEASE, launched(1800.0, attempt=2)], (1.0, 4.0, 1), 1.0, 3.0),  # and what came later counts on top
    ([launched()], (1.0, 4.0, 1), 1.0, 4.0),  # it may have gone on since, at that rate, until the lease was over
    ([], (1.0, 4.0, 1), 0.5, 2.0),
    ([], (1.0, 4.0, 1), 9.0, 3.0),
    ([], (1.0, 0.0, 1), 9.0, 1.0),
]


@pytest.mark.parametrize(("events", "record", "hours", "usd"), LOST_LOGS)
def test_what_was_spent_is_known_without_the_log(events, record, hours, usd):
    (known, rate, logged) = record
    found = costs(told(*events, usd=known, rate=rate, at=T + 900.0, until=T + 2700.0, logged=logged), T + hours * HOUR)
    assert found.usd == pytest.approx(usd) and json.loads(json.dumps(costs_dict(found)))["usd"] == pytest.approx(usd)


@pytest.mark.parametrize("events", [[], [LEASE]])
def test_money_of_boxes_hides_no_bill_whose_log_is_gone(events):
    """Launches of $8 are only in the record; boxes grow from $2 to $10, and each record follows from the last sum."""
    usd, budget = 8.0, Budget(max_usd=12.0)
    for boxes in (2.0, 5.0, 9.0, 10.0):
        beat = Beat("r00", 1, 1, "train", 0, 0, 0.5, T + 1000.0, box_usd=boxes)
        record = told(*events, usd=usd, at=T + 900.0, until=T + 2700.0, logged=4)
        found = costs(replace(record, beats={"r00": beat}), T + HOUR)
        assert (found.usd, found.unlogged, found.boxes) == pytest.approx((8.0 + boxes, 8.0, boxes))
        assert costs_dict(found)["usd"] == found.usd and f"{dollars(8.0 + boxes)} so far" in cost_line(found, Wanted())
        assert bool(over(budget, found)) == (8.0 + boxes > 12.0)
        usd = found.usd - found.boxes  # as limit.py writes it


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (Wanted(), "$3.00 so far, $0.00 per hour now"),
        (Wanted(max_hours=12.0), "$3.00 so far, 0.45 of 12 h, $0.00 per hour now"),
        (Wanted(max_usd=20.0, max_hours=12.0), "$3.00 of $20.00 so far, 0.45 of 12 h, $0.00 per hour now"),
    ],
)
def test_each_limit_stands_beside_what_is_used_of_it(wanted, text):
    """A limit in hours was told as "$3.00 of 12 h so far"."""
    assert cost_line(Costs(hours=0.45, boxes=3.0), wanted) == text


def test_hours_are_known_without_the_log_too():
    found = costs(told(LEASE, hours=20.0, rate=1.0, at=T + 900.0, until=T + 2700.0, logged=1), T + HOUR)
    assert found.hours == pytest.approx(20.0) and over(Budget(max_hours=20.0), found)


def test_a_session_of_which_nothing_tells_is_refused_and_not_free():
    gone = costs(report(sessions=[session(ended=900.0, how="left")]), T + HOUR)
    assert gone.usd == 0.0 and gone.untold == ("r00-1",)
    assert "r00-1" in launch_refusal(TEN, gone, [4.0]) and "--allow-unknown-price" in launch_refusal(TEN, gone, [4.0])
    assert not launch_refusal(NONE, gone, [4.0]) and not launch_refusal(Budget(10.0, 0.0, True), gone, [4.0])
    assert not costs(told(sessions=[session()], at=T, until=T + 1.0), T + HOUR).untold, "the record has it"
    assert not costs(report(launched(), sessions=[session()]), T + HOUR).untold
    assert not costs(report(sessions=[session(host="laptop")]), T + HOUR).untold, "not rented"
    assert not costs(report(sessions=[session(host="supervisor/r00.2")]), T + HOUR).untold, "it fenced the slot off"


def test_what_is_left_of_damaged_records_gets_no_new_lease():
    """A lease that reads on from there would go past the lost budget."""
    store, clock = MemoryStore(), SystemClock()
    write_control(store, clock, replicas=2, min_replicas=1, steps=9, max_usd=50.0)
    write_control(store, clock, until=1.0)
    store.delete([layout.control_key(0)])
    remains = replace(report(), damage="control/000000 has vanished", wanted=Wanted(replicas=2, records=2))
    limit = SpendLimit(store, clock, None, [])  # type: ignore[arg-type]
    with pytest.raises(RecordsLost):
        limit.carry_out(SpendVerdict(lease=NewLease(9.0, 1.0, Costs())), remains)
    assert len(store.list(layout.CONTROLS)) == 1


# -------------------------------------------------------------------- the lease, on the replica's side


def a_session(store: MemoryStore) -> ReplicaLife:
    return ReplicaLife(store, "r00", Timing(beat=0.01))


def wait_until(condition) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_replica_leaves_when_its_lease_is_over_and_not_before():
    store, clock = MemoryStore(), SystemClock()
    write_control(store, clock, replicas=1, min_replicas=1, steps=1, until=clock.wall() + 1000.0)
    alive = a_session(store)
    wait_until(lambda: alive.rv.members.wanted.until > 0)
    assert not alive.rv.is_leaving
    write_control(store, clock, until=clock.wall() - 1.0)
    wait_until(lambda: alive.rv.is_leaving)
    assert alive.why == "the budget's lease is over"
    alive.end()


def test_a_lease_that_was_renewed_holds_and_no_lease_means_no_end():
    store, clock = MemoryStore(), SystemClock()
    write_control(store, clock, replicas=1, min_replicas=1, steps=1, until=clock.wall() - 1.0)
    write_control(store, clock, until=clock.wall() + 1000.0)
    alive = a_session(store)
    wait_until(lambda: alive.rv.members.wanted.records == 2)
    write_control(store, clock, until=0.0)
    wait_until(lambda: alive.rv.members.wanted.records == 3)
    assert not alive.rv.is_leaving
    alive.end()


@pytest.mark.parametrize("wish", [{"max_usd": -1.0}, {"max_hours": float("nan")}, {"until": float("inf")}])
def test_a_budget_that_means_nothing_is_refused(wish):
    with pytest.raises(ValueError, match=next(iter(wish))):
        write_control(MemoryStore(), SystemClock(), **wish)


@pytest.mark.parametrize(
    ("usd", "words"),
    [
        (12.3, "$12.30"),
        (0, "$0.00"),
        (0.01, "$0.01"),
        (0.00314, "$0.0031"),
        (0.00099999, "$0.00100"),
        (1e-12, "$0.000000000"),
    ],
)
def test_less_than_a_cent_is_not_nothing(usd: float, words: str) -> None:
    """Before: "$0.00" for the cost of three replicas on the cheapest hardware."""
    assert dollars(usd) == words


def test_an_end_that_is_logged_before_the_begin_is_an_end() -> None:
    """The supervisor's own clock was set back. Before: billed as running for ever."""
    found = costs(report(launched(), event("ended", -1800.0)), T + 50 * HOUR)
    assert found.usd == 0.0


@pytest.mark.parametrize(
    ("events", "skew_h", "usd"),
    [([], 5.0, 4.0), ([event("ended", 1800.0)], -72.0, 2.0), ([], -72.0, 4.0)],
    ids=["ahead", "behind, and seen to end", "behind"],
)
def test_a_replica_s_wrong_clock_bills_no_hour_that_is_not_over(events, skew_h: float, usd: float) -> None:
    """Before: "it has run for 5.02 hours" after a minute; and nothing to pay for a clock that was behind."""
    beat = Beat("r00", 1, 9, "left", 3, 0, 0.0, T + skew_h * HOUR, "modal/r00.1", 7)
    found = costs(report(launched(), *events, sessions=[session()], beats={"r00": beat}), T + HOUR)
    assert found.usd == pytest.approx(usd) and found.hours <= 1.0


class JumpingClock(ManualClock):
    jump = 0.0

    def wall(self) -> float:
        return super().wall() + self.jump


@pytest.mark.parametrize("jump", [-3 * 86400.0, 0.0, 5 * HOUR])
def test_a_jump_of_the_wall_clock_neither_ends_nor_prolongs_a_replica_s_lease(jump: float) -> None:
    """Before: five hours ahead, and the replica left at once; three days behind, and it stayed for three days."""
    clock, life = JumpingClock(), ReplicaLife.__new__(ReplicaLife)
    life.clock, life._until, life._ends = clock, 0.0, 0.0
    life.rv = type("Rv", (), {})()  # type: ignore[assignment]
    life.rv.members = type("Members", (), {"wanted": Wanted(until=clock.wall() + 100.0)})()
    assert not life._is_lease_over()
    clock.jump = jump
    clock.sleep(99.0)
    assert not life._is_lease_over()
    clock.sleep(2.0)
    assert life._is_lease_over()
    life.rv.members.wanted = Wanted(until=clock.wall() + 100.0)
    assert not life._is_lease_over()
    life.rv.members.wanted = Wanted()
    assert not life._is_lease_over()


def kernel(clock: ManualClock, suspended_s: Callable[[], float] = lambda: 0.0) -> SimpleNamespace:
    """Linux's module `time`: the clock since boot has the seconds of suspensions, the monotonic one not."""
    clocks = {1: clock.now, 7: lambda: clock.now() + suspended_s()}
    return SimpleNamespace(
        time=clock.wall, monotonic=clock.now, CLOCK_MONOTONIC=1, CLOCK_BOOTTIME=7, clock_gettime=lambda n: clocks[n]()
    )


def test_a_suspension_of_the_machine_prolongs_no_launcher_s_lease(monkeypatch) -> None:
    """Before: the lease stood still with the machine, so the replica outlived its launcher by half an hour."""
    clock, suspended = JumpingClock(), [0.0]
    monkeypatch.setattr(container, "time", kernel(clock, lambda: suspended[0]))
    until = [clock.wall() + 200.0]
    word = LauncherWord(100.0, lambda: until[0])
    assert not word.is_over
    clock.jump = suspended[0] = HOUR
    until[0] += HOUR  # the launcher lives
    assert not word.is_over
    clock.jump = suspended[0] = 2 * HOUR
    assert word.is_over


def test_a_clock_that_is_set_right_prolongs_no_launcher_s_lease(monkeypatch) -> None:
    """An hour behind at the first look, then right: the replica outlived its launcher by an hour."""
    clock = JumpingClock()
    clock.jump = -HOUR
    monkeypatch.setattr(container, "time", kernel(clock))
    until = [ManualClock.wall(clock) + 200.0]
    word = LauncherWord(100.0, lambda: until[0])
    assert not word.is_over
    clock.jump = 0.0
    clock.sleep(50.0)
    until[0] += 50.0
    assert not word.is_over
    clock.sleep(190.0)
    assert not word.is_over
    clock.sleep(20.0)
    assert word.is_over


@pytest.mark.parametrize("jump", [-3 * 86400.0, 5 * HOUR])
def test_a_jump_of_the_wall_clock_neither_ends_nor_prolongs_a_launcher_s_lease(jump: float, monkeypatch) -> None:
    clock = JumpingClock()
    monkeypatch.setattr(container, "time", kernel(clock))
    until = clock.wall() + 200.0
    word = LauncherWord(100.0, lambda: until)
    assert not word.is_over
    clock.jump = jump
    clock.sleep(199.0)
    assert not word.is_over
    clock.sleep(2.0)
    assert word.is_over
