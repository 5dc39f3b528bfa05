"""Snapshots that are written while training goes on: never torn, never late, never visible too early."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load as load_safetensors

from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import Rules, Timing
from rendezvous.background import Worker
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.errors import Corrupt, StoreUnclear
from rendezvous.records import tensors
from rendezvous.records.digests import SHA256, XXH3, digest
from rendezvous.records.tensors import PIECE, TensorFile
from rendezvous.snapshots import record as snapshots
from rendezvous.snapshots.writer import Abandoned, LiveFile
from rendezvous.store import Buffer, PatientStore
from rendezvous.stores.files import FileStore
from rendezvous.stores.memory import MemoryStore
from tests.support.fakes import Fault, FaultyStore, ManualClock, VectorState

BIG = 3 * PIECE // 4  # fp32 elements: three pieces


def file(value: float = 1.0, fragments: int = 2) -> tuple[LiveFile, list[np.ndarray]]:
    arrays = [np.full(BIG, value + f, np.float32) for f in range(fragments)]
    return LiveFile([(f, {f"theta.{f}": a}) for f, a in enumerate(arrays)], XXH3), arrays


def test_the_file_is_safetensors_own_format() -> None:
    arrays = {"b": np.arange(5, dtype=np.float32), "a": np.arange(3, dtype=np.float64), "u": np.zeros(0, np.uint8)}
    found = load_safetensors(bytes(TensorFile(arrays)))
    assert all(np.array_equal(found[name], a) and found[name].dtype == a.dtype for name, a in arrays.items())


@pytest.mark.parametrize("kind", [XXH3, SHA256])
def test_the_digest_is_of_the_bytes_that_were_read(kind: str) -> None:
    live = LiveFile([(0, {"theta.0": np.arange(BIG, dtype=np.float32)})], kind)
    assert digest(bytes(live), kind) == live.digest


@pytest.mark.parametrize("read", range(7))
def test_a_fragment_that_is_stepped_while_it_is_read_is_read_as_it_was(read: int) -> None:
    """After any number of pieces: header, 3 of fragment 0, 3 of fragment 1."""
    expected, (live, arrays) = bytes(file()[0]), file()
    pieces: Iterator[Buffer] = iter(live)
    start = [bytes(next(pieces)) for _ in range(read)]
    for f, array in enumerate(arrays):
        copied = live.release_fragment(f)
        assert copied <= array.nbytes and live.release_fragment(f) == 0, "once"
        array[:] = -1
    assert b"".join([*start, *map(bytes, pieces)]) == expected


def test_only_what_was_not_read_yet_is_copied() -> None:
    live, _ = file()
    pieces = iter(live)
    for _ in range(3):
        next(pieces)
    assert live.release_fragment(0) == PIECE
    assert live.release_fragment(1) == 3 * PIECE


def test_a_request_that_fails_is_made_again_from_the_front() -> None:
    live, _ = file()

    def half() -> None:
        next(pieces := iter(live))
        next(pieces)

    flaky = FaultyStore(MemoryStore(), [Fault("put", before=half)])
    PatientStore(flaky, ManualClock(), 10.0).put("blob", live)
    assert flaky.get("blob") == bytes(file()[0])


def test_what_was_read_and_stepped_cannot_be_read_again() -> None:
    live, arrays = file()
    pieces = iter(live)
    for _ in range(3):
        next(pieces)
    live.release_fragment(0)
    arrays[0][:] = -1
    with pytest.raises(Abandoned, match="was stepped while this snapshot was written"):
        bytes(live)


# ---------------------------------------------------------------------- in a run


class Gate(MemoryStore):
    """A store that takes a piece of a snapshot only when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = threading.Semaphore(0)

    def put(self, key: str, body) -> None:  # type: ignore[no-untyped-def]
        if key.endswith(".safetensors") and layout.snapshot_blob(0, "")[:20] not in key:
            body = b"".join(bytes(piece) for piece in body if self.pieces.acquire())
        super().put(key, body)


def solo(store, fragments: int = 1, every: int = 2, size: int = BIG) -> tuple[Rendezvous, VectorState]:  # type: ignore[no-untyped-def]
    clock, state = ManualClock(), VectorState(size, 100.0, fragments)
    write_control(store, clock, replicas=1, min_replicas=1)
    rules = Rules(fragments, fragments, snapshot_every=every)
    rv = Rendezvous(store, clock, "r00", rules, Timing(poll=0.1), background=Worker(), uploads=Worker())
    rv.claim()
    rv.join(state)
    return rv, state


def step(rv: Rendezvous, state: VectorState, learns: float = 1.0) -> None:
    delta = np.full(state.size(0), learns, np.float32)
    rv.offer(delta, 1)
    commit = rv.settle()
    rv.mean(commit, delta)
    state.apply(commit.t % rv.rules.fragments, delta)
    rv.advance(commit)


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("early", [0, 1, 2, 3])
def test_steps_go_on_while_a_slow_store_takes_a_snapshot_of_what_was(fragments: int, early: int) -> None:
    store = Gate()
    rv, state = solo(store, fragments)
    step(rv, state)
    step(rv, state)
    expected = state.theta.copy()
    for _ in range(early):  # of the header and three pieces
        store.pieces.release()
    for _ in range(3):
        step(rv, state)  # none of them waits
    assert store.get(layout.snapshot_key(2)) is None and rv.step == 5
    store.pieces.release(1000)
    rv._uploads.drain()
    rv._background.drain()
    snapshot = next(s for s in snapshots.newest_first(store) if s.t == 2)
    arrays = snapshots.load(store, snapshot, lambda *a, **k: None, {})
    assert arrays is not None
    assert np.array_equal(np.concatenate([arrays[f"theta.{f}"] for f in range(fragments)]), expected)
    assert not np.array_equal(state.theta, expected)


def test_nothing_is_visible_before_the_commit_confirms_it() -> None:
    store = MemoryStore()
    rv, state = solo(store)
    step(rv, state)
    step(rv, state)
    rv._uploads.drain()
    assert [k for k in store.list("snapshots/0000000002/") if k.endswith(".safetensors")], "the blob is there"
    assert store.get(layout.snapshot_key(2)) is None
    step(rv, state)
    rv._background.drain()
    assert store.get(layout.snapshot_key(2)) is not None


def test_bytes_that_changed_under_the_reader_are_never_published() -> None:
    """Not a step: bad memory, while the file is read."""
    store = Gate()
    rv, state = solo(store)
    step(rv, state)
    step(rv, state)
    state.theta[-1] += 1
    store.pieces.release(1000)
    rv._uploads.drain()
    state.theta[-1] -= 1
    step(rv, state)
    rv._background.drain()
    assert store.get(layout.snapshot_key(2)) is None


def test_a_snapshot_that_was_given_up_is_made_up_for_at_the_next_step() -> None:
    store = FaultyStore(MemoryStore())
    rv, state = solo(store, every=2)
    step(rv, state)
    store.faults = [Fault("put", ".safetensors", error=Abandoned("for the test"))]
    step(rv, state)
    rv._uploads.drain()
    for _ in range(2):
        step(rv, state)
        rv._uploads.drain()
    rv._background.drain()
    assert store.get(layout.snapshot_key(2)) is None and store.get(layout.snapshot_key(3)) is not None


def test_a_damaged_snapshot_whose_header_lies_is_passed_over() -> None:
    store, told = MemoryStore(), list[str]()
    good = snapshots.write(store, ManualClock(), 0, {"theta.0": np.ones(3, np.float32)}, base="b", prev=None)
    for bad in (b"\xff" * 8, b"\2" + bytes(7) + b"[]", (40).to_bytes(8, "little") + b"[" * 40):
        body = (store.get(good.blob) or b"")[len(bad) :]
        store.put(good.blob, bad + body)
        assert snapshots.load(store, good, lambda event, **_: told.append(event), {}) is None
        with pytest.raises(Corrupt, match="header"):
            tensors.read_tensors(store, good.blob, good.size)
        store.put(good.blob, bytes(TensorFile({"theta.0": np.ones(3, np.float32)})))
    assert told == ["bad_snapshot"] * 3


HEADERS = [
    b"", b"[]", b"null", b"{", b'{"a":1}', b"[" * 5000, b"\xff",
    b'{"a":{"dtype":"F32","shape":[0,1e3],"data_offsets":[0,0]}}',
    b'{"a":{"dtype":"F32","shape":{},"data_offsets":[0,4]}}', b'{"a":{"dtype":"F32","shape":"","data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":[' + b"1," * 64 + b'1],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":[0,' + b"9" * 40 + b'],"data_offsets":[0,0]}}',
    b'{"a":{"dtype":[],"shape":[1],"data_offsets":[0,4]}}', b'{"a":{"dtype":"F32","shape":[1],"data_offsets":["",4]}}',
]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("rest", [b"", b"1234"])
def test_a_blob_with_the_right_digest_that_is_no_safetensors_file_is_told_and_passed_over(
    header: bytes, rest: bytes
) -> None:
    store, told = MemoryStore(), list[str]()
    good = snapshots.write(store, ManualClock(), 0, {"theta.0": np.ones(3, np.float32)}, base="b", prev=None)
    body = len(header).to_bytes(8, "little") + header + rest
    store.put(good.blob, body)
    forged = replace(good, size=len(body), digest=digest(body))
    assert snapshots.load(store, forged, lambda event, **_: told.append(event), {}) is None and told == ["bad_snapshot"]


def test_a_store_that_breaks_off_shows_nothing(tmp_path: Path) -> None:
    class Breaks(TensorFile):
        def __iter__(self) -> Iterator[Buffer]:
            yield self.header
            raise StoreUnclear("broken off")

    for store in (FileStore(tmp_path), MemoryStore()):
        with pytest.raises(StoreUnclear, match="broken off"):
            store.put("a/blob", Breaks({"x": np.zeros(3, np.float32)}))
        assert store.get("a/blob") is None
    assert not list((tmp_path / ".tmp").iterdir())


WRITER = """
import sys, time, numpy as np
from rendezvous.stores.files import FileStore
from rendezvous.records.tensors import TensorFile
class Slow(TensorFile):
    def __iter__(self):
        for piece in super().__iter__():
            yield piece
            print("piece", flush=True)
            time.sleep(0.2)
FileStore(sys.argv[1]).put("snapshots/0000000002/n.safetensors", Slow({"x": np.zeros(8 << 20, np.float32)}))
"""


def test_kill_9_while_a_snapshot_streams_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, cwd=root)
    assert child.stdout is not None
    for _ in range(3):
        child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    store = FileStore(tmp_path)
    assert store.list("snapshots/") == [] and list((tmp_path / ".tmp").glob("put-*")), "half a file, without a name"
    rv, state = solo(store)
    for _ in range(3):
        step(rv, state)
    rv._uploads.drain()
    rv._background.drain()
    assert store.get(layout.snapshot_key(2)) is not None
    assert not list((tmp_path / ".tmp").glob("put-*")), "the next writer on this machine takes the half file away"


def test_a_snapshot_is_read_into_the_arrays_that_are_there() -> None:
    """So healing holds the state once; an array of another shape is left alone."""
    store = MemoryStore()
    found = snapshots.write(store, ManualClock(), 3, {"theta.0": np.arange(4, dtype=np.float32)}, base="b", prev=None)
    there, other = {"theta.0": np.zeros(4, np.float32)}, {"theta.0": np.zeros(5, np.float32)}
    arrays = snapshots.load(store, found, lambda *a, **k: None, there, in_place=True)
    assert arrays is not None and arrays["theta.0"] is there["theta.0"] and there["theta.0"].tolist() == [0, 1, 2, 3]
    assert (
        snapshots.load(store, found, lambda *a, **k: None, other, in_place=True) is None and not other["theta.0"].any()
    )
    apart = snapshots.load(store, found, lambda *a, **k: None, {"theta.0": np.zeros(4, np.float32)})
    assert apart is not None and apart["theta.0"] is not there["theta.0"]
