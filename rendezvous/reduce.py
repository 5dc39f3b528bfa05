"""The mean of a commit, in the same bits for every reader.

    mean = ( fl(w₁·x₁) + fl(w₂·x₂) + … ) / fl(Σ wᵢ)        in listed order, each operation rounded to fp32

direct     every reader fetches every listed blob but its own
sharded    the owner of part j fetches its range of every blob, announces the part's mean; all fetch all parts
announced  the closer wrote the mean and its digest, so that a later reader fetches one blob instead of N, and a
           blob that rots after it was listed can be done without

numpy, a codec's accumulate and the C kernels multiply and add in two roundings on every CPU, so there is nothing here
to make replicas differ.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from rendezvous import layout
from rendezvous.background import Together, in_turn
from rendezvous.body_checks import divide_by_weight, is_valid_body, zero_non_finite
from rendezvous.clock import Clock
from rendezvous.codecs import get_codec
from rendezvous.codecs.kernels import load_mean_kernel
from rendezvous.digests import digest, has_digest, required_digest_kind
from rendezvous.errors import Corrupt
from rendezvous.records import Commit, Listed, Mean, WireError, new_nonce
from rendezvous.rules import Rules
from rendezvous.store import Store, put_once
from rendezvous.wire import (
    Piece,
    Range,
    as_bytes,
    body_size,
    byte_range,
    codec_alignment,
    fetch_checked,
    has_exact_size,
    page_aligned,
    shard_grid,
    why_differs,
)

Shard = tuple[int, Range]  # its number on the grid, its elements
_CHUNK = 1 << 16  # elements: two fp32 chunks of this stay in the cache
_FAR = 16 << 20  # bytes of one body worth asking for at once where a request takes long


@dataclass(frozen=True)
class OwnBody:
    """This replica's own body as it stands in memory: read from there, and put back where the store lost it."""

    step: int
    key: str
    body: np.ndarray
    pieces: list[Piece]


class Reducer:
    """Means of commits, with what it takes to get round a bad blob.

    together: runs the requests for several bodies; `in_turn` reads them one after the other into the same memory.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        emit: Callable[..., None],
        rules: Rules | None = None,
        *,
        together: Together = in_turn,
    ) -> None:
        self._store, self._clock, self._emit, self.rules = store, clock, emit, rules or Rules()
        self._codec, self._bytes, self._kept = self.rules.codec, page_aligned(0), 0
        self._together = together
        self._one_pass = load_mean_kernel(self._codec)
        self._reported_blobs = set[str]()  # blobs that were told of

    def mean(self, commit: Commit, out: np.ndarray, mine: OwnBody | None = None) -> None:
        """Write the mean of `commit` into `out` (fp32, the fragment's length).   After Corrupt, `out` is waste."""
        if commit.mode == "sharded":
            self._read_parts(commit, out)
            return
        for pause in (0.1, 0.5, 2.0, 5.0):
            if mine is None and self._read_announced(commit, out):
                return
            trouble = self._mean_of_shards(commit, self._grid_shards(out.size), out, mine)
            if trouble is None:
                return
            self._emit("bad_blob", step=commit.t, trouble=trouble)
            if mine is not None and self._read_announced(commit, out):
                return
            self._clock.sleep(pause)
        raise Corrupt(
            f"step {commit.t}: {trouble}, and there is no announced mean to use instead. Nothing was averaged; "
            "restore the object from a backup, or start again from an exported earlier step"
        )

    # ---------------------------------------------------------------- the sum

    def _grid_shards(self, elements: int) -> list[Shard]:
        return list(enumerate(shard_grid(elements, codec_alignment(self._codec), self.rules.shard_elements)))

    def _mean_of_shards(
        self,
        commit: Commit,
        shards: list[Shard],
        out: np.ndarray,
        mine: OwnBody | None,
        packed: np.ndarray | None = None,
    ) -> str | None:
        """The listed bodies' mean in these shards, into the same place of `out`; -> None, or what was wrong.

        packed: where the codec writes the mean once more; `out` holds what that decodes to, as for every reader.
        """
        offers = self._fitting_offers(commit, out.size)
        for group in self._shard_groups(commit, shards):
            rows = None if packed is None else packed[self._place_in_part(shards, group)]
            try:
                trouble = self._mean_of_all(offers, group, out, mine, rows)
            except Corrupt:
                trouble = self._mean_of_valid(commit, offers, group, out, mine)
                if trouble is None:
                    self._pack_mean(out[_elements_slice(group)], rows)
            if trouble is not None:
                return trouble
        return None

    @np.errstate(over="ignore", invalid="ignore")
    def _mean_of_all(
        self, offers: list[Listed], group: list[Shard], out: np.ndarray, mine: OwnBody | None, rows: np.ndarray | None
    ) -> str | None:
        """The rule of every day.   Raises Corrupt where the mean is not finite, or a body is none."""
        total = out[_elements_slice(group)]
        bodies = list[np.ndarray]()
        for listed, body in zip(offers, self._read_bodies(offers, group, mine), strict=True):
            if isinstance(body, str):
                return body
            if self._one_pass is None:
                self._add_body(total, body, listed.weight, first=listed is offers[0])
            else:
                bodies.append(body)
        if not offers or not self._divide_and_pack(offers, bodies, total, rows):
            raise Corrupt("the mean is not finite")
        return None

    def _divide_and_pack(
        self, offers: list[Listed], bodies: list[np.ndarray], total: np.ndarray, rows: np.ndarray | None
    ) -> bool:
        """From all bodies, or the sum that `total` holds already, to the mean; -> is it finite?"""
        if self._one_pass is not None:
            return self._one_pass(bodies, [o.weight for o in offers], float(total_weight(offers)), total, rows)
        finite = divide_by_weight(total, total_weight(offers))
        if finite:
            self._pack_mean(total, rows)
        return finite

    def _pack_mean(self, mean: np.ndarray, rows: np.ndarray | None) -> None:
        """rows <- the mean's body;  mean <- what that decodes to."""
        if rows is not None:
            get_codec(self._codec).encode(mean, rows)
            get_codec(self._codec).decode(rows, mean)

    @np.errstate(over="ignore", invalid="ignore")
    def _mean_of_valid(
        self, commit: Commit, offers: list[Listed], group: list[Shard], out: np.ndarray, mine: OwnBody | None
    ) -> str | None:
        """The same without what is not sound; shard by shard, because readers may group shards differently."""
        for unit in [[shard] for shard in group] if _in_shards(commit) else [group]:
            total = out[_elements_slice(unit)]
            good = list[Listed]()
            for listed in offers:
                body = self._read_body(listed, unit, mine, self._read_buffer(self._bytes_of(listed, unit)))
                if isinstance(body, str):
                    return body
                if is_valid_body(self._codec, body, total.size):
                    self._add_body(total, body, listed.weight, first=not good)
                    good.append(listed)
                else:
                    self._report_poisoned(commit, listed, "values that are not finite, or bytes that no encoder writes")
            if not good:
                total.fill(0.0)
            elif not divide_by_weight(total, total_weight(good)):
                zero_non_finite(total)
        return None

    def _fitting_offers(self, commit: Commit, elements: int) -> list[Listed]:
        """The listed bodies but those that, by their records, are none of this fragment's."""
        odd = [(o, self._record_flaw(o, elements)) for o in commit.offers]
        for listed, why in odd:
            if why:
                self._report_poisoned(commit, listed, why)
        return [listed for listed, why in odd if not why]

    def _report_poisoned(self, commit: Commit, listed: Listed, why: str) -> None:
        if listed.blob not in self._reported_blobs:
            self._reported_blobs.add(listed.blob)
            self._emit("poisoned", step=commit.t, slot=listed.slot, blob=listed.blob, text=f"counts for nothing: {why}")

    def _shard_groups(self, commit: Commit, shards: list[Shard]) -> Iterator[list[Shard]]:
        """One by one where they stay in the cache; as many as one request should ask for where requests take long."""
        if not _in_shards(commit):
            yield shards
            return
        group: list[Shard] = []
        for shard in shards:
            group.append(shard)
            if self._together is in_turn or body_size(self._codec, _elements_of(group)) >= _FAR:
                yield group
                group = []
        if group:
            yield group

    def _read_bodies(
        self, offers: list[Listed], group: list[Shard], mine: OwnBody | None
    ) -> Iterable[np.ndarray | str]:
        """These shards of each body: all, to be added in one pass; or one after the other in the same memory."""
        sizes = [self._bytes_of(listed, group) for listed in offers]
        if self._together is in_turn and self._one_pass is None:
            return (self._read_body(o, group, mine, self._read_buffer(n)) for o, n in zip(offers, sizes, strict=True))
        rooms = np.split(self._read_buffer(sum(sizes)), np.cumsum(sizes)[:-1])
        bodies: list[np.ndarray | str] = [""] * len(offers)

        def read_one(i: int) -> None:
            bodies[i] = self._read_body(offers[i], group, mine, rooms[i])

        self._together(*(partial(read_one, i) for i in range(len(offers))))
        return bodies

    def _bytes_of(self, listed: Listed, group: list[Shard]) -> int:
        """Bytes of these shards in a listed body."""
        if not has_exact_size(self._codec):
            return listed.size
        start, stop = self._bytes_range(group)
        return stop - start

    def _read_body(
        self, listed: Listed, group: list[Shard], mine: OwnBody | None, room: np.ndarray
    ) -> np.ndarray | str:
        """These shards of a listed body; or what was wrong with them."""
        start = self._bytes_range(group)[0] if has_exact_size(self._codec) else 0
        if mine is not None and listed.blob == mine.key:
            return mine.body[start : start + room.size]
        trouble = fetch_checked(
            self._store, self._clock, listed.blob, self._digested_pieces(listed, group), room, start
        )
        return room if trouble is None else trouble

    def _record_flaw(self, listed: Listed, elements: int) -> str:
        """Why a listed body cannot be one of this many elements; "" if it can."""
        size = body_size(self._codec, elements)
        shards = len(self._grid_shards(elements))
        if listed.size != size if has_exact_size(self._codec) else listed.size > size:
            return f"{listed.blob} should have {size} bytes, its record says {listed.size}"
        if len(listed.shards) not in (0, shards):
            return f"{listed.blob} should have {shards} shards, its record has {len(listed.shards)}"
        return ""

    def _bytes_range(self, group: list[Shard]) -> Range:
        """Where these shards are in a body."""
        return byte_range(self._codec, group[0][1][0], group[-1][1][1])

    def _place_in_part(self, part: list[Shard], group: list[Shard]) -> slice:
        """Where these shards are in the body of a part."""
        return slice(*(at - self._bytes_range(part)[0] for at in self._bytes_range(group)))

    def _digested_pieces(self, listed: Listed, group: list[Shard]) -> list[Piece]:
        if not listed.shards:
            return [(listed.size, listed.digest)]
        return [(body_size(self._codec, stop - start), listed.shards[index]) for index, (start, stop) in group]

    def _add_body(self, total: np.ndarray, body: np.ndarray, weight: float, *, first: bool) -> None:
        if self._codec == "fp32":
            accumulate(total, body.view(np.float32), weight, first=first)
        else:
            get_codec(self._codec).accumulate(body, weight, total, first)

    def _read_buffer(self, size: int) -> np.ndarray:
        """Bytes to read into; the same memory every time, because fresh pages cost more than the read."""
        end = self._kept + size
        if self._bytes.size < end:
            self._bytes = page_aligned(end)
        return self._bytes[self._kept : end]

    @contextmanager
    def _kept_buffer(self, size: int) -> Generator[np.ndarray]:
        """The same, for bytes that must stay while others are read."""
        room = self._read_buffer(size)
        self._kept = size
        try:
            yield room
        finally:
            self._kept = 0

    # ---------------------------------------------------------------- parts of a sharded step

    def split_into_parts(self, commit: Commit, elements: int) -> list[list[Shard]]:
        """part j -> the (index, range) of its shards: as many runs of the grid as the commit names owners."""
        shards = self._grid_shards(elements)
        count = len(commit.owners)
        cuts = [round(j * len(shards) / count) for j in range(count + 1)]
        return [shards[a:b] for a, b in pairwise(cuts)]

    def _read_parts(self, commit: Commit, out: np.ndarray) -> None:
        """All parts of a step that is long decided: as announced, or computed."""
        for j, part in enumerate(self.split_into_parts(commit, out.size)):
            if not self.take_part(commit, j, part, out):
                try:
                    self.make_part(commit, part, out)
                except Corrupt:  # announced in between, perhaps, and its bodies collected
                    if not self.take_part(commit, j, part, out):
                        raise

    def make_part(self, commit: Commit, part: list[Shard], out: np.ndarray, mine: OwnBody | None = None) -> np.ndarray:
        """The mean of these shards, into `out`; -> it as it travels, good until the next read.  Raises Corrupt."""
        piece = out[_elements_slice(part)]
        if self._codec == "fp32":
            trouble = self._mean_of_shards(commit, part, out, mine)
            body = np.frombuffer(as_bytes(piece), np.uint8)
        else:
            with self._kept_buffer(body_size(self._codec, piece.size)) as body:
                trouble = self._mean_of_shards(commit, part, out, mine, body)
        if trouble is not None:
            self._emit("bad_blob", step=commit.t, trouble=trouble)
            raise Corrupt(f"step {commit.t}: {trouble}. Nothing was averaged; restore the object from a backup")
        return body

    def take_part(self, commit: Commit, j: int, part: list[Shard], out: np.ndarray) -> bool:
        """Fetch part j if somebody has announced it; a damaged one is computed again and put back."""
        if not part:
            return True
        register = self._store.get(layout.mean_key(commit.t, j))
        if register is None:
            return False
        record = self._decode_announcement(register, commit.t)
        piece = out[_elements_slice(part)]
        if record is None:  # nobody can announce it any more, and everybody computes the same bits
            self.make_part(commit, part, out)
            return True
        body = piece.view(np.uint8) if self._codec == "fp32" else self._read_buffer(body_size(self._codec, piece.size))
        trouble = fetch_checked(self._store, self._clock, record.blob, [(record.size, record.digest)], body)
        if trouble is not None:
            self._mend_part(commit, j, part, out, record, trouble)
        elif self._codec != "fp32":
            get_codec(self._codec).decode(body, piece)
        return True

    def _mend_part(
        self, commit: Commit, j: int, part: list[Shard], out: np.ndarray, record: Mean, trouble: str
    ) -> None:
        self._emit("bad_blob", step=commit.t, trouble=trouble)
        body = self.make_part(commit, part, out)
        if not has_digest(as_bytes(body), record.digest, required_digest_kind(self._store)):
            raise Corrupt(f"step {commit.t}: part {j} was announced with other bits than its shards give")
        self._store.put(record.blob, as_bytes(body))
        self._emit("repaired", step=commit.t, blob=record.blob)

    def announce_part(self, commit: Commit, j: int, body: np.ndarray) -> None:
        """Write part j down, once; whoever else computed it has the same bytes."""
        if self._store.get(layout.mean_key(commit.t, j)) is None:
            self._write_mean(commit, j, body)

    # ---------------------------------------------------------------- announced by the closer

    def is_worth_announcing(self, commit: Commit, mean: np.ndarray) -> bool:
        """Is the mean worth writing down for those who come later?  It is if they read half as much, or less."""
        return 2 * mean.nbytes <= sum(o.size for o in commit.offers)

    def announce_mean(self, commit: Commit, mean: np.ndarray) -> None:
        """Write the mean down, once."""
        if self._store.get(layout.mean_key(commit.t, 0)) is None:
            self._write_mean(commit, 0, mean)

    def _write_mean(self, commit: Commit, j: int, body: np.ndarray) -> None:
        n = new_nonce()
        found = digest(as_bytes(body), required_digest_kind(self._store))
        record = Mean(commit.t, layout.mean_blob(commit.t, n), body.nbytes, found, n)
        self._store.put(record.blob, as_bytes(body))
        put_once(self._store, self._clock, layout.mean_key(commit.t, j), record.encode())

    def _read_announced(self, commit: Commit, out: np.ndarray) -> bool:
        body = self._store.get(layout.mean_key(commit.t, 0))
        if body is None:
            return False
        record = self._decode_announcement(body, commit.t)
        if record is None:
            return False
        trouble = fetch_checked(self._store, self._clock, record.blob, [(record.size, record.digest)], out)
        if trouble is None:
            return True
        self._emit("bad_blob", step=commit.t, trouble=trouble)
        return self._mend_announced(commit, record, out)

    def _decode_announcement(self, register: bytes, t: int) -> Mean | None:
        """The announcement in a register of step t; None, and a word, if it is none: then the deltas tell the mean."""
        try:
            record = Mean.decode(register)
            why = "" if record.t == t else f"it speaks of step {record.t}"
        except WireError as error:
            record = None
            why = str(error)
        if why:
            self._emit("bad_blob", step=t, trouble=f"an announced mean is passed over: {why}")
        return None if why else record

    def _mend_announced(self, commit: Commit, record: Mean, out: np.ndarray) -> bool:
        """The announced mean is bad: compute it again and put the same bytes back."""
        trouble = self._mean_of_shards(commit, self._grid_shards(out.size), out, None)
        if trouble is not None or not has_digest(as_bytes(out), record.digest, required_digest_kind(self._store)):
            return False
        self._store.put(record.blob, as_bytes(out))
        self._emit("repaired", step=commit.t, blob=record.blob)
        return True

    # ---------------------------------------------------------------- our own blob

    def mend_own_body(self, mine: OwnBody) -> None:
        """Somebody seems to miss our blob of this step: look, and put it back if the store has lost or bent it."""
        room = self._read_buffer(mine.body.size)
        trouble = fetch_checked(self._store, self._clock, mine.key, mine.pieces, room)
        intact = why_differs(mine.key, as_bytes(mine.body), mine.pieces, required_digest_kind(self._store)) is None
        if trouble is not None and intact:
            self._store.put(mine.key, as_bytes(mine.body))
            self._emit("repaired", step=mine.step, blob=mine.key)


def _in_shards(commit: Commit) -> bool:
    """Has every listed body a digest for each shard?"""
    return all(o.shards for o in commit.offers)


def _elements_of(group: list[Shard]) -> int:
    return group[-1][1][1] - group[0][1][0]


def _elements_slice(part: list[Shard]) -> slice:
    """Where these shards' elements are."""
    return slice(part[0][1][0], part[-1][1][1])


def accumulate(total: np.ndarray, x: np.ndarray, weight: float, *, first: bool) -> None:
    """total += fl(weight·x), in cache-sized pieces.  The first term is stored, not added to 0 (0 + −0 would lose a
    sign); fl(1·x) is x."""
    w = np.float32(weight)
    scratch = np.empty(min(total.size, _CHUNK), np.float32)
    for at in range(0, total.size, _CHUNK):
        piece = x[at : at + _CHUNK]
        target = total[at : at + _CHUNK]
        if first:
            np.multiply(piece, w, out=target)
        elif w == 1:
            np.add(target, piece, out=target)
        else:
            np.add(target, np.multiply(piece, w, out=scratch[: piece.size]), out=target)


def total_weight(offers: Sequence[Listed]) -> np.float32:
    """fl(Σ wᵢ): the sum of fp32 weights, rounded once."""
    return np.float32(sum(o.weight for o in offers))
