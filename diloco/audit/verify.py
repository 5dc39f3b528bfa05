"""Check a run against its records, without write access: recompute everything that can be recomputed.

    records      chain, weights, offers, claims, snapshots (records.py)             these records are never deleted
    files        of the start model, and the user's: their SHA-256
    snapshot s ──▶ θ_s ──▶ θ_s+1 ──▶ … ──▶ θ_T                                      by the listed deltas if they are
                    │        │              │                                       there, else by the published means
                    └── base in commits and snapshots; θ in the replicas' logs; a snapshot's bytes

A difference names its step, blob and replica.  Deleted blobs are reported as unchecked.  Nothing is written or
repaired.  After a difference, the replay continues as far as the remaining blobs allow.

Not promised: that a pseudogradient is the result of its replica's inner steps (`--inner`, audit/inner.py).  xxh3
digests find accidents; only a run key makes forgeries visible.
"""

from collections.abc import Iterator

import numpy as np

from diloco.audit.records import RecordCheck, file_flaws, snapshot_steps
from diloco.audit.verdict import UNSEEN, Findings, Verdict
from diloco.model.export import empty_state, keep_of, model_record, refuse_gone, start_arrays
from diloco.outer.optimizer import OuterState
from diloco.run.config import ConfigError
from diloco.run.record import Run
from diloco.run.sections import keep_bytes
from rendezvous import layout
from rendezvous.agreement.chain import Chain
from rendezvous.background import no_emit, together_on
from rendezvous.clock import SystemClock
from rendezvous.errors import Corrupt
from rendezvous.keeping.garbage import blob_stands
from rendezvous.keeping.reach import read_reach
from rendezvous.means.reduce import Reducer
from rendezvous.records.digests import has_digest, has_digest_of, required_digest_kind
from rendezvous.records.records import Commit
from rendezvous.records.state import all_arrays
from rendezvous.records.tensors import TensorFile
from rendezvous.records.wire import as_bytes
from rendezvous.snapshots.replay import StateReplay
from rendezvous.store import PatientStore

PATIENCE_S = 10.0


class _LostMean(Exception):
    """The error for a step whose deltas and mean cannot be read."""


def verify(run: Run, step: int | None = None) -> Verdict:
    """Recompute θ and compare.   step: check only this step, from the snapshot before it; None: check all steps.

    Raises ConfigError for a step whose blobs were deleted, or that is not taken yet.
    """
    store = PatientStore(run.store, SystemClock(), PATIENCE_S)
    found = Findings(Verdict(unchecked=[UNSEEN]), store, keep_bytes(keep_of(run)) is None)
    records = RecordCheck(store, run.config.outer.rules, found)
    head = records.head()
    first = 0 if step is None else _begin_at(run, store, step, head)
    end = records.check(first, head if step is None else min(step + 1, head))
    last = end if step is None else min(step, end)
    records.check_snapshots(first, last)
    if step is None:
        _check_files(run, found)
    _Replay(run, store, records, found).replay_all(last)
    return found.verdict


def _begin_at(run: Run, store: PatientStore, step: int, head: int) -> int:
    """Return the step of the snapshot from which θ of `step` is computed; 0 for θ_0."""
    if not 0 <= step <= head:
        raise ConfigError(f"step {step} has not been taken: the run is at step {head}. Use --step {head} or less")
    refuse_gone(run, step)
    reach = read_reach(store)
    return max((t for t in snapshot_steps(store) if t < step and reach.covers_step(t)), default=0)


def _check_files(run: Run, found: Findings) -> None:
    record = model_record(run)
    for key, flaw in file_flaws(found.store, [record.files, run.record.files]):
        found.differs(0, key, "", flaw)
    if record.hub:
        found.not_checked("the start model's files on the Hub")


class _Replay:
    """The check of θ: every mean and every state that can still be computed, against all records of them."""

    def __init__(self, run: Run, store: PatientStore, records: RecordCheck, found: Findings) -> None:
        self._run = run
        self._store = store
        self._records = records
        self._found = found
        self._kind = required_digest_kind(run.store)
        self._outer = run.config.outer
        self._start = model_record(run)
        rules, together = run.config.outer.rules, together_on(run.store)
        self._reducer = Reducer(store, SystemClock(), no_emit, rules, together=together)
        self._differed = False  # whether θ differed at the step before

    def replay_all(self, last: int) -> None:
        """Replay from the oldest snapshot on; after a lost mean, from the next snapshot."""
        after = -1
        while (start := min((t for t in self._records.manifests if t > after), default=None)) is not None:
            if start > after + 1:
                self._note_lost(after + 1, start - 1)
            after = self._replay_from(start, last)
        if after < last:
            self._note_lost(after + 1, last)

    def _note_lost(self, first: int, last: int) -> None:
        self._found.not_checked(f"θ of steps {first} to {last}: nothing is left to compute it from")

    def _replay_from(self, start: int, last: int) -> int:
        """Replay. Return the last step whose θ is known now; `start` if its snapshot cannot be used."""
        state = empty_state(self._start, self._outer)
        fragments = self._outer.rules.fragments
        replay = StateReplay(
            self._store, Chain(self._store, 2), state, fragments, self._mean,
            emit=no_emit, theta_0=lambda: start_arrays(self._run, self._start), mends=False,
        )  # fmt: skip
        if not replay.load_snapshot(upto=start) or replay.step != start:
            self._found.not_checked(f"θ of step {start}: its snapshot cannot be used")
            self._records.manifests.pop(start)
            return start
        try:
            self._check_state(start, replay.digests.base, state)
            for _ in replay.commits(last):
                self._check_state(replay.step, replay.digests.base, state)
        except _LostMean as error:
            self._found.not_checked(f"step {replay.step}: {error}")
        return replay.step

    def _mean(self, commit: Commit, out: np.ndarray) -> None:
        """Write the mean into `out`: from its deltas, compared with the published mean; else the published mean.

        Raises _LostMean if neither can be read."""
        try:
            for part, body in self._reducer.parts.make_all(commit, out):
                self._compare_announced(commit, part, body)
            self._found.verdict.from_deltas.append(commit.t)
            return
        except Corrupt:
            self._name_bad_bodies(commit, out.size)
        trouble = self._reducer.parts.read_announced(commit, out)
        if trouble is not None:
            self._name_bad_means(commit)
            raise _LostMean(f"neither its deltas nor its mean can be read: {trouble}")
        self._found.verdict.as_announced.append(commit.t)

    def _compare_announced(self, commit: Commit, part: int, body: np.ndarray) -> None:
        taken, record = self._reducer.announcements.find(commit.t, part)
        if record is None:
            if taken:
                self._found.differs(commit.t, layout.mean_key(commit.t, part), "", "is not an announcement of a mean")
            return
        if not has_digest(body.data, record.digest, self._kind):
            self._found.differs(
                commit.t, record.blob, "", "was announced with another digest than its deltas' mean has"
            )
        self._check_mean_blob(commit.t, record.blob, record.size, record.digest)

    def _check_mean_blob(self, t: int, blob: str, size: int, announced: str) -> None:
        if not blob_stands(self._store, blob, size):  # before allocating memory: the size may be false
            return self._found.missing(t, blob)
        stored = np.empty(size, np.uint8)
        if not self._store.get_into(blob, stored.data):
            self._found.missing(t, blob)
        elif not has_digest(stored.data, announced, self._kind):
            self._found.differs(t, blob, "", f"the stored mean has another digest than the announced {announced}")

    def _name_bad_means(self, commit: Commit) -> None:
        for part in range(max(1, len(commit.owners))):
            _, record = self._reducer.announcements.find(commit.t, part)
            if record is not None:
                self._check_mean_blob(commit.t, record.blob, record.size, record.digest)

    def _name_bad_bodies(self, commit: Commit, elements: int) -> None:
        """Note which listed deltas are gone, and which deltas have other bytes than their records say."""
        bodies = self._reducer.bodies
        for listed in commit.offers:
            if bodies.record_flaw(listed, elements):
                continue  # no replica counts this offer
            if not blob_stands(self._store, listed.blob, listed.size):
                self._found.missing(commit.t, listed.blob, listed.slot)
            elif isinstance(why := bodies.read_body(listed, bodies.grid(elements), None), str):
                self._found.differs(commit.t, listed.blob, listed.slot, why)

    def _check_state(self, t: int, base: str, state: OuterState) -> None:
        """Compare θ_t and its momentum with all records of them."""
        self._found.verdict.thetas.append(t)
        self._found.verdict.digests[t] = base
        wrong = list(self._other_claims(t, base))
        for blob, slot, text in [] if self._differed else wrong:
            self._found.differs(t, blob, slot, f"{text}, computed is {base}")
        self._differed = bool(wrong)
        if t == 0 and self._start.theta and not self._run.record.parent.url:  # a fork's θ_0 is a θ of its parent
            theta = (as_bytes(part.numpy()) for part in state.thetas)
            if not has_digest_of(theta, self._start.theta, self._kind):
                self._found.differs(0, layout.MODEL_MANIFEST, "", f"says that θ_0 has the digest {self._start.theta}")
        snapshot = self._records.manifests.get(t)
        if snapshot is not None and snapshot.blob and t and not wrong:
            body = TensorFile(all_arrays(state, self._outer.rules.fragments, t))
            if not has_digest_of(body, snapshot.digest, self._kind):
                self._found.differs(t, snapshot.blob, "", "has other values than were computed")

    def _other_claims(self, t: int, base: str) -> Iterator[tuple[str, str, str]]:
        commit, snapshot = self._records.chain.get(t), self._records.manifests.get(t)
        if commit is not None and commit.base != base:
            yield layout.commit_key(t), commit.by, f"started from {commit.base}"
        if snapshot is not None and snapshot.base != base:
            yield layout.snapshot_key(t), "", f"has {snapshot.base}"
        for key, left in self._records.left.get(t, {}).items():
            if left != base:
                yield key, "", f"left with {left}"
        for session, theta in self._records.logged.get(t, {}).items():
            if theta != base:
                yield f"{layout.LOGS}{session}", session, f"held {theta} after commit {t - 1}"
