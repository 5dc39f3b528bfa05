"""The errors of this package.

    RendezvousError
    ├── StoreError                a request to the store failed
    │   ├── KeyExists             definite: the key has another object
    │   ├── BadKey                definite: the name is outside the run's folder; no request was sent
    │   ├── StoreRefused          definite: nothing was written, and a retry alone does not help
    │   │   ├── StoreReadOnly     the folder or bucket cannot be written
    │   │   ├── StoreFull         no space left
    │   │   └── StoreGone         the folder that was opened is not at its path any more
    │   └── StoreUnclear          indefinite: the request may have succeeded; read the object before you continue
    ├── Terminal                  this replica ends; the run continues
    │   ├── Fenced                a higher generation holds the slot
    │   ├── Leaving               the replica was asked to leave; its work is durable
    │   ├── Diverged              its θ is not the chain's; the next generation heals from the bucket
    │   ├── GaveUp                the run made no progress for too long; the same command resumes it
    │   ├── HeartbeatLost         its heartbeat failed for good; a replica must not train without one
    │   └── Collected             an object that it needs was collected as garbage; the next generation heals
    ├── ChainBroken               a commit does not follow the one before it
    ├── Forged                    a commit or manifest that was not written with the run's key
    ├── BadCommit                 a commit that does not follow the run's rules
    ├── WireError                 an object that is not a record of this wire version (rendezvous/records/records.py)
    ├── Abandoned                 a snapshot that its replica stopped writing (rendezvous/snapshots/writer.py)
    ├── NotFinite                 θ with NaN or infinity, which no engine should load (rendezvous/weights/writer.py)
    ├── Corrupt                   bytes that differ from their announced digest, even when read again
    ├── BadDelta                  a pseudogradient that must not be offered
    └── WrongRun                  the run at the URL has other settings, another parameter layout or another key
        └── RecordsLost           write-once records that must exist are missing

After a definite error a request can be repeated safely.  After an indefinite error, read the object first, as
`store.put_once` does.
"""


class RendezvousError(RuntimeError):
    """Base of all errors that this package raises on purpose."""


class StoreError(RendezvousError):
    """A request to the store failed."""


class KeyExists(StoreError):
    """Definite: the key has another object."""


class BadKey(StoreError):
    """Definite: the name is outside the run's folder.  No request was sent."""


class StoreRefused(StoreError):
    """Definite: nothing was written, and a retry does not help until a person repairs the cause."""


class StoreReadOnly(StoreRefused):
    """The folder or bucket cannot be written."""


class StoreFull(StoreRefused):
    """The disk or the quota is full."""


class StoreGone(StoreRefused):
    """The folder that was opened is not at its path any more.  A new folder there does not belong to the run."""


class StoreUnclear(StoreError):
    """Indefinite: the request may have succeeded or failed."""


class Terminal(RendezvousError):
    """This replica ends; the run continues."""


class Fenced(Terminal):
    """A higher generation holds the slot."""


class Leaving(Terminal):
    """This replica was asked to leave; its work is durable."""


class Diverged(Terminal):
    """This replica's θ is not the chain's."""


class GaveUp(Terminal):
    """The run made no progress for too long."""


class HeartbeatLost(Terminal):
    """The heartbeat of this replica failed for good."""


class ChainBroken(RendezvousError):
    """A commit does not follow the one before it."""


class Forged(RendezvousError):
    """The error for a commit or manifest that was not written with the run's key."""


class BadCommit(RendezvousError):
    """A commit that does not follow the run's rules."""


class Corrupt(RendezvousError):
    """Bytes that differ from their announced digest, even when read again."""


class BadDelta(RendezvousError):
    """A pseudogradient that must not be offered."""


class WrongRun(RendezvousError):
    """The run at the URL has other settings, another parameter layout or another key."""


class RecordsLost(WrongRun):
    """A write-once record that must exist is missing."""
