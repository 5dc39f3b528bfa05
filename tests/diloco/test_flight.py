"""A round that is under way while inner steps go on, and what ends it early.

    inner step   1 … 10    11    12   …   99   100                H = 100, τ = 90
                     └─ offer ─▶ settle ─▶ mean ─┘ join
                              ▲      ▲
                        SIGTERM, an error, the end of the block: seen at the next inner step, not at the hundredth

The store is one in memory whose requests can be held up; no test sleeps.

Not promised: anything about how long a round takes (tests/benchmarks/bench_overlap.py).
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from diloco.outer.loop import OuterLoop
from diloco.outer.make import make_diloco
from diloco.outer.managers.manager import StoreManager
from rendezvous import layout
from rendezvous.agreement.rules import Timing
from rendezvous.errors import Fenced, GaveUp
from rendezvous.records.records import Leave, Offer
from rendezvous.store import Buffer
from rendezvous.stores.memory import MemoryStore

H, DELAY, PREPARE = 100, 90, 10
LIMIT = 20.0  # seconds after which a test has failed


class Held(MemoryStore):
    """Says when a replica wants to write a body, and lets it through when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.through, self.offered = threading.Event(), threading.Event(), threading.Event()
        self.through.set()
        self.error: Exception | None = None

    def put(self, key: str, body: Buffer) -> None:
        if key.endswith(".bin"):
            self.asked.set()
            assert self.through.wait(LIMIT)
            if self.error is not None:
                raise self.error
        super().put(key, body)

    def create(self, key: str, body: Buffer) -> None:
        super().create(key, body)
        if key == layout.offer_key(0, "r00", 0):
            self.offered.set()


class Replica:
    """r00 under a loop whose inner steps are counted."""

    def __init__(self, store: MemoryStore, needed: int, **timing: float) -> None:
        self.store, self.steps = store, 0
        quick = Timing(**{"poll": 0.002, "beat": 0.01, **timing})
        self.manager = StoreManager(store, replicas=needed, min_replicas=needed, timing=quick)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loop(self) -> OuterLoop:
        return make_diloco(
            self.model, self.optimizer, self.manager, sync_every=H, fragment_sync_delay=DELAY, fragment_update_alpha=0.5
        )

    def train(self, count: int) -> None:
        for _ in range(count):
            self.steps += 1
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 4)).sum().backward()
            self.optimizer.step()

    def landed(self) -> None:
        """Wait until the round under way has ended, well or not."""
        flight = self.manager.rounds.in_flight
        assert flight is not None
        flight._thread.join(LIMIT)
        assert not flight._thread.is_alive()

    @property
    def offer(self) -> Offer:
        body = self.store.get(layout.offer_key(0, "r00", 0))
        assert body is not None, "the offer under way must become durable"
        return Offer.decode(body)

    @property
    def goodbye(self) -> Leave:
        body = self.store.get(layout.leave_key("r00", 1))
        assert body is not None, "it left without a word"
        return Leave.decode(body)


@contextmanager
def sigterm(action: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def no_round_is_left() -> bool:
    return not any(t.name == "round" for t in threading.enumerate())


# ---------------------------------------------------------------- SIGTERM


@pytest.mark.parametrize("durable", [True, False], ids=["offer durable", "body on its way"])
def test_sigterm_while_others_are_awaited_is_seen_at_the_next_inner_step(durable: bool) -> None:
    store = Held()
    one = Replica(store, needed=2)
    with sigterm(one.manager.ask_to_leave), one.loop():
        if not durable:
            store.through.clear()
        one.train(PREPARE + 1)
        assert (store.offered if durable else store.asked).wait(LIMIT)
        signal.raise_signal(signal.SIGTERM)
        store.through.set()
        one.train(H)
    assert one.steps == PREPARE + 2
    assert one.manager.left and one.goodbye.step == 0
    assert one.offer.h == PREPARE and one.offer.leaving != durable
    assert no_round_is_left()


def test_sigterm_after_the_decision_takes_the_outer_step_and_leaves_a_round_of_one_behind() -> None:
    """It does not wait for the rest of τ: inner steps may take longer than the grace time."""
    one = Replica(Held(), needed=1)
    with sigterm(one.manager.ask_to_leave), one.loop():
        one.train(PREPARE + 1)
        one.landed()
        signal.raise_signal(signal.SIGTERM)
        one.train(H)
    assert one.steps == PREPARE + 4, "land; prepare; leave"
    assert one.manager.left and one.goodbye.step == 1
    assert no_round_is_left()


# ---------------------------------------------------------------- errors


def test_giving_up_is_seen_at_the_next_inner_step() -> None:
    one = Replica(Held(), needed=2, give_up=0.02)
    with pytest.raises(GaveUp, match="step 0 was open"), one.loop():
        one.train(PREPARE)
        one.landed()
        one.train(H)
    assert one.steps == PREPARE + 1
    one.manager.shutdown()


def test_a_successor_is_seen_at_the_next_inner_step() -> None:
    store = Held()
    one = Replica(store, needed=2)
    lives = [one.manager]
    with pytest.raises(Fenced, match="belongs to generation 2"), one.loop():
        one.train(PREPARE)
        assert store.offered.wait(LIMIT)
        lives.append(StoreManager(store))
        one.landed()
        one.train(H)
    assert one.steps == PREPARE + 1 and one.offer.generation == 1
    for manager in lives:
        manager.shutdown()


def test_a_bug_is_seen_at_the_next_inner_step() -> None:
    store = Held()
    one = Replica(store, needed=1)
    with pytest.raises(ZeroDivisionError), one.loop():
        store.error = ZeroDivisionError()
        one.train(PREPARE)
        one.landed()
        one.train(H)
    assert one.steps == PREPARE + 1
    one.manager.shutdown()


# ---------------------------------------------------------------- the end of the block


def test_the_block_ends_when_what_is_on_its_way_is_durable() -> None:
    store = Held()
    one = Replica(store, needed=2)
    with one.loop():
        ask = one.manager.session.rv.ask_to_leave

        def ask_and_let_through() -> None:
            ask()
            store.through.set()

        one.manager.session.rv.ask_to_leave = ask_and_let_through
        store.through.clear()
        one.train(PREPARE + 5)
        assert store.asked.wait(LIMIT)
    assert one.offer.h == PREPARE and one.offer.leaving
    assert one.goodbye.reason == "done" and one.goodbye.step == 0
    assert not one.manager.left and no_round_is_left()


def test_the_block_ends_when_the_round_is_decided_and_not_yet_taken() -> None:
    one = Replica(Held(), needed=1)
    with one.loop():
        one.train(PREPARE + 5)
        one.landed()
    assert one.store.get(layout.commit_key(0)) is not None
    assert one.goodbye.reason == "done" and one.goodbye.step == 0
    assert not one.manager.left and no_round_is_left()
