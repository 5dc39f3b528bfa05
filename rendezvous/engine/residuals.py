"""The file with a codec's residual, from one generation of a slot to the next.

    r01-1   blob ─▶ leave/r01-1.json names it ─▶ exit          its last writes
    r01-2   leave/r01-1.json ─▶ blob ─▶ its encoder ─▶ delete   in join, before its first offer

A residual is the part of the pseudogradients that the codec has not sent yet.  The file may also contain baggage:
arrays of the engine's owner named `own.…`, such as an optimizer's moments.

Only generation g reads the file of g − 1.  So the file is used at most once: if r01-2 is killed, r01-3 looks for
leave/r01-2.json, finds nothing, and starts from zero.

Not promised: that the file arrives.  A residual makes a run a little better; no agreed value depends on it.
"""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from rendezvous import layout
from rendezvous.errors import StoreError
from rendezvous.records.digests import digest_of, has_digest, required_digest_kind
from rendezvous.records.records import Leave, new_nonce
from rendezvous.records.tensors import TensorFile
from rendezvous.snapshots import record as snapshots
from rendezvous.store import Store


def put_residuals(store: Store, slot: str, generation: int, unsent: snapshots.Arrays) -> tuple[str, str]:
    """Write the residual's file.   Return its key and digest."""
    key = layout.residual_blob(slot, generation, new_nonce())
    body = TensorFile(unsent)
    store.put(key, body)
    return key, digest_of(body, required_digest_kind(store))


def take_residuals(store: Store, left: Leave, sizes: Sequence[int], *, baggage: str) -> dict[str, np.ndarray] | None:
    """Read the residual that `left` names, and delete it; None if it is missing, damaged, or not an encoder's state.

    sizes: elements of each fragment.   baggage: prefix of the names of the owner's arrays.
    """
    body = store.get(left.residual)
    if body is None or not has_digest(body, left.residual_digest, required_digest_kind(store)):
        return None
    with suppress(StoreError):  # a file that stays costs only its bytes
        store.delete([left.residual])
    try:
        unsent = load_tensors(body)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return unsent if _is_encoder_state(unsent, sizes, baggage) else None


def _is_encoder_state(unsent: snapshots.Arrays, sizes: Sequence[int], baggage: str) -> bool:
    """Whether an encoder of fragments with these sizes could have these residuals and ages; baggage is not checked."""
    kinds = {"residual": np.float32, "age": np.uint8}
    codecs = {n: a for n, a in unsent.items() if not n.startswith(baggage)}
    due = {f"{kind}.{f}": (dtype, (size,)) for kind, dtype in kinds.items() for f, size in enumerate(sizes)}
    return all(due.get(n) == (a.dtype, a.shape) and np.isfinite(a).all() for n, a in codecs.items())
