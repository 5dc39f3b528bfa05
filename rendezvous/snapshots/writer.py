"""Write a snapshot while the next round trains, directly from the memory of θ and momentum, piece by piece.

    commit t−1 ─▶ advance ───── inner steps of round t ─────▶ offer ─▶ commit t ─▶ mean ─▶ step t
                    │ start                                              │          │
                    ▼                                                    ▼          ▼
    (background)   blob ◀── pieces of 1 MiB ◀── θ_t, momentum         confirm    release(t mod F): the unread rest of
                    └────── and its digests ─────────────▶ manifest ◀────┘       that fragment is copied

θ_t does not change between two outer steps, so it is not copied first, and training does not wait.  If the store is
slower than a round, the unread rest of the fragment that is about to be stepped is copied.  Each piece is copied, and
the copy is digested and written.  The digests of these bytes must give the `base` that commit t confirmed; otherwise
the snapshot does not become visible.

A failed request begins again from the first byte.  If an outer step has changed bytes that were already read, the
snapshot is given up, and its writer begins another snapshot at the next step.

Not promised: immediate deletion of a blob without a manifest; it is deleted with its step.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from rendezvous import layout
from rendezvous.background import Background, Emit, seen_words
from rendezvous.clock import Clock
from rendezvous.errors import Diverged, RendezvousError
from rendezvous.records.digests import Hasher, required_digest_kind
from rendezvous.records.records import Snapshot, new_nonce
from rendezvous.records.state import UNVERIFIED, ReplicatedState, digest_of_digests
from rendezvous.records.tensors import PIECE, TensorFile
from rendezvous.records.wire import as_bytes
from rendezvous.snapshots import record as snapshots
from rendezvous.store import Buffer, Store


class Abandoned(RendezvousError):
    """The writer has stopped writing this snapshot."""


class LiveFile(TensorFile):
    """File of the present values of arrays that will be stepped later.

    fragments: (number, arrays) in the order of their turns.   digest, base: of the bytes that were read.
    """

    def __init__(self, fragments: list[tuple[int, dict[str, np.ndarray]]], kind: str) -> None:
        super().__init__({name: array for _, arrays in fragments for name, array in arrays.items()})
        self._fragments = dict(fragments)
        self._kind = kind
        self._lock = threading.Lock()
        self._stopped = False
        self._from = dict.fromkeys(self.arrays, 0)  # the first byte of an array that can still be read
        self._rest = {name: as_bytes(array) for name, array in self.arrays.items()}  # bytes from that byte on
        self._at = dict(self._from)  # the next byte to be read
        self._copied = set[str]()
        self.digest = ""
        self.base = ""

    def __iter__(self) -> Iterator[Buffer]:
        """Yield the file piece by piece.   Raise Abandoned after `stop`, or if a step changed bytes that were read."""
        with self._lock:
            if any(self._from.values()):
                raise Abandoned("θ was stepped while this snapshot was written; its writer begins another one")
            self._at = dict(self._from)
        whole = Hasher(self._kind)
        each = dict[str, str]()
        whole.update(self.header)
        yield self.header
        for name in self.arrays:
            one = Hasher()
            while piece := self._next_piece(name):
                whole.update(piece)
                one.update(piece)
                yield piece
            each[name] = one.hexdigest()
        self.digest, self.base = whole.digest(), self._base_of(each)

    def release_fragment(self, fragment: int) -> int:
        """Copy the unread rest of a fragment that is about to be stepped.   Return the number of copied bytes."""
        with self._lock:
            names = [name for name in self._fragments.get(fragment, {}) if name not in self._copied]
            for name in names:
                rest = self._rest[name][self._at[name] - self._from[name] :]
                self._rest[name] = as_bytes(np.array(np.frombuffer(rest, np.uint8)))
                self._from[name] = self._at[name]
            self._copied.update(names)
            return sum(len(self._rest[name]) for name in names)

    def stop(self) -> None:
        """Make the next piece raise Abandoned."""
        with self._lock:
            self._stopped = True
            self._rest.clear()

    def _next_piece(self, name: str) -> bytes:
        with self._lock:
            if self._stopped:
                raise Abandoned("this snapshot is not needed any more")
            start = self._at[name] - self._from[name]
            piece = bytes(self._rest[name][start : start + PIECE])
            self._at[name] += len(piece)
            if not piece and name in self._copied:
                self._from[name], self._rest[name] = self._at[name], memoryview(b"")  # the array's memory is free again
            return piece

    def _base_of(self, each: dict[str, str]) -> str:
        """Return the state's `base`, computed from the bytes that were read.   each: array name -> digest."""
        fragments = [digest_of_digests(each[name] for name in arrays) for _, arrays in sorted(self._fragments.items())]
        return digest_of_digests(fragments) if self.arrays else UNVERIFIED


@dataclass
class _Writing:
    """A snapshot that is being written.   mine: the manifest, still without the digest."""

    mine: Snapshot
    file: LiveFile
    written: bool = False
    confirmed: bool = False


@dataclass(eq=False, repr=False)
class SnapshotWriter:
    """Writer of one replica's snapshots, one at a time.

    uploads: runs the jobs that write blobs.   run_in_background(job): runs the jobs that write manifests.
    on_written(step): called after each snapshot has become visible.
    """

    store: Store
    clock: Clock
    uploads: Background
    run_in_background: Callable[[Callable[[], None]], None]
    emit: Emit
    on_written: Callable[[int], None]
    owes: bool = False  # whether the last snapshot was given up
    _now: _Writing | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_busy(self) -> bool:
        return self._now is not None

    def start(self, state: ReplicatedState, fragments: int, t: int, *, base: str, prev: str | None) -> None:
        """Write θ_t in the background.  The snapshot becomes visible when commit t confirms it."""
        self._now = self._begin_writing(state, fragments, t, base=base, prev=prev, confirmed=True)
        self.owes = False
        writing = self._now
        self.uploads.submit(lambda: self._upload_blob(writing))

    def write(
        self, state: ReplicatedState, fragments: int, t: int, *, base: str, prev: str | None, confirmed: bool
    ) -> None:
        """Write θ_t and make it visible before returning.   Raise Diverged if its bytes do not give `base`."""
        writing = self._begin_writing(state, fragments, t, base=base, prev=prev, confirmed=confirmed)
        self._put_blob(writing)
        self._publish_manifest(writing)

    def confirm_base(self, t: int, base: str) -> None:
        """Confirm the snapshot of step t if commit t started from the same state (`base`); else abandon it."""
        writing = self._now
        if writing is None or writing.mine.t != t:
            return
        if writing.mine.base != base:
            self.abandon()
            return
        with self._lock:
            writing.confirmed = True
            due = writing.written
        if due:
            self.run_in_background(lambda: self._publish_manifest(writing))

    def release_fragment(self, fragment: int) -> None:
        """Copy the part of a fragment that the writer has not read, before an outer step changes the fragment."""
        writing = self._now
        if writing is not None and not writing.written and (size := writing.file.release_fragment(fragment)):
            self.emit("snapshot_copied", step=writing.mine.t, bytes=size)

    def abandon(self) -> None:
        """Stop writing the present snapshot, if there is one."""
        writing = self._now
        self._now = None
        if writing is not None:
            writing.file.stop()

    # ------------------------------------------------------------------ in the background

    def _begin_writing(
        self, state: ReplicatedState, fragments: int, t: int, *, base: str, prev: str | None, confirmed: bool
    ) -> _Writing:
        turns = [(t + i) % fragments for i in range(fragments)]
        n = new_nonce()
        file = LiveFile([(f, dict(state.arrays(f))) for f in turns], required_digest_kind(self.store))
        mine = Snapshot(
            t=t, base=base, prev=prev, blob=layout.snapshot_blob(t, n), size=file.size, digest="", nonce=n,
            confirmed=confirmed,
        )  # fmt: skip
        return _Writing(mine, file)

    def _upload_blob(self, writing: _Writing) -> None:
        try:
            if self.store.get(layout.snapshot_key(writing.mine.t)) is not None:
                raise Abandoned(f"snapshot {writing.mine.t} is there already")
            self._put_blob(writing)
        except RendezvousError as error:
            self._give_up(writing, error)
            return
        except BaseException:
            self._now = None  # the background reports the error; the next snapshot can begin
            raise
        with self._lock:
            writing.written = True
            due = writing.confirmed
        if due:
            self._publish_manifest(writing)

    def _put_blob(self, writing: _Writing) -> None:
        self.store.put(writing.mine.blob, writing.file)
        if writing.file.base != writing.mine.base:
            raise Diverged(
                f"θ_{writing.mine.t} changed while snapshot {writing.mine.t} was written (digest {writing.file.base}, "
                f"was {writing.mine.base}). The cause is bad memory, or code that writes to the fragments. The "
                "snapshot is not published"
            )

    def _publish_manifest(self, writing: _Writing) -> None:
        try:
            snapshots.publish_manifest(self.store, self.clock, replace(writing.mine, digest=writing.file.digest))
        except RendezvousError as error:
            self._give_up(writing, error)
            return
        if self._now is writing:
            self._now = None
        self.on_written(writing.mine.t)
        self.emit("snapshot", step=writing.mine.t)

    def _give_up(self, writing: _Writing, error: RendezvousError) -> None:
        if self._now is writing:  # else the snapshot was abandoned
            self._now = None
            self.owes = True
        self.emit("not_written", trouble=seen_words(error))
