"""Commits that are lost: the records that were written after them still exist.

    snapshot t, offer for step t, leave record at step t, commit t − 1       each was written after commit t − 1
    commits   ● ● ○ ● ●                                                      so ○ is lost
              0   └── the first one missing

A commit is written before every record that names it, and no run deletes commits.  So records are listed first and
commits are read last: a run that continues meanwhile loses nothing here.

Not promised: a loss after which no record was written, or which LIST does not show (it may lag).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from diloco.run.config import BUCKET
from diloco.run.record import decode_run
from rendezvous import layout
from rendezvous.agreement.chain import Chain
from rendezvous.errors import ChainBroken, Forged
from rendezvous.records.records import Commit, Leave, Offer, Snapshot, decode_or_none
from rendezvous.store import Readable

if TYPE_CHECKING:
    from diloco.runlog.reader import Report

R = TypeVar("R", Snapshot, Offer, Commit, Leave)
FOLDERS = (layout.SNAPSHOTS, layout.LEAVES, layout.STEPS)


@dataclass(frozen=True)
class LostCommit:
    """The first missing commit.   reached: the step that the record `witness` names."""

    step: int
    reached: int
    witness: str

    def in_words(self) -> str:
        return (
            f"commit {self.step} is missing, though {self.witness} shows step {self.reached} reached. No run deletes "
            "commits: the bucket was edited, or lost objects; restore it from a backup. Or that record is false: "
            "delete it if no replica of this run wrote it"
        )


def lost_commit(store: Readable, head: int = 0, folders: Iterable[str] = FOLDERS) -> LostCommit | None:
    """Return the first lost commit; None if no commit is lost.   A run over a lighthouse has no commits to lose.

    head: commits below it were read, now or by an earlier look; if `folders` has all of steps/, they are checked, too.
    """
    keys = [key for folder in folders for key in store.list(folder)]
    listed = {layout.commit_step(key) for key in keys if key.endswith("/commit.json") and _step_of(key) > 0}
    known = listed if layout.STEPS in folders else range(head)
    reached, witness = newest_witness(store, keys, 0 if layout.STEPS in folders else head)
    missing = (t for t in range(reached) if t not in known and store.get(layout.commit_key(t)) is None)
    lost = next((LostCommit(t, reached, witness) for t in missing), None)
    return lost if lost is not None and writes_commits(store) else None


def refuse_lost(store: Readable, head: int, folders: Iterable[str] = ()) -> None:
    """Raise ChainBroken if a record shows that the run has passed `head`, the first step without a commit.

    folders: list these; by default, those with few objects."""
    folders = folders or (layout.SNAPSHOTS, layout.LEAVES, layout.offers_prefix(head + 1))
    if (lost := lost_commit(store, head, folders)) is not None:
        raise ChainBroken(lost.in_words())


def writes_commits(store: Readable) -> bool:
    """Whether the run's outer steps are commits, and not a lighthouse's."""
    body = store.get(layout.RUN)
    return body is None or is_in_bucket(decode_run(store.url, body).config)


def is_in_bucket(config: Mapping[str, Any]) -> bool:
    """Whether replicas of a run with these settings average through the bucket."""
    return config.get("rendezvous", BUCKET) == BUCKET


def newest_witness(store: Readable, keys: Iterable[str], head: int) -> tuple[int, str]:
    """Return the highest step that a record under `keys` shows as reached, and its key; (head, "") if none is higher.

    An object that is not the record of its key is skipped: any writer may have put it there.
    """
    found = max(((_leave_step(store, key), key) for key in keys if key.startswith(layout.LEAVES)), default=(0, ""))
    named = sorted(((step, key) for key in keys if (step := _step_of(key)) > max(head, found[0])), reverse=True)
    found = next(((step, key) for step, key in named if _is_record(store, key, step)), found)
    return found if found[0] > head else (head, "")


def refuse_broken_chain(store: Readable) -> None:
    """Raise ChainBroken unless every commit up to the newest exists and follows the commit before it."""
    chain, t = Chain(store, 2), 0
    while chain.read(t) is not None:
        t += 1
    if (lost := lost_commit(store, t)) is not None:
        raise ChainBroken(f"{lost.in_words()}. Nothing was deleted")


def note_chain_damage(report: "Report", store: Readable, folders: Iterable[str] | None = None) -> None:
    """Write into `report.damage` which commit is lost or altered.

    folders: list these. None: to be quick, list two, and only if a heartbeat or a log names a step above the head."""
    head = max(len(report.steps), report.taken) if is_in_bucket(report.config) else report.head
    told = [b.step for b in report.beats.values()] + [e["step"] + 1 for e in report.of_kind("step")]
    cheap = (layout.SNAPSHOTS, layout.offers_prefix(head + 1)) if max(told, default=0) > head else ()
    if not report.damage and (lost := lost_commit(store, head, folders or cheap)) is not None:
        report.damage = lost.in_words()
    odd = next((step.t for step in report.steps if not step.linked), None)
    if not report.damage and odd is not None:
        report.damage = (
            f"commit {odd} does not follow commit {odd - 1}: one of the two was altered, or is another run's"
        )


def _step_of(key: str) -> int:
    """Return the step that a key of a snapshot, an offer or a commit shows as reached; -1 for other keys."""
    if (step := layout.snapshot_step(key)) is not None:
        return step
    parts = key.split("/")
    if parts[0] != "steps" or len(parts) < 3 or not (parts[1].isascii() and parts[1].isdigit()):
        return -1
    step = int(parts[1])
    return step + 1 if key == layout.commit_key(step) else step if key.startswith(layout.offers_prefix(step)) else -1


def _is_record(store: Readable, key: str, step: int) -> bool:
    if key.endswith("/commit.json"):
        commit = _read(store, Commit, key)
        return commit is not None and commit.t == step - 1
    if key.startswith(layout.SNAPSHOTS):
        snapshot = _read(store, Snapshot, key)
        return snapshot is not None and snapshot.t == step
    offer = _read(store, Offer, key)
    return offer is not None and offer.step == step


def _leave_step(store: Readable, key: str) -> int:
    record = _read(store, Leave, key)
    return record.step if record is not None and key == layout.leave_key(record.slot, record.generation) else 0


def _read(store: Readable, kind: type[R], key: str) -> R | None:
    try:
        return decode_or_none(kind, store.get(key))
    except Forged:
        return None
