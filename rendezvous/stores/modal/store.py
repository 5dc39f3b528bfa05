"""A store inside Modal, without a bucket:   modal://NAME[/prefix][?environment=E]        experimental

    Dict NAME     key ─▶ "!" body            a register: created once, never changed
                  key ─▶ "=" body            another body up to 1 MiB
                  key ─▶ "@" pointer         a larger body, which is a file of the volume: its path and size
    Volume NAME   obj/{key}~{digest}         such large bodies, never overwritten
                  mirror/{key}               copies of the first two kinds (rendezvous/stores/modal/mirror.py)

    create        one DictUpdate(if_not_exists), never retried: put_once must see every outcome
    put           the file first if there is one, then the entry: readers see the old body or the new one

All requests go to Modal's control plane, so a written file is visible without a mount or a reload.  A Dict's entries
expire seven days after their last use; mirror.py explains why no register can be written twice.

Not promised: that it works on Modal.  This store was only run against a server of this repository's tests, never on
Modal. Volumes of version 2 are beta there ("cannot yet guarantee that no data will be lost"; digests show a loss, and
two snapshots are kept), and the requests are internal ones of Modal's client.  `diloco doctor modal://NAME` tests it.
"""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import parse_qsl

from rendezvous import layout
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import KeyExists, StoreRefused
from rendezvous.store import Body, Buffer, body_bytes, in_pieces, plain_key, plain_prefix
from rendezvous.stores.modal.blocks import blocks_of
from rendezvous.stores.modal.mirror import KEPT, OBJ, Mirror, pointer_to
from rendezvous.stores.modal.wire import Wire
from rendezvous.stores.urls import bucket_url

INLINE = 1 << 20  # Modal recommends entries below 5 MiB
LISTED_S = 5.0  # seconds for which the result of one scan of all keys is reused
REGISTER = b"!"
PLAIN = b"="
FILE = b"@"


@dataclass(frozen=True)
class Pointer:
    """Pointer to a body that is a file.   path: the file's path in the volume.   size: bytes."""

    path: str
    size: int

    @staticmethod
    def decode(data: bytes) -> "Pointer":
        fields = json.loads(data)
        pointer = Pointer(str(fields["path"]), int(fields["size"]))
        if not pointer.path.startswith(OBJ) or ".." in pointer.path.split("/") or pointer.size < 0:
            raise ValueError("it leads out of the run's files")
        return pointer


class ModalStore:
    """A store that connects at its first request.   clock: tells the age of the mirror's mark and of the last scan."""

    def __init__(self, url: str, clock: Clock | None = None, wire: Callable[[str, str], Wire] = Wire) -> None:
        self._name, self._prefix, self._environment = parse_url(url)
        self._place = f"modal://{self._name}" + (f"/{self._prefix.rstrip('/')}" if self._prefix else "")
        self.url = self._place + (f"?environment={self._environment}" if self._environment else "")
        self._clock, self._make, self._opening = clock or SystemClock(), wire, threading.Lock()
        self._opened: tuple[Wire, Mirror] | None = None
        self._listed: tuple[float, set[str]] = -LISTED_S, set()

    def put(self, key: str, body: Body) -> None:
        if body_bytes(body) > INLINE:
            self._write_entry(key, self._upload_file(plain_key(key), body))
        else:
            self._write_entry(key, PLAIN + b"".join(in_pieces(body)))

    def create(self, key: str, body: Buffer) -> None:
        if body_bytes(body) > INLINE:
            raise StoreRefused(f"{key} has {body_bytes(body)} bytes; on modal:// a record has at most {INLINE}")
        if not self._write_entry(key, REGISTER + bytes(body), if_absent=True):
            raise KeyExists(f"{self._place}/{key} exists")

    def get(self, key: str) -> bytes | None:
        entry = self._read_entry(key)
        most = layout.most_bytes(key) + 1
        if entry is None or isinstance(entry, bytes):
            return entry and entry[:most]
        out = bytearray(min(entry.size, most))
        if not out or self._wire.read_into(entry.path, memoryview(out)):
            return bytes(out)
        return None  # the entry's file is gone: the object counts as missing

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        out = out.cast("B")
        entry = self._read_entry(key)
        if entry is None:
            return False
        if isinstance(entry, Pointer):
            return entry.size >= start + len(out) and (not out or self._wire.read_into(entry.path, out, start))
        part = entry[start : start + len(out)]
        if len(part) != len(out):
            return False
        out[:] = part
        return True

    def list(self, prefix: str) -> list[str]:
        plain_prefix(prefix)
        at, keys = self._listed
        if self._clock.now() - at >= LISTED_S:
            wire, _ = self._wire_and_mirror()
            here = len(self._prefix)
            keys = {key[here:] for key in wire.all_keys() if key.startswith(self._prefix)} - {KEPT}
            self._listed = self._clock.now(), keys
        return sorted(key for key in keys if key.startswith(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._delete_entry(plain_key(key))

    def __repr__(self) -> str:
        return f"ModalStore({self.url!r})"

    # ------------------------------------------------------------------ entries

    def _write_entry(self, key: str, value: bytes, if_absent: bool = False) -> bool:
        wire, mirror = self._wire_and_mirror()
        mirror.flush()  # before a write, mirror the entries that this process has read: the write may depend on them
        stands = wire.put_entry(self._prefix + plain_key(key), value, if_absent)
        self._listed[1].add(key)
        if stands and value[:1] != FILE:
            mirror.note_entry(key, value)
        return stands

    def _upload_file(self, key: str, body: Body) -> bytes:
        """Write the body as a file.   Return the entry that points to it."""
        blocks = blocks_of(in_pieces(body))
        digest = hashlib.sha256(b"".join(block.sha256 for block in blocks)).hexdigest()
        path = f"{OBJ}{self._prefix}{key}~{digest[:32]}"
        self._wire.upload_file(path, blocks, in_pieces(body))
        return pointer_to(path, sum(block.size for block in blocks))

    def _read_entry(self, key: str) -> bytes | Pointer | None:
        """Return the body, or the pointer to its file; None if there is no entry."""
        wire, mirror = self._wire_and_mirror()
        value = wire.get_entry(self._prefix + plain_key(key))
        if value is None:
            return None
        if value[:1] == REGISTER:
            mirror.note_entry(key, value)
        return self._decode_entry(key, value)

    def _decode_entry(self, key: str, value: bytes) -> bytes | Pointer:
        try:
            if value[:1] in (REGISTER, PLAIN):
                return value[1:]
            if value[:1] == FILE:
                return Pointer.decode(value[1:])
            raise ValueError("its first byte is not a kind of entry")
        except (ValueError, KeyError, TypeError) as error:
            raise StoreRefused(
                f"the entry {key!r} of {self.url} was not written by a run ({error}). Take another name: modal://OTHER"
            ) from None

    def _delete_entry(self, key: str) -> None:
        wire, mirror = self._wire_and_mirror()
        value = wire.get_entry(self._prefix + key)
        if value is None:
            return
        mirror.forget_entry(key)
        wire.pop_entry(self._prefix + key)
        if isinstance(body := self._decode_entry(key, value), Pointer):
            wire.remove_file(body.path)
        self._listed[1].discard(key)

    # ------------------------------------------------------------------ opening, closing

    @property
    def _wire(self) -> Wire:
        return self._wire_and_mirror()[0]

    def _wire_and_mirror(self) -> tuple[Wire, Mirror]:
        """Connect at the first call, restore expired entries, and return both."""
        with self._opening:
            if self._opened is None:
                wire = self._make(self._name, self._environment)
                self._opened = wire, Mirror(wire, self._prefix, self._clock.wall)
        self._opened[1].restore_expired()
        return self._opened


def parse_url(url: str) -> tuple[str, str, str]:
    """Parse a URL: "modal://NAME/a/b?environment=E" -> "NAME", "a/b/", "E".   Raise ValueError for a wrong URL."""
    rest, _, query = bucket_url(url).removeprefix("modal://").partition("?")
    name, _, prefix = rest.partition("/")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ValueError(f"{url}: a name must be 1 to 64 letters, digits, '.', '_' or '-', as in modal://runs/first")
    if unknown := set(options) - {"environment"}:
        raise ValueError(f"{url}: the only option is ?environment=…. Leave out {', '.join(sorted(unknown))}")
    prefix = prefix.strip("/")
    if prefix:
        plain_key(prefix)
    return name, f"{prefix}/" if prefix else "", options.get("environment", "")
