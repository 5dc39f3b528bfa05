"""Writers into the bucket that do not belong to the run, and objects that vanish.

    malformed   a register that does not exist yet is taken by bytes that are not a record; beats are overwritten
    forged      in a run under a key: a register that stands is overwritten by a writer without the key
    vanished    an expiry rule, or a person, deletes an object of the run

A run goes on with the right bits, or a replica ends loudly and the operator acts: puts back what stood there, and takes
away what never was the run's.  Which of the two, says `LOUD`.

Not promised: control records that vanish or are overwritten, and the newest commit. What the operator wished, or what
was decided, cannot be known any more then; docs/reference/operations.md says so. Nor a commit that vanishes between a
closer's last look for a gap and its `put_once`: a deleted register can be won by a replica that slept (seed 41003320).
"""

import json
import random
from typing import TYPE_CHECKING, Any

from rendezvous import layout
from rendezvous.records import records
from rendezvous.records.records import Record
from tests.sim.store import kind

if TYPE_CHECKING:
    from tests.sim.simulate import World

KINDS: dict[str, type[Record]] = {
    "offer": records.Offer, "claim": records.Claim, "control": records.Control, "leave": records.Leave,
    "mean": records.Mean, "manifest": records.Snapshot, "beat": records.Beat, "commit": records.Commit,
}  # fmt: skip
VANISHING = {
    "delta", "mean blob", "snapshot blob", "residuals", "offer", "claim", "leave", "mean", "manifest", "commit", "beat",
}  # fmt: skip
FORGED = ("offer", "claim", "leave", "mean", "manifest", "commit")
VALUES: list[Any] = [
    None, True, -1, 0, 10**30, 1.5, -0.5, "", "1", "three", "²", "\ud800", [], [1], {}, {"a": []}, [[[]]], "x" * 3000,
]  # fmt: skip


def begin(world: "World") -> None:
    """The adversary acts at random moments until the calm."""
    for rate, act in ((world.plan.malformed, write_malformed), (world.plan.forge, forge)):
        if rate:
            _again(world, rate, act)


def _again(world: "World", rate: float, act: Any) -> None:
    def now() -> None:
        if world.now < world.plan.calm:
            act(world)
            _again(world, rate, act)

    world.at(world.now + world.rng.expovariate(rate), now)


# ---------------------------------------------------------------------- malformed records


def write_malformed(world: "World") -> None:
    r = world.rng
    what = r.choice(("offer", "offer", "claim", "control", "leave", "mean", "manifest", "beat", "beat", "commit"))
    key = free_key(world, what)
    if what == "commit" and r.random() < 0.8:
        return  # nothing can be done against it but to delete it
    if what != "beat" and key in world.objects:
        return
    lies = what == "beat" and not world.plan.key and r.random() < 0.5
    world.objects[key] = lying_beat(world, key) if lies else malformed(world, what)
    world.visible.setdefault(key, world.now)
    if what != "beat":
        world.planted.add(key)
    world.fired[f"{'lying' if lies else 'malformed'}: {what}"] += 1


def free_key(world: "World", what: str) -> str:
    """A register of that kind that a replica may want to write, or read, next."""
    r, head, fleet = world.rng, len(world.observer.commits), world.fleet
    slot = layout.slot_name(r.randrange(max(1, fleet.wanted.universe)))
    if what == "offer":
        return layout.offer_key(head + r.randrange(2), slot, r.randrange(2))
    if what in ("claim", "leave"):
        held = max((g for s, g in world.observer.holders if s == slot), default=0)
        return layout.claim_key(slot, held + 1) if what == "claim" else layout.leave_key(slot, max(1, held))
    if what == "control":
        return layout.control_key(fleet.wanted.records + r.choice((0, 0, 1, 3)))
    if what == "mean":
        return layout.mean_key(head, r.randrange(3))
    if what == "manifest":
        return layout.snapshot_key(head + 1)
    return layout.commit_key(head + r.randrange(2)) if what == "commit" else layout.beat_key(slot)


def malformed(world: "World", what: str) -> bytes:
    """Bytes that no strict reader takes for a record of that kind."""
    r, same = world.rng, [k for k in sorted(world.objects) if kind(k) == what and k not in world.planted]
    for _ in range(8):
        how = r.random()
        if how < 0.6 and same:
            body = mangled(r, world.plain(world.objects[r.choice(same)]))
        elif how < 0.9:
            body = json.dumps(random_json(r)).encode()
        else:
            body = r.choice((b"", b"{", b"\xff\xfe", b"[" * 5000, b'{"a":' * 3000, b"null", b"1e999", b"0" * 70000))
        if not is_record(what, body):
            return body
    return b"{}"


def is_record(what: str, body: bytes) -> bool:
    try:
        KINDS[what].decode(body)
    except Exception:
        return False
    return True


def mangled(r: random.Random, body: bytes) -> bytes:
    """A record with one field of another type, or a piece of it."""
    try:
        fields = json.loads(body)
        name = r.choice(sorted(fields))
        fields.keys()
    except (ValueError, TypeError, IndexError, AttributeError, RecursionError):  # mangled before
        return body[: len(body) // 2]
    if r.random() < 0.15:
        return body[: r.randrange(len(body))]
    if r.random() < 0.15:
        fields.pop(name)
    else:
        fields[name] = r.choice(VALUES)
    return json.dumps(fields).encode()


def random_json(r: random.Random, depth: int = 0) -> Any:
    if depth > 3 or r.random() < 0.4:
        return r.choice(VALUES)
    if r.random() < 0.5:
        return [random_json(r, depth + 1) for _ in range(r.randrange(4))]
    names = ("kind", "wire", "slot", "generation", "n", "step", "t", "offers", "seal")
    return {r.choice(names): random_json(r, depth + 1) for _ in range(r.randrange(5))}


def lying_beat(world: "World", key: str) -> bytes:
    """A beat that is one, and untrue: of another step, generation or phase."""
    r, slot = world.rng, key.removeprefix("alive/").removesuffix(".json")
    phase = r.choice(("boot", "heal", "train", "wait", "left"))
    step, generation = r.choice((0, 3, 10**6)), r.choice((1, 1, 2, 3, 999))
    return records.Beat(slot, generation, r.randrange(1000), phase, step, r.randrange(5), r.random(), 0.0).encode()


# ---------------------------------------------------------------------- registers that stand


def forge(world: "World") -> None:
    """Overwrites a register in a run whose key he has not."""
    what = world.rng.choice(FORGED)
    same = [k for k in sorted(world.objects) if kind(k) == what and k not in world.originals and k not in world.planted]
    if not same:
        return
    key = world.rng.choice(same[-3:])
    body = world.objects[key]
    world.originals[key], world.objects[key] = body, altered(body)
    world.observer.lost.add(key)
    world.fired[f"forged: {what}"] += 1


def altered(body: bytes) -> bytes:
    """A well-formed record with the tag of the true one: another nonce, other offers."""
    fields = json.loads(body)
    fields["nonce"] = "forged"
    if fields["kind"] == "commit":
        fields["offers"] = fields["offers"][1:] or fields["offers"] * 2
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def may_vanish(world: "World", key: str) -> None:
    """An object was written: perhaps it will not stay."""
    plan = world.plan
    if plan.vanish and kind(key) in VANISHING and world.now < plan.calm and world.rng.random() < plan.vanish:
        world.at(world.now + world.rng.expovariate(1 / world.rng.choice((1.0, 8.0, 40.0))), lambda: vanish(world, key))


def may_lose(world: "World", t: int) -> bool:
    """May commit t vanish?  Not the newest one, and not while a closer that slept is about to write it."""
    if any(p.deciding == t for p in world.processes if not p.gone):
        world.fired["a sleeper would win a vanished commit"] += 1
        return False
    return layout.commit_key(t + 1) in world.objects and layout.commit_key(t + 1) not in world.planted


def vanish(world: "World", key: str) -> None:
    body = world.objects.get(key)
    touched = key in world.originals or key in world.torn or key in world.planted
    if body is None or touched or world.now >= world.plan.calm:
        return
    if key == layout.snapshot_key(0) and not world.observer.commits:
        return  # θ₀ is the run's model, which all replicas of a real run have; here each comes with its own
    if kind(key) == "commit" and not may_lose(world, int(key.split("/")[1])):
        return
    del world.objects[key], world.visible[key]
    if not key.startswith("alive/"):
        world.vanished[key] = body
    world.observer.lost.add(key)
    world.fired[f"vanished: {kind(key)}"] += 1
