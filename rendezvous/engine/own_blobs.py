"""The pseudogradients that this replica has uploaded, and the memory that holds them.

    Δ ── codec, with its residual ──▶ body ──▶ steps/{t}/delta/…       upload
                                        │
      kept in memory for up to two steps └─▶ this replica reads it here, and uploads it again if the store lost it

    it may be needed       if a commit lists it, and a reader of that commit is neither dead nor past the step
    it may be collected    if its mean is announced and there is a newer snapshot

A replica that waits long checks whether a blob of its own is missing, because only the writer is sure to have it.

Not promised: that a body outlives its process.  Readers then use the announced mean and the snapshots.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rendezvous import layout
from rendezvous.agreement import rules
from rendezvous.agreement.chain import Chain
from rendezvous.agreement.membership import Membership
from rendezvous.agreement.rules import Rules, Timing
from rendezvous.background import Emit
from rendezvous.clock import Clock
from rendezvous.keeping import garbage
from rendezvous.means.bodies import OwnBody
from rendezvous.records.digests import required_digest_kind
from rendezvous.records.records import Commit, new_nonce
from rendezvous.records.wire import (
    Encoder,
    Written,
    as_bytes,
    codec_alignment,
    digested_pieces,
    fetch_checked,
    page_aligned,
    shard_grid,
    why_differs,
)
from rendezvous.store import Store


@dataclass(frozen=True)
class Upload:
    """A body that is durable and not offered yet."""

    key: str
    nonce: str
    written: Written


@dataclass(eq=False, repr=False)
class OwnBlobs:
    """The bodies that this replica uploads.

    collects: whether old blobs are deleted in this run.   newest_snapshot(): the newest step that may have a snapshot.
    """

    store: Store
    clock: Clock
    chain: Chain
    members: Membership
    rules: Rules
    timing: Timing
    emit: Emit
    collects: bool
    newest_snapshot: Callable[[], int]
    bodies: list[OwnBody] = field(default_factory=list[OwnBody])  # the last body, or the last two if needed
    bytes_per_s: float = 0.0  # rate of the last upload

    def __post_init__(self) -> None:
        self.encoder = Encoder(self.rules.codec, digests=required_digest_kind(self.store))

    def upload(self, step: int, fragment: int, delta: np.ndarray, theta: np.ndarray | None) -> Upload:
        """Upload Δ.  Afterwards the caller may overwrite `delta`."""
        self._keep_last()
        codec = self.rules.codec
        ranges = shard_grid(delta.size, codec_alignment(codec), self.rules.shard_elements)
        nonce = new_nonce()
        written = self.encoder.encode_in_shards(fragment, delta, ranges, theta)
        key = layout.delta_blob(step, self.members.slot, self.members.generation, nonce)
        began = self.clock.now()
        self.store.put(key, as_bytes(written.body))
        self.bytes_per_s = written.body.nbytes / max(self.clock.now() - began, 1e-6)
        self.bodies.append(OwnBody(step, key, written.body, digested_pieces(written, codec, ranges)))
        return Upload(key, nonce, written)

    def take_back(self, fragment: int) -> None:
        """Return the values of the last body to the codec, which sends them with the next body.

        Called when the last body will never count.
        """
        if self.bodies:
            self.encoder.take_back(fragment, self.bodies[-1].body)

    def body_of(self, step: int) -> OwnBody | None:
        return next((mine for mine in self.bodies if mine.step == step), None)

    def lend_memory(self, mine: OwnBody | None, mean: np.ndarray) -> np.ndarray:
        """Copy the mean, over our own body if the size fits, and return the copy.  See `return_memory`."""
        if mine is None or mine.body.size != mean.nbytes:
            return mean.copy()
        self.bodies.remove(mine)
        self.encoder.give_away(mine.body)  # the next body must not be written over the copy
        copy = mine.body.view(np.float32)
        copy[:] = mean
        return copy

    def return_memory(self, copy: np.ndarray) -> None:
        self.encoder.give_back(copy.view(np.uint8))

    def readers_of(self, commit: Commit) -> set[str]:
        """Return the other slots that may still need a body of this replica, so that it reads their beats.

        Return no slot in a large fleet, where no replica reads all beats.  In a sharded step all parts are announced by
        now, so no slot needs a body.  Then only the three replicas that look first at the next step read beats.
        """
        wanted = self.members.wanted
        if not self.bodies or wanted.universe > rules.LARGE_FLEET:
            return set()
        slots = wanted.replicas or wanted.universe
        rank = rules.commit_rank(commit.t + 1, layout.slot_index(self.members.slot), slots)
        if commit.mode == "sharded" and rank == rules.LED:
            return set()
        return {o.slot for o in commit.fresh_offers} - {self.members.slot}

    # ------------------------------------------------------------------ the bodies that are still needed

    def _keep_last(self) -> None:
        """Keep the last body in memory if a replica may still need it.  Called before the next body is written."""
        kept = [mine for mine in self.bodies[-1:] if self.may_be_missed(mine)]
        for mine in self.bodies:
            if kept and mine is kept[0]:
                self.encoder.give_away(mine.body)
            else:
                self.encoder.give_back(mine.body)
        self.bodies = kept

    def may_be_missed(self, mine: OwnBody) -> bool:
        """Whether another replica may still need this body.

        sharded step            no: all parts of the mean are announced by now, and readers use them
        direct step             yes if a slot that the commit lists is not known to be dead or past the step
        direct, large fleet     yes: no replica reads all beats, and direct bodies are small
        """
        commit = self.chain.known_commit(mine.step)
        if commit is None or not commit.lists_offer(mine.step, self.members.slot):
            return False
        if commit.mode == "sharded" or self.members.wanted.universe > rules.LARGE_FLEET:
            return commit.mode == "direct"
        peers = [self.members.peers.get(o.slot) for o in commit.fresh_offers if o.slot != self.members.slot]
        return any(p is None or not (p.is_dead(self.timing.dead_after) or p.beat.step > mine.step) for p in peers)

    def _is_replayed(self, step: int) -> bool:
        """Whether a replica that heals still has to apply this step; it then reads every body that the step lists."""
        peers = [*self.members.peers.values()]
        limit = self.timing.dead_after
        return any(p.beat.phase in rules.STARTING and p.beat.step <= step and not p.is_dead(limit) for p in peers)

    def _may_be_collected(self, mine: OwnBody) -> bool:
        """Whether a collector may have deleted the blob.  If put back now, the blob would never be deleted again."""
        commit = self.chain.known_commit(mine.step)
        if not self.collects or commit is None:
            return False
        return garbage.may_be_collected(self.store, commit, self.newest_snapshot())

    # ------------------------------------------------------------------ putting back

    def mend_missed(self) -> None:
        """Upload again the bodies that other replicas may need and the store has lost.  Called during a long wait."""
        for mine in self.bodies:
            if (self.may_be_missed(mine) or self._is_replayed(mine.step)) and not self._may_be_collected(mine):
                self.mend(mine)

    def mend_all(self) -> None:
        for mine in self.bodies:
            self.mend(mine)

    def mend(self, mine: OwnBody) -> None:
        """Check our blob in the store.  If the blob is missing or damaged and our copy is intact, upload our copy."""
        found = page_aligned(mine.body.size)
        trouble = fetch_checked(self.store, self.clock, mine.key, mine.pieces, found)
        intact = why_differs(mine.key, as_bytes(mine.body), mine.pieces, required_digest_kind(self.store)) is None
        if trouble is not None and intact:
            self.store.put(mine.key, as_bytes(mine.body))
            self.emit("repaired", step=mine.step, blob=mine.key)
