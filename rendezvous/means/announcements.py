"""Announced means: stored in the bucket, so that a later reader fetches one blob instead of N.

    steps/{t}/mean/{nonce}.bin      first, under a name of its own
    steps/{t}/mean/0000.json        last, by put_once: its digest               direct: the whole mean, by the closer
    steps/{t}/mean/{j}.json         the same for part j of a sharded step       by the part's owner or another replica

All replicas that compute a mean get the same bytes, so the JSON record may name any copy.  If a copy is lost or
damaged, any replica that can compute the mean uploads it again.  If another object is under the record's key, the mean
can never be announced, and every reader computes it.

Not promised: that a mean is announced. Announcements save bytes; no agreed value depends on them.
"""

from dataclasses import dataclass

import numpy as np

from rendezvous import layout
from rendezvous.background import Emit
from rendezvous.clock import Clock
from rendezvous.records.digests import digest, has_digest, required_digest_kind
from rendezvous.records.records import Mean, WireError, new_nonce
from rendezvous.records.wire import as_bytes, fetch_checked
from rendezvous.store import Store, put_once


@dataclass(eq=False, repr=False)
class Announcements:
    """The announced means of a run.   emit(event, **fields): called for damaged and for repaired copies."""

    store: Store
    clock: Clock
    emit: Emit

    def announce(self, t: int, j: int, body: np.ndarray) -> None:
        """Announce part j of step t's mean, unless its record exists.   j: 0 for the mean of a direct step."""
        if self.store.get(layout.mean_key(t, j)) is not None:
            return
        n = new_nonce()
        found = digest(as_bytes(body), required_digest_kind(self.store))
        record = Mean(t, layout.mean_blob(t, n), body.nbytes, found, n)
        self.store.put(record.blob, as_bytes(body))
        put_once(self.store, self.clock, layout.mean_key(t, j), record.encode())

    def find(self, t: int, j: int) -> tuple[bool, Mean | None]:
        """Return whether the key is taken, and the record; report any other object there, and return (True, None)."""
        register = self.store.get(layout.mean_key(t, j))
        if register is None:
            return False, None
        try:
            record = Mean.decode(register)
            why = "" if record.t == t else f"it names step {record.t}, and not {t}"
        except WireError as error:
            record = None
            why = str(error)
        if why:
            self.emit("bad_blob", step=t, trouble=f"an announced mean is passed over: {why}")
        return True, None if why else record

    def fetch(self, record: Mean, out: np.ndarray) -> str | None:
        """Read the announced bytes into `out`.   Return None, or the flaw in the bytes, which is also reported."""
        trouble = fetch_checked(self.store, self.clock, record.blob, [(record.size, record.digest)], out)
        if trouble is not None:
            self.emit("bad_blob", step=record.t, trouble=trouble)
        return trouble

    def put_back(self, record: Mean, body: np.ndarray) -> bool:
        """Upload a damaged copy again from a computed mean.   Return False if `body` has another digest."""
        if not has_digest(as_bytes(body), record.digest, required_digest_kind(self.store)):
            return False
        self.store.put(record.blob, as_bytes(body))
        self.emit("repaired", step=record.t, blob=record.blob)
        return True
