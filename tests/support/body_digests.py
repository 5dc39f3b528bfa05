"""The digests that a body has in an offer, for tests that write bodies themselves.

Not promised: digests of a body that cannot be cut into shards.
"""

import numpy as np

from rendezvous.records.digests import XXH3, digest
from rendezvous.records.wire import as_bytes, byte_range, digest_of_shards, has_exact_size

Range = tuple[int, int]  # elements [start, stop)


def body_digests(body: np.ndarray, name: str, ranges: list[Range], kind: str = XXH3) -> tuple[str, tuple[str, ...]]:
    """Return the body's digest, and those of its shards; () if there is one shard only, or if it cannot be cut."""
    if len(ranges) < 2 or not has_exact_size(name):
        return digest(as_bytes(body), kind), ()
    shards = tuple(digest(as_bytes(body[slice(*byte_range(name, *r))]), kind) for r in ranges)
    return digest_of_shards(shards, kind), shards
