"""The same few elements of every listed body, kept while a mean is made of them.

    body of r00   │ …  a b c d  … │ ─┐
    body of r01   │ …  a b c d  … │ ─┼──▶ take(commit) ─▶ weights (N),  values (N × elements), decoded
    body of r02   │ …  a b c d  … │ ─┘

A replica that computes a mean has the bodies in memory, so this costs no request.  In a direct step all replicas have
such a sample.  In a sharded step the owner of the part with these elements has it.

Not promised: a sample of a mean that was read and not computed, of a mean with an unsound body, or of a codec whose
bodies cannot be cut; then there is None.
"""

from collections.abc import Sequence

import numpy as np

from rendezvous.codecs import get_codec
from rendezvous.records.records import Commit, Listed


class BodySample:
    """Elements [start, stop) of a fragment, of the newest step that synchronises it.   fragments: of the run."""

    def __init__(self, codec: str, *, fragment: int = 0, fragments: int = 1, start: int = 0, stop: int = 0) -> None:
        self._codec = codec
        self._fragment = fragment
        self._fragments = fragments
        self._start = start
        self._stop = stop
        self._step = -1
        self._values: dict[str, np.ndarray] = {}

    def begin(self, commit: Commit) -> None:
        """Forget the bodies of another commit: those of this one follow."""
        if self._step != commit.t:
            self.clear()
            self._step = commit.t

    def note_body(self, listed: Listed, body: np.ndarray, start: int, stop: int) -> None:
        """Keep the sampled elements.   body: of [start, stop).   Raises Corrupt for bytes that no encoder wrote."""
        first = max(start, self._start)
        last = min(stop, self._stop)
        if first >= last or self._step % self._fragments != self._fragment:
            return
        codec = get_codec(self._codec)
        if not codec.exact:
            return
        low = first - (first - start) % codec.align
        high = min(stop, last + (start - last) % codec.align)
        decoded = np.empty(high - low, np.float32)
        codec.decode(body[slice(*codec.byte_range(low - start, high - start))], decoded)
        values = self._values.setdefault(listed.blob, np.full(self._stop - self._start, np.nan, np.float32))
        values[first - self._start : last - self._start] = decoded[first - low : last - low]

    def clear(self) -> None:
        self._values.clear()

    def take(self, commit: Commit) -> tuple[Sequence[float], np.ndarray] | None:
        """Return weights and values of all bodies that the commit lists, once; None where one of them is missing."""
        values = [self._values.get(o.blob) for o in commit.offers] if self._step == commit.t else []
        self.clear()
        found = [v for v in values if v is not None and not np.isnan(v).any()]
        if not found or len(found) < len(commit.offers):
            return None
        return [o.weight for o in commit.offers], np.stack(found)
