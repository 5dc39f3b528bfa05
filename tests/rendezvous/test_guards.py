"""One guard of the engine at a time: each test here failed when its guard was taken away, and nothing else did.

what a codec did not send    refused, lost to a predecessor, lost and taken back      never twice, never for ever
what is announced            a copy of the mean
what is put back             only bytes with the announced digest
a flipped bit of θ           never stepped from, never written down
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rendezvous import layout
from rendezvous.agreement.chain import Chain
from rendezvous.agreement.forgotten import refuse_forgotten_steps
from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import offer_flaw
from rendezvous.agreement.step_wait import StepWait
from rendezvous.background import in_turn
from rendezvous.clock import SystemClock
from rendezvous.codecs import DENSE, get_codec
from rendezvous.engine.rendezvous import Rendezvous, no_emit
from rendezvous.errors import BadCommit, BadDelta, ChainBroken, Corrupt, Diverged, GaveUp, RecordsLost, RendezvousError
from rendezvous.means.reduce import Reducer
from rendezvous.records.digests import digest
from rendezvous.records.records import Commit, Mean, Offer, Snapshot, WireError
from rendezvous.records.wire import as_bytes, shard_grid
from rendezvous.snapshots import record as snapshots
from rendezvous.stores.memory import MemoryStore
from rendezvous.stores.signed import SignedStore
from tests.rendezvous.test_engine import RULES, TIMING, Seat, bucket, damage, pair, together, trio
from tests.rendezvous.test_shards import commit_of
from tests.support.body_digests import body_digests
from tests.support.fakes import Fault, FaultyStore, ManualClock, VectorState


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


# ---------------------------------------------------------------------- what a codec did not send

LOSSY = (*(name for name in DENSE if name != "fp32"), "topk")


def vector(seed: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(3)).astype(np.float32)


def body_of(store: FaultyStore, seat: Seat) -> bytes:
    offer = seat.rv.last_offer
    assert offer is not None
    return store.get(offer.blob) or b""


def first_body(name: str, delta: np.ndarray) -> bytes:
    """The body of a codec with an empty residual."""
    rules = replace(RULES, codec=name)
    store = bucket(ManualClock(), replicas=1, m=1)
    seat = Seat(store, "r00", ManualClock(), rules).join()
    seat.rv.offer(delta, 2)
    return body_of(store, seat)


REFUSED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "not finite": lambda x: np.array([np.nan, *x[1:]], np.float32),
    "absurd beside θ": lambda x: x * np.float32(1e12),
}


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("cut", [False, True])
def test_after_a_refused_pseudogradient_a_codec_starts_anew(clock: ManualClock, name: str, why: str, cut: bool) -> None:
    """Half of the refused one stood in its residual already, and no record says which half."""
    rules = replace(RULES, codec=name, shard_elements=1 if cut else RULES.shard_elements)
    store = bucket(clock, replicas=1, m=1)
    seat = Seat(store, "r00", clock, rules)
    seat.state, theta = VectorState(3000, 100.0), np.full(3000, 10.0, np.float32)
    seat.join()
    big = np.random.default_rng(1).standard_normal(3000).astype(np.float32)
    seat.rv.offer(big, 2, theta=theta)
    commit, mean = seat.rv.settle(), np.empty(3000, np.float32)
    seat.rv.mean(commit, mean)
    seat.state.apply(0, mean)
    seat.rv.advance(commit)
    assert any(e.any() for e in seat.rv.own_blobs.encoder.unsent_residuals.values()), "this codec has lost something"
    with pytest.raises(BadDelta):
        seat.rv.offer(REFUSED[why](big), 2, theta=theta)
    assert seat.rv.own_blobs.encoder.unsent_residuals == {}


def lost_to_a_predecessor(clock: ManualClock, name: str, delta: np.ndarray) -> tuple[FaultyStore, Seat, Seat]:
    """r01's older life offers while the younger one uploads; -> the bucket, r00 and the younger life."""
    rules = replace(RULES, codec=name)
    store = bucket(clock)
    a, old = Seat(store, "r00", clock, rules).join(), Seat(store, "r01", clock, rules).join()
    young = Seat(store, "r01", clock, rules).join()
    create = Fault("create", "offer/r01", error=None, before=lambda: old.rv.offer(np.ones(3, np.float32), 2))
    store.faults = [create]
    young.rv.offer(delta, 2)
    assert young.events("offer_lost") == [{"step": 0, "to": 1}]
    return store, a, young


@pytest.mark.parametrize("name", LOSSY)
def test_a_body_that_lost_to_a_predecessors_offer_is_sent_later(clock: ManualClock, name: str) -> None:
    delta = vector(3)
    store, a, young = lost_to_a_predecessor(clock, name, delta)
    np.testing.assert_allclose(young.rv.own_blobs.encoder.unsent_residuals["residual.0"], delta, atol=1e-6)
    a.rv.offer(np.ones(3, np.float32), 2)
    a.step()
    young.step()
    young.rv.offer(np.zeros(3, np.float32), 2)
    sent = np.empty(3, np.float32)
    get_codec(name).decode(np.frombuffer(body_of(store, young), np.uint8), sent)
    kept = 0.5 if name == "topk" else 1.0  # it forgets half a round, and gives it back with the rest
    largest = int(np.abs(delta).argmax())
    assert abs(sent[largest]) > 0.4 * kept * abs(delta[largest]), "a round's work is not lost"


def test_an_fp32_body_that_lost_leaves_nothing_behind(clock: ManualClock) -> None:
    _, _, young = lost_to_a_predecessor(clock, "fp32", vector(3))
    assert young.rv.own_blobs.encoder.unsent_residuals == {} and young.rv.last_offer is None


@pytest.mark.parametrize("name", [name for name in DENSE if name != "fp32"])
def test_a_body_that_counts_under_the_next_number_is_not_sent_again(clock: ManualClock, name: str) -> None:
    """The predecessor started from another θ, so ours counts: only what the codec lost stays."""
    rules, delta = replace(RULES, codec=name), vector(5)
    store = bucket(clock)
    old = Seat(store, "r01", clock, rules).join()
    young = Seat(store, "r01", clock, rules).join()
    old.rv.base = old.rv.offers.base = "another θ"
    old.rv._digests.check_unchanged = lambda *_: None  # type: ignore[method-assign]
    store.faults = [Fault("create", "offer/r01", error=None, before=lambda: old.rv.offer(np.ones(3, np.float32), 2))]
    young.rv.offer(delta, 2)
    assert young.rv.last_offer is not None and store.get(layout.offer_key(0, "r01", 1)) is not None
    sent = np.empty(3, np.float32)
    get_codec(name).decode(np.frombuffer(body_of(store, young), np.uint8), sent)
    np.testing.assert_allclose(young.rv.own_blobs.encoder.unsent_residuals["residual.0"], delta - sent, atol=1e-6)


# ---------------------------------------------------------------------- what is announced


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_what_is_announced_is_a_copy_of_the_mean(clock: ManualClock, name: str) -> None:
    """A trainer uses the mean's memory again before the announcement is written, and its Δ's as well."""
    rules = replace(RULES, codec=name)
    store = bucket(clock, replicas=4, m=4)  # four bodies of bf16 are twice a mean
    seats = [Seat(store, f"r{i:02d}", clock, rules).join() for i in range(4)]
    deltas = [vector(i) for i in range(4)]
    for seat, delta in zip(seats, deltas, strict=True):
        seat.rv.offer(delta, 2)
        delta.fill(np.nan)
    means = set[bytes]()
    for seat in seats:
        commit, mean = seat.rv.settle(), np.empty(3, np.float32)
        seat.rv.mean(commit, mean)
        seat.state.apply(0, mean)
        means.add(mean.tobytes())
        mean.fill(np.nan)
        seat.rv.advance(commit)
    record = Mean.decode(store.get(layout.mean_key(0, 0)) or b"")
    assert means == {store.get(record.blob)}


# ---------------------------------------------------------------------- what is put back


def test_a_writer_whose_own_copy_is_damaged_does_not_put_it_back(clock: ManualClock) -> None:
    store, _, b = pair(clock)
    b.offer(2, 2, 2)
    (mine,) = b.rv.own_blobs.bodies
    damage(store, mine.key, "flipped")
    found = store.get(mine.key)
    mine.body[0] ^= 1  # in memory, too
    b.rv.own_blobs.mend(mine)
    assert store.get(mine.key) == found and not b.events("repaired")


def test_a_good_blob_is_not_written_again(clock: ManualClock) -> None:
    store, _, b = pair(clock)
    b.offer(2, 2, 2)
    store.calls.clear()
    b.rv.own_blobs.mend(b.rv.own_blobs.bodies[0])
    assert [verb for verb, _ in store.calls] == ["get_into"]


def misannounced(store: FaultyStore) -> Mean:
    """Step 0's mean under a digest that its deltas do not give, and its blob lost: its writer had bad memory."""
    record = Mean.decode(store.get(layout.mean_key(0, 0)) or b"")
    wrong = replace(record, digest=digest(b"something else"))
    store.put(layout.mean_key(0, 0), wrong.encode())
    store.delete([record.blob])
    return wrong


def test_a_mean_that_the_deltas_do_not_give_is_not_put_back(clock: ManualClock) -> None:
    store, a, b = pair(clock, replicas=3)
    together(a, b)
    wrong = misannounced(store)
    late = Seat(store, "r02", clock).join()
    assert late.state.theta.tolist() == [98.5] * 3, "from the deltas, which have their digests"
    assert store.get(wrong.blob) is None and not late.events("repaired")


def test_a_part_that_its_shards_do_not_give_is_neither_used_nor_put_back() -> None:
    store, n = MemoryStore(), 5000
    commit, _, rules = commit_of(store, "fp32", n, 3, 3)
    reducer, out = Reducer(store, SystemClock(), no_emit, rules), np.empty(n, np.float32)
    part = reducer.parts.split(commit, n)[1]
    reducer.announcements.announce(commit.t, 1, reducer.parts.make(commit, part, out))
    record = Mean.decode(store.get(layout.mean_key(0, 1)) or b"")
    store.put(layout.mean_key(0, 1), replace(record, digest=digest(b"something else")).encode())
    good = store.get(record.blob)
    with pytest.raises(Corrupt, match="part 1 was announced with other bits than its shards give"):
        reducer.parts.take(commit, 1, part, out)
    assert store.get(record.blob) == good


def test_a_snapshot_that_the_replay_does_not_give_is_not_put_back(clock: ManualClock) -> None:
    store, a, b = pair(clock, replicas=3, steps=9)
    for _ in range(4):
        together(a, b)
    snapshot = Snapshot.decode(store.get(layout.snapshot_key(2)) or b"")
    store.put(layout.snapshot_key(2), replace(snapshot, digest=digest(b"something else")).encode())
    found = store.get(snapshot.blob)
    late = Seat(store, "r02", clock).join()
    assert np.array_equal(late.state.theta, a.state.theta)
    assert store.get(snapshot.blob) == found and not late.events("repaired")


# ---------------------------------------------------------------------- a flipped bit


def flip(seat: Seat) -> None:
    seat.state.theta.view(np.int32)[0] ^= 1 << 20


def test_a_flipped_bit_is_noticed_before_a_step_that_was_decided_without_us(clock: ManualClock) -> None:
    _, a, b = pair(clock, m=1)
    a.offer()
    a.step()
    flip(b)
    before = b.state.theta.copy()
    with pytest.raises(Diverged, match="θ of r01-1 changed between outer steps"):
        b.rv.catch_up()
    assert np.array_equal(b.state.theta, before), "nothing was stepped from it"


def test_a_flipped_bit_is_noticed_before_a_step_is_taken(clock: ManualClock) -> None:
    _, a, _ = pair(clock, m=1)
    a.offer()
    flip(a)
    with pytest.raises(Diverged, match="θ of r00-1 changed"):
        a.rv.settle()


def test_a_flipped_bit_is_never_written_down(clock: ManualClock) -> None:
    """It flips before the first byte of the snapshot is read; nothing of that becomes visible."""
    store, a, b = pair(clock)
    together(a, b)
    for seat in (a, b):
        start = seat.rv._snapshots.writer.start
        seat.rv._snapshots.writer.start = lambda *args, s=seat, start=start, **given: (flip(s), start(*args, **given))  # type: ignore
    together(a, b)
    assert RULES.snapshot_every == 2 and (a.events("not_written") or b.events("not_written"))
    with pytest.raises(Diverged):
        together(a, b)
    assert store.get(layout.snapshot_key(2)) is None


@pytest.mark.parametrize("m", [1, 2])
def test_a_flipped_bit_is_not_in_the_last_snapshot(clock: ManualClock, m: int) -> None:
    store, a, b = pair(clock, m=m, steps=1)
    together(a, b)
    a.rv.finish("done")
    flip(b)
    if store.get(layout.snapshot_key(1)) is not None:  # m = 1: it was there already, and right
        assert m == 1
        return
    with pytest.raises(Diverged):
        b.rv.finish("done")
    assert store.get(layout.snapshot_key(1)) is None


# ---------------------------------------------------------------------- who closes


def test_a_replica_without_an_offer_does_not_close(clock: ManualClock) -> None:
    """The others' offers say from which θ they start; only the author of one knows that it is the chain's."""
    store, a, b, c = trio(clock)
    b.offer()
    c.offer()
    with pytest.raises(GaveUp, match="r00-1 has no offer of its own that counts"):
        a.rv.settle()
    assert store.get(layout.commit_key(0)) is None
    assert [o.slot for o in b.step().fresh_offers] == ["r01", "r02"]


# ---------------------------------------------------------------------- healing up to a step


def test_a_replay_up_to_a_step_starts_from_no_later_snapshot(clock: ManualClock) -> None:
    """The commit of step 3 claims another base.  r01 replays θ_3, though snapshots 4 and 6 are there."""
    store, a, b = pair(clock, m=1, steps=20)
    for _ in range(3):
        together(a, b)
    for _ in range(4):
        a.offer()
        a.step()
    assert [s.t for s in snapshots.newest_first(store)][:2] == [6, 4]
    third = a.rv.chain.known_commit(3) or pytest.fail("commit 3 is known")
    right, healed = b.state.theta.copy(), list[tuple[int, bytes]]()
    b.rv._replay_own_state("a test", "another base")
    healed.append((b.rv.step, b.state.theta.tobytes()))
    assert healed == [(3, right.tobytes())] and b.rv.base == third.base
    assert b.rv.catch_up() == 4 and np.array_equal(b.state.theta, a.state.theta)


# ---------------------------------------------------------------------- who may miss our blob


def test_a_writer_looks_after_its_blob_for_a_replica_whose_beat_never_gets_through(clock: ManualClock) -> None:
    """Seed 900119: r00 was listed and mute, so r01 thought that no replica could miss its damaged blob."""
    store, a, b = pair(clock)
    a.offer(1, 1, 1)
    b.offer(2, 2, 2)
    damage(store, b.rv.last_offer.blob, "flipped")  # type: ignore[union-attr]
    a.rv.settle()
    b.step()
    assert not b.rv.members.peers, "r01 has never seen a beat"
    b.offer(3, 3, 3)
    with pytest.raises(GaveUp):
        b.rv.settle()
    assert b.events("repaired")
    a.step()
    assert a.state.theta.tolist() == b.state.theta.tolist() == [98.5] * 3


# ---------------------------------------------------------------------- registers that vanished


def test_a_lost_commit_is_not_decided_again(clock: ManualClock) -> None:
    """b is slow.  Step 1 looks open to it, but others have built on the decision there."""
    store, a, b = pair(clock, m=1)
    for _ in range(3):
        a.offer()
        a.step()
    store.inner.delete([layout.commit_key(1)])
    assert b.rv.catch_up() == 1
    b.offer(9, 9, 9)
    with pytest.raises(ChainBroken, match="commit 1 is missing, though commit 2 is there"):
        b.rv.settle()
    assert store.get(layout.commit_key(1)) is None


def test_a_commit_that_another_writer_overwrote_is_noticed(clock: ManualClock) -> None:
    """Seen in a bucket of Ceph's gateway that got versioning during the run: both replicas won the same commit."""
    store, a, b = pair(clock, m=1)
    a.offer()
    a.step()
    commit = Commit.decode(store.get(layout.commit_key(0)) or b"")
    store.inner.put(layout.commit_key(0), replace(commit, by=b.rv.name).encode())
    a.offer()
    with pytest.raises(RecordsLost, match=r"has changed, though.*step 1.*or overwrites \(`diloco doctor` tests this"):
        a.rv.settle()
    assert store.get(layout.commit_key(1)) is None


def test_a_lost_first_snapshot_is_not_written_again(clock: ManualClock) -> None:
    """A replica that comes with another θ would replay the run from there, and every later one with it."""
    store, a, b = pair(clock, replicas=3)
    together(a, b)
    store.inner.delete([layout.snapshot_key(0)])
    late = Seat(store, "r02", clock)
    late.state = VectorState(value=-7.0)
    with pytest.raises(RendezvousError, match="the bucket lost objects"):
        late.join()
    assert store.get(layout.snapshot_key(0)) is None
    together(a, b)
    together(a, b)  # snapshot 2 is written
    again = Seat(store, "r02", clock)
    again.state = VectorState(value=-7.0)
    assert np.array_equal(again.join().state.theta, a.state.theta)


# ---------------------------------------------------------------------- a commit that breaks the rules


def misweighed(store: FaultyStore, t: int) -> None:
    """Commit t as a replica of another release might have written it: one weight is not what its h gives."""
    commit = Commit.decode(store.get(layout.commit_key(t)) or b"")
    offers = (replace(commit.offers[0], weight=0.25), *commit.offers[1:])
    store.inner.put(layout.commit_key(t), replace(commit, offers=offers).encode())


@pytest.mark.parametrize("how", ["waits for it", "catches up", "joins"])
def test_a_commit_with_other_weights_is_applied_by_nobody(clock: ManualClock, how: str) -> None:
    store, a, b = pair(clock, m=1)
    a.offer()
    a.rv.settle()
    misweighed(store, 0)
    before = b.state.theta.copy()
    with pytest.raises(BadCommit, match=r"weight 0\.25.*by the run's rules it is 1\.0"):
        if how == "waits for it":
            b.offer()
            b.step()
        elif how == "catches up":
            b.rv.catch_up()
        else:
            Seat(store, "r01", clock).join()
    assert np.array_equal(b.state.theta, before)


def test_a_theta_that_its_commit_did_not_confirm_is_not_written_down(clock: ManualClock) -> None:
    """Commit 2 claims another base; the replay confirms r01's.  No other replica has that digest: no snapshot."""
    store, a, b = pair(clock, m=1)
    together(a, b)
    together(a, b)
    a.offer()
    commit = a.rv.settle()
    store.inner.put(layout.commit_key(2), replace(commit, base="corrupt", by=b.rv.name).encode())
    b.offer()
    b.step()
    assert b.events("base_differs") and b.rv.step == 3
    assert store.get(layout.snapshot_key(2)) is None


def test_another_replica_writes_a_snapshot_after_two_periods_without_one(clock: ManualClock) -> None:
    store, a, b = pair(clock, m=1, steps=30)
    a.rv._snapshots.writer.start = lambda *_, **__: None  # type: ignore[method-assign]
    written = list[list[int]]()
    for _ in range(2 * RULES.snapshot_every + 1):
        a.offer()
        a.step()
        b.rv.catch_up()
        written.append([s.t for s in snapshots.newest_first(store)])
    assert written == [[0]] * 4 + [[4, 0]]


def test_the_work_that_is_counted_as_nothing_is_the_fresh_one(clock: ManualClock) -> None:
    _, a, b = pair(clock, m=1)
    a.offer(0, 0, 0)
    a.step()
    b.rv.catch_up(late=lambda t: b.offer(3, 3, 3))
    a.offer(0, 0, 0)
    assert [o.zero for o in a.step().offers] == [True, False], "b's late work is carried"
    assert a.rv.idle_steps == 2


def test_alien_offers_make_a_replica_replay_once_in_a_step(clock: ManualClock) -> None:
    """And what the replay takes does not count as this step's work."""
    _, a, b, c = trio(clock)
    for alien in (b, c):
        alien.state.theta += 1
        alien.rv.resume_at(alien.state, 0)
        alien.offer()
    began = a.rv._times.began
    a.offer()
    with pytest.raises(GaveUp):
        a.rv.settle()
    assert len(a.events("base_differs")) == 1 and a.rv._times.began == began


# ---------------------------------------------------------------------- memory that others may still need


def test_a_body_that_somebody_misses_stays_while_the_next_mean_is_announced(clock: ManualClock) -> None:
    _, a, b, c = trio(clock)
    for seat in (a, b, c):
        seat.offer(1, 2, 3)
    assert c.step().by == "r02-1"
    b.step()
    for seat in (b, c, a) * 2:
        seat.rv.members.tick()
    b.offer(4, 5, 6)
    first = b.rv.own_blobs.bodies[0]
    assert [mine.step for mine in b.rv.own_blobs.bodies] == [0, 1], "a was last seen at step 0"
    c.offer(4, 5, 6)
    b.rv.members.wanted = replace(b.rv.members.wanted, min_replicas=2)
    b.step()
    assert first.body.view(np.float32).tolist() == [1, 2, 3]


def test_a_mean_is_announced_once(clock: ManualClock) -> None:
    store, a, b = pair(clock)
    together(a, b)
    b.offer()
    a.offer()
    store.calls.clear()
    b.step()
    a.step()
    assert ("get", layout.mean_key(0, 0)) not in store.calls, "it was done with when step 1 opened"
    commit = a.rv.chain.known_commit(0) or pytest.fail("commit 0 is known")
    a.rv.reducer.announcements.announce(commit.t, 0, np.zeros(3, np.float32))
    assert len([k for k in store.list("steps/0000000000/mean/") if k.endswith(".bin")]) == 1


def test_old_offers_are_forgotten(clock: ManualClock) -> None:
    _, a, b = pair(clock, steps=40)
    for _ in range(20):
        together(a, b)
    assert len(a.rv.offers._offers) <= 2 * (RULES.window + 1)


# ---------------------------------------------------------------------- who counts


def test_late_work_expires_after_max_carry_syncs(clock: ManualClock) -> None:
    store, a, b = pair(clock, m=1, steps=30)
    for _ in range(RULES.max_carry + 1):
        a.offer()
        a.step()
    # b's offer for step 0 becomes durable when step max_carry + 1 is open
    b.offer(9, 9, 9)
    a.offer()
    assert a.step().late_offers == () and store.get(layout.offer_key(0, "r01", 0)) is not None


def test_a_sum_begins_with_the_first_body_that_is_sound() -> None:
    store, n = MemoryStore(), 5000
    commit, vectors, rules = commit_of(store, "fp32", n, 3, 0)
    bad = np.full(n, np.nan, np.float32)
    whole, cuts = body_digests(bad.view(np.uint8), "fp32", shard_grid(n, 1, rules.shard_elements))
    store.put(commit.offers[0].blob, as_bytes(bad))
    offers = (replace(commit.offers[0], digest=whole, shards=cuts), *commit.offers[1:])
    out = np.full(n, 7e7, np.float32)  # what stood in this memory before
    Reducer(store, SystemClock(), no_emit, rules).mean(replace(commit, offers=offers), out)
    w = np.array([o.weight for o in offers[1:]])
    expected = (w[:, None] * np.array(vectors[1:], np.float64)).sum(0) / w.sum()
    assert np.abs(out - expected).max() < 1e-5


def test_a_step_with_a_body_that_has_no_shards_is_reduced_directly(clock: ManualClock) -> None:
    """Its ranges could not be verified."""
    store, a, b, c = trio(clock, replace(RULES, shard_from=1, shard_elements=1))
    for seat in (a, b, c):
        seat.offer(1, 1, 1)
    record = c.rv.last_offer or pytest.fail("c has offered")
    body = store.get(record.blob) or b""
    plain = replace(record, digest=digest(body), shards=())
    store.put(layout.offer_key(0, "r02", 0), plain.encode())
    commit = a.rv.settle()
    assert commit.mode == "direct" and not commit.owners
    out = np.empty(3, np.float32)
    a.rv.mean(commit, out)
    assert out.tolist() == [1.0] * 3


def test_an_offer_has_at_most_four_rounds_of_inner_steps() -> None:
    offer = Offer(0, "r00", 1, "n", "b", 8, "blob", 12, "d", 1.0, 0.0)
    assert offer_flaw(offer, 0, "r00", RULES) == ""
    assert "its 9 inner steps are more than 4 · 2" in offer_flaw(replace(offer, h=9), 0, "r00", RULES)


def test_a_wait_for_a_quorum_begins_again_when_it_is_lost() -> None:
    clock = ManualClock()
    wait = StepWait(clock, TIMING)
    waits = list[float]()
    for reached in (True, True, False, True, True):
        clock.sleep(0.1)
        wait.count_time()
        wait.count_quorum(reached)
        waits.append(round(wait.waited, 1))
    assert waits == [0.1, 0.2, 0.0, 0.1, 0.2]


def test_a_closer_reads_as_many_commits_as_its_window() -> None:
    """The oldest tells the fence of the oldest offer that may still be carried."""
    store, clock = bucket(ManualClock(), replicas=1, m=1, steps=30), ManualClock()
    seat = Seat(store, "r00", clock).join()
    for _ in range(8):
        together(seat)
    chain = Chain(store, RULES.window)
    chain.read_before(8)
    assert [t for t in range(8) if chain.known_commit(t)] == list(range(8 - RULES.window, 8))


# ---------------------------------------------------------------------- in time, and in order


def test_a_residual_may_take_half_of_the_time_that_is_left(clock: ManualClock) -> None:
    for share, left in ((0.4, True), (0.6, False)):
        store = bucket(clock, replicas=1, m=1)
        seat = Seat(store, "r00", clock, replace(RULES, codec="int4")).join()
        seat.rv.offer(vector(1), 2)
        seat.rv.ask_to_leave()
        seat.rv.own_blobs.bytes_per_s = 12 / (share * TIMING.grace)  # bytes of the residual, seconds
        seat.rv.finish("asked")
        assert bool(store.list("residuals/")) is left


def test_a_snapshot_becomes_visible_when_its_blob_is_there(clock: ManualClock) -> None:
    store, a, b = pair(clock, steps=9)
    together(a, b)
    store.faults = [Fault("put", "snapshots/", error=KeyboardInterrupt())]  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        together(a, b)
    assert store.get(layout.snapshot_key(2)) is None


def test_a_replica_that_cannot_compute_its_part_waits_for_the_others(clock: ManualClock) -> None:
    """r02's blob is damaged, so r00 leaves its part; when r02 has put the blob back, all of them can be computed."""
    store, a, b, c = trio(clock, replace(RULES, shard_from=1, shard_elements=1))
    for seat in (a, b, c):
        seat.offer(1, 1, 1)
    (mine,) = c.rv.own_blobs.bodies
    damage(store, mine.key, "flipped")
    commit, out = a.rv.settle(), np.empty(3, np.float32)
    rest, rests = a.rv._averager._pause, list[float]()

    def later(wait: Any, normal: float) -> None:
        rests.append(clock.now())
        if len(rests) == 2:
            c.rv.own_blobs.mend(mine)
        rest(wait, normal)

    a.rv._averager._sharded_mean.pause = later
    a.rv.mean(commit, out)
    assert out.tolist() == [1.0] * 3 and len(rests) > 2


def test_a_session_that_never_held_a_slot_writes_no_leave_record(clock: ManualClock) -> None:
    """Seed 21000151: asked to go before it had claimed, it wrote one for generation 0, which no replica holds."""
    store = bucket(clock)
    rv = Rendezvous(store, clock, "r01", RULES, TIMING)
    rv.ask_to_leave()
    rv.finish("asked")
    assert store.list("leave/") == [] and store.list("alive/") == []


def test_a_commit_that_a_tick_saw_and_that_is_gone_again_does_not_leave_a_replica_behind(clock: ManualClock) -> None:
    """Seed 21000018: commit 2 was taken and the operator gave it back; r00 never made an inner step again."""
    store, a, b = pair(clock)
    store.put(layout.commit_key(0), b"not a commit")
    b.rv.members.tick()
    assert b.rv.is_behind
    store.inner.delete([layout.commit_key(0)])
    assert b.rv.catch_up() == 0 and not b.rv.is_behind
    together(a, b)


def test_commits_that_were_made_while_a_replica_looked_are_no_gap(clock: ManualClock) -> None:
    """1. b finds no commit 0   2. a makes commits 0 and 1   3. b asks for commit 1."""
    store, a, b = pair(clock, m=1)

    def two_steps() -> None:
        for _ in range(2):
            a.offer()
            a.step()

    store.faults = [Fault("get", layout.commit_key(1), error=None, before=two_steps)]
    b.rv.chain.refuse_gap(0)
    assert b.rv.catch_up() == 2


@pytest.mark.parametrize("garbage", [b"", b"{}", b"[[]]", b'{"kind":"commit","wire":2,"t":1}'])
def test_garbage_in_the_place_of_the_commit_after_next_is_no_gap(clock: ManualClock, garbage: bytes) -> None:
    """Before: "commit 0 is missing, though commit 1 is there", a step too early, and with the exit code of a crash."""
    store, a, b = pair(clock)
    store.inner.put(layout.commit_key(1), garbage)
    together(a, b)
    a.offer()
    with pytest.raises(WireError, match=r"steps/0000000001/commit.json: expected a commit.*Restore the object"):
        a.rv.settle()
    assert store.inner.get(layout.commit_key(1)) == garbage


@pytest.mark.parametrize("told_by", ["beat", "goodbye"])
def test_under_a_run_key_what_was_decided_is_not_decided_anew(told_by: str) -> None:
    """The newest commits and snapshots were deleted, and a joiner went on from an earlier step."""
    bucket, clock = MemoryStore(), ManualClock()
    store = SignedStore(bucket, b"k" * 16, "run", lambda *_, **__: None)
    write_control(store, clock, replicas=1, min_replicas=1, steps=50)
    seat = Seat(store, "r00", clock).join()
    for _ in range(5):
        seat.offer()
        seat.step()
    if told_by == "beat":
        seat.rv.members.tick()
    else:
        seat.rv.finish("leaving")
        bucket.delete([layout.beat_key("r00")])
    bucket.delete([key for t in (3, 4, 5) for key in (layout.commit_key(t), layout.snapshot_key(t))])
    with pytest.raises(RecordsLost, match=r"r00 has reached outer step 5.*newest commit .* is of step 2.*Restore"):
        Seat(store, "r00", clock).join()


def test_a_large_fleet_is_asked_how_far_it_came_a_few_at_a_time() -> None:
    """One request after the other: 128 waits of a joiner for 64 slots."""
    waits: list[int] = []

    def at_once(*parts: Callable[[], object]) -> None:
        waits.append(len(parts))
        in_turn(*parts)

    refuse_forgotten_steps(MemoryStore(), [f"r{i:02d}" for i in range(64)], {}, 3, at_once)
    assert sum(waits) == 64 and len(waits) <= 8


def test_a_shorter_give_up_bounds_the_wait_for_the_bucket_too() -> None:
    """Before: fleet.give_up_s = 15 waited for a bucket that refuses for 120 s."""
    rv = Rendezvous(MemoryStore(), ManualClock(), "r01", RULES, replace(TIMING, give_up=3.0, store_patience=120.0))
    assert rv.store.patience_s == 3.0
