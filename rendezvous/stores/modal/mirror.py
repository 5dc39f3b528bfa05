"""Mirror of a modal:// run in its volume, because a Modal Dict loses entries that are not used.

An entry that was neither read nor written for seven days disappears.  Files of the volume stay.  So the volume has
everything that a run needs: each large body as a file, and a copy of every other entry.  Then no register is written
twice, and no blob is lost.

    create, put (an entry without a file), get (a register) ─▶ noted ─ before this process's next write ─▶ mirror/{key}
    first request, and after an hour without a check:
        the mark (.kept, the time of the last sweep) is younger than 6 days ──▶ no entry can have expired
        else, a sweep: create every missing entry again from the volume; read every other entry, which renews it; at the
              end, set the mark to the time at which the sweep began
    once a day, during the run: the same

A register can be lost for good only if it was not mirrored.  Then no process that knew the register has written
anything after it, so a new decision contradicts no remaining object.  A process that was suspended for a week checks
the mark before its next request, and then finds the decided registers.  Of an entry that is overwritten, such as a
beat, each process mirrors only its first version; an old beat counts as silence.

Not promised: a correct run if a person changes a volume or a dict by hand, or if clocks are wrong by more than a day.
"""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from rendezvous.errors import StoreError, StoreRefused

KEPT = ".kept"  # the mark's key
MIRROR = "mirror/"
OBJ = "obj/"
DAY = 86_400.0
EXPIRES_S, LOOK_S = 6 * DAY, 3600.0  # one day less than Modal's seven days; seconds between two checks of the mark
AT_ONCE = 16
BATCH = 256


def pointer_to(path: str, size: int) -> bytes:
    """Return the entry for a body that is a file of the volume.   size: bytes of the file."""
    return b"@" + json.dumps({"path": path, "size": size}, sort_keys=True).encode()


class Entries(Protocol):
    """The part of `wire.Wire` that the mirror uses.  A test passes its own, with faults."""

    def get_entry(self, key: str) -> bytes | None: ...
    def put_entry(self, key: str, value: bytes, if_absent: bool = False) -> bool: ...
    def all_keys(self) -> list[str]: ...
    def read_file(self, path: str) -> bytes | None: ...
    def write_files(self, bodies: dict[str, bytes]) -> None: ...
    def remove_file(self, path: str) -> None: ...
    def list_files(self, folder: str) -> dict[str, int]: ...


class Mirror:
    """One process's part in the mirror.   Thread-safe.

    wall: seconds since 1970; a clock that also counts the time in which the machine sleeps.
    """

    def __init__(self, wire: Entries, prefix: str, wall: Callable[[], float] = time.time) -> None:
        self._wire = wire
        self._prefix = prefix
        self._wall = wall
        self._noted, self._safe = dict[str, bytes](), set[str]()
        self._lock, self._looking = threading.RLock(), threading.Lock()
        self._looked = float("-inf")  # when this process last checked the mark

    # ------------------------------------------------------------------ noted entries

    def note_entry(self, key: str, value: bytes) -> None:
        """Note that the Dict has this entry, to mirror it later."""
        with self._lock:
            if key not in self._safe:
                self._noted[key] = value

    def flush(self) -> None:
        """Mirror the noted entries.   After StoreUnclear, the caller must not write anything that needs them."""
        with self._lock:
            while self._noted:
                some = dict(list(self._noted.items())[:BATCH])
                self._wire.write_files({self._mirror_path(key): value for key, value in some.items()})
                self._safe |= set(some)
                for key in some:
                    del self._noted[key]

    def forget_entry(self, key: str) -> None:
        """Remove the copy of an entry that will be deleted."""
        with self._lock:
            self._noted.pop(key, None)
            self._safe.discard(key)
            self._wire.remove_file(self._mirror_path(key))

    # ------------------------------------------------------------------ expired entries

    def restore_expired(self) -> None:
        """Restore expired entries, if any can have expired.  Called before every request."""
        if self._seconds_since_look() < LOOK_S:
            return
        with self._looking:
            silence = self._seconds_since_look()
            if silence < LOOK_S:
                return
            age = self._mark_age()
            if age >= EXPIRES_S:
                self.sweep()
            elif age >= DAY:
                threading.Thread(target=self._sweep_quietly, name="modal-mirror", daemon=True).start()
            self._looked = self._wall()

    def sweep(self) -> None:
        """Restore the missing entries of the run, and read all other entries to renew them."""
        began = self._wall()
        here = len(self._prefix)
        there = [key for key in self._wire.all_keys() if key.startswith(self._prefix)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(self._restore_entry, self._lost_entries(set(there))))
            for key, value in zip(there, pool.map(self._wire.get_entry, there), strict=True):
                if value is not None and value[:1] == b"!":
                    self.note_entry(key[here:], value)
        self.flush()
        self._wire.put_entry(self._prefix + KEPT, b"=" + str(began).encode())

    def _lost_entries(self, there: set[str]) -> list[tuple[str, bytes]]:
        """Return (key, entry) for entries that only the volume has: first blobs, then records, which name blobs."""
        blobs = {
            path[len(OBJ) :].rpartition("~")[0]: pointer_to(path, size)
            for path, size in self._wire.list_files(OBJ + self._prefix).items()
        }
        copies = {path[len(MIRROR) :]: b"" for path in self._wire.list_files(MIRROR + self._prefix)}
        return [(key, entry) for key, entry in {**blobs, **copies}.items() if key not in there]

    def _restore_entry(self, lost: tuple[str, bytes]) -> None:
        key, entry = lost
        value = entry or self._wire.read_file(MIRROR + key)
        if value is None or self._wire.put_entry(key, value, if_absent=True):
            return
        stands = self._wire.get_entry(key)
        if value[:1] == b"!" and stands is not None and stands != value:
            raise StoreRefused(
                f"the register {key} was decided twice: Modal's dict and its mirror differ. Neither was changed. "
                "Export the model from the last snapshot, and begin a new run"
            )

    def _sweep_quietly(self) -> None:
        with suppress(StoreError):  # the next look, in an hour, tries again
            self.sweep()

    def _mark_age(self) -> float:
        """Return the seconds since the last sweep began.

        Infinite if there was no sweep, or if the mark is more than a day ahead of the clock.
        """
        mark = self._wire.get_entry(self._prefix + KEPT)
        with suppress(ValueError):
            age = self._wall() - float((mark or b"")[1:])
            return age if age > -DAY else float("inf")
        return float("inf")

    def _seconds_since_look(self) -> float:
        return abs(self._wall() - self._looked)

    def _mirror_path(self, key: str) -> str:
        return f"{MIRROR}{self._prefix}{key}"
