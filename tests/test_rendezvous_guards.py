"""One guard of the engine at a time: each test here failed when its guard was taken away, and nothing else did.

what a codec did not send    refused, lost to a predecessor, lost and taken back      never twice, never for ever
what is announced            a copy of the mean
what is put back             only bytes with the announced digest
a flipped bit of θ           never stepped from, never written down
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rendezvous import layout, snapshots
from rendezvous.clock import SystemClock
from rendezvous.codecs import codec
from rendezvous.digests import digest
from rendezvous.errors import BadDelta, Corrupt, Diverged, GaveUp
from rendezvous.records import Mean, Snapshot
from rendezvous.reduce import Reducer
from rendezvous.rendezvous import no_tell
from rendezvous.stores.memory import MemoryStore
from tests.fakes import Fault, FaultyStore, ManualClock
from tests.test_rendezvous_engine import RULES, Seat, bucket, damage, pair, together, trio
from tests.test_rendezvous_shards import commit_of


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


# ---------------------------------------------------------------------- what a codec did not send

LOSSY = ("bf16", "int8", "int4", "topk")


def vector(seed: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(3)).astype(np.float32)


def body_of(store: FaultyStore, seat: Seat) -> bytes:
    offer = seat.rv.last_offer
    assert offer is not None
    return store.get(offer.blob) or b""


def first_body(name: str, delta: np.ndarray) -> bytes:
    """What a codec writes that has not lost anything before."""
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
    """Half of the refused one stood in its residual already; nobody can tell which half."""
    rules = replace(RULES, codec=name, shard_elements=1 if cut else RULES.shard_elements)
    store = bucket(clock, replicas=1, m=1)
    seat = Seat(store, "r00", clock, rules).join()
    theta = np.full(3000, 10.0, np.float32)
    seat.state.theta = np.full(3000, 100.0, np.float32)
    seat.rv._open(0)
    big = np.random.default_rng(1).standard_normal(3000).astype(np.float32)
    seat.rv.offer(big, 2, theta=theta)
    commit, mean = seat.rv.settle(), np.empty(3000, np.float32)
    seat.rv.mean(commit, mean)
    seat.state.apply(0, mean)
    seat.rv.advance(commit)
    assert any(e.any() for e in seat.rv._encoder.unsent.values()), "this codec has lost something"
    with pytest.raises(BadDelta):
        seat.rv.offer(REFUSED[why](big), 2, theta=theta)
    assert seat.rv._encoder.unsent == {}


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
    np.testing.assert_allclose(young.rv._encoder.unsent["residual.0"], delta, atol=1e-6)
    a.rv.offer(np.ones(3, np.float32), 2)
    a.step()
    young.step()
    young.rv.offer(np.zeros(3, np.float32), 2)
    sent = np.empty(3, np.float32)
    codec(name).decode(np.frombuffer(body_of(store, young), np.uint8), sent)
    kept = 0.5 if name == "topk" else 1.0  # it forgets half a round, and gives it back with the rest
    largest = int(np.abs(delta).argmax())
    assert abs(sent[largest]) > 0.4 * kept * abs(delta[largest]), "a round's work is not lost"


def test_an_fp32_body_that_lost_leaves_nothing_behind(clock: ManualClock) -> None:
    _, _, young = lost_to_a_predecessor(clock, "fp32", vector(3))
    assert young.rv._encoder.unsent == {} and young.rv.last_offer is None


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_a_body_that_counts_under_the_next_number_is_not_sent_again(clock: ManualClock, name: str) -> None:
    """The predecessor started from another θ, so ours counts: only what the codec lost stays."""
    rules, delta = replace(RULES, codec=name), vector(5)
    store = bucket(clock)
    old = Seat(store, "r01", clock, rules).join()
    young = Seat(store, "r01", clock, rules).join()
    old.rv.base = old.rv._closer.base = "another θ"
    old.rv._check_state = lambda: None  # type: ignore[method-assign]
    store.faults = [Fault("create", "offer/r01", error=None, before=lambda: old.rv.offer(np.ones(3, np.float32), 2))]
    young.rv.offer(delta, 2)
    assert young.rv.last_offer is not None and store.get(layout.offer(0, "r01", 1)) is not None
    sent = np.empty(3, np.float32)
    codec(name).decode(np.frombuffer(body_of(store, young), np.uint8), sent)
    np.testing.assert_allclose(young.rv._encoder.unsent["residual.0"], delta - sent, atol=1e-6)


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
    record = Mean.decode(store.get(layout.mean(0, 0)) or b"")
    assert means == {store.get(record.blob)}


# ---------------------------------------------------------------------- what is put back


def test_a_writer_whose_own_copy_is_damaged_does_not_put_it_back(clock: ManualClock) -> None:
    store, _, b = pair(clock)
    b.offer(2, 2, 2)
    (mine,) = b.rv._mine
    damage(store, mine.key, "flipped")
    found = store.get(mine.key)
    mine.body[0] ^= 1  # in memory, too
    b.rv._reducer.mend_mine(mine)
    assert store.get(mine.key) == found and not b.events("repaired")


def test_a_good_blob_is_not_written_again(clock: ManualClock) -> None:
    store, _, b = pair(clock)
    b.offer(2, 2, 2)
    store.calls.clear()
    b.rv._reducer.mend_mine(b.rv._mine[0])
    assert [verb for verb, _ in store.calls] == ["get_into"]


def misannounced(store: FaultyStore) -> Mean:
    """Step 0's mean under a digest that its deltas do not give, and its blob lost: its writer had bad memory."""
    record = Mean.decode(store.get(layout.mean(0, 0)) or b"")
    wrong = replace(record, digest=digest(b"something else"))
    store.put(layout.mean(0, 0), wrong.encode())
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
    reducer, out = Reducer(store, SystemClock(), no_tell, rules), np.empty(n, np.float32)
    part = reducer.parts(commit, n)[1]
    reducer.announce_part(commit, 1, reducer.make_part(commit, part, out))
    record = Mean.decode(store.get(layout.mean(0, 1)) or b"")
    store.put(layout.mean(0, 1), replace(record, digest=digest(b"something else")).encode())
    good = store.get(record.blob)
    with pytest.raises(Corrupt, match="part 1 was announced with other bits than its shards give"):
        reducer.take_part(commit, 1, part, out)
    assert store.get(record.blob) == good


def test_a_snapshot_that_the_replay_does_not_give_is_not_put_back(clock: ManualClock) -> None:
    store, a, b = pair(clock, replicas=3, steps=9)
    for _ in range(4):
        together(a, b)
    snapshot = Snapshot.decode(store.get(layout.snapshot(2)) or b"")
    store.put(layout.snapshot(2), replace(snapshot, digest=digest(b"something else")).encode())
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
    """It flips after the step was settled, before its snapshot is taken."""
    store, a, b = pair(clock)
    together(a, b)
    together(a, b)
    a.offer()
    b.offer()
    commit = a.rv.settle()
    assert commit.t == 2 and commit.by == a.rv.name and RULES.snapshot_every == 2
    flip(a)
    with pytest.raises(Diverged):
        a.rv.mean(commit, np.empty(3, np.float32))
    assert store.get(layout.snapshot(2)) is None


@pytest.mark.parametrize("m", [1, 2])
def test_a_flipped_bit_is_not_in_the_last_snapshot(clock: ManualClock, m: int) -> None:
    store, a, b = pair(clock, m=m, steps=1)
    together(a, b)
    a.rv.finish("done")
    flip(b)
    if store.get(layout.snapshot(1)) is not None:  # m = 1: it was there already, and right
        assert m == 1
        return
    with pytest.raises(Diverged):
        b.rv.finish("done")
    assert store.get(layout.snapshot(1)) is None


# ---------------------------------------------------------------------- who closes


def test_who_has_no_offer_does_not_close(clock: ManualClock) -> None:
    """The others' offers say from which θ they start; only who made one knows that it is the chain's."""
    store, a, b, c = trio(clock)
    b.offer()
    c.offer()
    with pytest.raises(GaveUp, match="r00-1 has no offer of its own that counts"):
        a.rv.settle()
    assert store.get(layout.commit(0)) is None
    assert [o.slot for o in b.step().fresh] == ["r01", "r02"]


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
    third = a.rv.chain.known(3) or pytest.fail("commit 3 is known")
    right, healed = b.state.theta.copy(), list[tuple[int, bytes]]()
    b.rv._rederive("a test", "another base")
    healed.append((b.rv.step, b.state.theta.tobytes()))
    assert healed == [(3, right.tobytes())] and b.rv.base == third.base
    assert b.rv.catch_up() == 4 and np.array_equal(b.state.theta, a.state.theta)


# ---------------------------------------------------------------------- who may miss our blob


def test_a_writer_looks_after_its_blob_for_a_replica_whose_beat_never_gets_through(clock: ManualClock) -> None:
    """Seed 900119: r00 was listed and mute, so r01 thought that nobody could miss its damaged blob."""
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
