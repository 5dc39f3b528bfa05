"""Digests of θ and momentum: how many bytes a sync reads for them, and that no corruption gets past them.

H inner steps = F syncs:  offer · apply · after  ──▶  3 × the fragment, F times = 3 × the state, for every F
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from diloco.outer.optimizer import Nesterov, OuterState
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import Rules, Timing
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.errors import Diverged
from rendezvous.snapshots import record as snapshots
from rendezvous.store import Store
from rendezvous.stores.memory import MemoryStore
from tests.support.fakes import ManualClock

N = 4096  # parameters
NAMES = ("theta", "momentum", "last_mean", "rho")


def outer_state(fragments: int, lr: float | str = 0.7) -> OuterState:
    thetas = [torch.nn.Parameter(torch.ones(N // fragments)) for _ in range(fragments)]
    return OuterState([t.data for t in thetas], [Nesterov(t, lr=lr, momentum=0.5) for t in thetas])


class Solo:
    """A replica alone: every step is its own."""

    def __init__(self, fragments: int, *, snapshot_every: int = 1000, steps: int = 100, lr: float | str = 0.7) -> None:
        clock, self.store = ManualClock(), MemoryStore()
        write_control(self.store, clock, replicas=1, min_replicas=1, steps=steps)
        self.state, rules = outer_state(fragments, lr), Rules(fragments, 8, snapshot_every=snapshot_every)
        self.rv = Rendezvous(self.store, clock, "r00", rules, Timing(poll=0.1))
        self.rv.claim()

    def join(self) -> "Solo":
        self.rv.join(self.state)
        return self

    def offer(self) -> None:
        delta = np.random.default_rng(self.rv.step).standard_normal(self.state.size(0), np.float32)
        self.rv.offer(delta, 8)

    def apply(self) -> None:
        commit, mean = self.rv.settle(), np.empty(self.state.size(0), np.float32)
        self.rv.mean(commit, mean)
        self.state.apply(self.rv.fragment, mean)
        self.rv.advance(commit)

    def round(self, steps: int) -> None:
        for _ in range(steps):
            self.offer()
            self.apply()

    def flip(self, fragment: int, name: str = "theta") -> None:
        """One bit of bad memory."""
        self.state.arrays(fragment)[f"{name}.{fragment}"].view(np.uint8)[1] ^= 1


# ---------------------------------------------------------------------- how many bytes


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every buffer that is digested, by either function of xxhash."""
    found, whole, streamed = list[Any](), xxhash.xxh3_128_hexdigest, xxhash.xxh3_128

    class Counting:
        def __init__(self, data: Any = b"") -> None:
            self._h = streamed()
            self.update(data)

        def update(self, data: Any) -> None:
            found.append(data)
            self._h.update(data)

        def hexdigest(self) -> str:
            return self._h.hexdigest()

    monkeypatch.setattr(xxhash, "xxh3_128_hexdigest", lambda data: (found.append(data), whole(data))[1])
    monkeypatch.setattr(xxhash, "xxh3_128", Counting)
    yield found


def bytes_of_the_state(found: list[Any], state: OuterState) -> int:
    """How many of these bytes are θ or momentum, by where they are in memory."""
    memory = [*state.thetas, *(o.momentum for o in state.optimizers)]
    buffers = [np.frombuffer(data, np.uint8) for data in found]
    return sum(b.nbytes for b in buffers if any(np.may_share_memory(b, x.numpy()) for x in memory))


@pytest.mark.parametrize("fragments", [1, 4, 8])
def test_in_h_inner_steps_three_times_the_state_is_digested_whatever_f_is(digested: list[Any], fragments: int) -> None:
    solo = Solo(fragments).join()
    solo.round(fragments)
    digested.clear()
    solo.round(fragments)
    assert bytes_of_the_state(digested, solo.state) == 3 * (4 + 4) * N


def test_a_replica_that_only_catches_up_digests_what_is_stepped_twice(digested: list[Any]) -> None:
    solo = Solo(4).join()
    solo.offer()
    commit = solo.rv.settle()
    digested.clear()
    solo.rv.take_step(commit)
    assert bytes_of_the_state(digested, solo.state) == (4 + 4) * N // 4, "it was compared in settle"


# ---------------------------------------------------------------------- what is noticed, and when

AUTO = pytest.mark.parametrize("name", NAMES)


def written(store: Store, prefix: str) -> list[str]:
    return [
        key
        for key in store.list(prefix)
        if key != layout.snapshot_key(0) and not key.startswith("snapshots/0000000000")
    ]


@AUTO
def test_corruption_of_the_fragment_is_noticed_before_anything_of_it_is_offered(name: str) -> None:
    solo = Solo(4, lr="auto").join()
    solo.round(5)
    solo.flip(1, name)
    before = solo.store.list("")
    with pytest.raises(Diverged, match="fragment 1 has digest"):
        solo.offer()
    assert solo.store.list("") == before


@AUTO
def test_corruption_while_the_offer_waits_is_noticed_before_the_step(name: str) -> None:
    solo = Solo(4, lr="auto").join()
    solo.round(4)
    solo.offer()
    solo.flip(0, name)
    with pytest.raises(Diverged, match="fragment 0"):
        solo.rv.settle()


@AUTO
def test_corruption_of_another_fragment_is_noticed_when_its_turn_comes(name: str) -> None:
    solo = Solo(4, lr="auto").join()
    solo.round(4)
    solo.flip(3, name)
    solo.round(3)
    with pytest.raises(Diverged, match="fragment 3"):
        solo.offer()
    assert not written(solo.store, layout.delta_blob(7, "r00", 1, "")[:30]), "nothing of it is in the bucket"


@AUTO
def test_corruption_of_any_fragment_is_noticed_before_a_snapshot_is_visible(name: str) -> None:
    solo = Solo(4, snapshot_every=6, lr="auto").join()
    solo.round(5)
    solo.flip(0, name)
    with pytest.raises(Diverged, match="fragment 0"):
        solo.round(6)
    assert [s.t for s in snapshots.newest_first(solo.store)] == [0]


@AUTO
def test_corruption_of_any_fragment_is_noticed_at_the_end_of_the_run(name: str) -> None:
    solo = Solo(4, steps=6, lr="auto").join()
    solo.round(6)
    solo.flip(3, name)
    with pytest.raises(Diverged, match="fragment 3"):
        solo.rv.finish("done")
    assert not written(solo.store, "leave/") and not written(solo.store, "snapshots/")


@AUTO
def test_corruption_while_a_replica_joins_is_noticed_before_its_first_inner_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Solo(4, lr="auto").join()
    first.round(2)
    late = Solo(4, lr="auto")
    late.rv = Rendezvous(first.store, ManualClock(), "r00", first.rv.rules, Timing(poll=0.1))
    late.rv.claim()
    apply = late.state.apply

    def flips(fragment: int, mean: np.ndarray) -> None:
        apply(fragment, mean)
        if fragment == 1:
            late.flip(3, name)  # its turn does not come in this replay

    monkeypatch.setattr(late.state, "apply", flips)
    with pytest.raises(Diverged, match="fragment 3"):
        late.join()


def test_the_base_is_the_digest_of_the_fragments_digests_in_their_order() -> None:
    solo, xx = Solo(2).join(), xxhash.xxh3_128_hexdigest
    solo.round(3)
    each = []
    for f in range(2):
        theta, momentum = solo.state.thetas[f].numpy(), solo.state.optimizers[f].momentum.numpy()
        each.append(xx((xx(theta.tobytes()) + xx(momentum.tobytes())).encode()))
    assert solo.rv.base == solo.state.digest() == xx("".join(each).encode())
