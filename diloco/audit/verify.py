"""Check a run against its records, without write access: recompute everything that can be recomputed.

    commits      chain, weights, each offer's record, nothing counted twice         these records are never deleted
                 the newest ones too: snapshots, offers, leave records and logs name the step that was reached
    files        of the start model, and the user's: their SHA-256
    snapshot s ──▶ θ_s ──▶ θ_s+1 ──▶ … ──▶ θ_T                                      by the listed deltas if they are
                    │        │              │                                       there, else by the published means
                    └── base in commits and snapshots; θ in the replicas' logs; a snapshot's bytes

A difference names its step, blob and replica.  Deleted blobs are reported as unchecked.  Nothing is written or
repaired.  After a difference, the replay continues as far as the remaining blobs allow.

Not promised: that a pseudogradient is the result of its replica's inner steps (`--inner`, audit/inner.py).  xxh3
digests find accidents; only a run key makes forgeries visible.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import numpy as np

from diloco.model.export import empty_state, keep_of, model_record, refuse_gone, start_arrays
from diloco.model.fetch import fetch_stored
from diloco.outer.optimizer import OuterState
from diloco.process.journal import read_log
from diloco.run.config import ConfigError
from diloco.run.record import Run
from diloco.run.sections import keep_bytes
from diloco.runlog.reached import LostCommit, lost_commit
from rendezvous import layout
from rendezvous.agreement.chain import Chain
from rendezvous.agreement.rules import Rules
from rendezvous.background import no_emit, together_on
from rendezvous.clock import SystemClock
from rendezvous.errors import BadCommit, Corrupt, RendezvousError
from rendezvous.keeping.garbage import blob_stands
from rendezvous.keeping.reach import read_reach
from rendezvous.means.reduce import Reducer, refuse_misweighed
from rendezvous.records.digests import has_digest, has_digest_of, required_digest_kind
from rendezvous.records.records import Commit, Leave, Listed, Offer, Snapshot, WireError, decode_or_none
from rendezvous.records.state import all_arrays
from rendezvous.records.tensors import TensorFile
from rendezvous.records.wire import as_bytes
from rendezvous.snapshots import record as snapshots
from rendezvous.snapshots.replay import StateReplay
from rendezvous.store import PatientStore, Readable, Store
from rendezvous.stores.ahead import Ahead

UNSEEN = "that a pseudogradient is the result of its replica's inner steps (--inner takes them again)"
STEPS_AT_ONCE, LOGS_AT_ONCE = 100, 16  # so many are requested together


@dataclass(frozen=True)
class Difference:
    """One difference from the records.   slot: of the replica that it concerns, or ""."""

    step: int
    blob: str
    slot: str
    text: str

    def in_words(self) -> str:
        of = f", {self.slot}" if self.slot else ""
        return f"step {self.step}{of}: {self.blob}: {self.text}"


@dataclass
class Verdict:
    """The result.   thetas: steps whose θ was computed.   from_deltas, as_announced: steps, by their mean's source."""

    thetas: list[int] = field(default_factory=list[int])
    from_deltas: list[int] = field(default_factory=list[int])
    as_announced: list[int] = field(default_factory=list[int])
    differences: list[Difference] = field(default_factory=list[Difference])
    unchecked: list[str] = field(default_factory=list[str])
    digests: dict[int, str] = field(default_factory=dict[int, str])
    inner: str = ""  # what `diloco verify --inner` found (audit/inner.py)

    @property
    def good(self) -> bool:
        return not self.differences and bool(self.thetas)

    def to_dict(self) -> dict[str, Any]:
        return {"good": self.good, **asdict(self)}

    def lines(self) -> list[str]:
        """Return the verdict as lines of text."""
        reach = f"{self.thetas[0]} to {self.thetas[-1]}" if self.thetas else "of no step"
        means = f"{len(self.from_deltas)} means from their deltas, {len(self.as_announced)} as announced"
        found = [f"differs: {one.in_words()}" for one in self.differences]
        equal = "everything that was compared is equal" if self.thetas else "nothing could be compared"
        last = f"{len(found)} differences" if found else equal
        inner = [self.inner] if self.inner else []
        return [
            f"θ computed again: {reach} ({means})",
            *inner,
            *found,
            *(f"not checked: {u}" for u in self.unchecked),
            last,
        ]


def why_ineligible(rules: Rules, before: Commit | None, t: int, listed: Listed) -> str:
    """Return why commit t may not list this offer; "" if it may.   before: the commit before the offer's step."""
    late, rest = divmod(t - listed.step, rules.fragments)
    if rest:
        return f"is of step {listed.step}, which has another fragment"
    if late > rules.max_carry:
        return f"is of step {listed.step}: it is {late} syncs late, and may be {rules.max_carry}"
    if before is not None and listed.generation < (lowest := before.fence.get(listed.slot, 0)):
        return f"is of generation {listed.generation}, and commit {before.t} lets {lowest} and later ones act"
    return ""


def commit_flaws(commit: Commit) -> Iterator[str]:
    """Yield what no replica that closes a step writes."""
    if list(commit.offers) != sorted(commit.offers, key=lambda o: (-o.step, o.slot)):
        yield "does not list fresh offers by slot, and then late ones by age and slot"
    for o in commit.offers:
        if commit.fence.get(o.slot, 0) < o.generation:
            yield f"lists {o.slot}-{o.generation} above its fence"
    if closer_of(commit) is None:
        yield f"names {commit.by!r} as its closer, which is no session"


def closer_of(commit: Commit) -> tuple[str, int] | None:
    slot, _, generation = commit.by.rpartition("-")
    number = generation.isascii() and generation.isdigit()
    return (slot, int(generation)) if number and layout.is_slot(slot) else None


def anchor_flaw(snapshot: Snapshot, after: Mapping[int, str | None]) -> str:
    """Return why `prev`, the only witness of the last commit's bytes, is wrong; "" if it is right or not known.

    after: step -> digest of the commit before it."""
    t = snapshot.t
    if t not in after or snapshot.prev == after[t]:
        return ""
    return f"names {snapshot.prev} before it, the chain has {after[t]}: it or commit {t - 1} was altered"


def file_flaws(store: Store, named: Iterable[Mapping[str, Mapping[str, str]]]) -> Iterator[tuple[str, str]]:
    """Yield the keys of files that have another SHA-256 than their record says, and the flaw."""
    for stored in (stored for files in named for stored in files.values() if stored["key"]):
        try:
            fetch_stored(store, stored)
        except RendezvousError as error:
            yield stored["key"], str(error)


class _LostMean(Exception):
    """The error for a step of which neither the deltas nor the mean can be read."""


def verify(run: Run, step: int | None = None) -> Verdict:
    """Recompute θ and compare.   step: only this one, from the snapshot before it; None: all.

    Raises ConfigError for a step whose blobs were deleted, or that is not taken yet.
    """
    return _Verification(run).check(step)


class _Verification:
    def __init__(self, run: Run) -> None:
        clock = SystemClock()
        self._run = run
        self._store = PatientStore(run.store, clock, 10.0)
        self._ahead = Ahead(self._store)
        self._kind = required_digest_kind(run.store)
        self._outer = run.config.outer
        self._record = model_record(run)
        self._reducer = Reducer(self._store, clock, no_emit, self._outer.rules, together=together_on(run.store))
        self._keeps_all = keep_bytes(keep_of(run)) is None
        self._chain: dict[int, Commit] = {}
        self._after: dict[int, str | None] = {0: None}  # step -> digest of the commit before it
        self._manifests: dict[int, Snapshot] = {}
        self._claims = set[tuple[str, int]]()  # sessions whose claims were looked for
        self._differed = False  # whether θ differed at the step before
        self._logged: dict[int, dict[str, str]] = {}
        self._left: dict[int, dict[str, str]] = {}
        self.found = Verdict(unchecked=[UNSEEN])

    def check(self, step: int | None) -> Verdict:
        self._logged, self._left = _read_logs(self._ahead), _read_leaves(self._store)
        head = self._head()
        if step is not None:
            self._refuse_step(step, head)
        first = 0 if step is None else self._snapshot_before(step)
        end = self._read_chain(first, head if step is None else min(step + 1, head))
        last = end if step is None else min(step, end)
        self._read_snapshots(first, last)
        if step is None:
            for key, flaw in file_flaws(self._store, [self._record.files, self._run.record.files]):
                self._differs(0, key, "", flaw)
            if self._record.hub:
                self.found.unchecked.append("the start model's files on the Hub")
        self._replay_all(last)
        return self.found

    def _head(self) -> int:
        """Return the first open step, or the first missing commit."""
        logged = [(t, f"{layout.LOGS}{session}") for t, said in self._logged.items() for session in said]
        head = next(t for t in count() if self._store.get(layout.commit_key(t)) is None)
        lost = lost_commit(self._store, head)
        if lost is None and logged and max(logged)[0] > head:
            lost = LostCommit(head, *max(logged))
        if lost is not None:
            self._differs(lost.step, layout.commit_key(lost.step), "", lost.in_words())
            self.found.unchecked.append(f"all after commit {lost.step}, which is missing")
        return head if lost is None else lost.step

    def _refuse_step(self, step: int, head: int) -> None:
        if not 0 <= step <= head:
            raise ConfigError(f"step {step} has not been taken: the run is at step {head}. Use --step {head} or less")
        refuse_gone(self._run, step)

    def _snapshot_before(self, step: int) -> int:
        reach = read_reach(self._store)
        return max((t for t in _snapshot_steps(self._store) if t < step and reach.covers_step(t)), default=0)

    def _differs(self, step: int, blob: str, slot: str, text: str) -> None:
        self.found.differences.append(Difference(step, blob, slot, text))

    def _gone(self, step: int, blob: str, slot: str = "") -> None:
        """Note a missing blob: an old one was deleted; in a run that keeps all, it is a difference."""
        if self._keeps_all:
            self._differs(step, blob, slot, "is gone, and this run keeps everything (fleet.keep)")
        else:
            self.found.unchecked.append(f"step {step}: {blob} is gone (collected, fleet.keep)")

    # ---------------------------------------------------------------- records

    def _read_chain(self, first: int, head: int) -> int:
        """Read and check the commits from `first` on. Return the first step whose commit is unreadable, or `head`."""
        chain = Chain(self._ahead, 2)
        listed = set[tuple[int, str]]()
        for start in range(first, head, STEPS_AT_ONCE):
            last = min(start + STEPS_AT_ONCE, head)
            end = self._read_commits(chain, start, last)
            commits = [self._chain[t] for t in range(start, end)]
            self._ahead.ask(layout.offer_key(o.step, o.slot, 0) for commit in commits for o in commit.offers)
            for commit in commits:
                self._check_commit(commit, listed)
            self._ahead.forget()
            if end < last:
                return end
        return head

    def _read_commits(self, chain: Chain, first: int, last: int) -> int:
        """Read the commits. Return the first step whose commit is unreadable, or `last`."""
        self._ahead.ask(map(layout.commit_key, range(first, last)))
        for t in range(first, last):
            try:
                commit = chain.read(t)
                assert commit is not None
            except RendezvousError as error:
                self._differs(t, layout.commit_key(t), "", str(error))
                self.found.unchecked.append(f"all after commit {t}, which cannot be followed")
                return t
            self._chain[t], self._after[t + 1] = commit, chain.commit_digest(t)
            if t == 0 and commit.prev is not None:
                self._differs(0, layout.commit_key(0), commit.by, f"names {commit.prev} before the first commit")
        return last

    def _check_commit(self, commit: Commit, listed: set[tuple[int, str]]) -> None:
        key = layout.commit_key(commit.t)
        try:
            refuse_misweighed(commit, self._outer.rules)
        except BadCommit as error:
            self._differs(commit.t, key, commit.by, str(error))
        if len(commit.fresh_offers) < commit.m:
            self._differs(commit.t, key, commit.by, f"has {len(commit.fresh_offers)} fresh offers, needs {commit.m}")
        for flaw in commit_flaws(commit):
            self._differs(commit.t, key, commit.by, flaw)
        self._check_claims(commit)
        for offer in commit.offers:
            if (offer.step, offer.slot) in listed:
                self._differs(commit.t, key, offer.slot, f"counts its work for step {offer.step} again")
            listed.add((offer.step, offer.slot))
            self._check_offer(commit, offer)

    def _check_claims(self, commit: Commit) -> None:
        """Check that the sessions that the commit names have claimed their slots; each session once."""
        closer = closer_of(commit)
        named = {*commit.fence.items(), *([closer] if closer else [])} - self._claims
        for slot, generation in sorted(named):
            if self._store.get(layout.claim_key(slot, generation)) is None:
                text = f"names {slot}-{generation}, and no session claimed that"
                self._differs(commit.t, layout.commit_key(commit.t), slot, text)
        self._claims |= named

    def _check_offer(self, commit: Commit, listed: Listed) -> None:
        """Check that the offer's record is as the commit lists it, and that it began from its step's base."""
        key, offer = _find_offer(self._ahead, listed)
        if offer is None:
            self._differs(commit.t, key, listed.slot, "is listed, and there is no such offer")
            return
        names = set(vars(offer)) & set(vars(listed))
        wrong = sorted(name for name in names if getattr(offer, name) != getattr(listed, name))
        if wrong:
            self._differs(commit.t, key, listed.slot, f"is listed with another {', '.join(wrong)}")
        of_its_step = self._chain.get(listed.step)
        if of_its_step is not None and offer.base != of_its_step.base:
            self._differs(commit.t, key, listed.slot, f"began from {offer.base}, the chain from {of_its_step.base}")
        if flaw := why_ineligible(self._outer.rules, self._chain.get(listed.step - 1), commit.t, listed):
            self._differs(commit.t, key, listed.slot, flaw)

    # ---------------------------------------------------------------- snapshots

    def _read_snapshots(self, first: int, last: int) -> None:
        listed = _snapshot_steps(self._store)  # may lag; commits also name snapshots, and snapshot 0 exists
        for t in sorted({0, *listed, *(commit.snapshot for commit in self._chain.values())}):
            if not first <= t <= last:
                continue
            found = snapshots.read(self._store, t)
            if found is None and t not in listed:
                continue
            if found is not None and (flaw := anchor_flaw(found, self._after)):
                self._differs(t, layout.snapshot_key(t), "", flaw)
            if found is None:
                self._differs(t, layout.snapshot_key(t), "", "is not a manifest of a snapshot")
            elif not found.blob:
                self._manifests[t] = found
            elif blob_stands(self._store, found.blob, found.size):
                self._manifests[t] = found
                self._check_bytes(found)
            else:
                self._miss(t, found.blob)

    def _check_bytes(self, snapshot: Snapshot) -> None:
        said = list[str]()

        def hear(event: str, **fields: Any) -> None:
            said.append(f"{fields['found']}, announced was {fields['announced']}")

        if snapshots.load(self._store, snapshot, hear, {}) is None:
            self._differs(snapshot.t, snapshot.blob, "", said[-1])

    def _miss(self, step: int, blob: str, slot: str = "") -> None:
        """Note whether a missing blob is too short or gone."""
        if blob_stands(self._store, blob, 1):
            self._differs(step, blob, slot, "is shorter than announced")
        else:
            self._gone(step, blob, slot)

    # ---------------------------------------------------------------- θ

    def _replay_all(self, last: int) -> None:
        """Replay from the oldest snapshot on; after a lost mean, from the next snapshot."""
        after = -1
        while (start := min((t for t in self._manifests if t > after), default=None)) is not None:
            if start > after + 1:
                self._note_lost(after + 1, start - 1)
            after = self._replay_from(start, last)
        if after < last:
            self._note_lost(after + 1, last)

    def _note_lost(self, first: int, last: int) -> None:
        self.found.unchecked.append(f"θ of steps {first} to {last}: nothing is left to compute it from")

    def _replay_from(self, start: int, last: int) -> int:
        """Replay. Return the last step whose θ is known now; `start` if its snapshot cannot be used."""
        state = empty_state(self._record, self._outer)
        fragments = self._outer.rules.fragments
        replay = StateReplay(
            self._store, Chain(self._store, 2), state, fragments, self._mean,
            emit=no_emit, theta_0=lambda: start_arrays(self._run, self._record), mends=False,
        )  # fmt: skip
        if not replay.load_snapshot(upto=start) or replay.step != start:
            self.found.unchecked.append(f"θ of step {start}: its snapshot cannot be used")
            self._manifests.pop(start)
            return start
        try:
            self._check_state(start, replay.digests.base, state)
            for _ in replay.commits(last):
                self._check_state(replay.step, replay.digests.base, state)
        except _LostMean as error:
            self.found.unchecked.append(f"step {replay.step}: {error}")
        return replay.step

    def _mean(self, commit: Commit, out: np.ndarray) -> None:
        """Write the mean into `out`: from its deltas, compared with the published mean; else the published mean.

        Raises _LostMean if neither can be read."""
        try:
            for part, body in self._reducer.parts.make_all(commit, out):
                self._compare_announced(commit, part, body)
            self.found.from_deltas.append(commit.t)
            return
        except Corrupt:
            self._name_bad_bodies(commit, out.size)
        trouble = self._reducer.parts.read_announced(commit, out)
        if trouble is not None:
            self._name_bad_means(commit)
            raise _LostMean(f"neither its deltas nor its mean can be read: {trouble}")
        self.found.as_announced.append(commit.t)

    def _compare_announced(self, commit: Commit, part: int, body: np.ndarray) -> None:
        taken, record = self._reducer.announcements.find(commit.t, part)
        if record is None:
            if taken:
                self._differs(commit.t, layout.mean_key(commit.t, part), "", "is not an announcement of a mean")
            return
        if not has_digest(body.data, record.digest, self._kind):
            self._differs(commit.t, record.blob, "", "was announced with another digest than its deltas' mean has")
        self._check_mean_blob(commit.t, record.blob, record.size, record.digest)

    def _check_mean_blob(self, t: int, blob: str, size: int, announced: str) -> None:
        if not blob_stands(self._store, blob, size):  # before memory is taken: the record may lie
            return self._miss(t, blob)
        stored = np.empty(size, np.uint8)
        if not self._store.get_into(blob, stored.data):
            self._miss(t, blob)
        elif not has_digest(stored.data, announced, self._kind):
            self._differs(t, blob, "", f"the stored mean has another digest than the announced {announced}")

    def _name_bad_means(self, commit: Commit) -> None:
        for part in range(max(1, len(commit.owners))):
            _, record = self._reducer.announcements.find(commit.t, part)
            if record is not None:
                self._check_mean_blob(commit.t, record.blob, record.size, record.digest)

    def _name_bad_bodies(self, commit: Commit, elements: int) -> None:
        """Note which listed deltas are gone, and which have other bytes than their records say."""
        bodies = self._reducer.bodies
        for listed in commit.offers:
            if bodies.record_flaw(listed, elements):
                continue  # no reader counts it
            if not blob_stands(self._store, listed.blob, listed.size):
                self._miss(commit.t, listed.blob, listed.slot)
            elif isinstance(why := bodies.read_body(listed, bodies.grid(elements), None), str):
                self._differs(commit.t, listed.blob, listed.slot, why)

    def _check_state(self, t: int, base: str, state: OuterState) -> None:
        """Compare θ_t and its momentum with all records of them."""
        self.found.thetas.append(t)
        self.found.digests[t] = base
        wrong = list(self._other_claims(t, base))
        for blob, slot, text in [] if self._differed else wrong:
            self._differs(t, blob, slot, f"{text}, computed is {base}")
        self._differed = bool(wrong)
        if t == 0 and self._record.theta and not self._run.record.parent.url:  # a fork's first θ is another
            theta = (as_bytes(part.numpy()) for part in state.thetas)
            if not has_digest_of(theta, self._record.theta, self._kind):
                self._differs(0, layout.MODEL_MANIFEST, "", f"says that θ_0 has the digest {self._record.theta}")
        snapshot = self._manifests.get(t)
        if snapshot is not None and snapshot.blob and t and not wrong:
            body = TensorFile(all_arrays(state, self._outer.rules.fragments, t))
            if not has_digest_of(body, snapshot.digest, self._kind):
                self._differs(t, snapshot.blob, "", "has other values than were computed")

    def _other_claims(self, t: int, base: str) -> Iterator[tuple[str, str, str]]:
        commit, snapshot = self._chain.get(t), self._manifests.get(t)
        if commit is not None and commit.base != base:
            yield layout.commit_key(t), commit.by, f"started from {commit.base}"
        if snapshot is not None and snapshot.base != base:
            yield layout.snapshot_key(t), "", f"has {snapshot.base}"
        for key, left in self._left.get(t, {}).items():
            if left != base:
                yield key, "", f"left with {left}"
        for session, theta in self._logged.get(t, {}).items():
            if theta != base:
                yield f"{layout.LOGS}{session}", session, f"held {theta} after commit {t - 1}"


def _find_offer(store: Readable, listed: Listed) -> tuple[str, Offer | None]:
    attempt = 0
    while (body := store.get(key := layout.offer_key(listed.step, listed.slot, attempt))) is not None:
        attempt += 1
        try:
            offer = Offer.decode(body)
        except WireError:
            continue
        if offer.nonce == listed.nonce:
            return key, offer
    return layout.offer_key(listed.step, listed.slot, max(0, attempt - 1)), None


def _read_logs(ahead: Ahead) -> dict[int, dict[str, str]]:
    """Return step -> session -> the digest of θ that it logged before that step.  Ignore lines without one."""
    said: dict[int, dict[str, str]] = {}
    owners = {key: owner for key in ahead.list(layout.LOGS) if (owner := layout.log_owner(key))}
    keys = [key for key in owners if not layout.is_rollouts(key)]
    for place, key in enumerate(keys):
        if place % LOGS_AT_ONCE == 0:
            ahead.ask(keys[place : place + LOGS_AT_ONCE])
        for event in read_log(ahead, key).events:
            step, theta = event.get("step"), event.get("theta")
            if event["event"] == "step" and isinstance(step, int) and isinstance(theta, str):
                said.setdefault(step + 1, {})["{}-{}".format(*owners[key][:2])] = theta
    return said


def _read_leaves(store: Readable) -> dict[int, dict[str, str]]:
    """Return step -> key -> the digest of θ with which a session left."""
    found: dict[int, dict[str, str]] = {}
    for key in store.list(layout.LEAVES):
        leave = decode_or_none(Leave, store.get(key))
        if leave is not None and key == layout.leave_key(leave.slot, leave.generation):
            found.setdefault(leave.step, {})[key] = leave.base
    return found


def _snapshot_steps(store: Readable) -> list[int]:
    return snapshots.steps_of(store.list(layout.SNAPSHOTS))
