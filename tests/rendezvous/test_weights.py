"""bf16 weights of every outer step: a patch's bytes, the chain that a fleet writes, and a reader that trusts no byte.

seats on one store ── step ──▶ weights/{t} ──▶ follower:  bf16(θ_t), bit for bit, or the refusal
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rendezvous import follow_weights, layout
from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import Rules
from rendezvous.background import Inline
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.errors import Corrupt, WrongRun
from rendezvous.records.records import Weights
from rendezvous.store import Store
from rendezvous.stores.memory import MemoryStore
from rendezvous.weights import patch, writer
from rendezvous.weights.follower import FollowedWeights, WeightsFollower
from rendezvous.weights.writer import ANCHOR_EVERY, WeightsWriter, read_weights
from tests.rendezvous.test_engine import TIMING
from tests.support.fakes import Fault, FaultyStore, ManualClock, VectorState, unchecked

SIZE = 12
LAYOUT = [["a.weight", [2, 4], "float32"], ["b", [4], "float32"]]


# ---------------------------------------------------------------------- bytes


def test_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(4096, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties, ties - 1, ties + 1]).view(np.float32)
    values = values[np.isfinite(values)]
    theirs = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(patch.bf16_bits(values), theirs)


def test_what_is_not_finite_in_bf16_is_seen() -> None:
    values = np.array([1.0, np.inf, -np.inf, 3.4e38], np.float32)
    assert [patch.fits_bf16(values[i : i + 1]) for i in range(4)] == [True, False, False, False]
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 50_000, dtype=np.uint64).astype(np.uint32)
    edges = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001, 0x7F7F8000, 0x7F7F7FFF, 1, 0x80000000], np.uint32)
    values = np.concatenate([bits, edges, bits | 0x7F800000]).view(np.float32)
    finite = torch.from_numpy(values).bfloat16().isfinite().tolist()
    assert [patch.fits_bf16(values[i : i + 1]) for i in range(len(values))] == finite


def test_what_a_gpu_calls_not_a_number_is_not_written_as_a_zero() -> None:
    fleet = Broadcast()
    fleet.step(2)
    for seat in fleet.seats:
        seat.state.theta.view(np.uint32)[3] = 0x7FFFFFFF  # CUDA's NaN; rounded as a number it is −0
        seat.weights.note_step(seat.state, 3, 1, base="", closed=True)
    assert read_weights(fleet.store, 3) is None
    assert all("NaN or infinite" in str(dict(seat.told).get("not_written")) for seat in fleet.seats)


@pytest.mark.parametrize("where", [
    [], [0], [999], [0, 999], [254], [255], [256], [0, 255, 511, 766], [510], [998, 999], list(range(1000)),
    sorted(random.Random(1).sample(range(1000), 60)),
])  # fmt: skip
def test_changes_come_back(where: list[int]) -> None:
    rng = np.random.default_rng(2)
    old = rng.integers(0, 1 << 16, 1000).astype(np.uint16)
    new = old.copy()
    new[where] ^= 0x0101
    got = np.concatenate([np.zeros(7, np.uint16), old])
    (found,) = patch.decode(patch.encode(patch.changes_between(old, new, 7)))
    found.apply(got)
    found.apply(got)  # twice does no harm
    assert np.array_equal(got[7:], new) and not got[:7].any()


def test_a_whole_chunk_comes_back_in_about_a_byte_and_a_half_for_each_value() -> None:
    bits = patch.bf16_bits((0.02 * np.random.default_rng(3).standard_normal(50_000)).astype(np.float32))
    body = patch.encode(patch.whole(bits, 0))
    (found,) = patch.decode(body)
    assert found.positions is None and np.array_equal(found.values, bits) and len(body) < 1.45 * len(bits)


def test_a_change_of_one_value_in_twenty_takes_about_two_bytes_for_each() -> None:
    rng = np.random.default_rng(4)
    old = patch.bf16_bits((0.02 * rng.standard_normal(100_000)).astype(np.float32))
    new = old + (rng.random(len(old)) < 0.05).astype(np.uint16)
    assert len(patch.encode(patch.changes_between(old, new, 0))) < 2.15 * (old != new).sum()


def test_damaged_bytes_are_corrupt_and_nothing_else() -> None:
    rng = random.Random(5)
    old = np.zeros(500, np.uint16)
    new = old.copy()
    new[::7] = 3
    good = patch.encode(patch.changes_between(old, new, 0)) + patch.encode(patch.whole(new, 500))
    for _ in range(2000):
        bad = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        body = bad[: rng.randrange(len(bad))] if rng.random() < 0.2 else bad
        try:
            for changes in patch.decode(body):
                assert len(changes.values) <= changes.count <= patch.CHUNK
        except Corrupt:
            pass


def test_a_small_body_does_not_unpack_to_a_large_one() -> None:
    bomb = patch._deflate(bytes(1 << 24))
    head = patch._HEAD.pack(patch.MAGIC, 0, 100, 100, 0, len(bomb), 100)
    with pytest.raises(Corrupt, match="more than its head says"):
        list(patch.decode(head + bomb + bytes(100)))


# ---------------------------------------------------------------------- a fleet that writes


class Broadcaster:
    """A replica that writes weights."""

    def __init__(self, store: Store, slot: str, clock: ManualClock, rules: Rules) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        tell: Callable[..., None] = lambda event, **fields: self.told.append((event, fields))  # noqa: E731
        weights = WeightsWriter(store, clock, reading=Inline(), uploads=Inline(), emit=tell)
        weights.layout = LAYOUT
        self.weights = weights
        self.state = VectorState(SIZE // rules.fragments, value=1.0, fragments=rules.fragments)
        self.rv = Rendezvous(store, clock, slot, rules, TIMING, emit=tell, weights=weights)
        self.rv.claim()
        self.rv.join(self.state)

    def offer(self) -> None:
        rng = np.random.default_rng([int(self.rv.slot[1:]), self.rv.step])
        delta = np.zeros(self.state.size(self.rv.fragment), np.float32)
        delta[rng.integers(len(delta))] = 0.25
        self.rv.offer(delta, 2)

    def step(self) -> None:
        commit = self.rv.settle()
        mean = np.empty(self.state.size(0), np.float32)
        self.rv.mean(commit, mean)
        self.state.apply(commit.t % self.rv.rules.fragments, mean)
        self.rv.advance(commit)

    def bits(self) -> np.ndarray:
        fragments = self.rv.rules.fragments
        return patch.bf16_bits(np.concatenate([self.state.arrays(f)[f"theta.{f}"] for f in range(fragments)]))


class Broadcast:
    """Two replicas, a store that may fail, and a reader."""

    def __init__(self, fragments: int = 1) -> None:
        self.clock = ManualClock()
        self.store = FaultyStore(MemoryStore())
        write_control(self.store, self.clock, replicas=2, min_replicas=2, steps=1000)
        rules = Rules(sync_every=2, fragments=fragments, snapshot_every=100)
        self.seats = [Broadcaster(self.store, slot, self.clock, rules) for slot in ("r00", "r01")]
        self.refused: list[str] = []
        self.reader = self.new_reader()

    def new_reader(self) -> WeightsFollower:
        return WeightsFollower(self.store, lambda event, **fields: self.refused.append(f"{event}: {fields['text']}"))

    def step(self, count: int = 1) -> None:
        """The two take turns in closing."""
        for _ in range(count):
            for seat in self.seats:
                seat.offer()
            for seat in self.seats[:: 1 - 2 * (self.t % 2)]:
                seat.step()

    @property
    def t(self) -> int:
        return self.seats[0].rv.step

    def manifest(self, t: int) -> Weights:
        found = read_weights(self.store, t)
        assert found is not None
        return found

    def alter(self, t: int, **changes: Any) -> None:
        self.store.put(layout.weights_key(t), replace(self.manifest(t), **changes).encode())

    def is_at(self, found: FollowedWeights | None, t: int) -> bool:
        return found is not None and found.step == t == self.t and np.array_equal(found.bits, self.seats[0].bits())


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_reader_has_the_bits_of_every_step(fragments: int) -> None:
    fleet = Broadcast(fragments)
    assert fleet.reader.poll() is None
    for t in range(1, 2 * ANCHOR_EVERY + 3):
        fleet.step()
        assert fleet.is_at(fleet.reader.poll(), t) and fleet.reader.poll() is None
        anchor = not fleet.manifest(t).parent
        assert anchor == (t == 1 or t % ANCHOR_EVERY == 0)
    assert fleet.is_at(fleet.new_reader().poll(), fleet.t) and not fleet.refused
    closers = {seat.rv.slot for seat in fleet.seats if any(event == "weights" for event, _ in seat.told)}
    assert closers == {"r00", "r01"}


def test_changed_names_are_those_of_parameters_with_other_values() -> None:
    fleet = Broadcast()
    fleet.step()
    first = fleet.reader.poll()
    assert first is not None and first.changed == {"a.weight", "b"}
    before = first.bits.copy()
    for _ in range(6):
        fleet.step()
        found = fleet.reader.poll()
        assert found is not None
        differs = before != found.bits
        assert found.changed == {n for n, part in (("a.weight", differs[:8]), ("b", differs[8:])) if part.any()}
        assert dict(found.named_tensors(changed_only=True)).keys() == found.changed
        before = found.bits.copy()


def test_a_reader_that_was_away_reads_only_what_it_missed() -> None:
    fleet = Broadcast()
    fleet.step(2)
    fleet.reader.poll()
    fleet.step(5)
    found = fleet.reader.poll()
    assert fleet.is_at(found, 7) and found is not None
    assert found.bytes == sum(fleet.manifest(t).size for t in range(3, 8))


def test_weights_that_could_not_be_written_cost_no_step_and_an_anchor_follows() -> None:
    fleet = Broadcast()
    fleet.step(3)
    fleet.reader.poll()
    fleet.store.faults.append(Fault("put", "weights/0000000004"))
    fleet.step()
    assert fleet.t == 4 and fleet.reader.poll() is None
    assert [fields["trouble"] for seat in fleet.seats for event, fields in seat.told if event == "not_written"]
    fleet.step()
    assert not fleet.manifest(5).parent and fleet.is_at(fleet.reader.poll(), 5) and not fleet.refused


def test_a_flipped_bit_is_refused_and_the_next_anchor_repairs() -> None:
    fleet = Broadcast()
    fleet.step(3)
    (part,) = fleet.manifest(3).parts
    body = bytearray(fleet.store.get(part.blob) or b"")
    body[-1] ^= 1
    fleet.store.put(part.blob, body)
    found = fleet.reader.poll()
    assert found is not None and found.step == 2, "the newest that can be had"
    assert "does not have the announced bytes" in fleet.refused[0]
    fleet.step(ANCHOR_EVERY - 4)
    assert fleet.reader.poll() is None and fleet.t == ANCHOR_EVERY - 1
    fleet.step()
    assert fleet.is_at(fleet.reader.poll(), ANCHOR_EVERY)


def test_a_wrong_parent_is_never_applied() -> None:
    fleet = Broadcast()
    fleet.step(2)
    fleet.reader.poll()
    fleet.step()
    fleet.alter(3, parent="xxh3-128:" + "0" * 32)
    assert fleet.reader.poll() is None
    assert "they build on xxh3-128:00000000000000000000000000000000" in fleet.refused[0]


def test_a_false_digest_of_the_whole_is_refused_and_the_reader_starts_again() -> None:
    fleet = Broadcast()
    fleet.step(2)
    fleet.reader.poll()
    fleet.step()
    fleet.alter(3, digest="xxh3-128:" + "0" * 32)
    assert fleet.reader.poll() is None and "was announced" in fleet.refused[0]
    fleet.step()
    assert not fleet.manifest(4).parent, "its writer saw that θ_3 in bf16 is not what stands there"
    assert fleet.is_at(fleet.reader.poll(), 4)


def test_weights_of_another_theta_than_the_runs_are_thrown_away() -> None:
    fleet = Broadcast()
    fleet.step(2)
    fleet.alter(2, base="somebody else's")
    assert fleet.reader.poll() is not None, "no commit says otherwise yet"
    fleet.step()
    assert not fleet.manifest(3).parent, "its writer goes on nothing that others would refuse"
    assert fleet.is_at(fleet.reader.poll(), 3) and "their writer had another θ" in fleet.refused[0]
    fleet.store.put(layout.weights_key(3), b"lost")
    found = fleet.new_reader().poll()
    assert found is not None and found.step == 1


def test_two_chains_stay_and_what_is_older_goes() -> None:
    fleet = Broadcast()
    fleet.step(3 * ANCHOR_EVERY + 2)
    blobs = {layout.weights_step(key.rpartition("/")[0] + "/manifest.json") for key in fleet.store.list(layout.WEIGHTS)
             if key.endswith(".bin")}  # fmt: skip
    assert blobs == set(range(2 * ANCHOR_EVERY, 3 * ANCHOR_EVERY + 3))
    assert all(read_weights(fleet.store, t) for t in range(1, fleet.t + 1)), "registers stay"


def test_theta_that_is_not_finite_is_not_written() -> None:
    fleet = Broadcast()
    fleet.step(2)
    for seat in fleet.seats:
        seat.weights.note_step(_Infinite(seat.state), 3, 1, base="", closed=True)
    assert read_weights(fleet.store, 3) is None
    assert "NaN or infinite" in next(f for e, f in fleet.seats[0].told if e == "not_written")["trouble"]


class _Infinite(VectorState):
    def __init__(self, like: VectorState) -> None:
        super().__init__(SIZE, value=float("inf"))


def test_uploads_that_are_slow_leave_steps_out() -> None:
    class Later(Inline):
        jobs: list[Callable[[], None]] = []  # noqa: RUF012

        def submit(self, job: Callable[[], None]) -> None:
            self.jobs.append(job)

    fleet = Broadcast()
    for seat in fleet.seats:
        seat.weights._uploads = Later()
    fleet.step(6)
    assert fleet.t == 6 and len(Later.jobs) == 2, "one for each replica; the steps went on"
    for job in Later.jobs:
        job()
    Later.jobs.clear()
    fleet.step()
    for job in Later.jobs:
        job()
    assert not fleet.manifest(7).parent and fleet.is_at(fleet.reader.poll(), 7)


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 8))])
def test_readers_of_a_damaged_bucket_have_right_weights_or_none(seed: int) -> None:
    """Slow, fast and restarted readers; blobs with a flipped bit, cut, gone; false parents, digests and bases."""
    rng = random.Random(seed)
    fleet = Broadcast(rng.choice([1, 3]))
    readers, truth, before = [fleet.new_reader() for _ in range(3)], dict[int, np.ndarray](), dict[int, np.ndarray]()
    for _ in range(ANCHOR_EVERY + 10):
        fleet.step()
        truth[fleet.t] = fleet.seats[0].bits()
        if rng.random() < 0.2:
            damage(fleet, rng.randrange(1, fleet.t + 1), rng)
        for i, reader in enumerate(readers):
            if rng.random() < 0.03:
                readers[i], reader = (new := fleet.new_reader()), new
                before.pop(i, None)
            if rng.random() < (0.9, 0.3, 0.05)[i] and (found := reader.poll()) is not None:
                assert np.array_equal(found.bits, truth[found.step])
                differs = before.get(i, ~found.bits) != found.bits
                assert found.changed >= {n for n, d in (("a.weight", differs[:8]), ("b", differs[8:])) if d.any()}
                before[i] = found.bits.copy()


def damage(fleet: Broadcast, t: int, rng: random.Random) -> None:
    manifest = read_weights(fleet.store, t)
    if manifest is None or not manifest.parts:
        return
    blob = manifest.parts[0].blob
    body = bytearray(fleet.store.get(blob) or b"\0")
    body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    harm: list[Callable[[], Any]] = [
        lambda: fleet.store.put(blob, body),
        lambda: fleet.store.put(blob, body[:-1]),
        lambda: fleet.store.delete([blob]),
        lambda: fleet.store.put(layout.weights_key(t), b"lost"),
        lambda: fleet.alter(t, digest="xxh3-128:" + "0" * 32),
        lambda: fleet.alter(t, base="somebody else's"),
        lambda: fleet.alter(t, parent="xxh3-128:" + "0" * 32) if manifest.parent else None,
    ]
    rng.choice(harm)()


# ---------------------------------------------------------------------- what a reader does with them


def test_they_are_loaded_into_a_model() -> None:
    fleet = Broadcast()
    fleet.step(2)
    found = next(follow_weights(fleet.store, clock=fleet.clock))
    model = torch.nn.Module()
    model.a = torch.nn.Linear(4, 2, bias=False)
    model.b = torch.nn.Parameter(torch.zeros(4))
    found.load_into(model)
    theta = torch.from_numpy(fleet.seats[0].state.theta).bfloat16().float()
    assert torch.equal(model.a.weight, theta[:8].view(2, 4)) and torch.equal(model.b, theta[8:])
    model.b = torch.nn.Parameter(torch.zeros(5))
    with pytest.raises(WrongRun, match=r"parameter b has shape \(4,\), this model has \(5,\)"):
        found.load_into(model)
    del model.b
    with pytest.raises(WrongRun, match="no such parameter"):
        found.load_into(model)


def test_following_ends_where_it_should() -> None:
    fleet = Broadcast()
    fleet.step()

    def step_and_sleep(seconds: float) -> None:
        fleet.step()

    fleet.clock.sleep = step_and_sleep  # type: ignore[method-assign]
    assert [found.step for found in follow_weights(fleet.store, until=4, clock=fleet.clock)] == [1, 2, 3, 4]


def test_an_anchor_names_the_parameters_and_a_wrong_layout_is_no_record() -> None:
    fleet = Broadcast()
    fleet.step()
    manifest = fleet.manifest(1)
    assert manifest.layout == LAYOUT and writer.ANCHOR_EVERY == 30
    for layout_ in ([["a", [2, 4], "float32"]], [["a", [-12], "float32"]], [["a"]], [[1, [12], "float32"]]):
        fleet.store.put(layout.weights_key(1), unchecked(replace(manifest, layout=layout_)))
        assert read_weights(fleet.store, 1) is None


def test_a_follower_up_to_a_step_ends_when_the_run_is_over_and_its_weights_never_came() -> None:
    clock, store = ManualClock(), MemoryStore()
    store.put(layout.commit_key(7), b"{}")
    assert list(follow_weights(store, until=8, clock=clock)) == []
    assert 300 <= clock.now() < 400
