"""A sample of every listed body: the same few elements, kept while the replica computes a mean.

    body of r00   │ …  a b c d  … │ ─┐
    body of r01   │ …  a b c d  … │ ─┼──▶ take(commit) ─▶ weights (N),  values (N × elements), decoded
    body of r02   │ …  a b c d  … │ ─┘

A replica that computes a mean has the bodies in memory, so the sample needs no request.  In a direct step all replicas
have it; in a sharded step only the owner of the part with these elements has it.

Not promised: a sample if the mean was read and not computed, if a body is invalid, or if the codec's bodies cannot be
cut; `take` then returns None.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from rendezvous.codecs import get_codec
from rendezvous.records.records import Commit, Listed


@dataclass(eq=False, repr=False)
class BodySample:
    """Elements [start, stop) of a fragment, in the bodies of the newest step that synchronises it.

    fragments: number of fragments of the run.
    """

    codec: str
    _: KW_ONLY
    fragment: int = 0
    fragments: int = 1
    start: int = 0
    stop: int = 0
    _step: int = -1
    _values: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])

    def begin(self, commit: Commit) -> None:
        """Begin the sample of this commit; forget the bodies of any other commit."""
        if self._step != commit.t:
            self.clear()
            self._step = commit.t

    def note_body(self, listed: Listed, body: np.ndarray, start: int, stop: int) -> None:
        """Keep the sampled elements of `body`, which has the elements [start, stop).

        Raise Corrupt for bytes that no encoder wrote.
        """
        first = max(start, self.start)
        last = min(stop, self.stop)
        if first >= last or self._step % self.fragments != self.fragment:
            return
        codec = get_codec(self.codec)
        if not codec.exact:
            return
        low = first - (first - start) % codec.align
        high = min(stop, last + (start - last) % codec.align)
        decoded = np.empty(high - low, np.float32)
        codec.decode(body[slice(*codec.byte_range(low - start, high - start))], decoded)
        values = self._values.setdefault(listed.blob, np.full(self.stop - self.start, np.nan, np.float32))
        values[first - self.start : last - self.start] = decoded[first - low : last - low]

    def clear(self) -> None:
        self._values.clear()

    def take(self, commit: Commit) -> tuple[Sequence[float], np.ndarray] | None:
        """Return weights and values of all bodies that the commit lists, and forget them; None if one is missing."""
        values = [self._values.get(o.blob) for o in commit.offers] if self._step == commit.t else []
        self.clear()
        found = [v for v in values if v is not None and not np.isnan(v).any()]
        if not found or len(found) < len(commit.offers):
            return None
        return [o.weight for o in commit.offers], np.stack(found)
