"""Objects that this run did not write, and registers that are gone: passed over, or refused with words.

    random JSON ──▶ every record class          a record that encodes to itself, or WireError
                ──▶ every free register          the run goes on, a stop is heard
                ──▶ log/                         counted and passed over
    a register is deleted ──▶ control, commit    no replica joins, no wish is written, no step is closed anew

Not promised: records that are well-formed and lie; a run key is for those.
"""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco.process.session import Session
from diloco.run.config import RunConfig
from diloco.run.founding import open_run
from diloco.run.library import agree_on_run, ensure_slot
from diloco.run.record import ModelRecord, RunRecord
from diloco.runlog.reader import read_report
from rendezvous import layout
from rendezvous.agreement.membership import CONTROL_BEATS, read_control, write_control
from rendezvous.agreement.rules import Timing
from rendezvous.clock import SystemClock
from rendezvous.errors import ChainBroken, Fenced, RecordsLost
from rendezvous.records.records import Beat, Control, Record, WireError
from rendezvous.stores.memory import MemoryStore
from tests.rendezvous.test_engine import TIMING, Seat, bucket, pair, together
from tests.rendezvous.test_records import RECORDS
from tests.support.examples import examples
from tests.support.fakes import Fault, FaultyStore, ManualClock

KINDS = [*map(type, RECORDS), RunRecord, ModelRecord]
NUMBERS = st.sampled_from([0, -1, 1, 1.5, 10**400, 1e308, -(1 << 63), 1 << 64, True])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | NUMBERS | st.just("\ud800")
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(), v, max_size=4))
CALM = settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))


def right_or_refused(kind: type[Record], body: bytes) -> None:
    try:
        record = kind.decode(body)
    except WireError:
        return
    assert kind.decode(record.encode()) == record


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
@CALM
@given(value=VALUES)
def test_random_json_is_a_record_or_a_wire_error(kind: type[Record], value: Any) -> None:
    right_or_refused(kind, json.dumps(value).encode())
    right_or_refused(kind, json.dumps({"kind": kind.kind, "wire": 2, "x": value}).encode())


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.kind)
@CALM
@given(data=st.data())
def test_a_record_with_any_field_changed_is_right_or_refused(record: Record, data: st.DataObject) -> None:
    raw = json.loads(record.encode())
    name = data.draw(st.sampled_from(sorted(raw)))
    right_or_refused(type(record), json.dumps({**raw, name: data.draw(VALUES)}).encode())


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_depth_size_and_spelling_are_bounded(kind: type[Record]) -> None:
    head = json.dumps({"kind": kind.kind, "wire": 2})[:-1]
    for body in (
        b"[" * 100_000, (head + ',"x":' + "[" * 900 + "]" * 900 + "}").encode(), b"1" * 5000, b"null", b'"x"',
        (head + ',"kind":"beat"}').encode(), head.encode("utf-16"), (head + "}").encode() + b" " * kind.most,
    ):  # fmt: skip
        with pytest.raises(WireError):
            kind.decode(body)


def test_a_big_object_is_refused_without_being_parsed() -> None:
    body = b'{"kind":"beat","x":"' + b"y" * (64 << 20) + b'"}'
    began = time.process_time()
    with pytest.raises(WireError, match="bytes; at most 16384 are allowed"):
        Beat.decode(body)
    assert time.process_time() - began < 0.5


# ---------------------------------------------------------------------- a run among garbage

ODD = [b"", b"{}", b"null", b"[1", b"\xff", b"[" * 5000, b'{"kind":"claim"}', b'{"wire":2,"kind":7}', b"1e999"]


def litter(store: MemoryStore, step: int, seed: int) -> None:
    """Garbage in registers that do not exist yet."""
    pick = random.Random(seed)
    keys = [layout.offer_key(step, f"r0{i}", pick.randrange(2)) for i in range(3)]
    keys += [layout.claim_key("r02", 2), layout.control_key(read_control(store).records), layout.leave_key("r01", 1)]
    for key in [*keys, layout.mean_key(step, 0), layout.snapshot_key(2 * step + 2), layout.snapshot_key(step + 100)]:
        if store.get(key) is None:
            store.put(key, pick.choice(ODD))
    store.put(layout.beat_key("r02"), pick.choice(ODD))
    store.put("snapshots/x/manifest.json", b"?")


@pytest.mark.parametrize("seed", range(8))
def test_a_run_of_three_goes_on_among_random_json_and_hears_a_stop(seed: int) -> None:
    clock = ManualClock()
    faulty = bucket(clock, replicas=3, steps=6)
    seats = [Seat(faulty, f"r0{i}", clock).join() for i in range(3)]
    for step in range(4):
        litter(faulty.inner, step, seed)  # type: ignore[arg-type]
        for seat in seats:
            seat.rv.members.tick()
        commit = together(*seats)
        assert [o.slot for o in commit.fresh_offers] == ["r00", "r01", "r02"]
        assert len({seat.state.theta.tobytes() for seat in seats}) == 1
    again = Seat(faulty, "r02", clock).join()
    assert again.rv.generation == 3 and again.state.theta.tobytes() == seats[0].state.theta.tobytes()
    until = write_control(faulty, clock, stop=True, until=clock.wall() + 5).until
    clock.sleep(CONTROL_BEATS * TIMING.beat)
    for seat in [*seats[:2], again]:
        seat.rv.members.tick()
        assert seat.rv.is_leaving and seat.rv.wanted.until == until
        assert seat.rv.wanted.min_replicas == 2


# ---------------------------------------------------------------------- logs

LINES = [
    b"{}", b"null", b"[]", b'{"at": 1', b'{"at":"x","event":"step"}', b'{"at":1,"event":"step","step":"3"}',
    b'{"at":1,"event":"step"}', b'{"at":1,"event":"lost","attempt":"2"}', b"\xff\xfe", b"[" * 5000,
    b'{"at":1,"event":["x"]}', b'{"at":1,"event":"step","step":0,"reward":"high"}',
]  # fmt: skip


def test_foreign_objects_and_lines_in_the_log_are_counted_and_passed_over() -> None:
    """Seen at decbfac: `read_report`, with which every command begins, raised for 8 of these 14."""
    from executors.supervision.money.bills import costs
    from executors.supervision.slots.slot_state import past

    clock = ManualClock()
    store, a, b = pair(clock)
    together(a, b)
    good = b'{"at":5.0,"event":"joined","step":0}'
    store.put(layout.log_key("r00", 1, 0), b"\n".join([*LINES, good]))
    store.put("log/.DS_Store", b"\0")
    store.put("log/r00-x/000000.jsonl", good)
    launched = b'{"at":1,"event":"launched","slot":"r00","attempt":1,"handle":{"slot":7}}'
    store.put(
        layout.log_key("supervisor", 1, 0), launched + b"\n" + b'{"at":2,"event":"lost","slot":"r00","state":"X"}'
    )
    report = read_report(store)
    assert report.passed_over == len(LINES) + 2 and len(report.of_kind("joined")) == 1
    assert past(report.events)["r00"].open == () and costs(report).usd == 0


# ---------------------------------------------------------------------- registers that are gone


def test_without_its_first_control_record_nobody_joins_a_run() -> None:
    """Seen at decbfac: quorum 1 and no budget, without a word."""
    clock = ManualClock()
    store, a, b = pair(clock)
    together(a, b)
    store.inner.delete([layout.control_key(0)])
    for join in (
        lambda: Session(store, "r02", Timing()),
        lambda: ensure_slot(store, clock, "r02", replicas=3, min_replicas=1, steps=9),
        lambda: write_control(store, clock, stop=True),
    ):
        with pytest.raises(RecordsLost, match=r"control/000000.json has vanished.*Restore the object"):
            join()
    assert store.inner.get(layout.control_key(0)) is None and store.inner.get(layout.claim_key("r02", 1)) is None
    a.rv.members.tick()
    assert a.rv.wanted.min_replicas == 2 and together(a, b).m == 2, "who has read it keeps it"


def test_a_gap_in_the_control_records_is_refused() -> None:
    store, clock = MemoryStore(), SystemClock()
    write_control(store, clock, replicas=2, min_replicas=2, steps=3)
    for usd in (5.0, 6.0):
        write_control(store, clock, max_usd=usd)
    store.delete([layout.control_key(1)])
    with pytest.raises(RecordsLost, match=r"control/000001.json has vanished, though control/000002.json is there"):
        write_control(store, clock, stop=True)


def test_desired_states_that_were_written_while_another_was_read_are_no_gap() -> None:
    """Red in the simulator (7600269): two operators; RecordsLost: control/000001.json has vanished."""
    clock = SystemClock()
    store = FaultyStore(MemoryStore())

    def two_wishes() -> None:
        for usd in (5.0, 6.0):
            write_control(store.inner, clock, max_usd=usd)

    write_control(store, clock, replicas=2, min_replicas=2, steps=3)
    store.faults = [Fault("list", layout.CONTROLS, error=None, before=two_wishes)]
    assert write_control(store, clock, stop=True).records == 4


def test_a_commit_that_vanished_is_never_written_anew() -> None:
    clock = ManualClock()
    store, a, b = pair(clock, m=1)
    for _ in range(2):
        together(a, b)
    store.inner.delete([layout.commit_key(0), layout.snapshot_key(1), layout.snapshot_key(2)])
    with pytest.raises(ChainBroken, match="commit 0 is missing, though commit 1 is there"):
        Seat(store, "r01", clock).join()
    assert store.inner.get(layout.commit_key(0)) is None


@pytest.mark.parametrize("odd", [*ODD, b'{"wire":2,"kind":"control","n":0}', Control(1, "n", 0.0).encode()])
def test_garbage_in_the_place_of_the_first_control_record_ends_its_readers(odd: bytes) -> None:
    """Seen at decbfac: WireError, or RecursionError, without advice.  Passed over like other garbage it would be
    quorum 1 and no budget."""
    clock = ManualClock()
    store, a, b = pair(clock, steps=9)
    together(a, b)
    store.inner.put(layout.control_key(0), odd)
    write_down = lambda: write_control(store, clock, stop=True)  # noqa: E731
    for begin in (lambda: Session(store, "r02", Timing()), lambda: read_control(store), write_down):
        with pytest.raises(RecordsLost, match=r"control/000000.json is not a control record.*Restore the object"):
            begin()
    assert store.inner.get(layout.claim_key("r02", 1)) is None and store.inner.get(layout.control_key(1)) is None
    a.rv.members.tick()
    assert together(a, b).m == 2, "who has read it goes on by it"


@pytest.mark.parametrize("keep", ["-5 GB\n", "5 GB\n", "\x1b[31m5 GB", "many", "", "1e400", "5 XB"])
def test_a_control_record_whose_keep_is_no_size_is_skipped(keep: str) -> None:
    """It ended `verify` and `gc`, and its text was printed as it is."""
    store, clock = MemoryStore(), ManualClock()
    write_control(store, clock, replicas=3, steps=9, min_replicas=2)
    write_control(store, clock, keep="20 GB")
    raw = json.loads(store.get(layout.control_key(1)) or b"")
    store.put(layout.control_key(2), json.dumps({**raw, "n": 2, "keep": keep}).encode())
    found = read_control(store)
    assert (found.keep, found.records) == ("20 GB", 3)


def test_garbage_that_stood_there_before_the_run_ends_its_founder() -> None:
    store, clock = MemoryStore(), ManualClock()
    store.put(layout.control_key(0), b"{}")
    with pytest.raises(RecordsLost, match="If the run never had one, delete the object"):
        ensure_slot(store, clock, "r00", replicas=2, min_replicas=2, steps=3)


def raised_quorum(clock: ManualClock) -> tuple[FaultyStore, list[Seat]]:
    """Three replicas; control/000001 raises m from 1 to 3 before they take two steps."""
    store = bucket(clock, replicas=3, m=1, steps=9)
    write_control(store, clock, min_replicas=3)
    seats = [Seat(store, f"r0{i}", clock).join() for i in range(3)]
    assert [together(*seats).m for _ in range(2)] == [3, 3]
    return store, seats


def test_no_replica_joins_a_run_whose_commits_had_a_higher_quorum_than_its_control_records() -> None:
    """Seen at decbfac: garbage in any control record was a WireError in every replica.  Now that it is passed over, the
    next session would close steps alone, with m = 1."""
    clock = ManualClock()
    store, _ = raised_quorum(clock)
    store.inner.put(layout.control_key(1), b"garbage")
    with pytest.raises(RecordsLost, match=r"commit 1 needed min_replicas = 3.*no record asks for more.*Restore"):
        Seat(store, "r02", clock).join()


def test_no_replica_closes_a_step_below_the_quorum_of_a_control_record() -> None:
    clock = ManualClock()
    store, (a, *_) = raised_quorum(clock)
    store.inner.put(layout.control_key(1), b"garbage")
    a.rv.members.wanted = read_control(store)
    a.offer()
    with pytest.raises(RecordsLost, match="no replica joins or closes a step"):
        a.rv.settle()
    assert store.inner.get(layout.commit_key(2)) is None


def test_a_quorum_that_the_operator_lowered_is_a_lower_quorum() -> None:
    clock = ManualClock()
    store, (a, b, _) = raised_quorum(clock)
    store.inner.put(layout.control_key(2), b"garbage")
    write_control(store, clock, min_replicas=2)
    for seat in (a, b):
        seat.rv.members.tick()
    assert together(a, b).m == 2
    again = Seat(store, "r02", clock).join()
    assert again.state.theta.tobytes() == a.state.theta.tobytes() and together(a, b, again).m == 2


CONFIG = {
    "name": "x", "outer": {"sync_every": 2}, "fleet": {"replicas": 2, "steps": 3},
    "inner": {"loop": "supervised", "model": "tiny", "data": {"text": "text.txt"}},
}  # fmt: skip


@pytest.mark.parametrize(
    "kept", [layout.control_key(0), layout.claim_key("r00", 1), layout.commit_key(0), layout.snapshot_key(0)]
)
def test_no_run_is_founded_over_the_registers_of_one_whose_run_json_is_gone(kept: str, tmp_path: Path) -> None:
    """Seen at decbfac: a new run.json was written over all four."""
    (tmp_path / "text.txt").write_text("1 2 3")
    config, url = RunConfig.from_dict(CONFIG, tmp_path), str(tmp_path / "run")
    store = open_run(config, url, SystemClock()).store
    store.put(kept, store.get(layout.control_key(0)) or b"")
    store.delete([key for key in store.list("") if key != kept])
    with pytest.raises(RecordsLost, match=rf"run.json has vanished, though {kept} is there.*use another URL"):
        open_run(config, url, SystemClock())
    assert store.get(layout.RUN) is None


def test_a_library_loop_founds_no_run_below_committed_steps() -> None:
    store, clock = MemoryStore(), ManualClock()
    write_control(store, clock, replicas=2, min_replicas=2, steps=3)  # comes before run.json here
    outer, parameters = {"sync_every": 2, "codec": "none"}, [["w", [3], "float32"]]
    agree_on_run(store, clock, outer, parameters)
    assert agree_on_run(store, clock, outer, parameters).codec == "none"
    store.put(layout.commit_key(0), b"x")
    store.delete([layout.RUN])
    with pytest.raises(RecordsLost, match=r"run.json has vanished, though steps/\S+ is there"):
        agree_on_run(store, clock, outer, parameters)


def test_a_session_with_the_number_of_a_lost_claim_ends_by_the_chain_s_fence() -> None:
    clock = ManualClock()
    store, a, _ = pair(clock)
    for _ in range(2):
        b = Seat(store, "r01", clock).join()
    assert b.rv.generation == 3 and together(a, b).fence["r01"] == 3
    store.inner.delete([layout.claim_key("r01", 2)])
    again = Seat(store, "r01", clock)
    assert again.rv.generation == 2, "its number is taken again"
    with pytest.raises(Fenced, match="r01 now belongs to generation 3"):
        again.join().offer(1, 2, 3)
    assert together(a, b).fence["r01"] == 3, "the holder goes on"
