"""Replicas that record rollouts and actors that fill their places: the product's code around a sampler of a few bytes.

    Replica ── inner step ──▶ Generations ─▶ BucketPlaces.find / put, RolloutDoor ──▶ Ledger (tests/sim/bundles.py)
    SimActor = Actor.act: read_standings ─▶ open_places ─▶ chosen_place ─▶ sample ─▶ BucketPlaces.deliver
                                                                             │
                                               dies · sleeps and comes back ─┤
                       lies · torn · flipped · twice · nowhere · foreign · … ┘  (MISCHIEF: what a broken actor puts)

A sample's only content is its number; the ledger knows its slot, generation, sampler and weights.

Not promised: the weights' way through the bucket; an actor has those of some commits ago.
"""

import json
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from diloco.actor.actor import IDLE_S, LONGEST_IDLE_S, Actor
from diloco.actor.places import Pace, Speed
from diloco.process.data_position import UNLUCKY, counted_inner_steps, read_offers, uncounted_sessions
from diloco.replica.door import DoorFinding, RolloutDoor
from diloco.replica.rollouts import BucketPlaces
from inner.rollouts.recording.bundle import Bundle, RandomStates, TooFar
from inner.rollouts.recording.recorded import BundlePlace
from rendezvous import layout
from rendezvous.agreement.membership import Wanted, read_control
from rendezvous.background import in_turn
from rendezvous.errors import KeyExists, RendezvousError
from rendezvous.records.digests import digest
from rendezvous.records.records import new_nonce
from rendezvous.records.rollouts import Rollouts, read_record, seal_bundle
from rendezvous.store import PatientStore
from tests.sim.replica import Process, Replica
from tests.sim.simulate import TIMING, Acting, Schedule, World, draw
from tests.support.fakes import Foreign

if TYPE_CHECKING:
    from inner.data.order import Share

RUN = "run"
SAMPLE_S = 0.5  # of a replica for one generation
STATES = RandomStates.read()  # a replica of this world restores none
MISCHIEF = ("lies", "torn", "flipped", "cut", "twice", "nowhere", "foreign", "misplaced", "stale", "future", "bare",
            "other rows", "garbage", "late")  # fmt: skip


def draw_acted(seed: int) -> Schedule:
    """The schedule of a seed, and actors in it."""
    r, plan = random.Random(seed ^ 0xAC7), draw(seed)
    acting = Acting(
        actors=r.choice((1, 2, 4)), staleness=r.choice((0, 1, 2, 4)), takes=r.choice((0.4, 1.5, 4.0)),
        served=r.choice((1, 1, 2)), lag=r.choice((0, 0, 1, 3)), share=r.choice((0.0, 0.3, 1.0)),
        far=r.choice((99, 99, 2)), mischief=r.choice((0.0, 0.2, 0.5)), deaths=r.choice((0.0, 0.02, 0.1)),
        stalls=r.choice((0.0, 0.05)), all_dead_at=r.choice((999.0, 999.0, 25.0)),
    )  # fmt: skip
    return replace(plan, acting=acting, key="", forge=0.0, malformed=0.0, vanish=0.0, foreign=0.0)


def calm_acted(seed: int) -> Schedule:
    """Nothing fails, and actors are honest: what they cost and waste can be counted."""
    acting = Acting(actors=4, staleness=2 + seed % 3, takes=0.5 + seed % 4)
    return Schedule(seed, replicas=2 + seed % 2, min_replicas=2, speeds=(1.0,), acting=acting, calm=40.0, end=80.0)


# ---------------------------------------------------------------------- replicas


class Generations:
    """One life's generations.   data: the inner step of the slot's data."""

    def __init__(self, world: World, replica: Replica) -> None:
        self.w, self.p, self.rv, self.plan = world, replica.p, replica.rv, world.acting
        store, clock = world.store(self.p), world.clock(self.p)
        self.clock = clock
        self.places = BucketPlaces(
            store, clock, self._tell, run=RUN, slot=self.p.slot, by=self.rv.generation, engine="sim",
            staleness=self.plan.staleness, anew=self._makes_anew(),
        )  # fmt: skip
        if self.plan.share:
            self.places.door = RolloutDoor(
                self.places.store, clock, self._tell, self._check, run=RUN, slot=self.p.slot, by=self.rv.generation,
                share=self.plan.share, parent=0,
            )  # fmt: skip
        self.lost_in = -1  # the newest outer step in which the store did not take, or give, its rollouts
        self.data = self._begin()

    def _makes_anew(self) -> bool:
        """As in the product: sessions that end without counted work may end because of the bundles."""
        offers = read_offers(self.rv.store, self.rv.step, in_turn).get(self.p.slot, ())
        return uncounted_sessions(offers, self.rv.generation) >= UNLUCKY

    def _begin(self) -> int:
        """Return the first inner step, as `data_position` and `_go_on_in_data` of the product do."""
        start = 0
        if self.rv.generation > 1:
            outer: Any = SimpleNamespace(fragments=self.w.plan.rules.fragments, fragment_sync_delay=self.w.plan.tau)
            offers = read_offers(self.rv.store, self.rv.step, in_turn)
            start = counted_inner_steps(offers.get(self.p.slot, ()), outer)
        self.w.bundles.begins(self.p, start)
        start = start // self.plan.served * self.plan.served
        self.rv.members.status.data = start
        return start

    def _tell(self, event: str, **fields: object) -> None:
        self.w.fired[f"told: {event}"] += 1
        if event == "rollouts_lost":
            self.lost_in = int(str(fields["step"]))
        if event == "rollouts_found":
            self.w.fired["too old"] += int(str(fields["expired"]))

    def before_inner_step(self) -> None:
        if self.data % self.plan.served == 0:
            self._train_on(BundlePlace(self.rv.step, self.data // self.plan.served, 0))
        self.w.bundles.steps[self.p.slot, self.rv.generation, self.rv.step] += 1

    def after_inner_step(self) -> None:
        self.data += 1
        self.rv.members.status.data = self.data

    def _train_on(self, place: BundlePlace) -> None:
        began, asked = self.w.now, self.w.bundles.requests(self.p)
        unfit = lambda bundle: self._unfit(place, bundle)  # noqa: E731
        found, is_made = self.places.find(place, unfit), False
        if found is None:
            self.clock.sleep(SAMPLE_S * self.plan.length_of(self.p.slot, place.generation))
            made = self.w.bundles.sample(self.p.slot, place.generation, self.p.slot, place.outer)
            found = self.places.put(place, made, unfit)
            is_made = found is made
        self.w.bundles.trained(
            self.p,
            place,
            found,
            is_lost=self.lost_in == place.outer,
            is_made=is_made,
            took=self.w.now - began,
            asked=asked,
        )

    def _unfit(self, place: BundlePlace, bundle: Bundle) -> str:
        if bundle.prompts != [f"{self.p.slot} {place.generation}"]:
            return "its prompts are those of other rows"
        made = self.w.bundles.samples[int(bundle.completions[0])]
        is_far = made.by != self.p.slot and place.outer - made.weights > self.plan.far
        return TooFar("far") if is_far else ""

    def _check(self, step: int, bundle: Bundle, seed: int) -> DoorFinding:
        self.w.fired["door checks"] += 1
        true = self.w.bundles.samples[int(bundle.completions[0])].weights
        return DoorFinding("" if true == step else f"sampled with the weights of {true}", 0.0, 0.0)


# ---------------------------------------------------------------------- actors


class StubSampler:
    """Samples that tell who made them.   weights: the step of those that it has."""

    served, engine, slot, weights, takes = 1, "sim", "", 0, 0.0

    def __init__(self, actor: "SimActor") -> None:
        self.actor = actor

    def load(self) -> None:
        self.weights = self.actor.loaded

    def sample(self, share: "Share", generation: int) -> Bundle:
        a = self.actor
        noise = 1.0 if a.w.acting.tail else a.w.rng.lognormvariate(0.0, 0.5)
        a.w.wait(a.p, a.w.acting.takes * a.w.acting.length_of(self.slot, generation) * noise)
        a.befall()
        return a.w.bundles.sample(self.slot, generation, a.p.slot, self.weights, logprobs=True)


class SimActor(Actor):
    """Actor.act unchanged; what it is given is simulated."""

    def __init__(self, world: World, process: Process) -> None:
        self.w, self.p = world, process
        plan, bucket, clock = world.acting, world.store(process), world.clock(process)
        store = PatientStore(bucket, clock, 30.0)
        fleet = SimpleNamespace(staleness=plan.staleness, replicas=world.plan.replicas)
        outer = SimpleNamespace(sync_every=world.plan.rules.sync_every)
        self._run: Any = SimpleNamespace(
            store=store, config=SimpleNamespace(fleet=fleet, outer=outer, seed=0),
            record=SimpleNamespace(nonce=RUN, parent=SimpleNamespace(outer_steps=0, url="")),
        )  # fmt: skip
        self._status: Any = SimpleNamespace(step=0, inner=0, data=0, rate=0.0, note="")
        self._session: Any = SimpleNamespace(
            rv=SimpleNamespace(slot=process.slot, wanted=Wanted(), store=store), clock=clock, emit=self._tell,
            watchdog=SimpleNamespace(resume=lambda: None, rest=lambda: None), timing=TIMING,
        )  # fmt: skip
        self._sampler: Any = StubSampler(self)
        self._follower: Any = SimpleNamespace(poll=self._newest)
        self._loop: Any = SimpleNamespace(model=self)
        self.loaded = 0  # the outer step of its weights
        self._pace = Pace(world.plan.rules.sync_every // world.plan.rules.fragments, 1, plan.served)
        self._open_since = {}
        self._ranks = dict[tuple[str, int], int]()
        self._steps = []
        self._speed = Speed()

    def _tell(self, event: str, **fields: object) -> None:
        self.w.fired[f"told: {event}"] += 1
        if event == "sampled":
            self.w.bundles.delivered[bool(fields["stands"])] += 1

    def _newest(self) -> Any:
        step = max(0, len(self.w.observer.commits) - self.w.acting.lag)
        load_into = lambda model: setattr(self, "loaded", step)  # noqa: E731
        return SimpleNamespace(step=step, load_into=load_into) if step > self._status.step else None

    def live(self) -> None:
        pause = IDLE_S
        try:
            while True:
                self._session.rv.wanted = read_control(self._run.store, self._session.rv.wanted)
                pause = IDLE_S if self.act() else min(2 * pause, LONGEST_IDLE_S)
                self.w.wait(self.p, pause)
        except (RendezvousError, Foreign) as error:
            self.p.ended = f"an actor: {type(error).__name__}"

    def befall(self) -> None:
        """What may happen to an actor while it samples."""
        w, plan = self.w, self.w.acting
        if w.now < w.plan.calm and w.rng.random() < plan.deaths:
            w.fired["actor dies in a sample"] += 1
            w.die(self.p)
        if w.now < w.plan.calm and w.rng.random() < plan.stalls:
            w.fired["actor sleeps in a sample"] += 1
            self.p.asleep_until = w.now + w.rng.choice((5.0, 40.0))
            w.wait(self.p, 0.0)

    def _fill(self, slot: str, number: int, ranks: int) -> None:
        self._sampler.slot = slot
        if self.w.now < self.w.plan.calm and self.w.rng.random() < self.w.acting.mischief:
            self._break(self.w.rng.choice(MISCHIEF), slot, number)
        else:
            super()._fill(slot, number, ranks)

    # mischief

    def _break(self, how: str, slot: str, generation: int) -> None:
        self.w.fired[f"mischief: {how}"] += 1
        made = self._sampler.sample(None, generation)
        number, weights, key = made.completions[0], self._sampler.weights, layout.bundle_key(slot, generation, 0, 0)
        if how == "late":
            self.w.wait(self.p, self.w.rng.uniform(3.0, 15.0))
        elif how == "bare":
            made = replace(made, logprobs=None)
        elif how == "other rows":
            made = replace(made, prompts=[f"{slot} {generation + 1}"])
        elif how == "nowhere":
            key = self.w.rng.choice((layout.bundle_key("r77", generation, 0, 0), layout.bundle_key(slot, 10**7, 0, 0)))
        elif how in ("lies", "future", "stale"):
            weights += {"lies": 1, "future": 3, "stale": -1 - self.w.acting.staleness}[how]
            self.w.bundles.lies.add(int(number))
        told = self._record(made, slot, generation, max(0, weights))
        told = {"foreign": replace(told, run="other"), "misplaced": replace(told, slot="r78")}.get(how, told)
        body = damaged(how, seal_bundle(made.pack(), told))
        self._put(key, body)
        if how == "twice":
            self._put(key, seal_bundle(made.pack(), replace(told, nonce=new_nonce())))

    def _record(self, made: Bundle, slot: str, generation: int, weights: int) -> Rollouts:
        return Rollouts(
            run=RUN, slot=slot, place=(generation, 0), step=weights, by=0, engine="sim", threads=1, rollouts=1,
            tokens=3, digest=digest(made.pack(), "xxh3-128"), nonce=new_nonce(), actor=self.p.slot,
        )  # fmt: skip

    def _put(self, key: str, body: bytes) -> None:
        try:
            self._session.rv.store.store.create(key, body)
        except (KeyExists, RendezvousError):
            self.w.fired["mischief comes to nothing"] += 1


def damaged(how: str, body: bytes) -> bytes:
    """The object as a broken actor puts it."""
    payload = bytes(read_record(body)[1])
    record = body[len(payload) :]
    if how == "torn":
        return body[: len(body) // 2]
    if how == "flipped":
        end = 8 + int.from_bytes(payload[:8], "little")
        at = end + json.loads(payload[8:end])["ids"]["data_offsets"][0]
        return payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :] + record  # another token; it can be read
    return {"cut": payload[: len(payload) // 2] + record, "garbage": b"\xff" * 99}.get(how, body)


def bundle_of(number: int, slot: str, generation: int, logprobs: bool) -> Bundle:
    return Bundle(
        prompts=[f"{slot} {generation}"], completions=[str(number)], prompt_ids=[[1]], ids=[[number % 997, 1, 2]],
        mask=None, logprobs=[[-1.0, -1.0, -1.0]] if logprobs else None, rewards=torch.zeros(1, 1), names=["r"],
        weights=[1.0], random=STATES,
    )  # fmt: skip


class Troupe:
    """The actors of a run, kept as a supervisor keeps them."""

    def __init__(self, world: World) -> None:
        self.w = world

    def begin(self) -> None:
        for i in range(self.w.acting.actors):
            self._launch(layout.actor_name(i))
        self.w.at(3.0, self._keep)
        self.w.at(self.w.acting.all_dead_at, self._lose_all)

    def _launch(self, name: str) -> None:
        p = Process(len(self.w.processes), name, self.w.now, drift=self.w.rng.choice((1.0, 0.9, 1.1)))
        self.w.processes.append(p)
        self.w.fired["launch of an actor"] += 1
        self.w.spawn(p, lambda: SimActor(self.w, p).live())

    def _living(self, name: str) -> list[Process]:
        return [p for p in self.w.processes if p.slot == name and not p.gone and p.asleep_until <= self.w.now + 5.0]

    def _keep(self) -> None:
        for i in range(self.w.acting.actors if self.w.now < self.w.acting.all_dead_at else 0):
            if not self._living(layout.actor_name(i)) and self.w.rng.random() < 0.5:
                self._launch(layout.actor_name(i))
        self.w.at(self.w.now + 3.0, self._keep)

    def _lose_all(self) -> None:
        self.w.fired["all actors lost"] += 1
        for p in self.w.processes:
            p.dead |= p.slot.startswith("a")
