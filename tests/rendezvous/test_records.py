"""Bytes, keys and the chain: what is written comes back, and what does not belong is refused."""

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rendezvous import layout
from rendezvous.agreement.chain import Chain, first_open_step
from rendezvous.agreement.membership import Wanted, read_control, write_control
from rendezvous.clock import SystemClock
from rendezvous.errors import ChainBroken
from rendezvous.keeping.reach import newest_head
from rendezvous.records.digests import SHA256, digest
from rendezvous.records.records import (
    WIRE,
    Beat,
    Claim,
    Commit,
    Control,
    Leave,
    Listed,
    Mean,
    Offer,
    Record,
    Snapshot,
    Weights,
    WeightsPart,
    WireError,
    new_nonce,
)
from rendezvous.snapshots import record as snapshots
from rendezvous.stores.memory import MemoryStore
from tests.support.fakes import Fault, FaultyStore, ManualClock

WEIGHT = float(np.float32(0.1))
LISTED = Listed(3, "r01", 2, "n", layout.delta_blob(3, "r01", 2, "n"), 12, "d", 4, WEIGHT, leaving=True)
OTHER = replace(LISTED, slot="r02", blob=layout.delta_blob(3, "r02", 2, "n"))
RECORDS: list[Record] = [
    Claim("r00", 1, "n", 1.5, "host", 7),
    Offer(3, "r01", 2, "n", "base", 4, layout.delta_blob(3, "r01", 2, "n"), 12, "d", 1.25, 9.0, stats={"reward": 0.5}),
    Commit(
        3,
        "p",
        "base",
        (LISTED, replace(LISTED, slot="r02", blob=layout.delta_blob(3, "r02", 2, "n"))),
        {"r01": 2},
        2,
        1.5,
        0,
        "r01-2",
        "n",
        9.0,
    ),
    Mean(3, layout.mean_blob(3, "n"), 12, "d", "n"),
    Snapshot(3, "base", None, layout.snapshot_blob(3, "n"), 12, "d", "n", False),
    Weights(3, "base", "p", "d", 9, 2, (WeightsPart(layout.weights_blob(3, "n-0000"), 12, "d"),), "n", 9.0),
    Leave("r00", 1, 3, "base", "done", "n", 9.0),
    Control(0, "n", 9.0, replicas=3, min_replicas=2, stop=True),
    Beat("r00", 1, 5, "train", 3, 2, 0.25, 9.0),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.kind)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    body = record.encode()
    assert type(record).decode(body) == record
    assert type(record).decode(body).encode() == body, "equal records have equal bytes"
    assert json.loads(body)["wire"] == WIRE


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.kind)
def test_another_wire_version_is_refused_by_name(record: Record) -> None:
    newer, words = record.encode().replace(b'"wire":%d' % WIRE, b'"wire":%d' % (WIRE + 1)), "of wire version"
    with pytest.raises(WireError, match=rf"{record.kind} {words} {WIRE}, found a {record.kind} of version {WIRE + 1}"):
        type(record).decode(newer)


def test_another_kind_and_damaged_bytes_are_refused() -> None:
    with pytest.raises(WireError, match="expected a claim"):
        Claim.decode(RECORDS[1].encode())
    for damaged in (b"", b"{", b"[]", b'{"kind":"claim","wire":%d}' % WIRE, b"\xff\xfe", RECORDS[0].encode()[:-9]):
        with pytest.raises(WireError, match="damaged"):
            Claim.decode(damaged)


def test_weights_survive_the_text_exactly() -> None:
    for w in np.float32([0.1, 1 / 3, 0.0625, 1e-30, 1.0]):
        commit = replace(RECORDS[2], offers=(replace(LISTED, weight=float(w)),))
        assert np.float32(Commit.decode(commit.encode()).offers[0].weight) == w


def test_a_newer_release_may_add_fields() -> None:
    raw = json.loads(RECORDS[0].encode()) | {"colour": "blue"}
    assert Claim.decode(json.dumps(raw).encode()) == RECORDS[0]


def test_digests_and_nonces() -> None:
    assert digest(b"") == "xxh3-128:99aa06d3014798d86001c324468d497f"
    assert digest(b"", SHA256) == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert digest(bytearray(b"ab")) == digest(memoryview(b"ab")) != digest(b"ba")
    assert len({new_nonce() for _ in range(1000)}) == 1000


# ---------------------------------------------------------------------- keys


def test_keys_sort_as_they_count_and_none_is_used_twice() -> None:
    for key in (layout.commit_key, layout.snapshot_key, layout.control_key):
        assert sorted(map(key, (10, 9, 100, 2))) == [key(n) for n in (2, 9, 10, 100)]
    keys = [
        layout.claim_key("r00", 1), layout.beat_key("r00"), layout.delta_blob(0, "r00", 1, "n"), layout.offer_key(0,
        "r00", 0),
        layout.offer_key(0, "r00", 1), layout.commit_key(0), layout.mean_key(0, 0), layout.mean_blob(0, "n"),
        layout.snapshot_key(0),
        layout.snapshot_blob(0, "n"), layout.leave_key("r00", 1), layout.control_key(0), layout.log_key("r00", 1, 0),
        layout.RUN,
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[a-z0-9/._-]+", key) for key in keys)


def test_keys_can_be_read_back() -> None:
    assert [layout.slot_index(layout.slot_name(i)) for i in (0, 7, 99, 123)] == [0, 7, 99, 123]
    assert layout.snapshot_step(layout.snapshot_key(42)) == 42
    assert layout.snapshot_step(layout.snapshot_blob(42, "n")) is None
    assert layout.log_owner(layout.log_key("r01", 2, 3)) == ("r01", 2)
    with pytest.raises(ValueError, match="r00, r01"):
        layout.slot_index("worker-3")


# ---------------------------------------------------------------------- the chain


def commit(t: int, prev: str | None, **fields: Any) -> Commit:
    plain = Commit(t, prev, f"base{t}", (), {"r00": 1}, 1, 1.0, 0, "r00-1", f"n{t}", 0.0)
    return replace(plain, **fields)


def written(*commits: Commit) -> MemoryStore:
    store = MemoryStore()
    for c in commits:
        store.put(layout.commit_key(c.t), c.encode())
    return store


def line(n: int) -> list[Commit]:
    """Commits 0 … n−1 that follow each other."""
    made: list[Commit] = []
    for t in range(n):
        made.append(commit(t, digest(made[-1].encode(), SHA256) if made else None))
    return made


def test_a_chain_is_read_one_by_one() -> None:
    commits = line(5)
    chain = Chain(written(*commits), window=2)
    assert [chain.read(t) for t in range(6)] == [*commits, None]
    assert chain.commit_digest(4) == digest(commits[4].encode(), SHA256) and chain.commit_digest(-1) is None
    assert [c.t for c in chain.recent_commits(5, 3)] == [4, 3, 2] and chain.known_commit(1) is None
    assert chain.fence_before(5) == {"r00": 1} and chain.fence_before(0) == {}
    assert first_open_step(written(*commits)) == 5


def test_a_commit_that_names_another_before_it_is_refused() -> None:
    first, *_ = line(1)
    chain = Chain(written(first, commit(1, "another")), window=2)
    chain.read(0)
    with pytest.raises(ChainBroken, match=r"commit 1 does not follow commit 0.*it names step 1 and another"):
        chain.read(1)


def test_a_commit_under_another_number_is_refused() -> None:
    store = MemoryStore()
    store.put(layout.commit_key(0), commit(7, None).encode())
    with pytest.raises(ChainBroken, match="commit 0"):
        Chain(store, 2).read(0)


def test_a_lowered_fence_is_refused() -> None:
    first = commit(0, None, fence={"r00": 3, "r01": 1})
    chain = Chain(written(first, commit(1, digest(first.encode(), SHA256), fence={"r00": 2, "r01": 1})), window=2)
    chain.read(0)
    with pytest.raises(ChainBroken, match="lowers the fence of r00 below generation 3"):
        chain.read(1)


def test_a_hole_below_a_reached_step_is_an_error() -> None:
    commits = line(4)
    with pytest.raises(ChainBroken, match="commit 2 is missing, though step 4"):
        Chain(written(*(c for c in commits if c.t != 2)), window=3).read_before(4)


def test_a_fence_is_never_guessed() -> None:
    with pytest.raises(KeyError):
        Chain(MemoryStore(), 2).fence_before(3)


# ---------------------------------------------------------------------- control


def test_desired_states_are_folded_in_order() -> None:
    store, clock = MemoryStore(), ManualClock()
    write_control(store, clock, replicas=3, steps=10, min_replicas=2)
    write_control(store, clock, replicas=5)
    write_control(store, clock, drain="r01")
    wanted = write_control(store, clock, stop=True)
    assert wanted == read_control(store)
    assert (wanted.replicas, wanted.universe, wanted.steps, wanted.min_replicas) == (5, 5, 10, 2)
    assert wanted.is_to_leave("r01") and wanted.is_to_leave("r00"), "a stop is for everybody"
    wanted = write_control(store, clock, replicas=2, resume=True)
    assert wanted.slot_names == ["r00", "r01", "r02", "r03", "r04"], "slots that ever existed can still be found"
    assert [wanted.is_to_leave(s) for s in wanted.slot_names] == [False, False, True, True, True]


def test_a_guest_takes_part_beside_the_desired_replicas_and_is_not_kept() -> None:
    store = MemoryStore()
    write_control(store, ManualClock(), replicas=2, min_replicas=1)
    wanted = write_control(store, ManualClock(), guest="r03")
    assert wanted == read_control(store) and wanted.replicas == 2 and wanted.universe == 4
    assert [wanted.is_to_leave(s) for s in wanted.slot_names] == [False, False, True, False]
    assert [wanted.is_kept(s) for s in wanted.slot_names] == [True, True, False, False]
    assert write_control(store, ManualClock(), drain="r03").is_to_leave("r03"), "an operator may send it away"
    assert write_control(store, ManualClock(), stop=True).is_to_leave("r03")
    assert write_control(store, ManualClock(), replicas=4, resume=True).is_kept("r03"), "the fleet has grown over it"


def test_two_operators_at_once_lose_no_wish() -> None:
    inner, clock = MemoryStore(), SystemClock()
    rival = lambda: write_control(inner, clock, steps=7)  # noqa: E731
    store = FaultyStore(inner, [Fault("create", "control", error=None, before=rival)])
    wanted = write_control(store, clock, replicas=4, min_replicas=1)
    assert (wanted.records, wanted.steps, wanted.replicas) == (2, 7, 4)


@pytest.mark.parametrize("wish", [{"replicas": 0}, {"steps": 0}, {"min_replicas": 0}, {"drain": "worker"}])
def test_desired_states_that_mean_nothing_are_refused(wish: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        write_control(MemoryStore(), ManualClock(), **wish)
    assert Wanted().min_replicas == 1


def test_the_head_is_counted_from_the_newest_snapshot_that_has_its_commit() -> None:
    """So a replica that joins step 5000 reads a few commits and not all of them."""
    commits = line(9)
    store = written(*commits)
    clock = ManualClock()
    for t in (4, 60):  # the second one's commit is missing: a foreign object
        snapshots.write(store, clock, t, {"a": np.zeros(1, np.float32)}, base="", prev=None)
    counted = FaultyStore(store)
    assert newest_head(counted) == 9
    assert not {("get", layout.commit_key(t)) for t in range(3)} & set(counted.calls)
