"""Snapshots: θ_t and the outer momentum in the bucket, so that no replica must replay a run from its beginning.

    snapshots/{t}/{nonce}.safetensors   first
    snapshots/{t}/manifest.json         last, by put_once: a writer that is killed before leaves nothing visible

The manifest of step t is written only after commit t has confirmed its digest, so a faulty writer cannot decide the
state.

Snapshot 0 is θ₀, written by the first replica.  Snapshot 0 leaves out arrays of zeros, such as all momentum at that
time.  If the replicas get the start model from elsewhere, snapshot 0 is only a manifest with the digest.

The file has the fragments in the order of their turns from step t on: the fragment that is stepped first is read first
(rendezvous/snapshots/writer.py).

Not promised: that the newest snapshot is intact.  If its digest is wrong, callers of `load` use an older snapshot.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from rendezvous import layout
from rendezvous.background import Emit
from rendezvous.clock import Clock
from rendezvous.errors import Corrupt
from rendezvous.records import tensors
from rendezvous.records.digests import digest_of, has_digest_of, required_digest_kind
from rendezvous.records.records import Snapshot, decode_or_none, new_nonce
from rendezvous.records.tensors import TensorFile
from rendezvous.store import Store, put_once

Arrays = Mapping[str, np.ndarray]


def write(
    store: Store, clock: Clock, t: int, arrays: Arrays, *, base: str, prev: str | None, confirmed: bool = True
) -> Snapshot:
    """Publish these arrays, without a copy.   Return step t's snapshot: ours, or that of a faster writer."""
    n = new_nonce()
    body = TensorFile(arrays)
    mine = Snapshot(
        t=t, base=base, prev=prev, blob=layout.snapshot_blob(t, n), size=body.size,
        digest=digest_of(body, required_digest_kind(store)), nonce=n, confirmed=confirmed,
    )  # fmt: skip
    store.put(mine.blob, body)
    return publish_manifest(store, clock, mine)


def write_first(store: Store, clock: Clock, arrays: Arrays, *, base: str, elsewhere: bool) -> Snapshot:
    """Write snapshot 0, without arrays of zeros.   elsewhere: replicas get θ₀ from another place; then no blob."""
    if elsewhere:
        mine = Snapshot(t=0, base=base, prev=None, blob="", size=0, digest="", nonce=new_nonce())
        return publish_manifest(store, clock, mine)
    return write(store, clock, 0, {name: a for name, a in arrays.items() if not _is_zero(a)}, base=base, prev=None)


def _is_zero(array: np.ndarray) -> bool:
    """Whether all bits of the array are 0.  (−0.0 has a bit that is 1.)"""
    return not array.view(np.dtype(f"i{array.itemsize}")).any()


def with_zeros(arrays: Arrays, like: Arrays) -> dict[str, np.ndarray]:
    """Return the arrays of snapshot 0, with zeros for the arrays of `like` that it leaves out."""
    return {name: arrays[name] if name in arrays else np.zeros_like(array) for name, array in like.items()}


def publish_manifest(store: Store, clock: Clock, mine: Snapshot) -> Snapshot:
    """Make a snapshot visible after its blob is written.   Return its step's snapshot: ours, or a faster writer's."""
    _, value = put_once(store, clock, layout.snapshot_key(mine.t), mine.encode())
    return _decode_manifest(value, mine.t) or mine


def newest_first(store: Store, hint: int = 0, at_most: int | None = None) -> Iterator[Snapshot]:
    """Yield the snapshots that have a manifest, newest first, from a LIST, from step `hint` and from step 0.

    An object that is not a manifest is skipped.
    """
    steps = {0, hint, *steps_of(store.list(layout.SNAPSHOTS))}
    for t in sorted(steps, reverse=True):
        if (at_most is None or t <= at_most) and (found := read(store, t)) is not None:
            yield found


def steps_of(keys: Iterable[str]) -> list[int]:
    """Return the steps of the manifests among these keys, in order."""
    return sorted({s for k in keys if (s := layout.snapshot_step(k)) is not None})


def read(store: Store, t: int) -> Snapshot | None:
    """Return the manifest of step t's snapshot; None if there is none."""
    return _decode_manifest(store.get(layout.snapshot_key(t)), t)


def _decode_manifest(body: bytes | None, t: int) -> Snapshot | None:
    found = decode_or_none(Snapshot, body)
    return found if found is not None and found.t == t else None


def load(
    store: Store, snapshot: Snapshot, emit: Emit, like: Arrays, *, in_place: bool = False
) -> dict[str, np.ndarray] | None:
    """Return the arrays of a snapshot; report and return None if their digest is wrong or if they do not fit.

    like: arrays of a state, with the names, types and shapes that the snapshot must have (empty: any).
    Arrays that snapshot 0 leaves out are zeros.
    in_place: read into the arrays of `like`, which are overwritten even if the bytes are bad; else into new memory.
    """
    found = ""
    for _ in range(3):
        try:
            file = tensors.read_tensors(store, snapshot.blob, snapshot.size, like if in_place else None)
        except Corrupt as error:
            found = str(error)
            continue
        if file is not None and has_digest_of(file, snapshot.digest, required_digest_kind(store)):
            arrays = with_zeros(file.arrays, like) if snapshot.t == 0 and like else file.arrays
            if not (found := why_misfit(arrays, like)):
                return arrays
            break
        found = (
            f"not {snapshot.size} bytes" if file is None else f"digest {digest_of(file, required_digest_kind(store))}"
        )
    emit("bad_snapshot", step=snapshot.t, blob=snapshot.blob, found=found, announced=snapshot.digest)
    return None


def why_misfit(arrays: Arrays, like: Arrays) -> str:
    """Return why these arrays do not fit a state with the arrays `like`; "" if they fit."""
    for name, array in like.items():
        found = arrays.get(name)
        if found is None:
            return f"it has no {name}: it is of another model, or of other fragments"
        if (found.dtype, found.shape) != (array.dtype, array.shape):
            return f"its {name} is {found.dtype} {list(found.shape)}, this model's is {array.dtype} {list(array.shape)}"
    return ""


def mend_blob(store: Store, snapshot: Snapshot, arrays: Arrays) -> bool:
    """Upload a damaged snapshot again if these arrays have its digest.   Return whether they match."""
    if not snapshot.blob:
        return False
    body = TensorFile(arrays)
    if not has_digest_of(body, snapshot.digest, required_digest_kind(store)):
        return False
    store.put(snapshot.blob, body)
    return True
