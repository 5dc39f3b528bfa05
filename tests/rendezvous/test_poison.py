"""Objects written by hand into the bucket of a run without a key, looking like offers: passed over or left out.

a, b: two honest replicas.   r02: a slot whose records are written here, bytes and all.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rendezvous import layout
from rendezvous.background import at_once, in_turn
from rendezvous.clock import SystemClock
from rendezvous.codecs import DENSE, NAMES, get_codec, load_mean_kernel
from rendezvous.errors import Corrupt
from rendezvous.means.poison import is_valid_body, zero_non_finite
from rendezvous.means.reduce import Reducer
from rendezvous.means.sums import divide_by_weight
from rendezvous.records.digests import digest
from rendezvous.records.records import WIRE, Claim, Commit, Offer, WireError
from rendezvous.records.wire import Encoder, as_bytes, shard_grid
from rendezvous.stores.memory import MemoryStore
from tests.rendezvous.test_engine import Seat, pair, together
from tests.rendezvous.test_shards import commit_of
from tests.support.body_digests import body_digests
from tests.support.fakes import FaultyStore, ManualClock, unchecked

ODD = [np.nan, np.inf, -np.inf]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def offered(store: FaultyStore, seat: Seat, body: bytes, **fields: Any) -> Offer:
    """An offer of r02 for the open step, in its place, with a claim and a blob that are right."""
    step = seat.rv.step
    own = {"t": step, "slot": "r02", "generation": 1} | {k.replace("step", "t"): v for k, v in fields.items()}
    blob = layout.delta_blob(own["t"], own["slot"], own["generation"], "poison")
    store.put(layout.claim_key("r02", 1), Claim("r02", 1, "n", 0.0).encode())
    store.put(blob, body)
    plain = Offer(step, "r02", 1, "n", seat.rv.base, 2, blob, len(body), digest(body), 1.0, 0.0, norm=1.0)
    record = replace(plain, **fields)
    store.put(layout.offer_key(step, "r02", 0), unchecked(record))
    return record


def vector(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


# ---------------------------------------------------------------------- bodies that no encoder writes


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("places", [(0,), (2,), (0, 1, 2)])
def test_a_body_that_is_not_finite_counts_for_nothing(clock: ManualClock, odd: float, places: tuple[int, ...]) -> None:
    store, a, b = pair(clock, replicas=3)
    values = np.ones(3, np.float32)
    values[list(places)] = odd
    offered(store, a, values.tobytes())
    commit = together(a, b)
    assert [o.slot for o in commit.offers] == ["r00", "r01", "r02"], "nobody looks into a body before it is listed"
    assert a.state.theta.tolist() == b.state.theta.tolist() == [98.5] * 3
    for seat in (a, b):
        assert [e["slot"] for e in seat.events("poisoned")] == ["r02"]
    assert together(a, b).base == a.rv.chain.known_commit(1).base  # type: ignore[union-attr]


@pytest.mark.parametrize("announced", [True, False])
def test_a_replica_that_joins_later_leaves_out_the_same(clock: ManualClock, announced: bool) -> None:
    store, a, b = pair(clock, replicas=3)
    offered(store, a, vector(np.nan, 1, 1))
    together(a, b)
    if not announced:
        store.inner.delete([layout.mean_key(0, 0)])
    late = Seat(store, "r02", clock).join()
    assert late.state.theta.tolist() == a.state.theta.tolist() == [98.5] * 3


def test_a_sum_that_overflows_moves_nothing_where_it_does(clock: ManualClock) -> None:
    _, a, b = pair(clock)
    a.offer(3e38, 1, 1)
    b.offer(3e38, 1, 1)
    a.step()
    b.step()
    assert a.state.theta.tolist() == b.state.theta.tolist() == [100.0, 99.0, 99.0]
    assert not a.events("poisoned"), "both were sound"


def test_if_nobody_is_sound_nothing_moves(clock: ManualClock) -> None:
    store, a, b = pair(clock)
    for seat in (a, b):
        seat.offer(1, 1, 1)
        blob = seat.rv.last_offer.blob  # type: ignore[union-attr]
        body = vector(np.nan, np.nan, np.nan)
        store.put(blob, body)
        record = replace(seat.rv.last_offer, digest=digest(body))  # type: ignore[type-var]
        store.put(layout.offer_key(0, seat.rv.slot, 0), unchecked(record))
    late = Seat(store, "r00", clock).join()  # the first that sees what stands there now
    assert late.rv.step == 1 and late.state.theta.tolist() == [100.0] * 3


@pytest.mark.parametrize("size", [0, 4, 8, 16, 1 << 20])
def test_a_body_of_another_length_counts_for_nothing(clock: ManualClock, size: int) -> None:
    store, a, b = pair(clock, replicas=3)
    offered(store, a, bytes(size))
    together(a, b)
    assert a.state.theta.tolist() == b.state.theta.tolist() == [98.5] * 3
    assert f"its record says {size}" in a.events("poisoned")[0]["text"]


def test_a_body_with_digests_for_another_grid_counts_for_nothing(clock: ManualClock) -> None:
    store, a, b = pair(clock, replicas=3)
    offered(store, a, vector(9, 9, 9), shards=(digest(b"x"), digest(b"y")))
    together(a, b)
    assert a.state.theta.tolist() == b.state.theta.tolist() == [98.5] * 3


def test_a_wrong_digest_is_never_averaged(clock: ManualClock) -> None:
    """Without the key no reader can tell a liar from a store that lost bytes: all replicas stop and say so."""
    store, a, b = pair(clock, replicas=3)
    offered(store, a, vector(9, 9, 9), digest=digest(b"something else"))
    a.offer()
    b.offer()
    for seat in (a, b):
        with pytest.raises(Corrupt, match=r"has digest .*Nothing was averaged"):
            seat.step()
        assert seat.state.theta.tolist() == [100.0] * 3


def test_sound_and_divide() -> None:
    good, bad = np.ones(5, np.float32), np.array([1, 2, np.nan, 4, 5], np.float32)
    for name in NAMES:
        assert is_valid_body(name, Encoder(name, feedback=False).encode(0, good, good).copy(), 5), name
        assert not is_valid_body(name, np.full(get_codec(name).max_body_size(5), 0xFF, np.uint8), 5), name
    assert not is_valid_body("fp32", bad.view(np.uint8), 5)
    assert divide_by_weight(good, np.float32(2)) and good.tolist() == [0.5] * 5
    assert not divide_by_weight(bad, np.float32(1)) and not divide_by_weight(np.ones(3, np.float32), np.float32(0))
    zero_non_finite(bad)
    assert bad.tolist() == [1, 2, 0, 4, 5]
    big = np.full(1 << 17, 1e20, np.float32)
    assert not divide_by_weight(big, np.float32(1)) and np.isfinite(big).all(), "a false alarm costs time, nothing else"


# ---------------------------------------------------------------------- the same, in shards and codecs


def poisoned(store: MemoryStore, commit: Commit, i: int, body: np.ndarray, name: str, n: int) -> Commit:
    """The commit with other bytes in its i-th body, digests and all."""
    ranges = shard_grid(n, get_codec(name).align, 1024)
    whole, shards = body_digests(body, name, ranges)
    store.put(commit.offers[i].blob, as_bytes(body))
    offers = list(commit.offers)
    offers[i] = replace(offers[i], digest=whole, shards=shards)
    return replace(commit, offers=tuple(offers))


def everywhere(store: MemoryStore, commit: Commit, rules: Any, n: int) -> list[bytes]:
    """The mean as readers near and far compute it."""
    means = []
    for way in (in_turn, at_once):
        reducer = Reducer(store, SystemClock(), lambda *_, **__: None, rules, together=way)
        out = np.empty(n, np.float32)
        reducer.mean(commit, out)
        means.append(out.tobytes())
    return means


@pytest.mark.parametrize("owners", [0, 3, 5])
def test_one_bad_shard_is_left_out_and_no_more(owners: int) -> None:
    store, n = MemoryStore(), 10_007
    commit, vectors, rules = commit_of(store, "fp32", n, 3, owners)
    body = vectors[1].copy()
    body[5000] = np.nan
    means = everywhere(store, poisoned(store, commit, 1, body.view(np.uint8), "fp32", n), rules, n)
    assert len(set(means)) == 1, "however many shards a reader takes at a time"
    mean, (start, stop) = np.frombuffer(means[0], np.float32), shard_grid(n, 1, 1024)[4]
    w = np.array([o.weight for o in commit.offers])
    three = (w[:, None] * np.array(vectors, np.float64)).sum(0) / w.sum()
    two = (w[0] * vectors[0] + w[2] * vectors[2].astype(np.float64)) / (w[0] + w[2])
    inside = (np.arange(n) >= start) & (np.arange(n) < stop)
    assert np.abs(mean - np.where(inside, two, three)).max() < 1e-6


@pytest.mark.parametrize("name", [name for name in DENSE if name != "fp32"])
@pytest.mark.parametrize("owners", [0, 3])
def test_bytes_that_no_encoder_writes_are_left_out(name: str, owners: int) -> None:
    store, n = MemoryStore(), 10_007
    commit, vectors, rules = commit_of(store, name, n, 3, owners)
    body = Encoder(name).encode(0, vectors[1]).copy()
    at = 2 * 5000 if name == "bf16" else 4 * (4 + 1024 if name == "int8" else 4 + 256)
    body[at : at + 4] = 0xFF  # NaN, or a scale that is NaN
    means = everywhere(store, poisoned(store, commit, 1, body, name, n), rules, n)
    assert len(set(means)) == 1
    mean = np.frombuffer(means[0], np.float32)
    assert np.isfinite(mean).all() and np.abs(mean).max() < 10


@pytest.mark.parametrize("name", [name for name in DENSE if name != "fp32" and load_mean_kernel(name)])
def test_a_body_that_goes_while_another_is_left_out_is_missed_not_averaged(name: str) -> None:
    class Forgetful(MemoryStore):
        """Loses blob/1 once it has been read."""

        def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
            found = super().get_into(key, out, start)
            if key == "blob/1":
                self.delete([key])
            return found

    store, n = Forgetful(), 1000
    commit, vectors, rules = commit_of(store, name, n, 3, 3)
    body = Encoder(name).encode(0, vectors[0]).copy()
    body[:4] = 0xFF
    commit = poisoned(store, commit, 0, body, name, n)
    reducer, out = Reducer(store, SystemClock(), lambda *_, **__: None, rules), np.full(n, np.nan, np.float32)
    part = next(p for p in reducer.parts.split(commit, n) if p)
    with pytest.raises(Corrupt, match=r"blob/1 is missing"):
        reducer.parts.make(commit, part, out)


def test_bytes_that_no_encoder_writes_are_left_out_of_what_cannot_be_cut(clock: ManualClock) -> None:
    store, n = MemoryStore(), 8192
    commit, _, rules = commit_of(store, "topk", n, 3, 0)
    bad = poisoned(store, commit, 1, np.full(get_codec("topk").max_body_size(n), 0xFF, np.uint8), "topk", n)
    means = everywhere(store, bad, rules, n)
    assert len(set(means)) == 1 and np.isfinite(np.frombuffer(means[0], np.float32)).all()


# ---------------------------------------------------------------------- records that are no offers

RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "a forged generation": ({"generation": 999_999}, "no session claimed generation 999999 of r02"),
    "another step": ({"step": 7}, "it names step 7"),
    "another slot": ({"slot": "r00"}, "it names step 0 and r00"),
    "another codec": ({"codec": "int8"}, "its codec is int8, this run's is fp32"),
    "no inner step": ({"h": 0}, "its h is 0, not in 1"),
    "a billion inner steps": ({"h": 10**9}, "its 1000000000 inner steps are more than 4 · 2"),
    "words for numbers": ({"h": "many"}, "its h is 'many'"),
    "a negative time": ({"took": -1.0}, "its took is -1.0"),
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_record_that_is_no_offer_is_passed_over_and_told_once(clock: ManualClock, case: str) -> None:
    fields, words = RECORDS[case]
    store, a, b = pair(clock, replicas=3, m=1)
    offered(store, a, vector(9, 9, 9), **fields)
    commit = together(a, b)
    assert {o.slot for o in commit.offers} <= {"r00", "r01"} and commit.fence["r00"] == 1
    assert commit.fence.get("r02", 1) == 1
    told = a.events("bad_offer")
    assert len(told) == 1 and words in told[0]["text"] and told[0]["key"] == layout.offer_key(0, "r02", 0)
    assert a.state.theta.tolist() == b.state.theta.tolist()


def changed(**fields: Any) -> Callable[[bytes], bytes]:
    return lambda body: json.dumps({**json.loads(body), **fields}).encode()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed(wire=WIRE + 1), f"found a offer of version {WIRE + 1}"), (changed(kind="leave"), "found a leave"),
        (lambda body: body[:-20], "a damaged object"), (lambda body: b"\xff\xfe", "a damaged object"),
        (changed(took=float("nan")), "NaN is not a number of JSON"),
        (changed(norm=float("inf")), "Infinity is not a number of JSON"),
    ],
)  # fmt: skip
def test_bytes_that_are_no_offer_do_not_block_their_slot(clock: ManualClock, change: Any, words: str) -> None:
    """A replica of another release, or rot: the slot's own offer takes the next number."""
    store, a, b = pair(clock)
    plain = offered(store, a, vector(9, 9, 9), slot="r01")
    store.put(layout.offer_key(0, "r01", 0), change(plain.encode()))
    commit = together(a, b)
    assert [o.slot for o in commit.fresh_offers] == ["r00", "r01"]
    assert store.get(layout.offer_key(0, "r01", 1)) is not None
    assert words in a.events("bad_offer")[0]["text"] and len(b.events("bad_offer")) == 1
    assert a.state.theta.tolist() == b.state.theta.tolist() == [98.5] * 3


def test_a_commit_of_another_wire_version_ends_a_replica_with_advice(clock: ManualClock) -> None:
    store, a, b = pair(clock)
    together(a, b)
    body = store.get(layout.commit_key(0)) or b""
    store.put(layout.commit_key(0), changed(wire=WIRE + 1)(body))
    with pytest.raises(WireError, match="run the release that started this run"):
        Seat(store, "r00", clock).join()
