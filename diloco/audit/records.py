"""Check the records of a run: the chain of commits, claims, offers and snapshots.

    commit t ──▶ follows commit t - 1 · weights · order · fences · its closer's claim
       └── each listed offer: as its record says, from its step's base, in time, counted once
    snapshot s ──▶ its bytes have its digest; `prev` is the commit before it

A lost newest commit is found, too: snapshots, offers, leave records and logs name the reached step (runlog/reached.py).
Nothing is computed from a blob here; verify.py replays θ.

Not promised: that an edited record is found if it has no tag and nothing else names its content.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from diloco.audit.verdict import Findings
from diloco.model.fetch import fetch_stored
from diloco.process.journal import read_log
from diloco.runlog.reached import LostCommit, lost_commit, writes_commits
from rendezvous import layout
from rendezvous.agreement.chain import Chain
from rendezvous.agreement.rules import Rules
from rendezvous.errors import BadCommit, RendezvousError
from rendezvous.keeping.garbage import blob_stands
from rendezvous.means.reduce import refuse_misweighed
from rendezvous.records.records import Commit, Leave, Listed, Offer, Snapshot, WireError, decode_or_none
from rendezvous.snapshots import record as snapshots
from rendezvous.store import Readable, Store
from rendezvous.stores.ahead import Ahead

STEPS_AT_ONCE, LOGS_AT_ONCE = 100, 16  # so many steps, and logs, are requested together at most


class RecordCheck:
    """The check of one run's records.

    chain: step -> its commit.   manifests: step -> its snapshot.   logged: step -> session -> the digest of θ that the
    session logged.   left: step -> key of a leave record -> the digest of θ in the record."""

    def __init__(self, store: Store, rules: Rules, found: Findings) -> None:
        self._store = store
        self._ahead = Ahead(store)
        self._rules = rules
        self._found = found
        self.chain: dict[int, Commit] = {}
        self.manifests: dict[int, Snapshot] = {}
        self.logged, self.left = _read_logs(self._ahead), _read_leaves(store)
        self._after: dict[int, str | None] = {0: None}  # step -> digest of the commit before it
        self._claims = set[tuple[str, int]]()  # sessions whose claims were requested

    def head(self) -> int:
        """Return the first open step, or the first missing commit."""
        logged = [(t, f"{layout.LOGS}{session}") for t, said in self.logged.items() for session in said]
        head = next(t for t in count() if self._store.get(layout.commit_key(t)) is None)
        if not writes_commits(self._store):
            self._found.not_checked("the outer steps: replicas average over a lighthouse, which records none")
            return head
        lost = lost_commit(self._store, head)
        if lost is None and logged and max(logged)[0] > head:
            lost = LostCommit(head, *max(logged))
        if lost is not None:
            self._found.differs(lost.step, layout.commit_key(lost.step), "", lost.in_words())
            self._found.not_checked(f"all after commit {lost.step}, which is missing")
        return head if lost is None else lost.step

    def check(self, first: int, head: int) -> int:
        """Read and check the commits from `first` on. Return the first step whose commit is unreadable, or `head`."""
        chain = Chain(self._ahead, 2)
        listed = set[tuple[int, str]]()
        for start in range(first, head, STEPS_AT_ONCE):
            last = min(start + STEPS_AT_ONCE, head)
            end = self._read_commits(chain, start, last)
            commits = [self.chain[t] for t in range(start, end)]
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
                self._found.differs(t, layout.commit_key(t), "", str(error))
                self._found.not_checked(f"all after commit {t}, which cannot be followed")
                return t
            self.chain[t], self._after[t + 1] = commit, chain.commit_digest(t)
            if t == 0 and commit.prev is not None:
                self._found.differs(0, layout.commit_key(0), commit.by, f"names {commit.prev} before the first commit")
        return last

    def _check_commit(self, commit: Commit, listed: set[tuple[int, str]]) -> None:
        key = layout.commit_key(commit.t)
        try:
            refuse_misweighed(commit, self._rules)
        except BadCommit as error:
            self._found.differs(commit.t, key, commit.by, str(error))
        for flaw in commit_flaws(commit):
            self._found.differs(commit.t, key, commit.by, flaw)
        self._check_claims(commit)
        for offer in commit.offers:
            if (offer.step, offer.slot) in listed:
                self._found.differs(commit.t, key, offer.slot, f"counts its work for step {offer.step} again")
            listed.add((offer.step, offer.slot))
            self._check_offer(commit, offer)

    def _check_claims(self, commit: Commit) -> None:
        """Check that the sessions that the commit names have claimed their slots; each session once."""
        closer = closer_of(commit)
        named = {*commit.fence.items(), *([closer] if closer else [])} - self._claims
        for slot, generation in sorted(named):
            if self._store.get(layout.claim_key(slot, generation)) is None:
                text = f"names {slot}-{generation}, and no session claimed that"
                self._found.differs(commit.t, layout.commit_key(commit.t), slot, text)
        self._claims |= named

    def _check_offer(self, commit: Commit, listed: Listed) -> None:
        """Check that the offer's record is as the commit lists it, and that it began from its step's base."""
        key, offer = _find_offer(self._ahead, listed)
        if offer is None:
            self._found.differs(commit.t, key, listed.slot, "is listed, and there is no such offer")
            return
        names = set(vars(offer)) & set(vars(listed))
        wrong = sorted(name for name in names if getattr(offer, name) != getattr(listed, name))
        if wrong:
            self._found.differs(commit.t, key, listed.slot, f"is listed with another {', '.join(wrong)}")
        of_its_step = self.chain.get(listed.step)
        if of_its_step is not None and offer.base != of_its_step.base:
            text = f"began from {offer.base}, the chain from {of_its_step.base}"
            self._found.differs(commit.t, key, listed.slot, text)
        if flaw := why_ineligible(self._rules, self.chain.get(listed.step - 1), commit.t, listed):
            self._found.differs(commit.t, key, listed.slot, flaw)

    def check_snapshots(self, first: int, last: int) -> None:
        listed = snapshot_steps(self._store)  # may lag; commits also name snapshots, and snapshot 0 exists
        for t in sorted({0, *listed, *(commit.snapshot for commit in self.chain.values())}):
            if not first <= t <= last:
                continue
            found = snapshots.read(self._store, t)
            if found is None and t not in listed:
                continue
            if found is not None and (flaw := anchor_flaw(found, self._after)):
                self._found.differs(t, layout.snapshot_key(t), "", flaw)
            if found is None:
                self._found.differs(t, layout.snapshot_key(t), "", "is not a manifest of a snapshot")
            elif not found.blob:
                self.manifests[t] = found
            elif blob_stands(self._store, found.blob, found.size):
                self.manifests[t] = found
                self._check_bytes(found)
            else:
                self._found.missing(t, found.blob)

    def _check_bytes(self, snapshot: Snapshot) -> None:
        said = list[str]()

        def hear(event: str, **fields: Any) -> None:
            said.append(f"{fields['found']}, announced was {fields['announced']}")

        if snapshots.load(self._store, snapshot, hear, {}) is None:
            self._found.differs(snapshot.t, snapshot.blob, "", said[-1])


def why_ineligible(rules: Rules, before: Commit | None, t: int, listed: Listed) -> str:
    """Return why commit t may not list this offer; "" if it may.   before: the commit before the offer's step."""
    late, rest = divmod(t - listed.step, rules.fragments)
    if rest:
        return f"is of step {listed.step}, which has another fragment"
    if late > rules.max_carry:
        return f"is of step {listed.step}: it is {late} syncs late, and at most {rules.max_carry} are allowed"
    if before is not None and listed.generation < (lowest := before.fence.get(listed.slot, 0)):
        return f"is of generation {listed.generation}, and commit {before.t} fences all before {lowest}"
    return ""


def commit_flaws(commit: Commit) -> Iterator[str]:
    """Yield the flaws of a commit that no replica could have written."""
    if len(commit.fresh_offers) < commit.m:
        yield f"has {len(commit.fresh_offers)} fresh offers and needs {commit.m}"
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
    return f"names {snapshot.prev} before it, the chain has {after[t]}: this snapshot or commit {t - 1} was altered"


def file_flaws(store: Store, named: Iterable[Mapping[str, Mapping[str, str]]]) -> Iterator[tuple[str, str]]:
    """Yield (key, flaw) of each file that cannot be read, or has another SHA-256 than its record says."""
    for stored in (stored for files in named for stored in files.values() if stored["key"]):
        try:
            fetch_stored(store, stored)
        except RendezvousError as error:
            yield stored["key"], str(error)


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
    """Return step -> session -> the digest that the session logged of θ_step.  Ignore lines without a digest."""
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


def snapshot_steps(store: Readable) -> list[int]:
    return snapshots.steps_of(store.list(layout.SNAPSHOTS))
