"""The bucket and the time of one simulated process, and what befalls a request or an object at rest.

    request ──▶ latency ──┬─ outage: no answer, or nothing can be written
                          ├─ error · slow · kill before · pause before · torn (half a blob, then no answer)
                          ▼
                       effect on the bucket, at one instant ──▶ Observer
                          │
                          └─ kill after · pause after · lost answer · duplicate (again, later)

    at rest   some time after a blob was written a bit flips, or its end is gone; a repair writes the same bytes

Everything that happens is counted in `World.fired`: a fault that never fires proves nothing.

Not promised: registers that rot by a bit.  tests/sim/adversary.py has malformed, forged and vanished ones.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent

from rendezvous import layout
from rendezvous.errors import KeyExists, StoreFull, StoreUnclear
from rendezvous.store import Body, Buffer, Stream
from tests.sim.replica import Process
from tests.support.fakes import FOREIGN

if TYPE_CHECKING:
    from tests.sim.simulate import World

BLOBS = (".bin", ".safetensors")
DEADLY = {"leave": 20.0, "manifest": 12.0, "snapshot blob": 12.0, "control": 12.0, "mean": 10.0, "beat": 1.0}


def kind(key: str) -> str:
    """The kind of object under a key: "claim", "delta", "mean blob", …"""
    parts = key.split("/")
    if parts[0] == "steps" and len(parts) > 2:
        room = parts[2].removesuffix(".json")
        return "mean blob" if room == "mean" and key.endswith(".bin") else room
    if parts[0] == "snapshots":
        return "snapshot blob" if key.endswith(".safetensors") else "manifest"
    return {"replicas": "claim", "alive": "beat"}.get(parts[0], parts[0])


class SimClock:
    """No two processes agree on the time, nor on how fast it goes."""

    def __init__(self, world: "World", process: Process) -> None:
        self._world, self._process = world, process

    def now(self) -> float:
        return self._world.now * self._process.drift + 1000.0 * self._process.id

    def wall(self) -> float:
        return self._world.now + self._process.skew

    def sleep(self, seconds: float) -> None:
        self._world.wait(self._process, seconds / self._process.drift)


class SimStore:
    """The bucket as one process sees it: each call takes time, and something may happen before or after it."""

    cheap = True  # one request after the other: threads would end the order of the simulation
    url = "sim://"

    def __init__(self, world: "World", process: Process) -> None:
        self._world, self._process = world, process
        self._mute = process.slot in [layout.slot_name(i) for i in world.plan.mute]

    def put(self, key: str, body: Body) -> None:
        if self._mute and key.startswith("alive/"):
            self._world.fired["mute"] += 1
            raise StoreUnclear("the heartbeat does not get through")
        self._call("put", key, bytes(body) if isinstance(body, Buffer) else self._read(body))

    def create(self, key: str, body: Buffer) -> None:
        self._call("create", key, bytes(body))

    def get(self, key: str) -> bytes | None:
        return self._call("get", key)

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        body = self._call("get", key)
        if body is None or len(body) < start + len(out):
            return False
        out[:] = body[start : start + len(out)]
        return True

    def list(self, prefix: str) -> list[str]:
        return self._call("list", prefix)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:  # one by one, so that a collector can die between two
            self._call("delete", key)

    def _call(self, verb: str, key: str, body: bytes | None = None) -> Any:
        w, p = self._world, self._process
        latency = 0.002 + w.rng.expovariate(1 / w.plan.latency)
        if verb == "put" and key.endswith(BLOBS):
            latency *= w.plan.slow_blobs
        w.wait(p, latency)
        self._outage(verb)
        fault = self._fault(verb, key) if w.now < w.plan.calm else ""
        if not fault:
            return w.effect(p, verb, key, body)
        w.fired[fault] += 1
        if fault.startswith("kill"):
            w.fired[f"kill at {verb} {kind(key)}" if verb in ("put", "create") else f"kill at {verb}"] += 1
        return self._faulty(fault, verb, key, body)

    def _read(self, body: Stream) -> bytes:
        """Piece by piece, and each takes a while: its owner may have something else to do meanwhile."""
        pieces = list[bytes]()
        for piece in body:
            pieces.append(bytes(piece))
            self._world.wait(self._process, self._world.rng.expovariate(1 / (10 * self._world.plan.latency)))
        self._world.fired["a body is streamed"] += 1
        return b"".join(pieces)

    def _outage(self, verb: str) -> None:
        w = self._world
        start, seconds, how = w.plan.outage
        if start <= w.now < min(start + seconds, w.plan.calm):
            if how == "silent":
                w.fired["outage"] += 1
                raise StoreUnclear("no answer")
            if verb in ("put", "create"):
                w.fired["store full"] += 1
                raise StoreFull("no space left")

    def _fault(self, verb: str, key: str) -> str:
        plan, x = self._world.plan, self._world.rng.random()
        writes = verb in ("put", "create", "delete")
        deadly = {"delete": 80.0, "list": 4.0, "get": 1.0}.get(verb) or DEADLY.get(kind(key), 4.0)
        chances = (
            ("error", plan.error), ("kill before", deadly * plan.kill / 2), ("kill after", deadly * plan.kill / 2),
            ("pause before", plan.pause / 2), ("pause after", plan.pause / 2), ("slow", plan.slow),
            ("foreign exception", plan.foreign * self._process.slot.startswith("r")),
            ("lost answer", plan.lost), ("duplicate", plan.duplicate), ("torn upload", plan.torn),
        )  # fmt: skip
        for name, chance in chances[: 7 if not writes else 10 if key.endswith(BLOBS) and verb == "put" else 9]:
            x -= chance
            if x < 0:
                return name
        return ""

    def _faulty(self, fault: str, verb: str, key: str, body: bytes | None) -> Any:
        w, p = self._world, self._process
        if fault == "error":
            raise StoreUnclear("no answer")
        if fault in ("torn upload", "kill before") and w.plan.torn and verb == "put" and key.endswith(BLOBS):
            self._tear(verb, key, body or b"")
        if fault == "torn upload":
            raise StoreUnclear("the upload broke off")
        if fault == "kill before":
            w.die(p)
        if fault == "pause before":
            self._pause()
        if fault == "slow":
            self._hang(w.rng.uniform(1.0, 20.0))
        if fault == "foreign exception" and w.rng.random() < 0.5:
            raise w.rng.choice(FOREIGN)("a bug in a client, or below it")
        answer = w.effect(p, verb, key, body)
        if fault == "foreign exception":
            raise w.rng.choice(FOREIGN)("a bug in a client, or below it")
        if fault == "kill after":
            w.die(p)
        if fault == "pause after":
            self._pause()
        if fault == "lost answer":
            raise StoreUnclear("the answer was lost")
        if fault == "duplicate" and not (w.places is not None and w.places.befalls(p)):
            w.at(w.now + w.rng.expovariate(0.1), lambda: again(w, p, verb, key, body))
        return answer

    def _tear(self, verb: str, key: str, body: bytes) -> None:
        """A store that shows half-written objects."""
        w = self._world
        if key not in w.objects and key not in w.vanished and body:
            w.torn.add(key)
            w.fired["half a blob is seen"] += 1
            w.effect(self._process, verb, key, body[: w.rng.randrange(len(body))])

    def _hang(self, seconds: float) -> None:
        """One request takes very long; the greenlet that made it can do nothing else."""
        w, p = self._world, self._process
        if getcurrent() not in p.tasks[1:2]:  # its heartbeat
            p.hangs_until = max(p.hangs_until, w.now + seconds)
        w.wait(p, seconds)

    def _pause(self) -> None:
        """SIGSTOP: every greenlet of the process stands still."""
        w, p = self._world, self._process
        p.asleep_until = w.now + w.rng.choice((3.0, 12.0, 40.0) if w.plan.keep is None else (12.0, 40.0))
        w.wait(p, 0.0)
        if p.rv is not None and (p.slot, p.rv.generation + 1) in w.observer.holders:
            w.fired["zombie returns"] += 1


def again(world: "World", process: Process, verb: str, key: str, body: bytes | None) -> None:
    """A retry by some layer below us arrives late.  It would win a commit that has vanished; see `may_lose`."""
    if kind(key) == "commit" and world.vanished.get(key, body) != body:
        return
    if world.places is not None and world.places.befalls(process):
        return
    try:
        world.effect(process, verb, key, body)
    except KeyExists:
        return


# ---------------------------------------------------------------------- objects at rest


def may_rot(world: "World", key: str) -> None:
    """A blob was written: perhaps it will not stay what it is."""
    plan = world.plan
    often = 5 if key.endswith(".safetensors") else 1
    if plan.rot and kind(key) in plan.rots and world.now < plan.calm and world.rng.random() < often * plan.rot:
        world.at(world.now + world.rng.expovariate(1 / plan.rot_after), lambda: rot(world, key))


def rot(world: "World", key: str) -> None:
    """Now it is damaged: one bit, or its end."""
    body = world.objects.get(key)
    if not body or key in world.originals or key in world.torn or world.now >= world.plan.calm:
        return
    at, how = world.rng.randrange(len(body)), world.rng.choice(("rot", "truncated"))
    bad = body[:at] + bytes([body[at] ^ 1 << world.rng.randrange(8)]) + body[at + 1 :] if how == "rot" else body[:at]
    world.originals[key], world.objects[key] = body, bad
    world.fired[f"{how}: {kind(key)}"] += 1


def restore(world: "World") -> None:
    """The operator puts damaged and vanished objects back from a backup, and deletes what never was the run's."""
    if world.originals or world.vanished or world.planted:
        world.fired["restored by the operator"] += 1
    world.objects.update(world.originals)
    for key, body in world.vanished.items():
        world.objects.setdefault(key, body)
        world.visible.setdefault(key, world.now)
    for key in [k for k in world.planted if kind(k) in ("commit", "mean", "manifest")]:
        world.planted.discard(key)
        del world.objects[key], world.visible[key]
    world.originals.clear()
    world.vanished.clear()
