"""The grid that bodies are digested on, the parts that owners reduce, and the choice between direct and sharded."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rendezvous.agreement.rules import Peer, Rules, Timing, reduces_sharded
from rendezvous.background import Together, at_once, in_turn
from rendezvous.clock import SystemClock
from rendezvous.codecs import DENSE, get_codec
from rendezvous.engine.rendezvous import no_emit
from rendezvous.engine.sharded import ShardedMean
from rendezvous.errors import BadDelta, Corrupt
from rendezvous.means.bodies import Shard
from rendezvous.means.body_sample import BodySample
from rendezvous.means.reduce import Reducer
from rendezvous.records.records import Beat, Commit, Listed
from rendezvous.records.wire import Encoder, as_bytes, codec_alignment, shard_grid
from rendezvous.stores.memory import MemoryStore
from tests.support.body_digests import body_digests
from tests.support.fakes import ManualClock

RNG = np.random.default_rng(3)


@pytest.mark.parametrize("elements", [1, 5, 1000, 65536, 65537, 1_000_000, 50_000_000])
@pytest.mark.parametrize("align", [1, 512, 1024])
def test_a_grid_covers_a_vector_once(elements: int, align: int) -> None:
    shards = shard_grid(elements, align, 1 << 16)
    assert 1 <= len(shards) <= 64
    assert shards[0][0] == 0 and shards[-1][1] == elements
    assert all(a[1] == b[0] for a, b in pairwise(shards))
    assert all(start % align == 0 for start, _ in shards)


def commit_of(
    store: MemoryStore, codec: str, n: int, count: int, owners: int
) -> tuple[Commit, list[np.ndarray], Rules]:
    """A commit that lists `count` bodies of n elements; the vectors; the rules."""
    rules = Rules(codec=codec, shard_from=1, shard_elements=1024)
    listed, vectors = [], []
    for i in range(count):
        x = RNG.standard_normal(n, dtype=np.float32)
        body = Encoder(codec).encode(0, x, np.ones_like(x))
        store.put(f"blob/{i}", as_bytes(body))
        whole, shards = body_digests(body, codec, shard_grid(n, codec_alignment(codec), rules.shard_elements))
        w = float(np.float32(0.1 + 0.3 * i))
        listed.append(Listed(0, f"r{i:02d}", 1, "n", f"blob/{i}", body.size, whole, 1, w, shards=shards))
        vectors.append(x)
    slots = tuple(f"r{i:02d}" for i in range(owners))
    mode = "sharded" if owners else "direct"
    return Commit(0, None, "b", tuple(listed), {}, 1, 1.0, 0, "r00-1", "n", 0.0, mode, slots), vectors, rules


def announced_blob(reducer: Reducer, commit: Commit, part: int) -> str:
    _, record = reducer.announcements.find(commit.t, part)
    assert record is not None
    return record.blob


@pytest.mark.parametrize("codec", DENSE)
@pytest.mark.parametrize("owners", [1, 3, 4, 7])
def test_sharded_and_direct_give_the_same_mean(codec: str, owners: int) -> None:
    store, n = MemoryStore(), 10_007
    commit, _, rules = commit_of(store, codec, n, 4, owners)
    direct = Commit(**{**vars(commit), "mode": "direct", "owners": ()})
    one, two = np.empty(n, np.float32), np.empty(n, np.float32)
    reducer = Reducer(store, SystemClock(), lambda *_, **__: None, rules)
    reducer.mean(direct, one)
    reducer.mean(commit, two)
    if codec == "fp32":
        assert one.tobytes() == two.tobytes()
    else:  # the mean is written by the codec once more
        assert np.abs(one - two).max() <= 1.01 * np.abs(one).max() / {"bf16": 256, "int8": 254, "int4": 14}[codec]
    three = np.empty(n, np.float32)
    for j, part in enumerate(reducer.parts.split(commit, n)):
        reducer.announcements.announce(commit.t, j, reducer.parts.make(commit, part, three))
    again = np.empty(n, np.float32)
    assert all(reducer.parts.take(commit, j, part, again) for j, part in enumerate(reducer.parts.split(commit, n)))
    assert two.tobytes() == three.tobytes() == again.tobytes(), "computed, announced and fetched are the same bits"
    parts = reducer.parts.split(commit, n)
    audited, read = np.empty(n, np.float32), np.empty(n, np.float32)
    for j, body in reducer.parts.make_all(commit, audited):
        assert body.tobytes() == store.get(announced_blob(reducer, commit, j)), "an audit computes what was announced"
    assert reducer.parts.read_announced(commit, read) is None
    assert audited.tobytes() == read.tobytes() == two.tobytes()
    assert len(parts) == owners
    assert [(s.start, s.stop) for part in parts for s in part] == shard_grid(
        n, codec_alignment(codec), rules.shard_elements
    )


@pytest.mark.parametrize("codec", DENSE)
def test_a_part_is_written_in_one_pass_as_in_many(codec: str) -> None:
    store, n = MemoryStore(), 10_007
    commit, _, rules = commit_of(store, codec, n, 4, 3)
    written: list[list[bytes]] = []
    for kernels in (True, False):
        reducer, out = Reducer(store, SystemClock(), lambda *_, **__: None, rules), np.empty(n, np.float32)
        if not kernels:
            reducer._one_pass = None
        parts = [reducer.parts.make(commit, part, out).tobytes() for part in reducer.parts.split(commit, n)]
        written.append([*parts, out.tobytes()])
    assert written[0] == written[1]


@pytest.mark.parametrize("codec", DENSE)
@pytest.mark.parametrize("n", [10_007, 8192, 3])
def test_what_is_said_of_a_body_is_its_norm(codec: str, n: int) -> None:
    x = RNG.standard_normal(n, dtype=np.float32)
    ranges = shard_grid(n, codec_alignment(codec), 1024)
    for _ in range(2):  # with an empty residual, and with a kept one
        written = Encoder(codec).encode_in_shards(0, x, ranges, 2 * np.ones_like(x))
        assert written.norm == pytest.approx(float(np.linalg.norm(x.astype(np.float64))), rel=1e-5)
        assert written.scale == pytest.approx(2 * n**0.5)


@pytest.mark.parametrize("codec", ["int8", "topk"])
@pytest.mark.parametrize("n", [1000, 100_000])
def test_a_refused_pseudogradient_leaves_no_residual(codec: str, n: int) -> None:
    encoder, x = Encoder(codec), np.full(n, 3.4e38, np.float32)
    x[::2] *= 0.999
    ranges = shard_grid(n, codec_alignment(codec), 1 << 14)
    with pytest.raises(BadDelta, match="residual"):
        for _ in range(30):
            encoder.encode_in_shards(0, x, ranges)
    assert encoder.unsent_residuals == {}


def test_fp32_is_the_weighted_mean() -> None:
    store, n = MemoryStore(), 5000
    commit, vectors, rules = commit_of(store, "fp32", n, 3, 3)
    out = np.empty(n, np.float32)
    Reducer(store, SystemClock(), lambda *_, **__: None, rules).mean(commit, out)
    weights = np.array([o.weight for o in commit.offers])
    expected = (weights[:, None] * np.array(vectors, np.float64)).sum(0) / weights.sum()
    assert np.abs(out - expected).max() < 1e-6


def test_an_announced_part_is_fetched_and_a_damaged_one_mended() -> None:
    store, n = MemoryStore(), 5000
    commit, _, rules = commit_of(store, "fp32", n, 3, 3)
    told: list[str] = []
    reducer = Reducer(store, SystemClock(), lambda event, **_: told.append(event), rules)
    good = np.empty(n, np.float32)
    reducer.mean(commit, good)
    parts = reducer.parts.split(commit, n)
    reducer.announcements.announce(commit.t, 1, reducer.parts.make(commit, parts[1], good))
    (blob,) = [k for k in store.list("steps/") if k.endswith(".bin")]
    body = store.get(blob) or b""
    store.put(blob, bytes(len(body)))
    out = np.zeros(n, np.float32)
    assert reducer.parts.take(commit, 1, parts[1], out) and not reducer.parts.take(commit, 0, parts[0], out)
    assert store.get(blob) == body and "repaired" in told
    start, stop = parts[1][0].start, parts[1][-1].stop
    assert out[start:stop].tobytes() == good[start:stop].tobytes()


@pytest.mark.parametrize(
    ("codec", "owners"), [("fp32", 0), ("fp32", 3), ("int8", 0), ("int8", 3), ("topk", 0), ("bf16-gate", 0)]
)
def test_the_mean_is_the_same_however_bodies_are_fetched(codec: str, owners: int) -> None:
    store, n = MemoryStore(), 10_007
    commit, _, rules = commit_of(store, codec, n, 5, owners)
    one, two = np.empty(n, np.float32), np.empty(n, np.float32)
    clock = ManualClock()  # a body that is missing is looked for again, for some seconds
    far = Reducer(store, clock, no_emit, rules, together=at_once)
    far.mean(commit, one)
    Reducer(store, clock, no_emit, rules, together=in_turn).mean(commit, two)
    assert one.tobytes() == two.tobytes()
    store.delete(["blob/3"])
    with pytest.raises(Corrupt, match="blob/3 is missing"):
        far.mean(commit, one)


@pytest.mark.parametrize("together", [in_turn, at_once])
def test_a_commit_of_which_no_body_fits_moves_nothing(together: Together) -> None:
    store = MemoryStore()
    commit, _, rules = commit_of(store, "fp32", 5000, 3, 0)
    out = np.ones(4000, np.float32)  # another length than the bodies have
    Reducer(store, SystemClock(), no_emit, rules, together=together).mean(commit, out)
    assert not out.any()


def test_a_damaged_range_is_never_averaged() -> None:
    store, n = MemoryStore(), 5000
    commit, _, rules = commit_of(store, "fp32", n, 3, 3)
    body = bytearray(store.get("blob/1") or b"")
    body[4 * 2048 + 1] ^= 1
    store.put("blob/1", body)
    with pytest.raises(Corrupt, match="blob/1 has digest"):
        Reducer(store, SystemClock(), lambda *_, **__: None, rules).mean(commit, np.empty(n, np.float32))


@pytest.mark.parametrize(
    ("sizes", "codec", "sharded"),
    [([9, 9, 9], "fp32", True), ([9, 9], "fp32", False), ([9, 9, 5], "fp32", False), ([9, 9, 9], "topk", False),
     ([9] * 8, "int8", True)],
)  # fmt: skip
def test_when_to_reduce_in_shards(sizes: list[int], codec: str, sharded: bool) -> None:
    assert reduces_sharded(sizes, codec, shard_from=8) is sharded


def test_a_part_is_taken_over_at_once_from_an_owner_who_is_dead_or_past_the_step() -> None:
    """Seed 7006052: both owners had replayed the step from its bodies, and the third waited for their parts."""
    commit, _, rules = commit_of(MemoryStore(), "fp32", 5000, 3, 3)
    t = commit.t
    for phase, step, soon in [("wait", t, False), ("wait", t + 1, True), ("left", t, True)]:
        beats = [Beat(f"r{i:02d}", 1, 1, phase, step, 0, 0.0, 0.0) for i in (0, 1)]
        peers = {b.slot: Peer(b, changes=3) for b in beats}
        peers["r03"] = Peer(Beat("r03", 1, 1, "wait", 0, 0, 0.0, 0.0))  # never seen to beat
        members = SimpleNamespace(slot="r02", peers=peers, wanted=SimpleNamespace(universe=4))
        reducer = Reducer(MemoryStore(), SystemClock(), lambda *_, **__: None, rules)
        sharer = ShardedMean(SystemClock(), reducer, cast(Any, members), Timing(), lambda *_: None, lambda *_: False)
        sharer._needed = 20.0  # a slow request, when our own part was made
        assert [sharer._is_overdue(commit, j, 1.0) for j in (0, 1)] == [soon, soon]
        assert all(sharer._is_overdue(commit, j, 121.0) for j in (0, 1)), "late is late"


@pytest.mark.parametrize("seconds", [(0.2, 18.0), (18.0, 0.2)])
def test_one_slow_request_is_no_measure_of_how_long_a_part_takes(seconds: tuple[float, float]) -> None:
    """Seed 61007531: a GET of 18 s, then 54 s of waiting for the part of an owner that had died before we began."""
    commit, _, rules = commit_of(MemoryStore(), "fp32", 5000, 3, 3)
    peers = {"r00": Peer(Beat("r00", 1, 1, "wait", commit.t, 0, 0.0, 0.0))}  # never seen to beat: not known to be dead
    members = SimpleNamespace(slot="r01", peers=peers, wanted=SimpleNamespace(universe=3), look=lambda slots: None)
    clock = ManualClock()
    reducer = Reducer(MemoryStore(), clock, lambda *_, **__: None, rules)
    sharer = ShardedMean(clock, reducer, cast(Any, members), Timing(), lambda *_: None, lambda *_: False)
    for taken in seconds:
        reducer.parts.make = lambda *_, taken=taken: clock.sleep(taken)  # type: ignore[method-assign,assignment]
        reducer.announcements.announce = lambda *_: None  # type: ignore[method-assign]
        sharer._make_part(commit, 1, [Shard(0, 0, 1)], np.zeros(1, np.float32), None, 0.0)
    sharer._make_part(commit, 2, [], np.zeros(1, np.float32), None, 0.0)  # nor is a part without shards a measure
    assert sharer._needed == pytest.approx(0.2)
    assert sharer._is_overdue(commit, 0, 10.0)


# ---------------------------------------------------------------------- a sample of the bodies


def sampling_reducer(store: MemoryStore, rules: Rules, together: Together, start: int, stop: int) -> Reducer:
    reducer = Reducer(store, SystemClock(), no_emit, rules, together=together)
    reducer.sample = BodySample(rules.codec, start=start, stop=stop)
    return reducer


@pytest.mark.parametrize("codec", [*DENSE, "topk"])
@pytest.mark.parametrize(("start", "stop"), [(0, 700), (1000, 3333), (10_000, 10_007)])
@pytest.mark.parametrize("together", [in_turn, at_once])
def test_a_sample_is_what_the_bodies_decode_to(codec: str, start: int, stop: int, together: Together) -> None:
    store, n = MemoryStore(), 10_007
    commit, _, rules = commit_of(store, codec, n, 3, 0)
    reducer = sampling_reducer(store, rules, together, start, stop)
    mean = np.empty(n, np.float32)
    for _ in range(2):  # a second reading of the same step changes nothing
        reducer.mean(commit, mean)
    found = reducer.sample.take(commit)
    assert found is not None and found[0] == [o.weight for o in commit.offers]
    for i, values in enumerate(found[1]):
        whole = np.empty(n, np.float32)
        get_codec(codec).decode(store.get(f"blob/{i}") or b"", whole)
        assert values.tobytes() == whole[start:stop].tobytes()
    assert reducer.sample.take(commit) is None, "once"


def test_a_sample_is_with_the_owner_of_its_part_alone() -> None:
    store, n = MemoryStore(), 10_007
    commit, _, rules = commit_of(store, "int8", n, 3, 2)
    for j, has in ((0, True), (1, False)):
        reducer = sampling_reducer(store, rules, at_once, 10, 500)
        reducer.parts.make(commit, reducer.parts.split(commit, n)[j], np.empty(n, np.float32))
        assert (reducer.sample.take(commit) is not None) is has


def test_there_is_no_sample_of_another_step_or_fragment_or_of_bodies_that_cannot_be_cut() -> None:
    store, n = MemoryStore(), 10_007
    commit, _, rules = commit_of(store, "fp32", n, 3, 0)
    reducer = sampling_reducer(store, rules, in_turn, 0, 5)
    reducer.mean(commit, np.empty(n, np.float32))
    assert reducer.sample.take(replace(commit, t=1)) is None
    reducer.sample = BodySample("fp32", fragment=1, fragments=2, start=0, stop=5)
    reducer.mean(commit, np.empty(n, np.float32))
    assert reducer.sample.take(commit) is None
    store = MemoryStore()
    commit, _, rules = commit_of(store, "bf16-gate", n, 3, 0)
    reducer = sampling_reducer(store, rules, in_turn, 0, 5)
    reducer.mean(commit, np.empty(n, np.float32))
    assert reducer.sample.take(commit) is None


def test_a_body_that_counts_for_nothing_leaves_no_sample() -> None:
    store, n = MemoryStore(), 10_007
    commit, _, rules = commit_of(store, "fp32", n, 3, 0)
    poisoned = np.full(n, np.nan, np.float32)
    store.put("blob/1", as_bytes(poisoned))
    whole, shards = body_digests(poisoned.view(np.uint8), "fp32", shard_grid(n, 1, rules.shard_elements))
    offers = tuple(replace(o, digest=whole, shards=shards) if o.blob == "blob/1" else o for o in commit.offers)
    commit = replace(commit, offers=offers)
    reducer = sampling_reducer(store, rules, in_turn, 0, n)
    reducer.mean(commit, np.empty(n, np.float32))
    assert reducer.sample.take(commit) is None
