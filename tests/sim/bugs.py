"""Planted bugs: one rule of the protocol broken at a time, and a world in which that must come to light.

    BUGS["no carry"] = Bug(patch, schedules)        tests/rendezvous/test_sim.py: some seed of `schedules` turns red
    python -m tests.sim 200 --bug "no carry"        the same with the ordinary schedules

A simulator that finds none of these would find nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from rendezvous import background, layout
from rendezvous.agreement import chain, closing, membership, offers, rules
from rendezvous.agreement.chain import Chain, first_open_step
from rendezvous.agreement.closing import Committer
from rendezvous.agreement.offers import OfferBook
from rendezvous.agreement.rules import Rules
from rendezvous.engine import own_blobs, rendezvous
from rendezvous.engine.averaging import Averager
from rendezvous.engine.own_blobs import OwnBlobs
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.engine.sharded import ShardedMean
from rendezvous.errors import KeyExists, RendezvousError, StoreUnclear
from rendezvous.keeping import budget as keeping
from rendezvous.keeping import collected, garbage
from rendezvous.keeping.budget import Window
from rendezvous.means import announcements
from rendezvous.means import bodies as body_reader
from rendezvous.means.announcements import Announcements
from rendezvous.means.bodies import BodyReader
from rendezvous.records import records
from rendezvous.records.digests import digest
from rendezvous.records.state import Digests, all_arrays, base_of
from rendezvous.records.tensors import TensorFile
from rendezvous.records.wire import Encoder, as_bytes
from rendezvous.snapshots import record as snapshots
from rendezvous.snapshots.replay import StateReplay
from rendezvous.snapshots.writer import LiveFile, SnapshotWriter
from rendezvous.stores import signed as seal
from tests.sim import places as sim_places
from tests.sim.places import Loss
from tests.sim.simulate import TAG, Schedule, draw, draw_lost, run

Patch = Any


@dataclass(frozen=True)
class Bug:
    """patches: what is broken.   schedule: seed -> a world that provokes it.   seeds: one of so many turns red.

    first: the seed from which the everyday tests look; those before it are green today.
    without: the same world without the one ability of the simulator that finds this bug.
    """

    patches: Callable[[], list[Patch]]
    schedule: Callable[[int], Schedule] = draw
    seeds: int = 60
    without: Callable[[Schedule], Schedule] | None = None
    first: int = 0

    def red_seed(self, start: int) -> int | None:
        return next((seed for seed in range(start, self.seeds) if run(self.schedule(seed)).red), None)


# ---------------------------------------------------------------------- worlds


def rough(seed: int) -> Schedule:
    """Many errors, many deaths."""
    return replace(draw(seed), replicas=4, min_replicas=2, speeds=(1.0, 1.0, 1.5, 4.0), hung=(), churn=False, steps=0,
                   error=0.04, lost=0.12, duplicate=0.06, kill=0.003, pause=0.003)  # fmt: skip


def unequal(seed: int) -> Schedule:
    """Nothing fails, but one replica is slow, so that there are late offers."""
    quiet = Schedule(seed, replicas=3, min_replicas=1, speeds=(1.0, 1.2, 4.0))
    return replace(quiet, rules=Rules(sync_every=4, max_carry=2, snapshot_every=3))


def flipping(seed: int) -> Schedule:
    """Bad memory."""
    return Schedule(seed, replicas=3, min_replicas=2, flip=0.06, rules=Rules(sync_every=2, snapshot_every=2))


def pair(seed: int) -> Schedule:
    """Two replicas that need each other, one with bad memory."""
    return Schedule(seed, replicas=2, min_replicas=2, flip=0.05, rules=Rules(sync_every=2, snapshot_every=2))


def joining(seed: int) -> Schedule:
    """Lives are short, and offers late."""
    return replace(unequal(seed), kill=0.006, calm=80.0, end=200.0)


def stuck(seed: int) -> Schedule:
    """A trainer that hangs while its heart beats on."""
    return Schedule(seed, replicas=3, min_replicas=1, hung=(2,))


def zombies(seed: int) -> Schedule:
    """Long sleepers, replaced while they sleep."""
    return Schedule(seed, replicas=3, min_replicas=1, pause=0.012, rules=Rules(sync_every=2), calm=80.0, end=200.0)


def blind() -> Any:
    """A replica does not see that its step was decided without it."""
    return patch.object(Rendezvous, "is_behind", property(lambda rv: False))


def slow_store(seed: int) -> Schedule:
    """A snapshot takes longer than a round."""
    return replace(unequal(seed), latency=0.4)


def hopeless(seed: int) -> Schedule:
    """One replica is ten times slower than the others."""
    return Schedule(seed, replicas=3, min_replicas=1, speeds=(0.6, 0.6, 8.0), end=200.0, settled=30)


def restless(seed: int) -> Schedule:
    """The operator changes min_replicas all the time."""
    return Schedule(seed, replicas=3, min_replicas=1, churn=True, calm=120.0, end=240.0, rules=Rules(sync_every=1))


# ---------------------------------------------------------------------- bugs


def plain_put(s: Any, clock: Any, key: str, body: bytes) -> tuple[bool, bytes]:
    value = s.get(key)
    if value is None:
        s.put(key, body)
    return value is None, value or body


def error_is_won(s: Any, clock: Any, key: str, body: bytes) -> tuple[bool, bytes]:
    value = s.get(key)
    if value is None:
        try:
            s.create(key, body)
        except StoreUnclear:
            return True, body
        except KeyExists:
            return error_is_won(s, clock, key, body)
    return value is None or value == body, value or body


def no_heal(rv: Any, upto: int | None = None) -> None:
    rv.chain.forget_commits()
    rv.resume_at(rv.state, first_open_step(rv.store))


def skips_gaps(replay: Any, upto: int | None = None) -> Iterator[Any]:
    while (upto is None or replay.step < upto) and (commit := replay.chain.read(replay.step)) is not None:
        if replay.store.get(layout.commit_key(replay.step + 1)) is None:
            replay._apply(commit)
        replay.step += 1
        yield commit


def ignores_listings(chain: Any, t: int) -> None:
    for u in range(max(0, t - chain._window), t):
        commit = chain.read(u)
        chain._commits[u] = replace(commit, offers=())


@contextmanager
def offer_first() -> Iterator[None]:
    """The blob is put after the offer that names it."""
    upload, announce = OwnBlobs.upload, OfferBook.announce

    def later(blobs: Any, *args: Any) -> Any:
        puts: list[Any] = []
        with patch.object(blobs.store, "put", lambda *call: puts.append(call)):
            blobs.store._owed = puts
            return upload(blobs, *args)

    def then(book: Any, mine: Any) -> Any:
        stands = announce(book, mine)
        for call in book.store._owed:
            book.store.put(*call)
        return stands

    with patch.object(OwnBlobs, "upload", later), patch.object(OfferBook, "announce", then):
        yield


def one_look(book: Any, s: int, slot: str) -> Any:
    if (s, slot) not in book._offers:
        body = book.store.get(layout.offer_key(s, slot, 0))
        if body is not None:
            book._count_if_eligible(records.Offer.decode(body))
    return book._offers.get((s, slot))


def one_attempt(book: Any, mine: Any) -> Any:
    key = layout.offer_key(mine.step, mine.slot, 0)
    if offers.put_once(book.store, book.clock, key, mine.encode())[0]:
        book._offers[mine.step, mine.slot] = mine
    return mine


@contextmanager
def early_snapshot() -> Iterator[None]:
    """The closer of t writes θ_{t+1}, before any other replica has that digest."""
    start = SnapshotWriter.start

    def eager(writer: Any, *args: Any, **more: Any) -> None:
        start(writer, *args, **more)
        if writer.is_busy:
            writer.confirm_base(writer._now.mine.t, writer._now.mine.base)

    with patch.object(SnapshotWriter, "start", eager):
        yield


@contextmanager
def writer_carries() -> Iterator[None]:
    """A replica that was left out adds the old work to the new, which the committer carries as well."""
    offer, advance = Rendezvous.offer, Rendezvous.advance

    def both(rv: Any, delta: np.ndarray, *args: Any, **more: Any) -> Any:
        old = getattr(rv, "_left_out", None)
        return offer(rv, delta if old is None or len(old) != len(delta) else delta + old, *args, **more)

    def remember(rv: Any, commit: Any) -> None:
        mine = next((m.body for m in rv.own_blobs.bodies if m.step == commit.t), None)
        rv._left_out = None if mine is None or commit.lists_offer(commit.t, rv.slot) else mine.view(np.float32).copy()
        advance(rv, commit)

    with patch.object(Rendezvous, "offer", both), patch.object(Rendezvous, "advance", remember):
        yield


@contextmanager
def moved_snapshot() -> Iterator[None]:
    """The unread rest of θ_t is stepped under the reader's hands, and the writer does not check the bytes it read."""

    def trusts(writer: Any, writing: Any) -> None:
        writer.store.put(writing.mine.blob, writing.file)

    with (
        patch.object(LiveFile, "release_fragment", lambda file, fragment: 0),
        patch.object(SnapshotWriter, "_put_blob", trusts),
    ):
        yield


@contextmanager
def early_announcement() -> Iterator[None]:
    """The closer announces the buffer of the mean before the mean is in it."""
    mean = Rendezvous.mean

    def eager(rv: Any, commit: Any, out: np.ndarray) -> None:
        if commit.by == rv.name and commit.mode == "direct":
            rv.reducer.announcements.announce(commit.t, 0, out)
        mean(rv, commit, out)

    with patch.object(Rendezvous, "mean", eager):
        yield


@contextmanager
def done_without_a_look() -> Iterator[None]:
    """A replica that has taken the last step says so, even if the others' records are lost."""
    finish = Rendezvous.finish

    def trusting(rv: Any, reason: str) -> None:
        rv._committer.refuse_lost_anchors = nothing
        finish(rv, reason)

    with patch.object(Rendezvous, "finish", trusting):
        yield


@contextmanager
def inherited_residual() -> Iterator[None]:
    """A new life takes the residual of the one before it, which may have sent it."""
    under = Rendezvous.set_rules

    def steals(rv: Any, *args: Any) -> Any:
        under(rv, *args)
        rv.own_blobs.encoder._residuals = vars(rv._bucket._world).setdefault("_stolen", {}).setdefault(rv.slot, {})
        return rv

    with patch.object(Rendezvous, "set_rules", steals):
        yield


@contextmanager
def residual_taken_back() -> Iterator[None]:
    """The content of a body stays in the residual, though the body counts."""
    offer = Rendezvous.offer

    def twice(rv: Any, *args: Any, **named: Any) -> None:
        before = rv.last_offer
        offer(rv, *args, **named)
        if rv.last_offer is not before:
            rv.own_blobs.take_back(rv.fragment)

    with patch.object(Rendezvous, "offer", twice):
        yield


def announces_the_callers_memory(averager: Any, commit: Any, mean: np.ndarray, mine: Any) -> Callable[[], None]:
    return lambda: averager.reducer.announcements.announce(commit.t, 0, mean)


def one_buffer(reader: Any, listed: Any, group: Any, mine: Any, *, one_by_one: bool) -> list[Any]:
    """Bodies that are fetched at the same time into the same memory."""
    bodies: list[Any] = [""] * len(listed)

    def get(i: int) -> None:
        bodies[i] = reader.read_body(listed[i], group, mine)
        bodies[i] = bodies[i] if reader._together is not background.in_turn else np.array(bodies[i])

    reader._together(*(partial(get, i) for i in range(len(listed))))
    return bodies


def ages_forgotten(encoder: Any, unsent: Any) -> None:
    encoder._residuals = {int(name[9:]): np.array(e) for name, e in unsent.items() if name.startswith("residual.")}


def believed(body: bytes, *rest: Any) -> bytes:
    """The record without its tag, which may be any."""
    return TAG.sub(b"}", body)


def one_part_stops_all(parts: Any, *acts: Callable[[], None]) -> None:
    with suppress(RendezvousError):
        for act in acts:
            act()


def founds_again(store: Any, clock: Any, state: Any, fragments: int, *, elsewhere: bool) -> None:
    if store.get(layout.snapshot_key(0)) is None:
        base = base_of(state, fragments)
        snapshots.write(store, clock, 0, all_arrays(state, fragments), base=base, prev=None)


def trusting(store: Any, clock: Any, key: str, pieces: Any, out: np.ndarray, start: int = 0) -> str | None:
    """The bytes found are taken for the bytes written."""
    view = as_bytes(out)
    return None if store.get_into(key, view, start) else f"{key} is missing"


def mends_blindly(store: Any, snapshot: Any, arrays: Any) -> bool:
    store.put(snapshot.blob, TensorFile(arrays))
    return True


def announces_again(announcements: Any, t: int, j: int, body: np.ndarray) -> None:
    n = records.new_nonce()
    record = records.Mean(t, layout.mean_blob(t, n), body.nbytes, digest(body.tobytes()), n)
    announcements.store.put(record.blob, body.tobytes())
    announcements.store.put(layout.mean_key(t, j), record.encode())


def newest_is_the_floor(store: Any, hint: int = 0, at_least: int = 0) -> tuple[int, Any]:
    newest = next((s for s in snapshots.newest_first(store, hint) if garbage.can_heal_from(store, s)), None)
    return (at_least, None) if newest is None or newest.t <= at_least else (newest.t, newest)


replaced_before = garbage.Collector._delete_listed


def bodies_after_the_newest(collector: Any, end: int, at_most: int) -> int:
    return replaced_before(collector, collector._head, at_most)


def everything_old(keys: Any, kind: str, below: int) -> list[str]:
    return [k for k in keys if int(k.split("/")[1]) < below]


def a_step_early(window: Any) -> int:
    return max(0, window.floor - window.carry) + 1


def a_snapshot_early(keys: Any, kind: str, below: int) -> list[str]:
    return doomed(keys, kind, below + (kind == "snapshot"))


def waits_for_all(*, fresh: Any, expected_slots: set[str], peers: Any, timing: Any, **_: Any) -> dict[str, str]:
    """Wait for ever for every replica that beats."""
    return {s: "lives" for s in expected_slots - set(fresh) if s in peers and not peers[s].is_dead(timing.dead_after)}


def old_fence(closer: Any, listed: Any, wishes: Any) -> dict[str, int]:
    return dict(closer.chain.fence_before(closer.offers.step))


def sharded(seed: int) -> Schedule:
    """No replica is replaced for long: the living must take over the parts of the dead."""
    rules = Rules(sync_every=2, snapshot_every=3, shard_from=1, shard_elements=2)
    return Schedule(seed, replicas=4, min_replicas=2, kill=0.004, pause=0.002, rules=rules)


def sweeping(seed: int) -> Schedule:
    """Every second step is a snapshot, and older blobs go."""
    rules = Rules(sync_every=2, max_carry=1, snapshot_every=2)
    plan = Schedule(seed, replicas=3, min_replicas=1, keep=0, rules=rules, end=240.0)
    return replace(plan, kill=0.001, pause=0.006, calm=100.0, speeds=(0.6, 1.0, 1.5))


def thrifty(seed: int) -> Schedule:
    """The same, with room for some of the older blobs."""
    return replace(sweeping(seed), keep=1_500, steps=0)


def rotting(seed: int) -> Schedule:
    """Blobs do not last."""
    rules = Rules(sync_every=2, snapshot_every=2, shard_from=1 if seed % 2 else 8 << 20, shard_elements=2)
    return Schedule(seed, replicas=3, min_replicas=2, rot=0.25, rot_after=2.0, kill=0.002, rules=rules)


def rotting_in_bad_memory(seed: int) -> Schedule:
    return replace(rotting(seed), flip=0.08, rots=("snapshot blob",), rot=0.7)


def lossy(seed: int) -> Schedule:
    """bf16 with error feedback, and short lives."""
    return Schedule(seed, replicas=3, min_replicas=1, kill=0.002, rules=Rules(sync_every=2, codec="bf16"))


def in_rows(seed: int) -> Schedule:
    """int8 in shards of a real size; bodies are fetched at the same time."""
    rules = Rules(sync_every=2, snapshot_every=3, codec="int8", shard_from=1, shard_elements=2)
    return Schedule(seed, replicas=3, min_replicas=2, rules=rules, sizes=(2500,), kill=0.002)


def waiting_long(seed: int) -> Schedule:
    """top-k, and replicas that go and come back."""
    rules = Rules(sync_every=2, codec="topk")
    return Schedule(seed, replicas=3, min_replicas=1, churn=True, rules=rules, sizes=(9000,), end=120.0)


def expiring(seed: int) -> Schedule:
    """Registers vanish, one replica is slow, and all sleep often."""
    return replace(unequal(seed), vanish=0.5, speeds=(0.6, 0.6, 5.0), pause=0.012)


def scribbled(seed: int) -> Schedule:
    """A foreign writer takes registers that do not exist yet, and overwrites beats."""
    return Schedule(seed, replicas=3, min_replicas=2, malformed=1.0, kill=0.003, churn=True)


def buggy_client(seed: int) -> Schedule:
    """The store's client raises what it never should."""
    return Schedule(seed, replicas=3, min_replicas=2, foreign=0.01)


def signed(seed: int) -> Schedule:
    """A run under a key, and a writer without it that overwrites registers."""
    return Schedule(seed, replicas=3, min_replicas=2, key="k" * 16, forge=0.5, kill=0.003, calm=80.0)


def ending(seed: int) -> Schedule:
    """A short run whose bucket is emptied when it ends."""
    plan = Schedule(seed, replicas=3, min_replicas=2, steps=3, rules=Rules(sync_every=2, snapshot_every=1))
    loss = Loss(18.0 + seed % 40 / 4, "emptied", pins=False)
    return replace(plan, loss=loss, slow_blobs=40.0, end=90.0, calm=90.0)


doomed = garbage.blobs_before
FETCHERS = (announcements, body_reader, own_blobs)


def attr(owner: Any, name: str, value: Any) -> Callable[[], list[Patch]]:
    return lambda: [patch.object(owner, name, value)]


def nothing(*args: Any, **kwargs: Any) -> Any:
    return None


BUGS: dict[str, Bug] = {
    "plain PUT as commit": Bug(attr(closing, "put_once", plain_put), rough, first=8),
    "an error taken as won": Bug(attr(closing, "put_once", error_is_won), rough),
    "an error taken as won, claims": Bug(attr(membership, "put_once", error_is_won), rough, first=4),
    "no fence in the chain": Bug(attr(Committer, "_raise_fence", old_fence), rough),
    "fence ignored": Bug(
        lambda: [
            patch.object(rules, "is_eligible", lambda o, base, fence: o.base == base),
            patch.object(membership.Membership, "refuse_if_fenced", nothing),
        ],
        zombies,
    ),
    "no base check": Bug(
        lambda: [
            patch.object(rules, "is_eligible", lambda o, base, fence: fence.get(o.slot, 0) <= o.generation),
            patch.object(Rendezvous, "_replay_own_state", nothing),
        ],
        flipping,
    ),
    "no carry": Bug(attr(Committer, "_late_offers", lambda closer, s, wishes: []), unequal),
    "writer carries too": Bug(lambda: [writer_carries()], unequal),
    "no heal": Bug(attr(Rendezvous, "_heal", no_heal), joining),
    "a gap skipped": Bug(attr(StateReplay, "commits", skips_gaps), joining),
    "offer before blob": Bug(lambda: [offer_first()], unequal),
    "one offer attempt": Bug(
        lambda: [
            patch.object(OfferBook, "announce", one_attempt),
            patch.object(OfferBook, "standing_offer", one_look),
        ],
        pair,
    ),
    "unconfirmed snapshot": Bug(lambda: [early_snapshot()], flipping),
    "no self-check": Bug(attr(Digests, "check_unchanged", nothing), flipping),
    "no re-derive": Bug(attr(Rendezvous, "_replay_own_state", nothing), pair),
    "no patience": Bug(attr(rules, "waiting_for", waits_for_all), stuck),
    "no catch-up": Bug(lambda: [blind(), patch.object(Rendezvous, "catch_up", lambda rv, late=None: 0)], hopeless),
    "joiner ignores earlier listings": Bug(attr(Chain, "read_before", ignores_listings), joining, first=8),
    "no takeover": Bug(attr(ShardedMean, "_is_overdue", lambda sharer, commit, j, waited: False), sharded),
    "stale desired state": Bug(attr(Committer, "_check_wanted", lambda closer, wanted: ""), restless, first=4),
    "shard overwritten": Bug(attr(Announcements, "announce", announces_again), sharded),
    "residual stolen": Bug(lambda: [inherited_residual()], lossy),
    "residual used twice": Bug(lambda: [residual_taken_back()], lossy),
    "GC deletes registers": Bug(attr(garbage, "blobs_before", everything_old), sweeping),
    "early GC, by a step": Bug(attr(Window, "first_listable", property(a_step_early)), sweeping),
    "a body goes before its mean stands": Bug(attr(garbage, "announced_stands", lambda store, commit: True), sweeping),
    "a body goes that mends a mean": Bug(attr(garbage.Collector, "_delete_listed", bodies_after_the_newest), sweeping),
    "a budget that bounds nothing": Bug(attr(keeping, "_reach_back", lambda end, room, sizes: (0, room)), thrifty),
    "early GC, by a snapshot": Bug(attr(garbage, "blobs_before", a_snapshot_early), sweeping),
    "early GC, newest snapshot": Bug(attr(garbage, "two_newest", newest_is_the_floor), sweeping),
    "collected is taken for lost": Bug(attr(collected, "refuse_collected", nothing), sweeping),
    "bytes are not verified": Bug(
        lambda: [patch.object(m, "fetch_checked", trusting) for m in FETCHERS], rotting, first=1
    ),
    "repair is not verified": Bug(attr(snapshots, "mend_blob", mends_blindly), rotting_in_bad_memory, first=2),
    "mean announced before it is right": Bug(lambda: [early_announcement()], unequal),
    "snapshot of a moved θ": Bug(lambda: [moved_snapshot()], slow_store),
    "announced mean is no copy": Bug(
        attr(Averager, "_prepare_announcement", announces_the_callers_memory),
        unequal,
        without=lambda s: replace(s, poison=False),
    ),
    "bodies at once, one room": Bug(
        attr(BodyReader, "read_bodies", one_buffer), in_rows, without=lambda s: replace(s, far=False)
    ),
    "ages are not inherited": Bug(
        attr(Encoder, "restore_residuals", ages_forgotten),
        waiting_long,
        without=lambda s: replace(s, rules=replace(s.rules, codec="bf16")),
    ),
    "a lost commit is decided again": Bug(
        attr(Chain, "refuse_gap", nothing), expiring, without=lambda s: replace(s, vanish=0.0), seeds=120
    ),
    "a lost θ₀ is replaced": Bug(
        attr(rendezvous, "write_theta_0", founds_again), expiring, without=lambda s: replace(s, vanish=0.0), seeds=120
    ),
    "no record is passed over": Bug(
        attr(membership, "decode_or_none", lambda kind, body: None if body is None else kind.decode(body)),
        scribbled,
        without=lambda s: replace(s, malformed=0.0),
    ),
    "the heartbeat dies of any exception": Bug(
        attr(background.Parts, "run", one_part_stops_all), buggy_client, without=lambda s: replace(s, foreign=0.0)
    ),
    "a closer trusts its store": Bug(
        attr(Committer, "refuse_lost_anchors", nothing),
        draw_lost,
        without=lambda s: replace(s, loss=None, flip=0.0),
        first=2,
    ),
    "one anchor": Bug(
        attr(chain, "ANCHORS", 1), draw_lost, without=lambda s: replace(s, loss=None, flip=0.0), seeds=1500
    ),
    "a joiner trusts its store": Bug(
        lambda: [patch.object(m, "refuse_lost_claim", nothing) for m in (rendezvous, closing)],
        draw_lost,
        without=lambda s: replace(s, loss=None, flip=0.0),
    ),
    "done is said without a look": Bug(
        lambda: [done_without_a_look()], ending, without=lambda s: replace(s, loss=None, flip=0.0), seeds=200, first=2
    ),
    "a folder is whatever its path leads to": Bug(
        attr(sim_places, "guard_folder", lambda: False), draw_lost, without=lambda s: replace(s, loss=None, flip=0.0)
    ),
    "a tag is not verified": Bug(
        attr(seal, "verify_record", believed), signed, without=lambda s: replace(s, forge=0.0)
    ),
}


@contextmanager
def planted(name: str, bugs: Mapping[str, Bug] | None = None) -> Iterator[None]:
    """This bug is in the engine for a while ("" is none).   bugs: None: those of the engine."""
    with ExitStack() as stack:
        for one in (BUGS if bugs is None else bugs)[name].patches() if name else ():
            stack.enter_context(one)
        yield
