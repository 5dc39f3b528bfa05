"""The residual of a codec, from one life of a slot to the next: nothing lost with a goodbye, nothing used twice.

Σ of all pseudogradients  =  Σ of all decoded bodies  +  the residual of the last life
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rendezvous import layout
from rendezvous.agreement.rules import Rules
from rendezvous.codecs import get_codec
from rendezvous.errors import StoreUnclear
from rendezvous.records.digests import digest
from rendezvous.records.records import Commit, Leave
from rendezvous.records.tensors import TensorFile
from rendezvous.store import Store
from tests.rendezvous.test_engine import RULES, TIMING, Seat, bucket
from tests.support.fakes import Fault, FaultyStore, ManualClock

LOSSY = replace(RULES, codec="int4")
DELTAS = [np.array(d, np.float32) for d in ((1, 0.3, 0.02), (0.7, -0.2, 0.1), (0.1, 0.9, -0.05))]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def solo(clock: ManualClock, rules: Rules = LOSSY) -> tuple[FaultyStore, Callable[[], Seat]]:
    store = bucket(clock, replicas=1, m=1, steps=9)
    return store, lambda: Seat(store, "r00", clock, rules).join()


def work(seat: Seat, delta: np.ndarray) -> Commit:
    seat.offer(*delta.tolist())
    return seat.step()


def decoded(store: Store, commit: Commit) -> np.ndarray:
    out = np.empty(3, np.float32)
    (listed,) = commit.offers
    get_codec("int4").decode(store.get(listed.blob) or b"", out)
    return out


def held(seat: Seat) -> np.ndarray:
    return seat.rv.own_blobs.encoder.unsent_residuals.get("residual.0", np.zeros(3, np.float32))


def goodbye(store: Store, generation: int) -> Leave:
    return Leave.decode(store.get(layout.leave_key("r00", generation)) or b"")


def test_nothing_is_lost_over_three_lives_that_leave(clock: ManualClock) -> None:
    store, life = solo(clock)
    seats, sent = list[Seat](), np.zeros(3, np.float32)
    for delta in DELTAS:
        seats.append(seat := life())
        sent += decoded(store, work(seat, delta))
        seat.rv.ask_to_leave()
        seat.rv.finish("asked to leave")
    assert np.abs(sent - sum(DELTAS)).max() > 0.01, "this codec loses enough to see"
    np.testing.assert_allclose(sent + held(seats[-1]), sum(DELTAS), rtol=0, atol=1e-6)
    assert [e["of"] for e in seats[-1].events("inherited")] == [2]
    assert store.list("residuals/") == [goodbye(store, 3).residual], "taken ones are gone"


def test_after_a_kill_the_next_life_starts_from_zero(clock: ManualClock) -> None:
    """2 inherits and is killed before it offers; 3 must not find what 1 left."""
    store, life = solo(clock)
    first = life()
    work(first, DELTAS[0])
    kept = store.inner.get
    first.rv.finish("asked to leave")
    blob = kept(goodbye(store, 1).residual) or b""
    second = life()
    assert np.array_equal(held(second), held(first)) and held(first).any()
    store.put(goodbye(store, 1).residual, blob)  # even if it had not been deleted
    assert not held(life()).any()


def test_what_does_not_fit_the_time_is_dropped_and_told(clock: ManualClock) -> None:
    store, life = solo(clock)
    seat = life()
    slow = Fault("put", "/delta/", error=None, before=lambda: clock.sleep(1000 * TIMING.grace))
    store.faults.append(slow)
    work(seat, DELTAS[0])
    seat.rv.ask_to_leave()
    seat.rv.finish("asked to leave")
    (told,) = seat.events("residual_dropped")
    assert told["bytes"] == 12 and told["left_s"] == TIMING.grace
    assert goodbye(store, 1).residual == "" and store.list("residuals/") == [] and not held(life()).any()


def test_with_no_grace_left_it_is_dropped(clock: ManualClock) -> None:
    _, life = solo(clock)
    seat = life()
    work(seat, DELTAS[0])
    seat.rv.ask_to_leave()
    clock.sleep(TIMING.grace)
    seat.rv.finish("asked to leave")
    assert seat.events("residual_dropped")


def test_the_grace_begins_when_the_inner_step_ends_in_which_it_was_asked_to_go(clock: ManualClock) -> None:
    """Before: after a longer inner step the first pause of the upload ended it, and the work was lost in silence."""
    store, life = solo(clock)
    seat = life()
    seat.rv.members.status.enter_phase("train", 0)
    seat.rv.ask_to_leave()
    clock.sleep(4 * TIMING.grace)  # the rest of its inner step
    store.faults.append(Fault("put", "/delta/", error=StoreUnclear("busy"), times=2))
    seat.offer(*DELTAS[0].tolist())
    assert store.list("steps/0000000000/offer/"), "what it did is durable"
    seat.rv.finish("asked to leave")
    assert goodbye(store, 1).residual and not seat.events("residual_dropped")


def with_baggage(seat: Seat, n: int = 4) -> Seat:
    seat.rv.baggage = lambda: {"m": np.arange(n, dtype=np.float32)}
    return seat


def test_baggage_goes_along_once_and_residuals_go_first(clock: ManualClock) -> None:
    _, life = solo(clock)
    seat = with_baggage(life())
    work(seat, DELTAS[0])
    seat.rv.finish("asked to leave")
    after = life()
    assert (
        after.rv.inherited["m"].tolist() == [0, 1, 2, 3]
        and np.array_equal(held(after), held(seat))
        and held(seat).any()
    )
    assert not life().rv.inherited, "2 was killed"


def test_baggage_that_does_not_fit_the_time_is_dropped_and_the_residual_is_not(clock: ManualClock) -> None:
    store, life = solo(clock)
    seat = with_baggage(life(), 1 << 20)
    slow = Fault("put", "/delta/", error=None, before=lambda: clock.sleep(0.01))
    store.faults.append(slow)
    work(seat, DELTAS[0])
    seat.rv.finish("asked to leave")
    assert seat.events("baggage_dropped") and not seat.events("residual_dropped")
    after = life()
    assert held(after).any() and not after.rv.inherited


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_a_bad_blob_is_told_and_not_used(clock: ManualClock, harm: str) -> None:
    store, life = solo(clock)
    seat = life()
    work(seat, DELTAS[0])
    seat.rv.finish("asked to leave")
    key = goodbye(store, 1).residual
    store.delete([key]) if harm == "missing" else store.put(key, b"x" * 100)
    after = life()
    assert after.events("bad_residual") and not held(after).any()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"x" * 100, bytes(TensorFile({"residual.x": np.zeros(3, np.float32)})),
        bytes(TensorFile({"residual.0": np.zeros(4, np.float32)})),
        bytes(TensorFile({"residual.0": np.full(3, np.nan, np.float32)})),
        bytes(TensorFile({"residual.0": np.zeros(3, np.int64)})),
    ],
)  # fmt: skip
def test_a_blob_with_the_right_digest_that_is_no_residual_is_told_and_not_used(clock: ManualClock, body: bytes) -> None:
    store, life = solo(clock)
    seat = life()
    work(seat, DELTAS[0])
    seat.rv.finish("asked to leave")
    left = goodbye(store, 1)
    store.put(left.residual, body)
    store.put(layout.leave_key("r00", 1), replace(left, residual_digest=digest(body)).encode())
    after = life()
    assert after.events("bad_residual") and not held(after).any()
    work(after, DELTAS[1])
    work(after, DELTAS[1])


@pytest.mark.parametrize(("rules", "wishes"), [(RULES, {}), (LOSSY, {"steps": 1})])
def test_nothing_is_left_where_there_is_no_use_for_it(clock: ManualClock, rules: Rules, wishes: dict[str, Any]) -> None:
    """fp32 holds nothing back, and a run that is over needs nothing."""
    store = bucket(clock, replicas=1, m=1, **wishes)
    seat = Seat(store, "r00", clock, rules).join()
    work(seat, DELTAS[0])
    seat.rv.finish("done")
    assert goodbye(store, 1).residual == "" and store.list("residuals/") == []
