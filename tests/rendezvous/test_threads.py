"""Passes over a vector by several threads: the bits, events and errors of one thread.

Meeting(count)    each thread's first call waits until `count` threads have called, so a test knows that they ran at the
                  same time, and what they share is seen.  With several, the test's own thread is not one of them.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rendezvous import threads as threads_module
from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import Rules, Timing
from rendezvous.background import no_emit
from rendezvous.clock import SystemClock
from rendezvous.codecs import DENSE, load_mean_kernel
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.errors import BadDelta, Corrupt
from rendezvous.means.body_sample import BodySample
from rendezvous.means.by_threads import ThreadedReducer, by_threads
from rendezvous.means.reduce import Reducer
from rendezvous.records import wire
from rendezvous.records.digests import digest
from rendezvous.records.records import Commit
from rendezvous.records.state import Digests
from rendezvous.records.wire import Encoder, codec_alignment, shard_grid
from rendezvous.stores.memory import MemoryStore
from rendezvous.threads import MOST_THREADS, Threads, threads_here
from tests.rendezvous.test_shards import commit_of
from tests.support.body_digests import body_digests
from tests.support.fakes import ManualClock, VectorState

pytestmark = pytest.mark.skipif(load_mean_kernel("fp32") is None, reason="there is no C compiler")
SEVERAL, CODECS = (2, 3, 7), [name for name in DENSE if load_mean_kernel(name)]  # without a kernel, one thread works
LEAST, N = 1024, 40_009  # 40 shards, the last one short
RNG = np.random.default_rng(92)


@pytest.fixture(autouse=True)
def threads_for_small_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "THREAD_BYTES", 256)


class Meeting:
    """A place where each of `count` threads waits once for the others."""

    def __init__(self, count: int) -> None:
        self.seen = set[int]()
        self._barrier, self._lock = threading.Barrier(count), threading.Lock()
        self._outside = threading.get_ident() if count > 1 else 0

    def wait(self) -> None:
        with self._lock:  # a pool may begin a further thread in a later pass, which would meet no other
            me, full = threading.get_ident(), len(self.seen) == self._barrier.parties
            meets = not full and me not in self.seen | {self._outside}
            self.seen |= {me} if meets else set()
        if meets:
            self._barrier.wait(timeout=5)


class MeetingStore(MemoryStore):
    """A store whose readers meet after their first read of a body."""

    meeting: Meeting | None = None

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        found = super().get_into(key, out, start)
        if self.meeting is not None:
            self.meeting.wait()
        return found


def readers(store: MemoryStore, rules: Rules, count: int) -> tuple[Reducer, list[Any], Reducer, list[Any]]:
    """A reducer with one thread and its events; one with `count` threads and its events."""
    events: tuple[list[Any], list[Any]] = [], []
    one, more = (
        Reducer(store, ManualClock(), lambda event, e=e, **fields: e.append((event, fields)), rules) for e in events
    )
    return one, events[0], by_threads(Threads(count), Encoder(rules.codec), more, near=True), events[1]


# ---------------------------------------------------------------------- encoding


@pytest.mark.parametrize("count", [1, *SEVERAL])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n", [N, 8 * LEAST])
def test_several_threads_write_the_same_body(codec: str, count: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one, more, ranges = Encoder(codec), Encoder(codec), shard_grid(n, codec_alignment(codec), LEAST)
    by_threads(Threads(count), more, Reducer(MemoryStore(), SystemClock(), no_emit, Rules(codec=codec)), near=True)
    for _ in range(3):  # the later ones with what the earlier ones left
        delta = RNG.standard_normal(n, dtype=np.float32)
        told = one.encode_in_shards(0, delta, ranges, delta)
        meeting = Meeting(count)
        monkeypatch.setattr(wire, "digest", lambda *a, m=meeting: (m.wait(), digest(*a))[1])
        said = more.encode_in_shards(0, delta, ranges, delta)
        monkeypatch.setattr(wire, "digest", digest)
        assert len(meeting.seen) == count
        assert said.body.tobytes() == told.body.tobytes()
        assert replace(said, body=b"") == replace(told, body=b""), "digests, norm and scale"
        kept, others = one.unsent_residuals, more.unsent_residuals
        assert kept.keys() == others.keys() == (set() if codec == "fp32" else {"residual.0"})
        assert all(kept[k].tobytes() == others[k].tobytes() for k in kept)


def test_the_residual_is_made_before_threads_write_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, makers, page_aligned = Encoder("int8"), set[int](), wire.page_aligned
    monkeypatch.setattr(wire, "page_aligned", lambda n: (makers.add(threading.get_ident()), page_aligned(n))[1])
    by_threads(Threads(2), encoder, Reducer(MemoryStore(), SystemClock(), no_emit, Rules(codec="int8")), near=False)
    encoder.encode_in_shards(0, np.ones(N, np.float32), shard_grid(N, 1024, LEAST))
    assert encoder.unsent_residuals.keys() == {"residual.0"}
    assert makers == {threading.get_ident()}


@pytest.mark.parametrize("codec", ["topk", "bf16-gate"])
def test_a_codec_whose_work_torch_does_stays_in_one_thread(codec: str) -> None:
    encoder, reducer = Encoder(codec), Reducer(MemoryStore(), SystemClock(), no_emit, Rules(codec=codec))
    before = encoder.in_runs
    assert by_threads(Threads(4), encoder, reducer, near=True) is reducer
    assert encoder.in_runs is before


@pytest.mark.parametrize("codec", [name for name in DENSE if name != "fp32"])
def test_the_error_is_that_of_the_first_bad_shard(codec: str) -> None:
    ranges, said = shard_grid(N, codec_alignment(codec), LEAST), list[str]()
    delta = np.ones(N, np.float32)
    delta[[3 * LEAST, 3 * LEAST + 1, 20 * LEAST, N - 1]] = np.nan  # two in one shard, one in another, one in the last
    for count in (1, *SEVERAL):
        encoder = Encoder(codec)
        by_threads(Threads(count), encoder, Reducer(MemoryStore(), SystemClock(), no_emit), near=False)
        with pytest.raises(BadDelta) as error:
            encoder.encode_in_shards(0, delta, ranges)
        said.append(str(error.value))
        assert encoder.unsent_residuals == {}, "a residual that may hold NaN is not kept"
        after = encoder.encode_in_shards(0, np.ones(N, np.float32), ranges)
        assert after.digest == Encoder(codec).encode_in_shards(0, np.ones(N, np.float32), ranges).digest
    assert len(set(said)) == 1 and said[0].startswith("2 of")


# ---------------------------------------------------------------------- means


@pytest.mark.parametrize("count", [1, *SEVERAL])
@pytest.mark.parametrize("codec", CODECS)
def test_several_threads_compute_the_same_mean(codec: str, count: int) -> None:
    store = MeetingStore()
    commit, _, rules = commit_of(store, codec, N, 3, 0)
    one, _, more, events = readers(store, rules, count)
    told, said = np.empty(N, np.float32), np.empty(N, np.float32)
    one.mean(commit, told)
    for _ in range(2):  # the second time in memory that was used before
        said.fill(np.nan)
        store.meeting = Meeting(count)
        more.mean(commit, said)
        assert len(store.meeting.seen) == count
        assert said.tobytes() == told.tobytes()
    assert events == []


@pytest.mark.parametrize("count", SEVERAL)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("owners", [1, 3])
def test_several_threads_write_the_same_parts(codec: str, count: int, owners: int) -> None:
    store = MemoryStore()
    commit, _, rules = commit_of(store, codec, N, 3, owners)
    one, _, more, _ = readers(store, rules, count)
    found = list[list[bytes]]()
    for reducer in (one, more):
        out = np.full(N, np.nan, np.float32)
        bodies = [body.tobytes() for _, body in reducer.parts.make_all(commit, out)]
        found.append([*bodies, out.tobytes()])
    assert isinstance(more, ThreadedReducer)
    assert len(found[0]) == owners + 1
    assert found[0] == found[1]


def spoil(store: MemoryStore, commit: Commit, *places: tuple[int, int], wrong: bool = False) -> Commit:
    """Write NaN into these (body, shard) of fp32 bodies.   wrong: without the digests, so the bytes are damaged."""
    offers = [*commit.offers]
    for i, shard in places:
        body = np.frombuffer(store.get(f"blob/{i}") or b"", np.float32).copy()
        body[shard * LEAST + 5] = np.nan
        store.put(f"blob/{i}", body.tobytes())
        whole, shards = body_digests(body.view(np.uint8), "fp32", shard_grid(N, 1, LEAST))
        if not wrong:
            offers[i] = replace(offers[i], digest=whole, shards=shards)
    return replace(commit, offers=tuple(offers))


def outcome(reducer: Reducer, commit: Commit) -> bytes | str:
    out = np.empty(N, np.float32)
    trouble = reducer.mean_of_shards(commit, reducer.bodies.grid(N), out, None)
    return trouble or out.tobytes()


@pytest.mark.parametrize("count", SEVERAL)
@pytest.mark.parametrize("places", [((1, 7),), ((2, 3), (0, 30)), ((0, 39), (1, 0), (2, 20)), ((0, 4), (1, 4), (2, 4))])
def test_poisoned_bodies_are_left_out_and_told_as_by_one_thread(
    count: int, places: tuple[tuple[int, int], ...]
) -> None:
    store = MeetingStore()
    commit, _, rules = commit_of(store, "fp32", N, 3, 0)
    commit = spoil(store, commit, *places)
    one, told, more, said = readers(store, rules, count)
    for turn in range(2):
        expected = outcome(one, commit)
        store.meeting = Meeting(count)
        assert outcome(more, commit) == expected and isinstance(expected, bytes)
        store.meeting = None
        assert said == told and [event for event, _ in said] == ["poisoned"] * len(places), f"turn {turn}"
    good, _, _ = commit_of(store, "fp32", N, 3, 0)
    store.meeting = Meeting(count)
    assert outcome(more, good) == outcome(one, good)
    assert len(store.meeting.seen) == count, "one bad step does not end the threads"


@pytest.mark.parametrize("count", SEVERAL)
def test_a_sum_that_overflows_is_zero_as_by_one_thread(count: int) -> None:
    store = MemoryStore()
    commit, _, rules = commit_of(store, "fp32", N, 2, 0)
    offers = [*commit.offers]
    for i in range(2):
        body = np.frombuffer(store.get(f"blob/{i}") or b"", np.float32).copy()
        body[9 * LEAST] = np.finfo(np.float32).max
        store.put(f"blob/{i}", body.tobytes())
        whole, shards = body_digests(body.view(np.uint8), "fp32", shard_grid(N, 1, LEAST))
        offers[i] = replace(offers[i], digest=whole, shards=shards, weight=2.0)
    one, told, more, said = readers(store, rules, count)
    commit = replace(commit, offers=tuple(offers))
    assert outcome(more, commit) == outcome(one, commit)
    assert said == told == []


@pytest.mark.parametrize("count", SEVERAL)
@pytest.mark.parametrize("missing", [False, True])
def test_a_body_that_cannot_be_read_is_told_as_by_one_thread(count: int, missing: bool) -> None:
    store = MemoryStore()
    commit, _, rules = commit_of(store, "fp32", N, 3, 0)
    spoil(store, commit, (2, 31), (1, 12), wrong=True)
    if missing:
        store.delete(["blob/1"])
    one, told, more, said = readers(store, rules, count)
    assert outcome(one, commit) == outcome(more, commit)
    assert "blob/1" in str(outcome(more, commit))
    for reducer in (one, more):
        with pytest.raises(Corrupt, match="blob/1"):
            reducer.mean(commit, np.empty(N, np.float32))
    assert said == told and len(said) == 4


def test_a_poisoned_body_that_a_thread_saw_in_a_failed_pass_is_told_in_the_next_one() -> None:
    store = MeetingStore()
    commit, _, rules = commit_of(store, "fp32", N, 3, 0)
    commit = spoil(store, commit, (1, 5))  # the first shard of the second run of two threads
    whole = store.get("blob/0")
    spoil(store, commit, (0, 0), wrong=True)
    one, told, more, said = readers(store, rules, 2)
    store.meeting = Meeting(2)
    assert outcome(more, commit) == outcome(one, commit)
    assert said == told == []
    store.put("blob/0", whole or b"")
    assert outcome(more, commit) == outcome(one, commit)
    assert said == told and [event for event, _ in said] == ["poisoned"]


def test_a_sample_is_kept_in_one_thread() -> None:
    store = MeetingStore()
    commit, _, rules = commit_of(store, "int8", N, 3, 0)
    one, _, more, _ = readers(store, rules, 3)
    taken = list[Any]()
    store.meeting = Meeting(1)
    for reducer in (one, more):
        reducer.sample = BodySample("int8", start=3000, stop=9000)
        outcome(reducer, commit)
        taken.append(reducer.sample.take(commit))
    assert store.meeting.seen == {threading.get_ident()}
    assert taken[0] is not None and taken[0][0] == taken[1][0]
    assert taken[0][1].tobytes() == taken[1][1].tobytes()


def test_bodies_without_digests_of_shards_are_read_whole() -> None:
    store = MemoryStore()
    commit, _, rules = commit_of(store, "fp32", N, 3, 0)
    offers = [replace(o, shards=(), digest=digest(store.get(o.blob) or b"")) for o in commit.offers]
    one, told, more, said = readers(store, rules, 3)
    whole = replace(commit, offers=tuple(offers))
    assert outcome(more, whole) == outcome(one, whole) == outcome(one, commit)
    assert said == told == []


# ---------------------------------------------------------------------- the state


@pytest.mark.parametrize("count", [1, *SEVERAL])
def test_several_threads_give_the_same_base(count: int) -> None:
    class State(VectorState):
        def arrays(self, fragment: int) -> dict[str, np.ndarray]:
            return {name: np.full(n, fragment, np.float32) for name, n in (("b", 5000), ("a", 1), ("c", 70_001))}

    state = State(value=1.0, fragments=2)
    digests = Digests(state, 2)
    before = digests.base
    digests.map = Threads(count).map
    for fragment in range(2):
        digests.renew_fragment(fragment)
    digests.check_unchanged()
    assert digests.base == before


def test_replicas_with_and_without_threads_agree() -> None:
    store, clock, n = MemoryStore(), SystemClock(), 40_000
    rules = Rules(codec="int8", shard_elements=LEAST)
    write_control(store, clock, replicas=3, min_replicas=3, steps=5)
    seats = list[tuple[Rendezvous, VectorState]]()
    for i, threads in enumerate((None, Threads(3), Threads(7))):
        rv, state = (
            Rendezvous(store, clock, f"r{i:02d}", rules, Timing(poll=0.001), threads=threads),
            VectorState(n, 1.0),
        )
        rv.claim()
        rv.join(state)
        seats.append((rv, state))
    assert [isinstance(rv.reducer, ThreadedReducer) for rv, _ in seats] == [False, True, True]
    assert [getattr(rv._digests.map, "__self__", None) for rv, _ in seats] == [None, Threads(3), Threads(7)]
    for _ in range(3):
        for rv, state in seats:
            rv.offer(RNG.standard_normal(n, dtype=np.float32), 1, theta=state.theta)
        for rv, state in seats:
            mean = np.empty(n, np.float32)
            commit = rv.settle()
            rv.mean(commit, mean)
            state.apply(0, mean)
            rv.advance(commit)
        assert len({rv.base for rv, _ in seats}) == 1
        assert len({state.theta.tobytes() for _, state in seats}) == 1


# ---------------------------------------------------------------------- threads


@pytest.mark.parametrize("count", [1, *SEVERAL])
def test_results_come_in_the_order_of_the_pieces(count: int) -> None:
    threads, pieces = Threads(count), [*range(41)]
    assert threads.map(str, pieces, 1 << 20) == [str(i) for i in pieces]
    for n in (0, 1, 2, 41):
        assert threads.in_runs(lambda run: [-i for i in run], pieces[:n], 1 << 20) == [-i for i in pieces[:n]]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("first_fails", [False, True])
def test_the_first_pieces_error_comes_when_all_threads_have_ended(
    error: type[BaseException], first_fails: bool
) -> None:
    failed, ended = threading.Event(), list[int]()

    def work(piece: int) -> None:
        if piece == 1:
            failed.set()
            raise error("of piece 1")
        if piece == 0:
            assert failed.wait(5), "piece 1 runs beside piece 0, and fails before it ends"
            ended.append(piece)
            if first_fails:
                raise error("of piece 0")

    before = threading.active_count()
    with pytest.raises(error, match="of piece 0" if first_fails else "of piece 1"):
        Threads(2).map(work, range(30), 1 << 20)
    assert ended == [0] and threading.active_count() == before


def test_a_short_pass_runs_in_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    me: Callable[[int], int] = lambda _: threading.get_ident()  # noqa: E731
    monkeypatch.setattr(threads_module, "THREAD_BYTES", 4 << 20)
    for count, size in ((8, (8 << 20) - 1), (1, 1 << 40)):
        assert not Threads(count).pay(size)
        assert {*Threads(count).map(me, range(20), size)} == {threading.get_ident()}
    assert Threads(2).pay(8 << 20)
    assert threading.get_ident() not in Threads(2).map(me, range(20), 8 << 20)


@pytest.mark.parametrize(
    ("told", "count"), [("1", 1), ("2", 2), ("0", 5), ("", 5), ("4,2", 4), ("99", 5), (None, 5), ("many", 5)]
)
def test_the_number_of_threads_is_told_by_the_environment(
    told: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(5)), raising=False)
    environ = {} if told is None else {"OMP_NUM_THREADS": told}
    assert threads_here(environ).count == count
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(99)))
    assert threads_here({"OMP_NUM_THREADS": "99"}).count == MOST_THREADS
