"""The decisions, as tables: what was seen, and what follows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rendezvous import layout
from rendezvous.agreement import rules
from rendezvous.agreement.membership import updated_peer
from rendezvous.agreement.rules import Peer, Rules, Timing
from rendezvous.errors import BadCommit
from rendezvous.means.reduce import refuse_misweighed
from rendezvous.records.records import Beat, Commit, Listed, Offer

TIMING = Timing(poll=0.5, beat=1.0, dead_after=4.0, start_patience=30.0)
FOUR = Rules(sync_every=4)


def beat(slot: str = "r01", **fields: Any) -> Beat:
    plain: dict[str, Any] = {"generation": 1, "n": 1, "phase": "train", "step": 5, "inner": 2, "rate": 1.0, "at": 0.0}
    return Beat(slot, **(plain | fields))


def peer(
    changes: int = 3, silent: float = 0.0, still: float = 0.0, untrusted_generation: int = 0, **fields: Any
) -> Peer:
    return Peer(beat(**fields), changes, silent, still, untrusted_generation)


def offer(slot: str, took: float = 4.0, **fields: Any) -> Offer:
    plain: dict[str, Any] = {"generation": 1, "base": "b", "h": 4, "took": took}
    made = plain | fields
    return Offer(5, slot, made["generation"], "n", made["base"], made["h"], "blob", 12, "d", made["took"], 0.0)


def commit(t: int, *slots: str, leaving: tuple[str, ...] = ()) -> Commit:
    listed = tuple(Listed(t, s, 1, "n", "b", 12, "d", 4, 1.0, leaving=s in leaving) for s in slots)
    return Commit(t, None, "b", listed, {}, 1, 1.0, 0, "r00-1", "n", 0.0)


# ---------------------------------------------------------------------- weights, patience, pace


def listed(slot: str = "r00", h: int = 4, age: int = 0, **fields: Any) -> Listed:
    """As for commit 5 of one fragment; scale: ‖θ‖."""
    return Listed(5 - age, slot, 1, "n", layout.delta_blob(5 - age, slot, 1, "n"), 12, "d", h, 0.0, **fields)


@pytest.mark.parametrize(
    ("h", "every", "age", "weight"),
    [(4, 4, 0, 1.0), (2, 4, 0, 0.5), (4, 4, 1, 0.5), (4, 4, 2, 0.25), (1, 3, 0, np.float32(1 / 3)),
     (2, 3, 1, np.float32(1 / 3)), (7, 10, 2, np.float32(0.175))],
)  # fmt: skip
def test_weight_is_h_by_H_discounted_by_age_in_fp32(h: int, every: int, age: int, weight: float) -> None:
    (o,) = rules.with_weights([listed(h=h, age=age)], 5, Rules(sync_every=every))
    assert np.float32(o.weight) == np.float32(weight)
    assert float(np.float32(o.weight)) == o.weight, "fp32 exactly, so that text keeps it"


def weights(weighting: str, *offers: Listed, fragments: int = 1) -> list[float]:
    return [o.weight for o in rules.with_weights(offers, 5, Rules(fragments, 4, weighting=weighting))]


def test_equal_offers_weigh_1_by_whatever_they_are_weighed() -> None:
    for weighting in rules.WEIGHTINGS:
        assert weights(weighting, *[listed(s, samples=96) for s in ("r00", "r01", "r02")]) == [1.0] * 3
        late = listed("r01", age=2, samples=96)
        assert weights(weighting, listed(samples=96), late) == [1.0, 0.25]
        assert weights(weighting, listed(samples=96), late, fragments=2) == [1.0, 0.5], "one sync of its fragment ago"


def test_uniform_ignores_h_and_samples_follow_samples() -> None:
    offers = [listed("r00", h=4, samples=30), listed("r01", h=1, samples=90), listed("r02", h=2, samples=45)]
    assert weights("uniform", *offers) == [1.0, 1.0, 1.0]
    assert weights("steps", *offers) == [1.0, 0.25, 0.5]
    assert weights("samples", *offers) == [float(np.float32(1 / 3)), 1.0, 0.5]


def test_an_offer_without_samples_makes_the_commit_weigh_by_steps() -> None:
    assert weights("samples", listed(samples=50), listed("r01", h=2)) == [1.0, 0.5]
    assert weights("samples", listed(), listed("r01", h=2)) == [1.0, 0.5], "and nothing is divided by 0"


# ---------------------------------------------------------------------- the norm gate


def gated(*norms: float, limit: float = 10.0, scale: float = 0.0, h: tuple[int, ...] = ()) -> list[float]:
    steps = h or (4,) * len(norms)
    return rules.norm_factors([listed(norm=n, scale=scale, h=k) for n, k in zip(norms, steps, strict=True)], limit)


def test_an_outlier_counts_as_a_typical_one() -> None:
    assert gated(1, 1, 1, 40) == [1.0, 1.0, 1.0, float(np.float32(1 / 40))]
    assert gated(1, 2, 19) == [1.0, 1.0, 1.0], "up to the limit everybody counts"
    assert gated(1, 2, 21) == [1.0, 1.0, float(np.float32(2 / 21))]
    assert gated(1, 1, 1e30)[-1] == float(np.float32(1e-30))
    assert gated(1, 2, 1e30, limit=0.0) == [1.0] * 3, "no gate"


def test_a_delta_that_cannot_be_judged_is_not_gated() -> None:
    assert gated() == [] and gated(5) == [1.0] and gated(1, 1e9) == [1.0, 1.0]
    assert gated(0, 0, 0, 1, 1e9) == [1.0] * 5, "zeros are honest, but no measure"
    assert gated(0, 1, 1, 1, 30) == [1.0] * 4 + [float(np.float32(1 / 30))]


def test_honest_fleets_are_not_damped() -> None:
    """Rounds of other lengths, learning that slows down, and rewards that only one replica has found."""
    assert gated(1, 1, 100, h=(1, 1, 100)) == [1.0] * 3, "as long per inner step"
    assert gated(100, 100, 90, 1, h=(100, 100, 100, 1)) == [1.0] * 4
    assert gated(30, 30, 8, h=(100, 100, 1)) == [1.0] * 3, "Adam's first steps go further than later ones"
    assert gated(1e-7, 1e-6, 0.5, scale=20.0) == [1.0] * 3, "θ is 20 long: 0.5 is nothing to be afraid of"
    assert gated(1e-7, 1e-6, 5.0, scale=20.0) == [1.0, 1.0, float(np.float32(1e-6 / 5))]
    spread = np.exp(np.random.default_rng(3).normal(0, 0.5, 64))
    assert set(gated(*spread)) == {1.0}


def test_the_gate_depends_neither_on_the_order_nor_on_the_unit() -> None:
    r = np.random.default_rng(11)
    norms = [float(x) for x in r.lognormal(0, 3, 12)]
    order, factors = r.permutation(12), gated(*norms)
    assert gated(*[norms[i] for i in order]) == [factors[i] for i in order]
    assert gated(*[n * 1024 for n in norms]) == factors and min(factors) < 1.0
    assert all(f == float(np.float32(f)) for f in factors)


def test_weights_survive_text_and_are_checked_by_readers() -> None:
    """A reader finds the closer's weights again from the offers in the commit, and refuses all others."""
    for weighting in rules.WEIGHTINGS:
        run = Rules(sync_every=7, weighting=weighting, norm_gate=3.0)
        offers = [listed(f"r{i:02d}", h=i + 1, norm=0.1 * 3**i, samples=10.0 + i, age=i % 2) for i in range(5)]
        made = Commit(5, None, "b", rules.with_weights(offers, 5, run), {}, 1, 1.0, 0, "r00-1", "n", 0.0)
        read = Commit.decode(made.encode())
        assert read == made and min(o.factor for o in read.offers) < 1.0
        refuse_misweighed(read, run)
        heavier = replace(read.offers[4], weight=2 * read.offers[4].weight)
        with pytest.raises(BadCommit, match=r"gives r04's offer for step 5 the weight .* Nothing was averaged"):
            refuse_misweighed(replace(read, offers=(*read.offers[:4], heavier)), run)


def test_patience_and_pace() -> None:
    assert rules.patience_s([10.0, 4.0, 6.0], poll=0.5) == 3.0, "half of the median took"
    assert rules.patience_s([1.0], poll=0.5) == 1.0, "at least two polls"


def offered(took: float, h: int = 8, *, zero: bool = False) -> Offer:
    return replace(offer("r01", took=took, h=h), zero=zero)


@pytest.mark.parametrize(
    ("fresh", "pace"),
    [
        ([offered(20.0), offered(10.0)], 10.0),  # the fastest of up to four
        ([offered(20.0), offered(5.0, h=2)], 20.0),  # of a full round: a partial one is reckoned up
        ([offered(10.0), offered(0.1, zero=True)], 10.0),  # a replica that learned nothing hurries none
        ([offered(3.0, zero=True)], 3.0),
        ([offered(1.0), *[offered(10.0)] * 4], 10.0),  # nor does one of five
        ([*[offered(1.0)] * 2, *[offered(10.0)] * 6], 1.0),
    ],
)
def test_pace_is_a_full_round_of_the_fastest_quarter(fresh: list[Offer], pace: float) -> None:
    assert rules.step_pace(fresh, 8) == pace


@pytest.mark.parametrize(
    ("slow", "fresh", "after"),
    [
        ([1.0], True, 8),
        ([4.0, 4.0], True, 8),  # too few to judge by
        ([1.0, 4.0, 1.0], True, 8),  # a hiccup
        ([2.0, 2.1, 2.2], True, 3),
        ([2.0, 1.0, 2.0], True, 4),  # half as fast: half as many
        ([2.0, 1.0, 1.0], True, 8),  # it has recovered
        ([1.33, 1.33, 1.33], True, 8),  # less than a third is not worth a step
        ([2.0], False, 4),  # left out: at once
        ([20.0], False, 1),  # at least one
    ],
)
def test_next_cap(slow: list[float], fresh: bool, after: int) -> None:
    assert rules.next_cap(8, slow, fresh=fresh) == after


def test_four_looks_are_no_slowness() -> None:
    assert rules.slowness(20.0, pace_s=10.0, poll=0.5) == 2.0
    assert rules.slowness(0.1, pace_s=0.02, poll=0.02) == 1.0
    assert rules.slowness(50.0, pace_s=0.0, poll=0.02) == 1.0
    assert rules.slowness(0.0, pace_s=10.0, poll=0.5) == 1.0, "not known"


def test_first_cap_is_what_the_others_have_left_to_do() -> None:
    """The cap in a round of 8 steps: the median of 2, 5 and 0, the last of a replica that has offered already."""
    there = [
        peer(phase="train", step=3, inner=6),
        peer(phase="train", step=3, inner=3),
        peer(phase="wait", step=3, inner=8),
    ]
    h8, h16f2 = Rules(sync_every=8), Rules(sync_every=16, fragments=2)
    assert rules.first_cap(3, there, h8, 1.0) == 2
    assert rules.first_cap(3, there, h16f2, 1.0) == 4, "h counts a fragment's inner steps, two rounds of them"
    assert rules.first_cap(3, [there[2]], h8, 1.0) == 1, "at least one"
    nobody = [peer(phase="heal", step=3), peer(phase="train", step=2, inner=7), peer(silent=9.0, step=3, inner=7)]
    assert rules.first_cap(3, nobody, h8, 1.0) == 8, "who starts, is elsewhere, or is dead does not count"
    assert rules.first_cap(0, [peer(phase="train", step=0, inner=6)], h8, 1.0) == 8, "at first all wait for all"


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
    assert rules.is_eligible(offer("r01", base=base, generation=generation), "b", fence) == counts


def test_expected_are_those_whom_the_last_two_commits_list() -> None:
    recent = [commit(4, "r00", "r02"), commit(3, "r01")]
    assert rules.slots_to_expect(5, recent, {}, 4.0, ["r00"]) == {"r00", "r01", "r02"}


def test_a_slot_that_has_left_is_not_expected_until_it_is_listed_again() -> None:
    gone, back = commit(3, "r00", "r01", leaving=("r01",)), commit(4, "r00", "r01")
    assert rules.slots_to_expect(4, [gone], {}, 4.0, []) == {"r00"}
    assert rules.slots_to_expect(5, [back, gone], {}, 4.0, []) == {"r00", "r01"}
    assert rules.slots_to_expect(5, [commit(4, "r00"), gone], {}, 4.0, []) == {"r00"}


def test_a_beat_that_is_older_than_the_last_commit_does_not_say_that_its_slot_is_starting() -> None:
    recent = [commit(4, "r00", "r01"), commit(3, "r00", "r01")]
    assert rules.slots_to_expect(5, recent, {"r01": peer(phase="boot", generation=1)}, 4.0, []) == {"r00", "r01"}
    assert rules.slots_to_expect(5, recent, {"r01": peer(phase="boot", generation=2)}, 4.0, []) == {"r00"}, "a new life"
    assert rules.slots_to_expect(5, recent, {"r01": peer(phase="train", generation=2)}, 4.0, []) == {"r00", "r01"}
    assert rules.slots_to_expect(1, [commit(0, "r01")], {"r01": peer(phase="boot")}, 4.0, ["r01"]) == {"r01"}


def test_before_there_are_two_commits_those_are_expected_who_beat() -> None:
    peers = {"r01": peer(), "r02": peer(changes=0), "r03": peer(silent=9.0), "r04": peer(phase="boot")}
    peers["r05"] = peer(changes=0, silent=9.0)
    wanted = ["r01", "r02", "r03", "r04", "r05", "r06"]
    at_first = rules.slots_to_expect(0, [], peers, 4.0, wanted)
    assert at_first == {"r01", "r02", "r04", "r06"}, "at t = 0 also those that boot, were seen once, or not yet"
    assert rules.slots_to_expect(1, [], peers, 4.0, wanted) == {"r01"}


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
        (peer(silent=5.0, untrusted_generation=1), 5, 1.0, True),  # its beat lies
        (peer(phase="left", untrusted_generation=1), 5, 0.0, False),
        (peer(phase="boot"), 5, 1.0, True),  # an old beat: patience
        (peer(phase="heal"), 5, 3.0, False),
        (peer(phase="boot", step=0), 0, 20.0, True),  # at the very start all slots are waited for
        (peer(phase="boot", step=0), 0, 31.0, False),
        (peer(rate=0.0, step=0, inner=0), 0, 20.0, True),
        (peer(rate=0.0, step=0, inner=0, still=32.0), 0, 31.0, False),
        (None, 0, 3.0, True),  # no beat is known yet: as long as a beat takes to be called silent
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
    assert rules.expected_arrival(peer(inner=1), 5, two, 2.0) == 3.0
    assert rules.expected_arrival(peer(inner=1, step=4), 5, two, 2.0) == 4.0
    assert rules.expected_arrival(peer(inner=1, still=0.5), 5, two, 2.0) == 2.5
    assert rules.expected_arrival(peer(inner=9), 5, two, 2.0) == 0.0
    assert rules.expected_arrival(peer(rate=0.0), 5, two, 2.0) is None
    assert rules.expected_arrival(peer(inner=1, still=500.0), 5, two, 2.0) is None
    assert rules.expected_arrival(peer(inner=1, still=500.0, note="evaluates, says user code"), 5, two, 2.0) is None
    evaluates = peer(inner=1, still=500.0, evaluates=True, note="waits for its judge")
    assert rules.expected_arrival(evaluates, 5, two, 2.0) == 3.0, "a longer evaluation must not make its work late"


def test_arrival_knows_that_a_round_may_end_by_the_clock() -> None:
    timed = Rules(sync_every=100, sync_seconds=5.0)
    assert rules.expected_arrival(peer(inner=2), 5, timed, 2.0) == 3.0
    assert rules.expected_arrival(peer(inner=2), 5, Rules(sync_every=3, sync_seconds=5.0), 2.0) == 1.0, "H comes first"
    assert rules.expected_arrival(peer(inner=0, rate=8.0), 5, timed, 2.0) == 8.0, "one inner step at least"


def test_ranks_are_at_most_four_apart_and_take_turns() -> None:
    for slots in (1, 2, 3, 4, 9, 64):
        ranks = {(t, s): rules.commit_rank(t, s, slots) for t in range(64) for s in range(slots)}
        assert set(ranks.values()) <= set(range(4))
        for s in range(slots):
            assert any(ranks[t, s] == 0 for t in range(64)), "everybody comes first now and then"


# ---------------------------------------------------------------------- what is seen of a heartbeat


def test_a_beat_is_believed_while_it_changes() -> None:
    first = updated_peer(None, beat(n=1), (0.0, 0.0), 1.0)
    assert not first.is_beating(4.0) and not first.is_dead(4.0), "one look says nothing"
    moving = updated_peer(first, beat(n=2), (1.0, 1.0), 1.0)
    assert moving.is_beating(4.0) and moving.silent == 0.0 and moving.still == 1.0
    stands = updated_peer(updated_peer(moving, beat(n=2), (4.0, 4.0), 1.0), beat(n=2), (7.0, 7.0), 1.0)
    assert stands.is_dead(4.0) and stands.silent == 6.0
    assert updated_peer(stands, beat(n=10, at=8.0, inner=3), (8.0, 8.0), 1.0).still == 0.0


def test_a_zombie_that_writes_its_successors_beat_is_not_seen() -> None:
    first = updated_peer(None, beat(n=1, generation=2), (0.0, 0.0), 1.0)
    successor = updated_peer(first, beat(n=2, generation=2), (1.0, 1.0), 1.0)
    after = updated_peer(successor, beat(n=77, generation=1), (2.0, 2.0), 1.0)
    assert after.beat.generation == 2 and after.silent == 1.0
