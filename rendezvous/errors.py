"""The errors between a replica and its bucket.

    RendezvousError
    ├── StoreError                a request to the store did not end well
    │   ├── KeyExists             definite: another object stands under that key
    │   ├── BadKey                definite: a name that would leave the run's folder; nothing was asked of the store
    │   ├── StoreRefused          definite: nothing was written, and asking again changes nothing
    │   │   ├── StoreReadOnly     the folder or bucket cannot be written
    │   │   ├── StoreFull         no space left
    │   │   └── StoreGone         the folder that was opened is not at its path any more
    │   └── StoreUnclear          indefinite: it may have happened; read back before you believe anything
    ├── Terminal                  this replica ends; the run does not
    │   ├── Fenced                a higher generation holds the slot
    │   ├── Leaving               asked to go; its work is durable
    │   ├── Diverged              its θ is not the chain's; the next generation heals from the bucket
    │   ├── GaveUp                nothing moved for too long; the same command resumes the run
    │   ├── HeartbeatLost         its heartbeat cannot go on, and it must not train without
    │   └── Collected             what it needs was collected as garbage; the next generation heals (garbage.py)
    ├── ChainBroken               a commit does not follow the one before it
    ├── Forged                    a commit or manifest that was not written with the run's key
    ├── BadCommit                 a commit that does not follow the run's rules
    ├── WireError                 an object that is not a record of this wire version (rendezvous/records/records.py)
    ├── Abandoned                 a snapshot whose replica went on or ended meanwhile (rendezvous/snapshots/writer.py)
    ├── NotFinite                 θ that no engine should load (rendezvous/weights/writer.py)
    ├── Corrupt                   bytes that do not have their announced digest, after repeated reading
    ├── BadDelta                  a pseudogradient that must not be offered
    └── WrongRun                  the URL holds a run with another mathematics, layout or key
        └── RecordsLost           registers that must be there are gone

A definite error may be retried freely.  After an indefinite one, read first (`store.put_once` does).
"""


class RendezvousError(RuntimeError):
    """Base of everything this room raises on purpose."""


class StoreError(RendezvousError):
    """A request to the store did not end well."""


class KeyExists(StoreError):
    """Definite: another object stands under that key."""


class BadKey(StoreError):
    """Definite: a name that would leave the run's folder.  Nothing was asked of the store."""


class StoreRefused(StoreError):
    """Definite: nothing was written, and asking again changes nothing until a person acts."""


class StoreReadOnly(StoreRefused):
    """The folder or bucket cannot be written."""


class StoreFull(StoreRefused):
    """No space left."""


class StoreGone(StoreRefused):
    """The folder that was opened is not at its path any more; another folder there is not the run's."""


class StoreUnclear(StoreError):
    """Indefinite: the request may or may not have happened."""


class Terminal(RendezvousError):
    """This replica ends; the run does not."""


class Fenced(Terminal):
    """A higher generation holds the slot."""


class Leaving(Terminal):
    """This replica was asked to go; its work is durable."""


class Diverged(Terminal):
    """This replica's θ is not the chain's."""


class GaveUp(Terminal):
    """Nothing moved for too long."""


class HeartbeatLost(Terminal):
    """The heartbeat cannot go on."""


class ChainBroken(RendezvousError):
    """A commit does not follow the one before it."""


class Forged(RendezvousError):
    """A commit or manifest that was not written with the run's key."""


class BadCommit(RendezvousError):
    """A commit that does not follow the run's rules."""


class Corrupt(RendezvousError):
    """Bytes that do not have their announced digest, after repeated reading."""


class BadDelta(RendezvousError):
    """A pseudogradient that must not be offered."""


class WrongRun(RendezvousError):
    """The URL holds a run with another mathematics, layout or key."""


class RecordsLost(WrongRun):
    """A register that must be there is gone."""
