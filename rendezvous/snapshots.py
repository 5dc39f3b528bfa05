"""θ_t and the outer momentum, written down so that nobody has to replay a run from its beginning.

    snapshots/{t}/{nonce}.safetensors   first
    snapshots/{t}/manifest.json         last, by put_once: a writer that is killed between leaves nothing visible

A snapshot of step t is written only after commit t confirmed its digest, so that a corrupt writer cannot become
the truth.  Snapshot 0 is θ₀, from whoever came first.

Not promised: that the newest one is good.  `load` checks the digest; callers fall back to an older one.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from rendezvous import layout
from rendezvous.clock import Clock
from rendezvous.digests import digest, has_digest, needed
from rendezvous.records import Snapshot, WireError, nonce
from rendezvous.store import Store, put_once

Arrays = Mapping[str, np.ndarray]


def serialized(arrays: Arrays) -> bytes:
    """A copy, as safetensors."""
    return save_tensors(dict(arrays))


def write(
    store: Store, clock: Clock, t: int, arrays: Arrays, *, base: str, prev: str | None, confirmed: bool = True
) -> Snapshot:
    """Publish these arrays."""
    return publish(store, clock, t, serialized(arrays), base=base, prev=prev, confirmed=confirmed)


def publish(
    store: Store, clock: Clock, t: int, body: bytes, *, base: str, prev: str | None, confirmed: bool = True
) -> Snapshot:
    """Publish a snapshot; -> the one that stands for step t (ours, or that of somebody faster)."""
    n = nonce()
    mine = Snapshot(t, base, prev, layout.snapshot_blob(t, n), len(body), digest(body, needed(store)), n, confirmed)
    store.put(mine.blob, body)
    _, value = put_once(store, clock, layout.snapshot(t), mine.encode())
    return _manifest(value, t) or mine


def newest_first(store: Store, hint: int = 0, at_most: int | None = None) -> Iterator[Snapshot]:
    """Complete snapshots, newest first.  LIST is a hint; `hint` and step 0 are always tried.

    A manifest that is none is passed over, as if the snapshot had never been written.
    """
    steps = {0, hint} | {s for k in store.list(layout.SNAPSHOTS) if (s := layout.snapshot_step(k)) is not None}
    for t in sorted(steps, reverse=True):
        if (at_most is None or t <= at_most) and (found := read(store, t)) is not None:
            yield found


def read(store: Store, t: int) -> Snapshot | None:
    """The snapshot of step t, if there is one."""
    body = store.get(layout.snapshot(t))
    return None if body is None else _manifest(body, t)


def _manifest(body: bytes, t: int) -> Snapshot | None:
    try:
        found = Snapshot.decode(body)
    except WireError:
        return None
    return found if found.t == t else None


def load(store: Store, snapshot: Snapshot, tell: Callable[..., None]) -> dict[str, np.ndarray] | None:
    """The arrays of a snapshot, or None (and a word about it) when its bytes are not what was announced."""
    body = None
    for _ in range(3):
        body = store.get(snapshot.blob)
        if body is not None and has_digest(body, snapshot.digest, needed(store)):
            return load_tensors(body)
    found = "nothing" if body is None else f"{len(body)} bytes, digest {digest(body, needed(store))}"
    tell("bad_snapshot", step=snapshot.t, blob=snapshot.blob, found=found, announced=snapshot.digest)
    return None


def mend(store: Store, snapshot: Snapshot, arrays: Arrays) -> bool:
    """Put a damaged snapshot's bytes back, if these arrays really are that snapshot."""
    body = serialized(arrays)
    if not has_digest(body, snapshot.digest, needed(store)):
        return False
    store.put(snapshot.blob, body)
    return True
