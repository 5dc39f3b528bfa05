"""Writer of θ_t in bf16.  The replica that closed the step before writes it while the next round trains.

    advance to t ──▶ (reading) bits ← bf16(θ_t); its changes from bf16(θ_{t−1}) ──▶ (uploads) blobs ─▶ manifest
                          │                                                             put_once
    mean of t ─── waits ──┘ θ is about to be stepped

Every replica that may close a step keeps bf16(θ), 2 bytes per value.  The closer writes an anchor, which has all
values, at each multiple of ANCHOR_EVERY. It also writes an anchor if a reader could not continue otherwise: the
replica's copy is not that of t−1, or θ_{t−1} was not written (its writer was killed, or slow) or has another digest.
So the next step repairs the chain.

When an anchor is written, the blobs of the chain before the previous anchor are deleted.

Not promised: the weights of every step.  If the store is slower than a round, the weights of some steps are left out.
If a replica is killed while it deletes old blobs, the other blobs stay.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rendezvous import layout
from rendezvous.background import Background, Emit, submit_reported
from rendezvous.clock import Clock
from rendezvous.errors import RendezvousError
from rendezvous.records.digests import digest, required_digest_kind
from rendezvous.records.records import Weights, WeightsPart, decode_or_none, new_nonce
from rendezvous.records.state import ReplicatedState
from rendezvous.store import Store, put_once
from rendezvous.weights.patch import (
    CHUNK,
    Changes,
    bf16_bits,
    changes_between,
    digest_of_bits,
    encode,
    fits_bf16,
    whole,
)

ANCHOR_EVERY = 30
PART = 64 << 20  # a blob has at most about so many bytes


class NotFinite(RendezvousError):
    """θ has values that are NaN or infinite, which no engine should load."""


@dataclass
class _Found:
    """The weights of θ_t that will be written.

    parent: digest of the values to which the bodies are applied; "" in an anchor.
    """

    t: int
    base: str
    parent: str = ""
    digest: str = ""
    changed: int = 0
    bodies: list[bytearray] = field(default_factory=list[bytearray])

    def add(self, changes: Changes) -> None:
        if changes.positions is not None and not len(changes.positions):
            return
        body = encode(changes)
        self.changed += len(changes.values)
        if self.bodies and len(self.bodies[-1]) + len(body) <= PART:
            self.bodies[-1] += body
        else:
            self.bodies.append(bytearray(body))


class WeightsWriter:
    """One replica's writer.   layout: [name, shape, dtype] of θ in flat order; set before the first step.

    reading: runs the jobs that read θ.   uploads: runs the jobs that write blobs.
    These two are separate, so that a slow store does not delay an outer step.
    """

    def __init__(self, store: Store, clock: Clock, *, reading: Background, uploads: Background, emit: Emit) -> None:
        self._store = store
        self._clock = clock
        self._reading = reading
        self._uploads = uploads
        self._emit = emit
        self._bits = np.empty(0, np.uint16)  # bf16 bits of all fragments, one after another
        self._of: int | None = None  # the step of these bits
        self._digest = self._base = ""
        self._read = threading.Event()
        self._read.set()
        self._uploading = False
        self.layout: list[Any] = []

    def note_step(self, state: ReplicatedState, t: int, fragments: int, *, base: str, closed: bool) -> None:
        """Read θ_t, and write it if `closed`.   closed: whether this replica wrote commit t−1."""
        self.wait_until_read()
        self._read.clear()

        def read() -> None:
            try:
                found = self._take(state, t, fragments, base=base, closed=closed)
            finally:
                self._read.set()
            if found is not None:
                self._hand_on(found)

        submit_reported(self._reading, read, self._emit)

    def wait_until_read(self) -> None:
        """Wait until θ was read.  Called before θ is stepped."""
        self._read.wait()

    def drain(self) -> None:
        """Wait until the weights of all steps that this replica closed are written, before it leaves."""
        self._reading.drain()
        self._uploads.drain()

    # ------------------------------------------------------------------ reading

    def _take(self, state: ReplicatedState, t: int, fragments: int, *, base: str, closed: bool) -> _Found | None:
        follows = self._of == t - 1
        parent = self._digest if closed and follows and self._has_parent(t) else ""
        self._of = None  # None until all bits are read
        sizes = [state.size(f) for f in range(fragments)]
        if not follows:
            self._bits = np.zeros(sum(sizes), np.uint16)
        found = _Found(t, base, parent) if closed else None
        turns = [(t - 1) % fragments] if follows else range(fragments)
        for f in turns:
            self._take_fragment(state.arrays(f)[f"theta.{f}"], sum(sizes[:f]), found if parent else None)
        self._digest = digest_of_bits(self._bits)
        self._of, self._base = t, base
        if found is not None:
            found.digest = self._digest
            for at in range(0, len(self._bits), CHUNK) if not parent else ():
                found.add(whole(self._bits[at : at + CHUNK], at))
        return found

    def _has_parent(self, t: int) -> bool:
        """Whether the bucket has the weights of t−1 as this replica has them; else readers need an anchor.

        Return False if t is a multiple of ANCHOR_EVERY.
        """
        there = read_weights(self._store, t - 1) if t % ANCHOR_EVERY else None
        return there is not None and (there.digest, there.base) == (self._digest, self._base)

    def _take_fragment(self, theta: np.ndarray, offset: int, found: _Found | None) -> None:
        """Set bits ← bf16(θ) for one fragment, and add the changes to `found`.   offset: index of its first value."""
        flat = theta.reshape(-1)
        for at in range(0, len(flat), CHUNK):
            chunk = flat[at : at + CHUNK]
            if not fits_bf16(chunk):
                raise NotFinite("θ has values that are NaN or infinite in bf16, so its weights are not written")
            new = bf16_bits(chunk)
            old = self._bits[offset + at : offset + at + len(new)]
            if found is not None:
                found.add(changes_between(old, new, offset + at))
            old[:] = new

    # ------------------------------------------------------------------ writing

    def _hand_on(self, found: _Found) -> None:
        if self._uploading:
            self._emit("weights_left_out", step=found.t, text="those of an earlier step are still being written")
            return
        self._uploading = True
        values = len(self._bits)

        def write() -> None:
            try:
                self._write(found, values)
            finally:
                self._uploading = False

        submit_reported(self._uploads, write, self._emit)

    def _write(self, found: _Found, values: int) -> None:
        began = self._clock.now()
        nonce = new_nonce()
        parts = tuple(self._put_part(found.t, f"{nonce}-{k:04d}", body) for k, body in enumerate(found.bodies))
        mine = Weights(
            t=found.t, base=found.base, parent=found.parent, digest=found.digest, values=values,
            changed=found.changed, parts=parts, nonce=nonce, at=self._clock.wall(),
            layout=[] if found.parent else self.layout,
        )  # fmt: skip
        put_once(self._store, self._clock, layout.weights_key(found.t), mine.encode())
        self._emit(
            "weights", step=found.t, anchor=not found.parent, bytes=mine.size,
            changed=found.changed / max(1, values), upload_s=self._clock.now() - began,
        )  # fmt: skip
        if not found.parent:
            self._store.delete(_blobs_before_last_anchor(self._store, found.t))

    def _put_part(self, t: int, name: str, body: bytearray) -> WeightsPart:
        key = layout.weights_blob(t, name)
        self._store.put(key, body)
        return WeightsPart(key, len(body), digest(body, required_digest_kind(self._store)))


def read_weights(store: Any, t: int) -> Weights | None:
    """Return the manifest of θ_t's weights; None if there is none that can be read."""
    found = decode_or_none(Weights, store.get(layout.weights_key(t)))
    return found if found is not None and found.t == t else None


def _blobs_before_last_anchor(store: Store, t: int) -> list[str]:
    """Return the blobs of the chain before the previous anchor.   t: step of an anchor that was just written."""
    found: list[Weights] = []  # from the step before the previous anchor back to the anchor before that anchor
    anchors = 0
    for u in range(t - 1, max(-1, t - 1 - 3 * ANCHOR_EVERY), -1):
        weights = read_weights(store, u)
        if weights is None:
            continue
        if anchors == 1:
            found.append(weights)
        anchors += not weights.parent
        if anchors == 2:
            break
    return [part.blob for weights in found for part in weights.parts]
