"""The mean of a commit, in the same bits for every reader.

    mean = ( fl(w₁·x₁) + fl(w₂·x₂) + … ) / fl(Σ wᵢ)        in listed order, each operation rounded to fp32

direct     every reader fetches every listed blob
sharded    the owner of part j fetches its range of every blob, announces the part's mean; all fetch all parts
announced  the closer wrote the mean and its digest, so that a later reader fetches one blob instead of N, and a
           blob that rots after it was listed can be done without

numpy (and a codec's accumulate) multiplies and adds in two roundings on every CPU, so there is nothing here to make
replicas differ.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from rendezvous import layout
from rendezvous.clock import Clock
from rendezvous.codecs import codec
from rendezvous.errors import Corrupt
from rendezvous.records import Commit, Mean, digest, nonce
from rendezvous.rules import Rules
from rendezvous.store import Store, put_once
from rendezvous.wire import Encoder, Range, alignment, body_size, byte_range, fetch, grid, payload

Shard = tuple[int, Range]  # its number on the grid, its elements
_CHUNK = 1 << 18  # elements: two fp32 chunks of this stay in the cache


class Reducer:
    """Means of commits, with what it takes to get round a bad blob."""

    def __init__(self, store: Store, clock: Clock, tell: Callable[..., None], rules: Rules | None = None) -> None:
        self._store, self._clock, self._tell, self.rules = store, clock, tell, rules or Rules()
        self._codec, self._bytes = self.rules.codec, np.empty(0, np.uint8)

    def mean(self, commit: Commit, out: np.ndarray, mine: tuple[str, np.ndarray] | None = None) -> None:
        """Write the mean of `commit` into `out` (fp32, the fragment's length).

        mine: (key, body) of this replica's own blob; rewritten if the store's copy is bad.  `out` may be the memory
        of that body: it is overwritten last.
        """
        if commit.mode == "sharded":
            self._parts(commit, out)
            return
        if mine is None and self._announced(commit, out):
            return
        for pause in (0.1, 0.5, 2.0, 5.0):
            trouble = self._direct(commit, out, mine)
            if trouble is None:
                return
            self._tell("bad_blob", step=commit.t, trouble=trouble)
            if self._announced(commit, out):  # from here on `out` may hold rubbish, and so may `mine`
                return
            self._clock.sleep(pause)
        raise Corrupt(
            f"step {commit.t}: {trouble}, and there is no announced mean to use instead. Nothing was averaged; "
            "restore the object from a backup, or start again from an exported earlier step"
        )

    # ---------------------------------------------------------------- parts of a sharded step

    def parts(self, commit: Commit, elements: int) -> list[list[Shard]]:
        """part j -> the (index, range) of its shards: as many runs of the grid as the commit names owners."""
        shards = list(enumerate(grid(elements, alignment(self._codec), self.rules.shard_elements)))
        count = len(commit.owners)
        cuts = [round(j * len(shards) / count) for j in range(count + 1)]
        return [shards[a:b] for a, b in pairwise(cuts)]

    def _parts(self, commit: Commit, out: np.ndarray) -> None:
        """All parts of a step that is long decided: as announced, or computed."""
        for j, part in enumerate(self.parts(commit, out.size)):
            if not self.take_part(commit, j, part, out):
                self.make_part(commit, part, out)

    def make_part(self, commit: Commit, part: list[Shard], out: np.ndarray) -> np.ndarray:
        """The mean of these shards, from the listed bodies' ranges, into `out`; -> the part as it travels.

        A lossy codec writes the mean once more; `out` holds what its body decodes to, as for every reader.
        """
        for index, (start, stop) in part:
            a, b = byte_range(self._codec, start, stop)
            body = self._buffer(b - a)
            for listed in commit.offers:
                trouble = fetch(self._store, self._clock, listed.blob, b - a, listed.shards[index], body, a)
                if trouble is not None:
                    self._tell("bad_blob", step=commit.t, trouble=trouble)
                    raise Corrupt(f"step {commit.t}: {trouble}. Nothing was averaged; restore the object from a backup")
                self._add(out[start:stop], body, listed.weight, first=listed is commit.offers[0])
            np.divide(out[start:stop], total_weight(commit), out=out[start:stop])
        piece = _piece(part, out)
        body = Encoder(self._codec, feedback=False).encode(0, piece)
        if self._codec != "fp32":
            codec(self._codec).decode(body, piece)
        return body

    def take_part(self, commit: Commit, j: int, part: list[Shard], out: np.ndarray) -> bool:
        """Fetch part j if somebody has announced it; a damaged one is computed again and put back."""
        if not part:
            return True
        register = self._store.get(layout.mean(commit.t, j))
        if register is None:
            return False
        record, piece = Mean.decode(register), _piece(part, out)
        body = piece.view(np.uint8) if self._codec == "fp32" else self._buffer(body_size(self._codec, piece.size))
        trouble = fetch(self._store, self._clock, record.blob, record.size, record.digest, body)
        if trouble is not None:
            self._mend_part(commit, j, part, out, record, trouble)
        elif self._codec != "fp32":
            codec(self._codec).decode(body, piece)
        return True

    def _mend_part(
        self, commit: Commit, j: int, part: list[Shard], out: np.ndarray, record: Mean, trouble: str
    ) -> None:
        self._tell("bad_blob", step=commit.t, trouble=trouble)
        body = self.make_part(commit, part, out)
        if digest(payload(body)) != record.digest:
            raise Corrupt(f"step {commit.t}: part {j} was announced with other bits than its shards give")
        self._store.put(record.blob, payload(body))
        self._tell("repaired", step=commit.t, blob=record.blob)

    def announce_part(self, commit: Commit, j: int, body: np.ndarray) -> None:
        """Write part j down, once; whoever else computed it has the same bytes."""
        if self._store.get(layout.mean(commit.t, j)) is None:
            record = self._record(commit, body)
            self._store.put(record.blob, payload(body))
            put_once(self._store, self._clock, layout.mean(commit.t, j), record.encode())

    def _buffer(self, size: int) -> np.ndarray:
        """Bytes to read into; the same memory every time, because fresh pages cost more than the read."""
        if self._bytes.size < size:
            self._bytes = np.empty(size, np.uint8)
        return self._bytes[:size]

    # ---------------------------------------------------------------- direct, and announced by the closer

    def announce(self, commit: Commit, mean: np.ndarray) -> None:
        """Write the mean down, once, for those who come later: unless the blobs are fewer bytes than it."""
        if mean.nbytes > sum(o.size for o in commit.offers):
            return
        record = self._record(commit, mean)
        if self._store.get(layout.mean(commit.t, 0)) is None:
            self._store.put(record.blob, payload(mean))
            put_once(self._store, self._clock, layout.mean(commit.t, 0), record.encode())

    def _record(self, commit: Commit, body: np.ndarray) -> Mean:
        n = nonce()
        return Mean(commit.t, layout.mean_blob(commit.t, n), body.nbytes, digest(payload(body)), n)

    def _announced(self, commit: Commit, out: np.ndarray) -> bool:
        body = self._store.get(layout.mean(commit.t, 0))
        if body is None:
            return False
        record = Mean.decode(body)
        trouble = fetch(self._store, self._clock, record.blob, record.size, record.digest, out)
        if trouble is None:
            return True
        self._tell("bad_blob", step=commit.t, trouble=trouble)
        return self._mend(commit, record, out)

    def _mend(self, commit: Commit, record: Mean, out: np.ndarray) -> bool:
        """The announced mean is bad: compute it again and put the same bytes back."""
        if self._direct(commit, out, None) is not None or digest(payload(out)) != record.digest:
            return False
        self._store.put(record.blob, payload(out))
        self._tell("repaired", step=commit.t, blob=record.blob)
        return True

    def _direct(self, commit: Commit, out: np.ndarray, mine: tuple[str, np.ndarray] | None) -> str | None:
        """Σ of the listed blobs into `out`; -> None, or what was wrong with one of them."""
        total, body = np.empty_like(out), self._buffer(body_size(self._codec, out.size))
        for listed in commit.offers:
            trouble = fetch(self._store, self._clock, listed.blob, listed.size, listed.digest, body)
            if trouble is not None:
                if mine is None or listed.blob != mine[0] or digest(payload(mine[1])) != listed.digest:
                    return trouble
                self._tell("repaired", step=commit.t, blob=listed.blob)
                self._store.put(listed.blob, payload(mine[1]))
                body[:] = mine[1]
            self._add(total, body, listed.weight, first=listed is commit.offers[0])
        np.divide(total, total_weight(commit), out=out)
        return None

    def _add(self, total: np.ndarray, body: np.ndarray, weight: float, *, first: bool) -> None:
        if self._codec == "fp32":
            accumulate(total, body.view(np.float32), weight, first=first)
        else:
            codec(self._codec).accumulate(body, weight, total, first)


def _piece(part: list[Shard], out: np.ndarray) -> np.ndarray:
    """The part's elements of `out`."""
    return out[part[0][1][0] : part[-1][1][1]]


def accumulate(total: np.ndarray, x: np.ndarray, weight: float, *, first: bool) -> None:
    """total += fl(weight·x), in cache-sized pieces; `x` is used up.  The first term is stored, not added to 0
    (0 + −0 would lose a sign)."""
    w = np.float32(weight)
    for at in range(0, total.size, _CHUNK):
        piece, target = x[at : at + _CHUNK], total[at : at + _CHUNK]
        if first:
            np.multiply(piece, w, out=target)
        else:
            np.add(target, np.multiply(piece, w, out=piece), out=target)


def total_weight(commit: Commit) -> np.float32:
    """fl(Σ wᵢ): the sum of fp32 weights, rounded once."""
    return np.float32(sum(o.weight for o in commit.offers))
