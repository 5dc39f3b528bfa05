"""The thread that beats: the faults it may survive, and that no replica trains without it.

a part fails, for any reason      ──▶ reported once; the other parts, and the next turn, go on
a part fails in every turn        ──▶ the session ends: HeartbeatLost at the next inner step, exit code 1
the thread ends                   ──▶ the same; a replica that hangs in an inner step is ended by force

a request never comes back        ──▶ a second thread ends the process
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diloco.outer.make import make_diloco
from diloco.outer.managers.manager import StoreManager
from diloco.outer.optimizer import Nesterov, OuterState
from diloco.process import exitcodes, processes, session
from diloco.process.session import Session
from diloco.replica.exits import end_session
from diloco.runlog.sessions import versions_in
from rendezvous import layout
from rendezvous.agreement.membership import CONTROL_BEATS, Membership, claim, read_beat, write_control
from rendezvous.agreement.rules import Rules, Timing
from rendezvous.background import TRIES, Parts, Worker
from rendezvous.clock import SystemClock
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.errors import HeartbeatLost, RendezvousError, StoreUnclear
from rendezvous.records.records import Beat, Leave
from rendezvous.stores.memory import MemoryStore
from tests.support.fakes import Fault, FaultyStore, ManualClock

LIMIT = 120.0  # seconds after which a test has failed
FAST = Timing(beat=0.01)
FOREIGN = Beat("r01", 1, 5, "train", 0, 0, 0.0, 9.0).encode().replace(b'"generation":1', b'"generation":"x"')


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def run(**faults: Any) -> FaultyStore:
    store = FaultyStore(MemoryStore(), [Fault(**faults)] if faults else [])
    write_control(store.inner, SystemClock(), replicas=2, min_replicas=1, steps=3)
    return store


def beats(store: FaultyStore) -> int:
    beat = read_beat(store.inner, "r00")
    return beat.n if beat else 0


class Told:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def texts(self, kind: str) -> list[str]:
        return [f["text"] for _, f in self.events if f.get("kind") == kind]


# ---------------------------------------------------------------------- one tick


def member(store: FaultyStore, told: Told) -> Membership:
    members = Membership(store, ManualClock(), "r00", 0, FAST, emit=told)
    members.claim(store)
    return members


def test_a_beat_cuts_a_note_and_leaves_the_status_alone() -> None:
    """Before: the beating thread wrote the cut note back, over one that the training thread set meanwhile."""
    members = member(store := run(), Told())
    members.status.note = "note" * 1000
    members.tick()
    beat = read_beat(store.inner, "r00")
    assert beat and len(beat.note) < 4000 and members.status.note == "note" * 1000


PARTS = {  # part -> (verb, key) of its first request, and what the others still do
    "beat": ("put", "alive/r00"),
    "look for successor": ("get", "replicas/r00"),
    "look for commit": ("get", "commit"),
    "look around": ("get", "alive/r01"),
    "look for control": ("get", "control"),
}


def test_a_slow_beat_does_not_overwrite_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: `diloco stop` reported a replica that had left as one that was gone without a leave record."""
    members = member(store := run(), Told())
    leaver = threading.Thread(target=members.write_leave_beat)
    put = store.put

    def late_put(key: str, body: bytes) -> None:
        if threading.current_thread() is not leaver:
            leaver.start()
            leaver.join(0.1)  # in that time it writes the last beat, or it waits for this one
        put(key, body)

    monkeypatch.setattr(store, "put", late_put)
    members.tick()
    leaver.join()
    beat = read_beat(store.inner, "r00")
    assert beat and (beat.phase, beat.n) == ("left", 2)


@pytest.mark.parametrize("error", [TypeError("not this"), MemoryError(), RecursionError("deep"), OSError("bad disk")])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_tick_that_fails_hinders_no_other(part: str, error: Exception) -> None:
    store, told = run(), Told()
    members = member(store, told)
    verb, key = PARTS[part]
    store.faults = [Fault(verb, key, error=error, times=10**6)]
    write_control(store.inner, SystemClock(), stop=True)
    claim(store.inner, SystemClock(), "r00")
    store.inner.put(layout.commit_key(0), b"{}")
    store.inner.put(layout.beat_key("r01"), Beat("r01", 1, 5, "train", 0, 0, 0.0, 9.0).encode())
    for _ in range(3):
        members.tick()
    done = {
        "beat": store.inner.get(layout.beat_key("r00")) is not None,
        "look for successor": members.fenced_by == 2,
        "look for commit": members.decided == 0,
        "look around": "r01" in members.peers,
        "look for control": members.wanted.stop,
    }
    assert done == {name: name != part for name in PARTS}
    (text,) = told.texts("heartbeat")
    assert f"'{part}' failed: {type(error).__name__}" in text
    store.faults = []
    members.tick()
    assert members.fenced_by == 2 and members.wanted.stop, "it was tried again"


def test_a_foreign_beat_stops_nobody_from_hearing(clock: ManualClock) -> None:
    """Seen before: TypeError out of `tick`, and the thread was gone."""
    store, told = run(), Told()
    members = member(store, told)
    store.inner.put(layout.beat_key("r01"), FOREIGN)
    members.tick()
    write_control(store.inner, clock, stop=True)
    members.clock.sleep(CONTROL_BEATS * FAST.beat)
    members.tick()
    assert members.wanted.stop and "r01" not in members.peers


def test_a_beat_that_turns_foreign_grows_silent(clock: ManualClock) -> None:
    store = run()
    members = Membership(store, clock, "r00", 0, FAST)
    members.claim(store)
    for n in (1, 2):
        store.inner.put(layout.beat_key("r01"), Beat("r01", 1, n, "train", 0, 0, 0.0, 9.0).encode())
        members.tick()
        clock.sleep(0.01)
    store.inner.put(layout.beat_key("r01"), FOREIGN)
    for _ in range(3):
        members.tick()
        clock.sleep(0.01)
    assert members.peers["r01"].silent == pytest.approx(0.03) and members.peers["r01"].is_dead(0.03)


def test_a_store_that_refuses_is_no_failure_however_long() -> None:
    store, told = run(), Told()
    members = member(store, told)
    store.faults = [Fault("get", error=StoreUnclear("no answer"), times=10**6)]
    for _ in range(3 * TRIES):
        members.tick()
    assert told.events == []


def test_a_part_that_cannot_go_on_ends_the_heartbeat_with_words() -> None:
    store, told = run(), Told()
    members = member(store, told)
    store.faults = [Fault("get", "control", error=MemoryError("no room"), times=10**6)]
    for _ in range(TRIES - 1):
        members.tick()
    with pytest.raises(HeartbeatLost, match=r"'look for control' .* 20 times in a row, last with MemoryError: no room"):
        members.tick()


def test_failures_count_in_a_row_only() -> None:
    told, parts, luck = Told(), Parts(), iter([False, True] * 2 * TRIES)

    def part() -> None:
        if next(luck):
            raise KeyError("now and then")

    parts = Parts(told)
    for _ in range(4 * TRIES):
        parts.run(part)
    assert len(told.texts("heartbeat")) == 1, "told once, not each time"


# ---------------------------------------------------------------------- the thread of a session


def gone(store: MemoryStore | FaultyStore, monkeypatch: pytest.MonkeyPatch) -> tuple[Session, list[int]]:
    """A session, and the exit codes by force instead of an end."""
    codes = list[int]()
    monkeypatch.setattr(session.os, "_exit", codes.append)
    return Session(store, "r00", FAST), codes


@pytest.mark.parametrize(("told", "count"), [(None, 3), ("1", None), ("2", 2)])
def test_a_session_has_the_threads_that_it_was_told(
    told: str | None, count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if told is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    monkeypatch.setattr(session.os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    one, _ = gone(run(), monkeypatch)
    one.end()
    assert getattr(one.rv._threads, "count", None) == count


def test_the_beat_goes_on_and_the_lease_holds_beside_a_foreign_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = run(), SystemClock()
    store.inner.put(layout.beat_key("r01"), FOREIGN)
    alive, codes = gone(store, monkeypatch)
    until(lambda: beats(store) > 3)
    write_control(store.inner, clock, until=clock.wall() - 1.0)
    until(lambda: alive.rv.is_leaving)
    assert alive.why == "the budget's lease is over" and codes == []
    alive.end()


@pytest.mark.parametrize("part", ["_parent_alive", "flush"])
def test_a_part_of_the_thread_that_fails_does_not_stop_the_beat(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = run()
    alive, _ = gone(store, monkeypatch)

    def fails() -> bool:
        raise ValueError("unforeseen")

    monkeypatch.setattr(alive, part, fails)
    alive.flush_soon()
    n = beats(store)
    until(lambda: beats(store) > n + 3)
    alive._ended.set()


@pytest.mark.parametrize("error", [MemoryError("no room"), SystemExit(3)])
def test_no_replica_trains_without_a_heartbeat(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen before: the thread died of the first, and training went on to its end, deaf to a stop."""
    store = run()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(session.os, "_exit", lambda code: None)
    manager = StoreManager(store, "r00", replicas=1, min_replicas=1, steps=10**6, timing=FAST)  # type: ignore[arg-type]
    steps = 0
    end = time.monotonic() + LIMIT
    with (
        pytest.raises(HeartbeatLost, match=f"{type(error).__name__}|3|no room"),
        make_diloco(model, optimizer, manager, sync_every=10**6),
    ):
        store.faults = [Fault("get", "control", error=error, times=10**6)]  # type: ignore[arg-type]
        while time.monotonic() < end:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            steps += 1
    assert steps < 10**6
    assert end_session(manager.session, HeartbeatLost("x")) == exitcodes.CRASHED, "a supervisor starts the slot again"


def test_a_replica_that_hangs_in_an_inner_step_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ORPHAN_GRACE_S", 0.05)
    store = run()
    _, codes = gone(store, monkeypatch)
    store.faults = [Fault("get", "control", error=SystemExit(3), times=10**6)]  # type: ignore[arg-type]
    until(lambda: codes)
    assert codes == [exitcodes.CRASHED]


@pytest.mark.parametrize("who", ["launcher", "budget"])
def test_a_replica_alone_may_end_its_inner_step_or_says_what_is_lost(
    who: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: 40 s after its launcher was gone an inner step of 65 s ended without a word."""
    codes, store, clock = list[int](), run(), ManualClock()
    monkeypatch.setattr(session.os, "_exit", codes.append)
    alive = Session(store, "r00", FAST, clock=clock, parent_alive=lambda: who != "launcher")
    alive._ended.set()  # its thread; the test takes its turns
    alive._thread.join()
    if who == "budget":
        alive.rv.members.wanted = replace(alive.rv.members.wanted, until=clock.wall())
    alive.watchdog.resume()
    clock.sleep(65.0)
    alive.watchdog.rest()
    alive.rv.members.status.enter_phase("train", 3)
    alive.rv.members.status.inner = 2
    alive._look_after_lease()
    clock.sleep(60.0)
    alive._look_after_lease()
    assert (codes == []) == (who == "launcher"), "money has a limit"
    alive.rv.members.status.inner = 3  # its inner step has ended; now it uploads
    clock.sleep(50.0)
    alive._look_after_lease()
    assert (codes == []) == (who == "launcher")
    clock.sleep(300.0)
    alive._look_after_lease()
    assert (
        set(codes) == {exitcodes.LEFT} and "inner steps and the one that it was in are lost" in capsys.readouterr().err
    )


def test_a_wait_for_others_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only inner steps: every pause of the engine asks."""
    store = run()
    alive, _ = gone(store, monkeypatch)
    alive.rv.members.heartbeat_lost = MemoryError("no room")
    with pytest.raises(HeartbeatLost, match="no room"):
        alive.rv.store.before_pause()
    alive._ended.set()


# ---------------------------------------------------------------------- work in the background


def fails(error: BaseException) -> Callable[[], None]:
    def job() -> None:
        raise error

    return job


def in_time(act: Callable[[], None]) -> None:
    """`act` in a thread that must come back; raises what it raised."""
    errors = list[BaseException]()

    def run() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive(), "it blocks"
    if errors:
        raise errors[0]


def test_a_background_job_that_fails_is_told_and_others_go_on() -> None:
    """Seen before: the thread was gone, and the fourth `submit` waited for ever."""
    told, done = Told(), list[int]()
    worker = Worker(told)
    for i in range(8):
        in_time(lambda: worker.submit(fails(KeyError("odd"))))
        in_time(lambda i=i: worker.submit(lambda: done.append(i)))
    in_time(worker.drain)
    assert done == list(range(8))
    assert len(told.texts("background")) == 8 and "KeyError: 'odd'" in told.texts("background")[0]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_background_thread_that_ends_is_never_waited_for(error: BaseException) -> None:
    worker = Worker()
    worker.submit(fails(error))
    with pytest.raises(RendezvousError, match=f"has ended .{type(error).__name__}"):
        for _ in range(5):
            in_time(lambda: worker.submit(lambda: None))
    with pytest.raises(RendezvousError, match="run the same command again"):
        in_time(worker.drain)


def test_a_wait_for_room_ends_with_the_thread() -> None:
    worker, go = Worker(), threading.Event()

    def first() -> None:
        assert go.wait(LIMIT)
        raise SystemExit

    worker.submit(first)
    worker.submit(lambda: None)
    worker.submit(lambda: None)
    threading.Timer(0.05, go.set).start()
    with pytest.raises(RendezvousError, match="has ended"):
        in_time(lambda: worker.submit(lambda: None))


def test_background_jobs_run_in_order_and_a_third_one_waits() -> None:
    worker, go, done = Worker(), threading.Event(), list[int]()
    worker.submit(lambda: assert_true(go.wait(LIMIT)))
    for i in range(2):
        worker.submit(lambda i=i: done.append(i))
    waits = threading.Thread(target=lambda: worker.submit(lambda: done.append(2)), daemon=True)
    waits.start()
    waits.join(0.05)
    assert waits.is_alive() and done == []
    go.set()
    waits.join(LIMIT)
    in_time(worker.drain)
    assert done == [0, 1, 2]


def assert_true(fact: object) -> None:
    assert fact


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


# ---------------------------------------------------------------------- a run that is shortened


def test_a_replica_that_hears_late_that_the_run_is_shorter_ends_as_one_that_is_done() -> None:
    """It is alone in a step beyond the end. Before, it waited there for a quorum until give_up, and then failed."""
    store = run()
    write_control(store, SystemClock(), min_replicas=2, steps=9)
    model = nn.Linear(4, 4)
    manager = StoreManager(store, "r00", timing=FAST)
    other = Rendezvous(store, SystemClock(), "r01", Rules(sync_every=2), FAST)
    other.claim()

    def train_once_and_shorten() -> None:
        state = OuterState([torch.zeros(20)], [Nesterov(nn.Parameter(torch.zeros(20)), lr=0.7, momentum=0.9)])
        until(lambda: manager.session.rv.members.status.phase in ("train", "wait"))
        other.join(state)
        other.offer(np.ones(20, np.float32), 2)
        other.settle()
        until(lambda: manager.session.rv.step == 1 and manager.session.rv.members.status.phase == "wait")
        write_control(store, SystemClock(), steps=1)

    thread = threading.Thread(target=train_once_and_shorten, daemon=True)
    thread.start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_diloco(model, optimizer, manager, sync_every=2) as outer:
        for _ in range(8):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
    thread.join(LIMIT)
    assert (manager.done, manager.left, outer.committed()) == (True, False, 1)
    left = store.get(layout.leave_key("r00", 1))
    assert left is not None and Leave.decode(left).reason == "done"


def test_a_turn_that_never_comes_back_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount that stalls held the heartbeat's thread for ever, and with it the watch over lease and budget."""
    codes, held, asked = list[int](), threading.Event(), threading.Event()

    class Stalls(MemoryStore):
        def put(self, key: str, body: Any) -> None:
            if key.startswith("alive/") and held.is_set():
                asked.set()
                threading.Event().wait(LIMIT if not codes else 0.01)
            super().put(key, body)

    monkeypatch.setattr(session.os, "_exit", codes.append)
    monkeypatch.setattr(session.TurnWatch.__init__, "__defaults__", (0.5,))
    store = Stalls()
    write_control(store, SystemClock(), replicas=1, min_replicas=1, steps=3)
    one = Session(store, "r00", FAST)
    held.set()
    assert asked.wait(LIMIT)
    until(lambda: codes)
    assert codes[0] == exitcodes.HUNG
    one.end()


def test_a_turn_counts_only_what_its_observer_was_awake_for() -> None:
    watch = session.TurnWatch(10.0)
    assert not watch.has_overstayed(100.0)  # no turn is under way
    with watch:
        assert not watch.has_overstayed(6.0)
        assert watch.has_overstayed(6.0)
    with watch:
        assert not watch.has_overstayed(6.0)


def test_a_slots_next_session_goes_on_with_the_dollars_of_its_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = run()
    first, _ = gone(store, monkeypatch)
    session.SessionHost(first).rented(1800.0, 0.5)
    session.SessionHost(first, box_usd_per_hour=2.0).rented(1800.0, None)
    session.SessionHost(first).rented(1800.0, None)  # of unknown price
    first.rv.members.write_leave_beat()
    first.end()
    second, _ = gone(store, monkeypatch)
    second.end()
    assert second.rv.members.status.box_usd == first.rv.members.status.box_usd == 1.25


def test_a_beat_is_read_whatever_its_note(clock: ManualClock) -> None:
    """A leader's reasons name each slot that it waits for, and a reward's error is the user's own text."""
    store = run()
    mine = member(store, Told())
    for note in ("r100 should offer in 12.3 s; " * 400, "\ud800", ""):
        mine.status.note = note
        mine._beat()
        beat = read_beat(store, mine.slot)
        assert beat is not None and beat.n == mine._beats and len(beat.note) <= 1000


@pytest.mark.parametrize(
    ("metadata", "trl"),
    [(None, ""), ("", ""), ("Name: TRL\nVersion: 9.9.9+cpu\n", "9.9.9")],
    ids=["without metadata", "without a version", "a version of its own"],
)
def test_a_session_names_the_library_that_it_imports(
    metadata: str | None, trl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a folder that pip had left incomplete ended each session at its claim; of two versions, that of the
    other folder was told."""
    installed = versions_in(processes.library_versions())
    (tmp_path / "trl-9.9.9.dist-info").mkdir()
    if metadata is not None:
        (tmp_path / "trl-9.9.9.dist-info/METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert versions_in(processes.library_versions()) == {**installed, **({"trl": trl} if trl else {})}
