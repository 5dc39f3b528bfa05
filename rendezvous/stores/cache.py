"""Cache, on this machine, of records that never change, so that a later look at a run reads only new records.

    ~/.cache/diloco/runs/{sha256 of URL}-{of run nonce}/commit-{random}.records     one file per look and kind of record
                                                          └─ sha256 of the rest ‖ (length of key, of body, key, body)*

    look 1 ──▶ commit-a   log-b           a file is written under another name and renamed, so it is always complete;
    look 2 ──▶ commit-c                   two processes write two files
    look k ──▶ commit-x                   more than MOST_FILES of one kind: one file with all, then the old are deleted

    before it is used:   the newest cached commit is read from the bucket.   If its bytes differ or it is missing, the
                         bucket has another run (for example from a backup), and the cache is not used

This one read checks all cached commits, as each commit has the digest of the commit before.  A damaged file is deleted,
and its records are read again.  Only records that the reader has decoded and checked are cached, and never a heartbeat,
a control record or run.json.  So if a bad record in the bucket is repaired later, the reader sees the repaired record.

Not promised: secrecy from readers of the user's files.  Records of a sealed run are plain text in the bucket, too.
"""

import hashlib
import os
import secrets
import shutil
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rendezvous import layout
from rendezvous.store import Readable

MOST_FILES = 8  # of one kind
RUN_BYTES, ALL_BYTES = 256 << 20, 1 << 30  # limits in bytes: of one run; of all runs
_HEAD = struct.Struct("<HI")
_DIGEST = 32


def cache_of(store: Readable, nonce: str) -> "Cache | None":
    """Return the cache of a run's records; None for a run in a folder, which is as fast.   nonce: run.json has it."""
    if getattr(store, "cheap", False):
        return None
    with suppress(RuntimeError):  # a user without a home has no cache
        return Cache(cache_root() / f"{_short_hash(store.url)}-{_short_hash(nonce)}")
    return None


def latest_cache(url: str) -> "Cache | None":
    """Return the cache of the run that was last read at this URL; None if there is none.

    The URL may have another run by now, so use the cache only to guess.
    """
    with suppress(OSError, RuntimeError):  # a user without a home has no cache
        runs = [(path.stat().st_mtime, path) for path in cache_root().glob(f"{_short_hash(url)}-*")]
        return Cache(max(runs)[1]) if runs else None
    return None


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "diloco" / "runs"


class Cache:
    """Cache key -> body in a folder.  A folder that cannot be read or written counts as empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records: dict[str, dict[str, bytes]] = {}  # kind -> records, read at the first use
        self._news: dict[str, dict[str, bytes]] = {}
        self._of_another = False  # the files in the folder belong to another run

    def get(self, key: str) -> bytes | None:
        kind = layout.record_kind(key)
        return None if kind is None else self._of_kind(kind).get(key)

    def add(self, key: str, body: bytes) -> None:
        """Add a record; `save` writes it to disk."""
        if (kind := layout.record_kind(key)) is not None:
            self._of_kind(kind)[key] = self._news.setdefault(kind, {})[key] = body

    def take(self, key: str) -> bytes | None:
        """Remove a record from the cache and return its body (None without one), to compare it with the bucket."""
        kind = layout.record_kind(key)
        return None if kind is None else self._of_kind(kind).pop(key, None)

    def put_back(self, key: str, body: bytes) -> None:
        """Put a record back after `take`, if the bucket has the same bytes."""
        self._of_kind(layout.record_kind(key) or "")[key] = body

    def keys(self, kind: str) -> list[str]:
        return list(self._of_kind(kind))

    def clear(self) -> None:
        """Delete all records, because they belong to another run."""
        self._records = {}
        self._news = {}
        self._of_another = True
        shutil.rmtree(self.folder, ignore_errors=True)

    def save(self) -> None:
        """Write the new records to disk, unless the cache is full.  A full or read-only disk is no error."""
        if not self._news:
            return
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            if _bytes_in(self.folder) < RUN_BYTES:  # else only the run's first part stays cached, the most useful part
                for kind, records in self._news.items():
                    self._write_kind(kind, records)
            os.utime(self.folder)
            _make_room(self.folder)
        self._news = {}

    # ------------------------------------------------------------------ files

    def _of_kind(self, kind: str) -> dict[str, bytes]:
        if kind not in self._records:
            self._records[kind] = {}
            for path in [] if self._of_another else self._kind_files(kind):
                self._records[kind] |= _read_file(path)
        return self._records[kind]

    def _kind_files(self, kind: str) -> list[Path]:
        try:
            return sorted(self.folder.glob(f"{kind}-*.records"))
        except OSError:
            return []

    def _write_kind(self, kind: str, news: dict[str, bytes]) -> None:
        """Write one more file, or one file in place of many.  Files that another process adds meanwhile stay."""
        old = self._kind_files(kind)
        if len(old) < MOST_FILES:
            _write_file(self.folder, kind, news)
            return
        _write_file(self.folder, kind, {key: body for path in old for key, body in _read_file(path).items()} | news)
        for path in old:
            path.unlink(missing_ok=True)


def _write_file(folder: Path, kind: str, records: dict[str, bytes]) -> None:
    name = f"{kind}-{secrets.token_hex(8)}"
    body = b"".join(_HEAD.pack(len(key.encode()), len(body)) + key.encode() + body for key, body in records.items())
    part = folder / f"{name}.part"
    try:
        part.write_bytes(hashlib.sha256(body).digest() + body)
        part.replace(folder / f"{name}.records")
    finally:
        part.unlink(missing_ok=True)


def _read_file(path: Path) -> dict[str, bytes]:
    """Return the records of one file; delete a damaged file and return {}."""
    try:
        raw = path.read_bytes()
    except OSError:
        return {}
    body = raw[_DIGEST:]
    if hashlib.sha256(body).digest() != raw[:_DIGEST]:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return {}
    return dict(_parse_records(body))


def _parse_records(body: bytes) -> Iterator[tuple[str, bytes]]:
    at = 0
    while at < len(body):
        key_bytes, body_bytes = _HEAD.unpack_from(body, at)
        start = at + _HEAD.size + key_bytes
        at = start + body_bytes
        yield body[start - key_bytes : start].decode(), body[start:at]


def _make_room(mine: Path) -> None:
    """While all runs together exceed ALL_BYTES, delete whole runs, the run that was unused for longest first."""
    others = sorted((p for p in mine.parent.iterdir() if p.is_dir() and p != mine), key=lambda p: p.stat().st_mtime)
    sizes = {run: _bytes_in(run) for run in [mine, *others]}
    for run in others:
        if sum(sizes.values()) <= ALL_BYTES:
            return
        shutil.rmtree(run, ignore_errors=True)
        del sizes[run]


def _bytes_in(folder: Path) -> int:
    with suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0
