"""Recorded rollouts of a replica in two processes: which bundles both train on, and real fleets with a kill, with an
actor."""

import pickle
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Barrier, Thread
from typing import Any

import pytest

from diloco.audit.inner import recompute_offers
from diloco.process import exitcodes
from diloco.replica.rank_rollouts import FollowingPlaces, LeadingPlaces
from diloco.run.record import read_run
from inner.rollouts.recording.bundle import Bundle, TooFar
from inner.rollouts.recording.recorded import BundlePlace
from rendezvous import layout
from rendezvous.stores.memory import MemoryStore
from tests.diloco.test_actor import bundles, sampled_by, start_actor
from tests.diloco.test_ranks_fleet import logged
from tests.diloco.test_recorded_fleet import PLAIN, a_fleet, events, offered, places
from tests.inner.test_recorded import a_bundle

HERE = BundlePlace(5, 42, 0)
LORA = {**PLAIN, "lora": {"r": 4, "alpha": 8.0}}


class Pair:
    """Two threads that talk as two ranks do (diloco/outer/ranks/group.py)."""

    count = 2

    def __init__(self) -> None:
        self._told, self._gathered = SimpleQueue[Any](), SimpleQueue[Any]()
        self._met = Barrier(2, timeout=30)

    def rank(self, index: int) -> Any:
        group: Any = type("Rank", (), {"index": index, "count": 2})()
        group.tell = self._tell if index == 0 else lambda _: self._told.get(timeout=30)
        group.gather = self._gather if index == 0 else lambda message: self._gathered.put(message) or []
        return group

    def _tell(self, message: Any) -> Any:
        self._told.put(message)
        return message

    def _gather(self, message: Any) -> list[Any]:
        return pickle.loads(pickle.dumps([message, self._gathered.get(timeout=30)]))  # copies, as torch returns


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return a_bundle()[0]


def act(leading: LeadingPlaces, following: FollowingPlaces, what: Any) -> list[Any]:
    """Return what(places, rank) of both ranks, which run side by side."""
    found: list[Any] = [None, None]
    thread = Thread(target=lambda: found.__setitem__(1, what(following, 1)))
    thread.start()
    found[0] = what(leading, 0)
    thread.join()
    return found


def find(whys: tuple[str, str] = ("", "")) -> Any:
    """whys: of actors' bundles, by rank."""
    return lambda places, rank: places.find(HERE, lambda bundle: whys[rank] if bundle.logprobs else "")


def two_ranks(store: MemoryStore, told: list[Any] | None = None) -> tuple[LeadingPlaces, FollowingPlaces]:
    pair = Pair()
    each = [places(store, told, staleness=1) for _ in range(2)]
    return LeadingPlaces(pair.rank(0), each), FollowingPlaces(pair.rank(1))


def deliver(store: MemoryStore, bundle: Bundle, rank: int) -> Bundle:
    """Put an actor's bundle into a rank's place. Return it."""
    made = replace(bundle, logprobs=[[-0.5] * len(ids) for ids in bundle.ids], calls=(rank, 0))
    assert places(store, staleness=1, actor="a01", by=0).deliver(HERE._replace(bundle=rank), made)
    return made


def marked(found: list[Any]) -> list[int | None]:
    return [one and one.calls[0] for one in found]


def test_both_ranks_train_on_what_actors_sampled(bundle: Bundle) -> None:
    store = MemoryStore("memory://x")
    for rank in (0, 1):
        deliver(store, bundle, rank)
    found = act(*two_ranks(store), find())
    assert marked(found) == [0, 1] and all(one.logprobs for one in found)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("why", ["", "its prompts are those of other rows", TooFar("0.9 nats per token")])
def test_without_a_bundle_for_each_rank_both_make_theirs_and_a_replacement_finds_them(
    bundle: Bundle, rank: int, why: str
) -> None:
    """why: of the other rank's bundle; "": it has none."""
    store, other = MemoryStore("memory://x"), 1 - rank
    deliver(store, bundle, rank)
    if why:
        deliver(store, bundle, other)
    whys, told = (why, "") if other == 0 else ("", why), list[Any]()
    ranks = two_ranks(store, told)
    assert act(*ranks, find(whys)) == [None, None]
    own = [replace(bundle, calls=(10 + k, 0)) for k in (0, 1)]
    stand = act(*ranks, lambda places, k: places.put(HERE, own[k], lambda bundle: ""))
    assert stand[1] is own[1] and marked(stand) == [10, 11]
    attempts = [key for key in store.list("rollouts/") if key.endswith(".1.bundle")]
    assert len(attempts) == (2 if why else 1), "beside what the actors delivered"
    ranks[0].tell()
    counts = [(fields["bundles"], fields["expired"]) for event, fields in told if event == "rollouts_found"]
    assert sum(found for found, _ in counts) == 0 and sum(expired for _, expired in counts) >= 1
    again = act(*two_ranks(store), find(whys))
    assert marked(again) == [10, 11], "a replacement trains on the same"


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_recorded_before_a_kill_stands_and_both_read_theirs(bundle: Bundle, rank: int) -> None:
    """To train on a bundle gathers over the ranks: a rank that did so alone would wait for ever."""
    store = MemoryStore("memory://x")
    first = replace(bundle, calls=(10, 0))
    places(store).put(HERE._replace(bundle=rank), first, lambda bundle: "")  # and the replica is killed
    ranks = two_ranks(store)
    assert act(*ranks, find()) == [None, None]
    made = [replace(bundle, calls=(20 + k, 0)) for k in (0, 1)]
    stand = act(*ranks, lambda places, k: places.put(HERE, made[k], lambda bundle: ""))
    assert marked(stand) == [10 if k == rank else 20 + k for k in (0, 1)]
    assert all(one is not own for one, own in zip(stand, made, strict=True))


def test_a_bundle_on_which_a_rank_fails_is_refused_as_with_one_process(bundle: Bundle) -> None:
    store, told = MemoryStore("memory://x"), list[Any]()
    for rank in (0, 1):
        deliver(store, bundle, rank)

    def fail(places: Any, rank: int) -> Any:
        def unfit(bundle: Bundle) -> str:
            raise ValueError(f"rank {rank} cannot read it")

        return places.find(HERE, unfit)

    assert act(*two_ranks(store, told), fail) == [None, None]
    texts = sorted(fields["text"] for event, fields in told if event == "rollouts_refused")
    assert texts == ["rank 0 cannot read it", "rank 1 cannot read it"]


def test_an_error_of_a_ranks_look_ends_all_threads(bundle: Bundle) -> None:
    store = MemoryStore("memory://x")
    for rank in (0, 1):
        deliver(store, bundle, rank)

    def fail(bundle: Bundle) -> str:
        raise ArithmeticError("out of range")

    leading, _ = two_ranks(store)
    with pytest.raises(ArithmeticError, match="out of range"):
        leading.find(HERE, fail)


# ---------------------------------------------------------------------- fleets


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_replica_of_two_ranks_killed_in_a_generation_is_replaced_in_the_same_bits(tmp_path: Path) -> None:
    """Killed in its third generation, of which both ranks' bundles stand, or one."""
    whole, *killed = (a_fleet(tmp_path / name, LORA, fleet={"replicas": 1, "min_replicas": 1}) for name in "w012")
    whole.start("r00", TEST_DEVICES="2")
    assert whole.wait() == {"r00": [0]}, whole.logs()
    for lost, fleet in enumerate(killed):
        fleet.start("r00", die="after:create:.bundle@6", TEST_DEVICES="2").join()
        if lost < 2:
            Path(fleet.url, layout.bundle_key("r00", 2, lost, 0)).unlink()
        fleet.start("r00", TEST_DEVICES="2")
        assert fleet.wait() == {"r00": [-9, 0]}, fleet.logs()
        assert [offered(fleet, "r00", t).digest for t in (0, 1)] == [offered(whole, "r00", t).digest for t in (0, 1)]
        assert not events(fleet, "rollouts_refused")
    assert {len(bundles(fleet)) for fleet in (whole, *killed)} == {2 * 2 * 4}
    found = recompute_offers(read_run(killed[0].url))
    assert not found.off and "it had 2 processes" in found.unchecked[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicas_of_two_ranks_and_of_one_train_on_what_actors_sampled(tmp_path: Path) -> None:
    settings = {"steps": 100_000, "broadcast_weights": True, "min_replicas": 1, "check_rollouts": 1.0, "staleness": 2}
    fleet = a_fleet(tmp_path, {**LORA, "batch_size": 64}, fleet=settings)
    actors = {name: start_actor(fleet, name) for name in ("a01", "a02")}
    fleet.start("r00", TEST_DEVICES="2")
    fleet.start("r01")

    def trained_on() -> int:
        return sum(event["bundles"] for event in logged(fleet, "r00", "rollouts_found"))

    fleet.wait_for(lambda: trained_on() >= 4)
    fleet.end_in(1)
    assert fleet.wait() == {"r00": [0], "r01": [0]}, fleet.logs()
    for actor in actors.values():
        said, _ = actor.communicate(timeout=60)
        assert actor.returncode == exitcodes.DONE, said
    kinds = ("rollouts_refused", "rollouts_lost", "rollouts_doubted")
    assert not [event for kind in kinds for event in events(fleet, kind)]
    ranks = {record.place[1] for record in bundles(fleet).values() if record.slot == "r00" and record.actor}
    assert ranks == {0, 1} and min(sampled_by(fleet, name) for name in actors) > 0
    assert not [key for key in bundles(fleet) if key.startswith("rollouts/r01/") and "/0001." in key]
    assert layout.bundle_place(next(iter(bundles(fleet))))
