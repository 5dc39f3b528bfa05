r"""Sealed records, which only holders of the run key can write.  The key is only in the environment: DILOCO_RUN_KEY.

    replica ── record ──▶ SignedStore ── record + tag ──▶ bucket
    replica ◀── record ── SignedStore ◀── record + tag ── bucket
                 └─ a tag that is wrong:
                     claim, offer, leave, control, beat, log, weights, rollouts, verdict, reward ─▶ VOID: ignored
                     run, model, commit, mean, snapshot, and the first control ─▶ Forged: the replica ends
    replica ◀── blob ──── a sealed record has its SHA-256

    {"base":"…", …}   ─▶  {"base":"…", … ,"seal":"<tag>"}       tag = HMAC-SHA256(run key, run ‖ 0 ‖ key ‖ 0 ‖ record)
    {…}\n{…}\n (log)  ─▶  {…}\n{…}\n{"seal":"<tag>"}\n

`run` is the nonce in seal.json, the first object of a run with a run key; `key` is the record's own key.  So a genuine
record is not valid under another key: in another slot, step or run.  The rest of the engine gets the record without its
tag, and digests of commits are computed without it.  All replicas see the same bytes, and ignore the same records.

Not promised: secrecy, because records are plain text; availability, because a writer that may overwrite or delete
objects can stop the run.  Beats are overwritten, so such a writer can restore an old beat; it counts as silence.
"""

import hmac
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rendezvous import layout
from rendezvous.background import Emit, no_emit
from rendezvous.errors import Forged, WrongRun
from rendezvous.records.digests import SHA256
from rendezvous.records.records import Record, UnixTime, Word
from rendezvous.store import KEY, SEALED, VOID, Body, Buffer, Readable, Store

_FIELD = 64 + len(',"seal":""}')
_LINE = 64 + len('{"seal":""}\n')
_PASSED_OVER = {"claim", "offer", "leave", "control", "beat", "log", "weights", "rollouts", "verdict", "reward"}
LOST_SEAL = (
    "{url} holds a run under a run key whose seal.json is lost, so its records cannot be verified. Restore that object "
    "(from the bucket's versions, or a backup), and remove every rule that expires objects below this URL"
)


@dataclass(frozen=True)
class Seal(Record):
    """The record in seal.json, which says that the run's records are sealed.   nonce: the run's identity."""

    kind = "seal"
    nonce: Word
    at: UnixTime


def warn_on_stderr(event: str, **fields: Any) -> None:
    """Print the event to stderr.  A replica writes it to its journal instead."""
    print(f"warning: {event}: {', '.join(f'{k} {v}' for k, v in fields.items())}", file=sys.stderr, flush=True)


class VerifiedStore:
    """The records of a sealed run, each verified when it is read.   emit: called for records that are ignored."""

    is_sealed = True
    digests = SHA256  # kind of the blobs' digests: a writer must not be able to make another blob with the same digest

    def __init__(self, store: Readable, key: bytes, run: str, emit: Emit = warn_on_stderr) -> None:
        self.url = store.url
        self.emit = emit
        self._store = store
        self._key = key
        self._run = run
        self._reported: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)  # attributes that only some stores have: root, near

    def reading_through(self, store: Readable) -> "VerifiedStore":
        """Return a VerifiedStore of the same run that reads from `store`."""
        return VerifiedStore(store, self._key, self._run, self.emit)

    def without_warnings(self) -> "VerifiedStore":
        """Return a store of the same run that ignores forged records without a report; used before a journal exists."""
        return VerifiedStore(self._store, self._key, self._run, no_emit)

    def get(self, key: str) -> bytes | None:
        body = self._store.get(key)
        if body is None or (kind := layout.record_kind(key)) is None:
            return body
        record = verify_record(body, self._key, self._run, key)
        if record is not None:
            return record
        first = layout.control_key(0)  # never passed over: without it one replica would be a quorum
        if kind in _PASSED_OVER and key != first:
            if key not in self._reported:
                self._reported.add(key)
                self.emit("forged", record=kind, key=key, text="not written with this run's key; passed over")
            return VOID
        raise Forged(
            f"{self.url}/{key} was not written with this run's key, or was changed since. Nothing was done with it. "
            "Another program can write to this bucket: remove its right, restore the object from a backup (or "
            "delete it, if it never was one of the run's), and run the same command again"
        )

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        return self._store.get_into(key, out, start)

    def list(self, prefix: str) -> list[str]:
        return self._store.list(prefix)


class SignedStore(VerifiedStore):
    """A store that seals the records that it writes and verifies those that it reads."""

    def __init__(self, store: Store, key: bytes, run: str, emit: Emit = warn_on_stderr) -> None:
        super().__init__(store, key, run, emit)
        self._bucket = store

    def put(self, key: str, body: Body) -> None:
        signed = self._sign_if_record(key, body) if isinstance(body, Buffer) else body  # a Stream is a blob
        self._bucket.put(key, signed)

    def create(self, key: str, body: Buffer) -> None:
        self._bucket.create(key, self._sign_if_record(key, body))

    def delete(self, keys: Iterable[str]) -> None:
        self._bucket.delete(keys)

    def _sign_if_record(self, key: str, body: Buffer) -> Buffer:
        return body if layout.record_kind(key) is None else sign_record(bytes(body), self._key, self._run, key)


def sign_record(record: bytes, secret: bytes, run: str, key: str) -> bytes:
    """Return a record's bytes with the tag as the last field; a log gets the tag as one more line."""
    if record.endswith(b"\n"):
        return record + b'{"seal":"' + _record_tag(record, secret, run, key) + b'"}\n'
    return record[:-1] + b',"seal":"' + _record_tag(record, secret, run, key) + b'"}'


def verify_record(body: bytes, secret: bytes, run: str, key: str) -> bytes | None:
    """Return the record without its tag; None if the tag is missing, or belongs to another record, key or run."""
    record = body[:-_LINE] if body.endswith(b"\n") else body[:-_FIELD] + b"}"
    return record if hmac.compare_digest(body, sign_record(record, secret, run, key)) else None


def _record_tag(record: bytes, secret: bytes, run: str, key: str) -> bytes:
    return hmac.digest(secret, b"\0".join((run.encode(), key.encode(), record)), "sha256").hex().encode()


def sealed_store(store: Store, secret: bytes | None, stands: bytes | None) -> Store:
    """Return the store of a sealed run with this key.   Raise WrongRun if key and seal do not fit.

    stands: the run's seal.json; None if the run has no seal.
    """
    if secret is None:
        raise WrongRun(
            f"{store.url} holds a run under a run key, and {KEY} is not set here. Set it to the key that the run was "
            "founded with; without it you cannot join, read or stop the run"
        )
    if stands is None and SEALED.search(store.get(layout.RUN) or b""):
        raise WrongRun(LOST_SEAL.format(url=store.url))
    if stands is None:
        raise WrongRun(
            f"{store.url} holds a run without a run key, so its records cannot be verified, and {KEY} is set here. "
            "Unset it to continue with that run, or use another URL for a run under this key"
        )
    record = verify_record(stands, secret, "", layout.SEAL)
    if record is None:
        raise WrongRun(
            f"{store.url} holds a run under another run key than the one in {KEY}, or its seal.json was changed. Set "
            f"{KEY} to the key that the run was founded with, or use another URL for a new run"
        )
    return SignedStore(store, secret, Seal.decode(record).nonce)
