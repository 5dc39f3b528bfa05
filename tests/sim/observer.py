"""Sees every write and every round of training; keeps its own θ, from the blobs, in its own arithmetic.

one commit per step, registers written once         the same θ and the same mean everywhere
every offer is listed once or expires               nothing durable before the closer's look is forgotten
a chain without gaps                                at least m fresh offers, by the wishes of that moment
fences only rise, and reach every claim             offers only by holders, from the chain's θ, of their own work
blob before offer, offer before commit              snapshots are what the chain confirmed
a residual goes into one body, of its own life      damaged blobs are only ever overwritten with their own bytes
registers are never deleted                         nothing is collected that a reader may need
steps are made again when the faults are over       every living replica follows the head

Not promised: that it sees what is never written, nor applied.
"""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from safetensors.numpy import load

from rendezvous import layout
from rendezvous.records.records import Claim, Commit, Control, Leave, Mean, Offer, Snapshot
from tests.sim.codecs import Kept, Sent, cut, decoded, encoded, shards, taken_back, written
from tests.sim.replica import LR, MU, Process, SimState, digest_of
from tests.support.audit import is_named

if TYPE_CHECKING:
    from tests.sim.simulate import World

STATE = "theta", "momentum"
RECOVERY = 60.0  # seconds after the last fault within which steps must be made again


class Violation(BaseException):
    """A promise of the protocol was broken: (promise, what was seen).  Nothing in the engine may catch it."""


@dataclass
class Durable:
    """An offer as the observer saw it written."""

    offer: Offer
    at: float
    key: str = ""


class Observer:
    """Sees every write; keeps its own θ, from the blobs, in its own arithmetic."""

    def __init__(self, world: "World") -> None:
        self.w, self.rules = world, world.plan.rules
        self.commits: list[Commit] = []
        self.digests: list[str] = []
        self.means: list[np.ndarray] = []
        self.theta: list[np.ndarray] | None = None
        self.momentum: list[np.ndarray] = []
        self.bases: list[str] = []  # of θ_0, θ_1, …
        self.offers: dict[tuple[int, str, str], Durable] = {}  # step, slot, nonce
        self.listed: dict[tuple[int, str], int] = {}  # (step, slot) -> the commit that lists it
        self.holders: dict[tuple[str, int], tuple[set[int], float]] = {}  # -> process, since
        self.wishes: list[tuple[float, int]] = []  # (since, min_replicas)
        self.last_commit, self.times = 0.0, list[float]()
        self.at_calm: int | None = None
        self.offered_blobs: set[str] = set()
        self.snapshots: list[int] = []  # steps of confirmed ones
        self.snapshot_blobs: list[str] = []  # that a manifest names
        self.gone: set[str] = set()  # collected blobs
        self.listed_by: dict[str, int] = {}  # a body -> the commit that lists it
        self.parts: dict[int, set[int]] = {}  # step -> parts of its mean that were announced
        self.lost: set[str] = set()  # registers that vanished at some time
        self.residuals: dict[str, bytes] = {}  # left by replicas that went
        self.inherited: dict[str, bytes] = {}
        self.applied = 0

    def broken(self, promise: str, seen: str) -> NoReturn:
        raise Violation(promise, f"{seen} (at {self.w.now:.2f} s)")

    def _wish(self, record: Control) -> None:
        self.w.fleet.wanted = self.w.fleet.wanted.with_control(record)
        self.wishes.append((self.w.now, self.w.fleet.wanted.min_replicas))

    # ------------------------------------------------------------ writes

    def written(self, process: Process, key: str, old: bytes | None, body: bytes) -> None:
        if old is not None:
            self._overwritten(key, old, body)
            return
        room = key.split("/", 1)[0]
        if room == "steps":
            self._of_step(process, int(key[6:16]), key, body)
        elif room == "replicas":
            self._claimed(process, Claim.decode(body))
        elif room == "snapshots" and key.endswith("manifest.json"):
            self._snapshot(Snapshot.decode(body))
        elif room == "leave":
            self._left(process, Leave.decode(body))
        elif room == "control":
            self._wish(Control.decode(body))

    def _of_step(self, process: Process, step: int, key: str, body: bytes) -> None:
        kind = key[17:22]
        if kind == "delta" and process.rv is not None:
            self._encoded(process, step % self.rules.fragments, key)
        elif kind == "offer":
            self._offered(process, step, key, Offer.decode(body))
        elif kind == "commi":
            self._committed(process, step, Commit.decode(body), body)
        elif kind == "mean/" and key.endswith(".json"):
            self._announced(process, step, int(key[-9:-5]), Mean.decode(body))

    def _overwritten(self, key: str, old: bytes, body: bytes) -> None:
        if key.startswith("alive/"):
            return
        if self._unannounced(key) and old != body:
            self.w.fired["an unannounced snapshot is written again"] += 1
            self.w.torn.discard(key)
            self.w.originals.pop(key, None)
        elif key in self.w.torn and body.startswith(old):
            self.w.torn.discard(key)
            self.w.fired["half a blob is replaced"] += 1
        elif key in self.w.originals:
            if self.w.originals.pop(key) != body:
                self.broken("repaired with what it was", key)
            self.w.fired[f"repaired: {'delta' if '/delta/' in key else key.rpartition('.')[2]}"] += 1
        elif old != body:
            self.broken("write once", f"{key} was overwritten")

    def _unannounced(self, key: str) -> bool:
        """A snapshot's blob that no manifest names, where memory is bad: a bit may flip between two tries to write it.

        No replica reads it before there is a manifest, and that is checked against the bytes that stand then.
        """
        if not key.endswith(".safetensors") or not key.startswith("snapshots/") or not self.w.plan.flip:
            return False
        manifest = self.w.record(layout.snapshot_key(int(key.split("/")[1])))
        return not manifest or Snapshot.decode(manifest).blob != key

    def put_back(self, key: str, lost: bytes, body: bytes) -> None:
        """A blob had vanished, and is written again; or a register, by a retry that arrives late."""
        if body != lost and not self._unannounced(key):
            self.broken("repaired with what it was", key)
        self.w.fired[f"repaired: a vanished {'register' if key.endswith('.json') else 'blob'}"] += 1

    def deleted(self, process: Process, key: str) -> None:
        """A collector must leave every blob that a reader from the second-newest snapshot on may need.

        A body goes when its commit is older, or older than the newest one, and its mean was announced in all parts."""
        if key.startswith("residuals/"):
            return
        if key.endswith(".json"):
            self.broken("registers stay", f"{process.slot} deletes {key}")
        floor = sorted(self.snapshots)[-2] if len(self.snapshots) > 1 else 0
        ends = floor - ("/delta/" in key) * self.rules.fragments * self.rules.max_carry
        if int(key.split("/")[1]) >= ends and not self._is_replaced(key, floor):
            self.broken("nothing is collected that is needed", f"{process.slot} deletes {key}, the floor is {floor}")
        self.gone.add(key)

    def _is_replaced(self, key: str, floor: int) -> bool:
        t = self.listed_by.get(key)
        if t is None or t >= max(self.snapshots, default=0):
            return False
        self.w.fired["a body in the window goes"] += t >= floor
        return t < floor or self._announced_in_full(t)

    def _announced_in_full(self, t: int) -> bool:
        parts = self.parts.get(t, set[int]())
        return parts >= set(range(max(1, len(self.commits[t].owners)))) - self._empty_parts(t)

    def _empty_parts(self, t: int) -> set[int]:
        """Parts without a shard, where there are more owners than shards: no owner announces them."""
        owners = len(self.commits[t].owners)
        if not owners:
            return set()
        count = len(shards(self.rules.codec, len(self.means[t]), self.rules.shard_elements))
        cuts = [round(j * count / owners) for j in range(owners + 1)]
        return {j for j in range(owners) if cuts[j] == cuts[j + 1]}

    def _bounded(self) -> None:
        """Blobs that a record names, and that may go, fit into the budget, except the last steps and a new snapshot.

        Needed here are the blobs that were needed before the newest snapshot, and for readers of the snapshot that the
        last commit but one names: the closer of the next step hears of it there, and deletes; or, where there is none,
        the writer of the last snapshot does.
        """
        budget, objects = self.w.plan.keep, self.w.objects
        if not budget or len(self.snapshots) < 3 or self.w.plan.list_lag > 5:  # what is not listed is deleted later
            return
        heard = [t for t in sorted(self.snapshots) if t <= self.commits[-2].snapshot]
        floor, newest = map(min, sorted(self.snapshots)[-3:-1], [0, 0, *heard][-2:])
        carry = self.rules.fragments * self.rules.max_carry
        named = [o.blob for c in self.commits for o in c.offers] + self.snapshot_blobs
        means = [k for k in objects if "/mean/" in k and k.endswith(".bin")]
        size = {key: len(objects[key]) for key in {*named, *means} - self.gone if key in objects}
        ends = {"delta": floor - carry, "mean": floor, "snaps": floor}
        kind = {key: "snaps" if key.startswith("snap") else key.split("/")[2] for key in size}
        old = {key for key, t in self.listed_by.items() if t < floor or (t < newest and self._announced_in_full(t))}
        need = sum(n for key, n in size.items() if int(key.split("/")[1]) >= ends[kind[key]] and key not in old)
        slack = 3 * max(n for key, n in size.items() if kind[key] == "snaps") + sum(
            n for key, n in size.items() if int(key.split("/")[1]) >= len(self.commits) - 2
        )
        if sum(size.values()) > max(budget, need) + slack:
            self.broken("what is kept is bounded", f"{sum(size.values())} bytes, {need} needed, fleet.keep is {budget}")

    def _encoded(self, process: Process, f: int, key: str) -> None:
        """Encode a new pseudogradient, with the residual of the last one."""
        if key in self.gone:  # a replica that still reads that step mends the blobs it misses
            self.w.fired["a collected blob comes back"] += 1
            return
        x, theta = np.frombuffer(process.work, np.float32), np.frombuffer(process.theta, np.float32)
        process.sent[f] = Sent(key, *written(self.rules.codec, x, self._kept(process, f, len(x)), theta))

    def _kept(self, process: Process, f: int, size: int) -> Kept:
        """The residual of this life's codec; all of a body that no offer names."""
        if f not in process.sent:
            return process.inherited.get(f, Kept.nothing(size))
        sent = process.sent[f]
        return sent.kept if sent.key in self.offered_blobs else taken_back(self.rules.codec, sent)

    def _left(self, process: Process, leave: Leave) -> None:
        if leave.residual:
            self.residuals[leave.residual] = body = self.w.truth(leave.residual) or b""
            for name, left in load(body).items():
                f = int(name.rpartition(".")[2])
                mine = self._kept(process, f, len(left)).arrays(self.rules.codec, f)
                if mine[name].tobytes() != left.tobytes():
                    self.broken("each work and each residual once", f"{process.slot} leaves another {name} than its")

    def inherits(self, process: Process, generation: int) -> None:
        """A life begins with the residual of that generation's codec."""
        left = Leave.decode(self.w.record(layout.leave_key(process.slot, generation)))
        if left.residual in self.inherited:
            self.broken("each work and each residual once", f"{left.residual} is inherited twice")
        found = load(self.inherited.setdefault(left.residual, self.residuals[left.residual]))
        for f in {int(name.rpartition(".")[2]) for name in found}:
            residual = found[f"residual.{f}"]
            process.inherited[f] = Kept(residual, found.get(f"age.{f}", np.zeros(len(residual), np.uint8)))

    def _body(self, process: Process, offer: Offer) -> bytes:
        """The bytes that this life's work must have on the wire."""
        sent = process.sent.get(offer.step % self.rules.fragments)
        return sent.body if sent is not None and sent.key == offer.blob else b""

    def _claimed(self, process: Process, claim: Claim) -> None:
        name, key = (claim.slot, claim.generation), layout.claim_key(claim.slot, claim.generation)
        if claim.pid != process.id or (name in self.holders and key not in self.lost):
            self.broken("write once", f"{claim} by process {process.id}")
        before, _ = self.holders.get(name, (set[int](), 0.0))
        self.holders[name] = before | {process.id}, self.w.now

    def _offered(self, process: Process, step: int, key: str, offer: Offer) -> None:
        if process.id not in self.holders.get((offer.slot, offer.generation), (set[int](), 0.0))[0]:
            self.broken("fencing", f"{key} by process {process.id}, which does not hold generation {offer.generation}")
        blob = self.w.truth(offer.blob)
        if offer.blob not in self.gone:  # its writer slept in between, and no closer will list it
            if blob is None or not self._is(blob, offer):
                self.broken("blob before offer", key)
            if blob != self._body(process, offer):
                self.broken("each work and each residual once", f"{key} is not its replica's own work and residual")
        on_chain = step >= len(self.bases) or offer.base == self.bases[step]
        if (on_chain and process.tainted_work) or not (on_chain or process.tainted):
            self.broken("base on the chain", f"{key}, tainted={process.tainted_work}, starts from {offer.base}")
        self.offers[step, offer.slot, offer.nonce] = Durable(offer, self.w.now, key)
        self.offered_blobs.add(offer.blob)

    def _announced(self, process: Process, step: int, part: int, mean: Mean) -> None:
        owners = self.commits[step].owners if step < len(self.commits) else ()
        self.w.fired["mean announced"] += 1
        self.parts.setdefault(step, set()).add(part)
        self.w.fired["part taken over"] += bool(owners) and process.slot != owners[part]
        if mean.blob in self.gone:
            return
        if step >= len(self.commits) or self.w.truth(mean.blob) != self._part(step, part):
            self.broken("the same mean everywhere", f"announced mean of step {step}, part {part}")

    def averaged(self, process: Process, mean: np.ndarray) -> None:
        """A replica is about to take an outer step with this."""
        step = process.rv.step if process.rv else 0
        if process.strays:
            return
        if step >= len(self.means) or mean.tobytes() != self.means[step].tobytes():
            self.broken("the same mean everywhere", f"{process.slot} averages something else in step {step}")

    def _part(self, step: int, j: int) -> bytes:
        """Part j of a mean on the wire: the shards, dealt out to the owners in runs."""
        mean, owners = self.means[step], len(self.commits[step].owners)
        if not owners:
            return mean.tobytes()
        cuts = shards(self.rules.codec, len(mean), self.rules.shard_elements)
        part = cuts[round(j * len(cuts) / owners) : round((j + 1) * len(cuts) / owners)]
        return encoded(self.rules.codec, mean[part[0][0] : part[-1][1]])

    def _snapshot(self, snapshot: Snapshot) -> None:
        if snapshot.blob in self.gone:
            return
        blob = self.w.truth(snapshot.blob)
        if blob is None:
            self.broken("blob before manifest", str(snapshot))
        arrays = load(blob)
        if snapshot.t == 0:  # zeros are not written down, all momentum among them
            zeros = {f"{name}.{i}": np.zeros(n, "f4") for i, n in enumerate(self.w.plan.sizes) for name in STATE}
            arrays = zeros | arrays
        theta = [arrays[f"theta.{i}"].copy() for i in range(self.rules.fragments)]
        momentum = [arrays[f"momentum.{i}"].copy() for i in range(self.rules.fragments)]
        if snapshot.t == 0 and not self.bases:
            self.theta, self.momentum = theta, momentum
            self.bases.append(digest_of(theta, momentum))
        if [snapshot.base, digest_of(theta, momentum)] != 2 * self.bases[snapshot.t : snapshot.t + 1]:
            self.broken("confirmed snapshots", f"snapshot {snapshot.t} says {snapshot.base}")
        self.snapshot_blobs.append(snapshot.blob)
        if snapshot.confirmed and snapshot.t not in self.snapshots:
            self.snapshots.append(snapshot.t)

    def _is(self, blob: bytes, named: Any) -> bool:
        """Are these the bytes that an offer, or a commit, names?  In shards, each by its digest."""
        size = self.w.plan.sizes[named.step % self.rules.fragments]
        pieces = cut(self.rules.codec, blob, size, self.rules.shard_elements)
        if named.shards and (len(pieces) != len(named.shards) or not all(map(is_named, pieces, named.shards))):
            return False
        return is_named("".join(named.shards).encode() if named.shards else blob, named.digest)

    # ------------------------------------------------------------ a commit

    def _committed(self, process: Process, t: int, commit: Commit, body: bytes) -> None:
        self._follows(t, commit)
        fresh = [self._fate(t, listed, commit) for listed in commit.offers].count(t)
        if fresh < commit.m or commit.m not in self._wished(process.scan):
            self.broken("at least m fresh", f"commit {t}: {fresh} fresh, m={commit.m}, wishes {self.wishes}")
        self._nothing_forgotten(process, t, commit)
        for (slot, generation), (_, since) in self.holders.items():
            known = not any(key.startswith(f"replicas/{slot}/") for key in self.lost)
            if known and since < process.scan and commit.fence.get(slot, 0) < generation:
                self.broken("fencing", f"commit {t} does not fence {slot} below generation {generation}")
        self._step(t, commit, body)

    def _wished(self, since: float) -> list[int]:
        """Every min_replicas that was wished at some moment from `since` until now."""
        ends = [at for at, _ in self.wishes[1:]] + [self.w.now]
        return [m for (_, m), end in zip(self.wishes, ends, strict=True) if end >= since]

    def _follows(self, t: int, commit: Commit) -> None:
        if t != len(self.commits) or commit.t != t:
            self.broken("chain without gap", f"commit {t} when the head is {len(self.commits)}")
        if commit.prev != (self.digests[-1] if self.digests else None):
            self.broken("chain without gap", f"commit {t} names another commit before it")
        if commit.base != self.bases[t]:
            self.broken("base on the chain", f"commit {t} has base {commit.base}, θ_{t} is {self.bases[t]}")
        for slot, generation in (self.commits[-1].fence if self.commits else {}).items():
            if commit.fence.get(slot, 0) < generation:
                self.broken("monotone fence", f"commit {t} lowers {slot} below {generation}")

    def _fate(self, t: int, listed: Any, commit: Commit) -> int:
        """Check one listed offer; -> its step."""
        s, slot = listed.step, listed.slot
        mine = [d.offer for (step, who, _), d in self.offers.items() if (step, who) == (s, slot)]
        known = [o for o in mine if o.nonce == listed.nonce]
        if not known or s not in self._carryable(t):
            self.broken("each offer one fate", f"commit {t} lists {s}/{slot}, which is not durable or too old")
        if (s, slot) in self.listed:
            self.broken("each offer one fate", f"{s}/{slot} in commits {self.listed[s, slot]} and {t}")
        if known[0].base != self.bases[s]:
            self.broken("base on the chain", f"commit {t} lists {s}/{slot}, which started elsewhere")
        if self._fenced(known[0]):
            self.broken("fencing", f"commit {t} lists {s}/{slot} of fenced generation {listed.generation}")
        blob = self.w.truth(listed.blob)
        if blob is None or not self._is(blob, listed):
            self.broken("listed blobs exist", f"commit {t}, {s}/{slot}")
        self.listed[s, slot] = t
        return s

    def _carryable(self, t: int) -> list[int]:
        return [t - age * self.rules.fragments for age in range(self.rules.max_carry + 1)]

    def _fenced(self, offer: Offer) -> bool:
        return offer.step > 0 and self.commits[offer.step - 1].fence.get(offer.slot, 0) > offer.generation

    def _nothing_forgotten(self, process: Process, t: int, commit: Commit) -> None:
        for (s, slot, _), durable in self.offers.items():
            seen = s in self._carryable(t) and durable.at < process.scan and durable.offer.base == self.bases[s]
            if seen and (s, slot) not in self.listed and not (self._fenced(durable.offer) or self._lost(durable.offer)):
                self.broken("nothing is forgotten", f"commit {t} by {commit.by} leaves out {s}/{slot}")

    def _lost(self, offer: Offer) -> bool:
        """Has its register, one before it, or its slot's claim been taken away, so that readers cannot find it?"""
        claim = layout.claim_key(offer.slot, offer.generation)
        return claim in self.lost or any(layout.offer_key(offer.step, offer.slot, i) in self.lost for i in range(9))

    def _step(self, t: int, commit: Commit, body: bytes) -> None:
        """The chain's own θ: fp32, each operation rounded by itself."""
        f, mean = t % self.rules.fragments, self._mean(t, commit)
        assert self.theta is not None
        if np.count_nonzero(mean):  # an empty round is not a round
            self.momentum[f] = MU * self.momentum[f] + mean
            self.theta[f] = self.theta[f] - LR * (mean + MU * self.momentum[f])
        self.means.append(mean)
        self.commits.append(commit)
        self.listed_by |= {o.blob: t for o in commit.offers}
        self.digests.append(f"sha256:{hashlib.sha256(body).hexdigest()}")
        self.bases.append(digest_of(self.theta, self.momentum))
        self.applied += len(commit.offers)
        self.last_commit = self.w.now
        self.times.append(self.w.now)

    def _mean(self, t: int, commit: Commit) -> np.ndarray:
        name, size = self.rules.codec, self.w.plan.sizes[t % self.rules.fragments]
        total, weights = np.zeros(0, np.float32), 0.0
        for o in commit.offers:
            age = (t - o.step) // self.rules.fragments
            w = np.float32(o.h / self.rules.sync_every * self.rules.age_discount**age)
            x = w * decoded(name, self.w.truth(o.blob) or b"", size)
            total, weights = total + x if len(total) else x, weights + float(w)
        mean = total / np.float32(weights)
        return decoded(name, encoded(name, mean), size) if name != "fp32" and commit.owners else mean

    # ------------------------------------------------------------ replicas

    def trains(self, process: Process, state: SimState) -> None:
        """A replica begins inner steps: from the chain's θ, and not ahead of it."""
        step = process.rv.step if process.rv else 0
        if process.tainted or process.strays:
            return
        if step > len(self.commits) or state.digest() != self.bases[step]:
            self.broken("the same θ everywhere", f"process {process.id} ({process.slot}) trains at step {step}")

    def agrees(self, step: int, state: SimState) -> bool:
        """Is this the chain's θ?  (A flipped bit may be rounded away by the next outer step.)"""
        return step < len(self.bases) and state.digest() == self.bases[step]

    def gives_up_on(self, key: str) -> None:
        """The operator restores a blob: no replica may have its bytes in memory and nothing else to do."""
        if self.w.places is not None and (self.w.places.is_away or self.w.now < self.w.places.back_at + 20.0):
            return
        for p in self.w.fleet.living():
            if p.rv and key in [mine.key for mine in p.rv.own_blobs.bodies] and self._waits(p, p.rv.step):
                self.broken("who has the bytes puts them back", f"{key} is damaged for 25 s, and {p.slot} has it")

    def _waits(self, p: Process, step: int) -> bool:
        """Has its offer for the open step been durable, and its requests been answered, for a good while?

        One whose inner step hangs beside its round in flight does not wait (seed 61009265); a watchdog ends it.
        """
        mine = [d.at for d in self.offers.values() if (d.offer.step, d.offer.slot) == (step, p.slot)]
        start, seconds, _ = self.w.plan.outage
        served = start + seconds if start <= self.w.now else 0.0
        busy_until = max(p.asleep_until, p.hangs_until, served)
        return bool(mine) and not p.trainer_hangs and self.w.now - max(mine[0], busy_until) > 20

    def look(self) -> None:
        """Once a second: is anything happening?"""
        w = self.w
        if self.w.fleet.finished and not self.w.fleet.living():
            w.over = True
        quiet = w.now - max(self.last_commit, w.plan.calm, w.places.back_at if w.places is not None else 0.0)
        if quiet > RECOVERY and not w.fleet.finished and not (w.places is not None and w.places.is_away):
            self.broken("progress", f"no commit since {self.last_commit:.1f}, head {len(self.commits)}")
        if w.now >= w.plan.calm:
            self.at_calm = len(self.commits) if self.at_calm is None else self.at_calm
            w.over |= len(self.commits) >= self.at_calm + w.plan.settled and not self._stragglers(RECOVERY)

    def finish(self) -> None:
        if not (
            self.w.plan.loss or self.w.plan.vanish or self.w.plan.forge or self.w.plan.malformed or self.w.plan.flip
        ):
            self._bounded()
        late = self._stragglers(2 * RECOVERY if self.w.now < self.w.plan.end else RECOVERY)
        lost = self.w.plan.loss is not None and not self.w.plan.loss.lasts
        if late and not self.w.fleet.finished and not lost:
            self.broken("live replicas follow the head", f"{[(p.id, p.slot, p.rv and p.rv.step) for p in late]}")

    def _stragglers(self, patience: float) -> list[Process]:
        """Replicas that live and work, and yet are steps behind."""
        w, found = self.w, []
        for p in w.fleet.living():
            hung = layout.slot_index(p.slot) in w.plan.hung
            working = not hung and not p.strays and w.now - max(p.born, p.asleep_until) > patience / 2
            if working and p.rv is not None and (p.rv.step < len(self.commits) - 4 or p.tainted):
                found.append(p)
        return found
