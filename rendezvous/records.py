"""The small JSON records of a run, and their bytes.

Every record carries `wire` (the version of these formats) and, where it is written by put_once, a `nonce` of its
writer, so that equal bytes mean "mine".  A record's digest is the SHA-256 of its bytes.

    Claim ─▶ Offer ─▶ Commit ─▶ Mean        Snapshot   Leave   Control        Beat (overwritten, advisory)

Weights are written as the shortest decimal of an fp32 number: a reader that parses it and rounds to fp32 has it
back exactly.
"""

import json
import secrets
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Self

from rendezvous import layout
from rendezvous.errors import RendezvousError

WIRE = 2


class WireError(RendezvousError):
    """A record of another version of these formats."""


def nonce() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True)
class Record:
    kind: ClassVar[str]

    def encode(self) -> bytes:
        body = {"kind": self.kind, "wire": WIRE, **vars(self)}
        return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, default=vars).encode()

    @classmethod
    def decode(cls, body: bytes) -> Self:
        try:
            raw = json.loads(body)
            kind, wire = raw["kind"], raw["wire"]
            if kind == cls.kind and wire == WIRE:
                record = cls.from_dict(raw)
                record.check()
                return record
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(f"expected a {cls.kind}, found {body[:80]!r} ({error}): a damaged object") from error
        raise WireError(
            f"expected a {cls.kind} of wire version {WIRE}, found a {kind} of version {wire}; "
            "run the release that started this run, or start a new one"
        )

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        return cls(**{name: raw[name] for name in _names(cls) if name in raw})

    def check(self) -> None:
        """Raises ValueError if fields that are right by themselves do not fit together."""


def check_blob(key: str, pattern: str) -> None:
    """A record names its own blob, and no other object: some blobs are put back or deleted by those who read it."""
    if not layout.is_blob(key, pattern):
        raise ValueError(f"its blob is called {key!r}, which is not one of {pattern}")


@cache
def _names(record: type[Record]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(record))


@dataclass(frozen=True)
class Claim(Record):
    """Generation `generation` of a slot belongs to this process."""

    kind = "claim"
    slot: str
    generation: int
    nonce: str
    at: float
    host: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Offer(Record):
    """ "My pseudogradient for outer step `step` is durable."

    base: digest of every fragment's θ and outer momentum that it started from.   h: inner steps inside.
    took: seconds from the last outer step to this offer.    size: bytes of the blob.
    shards: digests of the body's ranges on the fixed grid (wire.grid); empty for a small body.
    norm: ‖Δ‖₂.    scale: about ‖θ‖₂ of the fragment, 0 if not known.
    zero: every element is 0.    leaving: the writer goes away after this.
    """

    kind = "offer"
    step: int
    slot: str
    generation: int
    nonce: str
    base: str
    h: int
    blob: str
    size: int
    digest: str
    took: float
    at: float
    samples: float = 0.0
    norm: float = 0.0
    scale: float = 0.0
    zero: bool = False
    leaving: bool = False
    codec: str = "fp32"
    shards: tuple[str, ...] = ()
    stats: dict[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        return super().from_dict({**raw, "shards": tuple(raw.get("shards", ()))})

    def check(self) -> None:
        check_blob(self.blob, layout.delta(self.step, self.slot, self.generation, ""))


@dataclass(frozen=True)
class Listed:
    """One offer as a commit names it: all that a reader needs to fetch it, weigh it, and check the weight.

    factor: what the norm gate left of the weight.
    """

    step: int
    slot: str
    generation: int
    nonce: str
    blob: str
    size: int
    digest: str
    h: int
    weight: float
    zero: bool = False
    leaving: bool = False
    shards: tuple[str, ...] = ()
    samples: float = 0.0
    norm: float = 0.0
    scale: float = 0.0
    factor: float = 1.0


@dataclass(frozen=True)
class Commit(Record):
    """The decision for outer step `t`: these offers, in this order, with these weights.

    prev: SHA-256 of commit t−1's bytes (None for t = 0).   base: digest of the state before this step.
    fence: slot -> the lowest generation that may still act.   m: min_replicas that the closer went by.
    pace: seconds an outer step should take (median `took` + half the patience).
    snapshot: newest snapshot known to the closer.   by: "{slot}-{generation}" of the closer.
    mode: direct, or sharded; then owners[j] is the slot that reduces part j.
    """

    kind = "commit"
    t: int
    prev: str | None
    base: str
    offers: tuple[Listed, ...]
    fence: dict[str, int]
    m: int
    pace: float
    snapshot: int
    by: str
    nonce: str
    at: float
    mode: str = "direct"
    owners: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        listed = tuple(Listed(**dict(o, shards=tuple(o.get("shards", ())))) for o in raw["offers"])
        return super().from_dict({**raw, "offers": listed, "owners": tuple(raw.get("owners", ()))})

    def check(self) -> None:
        for o in self.offers:
            check_blob(o.blob, layout.delta(o.step, o.slot, o.generation, ""))

    def lists(self, step: int, slot: str) -> bool:
        return any(o.step == step and o.slot == slot for o in self.offers)

    @property
    def fresh(self) -> tuple[Listed, ...]:
        return tuple(o for o in self.offers if o.step == self.t)

    @property
    def carried(self) -> tuple[Listed, ...]:
        return tuple(o for o in self.offers if o.step < self.t)


@dataclass(frozen=True)
class Mean(Record):
    """The mean of step `t`, as bytes that everybody would compute."""

    kind = "mean"
    t: int
    blob: str
    size: int
    digest: str
    nonce: str

    def check(self) -> None:
        check_blob(self.blob, layout.mean_blob(self.t, ""))


@dataclass(frozen=True)
class Snapshot(Record):
    """θ_t and the outer momentum, before commit t.

    base: their digest (equal to commit t's base).   prev: digest of commit t−1, so that a reader can check the
    chain from here.   confirmed: two replicas had this digest.
    """

    kind = "snapshot"
    t: int
    base: str
    prev: str | None
    blob: str
    size: int
    digest: str
    nonce: str
    confirmed: bool = True

    def check(self) -> None:
        check_blob(self.blob, layout.snapshot_blob(self.t, ""))


@dataclass(frozen=True)
class Leave(Record):
    """A graceful goodbye: the last write of a generation.

    residual: key of what its codec had not sent yet, for the next generation alone ("": nothing, or no time).
    """

    kind = "leave"
    slot: str
    generation: int
    step: int
    base: str
    reason: str
    nonce: str
    at: float
    residual: str = ""
    residual_digest: str = ""

    def check(self) -> None:
        if self.residual:
            check_blob(self.residual, layout.residual(self.slot, self.generation, ""))


@dataclass(frozen=True)
class Control(Record):
    """What the operator wants; absent fields leave things as they are.

    places: where replicas run, in the words of who launches them (executors/mixed.py); opaque here.
    max_usd, max_hours: the budget, 0 for none.   until: Unix time at which every replica leaves unless a later record
    names a later one; 0 for none.
    """

    kind = "control"
    n: int
    nonce: str
    at: float
    replicas: int | None = None
    steps: int | None = None
    min_replicas: int | None = None
    drain: str | None = None
    stop: bool = False
    resume: bool = False
    places: tuple[dict[str, Any], ...] | None = None
    max_usd: float | None = None
    max_hours: float | None = None
    allow_unknown_price: bool | None = None
    until: float | None = None

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        places = raw.get("places")
        return super().from_dict({**raw, "places": None if places is None else tuple(places)})


@dataclass(frozen=True)
class Beat(Record):
    """ "I am here": overwritten, advisory, believed only while `n` changes.

    phase: boot, heal, train, wait, left.   rate: seconds per inner step, 0 if unknown.
    """

    kind = "beat"
    slot: str
    generation: int
    n: int
    phase: str
    step: int
    inner: int
    rate: float
    at: float
    host: str = ""
    pid: int = 0
    note: str = ""
