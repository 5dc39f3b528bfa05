"""The log of commits: write-once, linked by digests, read one after the other.

    commit 0 ◀─prev─ commit 1 ◀─prev─ commit 2 ◀─ …        head = first step without a commit

A reader only ever goes from t to t+1, so a gap cannot be skipped; LIST is never believed.

A closer remembers commits that its store may have lost: emptied, swapped for another, or a folder whose disk is gone.
Before it writes commit t it reads its *anchors* t−1 and t−2 and compares their digests with those it remembers.  One
would do, unless the store is swapped between that read and the write: then the next closer finds t−1 without t−2.
"""

from rendezvous import layout
from rendezvous.errors import ChainBroken, RecordsLost
from rendezvous.records.digests import SHA256, digest
from rendezvous.records.records import Commit, WireError
from rendezvous.store import Readable

ANCHORS = 2  # commits before the open step that a closer reads again


class Chain:
    """The newest `window` commits that this replica has read, verified as they came."""

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
        """Read the window of commits before t, all of which must be there."""
        for u in range(max(0, t - self._window), t):
            if self.read(u) is None:
                raise ChainBroken(
                    f"commit {u} is missing, though step {t} was reached. Registers are never deleted: the bucket was "
                    "edited, or lost objects; restore it from a backup"
                )

    def refuse_gap(self, t: int) -> None:
        """Raise ChainBroken if step t only looks open: a commit that vanished must not be written anew."""
        refuse_gap(self._store, t)

    def anchors(self, t: int) -> dict[str, str]:
        """The registers that must stand before commit t is written: key -> digest of the body as it was read."""
        return {layout.commit_key(u): self._digests[u] for u in range(t - ANCHORS, t) if u in self._digests}

    def accept_commit(self, t: int, body: bytes) -> Commit:
        """Take `body` as commit t after checking that it follows the known commit before it."""
        commit = self._decode_commit(t, body)
        before = self._digests.get(t - 1)
        if commit.t != t or (before is not None and commit.prev != before):
            raise ChainBroken(
                f"commit {t} does not follow commit {t - 1}: it names {commit.prev} before it, we read {before}. "
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

    def _decode_commit(self, t: int, body: bytes) -> Commit:
        try:
            return Commit.decode(body)
        except WireError as error:
            raise WireError(
                f"{self._store.url}/{layout.commit_key(t)}: {error}. Nothing is decided in its place. Restore the "
                f"object from a backup, or delete it if step {t} was never taken, and run the same command again"
            ) from error

    def known_commit(self, t: int) -> Commit | None:
        return self._commits.get(t)

    def commit_digest(self, t: int) -> str | None:
        """Digest of commit t's bytes; None before the first step."""
        return self._digests.get(t)

    def fence_before(self, t: int) -> dict[str, int]:
        """The fence that step t's offers must respect: the one of commit t−1, which must have been read."""
        return self._commits[t - 1].fence if t else {}

    def recent_commits(self, t: int, count: int) -> list[Commit]:
        """Known commits t−1, …, t−count."""
        return [c for u in range(t - 1, t - 1 - count, -1) if (c := self._commits.get(u)) is not None]


def lost_record(url: str, key: str, step: int, how: str = "is gone") -> RecordsLost:
    """The error for a record that this process has read and the store does not have any more.   step: the open one."""
    return RecordsLost(
        f"{url}/{key} {how}, though this run has reached step {step}: the store was emptied, or swapped for another. "
        "Nothing was committed there. Bring the run's objects back (mount, backup, a bucket's versions) and run the "
        "same command again; if they were deleted, the run has ended"
    )


def refuse_gap(store: Readable, t: int) -> None:
    """Raise ChainBroken if commit t + 1 is there and commit t, which the caller did not find, still is not.

    Both may have been written since the caller looked: t is always there before t + 1, so it is read last.  An
    object that is not a commit shows nothing: any writer may have put it there, and step t + 1 will end at it.
    """
    if _is_commit(store.get(layout.commit_key(t + 1)), t + 1) and store.get(layout.commit_key(t)) is None:
        raise ChainBroken(
            f"commit {t} is missing, though commit {t + 1} is there. Registers are never deleted: the bucket was "
            "edited, or lost objects; restore it from a backup. Nothing was written"
        )


def _is_commit(body: bytes | None, t: int) -> bool:
    try:
        return body is not None and Commit.decode(body).t == t
    except WireError:
        return False


def first_open_step(store: Readable, known: int = 0) -> int:
    """The first step without a commit, by GETs from a step that is known to be decided (or 0) on."""
    while store.get(layout.commit_key(known)) is not None:
        known += 1
    refuse_gap(store, known)
    return known
