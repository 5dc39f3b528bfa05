"""Test whether a store can hold registers (write-once keys): many writers create one key, and exactly one must win.

    16 writers ──create(key)──▶ store      winners: 1, and its body stays         a register
                                           winners: 2 or more, or another body    the store overwrites: no run there

Not promised: that a store which passes never fails; a race is only a sample.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rendezvous.clock import Clock
from rendezvous.errors import KeyExists, StoreError, StoreRefused, StoreUnclear
from rendezvous.store import Store

T = TypeVar("T")

RACERS = 16
ROUNDS = 5
KNOWN = "(the servers of rclone and s3rver always do, Ceph's gateway does in a bucket with versioning)"
OVERWRITES = f"silently overwrites: a second create of the same key succeeded {KNOWN}"


@dataclass(frozen=True)
class Race:
    """Result of a race.   winners: their number in each round.   stands: whether the store kept the winners' bodies."""

    racers: int
    winners: tuple[int, ...]
    stands: bool

    def why_unfit(self) -> str | None:
        """Return why the store cannot hold registers; None if it can."""
        if max(self.winners) > 1:
            return f"silently overwrites: {max(self.winners)} of {self.racers} writers won the same key {KNOWN}"
        if not self.stands:
            return "the store told a writer that its object was stored, and the key has another object"
        if not any(self.winners):
            return f"no key could be created in {len(self.winners)} rounds of {self.racers} writers"
        return None


def why_unfit(store: Store, clock: Clock) -> str | None:
    """Return why the store cannot hold registers, or None.  The race is short, for stores that already have a run."""
    at = f"probe/{os.urandom(6).hex()}/"
    rounds = 3
    try:
        raced = race_writers(store, clock, f"{at}race/", rounds, racers=4)
        return raced.why_unfit() or (None if keeps_first(store, f"{at}twice", clock) else OVERWRITES)
    finally:
        delete_quietly(store, [f"{at}twice", *(f"{at}race/{n}" for n in range(rounds))])


def race_writers(store: Store, clock: Clock, at: str = "", rounds: int = ROUNDS, racers: int = RACERS) -> Race:
    """Let many writers create the same key at once.

    at: prefix of the keys; "": a new prefix, whose keys are deleted afterwards.
    Raise the store's error if no writer of a round gets an answer, even when the round is repeated.
    """
    place = at or f"probe/{os.urandom(6).hex()}/race/"
    winners: list[int] = []
    stands = True
    try:
        for n in range(rounds):
            won = retry_unclear(clock, lambda n=n: _one_race(store, f"{place}{n}", racers), times=2)
            winners.append(len(won))
            stands &= len(won) != 1 or retry_unclear(clock, lambda n=n: store.get(f"{place}{n}")) == won[0]
    finally:
        if not at:
            delete_quietly(store, [f"{place}{n}" for n in range(rounds)])
    return Race(racers, tuple(winners), stands)


def _one_race(store: Store, key: str, racers: int) -> list[bytes]:
    """Run one round.   Return the bodies whose creation succeeded.   Raise an error if no writer got an answer."""
    gate = threading.Barrier(racers)
    won = list[bytes]()
    failed = list[StoreError]()

    def run(n: int) -> None:
        body = b"%03d %s" % (n, os.urandom(8).hex().encode())
        gate.wait()
        try:
            store.create(key, body)
            won.append(body)
        except KeyExists:
            return
        except (StoreUnclear, StoreRefused) as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(racers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(failed) == racers:
        raise failed[0]
    return won


def keeps_first(store: Store, key: str, clock: Clock) -> bool:
    """Whether the first body stays when the same key is created a second time.

    A store may answer "exists" (409) although there is no object.  So the first create is repeated, at most five times,
    until its object exists.  Only then is the second create sent.
    """
    for n in range(5):
        ignore_conflict(lambda: store.create(key, b"first"))
        if retry_unclear(clock, lambda: store.get(key)) is not None:
            break
        clock.sleep(0.1 * 2**n)
    ignore_conflict(lambda: store.create(key, b"second"))
    return retry_unclear(clock, lambda: store.get(key)) in (b"first", None)  # None: no create worked; the race decides


# -------------------------------------------------------------------- patience


def retry_unclear(clock: Clock, request: Callable[[], T], times: int = 5) -> T:
    """Return the answer to `request`, which is called again after StoreUnclear, at most `times` times in all."""
    for n in range(times - 1):
        try:
            return request()
        except StoreUnclear:
            clock.sleep(0.1 * 2**n)
    return request()


def ignore_conflict(request: Callable[[], object]) -> None:
    try:
        request()
    except (KeyExists, StoreUnclear):
        return


def delete_quietly(store: Store, keys: list[str]) -> None:
    try:
        store.delete(keys)
    except StoreError:
        return  # a few small objects may stay; the result of the probe is more important
