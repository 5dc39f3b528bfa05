"""The decisions, as tables: what was seen, and what follows."""

from typing import Any

import numpy as np
import pytest

from rendezvous import rules
from rendezvous.membership import seen
from rendezvous.records import Beat, Commit, Listed, Offer
from rendezvous.rules import Peer, Rules, Timing

TIMING = Timing(poll=0.5, beat=1.0, dead_after=4.0, start_patience=30.0)
FOUR = Rules(sync_every=4)


def beat(slot: str = "r01", **fields: Any) -> Beat:
    plain: dict[str, Any] = {"generation": 1, "n": 1, "phase": "train", "step": 5, "inner": 2, "rate": 1.0, "at": 0.0}
    return Beat(slot, **(plain | fields))


def peer(changes: int = 3, silent: float = 0.0, still: float = 0.0, liar: int = 0, **fields: Any) -> Peer:
    return Peer(beat(**fields), changes, silent, still, liar)


def offer(slot: str, took: float = 4.0, **fields: Any) -> Offer:
    plain: dict[str, Any] = {"generation": 1, "base": "b", "h": 4, "took": took}
    made = plain | fields
    return Offer(5, slot, made["generation"], "n", made["base"], made["h"], "blob", 12, "d", made["took"], 0.0)


def commit(t: int, *slots: str, leaving: tuple[str, ...] = ()) -> Commit:
    listed = tuple(Listed(t, s, 1, "n", "b", 12, "d", 4, 1.0, leaving=s in leaving) for s in slots)
    return Commit(t, None, "b", listed, {}, 1, 1.0, 0, "r00-1", "n", 0.0)


# ---------------------------------------------------------------------- weights, patience, pace


@pytest.mark.parametrize(
    ("h", "every", "age", "weight"),
    [(4, 4, 0, 1.0), (2, 4, 0, 0.5), (4, 4, 1, 0.5), (4, 4, 2, 0.25), (1, 3, 0, np.float32(1 / 3)),
     (2, 3, 1, np.float32(1 / 3)), (7, 10, 2, np.float32(0.175))],
)  # fmt: skip
def test_weight_is_h_by_H_discounted_by_age_in_fp32(h: int, every: int, age: int, weight: float) -> None:
    w = rules.weight(h, every, age, 0.5)
    assert np.float32(w) == np.float32(weight) and float(np.float32(w)) == w, "fp32 exactly, so that text keeps it"


def test_patience_and_pace() -> None:
    assert rules.patience([10.0, 4.0, 6.0], poll=0.5) == 3.0, "half of the median took"
    assert rules.patience([1.0], poll=0.5) == 1.0, "at least two polls"
    assert rules.pace([10.0, 4.0, 6.0], poll=0.5) == 7.5


@pytest.mark.parametrize(
    ("cap", "fresh", "h", "took", "after"),
    [
        (8, True, 8, 10.0, 8),  # never above H
        (3, True, 3, 10.0, 4),  # listed fresh: one more
        (8, False, 8, 20.0, 4),  # left out: what fits the pace of 10 s
        (8, False, 8, 200.0, 1),  # at least one
        (8, False, 2, 2.0, 8),  # a short partial says nothing against eight
        (8, False, 8, 0.0, 8),
    ],
)
def test_next_cap(cap: int, fresh: bool, h: int, took: float, after: int) -> None:
    assert rules.next_cap(cap, 8, fresh=fresh, h=h, took=took, pace_s=10.0) == after


def test_window_reaches_back_to_the_oldest_offer_that_may_be_carried_and_its_fence() -> None:
    for fragments in (1, 2, 3):
        for carry in (0, 1, 2, 3):
            assert Rules(fragments=fragments, max_carry=carry).window >= max(2, fragments * carry) + 1


# ---------------------------------------------------------------------- who counts


@pytest.mark.parametrize(
    ("base", "generation", "fence", "counts"),
    [("b", 2, {}, True), ("b", 2, {"r01": 2}, True), ("b", 2, {"r01": 3}, False), ("x", 2, {}, False),
     ("b", 2, {"r02": 9}, True)],
)  # fmt: skip
def test_eligible(base: str, generation: int, fence: dict[str, int], counts: bool) -> None:
    assert rules.eligible(offer("r01", base=base, generation=generation), "b", fence) == counts


def test_expected_are_those_whom_the_last_two_commits_list() -> None:
    recent = [commit(4, "r00", "r02"), commit(3, "r01")]
    assert rules.expected(5, recent, {}, 4.0, ["r00"]) == {"r00", "r01", "r02"}


def test_who_said_goodbye_is_not_expected_until_it_is_listed_again() -> None:
    gone, back = commit(3, "r00", "r01", leaving=("r01",)), commit(4, "r00", "r01")
    assert rules.expected(4, [gone], {}, 4.0, []) == {"r00"}
    assert rules.expected(5, [back, gone], {}, 4.0, []) == {"r00", "r01"}
    assert rules.expected(5, [commit(4, "r00"), gone], {}, 4.0, []) == {"r00"}


def test_a_beat_that_is_older_than_the_last_commit_does_not_say_that_its_slot_is_starting() -> None:
    recent = [commit(4, "r00", "r01"), commit(3, "r00", "r01")]
    assert rules.expected(5, recent, {"r01": peer(phase="boot", generation=1)}, 4.0, []) == {"r00", "r01"}
    assert rules.expected(5, recent, {"r01": peer(phase="boot", generation=2)}, 4.0, []) == {"r00"}, "a new life"
    assert rules.expected(5, recent, {"r01": peer(phase="train", generation=2)}, 4.0, []) == {"r00", "r01"}
    assert rules.expected(1, [commit(0, "r01")], {"r01": peer(phase="boot")}, 4.0, ["r01"]) == {"r01"}


def test_before_there_are_two_commits_those_are_expected_who_beat() -> None:
    peers = {"r01": peer(), "r02": peer(changes=0), "r03": peer(silent=9.0), "r04": peer(phase="boot")}
    peers["r05"] = peer(changes=0, silent=9.0)
    wanted = ["r01", "r02", "r03", "r04", "r05", "r06"]
    at_first = rules.expected(0, [], peers, 4.0, wanted)
    assert at_first == {"r01", "r02", "r04", "r06"}, "at t = 0 also those that boot, were seen once, or not yet"
    assert rules.expected(1, [], peers, 4.0, wanted) == {"r01"}


# ---------------------------------------------------------------------- who is waited for

FRESH = {"r00": offer("r00", took=4.0)}  # patience 2 s, arrival within 6 s


@pytest.mark.parametrize(
    ("other", "t", "waited", "waits"),
    [
        (peer(), 5, 0.0, True),  # two inner steps to go
        (peer(), 5, 5.0, True),  # still making progress
        (peer(), 5, 99.0, False),  # its predictions were wrong too often
        (peer(rate=4.0), 5, 1.0, True),  # too far away: patience
        (peer(rate=4.0), 5, 3.0, False),
        (peer(step=4), 5, 3.0, True),  # a whole round to go, four seconds
        (peer(still=20.0), 5, 1.0, True),  # hangs: patience
        (peer(still=20.0), 5, 3.0, False),
        (peer(rate=3.5, inner=3, still=3.0), 5, 3.0, True),  # in a long inner step
        (peer(silent=5.0), 5, 0.0, False),  # dead
        (peer(silent=5.0, changes=0), 5, 1.0, True),  # never seen to beat: cannot be called dead
        (peer(silent=5.0, liar=1), 5, 1.0, True),  # its beat lies
        (peer(phase="left", liar=1), 5, 0.0, False),
        (peer(phase="boot"), 5, 1.0, True),  # an old beat: patience
        (peer(phase="heal"), 5, 3.0, False),
        (peer(phase="boot", step=0), 0, 20.0, True),  # at the very start everybody is waited for
        (peer(phase="boot", step=0), 0, 31.0, False),
        (peer(rate=0.0, step=0, inner=0), 0, 20.0, True),
        (peer(rate=0.0, step=0, inner=0, still=32.0), 0, 31.0, False),
        (None, 0, 3.0, True),  # nobody knows yet: as long as a beat takes to be called silent
        (None, 0, 5.0, False),
        (None, 5, 1.0, True),
        (None, 5, 3.0, False),
    ],
)
def test_waiting_for(other: Peer | None, t: int, waited: float, waits: bool) -> None:
    peers = {} if other is None else {"r01": other}
    reasons = rules.waiting_for(t, FRESH, {"r00", "r01"}, peers, waited, FOUR, TIMING)
    assert list(reasons) == (["r01"] if waits else [])


def test_arrival_counts_the_fragment_rounds() -> None:
    two = Rules(sync_every=8, fragments=2)
    assert rules.arrival(peer(inner=1), 5, two, 2.0) == 3.0
    assert rules.arrival(peer(inner=1, step=4), 5, two, 2.0) == 4.0
    assert rules.arrival(peer(inner=1, still=0.5), 5, two, 2.0) == 2.5
    assert rules.arrival(peer(inner=9), 5, two, 2.0) == 0.0
    assert rules.arrival(peer(rate=0.0), 5, two, 2.0) is None


def test_ranks_are_at_most_four_apart_and_take_turns() -> None:
    for slots in (1, 2, 3, 4, 9, 64):
        ranks = {(t, s): rules.rank(t, s, slots) for t in range(50) for s in range(slots)}
        assert set(ranks.values()) <= set(range(4))
        for s in range(slots):
            assert any(ranks[t, s] == 0 for t in range(50)), "everybody comes first now and then"


# ---------------------------------------------------------------------- what is seen of a heartbeat


def test_a_beat_is_believed_while_it_changes() -> None:
    first = seen(None, beat(n=1), 0.0)
    assert not first.beating(4.0) and not first.dead(4.0), "one look says nothing"
    moving = seen(first, beat(n=2), 1.0)
    assert moving.beating(4.0) and moving.silent == 0.0 and moving.still == 1.0
    stands = seen(seen(moving, beat(n=2), 3.0), beat(n=2), 3.0)
    assert stands.dead(4.0) and stands.silent == 6.0
    assert seen(stands, beat(n=3, inner=3), 1.0).still == 0.0


def test_a_zombie_that_writes_its_successors_beat_is_not_seen() -> None:
    successor = seen(seen(None, beat(n=1, generation=2), 0.0), beat(n=2, generation=2), 1.0)
    after = seen(successor, beat(n=77, generation=1), 1.0)
    assert after.beat.generation == 2 and after.silent == 1.0
