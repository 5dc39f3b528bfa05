"""An actor: a process that samples rollouts ahead of the replicas.  Its only input is a run's URL.

    python -m diloco.actor RUN_URL          by hand, on any machine
    diloco train CONFIG --actors 4          a supervisor keeps them

    newest weights (weights/{t}) ──▶ an open place near its slot ──▶ sample ──▶ put, if still open
         ▲                                                                             │
         └─────────────────────────────────────────────────────────────────────────────┘

    a place: one batch of rollouts of a slot, stored as one bundle; open, owner: places.py

There are no claims, leases or queues of places: an actor that dies leaves a place empty, and the slot's replica fills
it.  After a while, an actor without an open place of its own takes another actor's place.  If two actors fill the same
place, the work of the slower actor is lost.  An actor that is too slow for all places samples a bundle now and then,
because only a bundle shows that it is fast again.

Like a replica, an actor has a session: claim, heartbeat and log, with a name (a00, a01, …) in place of a slot. An actor
makes no offer, and no replica waits for an actor. An actor ends if all replicas are
silent for fleet.give_up_s; an actor that a supervisor started ends only if the supervisor, too, is silent.

Needs fleet.record_rollouts and fleet.broadcast_weights.  Not promised: that a bundle comes in time.
"""

import argparse
import itertools
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.actor.places import BEATS, Speed, chosen_place, filled_places, open_places, pace_of, read_standings
from diloco.model.export import start_folder
from diloco.model.fetch import fetch_files
from diloco.outer.frozen import refuse_other_base
from diloco.process import exitcodes
from diloco.process.disk import Scratch, retry_when_full
from diloco.process.ranks import forget_launcher
from diloco.process.session import Session, SessionHost, process_fields
from diloco.replica.replica import leave_now, open_patiently, run_member, share_of, too_late, wait_for_model
from diloco.run.combinations import refuse_actors, refuse_engine, staleness_of
from diloco.run.config import ConfigError, derive_seed
from diloco.run.record import Run
from inner import Seeds, build_inner
from rendezvous import layout
from rendezvous.agreement.membership import read_beat, read_control, write_control
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import GaveUp, RendezvousError, StoreError
from rendezvous.layout import SUPERVISOR
from rendezvous.records.records import Claim, new_nonce
from rendezvous.store import Readable, put_once
from rendezvous.weights.follower import WeightsFollower

if TYPE_CHECKING:
    from inner.rollouts.recording.acting import Sampler

IDLE_S, LONGEST_IDLE_S = 0.5, 8.0  # seconds between two looks for an open place
FLUSH_S = 10.0  # seconds between two checks whether the run is over, and between two log objects
MOST_AHEAD = 100  # the number in a name that you choose may be at most this much above the used numbers
SLOW = 3.0  # an owner may be dead if its place is empty after this many times the seconds of a bundle


class Actor:
    """One actor of a run.

    session: has the actor's name in place of a slot. Its heartbeat has the weights' step, the number of delivered
    bundles (inner), the number of bundles that came too late (data), and the seconds per bundle (rate).
    engine: the text that the user typed (inner/extras/engines/choose.py); "": the replicas' own way to sample.
    """

    def __init__(self, run: Run, session: Session, scratch: Path, engine: str = "") -> None:
        self._run = run
        self._session = session
        self._status = session.rv.members.status
        record = wait_for_model(run, session)
        self._status.note = "loads the model"
        model = start_folder(run, record, scratch / "model")
        files = fetch_files(run, scratch / "code")
        (scratch / "inner").mkdir()
        seeds = Seeds(0, derive_seed(run.config.seed, "actor", session.rv.name))
        inner = replace(run.config.inner, vllm=None) if engine else run.config.inner
        self._loop: Any = build_inner(inner, model, files, seeds, scratch=scratch / "inner")
        self._loop.report_to(SessionHost(session, run.record.nonce, inner.sampling.box_usd_per_hour))
        refuse_other_base(record.base, self._loop.model)
        self._sampler = self._new_sampler(engine, scratch / "engine")
        self._loop.trainer.progress = self._progress
        self._follower = WeightsFollower(run.store, session.emit)
        self._pace = pace_of(run.config, self._sampler.served)
        self._open_since: dict[tuple[str, int], float] = {}
        self._ranks: dict[tuple[str, int], int] = {}  # slot, session -> number of ranks
        self._speed = Speed()
        self._steps: list[tuple[float, int]] = []  # the time of a look at the weights, and their outer step
        self._status.enter_phase("sample", 0)

    def _progress(self) -> dict[str, int]:
        """Return the fields of a reward's `trainer_state`, at the outer step of the actor's weights."""
        config, before, step = self._run.config, self._run.record.parent.outer_steps, self._status.step
        steps = {"global_step": before + step, "max_steps": before + max(config.fleet.steps, step + 1)}
        return {name: count * config.outer.interval for name, count in steps.items()}

    def _new_sampler(self, engine: str, scratch: Path) -> "Sampler":
        from inner import use_engine
        from inner.rollouts.recording.acting import Sampler

        if engine not in ("", "transformers"):
            use_engine(engine, self._loop.trainer, name=self._session.rv.slot, folder=scratch)
        return Sampler(self._loop.trainer)

    def act(self) -> bool:
        """Sample for one place, if one is open.   Return whether a place was open."""
        if (newest := self._follower.poll()) is not None:
            newest.load_into(self._loop.model)
            self._sampler.load()
            self._status.step = newest.step
        elif self._run.record.parent.url and not self._status.step:
            return False  # a run from --from: the files have the old run's start; wait for the first broadcast
        store, wanted, weights = self._run.store, self._session.rv.wanted, self._status.step
        standings = read_standings(store, wanted.slot_names, self._ranks)
        places_of = partial(
            open_places, standings, pace=self._pace, weights=weights, former=self._former_step(),
            staleness=staleness_of(self._run.config), end=wanted.steps, takes_s=self._status.rate,
        )  # fmt: skip
        places, window = places_of(filled_places(store)), places_of(lambda *_: False)
        names = [name for name in wanted.member_names if layout.is_actor(name) and not wanted.is_to_leave(name)]
        self._speed = self._speed.after_look(window, now := self._session.clock.now())
        place = chosen_place(
            places, self._session.rv.slot, names, self._overdue(places), probes=self._speed.probes_at(now)
        )
        if self._speed.newest:
            self._status.note = self._note()
        if place is None:
            return False
        self._fill(*place, ranks={at.slot: at.ranks for at in standings}[place[0]])
        return True

    def _former_step(self) -> int:
        """Return the step of the weights BEATS heartbeats ago, or at the first look of a younger actor."""
        now = self._session.clock.now()
        self._steps.append((now, self._status.step))
        while len(self._steps) > 1 and now - self._steps[1][0] >= BEATS * self._session.timing.beat:
            del self._steps[0]
        return self._steps[0][1]

    def _overdue(self, places: Iterable[tuple[int, str, int]]) -> set[tuple[str, int]]:
        """Return the places that have been open for longer than an actor needs."""
        now = self._session.clock.now()
        self._open_since = {place[1:]: self._open_since.get(place[1:], now) for place in places}
        return {place for place, since in self._open_since.items() if now - since > SLOW * self._status.rate + IDLE_S}

    def _fill(self, slot: str, number: int, ranks: int) -> None:
        """Sample for a place, and put the bundle.   number: generation · ranks + rank."""
        from diloco.replica.rollouts import BucketPlaces
        from inner.rollouts.recording.recorded import BundlePlace

        clock, weights = self._session.clock, self._status.step
        began = clock.now()
        self._session.watchdog.resume()
        generation, rank = divmod(number, ranks)
        made = self._sampler.sample(share_of(self._run.config, slot), number)
        self._session.watchdog.rest()
        bucket = self._session.rv.store.store  # without retries: a bundle that is so late is useless
        places = BucketPlaces(
            bucket, clock, self._session.emit, run=self._run.record.nonce, slot=slot, by=0,
            engine=self._sampler.engine, staleness=staleness_of(self._run.config), actor=self._session.rv.slot,
        )  # fmt: skip
        outer = self._run.record.parent.outer_steps + weights
        stands = places.deliver(BundlePlace(outer, generation, rank), made)
        self._status.inner += stands
        self._status.data += not stands
        self._speed = self._speed.after_bundle(seconds := clock.now() - began)
        self._status.rate, self._status.note = self._speed.takes_s, self._note()
        self._session.emit(
            "sampled", step=weights, place=f"{slot}/{generation}/{rank}", stands=stands, tokens=sum(map(len, made.ids)),
            seconds=seconds,
        )  # fmt: skip

    def _note(self) -> str:
        late = f", {self._status.data} too late" if self._status.data else ""
        slow = ": too slow for this window" * (self._speed.slow_since is not None)
        return f"{self._status.inner} bundles{late}; {self._status.rate:.1f} s each{slow}"


def act_in_session(run: Run, session: Session, engine: str = "", *, with_supervisor: bool = True) -> int:
    """Sample until the run is over, or the actor has to leave.   Return the exit code.

    with_supervisor: whether the supervisor's heartbeats count, too, in the silence after which GaveUp is raised."""
    refuse_actors(run.config)
    with retry_when_full(session, "temporary files", Scratch, lambda: leave_now(session)) as scratch:
        actor = Actor(run, session, scratch, engine or run.config.fleet.actor_engine)
        session.emit("joined", step=session.rv.members.status.step)
        end = _act_to_the_end(actor, run, session, with_supervisor=with_supervisor)
    session.emit("left", step=session.rv.members.status.step, reason=end[1])
    session.rv.members.write_leave_beat()
    session.end()
    print(f"{session.rv.slot}: {end[1]}", flush=True)
    return end[0]


def _act_to_the_end(actor: Actor, run: Run, session: Session, *, with_supervisor: bool) -> tuple[int, str]:
    pause, looked = IDLE_S, session.clock.now()
    heard, leaders = Heard(run.timing.give_up, looked), (SUPERVISOR,) if with_supervisor else ()
    while True:
        session.rv.members.refuse_if_fenced()
        if session.rv.is_leaving:
            return exitcodes.LEFT, f"{session.why}; all bundles that it delivered stay valid"
        if session.clock.now() - looked > FLUSH_S:
            session.flush_soon()
            steps = session.rv.wanted.steps
            if steps and run.store.get(layout.commit_key(steps - 1)) is not None:
                return exitcodes.DONE, f"all {steps} outer steps are committed"
            looked = session.clock.now()
            heard.refuse_silence(run.store, (*leaders, *session.rv.wanted.slot_names), looked)
        if actor.act():
            pause = IDLE_S
            continue
        SessionHost(session).pause(pause)
        pause = min(2 * pause, LONGEST_IDLE_S)  # each look costs requests


@dataclass
class Heard:
    """The last change of any heartbeat.   Without replicas, an actor would wait, and be billed, for ever.

    patience_s: limit of the silence.   at: when a heartbeat changed.   counters: slot -> (generation, n)."""

    patience_s: float
    at: float
    counters: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def refuse_silence(self, store: Readable, slots: Iterable[str], now: float) -> None:
        """Read heartbeats, one after the other, until one has changed.   Raise GaveUp after a silence."""
        if any(self._has_changed(store, slot) for slot in slots):
            self.at = now
        if now - self.at > self.patience_s:
            raise GaveUp(
                f"no replica of this run has written a heartbeat for {now - self.at:.0f} s (fleet.give_up_s), so this "
                f"actor has nothing to sample for. `diloco status {shlex.quote(store.url)}` shows the run. Start the "
                "actor again when the run goes on"
            )

    def _has_changed(self, store: Readable, slot: str) -> bool:
        beat = read_beat(store, slot)
        before = self.counters.get(slot)
        if beat is not None:
            self.counters[slot] = (beat.generation, beat.n)
        return before is not None and self.counters[slot] != before


def take_name(run: Run, clock: Clock, name: str = "") -> tuple[str, int]:
    """Return the name of an actor that you start by hand, and its claimed generation (0: not claimed).

    name: continue as this actor; if not given, take the first name that no process has had.
    """
    wanted = read_control(run.store)
    if name and int(name[1:]) >= wanted.most_actors + MOST_AHEAD:
        raise ConfigError(
            f"--name {name}: this run has had {wanted.most_actors} actors, and actors' names have no gap. "
            f"Leave --name out, and the actor is called {layout.actor_name(wanted.most_actors)}"
        )
    generation = 0 if name else 1
    number = itertools.count(wanted.most_actors)
    while not name:
        candidate = layout.actor_name(next(number))
        mine = Claim(candidate, 1, new_nonce(), clock.wall(), **process_fields())
        won, _ = put_once(run.store, clock, layout.claim_key(candidate, 1), mine.encode())
        name = candidate if won else ""
    if name not in wanted.guests and not wanted.is_kept(name):
        write_control(run.store, clock, guest=name)
    return name, generation


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m diloco.actor", description="Sample rollouts for a run.")
    parser.add_argument("url", help="the run: a folder or a bucket, as for `diloco train --run`")
    parser.add_argument("--name", default="", help="a00, a01, …: continue as this actor (default: a new name)")
    parser.add_argument("--slot", default="", help="the name of an actor that a supervisor started")
    parser.add_argument("--parent", default="", help="PID:STARTTIME of a process; this actor leaves when it ends")
    parser.add_argument(
        "--engine", default="", metavar="KIND[:ADDRESS]",
        help="openai:http://HOST:PORT, llama_cpp:BASE.gguf, mlx[:MODEL] or transformers (default: fleet.actor_engine)",
    )  # fmt: skip
    typed = parser.parse_args(argv)
    forget_launcher()
    if typed.slot:
        return run_member(typed.url, typed.slot, act_in_session, parent=typed.parent)
    try:
        if typed.name and not layout.is_actor(typed.name):
            raise ConfigError(f"--name {typed.name!r}: actors are called a00, a01, …")
        run = open_patiently(typed.url, SystemClock())
        refuse_actors(run.config)
        refuse_engine(run.config, typed.engine)
        if (end := too_late(run, SystemClock())) is not None:
            print(f"actor: {end[1]}", flush=True)
            return end[0]
        name, generation = take_name(run, SystemClock(), typed.name)
    except (ConfigError, RendezvousError) as error:
        print(f"actor: {error}", file=sys.stderr, flush=True)
        return exitcodes.GAVE_UP if isinstance(error, StoreError | GaveUp) else exitcodes.USER_ERROR
    act = partial(act_in_session, engine=typed.engine, with_supervisor=False)
    return run_member(typed.url, name, act, parent=typed.parent, generation=generation)
