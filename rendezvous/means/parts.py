"""Means in parts: one part of the shards' grid for each owner that a sharded commit names.

    owner of part j    its range of every listed blob ──▶ make ──▶ mean of the part ──▶ announcements.py
    every other        announced ──▶ take: fetch it        damaged ──▶ compute it, and upload it again
                       not announced ──▶ take returns False; the caller waits, or computes it (engine/sharded.py)

A part is announced as the codec's encoded bytes. Every replica, also the part's owner, decodes these bytes.  Audits
read means in the same way; for them a direct commit has one part, the whole mean in fp32.

Not promised: that a part is announced.  Any reader of the listed bodies can compute the part, with the same bits.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from rendezvous.codecs import get_codec
from rendezvous.errors import Corrupt
from rendezvous.means.bodies import OwnBody, Shard, elements_slice
from rendezvous.records.records import Commit, Mean
from rendezvous.records.wire import as_bytes, body_size

if TYPE_CHECKING:
    from rendezvous.means.reduce import Reducer


class MeanParts:
    """The parts of commits' means, computed by a Reducer, or read as they were announced."""

    def __init__(self, reducer: "Reducer") -> None:
        self._reducer = reducer
        self._bodies = reducer.bodies
        self._announcements = reducer.announcements
        self._codec = reducer.rules.codec

    def split(self, commit: Commit, elements: int) -> list[list[Shard]]:
        """Return the shards of each part: one contiguous part of the grid for each owner that the commit names."""
        shards = self._bodies.grid(elements)
        if commit.mode == "direct":
            return [shards]
        count = len(commit.owners)
        cuts = [round(j * len(shards) / count) for j in range(count + 1)]
        return [shards[a:b] for a, b in pairwise(cuts)]

    def read_all(self, commit: Commit, out: np.ndarray) -> None:
        """Write all parts of an earlier step into `out`: read the announced parts, compute the other parts."""
        for j, part in enumerate(self.split(commit, out.size)):
            if not self.take(commit, j, part, out):
                try:
                    self.make(commit, part, out)
                except Corrupt:  # perhaps the part was announced meanwhile, and its bodies were collected
                    if not self.take(commit, j, part, out):
                        raise

    def make_all(self, commit: Commit, out: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Write the mean into `out` from the listed bodies alone, and yield (part, its encoded bytes).

        The bytes are valid until the next part.   Raise Corrupt if a part cannot be computed.
        """
        for j, part in enumerate(self.split(commit, out.size)):
            if part:
                yield j, self.make(commit, part, out)

    def read_announced(self, commit: Commit, out: np.ndarray) -> str | None:
        """Read the announced mean into `out`, without repairs.   Return None, or why it failed."""
        for j, part in enumerate(self.split(commit, out.size)):
            _, record = self._announcements.find(commit.t, j) if part else (False, None)
            if part and record is None:
                return f"no replica announced part {j} of the mean"
            if record is not None and (trouble := self._fetch(commit, record, out[elements_slice(part)])) is not None:
                return trouble
        return None

    def make(self, commit: Commit, part: list[Shard], out: np.ndarray, mine: OwnBody | None = None) -> np.ndarray:
        """Write the mean of these shards into `out`.   Return its encoded bytes, which are valid until the next read.

        Raise Corrupt if it cannot be computed.
        """
        piece = out[elements_slice(part)]
        if self._is_packed(commit):
            with self._bodies.kept_buffer(body_size(self._codec, piece.size)) as body:
                trouble = self._reducer.mean_of_shards(commit, part, out, mine, body)
        else:
            trouble = self._reducer.mean_of_shards(commit, part, out, mine)
            body = np.frombuffer(as_bytes(piece), np.uint8)
        if trouble is not None:
            self._reducer.emit("bad_blob", step=commit.t, trouble=trouble)
            raise Corrupt(f"step {commit.t}: {trouble}. Nothing was averaged; restore the object from a backup")
        return body

    def take(self, commit: Commit, j: int, part: list[Shard], out: np.ndarray) -> bool:
        """Fetch part j; if its copy is damaged, compute it and upload it again.

        Return False if the part is not announced yet.
        """
        if not part:
            return True
        taken, record = self._announcements.find(commit.t, j)
        if taken and record is None:  # this part can never be announced; all compute the same bits
            self.make(commit, part, out)
        elif record is not None and self._fetch(commit, record, out[elements_slice(part)]) is not None:
            computed = self.make(commit, part, out)
            if not self._announcements.put_back(record, computed):
                raise Corrupt(f"step {commit.t}: part {j} was announced with other bits than its shards give")
        return taken

    def _fetch(self, commit: Commit, record: Mean, piece: np.ndarray) -> str | None:
        """Read an announced part into its elements.   Return None, or the flaw in its bytes."""
        if not self._is_packed(commit):
            return self._announcements.fetch(record, piece.view(np.uint8))
        body = self._bodies.buffer(body_size(self._codec, piece.size))
        trouble = self._announcements.fetch(record, body)
        if trouble is None:
            get_codec(self._codec).decode(body, piece)
        return trouble

    def _is_packed(self, commit: Commit) -> bool:
        """Whether the parts of this commit's mean are encoded."""
        return commit.mode == "sharded" and self._codec != "fp32"
