"""Launches, requests, stops and losses of replicas: supervisor, operator and bad luck."""

import random
from collections import Counter
from typing import TYPE_CHECKING

from rendezvous import layout
from rendezvous.agreement.membership import Wanted, write_control
from rendezvous.errors import RecordsLost, RendezvousError
from rendezvous.keeping.garbage import Collected
from rendezvous.records import records
from rendezvous.records.records import Control
from rendezvous.store import PatientStore
from rendezvous.stores.signed import sign_record
from tests.sim.replica import Process, Replica
from tests.sim.store import restore

if TYPE_CHECKING:
    from tests.sim.simulate import World

# What a replica may stop for, loudly.  All other malformed records are passed over.
DAMAGE = (
    "store ",
    "rot:",
    "truncated:",
    "vanished:",
    "forged:",
    "malformed: commit",
    "malformed: mean",
    "malformed: manifest",
)


class Fleet:
    """All lives there ever were, and what is wanted of them (`wanted`: every control record, folded)."""

    def __init__(self, world: "World") -> None:
        self.w, self.plan = world, world.plan
        self.wanted = Wanted()
        self.complaints: dict[str, float] = {}  # damaged key -> when a replica last found it so

    def begin(self) -> None:
        plan, operator = self.plan, Process(0, "operator", 0.0, dead=True)
        first = Control(0, records.new_nonce(), 0.0, plan.replicas, plan.steps or None, plan.min_replicas,
                        actors=plan.acting.actors if plan.acting is not None else None)  # fmt: skip
        self.w.processes.append(operator)
        body, key = first.encode(), layout.control_key(0)
        self.w.effect(
            operator, "create", key, sign_record(body, self.plan.key.encode(), "run", key) if self.plan.key else body
        )
        for i in range(plan.replicas):
            self.launch(i)
        self.w.at(2.0, self._supervise)
        self.w.at(1.0, self._watch)
        if self.plan.fleet_loss:
            self.w.at(self.plan.fleet_loss, self._lose_all)
        for when, what, slot in self.plan.actions:
            self.w.at(when, lambda what=what, slot=slot: self.act(what, slot))

    def launch(self, index: int) -> Process:
        w, plan = self.w, self.plan
        p = Process(len(w.processes), layout.slot_name(index), w.now, plan.speeds[index % len(plan.speeds)])
        p.skew, p.drift = w.rng.choice((0.0, -3600.0, 86400.0)), w.rng.choice((1.0, 0.9, 1.1))
        w.fired["launch"] += 1
        w.fired["wrong clock"] += p.skew != 0.0
        w.fired["grown"] += index >= plan.replicas
        w.processes.append(p)
        w.spawn(p, lambda: Replica(w, p).live())
        return p

    def living(self, index: int | None = None) -> list[Process]:
        slots = None if index is None else layout.slot_name(index)
        return [p for p in self.w.processes if not p.gone and p.slot.startswith("r") and slots in (None, p.slot)]

    def act(self, what: str, index: int) -> None:
        """A scripted event."""
        if what == "launch":
            self.launch(index)
        for p in self.living(index) if what != "launch" else ():
            if what == "kill":
                p.dead = True
            elif what == "pause":
                p.asleep_until = self.w.now + 40.0
            elif what == "term":
                self._terminate(p)

    def _terminate(self, p: Process) -> None:
        """SIGTERM, and SIGKILL when the grace time is over."""
        self.w.fired["SIGTERM"] += 1
        if p.rv is not None:
            p.rv.ask_to_leave()
        self.w.at(self.w.now + 1.5 * self.plan.timing.grace, lambda: setattr(p, "dead", True))

    def loud(self, p: Process, error: RendezvousError) -> None:
        """A replica stopped because something cannot be read: then that must be so, and the operator acts."""
        damage = any(name.startswith(DAMAGE) for name in self.w.fired)
        if not damage and not (isinstance(error, Collected) and self.w.fired["collected"]):
            self.w.observer.broken("loud stops have a reason", f"{p.slot}: {error}")
        self.w.at(self.w.now + 8.0, lambda: restore(self.w))

    def complaint(self, key: str) -> None:
        """Bytes are bad, and a replica waits for another one to mend them; the operator looks after a while, too."""
        if key in self.w.originals:
            if key not in self.complaints:
                self.w.at(self.w.now + 25.0, lambda: self._still_bad(key))
            self.complaints[key] = self.w.now

    def _still_bad(self, key: str) -> None:
        if self.w.now - self.complaints.pop(key) < 8.0 and key in self.w.originals:
            self.w.observer.gives_up_on(key)
            restore(self.w)

    def endings(self) -> Counter[str]:
        """How lives ended that ended by themselves."""
        return Counter(f"ends: {p.ended}" for p in self.w.processes if p.ended and p.slot != "operator")

    def _lose_all(self) -> None:
        self.w.fired["whole fleet lost"] += 1
        for p in self.living():
            p.dead = True

    def _supervise(self) -> None:
        w, r = self.w, self.w.rng
        calm = w.now >= self.plan.calm
        if self.plan.churn and not calm:
            self._churn(r)
        if calm:
            self._make_possible()
            if self.plan.vanish or self.plan.forge or self.plan.malformed:  # rot is left to those who have the bytes
                restore(self.w)
        if not self.wanted.stop and not self.finished:
            for i in range(self.wanted.replicas):
                if not self.wanted.is_to_leave(layout.slot_name(i)):
                    self._replace(i, calm)
        w.at(w.now + 3.0, self._supervise)

    def _replace(self, index: int, calm: bool) -> None:
        w, r = self.w, self.w.rng
        awake = [
            p for p in self.living(index) if p.asleep_until <= w.now + 5.0 and not (p.rv and p.rv._departure.asked_at)
        ]
        if not awake and (calm or r.random() < 0.4):
            self.launch(index)
            if r.random() < self.plan.double_launch:
                w.fired["double launch"] += 1
                self.launch(index)

    def _churn(self, r: random.Random) -> None:
        x, hung, now = r.random(), len(self.plan.hung), self.wanted
        if x < 0.08:
            self.wish(replicas=r.randint(now.min_replicas + hung, max(now.min_replicas + hung, self.plan.replicas + 1)))
        elif x < 0.11:
            self.wish(stop=not now.stop, resume=now.stop)
        elif x < 0.18 and self.living():
            self._terminate(r.choice(self.living()))
        elif x < 0.21 and len(now.drains) < now.replicas - now.min_replicas - hung:
            self.wish(drain=layout.slot_name(r.randrange(now.replicas)))
        elif x < 0.25 and not self.plan.flip:
            self.wish(min_replicas=max(1, min(now.replicas - hung, r.randint(1, 3))))

    def _make_possible(self) -> None:
        """Change the desired state for calm times until they can be met."""
        wanted = self.wanted
        if wanted.stop:
            self.wish(resume=True)
        elif wanted.replicas - len(wanted.drains) < wanted.min_replicas + len(self.plan.hung):
            self.wish(replicas=max(wanted.replicas, wanted.min_replicas + len(self.plan.hung)))

    def wish(self, **wishes: object) -> None:
        """A control record, written by a process of its own."""
        w = self.w
        more = "replicas" in wishes and int(str(wishes["replicas"])) > self.wanted.replicas
        w.fired["wish: " + ("grow" if more else next(iter(wishes)))] += 1
        p = Process(len(w.processes), "operator", w.now)
        w.processes.append(p)
        clock = w.clock(p)

        def write() -> None:
            try:
                write_control(PatientStore(w.store(p), clock, 600.0), clock, **wishes)
                p.ended = "written"
            except RecordsLost:
                p.ended = "refused: records are lost"

        w.spawn(p, write)

    @property
    def finished(self) -> bool:
        """All steps are committed."""
        return 0 < self.plan.steps <= len(self.w.observer.commits)

    def _watch(self) -> None:
        self.w.observer.look()
        self.w.at(self.w.now + 1.0, self._watch)
