"""The small JSON records of a run, and their bytes.

Every record has `wire`, the version of these formats.  A record that is written by put_once also has a `nonce` of its
writer, so that equal bytes mean that this writer wrote them.  A record's digest is the SHA-256 of its bytes.

    Claim ─▶ Offer ─▶ Commit ─▶ Mean        Snapshot   Leave   Control        Beat (overwritten, only a hint)

Weights are fp32 numbers, written as the shortest decimal that gives the same fp64.  Byte by byte: docs/formats.md.

Any writer may have written the object that a reader finds.  `decode` looks only at its bytes: it returns a record whose
fields have their annotated types and ranges (records/schema.py), or raises WireError.

Not promised: that a record is true.  The engine compares the record with the key, the chain and the digests.
"""

import json
import re
import secrets
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any, ClassVar, Self, TypeVar

from rendezvous import layout
from rendezvous.errors import RendezvousError
from rendezvous.records.schema import Longest, Where, Within, brief_repr, from_json, parse_json
from rendezvous.store import Buffer

WIRE = 2

Step = Annotated[int, Within(0, 10**10 - 1)]  # the keys have ten digits
Generation = Annotated[int, Within(1, 10**9)]
Count = Annotated[int, Within(0, 1 << 53)]  # inner steps, bytes, beats: exact in every language
AtLeastOne = Annotated[int, Within(1, 1 << 53)]
Slots = Annotated[int, Within(1, layout.MOST_SLOTS)]
Pid = Annotated[int, Within(0, (1 << 31) - 1)]  # never -1: a signal to -1 goes to every process
Seconds = Annotated[float, Within(0, 1e9)]
Hours = Annotated[float, Within(0, 1e9)]
Usd = Annotated[float, Within(0, 1e12)]
UnixTime = Annotated[float, Within(-1e12, 1e12)]  # clocks may be wrong
Samples = Annotated[float, Within(0, 1e15)]
Length = Annotated[float, Within(0, 1e60)]  # ‖x‖₂ of fp32 numbers is below 1e44
Weight = Annotated[float, Within(0, 3.4e38)]  # an fp32 number
Slot = Annotated[str, Longest(16), Where(layout.is_slot, "slot")]
Member = Annotated[str, Longest(16), Where(layout.is_member, "name of a slot or an actor")]
Holder = Annotated[str, Longest(64), Where(layout.is_word, "name of a slot")]  # also "supervisor"
Word = Annotated[str, Longest(128)]  # digests, nonces, names
Key = Annotated[str, Longest(1024)]


class WireError(RendezvousError):
    """Bytes that are not a record of the expected kind and version."""


def new_nonce() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True)
class Record:
    """One record of a run.

    most: limit of a body's bytes (layout.MOST_BYTES); a longer body is not parsed.
    later: fields of later releases; they are left out while they are unused, so that old bytes stay equal.
    """

    kind: ClassVar[str]
    most: ClassVar[int] = layout.MOST_OF_OTHERS
    later: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.most = layout.MOST_BYTES.get(cls.kind, layout.MOST_OF_OTHERS)

    def encode(self) -> bytes:
        """Return the record's bytes.   Raise WireError if readers would not accept them."""
        fields = {"kind": self.kind, "wire": WIRE, **self.written_fields()}
        body = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False, default=vars).encode()
        try:
            type(self).decode(body)
        except WireError as error:
            raise WireError(
                f"readers would refuse this {self.kind}, so nothing was written: {error.__cause__}. Use smaller "
                "numbers, shorter texts, fewer statistics or fewer places"
            ) from None
        return body

    @classmethod
    def decode(cls, body: Buffer) -> Self:
        """Return the record in these bytes.   Raise WireError, and no other error, for other bytes."""
        try:
            raw = parse_json(body, cls.most)
            kind = raw["kind"]
            wire = raw["wire"]
            if kind == cls.kind and type(wire) is int and wire == WIRE:
                record = from_json(cls, raw)
                record.check_consistency()
                return record
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(
                f"expected a {cls.kind}, found {bytes(body[:80])!r} ({error}): a damaged object, or not this run's"
            ) from error
        name = kind if isinstance(kind, str) and layout.is_word(kind) else brief_repr(kind)
        raise WireError(
            f"expected a {cls.kind} of wire version {WIRE}, found a {name} of version {brief_repr(wire)}; "
            "run the release that started this run, or start a new one"
        )

    def written_fields(self) -> dict[str, Any]:
        """Return the fields to write.  One of `later` is unused if it is None or 0."""
        return {name: value for name, value in vars(self).items() if name not in self.later or value not in (None, 0)}

    def check_consistency(self) -> None:
        """Raise ValueError if fields are valid separately but contradict each other."""


R = TypeVar("R", bound=Record)


def decode_or_none(kind: type[R], body: Buffer | None) -> R | None:
    """Decode an object that any writer may have written.   Return None, as for every reader, if this is no record."""
    try:
        return None if body is None else kind.decode(body)
    except WireError:
        return None


def check_blob(key: str, pattern: str) -> None:
    """Raise ValueError unless `key` is a blob of the record itself; some readers write or delete the named blob.

    pattern: the blob's key with "" as its nonce.
    """
    if not layout.is_blob(key, pattern):
        raise ValueError(f"its blob is called {key!r}, which is not one of {pattern}")


@dataclass(frozen=True)
class Claim(Record):
    """A process's claim to generation `generation` of a slot.

    host, pid, started: machine, process id and its start (diloco.process.processes); together they name the process.
    ranks: processes of the replica, 0: one.
    """

    kind = "claim"
    later = ("started", "ranks")
    slot: Holder
    generation: Generation
    nonce: Word
    at: UnixTime
    host: str = ""
    pid: Pid = 0
    started: Count = 0
    ranks: Count = 0


@dataclass(frozen=True)
class Offer(Record):
    """A replica's offer for outer step `step`, whose pseudogradient is durable.

    base: digest of θ and outer momentum of all fragments from which the replica started.   h: number of inner steps.
    took: seconds from the last outer step to this offer.    size: bytes of the blob.
    shards: digests of the body's shards (wire.shard_grid); empty for a small body.
    norm: ‖Δ‖₂.    scale: about ‖θ‖₂ of the fragment, 0 if unknown.
    zero: every element is 0.    leaving: the writer leaves after this offer.
    """

    kind = "offer"
    step: Step
    slot: Slot
    generation: Generation
    nonce: Word
    base: Word
    h: AtLeastOne
    blob: Key
    size: Count
    digest: Word
    took: Seconds
    at: UnixTime
    samples: Samples = 0.0
    norm: Length = 0.0
    scale: Length = 0.0
    zero: bool = False
    leaving: bool = False
    codec: Word = "fp32"
    shards: tuple[Word, ...] = ()
    stats: dict[str, float] = field(default_factory=dict[str, float])

    def check_consistency(self) -> None:
        check_blob(self.blob, layout.delta_blob(self.step, self.slot, self.generation, ""))


@dataclass(frozen=True)
class Listed:
    """One offer as a commit lists it, with all fields that a reader needs to fetch it and to check its weight.

    factor: the number by which the norm gate multiplied the weight; 1 if the norm was not too long.
    """

    step: Step
    slot: Slot
    generation: Generation
    nonce: Word
    blob: Key
    size: Count
    digest: Word
    h: AtLeastOne
    weight: Weight
    zero: bool = False
    leaving: bool = False
    shards: tuple[Word, ...] = ()
    samples: Samples = 0.0
    norm: Length = 0.0
    scale: Length = 0.0
    factor: Weight = 1.0


MODES = ("direct", "sharded")


@dataclass(frozen=True)
class Commit(Record):
    """The decision for outer step `t`: these offers, in this order, with these weights.

    prev: SHA-256 of commit t−1's bytes (None for t = 0).   base: digest of the state before this step.
    fence: slot -> the lowest generation that may still act.   m: min_replicas that the closer used.
    pace: expected seconds of an outer step: the time of a full round of the fastest quarter of the replicas.
    snapshot: step of the newest snapshot that the closer knew.   by: "{slot}-{generation}" of the closer.
    mode: "direct" or "sharded".   owners: if sharded, owners[j] is the slot that reduces part j.
    """

    kind = "commit"
    t: Step
    prev: Word | None
    base: Word
    offers: tuple[Listed, ...]
    fence: dict[Slot, Generation]
    m: Slots
    pace: Seconds
    snapshot: Step
    by: Word
    nonce: Word
    at: UnixTime
    mode: Annotated[str, Where(MODES.__contains__, "way to reduce")] = "direct"
    owners: tuple[Slot, ...] = ()

    def check_consistency(self) -> None:
        if len({(o.step, o.slot) for o in self.offers}) < len(self.offers):
            raise ValueError("it lists an offer twice")
        if any(o.step > self.t for o in self.offers):
            raise ValueError("it lists an offer of a later step")
        if self.mode == "sharded" and not self.owners:
            raise ValueError("it is sharded, and no replica owns a part")
        for o in self.offers:
            check_blob(o.blob, layout.delta_blob(o.step, o.slot, o.generation, ""))

    def lists_offer(self, step: int, slot: str) -> bool:
        return any(o.step == step and o.slot == slot for o in self.offers)

    @property
    def fresh_offers(self) -> tuple[Listed, ...]:
        return tuple(o for o in self.offers if o.step == self.t)

    @property
    def late_offers(self) -> tuple[Listed, ...]:
        return tuple(o for o in self.offers if o.step < self.t)


@dataclass(frozen=True)
class Mean(Record):
    """The announced mean of step `t`; every replica that computes it gets the same bytes."""

    kind = "mean"
    t: Step
    blob: Key
    size: Count
    digest: Word
    nonce: Word

    def check_consistency(self) -> None:
        check_blob(self.blob, layout.mean_blob(self.t, ""))


@dataclass(frozen=True)
class Snapshot(Record):
    """θ_t and the outer momentum, before commit t.

    base: the digest of both, equal to commit t's.   prev: digest of commit t−1, from which a reader checks the chain.
    confirmed: whether two replicas had this digest.
    blob: "" in snapshot 0 of a run whose start model is not in the bucket; θ₀ is that model, and all else is zero.
    """

    kind = "snapshot"
    t: Step
    base: Word
    prev: Word | None
    blob: Key
    size: Count
    digest: Word
    nonce: Word
    confirmed: bool = True

    def check_consistency(self) -> None:
        if self.t or self.blob:
            check_blob(self.blob, layout.snapshot_blob(self.t, ""))


@dataclass(frozen=True)
class WeightsPart:
    """One blob of weights: chunks as in rendezvous/weights/patch.py."""

    blob: Key
    size: Count
    digest: Word


@dataclass(frozen=True)
class Weights(Record):
    """θ_t in bf16, for inference engines: all values (an anchor), or the values that differ from θ_{t−1}.

    values: number of values in θ.   changed: number of values in the parts.
    digest: xxh3 of all values as little-endian uint16.
    parent: the digest of the values of θ_{t−1}, to which the parts are applied; "" in an anchor.
    base: digest of the writer's state; it must equal commit t's base.
    layout: in an anchor, [name, shape, dtype] in flat order.
    """

    kind = "weights"
    t: Step
    base: Word
    parent: Word
    digest: Word
    values: Count
    changed: Count
    parts: tuple[WeightsPart, ...]
    nonce: Word
    at: UnixTime
    layout: list[Any] = field(default_factory=list[Any])

    def check_consistency(self) -> None:
        for part in self.parts:
            check_blob(part.blob, layout.weights_blob(self.t, ""))
        if not self.parent and self.changed != self.values:
            raise ValueError("it has no parent, and not all values")
        for name, shape, dtype in [] if self.parent else self.layout:
            if not (isinstance(name, str) and isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in shape)):
                raise ValueError(f"its layout has {brief_repr([name, shape, dtype])}")
        if not self.parent and sum(prod(shape) for _, shape, _ in self.layout) != self.values:
            raise ValueError(f"its layout is not one of {self.values} values")

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class Leave(Record):
    """The leave record of a generation: its replica left with notice.

    residual: key of the file with its codec's residuals, for the next generation alone ("": none, or no time).
    """

    kind = "leave"
    slot: Holder
    generation: Generation
    step: Step
    base: Word
    reason: str
    nonce: Word
    at: UnixTime
    residual: Key = ""
    residual_digest: Word = ""

    def check_consistency(self) -> None:
        if self.residual:
            check_blob(self.residual, layout.residual_blob(self.slot, self.generation, ""))


@dataclass(frozen=True)
class Spent:
    """A run's costs as its supervisor knew them at time `at`, for readers without the log.

    rate: US dollars per hour that are still added, at most until `until`.   logged: number of log events in the sum.
    """

    usd: Usd = 0.0
    hours: Hours = 0.0
    rate: Usd = 0.0
    at: UnixTime = 0.0
    until: UnixTime = 0.0
    logged: Count = 0


def _is_size(text: str) -> bool:
    """Whether `text` is as fleet.keep (diloco/run/sections.py)."""
    return re.fullmatch(r"all|window|[0-9]+(\.[0-9]+)? *(B|[kMGT]i?B)?", text) is not None


@dataclass(frozen=True)
class Control(Record):
    """A change of the desired state; a field of None changes nothing.

    places: where replicas run, as the launcher describes it (executors/platforms/places.py); not interpreted here.
    max_usd, max_hours: the budget, 0 for none.
    until: Unix time at which every replica leaves, unless a later record names a later time; 0 for none.
    keep: the budget of bytes to which `diloco gc` has collected.   spent: the costs so far, with a new `until`.
    guest: a slot that takes part beside the desired replicas, for a process that was started by hand.
    actors: the number of processes that only sample; their places are among `places`.
    """

    kind = "control"
    later = ("keep", "spent", "guest", "actors")
    n: Count
    nonce: Word
    at: UnixTime
    replicas: Slots | None = None
    steps: Annotated[int, Within(1, 10**10 - 1)] | None = None
    min_replicas: Slots | None = None
    drain: Member | None = None
    stop: bool = False
    resume: bool = False
    places: tuple[dict[str, Any], ...] | None = None
    max_usd: Usd | None = None
    max_hours: Hours | None = None
    allow_unknown_price: bool | None = None
    until: Annotated[float, Within(0, 1e12)] | None = None
    keep: Annotated[str, Longest(128), Where(_is_size, "size, such as 20 GB")] | None = None
    spent: Spent | None = None
    guest: Member | None = None
    actors: Annotated[int, Within(0, layout.MOST_SLOTS)] | None = None


@dataclass(frozen=True)
class Beat(Record):
    """A heartbeat: overwritten, and only a hint. A heartbeat shows a living replica only while `n` changes.

    phase: boot, heal, train, wait or left; sample for actors.   rate: seconds per inner step, 0 if unknown.
    data: the inner step, in its slot's data, that the replica trains on; actors read this (diloco/actor/).
    box_usd: US dollars that all sessions of its slot spent on sandboxes (docs/reference/boxes.md).
    evaluates: whether the replica scores held-out prompts, which is progress without inner steps.
    """

    kind = "beat"
    later = ("data", "box_usd", "evaluates")
    slot: Holder
    generation: Generation
    n: Count
    phase: Word
    step: Step
    inner: Count
    rate: Seconds
    at: UnixTime
    host: str = ""
    pid: Pid = 0
    note: str = ""
    data: Count = 0
    box_usd: Usd = 0.0
    evaluates: bool = False
