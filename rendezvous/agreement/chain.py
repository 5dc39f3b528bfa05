"""The chain of commits: write-once records, linked by digests and read in order.

    commit 0 ◀─prev─ commit 1 ◀─prev─ commit 2 ◀─ …        head = first step without a commit

A reader goes from t to t+1 by GET and never by LIST, so it cannot skip a gap.

The store may lose commits while a replica runs: it is emptied, another store is mounted in its place, or a disk is
gone. So a replica that is about to write commit t reads its *anchors*, the commits t−1 and t−2, again and compares
their digests with the digests that it remembers.  The store can also be replaced after the replica has read the anchors
and before it writes commit t.  Then the next closer finds commit t−1 without t−2; that is why there are two anchors.
"""

from rendezvous import layout
from rendezvous.errors import ChainBroken, RecordsLost
from rendezvous.records.digests import SHA256, digest
from rendezvous.records.records import Commit, WireError, decode_or_none
from rendezvous.store import Readable

ANCHORS = 2  # commits before the open step that a closer reads again


class Chain:
    """The newest `window` commits that this replica has read.  Each was verified when it was read."""

    def __init__(self, store: Readable, window: int) -> None:
        self._store = store
        self._window = window
        self._commits: dict[int, Commit] = {}
        self._digests: dict[int, str] = {}

    def forget_commits(self) -> None:
        self._commits.clear()
        self._digests.clear()

    def read(self, t: int) -> Commit | None:
        """Return commit t, or None while the step is open."""
        if t not in self._commits:
            body = self._store.get(layout.commit_key(t))
            if body is None:
                return None
            self.accept_commit(t, body)
        return self._commits[t]

    def read_before(self, t: int) -> None:
        """Read the window of commits before t.   Raise ChainBroken if one is missing."""
        for u in range(max(0, t - self._window), t):
            if self.read(u) is None:
                raise ChainBroken(
                    f"commit {u} is missing, though step {t} was reached. No run deletes commits: the bucket "
                    "was edited, or lost objects; restore it from a backup"
                )

    def refuse_gap(self, t: int) -> None:
        """Raise ChainBroken if commit t existed and is lost: it must not be written again."""
        refuse_gap(self._store, t)

    def anchors(self, t: int) -> dict[str, str]:
        """Return the commits that must still exist when commit t is written: key -> digest of the bytes read before."""
        return {layout.commit_key(u): self._digests[u] for u in range(t - ANCHORS, t) if u in self._digests}

    def accept_commit(self, t: int, body: bytes) -> Commit:
        """Check that `body` follows the known commit t−1, and keep it as commit t."""
        commit = decode_commit(self._store.url, t, body)
        before = self._digests.get(t - 1)
        if commit.t != t or (before is not None and commit.prev != before):
            raise ChainBroken(
                f"commit {t} does not follow commit {t - 1} ({before}): it names step {commit.t} and {commit.prev}. "
                "Two runs share this URL, or the bucket was edited; an earlier step can still be exported"
            )
        known = self._commits.get(t - 1)
        for slot, generation in known.fence.items() if known else ():
            if commit.fence.get(slot, 0) < generation:
                raise ChainBroken(f"commit {t} lowers the fence of {slot} below generation {generation}")
        self._commits[t] = commit
        self._digests[t] = digest(body, SHA256)
        for old in [u for u in self._commits if u < t - self._window]:
            del self._commits[old], self._digests[old]
        return commit

    def known_commit(self, t: int) -> Commit | None:
        return self._commits.get(t)

    def commit_digest(self, t: int) -> str | None:
        """Return the digest of commit t's bytes; None if this replica does not know the commit, as for t = −1."""
        return self._digests.get(t)

    def fence_before(self, t: int) -> dict[str, int]:
        """Return slot -> the lowest generation that may offer in step t.  Commit t−1 must have been read."""
        return self._commits[t - 1].fence if t else {}

    def recent_commits(self, t: int, count: int) -> list[Commit]:
        """Return the commits among t−1, …, t−count that this replica knows, the newest first."""
        return [c for u in range(t - 1, t - 1 - count, -1) if (c := self._commits.get(u)) is not None]


def decode_commit(url: str, t: int, body: bytes) -> Commit:
    """Decode the commit of step t.   url: of the run.   Raise WireError, which names the object, if it is damaged."""
    try:
        return Commit.decode(body)
    except WireError as error:
        raise WireError(
            f"{url}/{layout.commit_key(t)}: {error}. No other commit replaces it. Restore the "
            f"object from a backup, or delete it if step {t} was never taken, and run the same command again"
        ) from error


def lost_record(url: str, key: str, step: int, how: str = "is gone") -> RecordsLost:
    """Return the error for a record that this process has read and the store has lost.   step: the open step."""
    return RecordsLost(
        f"{url}/{key} {how}, though this run has reached step {step}: the store was emptied, swapped for another, or "
        "overwrites (`diloco doctor` tests this). Nothing was committed there. Bring the run's objects back (mount, "
        "backup, a bucket's versions) and run the same command again; if they were deleted, the run has ended"
    )


def refuse_gap(store: Readable, t: int) -> None:
    """Raise ChainBroken if commit t + 1 exists and commit t, which the caller did not find, is still missing.

    Both may have been written since the caller's read.  Commit t is always written before t + 1, so t is read last
    here.  An object that is not a commit proves nothing, because any writer of the bucket may have put it there;
    replicas will stop when they reach it.
    """
    later = decode_or_none(Commit, store.get(layout.commit_key(t + 1)))
    if later is not None and later.t == t + 1 and store.get(layout.commit_key(t)) is None:
        raise ChainBroken(
            f"commit {t} is missing, though commit {t + 1} is there. No run deletes commits: the bucket "
            "was edited, or lost objects; restore it from a backup. Nothing was written"
        )


def first_open_step(store: Readable, known: int = 0) -> int:
    """Return the first step without a commit.   known: all steps before it are known to be committed."""
    while store.get(layout.commit_key(known)) is not None:
        known += 1
    refuse_gap(store, known)
    return known
