"""Reader of the bodies that a step lists: it fetches them shard by shard and checks their digests.

    body     │ shard 0 │ shard 1 │ …                     the fixed grid (wire.shard_grid), each with a digest of its own
    group              └── one request per body ──┘      shards that are read and averaged at a time

    near (a request costs a copy)     one shard at a time: it is still in the cache when it is added to the sum
    far  (a request takes long)       16 MiB of each body, all bodies at the same time

All reads use the same memory, because new memory pages cost more than the read.

Not promised: that a body can be fetched.  If it cannot, `read_bodies` gives a text with the reason.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from rendezvous.agreement.rules import Rules
from rendezvous.background import Together, in_turn
from rendezvous.clock import Clock
from rendezvous.records.records import Commit, Listed
from rendezvous.records.wire import (
    Piece,
    Range,
    body_size,
    byte_range,
    codec_alignment,
    fetch_checked,
    has_exact_size,
    page_aligned,
    shard_grid,
)
from rendezvous.store import Store

_FAR = 16 << 20  # bytes of one body in a group, if a request takes long


class Shard(NamedTuple):
    """A cell of the grid: its number, and its elements [start, stop)."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class OwnBody:
    """This replica's own body in memory: we read it there, and upload it again if the store loses it."""

    step: int
    key: str
    body: np.ndarray
    pieces: list[Piece]


class BodyReader:
    """Reader of listed bodies.   together: runs the requests for several bodies; `in_turn` runs one after the other."""

    def __init__(self, store: Store, clock: Clock, rules: Rules, together: Together = in_turn) -> None:
        self._store = store
        self._clock = clock
        self._codec = rules.codec
        self._shard_elements = rules.shard_elements
        self._together = together
        self._bytes = page_aligned(0)
        self._kept = 0  # bytes at the front of `_bytes` that must not be overwritten

    def grid(self, elements: int) -> list[Shard]:
        """Return the shards of a vector with `elements` elements."""
        ranges = shard_grid(elements, codec_alignment(self._codec), self._shard_elements)
        return [Shard(number, start, stop) for number, (start, stop) in enumerate(ranges)]

    def groups(self, commit: Commit, shards: list[Shard]) -> Iterator[list[Shard]]:
        """Yield the groups of shards that are read together: one group if a body has no digest per shard."""
        if not has_shard_digests(commit):
            yield shards
            return
        group: list[Shard] = []
        for shard in shards:
            group.append(shard)
            if self._together is in_turn or body_size(self._codec, shard.stop - group[0].start) >= _FAR:
                yield group
                group = []
        if group:
            yield group

    def record_flaw(self, listed: Listed, elements: int) -> str:
        """Return why a listed body cannot have so many elements, judged by its record; "" if it can."""
        size = body_size(self._codec, elements)
        shards = len(self.grid(elements))
        if listed.size != size if has_exact_size(self._codec) else listed.size > size:
            return f"{listed.blob} should have {size} bytes, its record says {listed.size}"
        if len(listed.shards) not in (0, shards):
            return f"{listed.blob} should have {shards} shards, its record has {len(listed.shards)}"
        return ""

    # ------------------------------------------------------------------ reading

    def read_bodies(
        self, offers: list[Listed], group: list[Shard], mine: OwnBody | None, *, one_by_one: bool
    ) -> Iterable[np.ndarray | str]:
        """Read these shards of each body.   Return the bytes, or a text with the reason if a body cannot be read.

        one_by_one: all bodies may be read into the same memory, so use each before you take the next.
        """
        sizes = [self._bytes_of(listed, group) for listed in offers]
        if self._together is in_turn and one_by_one:
            return (self._read_into(o, group, mine, self.buffer(n)) for o, n in zip(offers, sizes, strict=True))
        buffers = np.split(self.buffer(sum(sizes)), np.cumsum(sizes)[:-1])
        bodies: list[np.ndarray | str] = [""] * len(offers)

        def read_one(i: int) -> None:
            bodies[i] = self._read_into(offers[i], group, mine, buffers[i])

        self._together(*(partial(read_one, i) for i in range(len(offers))))
        return bodies

    def read_body(self, listed: Listed, group: list[Shard], mine: OwnBody | None) -> np.ndarray | str:
        """Read these shards of one body.   Return their bytes, or a text with the reason if it cannot be read."""
        return self._read_into(listed, group, mine, self.buffer(self._bytes_of(listed, group)))

    def _read_into(
        self, listed: Listed, group: list[Shard], mine: OwnBody | None, buffer: np.ndarray
    ) -> np.ndarray | str:
        start = self._bytes_range(group)[0] if has_exact_size(self._codec) else 0
        if mine is not None and listed.blob == mine.key:
            return mine.body[start : start + buffer.size]
        pieces = self._digested_pieces(listed, group)
        trouble = fetch_checked(self._store, self._clock, listed.blob, pieces, buffer, start)
        return buffer if trouble is None else trouble

    def _bytes_of(self, listed: Listed, group: list[Shard]) -> int:
        """Return the number of bytes of these shards in a listed body."""
        if not has_exact_size(self._codec):
            return listed.size
        start, stop = self._bytes_range(group)
        return stop - start

    def _bytes_range(self, group: list[Shard]) -> Range:
        """Return the byte range of these shards in a body."""
        return byte_range(self._codec, group[0].start, group[-1].stop)

    def _digested_pieces(self, listed: Listed, group: list[Shard]) -> list[Piece]:
        if not listed.shards:
            return [(listed.size, listed.digest)]
        return [(body_size(self._codec, s.stop - s.start), listed.shards[s.number]) for s in group]

    def place_in_part(self, part: list[Shard], group: list[Shard]) -> slice:
        """Return the byte range of these shards in the body of a part."""
        return slice(*(at - self._bytes_range(part)[0] for at in self._bytes_range(group)))

    # ------------------------------------------------------------------ memory

    def buffer(self, size: int) -> np.ndarray:
        """Return memory of `size` bytes to read into; it is the same memory every time."""
        end = self._kept + size
        if self._bytes.size < end:
            self._bytes = page_aligned(end)
        return self._bytes[self._kept : end]

    @contextmanager
    def kept_buffer(self, size: int) -> Generator[np.ndarray]:
        """Give `size` bytes of this memory, which other reads do not overwrite inside the `with` block."""
        buffer = self.buffer(size)
        self._kept = size
        try:
            yield buffer
        finally:
            self._kept = 0


def has_shard_digests(commit: Commit) -> bool:
    """Whether every listed body has a digest for each shard."""
    return all(o.shards for o in commit.offers)


def total_weight(offers: Sequence[Listed]) -> np.float32:
    """Return fl(Σ wᵢ), the sum of the fp32 weights, rounded once."""
    return np.float32(sum(o.weight for o in offers))


def elements_slice(shards: list[Shard]) -> slice:
    """Return the range of these shards' elements in the vector."""
    return slice(shards[0].start, shards[-1].stop)
