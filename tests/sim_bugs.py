"""Planted bugs: one rule of the protocol broken at a time, and a world in which that must come to light.

    BUGS["no carry"] = Bug(patch, schedules)        tests/test_sim.py: some seed of `schedules` turns red
    python -m tests.sim 200 --bug "no carry"        the same with the ordinary schedules

A simulator that finds none of these would find nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np

from rendezvous import closing, layout, membership, rendezvous, rules
from rendezvous.chain import Chain, head
from rendezvous.closing import Closer
from rendezvous.errors import KeyExists, StoreUnclear
from rendezvous.rendezvous import Rendezvous
from rendezvous.rules import Rules
from rendezvous.sharded import Sharer
from tests.sim import Schedule, draw

Patch = Any


@dataclass(frozen=True)
class Bug:
    """patches: what is broken.   schedule: seed -> a world that provokes it.   seeds: one of so many turns red."""

    patches: Callable[[], list[Patch]]
    schedule: Callable[[int], Schedule] = draw
    seeds: int = 60


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
    rv.chain.forget()
    t = head(rv.store)
    rv._replay(t, t, {})


def skips_gaps(rv: Any, start: int, upto: int | None, damaged: Any) -> None:
    rv.chain.read_before(start)
    rv._open(start)
    while (upto is None or rv.step < upto) and (commit := rv.chain.read(rv.step)) is not None:
        if rv.store.get(layout.commit(rv.step + 1)) is None:
            rv._apply(commit)
        rv._move_on(commit)


def ignores_listings(chain: Any, t: int) -> None:
    for u in range(max(0, t - chain._window), t):
        commit = chain.read(u)
        chain._commits[u] = replace(commit, offers=())


@contextmanager
def offer_first() -> Iterator[None]:
    """The blob is put after the offer that names it."""
    upload, announce = Rendezvous._upload, Rendezvous._announce_offer

    def later(rv: Any, *args: Any) -> Any:
        puts: list[Any] = []
        with patch.object(rv.store, "put", lambda *call: puts.append(call)):
            rv._owed = puts
            return upload(rv, *args)

    def then(rv: Any, record: Any) -> None:
        announce(rv, record)
        for call in rv._owed:
            rv.store.put(*call)

    with patch.object(Rendezvous, "_upload", later), patch.object(Rendezvous, "_announce_offer", then):
        yield


def one_look(closer: Any, s: int, slot: str) -> Any:
    if (s, slot) not in closer._offers:
        body = closer._store.get(layout.offer(s, slot, 0))
        if body is not None:
            closer._judge(closing.Offer.decode(body))
    return closer._offers.get((s, slot))


def one_attempt(rv: Any, record: Any) -> None:
    won, _ = rendezvous.put_once(rv.store, rv.clock, layout.offer(record.step, rv.slot, 0), record.encode())
    if won:
        rv.last_offer = record
        rv._closer.mine(record)


@contextmanager
def early_snapshot() -> Iterator[None]:
    """θ_{t+1} is written by whoever closed t, before anybody else had that digest."""
    move_on = Rendezvous._move_on

    def eager(rv: Any, commit: Any) -> None:
        move_on(rv, commit)
        if commit.by == rv.name:
            rv._write_snapshot(confirmed=True)

    with patch.object(Rendezvous, "_move_on", eager):
        yield


@contextmanager
def writer_carries() -> Iterator[None]:
    """Who was left out adds the old work to the new, which the committer carries as well."""
    upload, advance = Rendezvous._upload, Rendezvous.advance

    def both(rv: Any, delta: np.ndarray, *args: Any) -> Any:
        old = getattr(rv, "_left_out", None)
        return upload(rv, delta if old is None or len(old) != len(delta) else delta + old, *args)

    def remember(rv: Any, commit: Any) -> None:
        mine = rv._mine
        rv._left_out = mine[2].view(np.float32).copy() if mine and not commit.lists(commit.t, rv.slot) else None
        advance(rv, commit)

    with patch.object(Rendezvous, "_upload", both), patch.object(Rendezvous, "advance", remember):
        yield


def waits_for_all(t: int, fresh: Any, expected: set[str], peers: Any, *rest: Any) -> dict[str, str]:
    """For ever for everybody whose heart beats."""
    return {s: "lives" for s in expected - set(fresh) if s in peers and not peers[s].dead(rest[2].dead_after)}


def old_fence(closer: Any, listed: Any, wishes: Any) -> dict[str, int]:
    return dict(closer._chain.fence(closer.step))


def sharded(seed: int) -> Schedule:
    """Nobody is replaced for long: the living must take over the parts of the dead."""
    rules = Rules(sync_every=2, snapshot_every=3, shard_from=1, shard_elements=2)
    return Schedule(seed, replicas=4, min_replicas=2, kill=0.004, pause=0.002, rules=rules)


def attr(owner: Any, name: str, value: Any) -> Callable[[], list[Patch]]:
    return lambda: [patch.object(owner, name, value)]


def nothing(*args: Any, **kwargs: Any) -> Any:
    return None


BUGS: dict[str, Bug] = {
    "plain PUT as commit": Bug(attr(closing, "put_once", plain_put), rough),
    "an error taken as won": Bug(attr(closing, "put_once", error_is_won), rough),
    "an error taken as won, claims": Bug(attr(membership, "put_once", error_is_won), rough),
    "no fence in the chain": Bug(attr(Closer, "_fence", old_fence), rough),
    "fence ignored": Bug(
        lambda: [
            patch.object(rules, "eligible", lambda o, base, fence: o.base == base),
            patch.object(Rendezvous, "_alert_fenced", nothing),
        ],
        zombies,
    ),
    "no base check": Bug(
        lambda: [
            patch.object(rules, "eligible", lambda o, base, fence: fence.get(o.slot, 0) <= o.generation),
            patch.object(Rendezvous, "_rederive", nothing),
        ],
        flipping,
    ),
    "no carry": Bug(attr(Closer, "_late", lambda closer, s, wishes: []), unequal),
    "writer carries too": Bug(lambda: [writer_carries()], unequal),
    "no heal": Bug(attr(Rendezvous, "_heal", no_heal), joining),
    "a gap skipped": Bug(attr(Rendezvous, "_replay", skips_gaps), joining),
    "offer before blob": Bug(lambda: [offer_first()], unequal),
    "one offer attempt": Bug(
        lambda: [patch.object(Rendezvous, "_announce_offer", one_attempt), patch.object(Closer, "standing", one_look)],
        pair,
    ),
    "unconfirmed snapshot": Bug(lambda: [early_snapshot()], flipping),
    "no self-check": Bug(attr(Rendezvous, "_check_state", nothing), flipping),
    "no re-derive": Bug(attr(Rendezvous, "_rederive", nothing), pair),
    "waits for everybody for ever": Bug(attr(rules, "waiting_for", waits_for_all), stuck),
    "no catch-up": Bug(lambda: [patch.object(Rendezvous, "behind", property(lambda rv: False))], hopeless),
    "joiner ignores earlier listings": Bug(attr(Chain, "read_before", ignores_listings), joining),
    "no takeover": Bug(attr(Sharer, "_turn", lambda sharer, commit, j, waited: False), sharded),
    "stale wishes": Bug(attr(Closer, "_news", lambda closer, wishes: ""), restless),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """This bug is in the engine for a while ("" is none)."""
    with ExitStack() as stack:
        for one in BUGS[name].patches() if name else ():
            stack.enter_context(one)
        yield
