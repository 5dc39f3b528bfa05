"""Snapshots: θ_t and the outer momentum, written down so that no replica has to replay a run from its beginning.

    snapshots/{t}/{nonce}.safetensors   first
    snapshots/{t}/manifest.json         last, by put_once: a writer that is killed between leaves nothing visible

A manifest of step t is written only after commit t confirmed its digest, so that no corrupt writer decides the state.
Snapshot 0 is θ₀, from the replica that came first.  It leaves out arrays of zeros, as all momentum is then.  Where the
replicas take the start model from elsewhere, it is a manifest alone, with the digest.  In the file the fragments stand
in the order of their turns from step t on, so that the fragment that is stepped first is read first
(rendezvous/snapshots/writer.py).

Not promised: that the newest one is good.  `load` checks the digest; callers fall back to an older one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from rendezvous import layout
from rendezvous.clock import Clock
from rendezvous.errors import Corrupt
from rendezvous.records import tensors
from rendezvous.records.digests import digest_of, has_digest_of, required_digest_kind
from rendezvous.records.records import Snapshot, WireError, new_nonce
from rendezvous.records.tensors import TensorFile
from rendezvous.store import Store, put_once

Arrays = Mapping[str, np.ndarray]


def write(
    store: Store, clock: Clock, t: int, arrays: Arrays, *, base: str, prev: str | None, confirmed: bool = True
) -> Snapshot:
    """Publish these arrays, from their own memory; -> the snapshot that stands for step t (ours, or a faster one)."""
    n = new_nonce()
    body = TensorFile(arrays)
    digest = digest_of(body, required_digest_kind(store))
    store.put(layout.snapshot_blob(t, n), body)
    return publish_manifest(
        store,
        clock,
        Snapshot(
            t=t,
            base=base,
            prev=prev,
            blob=layout.snapshot_blob(t, n),
            size=body.size,
            digest=digest,
            nonce=n,
            confirmed=confirmed,
        ),
    )


def write_first(store: Store, clock: Clock, arrays: Arrays, *, base: str, elsewhere: bool) -> Snapshot:
    """Write snapshot 0, without arrays of zeros.   elsewhere: replicas have θ₀ from another place; then no blob."""
    if elsewhere:
        return publish_manifest(
            store, clock, Snapshot(t=0, base=base, prev=None, blob="", size=0, digest="", nonce=new_nonce())
        )
    return write(store, clock, 0, {name: a for name, a in arrays.items() if not _is_zero(a)}, base=base, prev=None)


def _is_zero(array: np.ndarray) -> bool:
    """Whether all its bits are 0.  (Those of −0.0 are not.)"""
    return not array.view(np.dtype(f"i{array.itemsize}")).any()


def with_zeros(arrays: Arrays, like: Arrays) -> dict[str, np.ndarray]:
    """Return snapshot 0's arrays, and zeros for those that it does not have."""
    return {name: arrays[name] if name in arrays else np.zeros_like(array) for name, array in like.items()}


def publish_manifest(store: Store, clock: Clock, mine: Snapshot) -> Snapshot:
    """Make a snapshot visible whose blob is there; -> the one that stands for its step (ours, or a faster one)."""
    _, value = put_once(store, clock, layout.snapshot_key(mine.t), mine.encode())
    return _decode_manifest(value, mine.t) or mine


def newest_first(store: Store, hint: int = 0, at_most: int | None = None) -> Iterator[Snapshot]:
    """Complete snapshots, newest first.  LIST is a hint; `hint` and step 0 are always tried.

    An object that is not a manifest is passed over, as if the snapshot had never been written.
    """
    steps = {0, hint, *steps_of(store.list(layout.SNAPSHOTS))}
    for t in sorted(steps, reverse=True):
        if (at_most is None or t <= at_most) and (found := read(store, t)) is not None:
            yield found


def steps_of(keys: Iterable[str]) -> list[int]:
    """The steps of the manifests among these keys, in order."""
    return sorted({s for k in keys if (s := layout.snapshot_step(k)) is not None})


def read(store: Store, t: int) -> Snapshot | None:
    """The snapshot of step t, if there is one."""
    body = store.get(layout.snapshot_key(t))
    return None if body is None else _decode_manifest(body, t)


def _decode_manifest(body: bytes, t: int) -> Snapshot | None:
    try:
        found = Snapshot.decode(body)
    except WireError:
        return None
    return found if found.t == t else None


def load(
    store: Store, snapshot: Snapshot, emit: Callable[..., None], like: Arrays, *, in_place: bool = False
) -> dict[str, np.ndarray] | None:
    """Return the arrays of a snapshot; None, and a report, where they do not have the announced digest or do not fit.

    like: arrays of a state; those of the snapshot must have the same names, types and shapes (none: any will do).
    Arrays that snapshot 0 does not have are zeros.
    in_place: overwrite those of `like`, also where the bytes turn out to be bad; else each is read into its own memory.
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
    """The reason why a state with the arrays `like` cannot become these; "" if it can."""
    for name, array in like.items():
        found = arrays.get(name)
        if found is None:
            return f"it has no {name}: it is of another model, or of other fragments"
        if (found.dtype, found.shape) != (array.dtype, array.shape):
            return f"its {name} is {found.dtype} {list(found.shape)}, this model's is {array.dtype} {list(array.shape)}"
    return ""


def mend_blob(store: Store, snapshot: Snapshot, arrays: Arrays) -> bool:
    """Put a damaged snapshot's bytes back, if these arrays have its digest; -> whether they do."""
    if not snapshot.blob:
        return False
    body = TensorFile(arrays)
    if not has_digest_of(body, snapshot.digest, required_digest_kind(store)):
        return False
    store.put(snapshot.blob, body)
    return True
