"""An actor: a process that samples rollouts ahead of the replicas.  Its only input is a run's URL.

    python -m diloco.actor RUN_URL --name a07

    newest weights (weights/{t}) ──▶ an open place near its slot ──▶ sample ──▶ put, if none was faster
         ▲                                                                             │
         └─────────────────────────────────────────────────────────────────────────────┘

    a place is open      its slot's heartbeat has not reached it, and it is trained at most fleet.staleness outer steps
                         after the actor's weights

There are no claims, leases or queues: an actor that dies leaves a place empty, and the slot's replica fills it.  If two
actors take the same place, the slower one's work is lost; each prefers another one of the nearest places.

Needs fleet.record_rollouts and fleet.broadcast_weights.  Not promised: heartbeats, a price, a restart; a supervisor
does not know actors yet.
"""

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.model.export import model_record, start_folder
from diloco.model.fetch import fetch_files
from diloco.model.start_model import refuse_other_base
from diloco.process import exitcodes
from diloco.replica.replica import open_patiently, share_of, too_late
from diloco.run.config import ConfigError, derive_seed
from diloco.run.record import Run
from inner import InnerError, Seeds, build_inner
from rendezvous import layout
from rendezvous.agreement.membership import read_beat, read_control
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import GaveUp, RendezvousError, StoreError
from rendezvous.store import PatientStore, Readable
from rendezvous.weights.follower import WeightsFollower

if TYPE_CHECKING:
    from inner.rollouts.acting import Sampler

IDLE_S, LONGEST_IDLE_S = 0.5, 8.0  # between two looks for an open place
PATIENCE_S = 60.0  # for an answer of the store
SPREAD = 8  # places among which an actor chooses


@dataclass(frozen=True)
class Standing:
    """Where a slot is.   step: its outer step.   data, inner: inner steps of its data, and of this round.

    rate: seconds per inner step, 0 if unknown.
    """

    slot: str
    step: int
    data: int
    inner: int
    rate: float = 0.0


@dataclass(frozen=True)
class Pace:
    """The arithmetic of places.   sync_every: H.   accumulated, served: micro-batches per inner step, generation."""

    sync_every: int
    accumulated: int
    served: int

    def generation_at(self, inner_step: int) -> int:
        return inner_step * self.accumulated // self.served

    def outer_step_of(self, at: Standing, generation: int) -> int:
        """Return the outer step that will train a generation, if every round has H inner steps."""
        first = generation * self.served // self.accumulated
        return at.step + max(0, first - (at.data - at.inner)) // self.sync_every


def open_places(
    standings: Iterable[Standing],
    is_filled: Callable[[str, int], bool],
    pace: Pace,
    *,
    weights: int,
    staleness: int,
    takes_s: float = 0.0,
) -> list[tuple[int, str, int]]:
    """Return the open places as (distance, slot, generation), the nearest first.

    is_filled(slot, generation): whether it has a bundle.   weights: the outer step of the actor's weights.
    takes_s: seconds that the actor needs for one.   distance: generations after those that the slot will have reached
    by then; below 0 for places that it will probably fill itself, which come last.
    """
    found = list[tuple[int, str, int]]()
    for at in standings:
        now = pace.generation_at(at.data)
        lead = 1 + (int(takes_s / (at.rate * pace.served / pace.accumulated)) if at.rate else 0)
        generation = now + 1
        while pace.outer_step_of(at, generation) - weights <= staleness:
            if not is_filled(at.slot, generation):
                found.append((generation - now - lead, at.slot, generation))
            generation += 1
    return sorted(found, key=lambda place: (place[0] < 0, abs(place[0]), *place[1:]))


def chosen_place(places: Sequence[tuple[int, str, int]], name: str) -> tuple[str, int] | None:
    """Return this actor's place: of the SPREAD nearest that it can fill in time, the first by a hash of name and place.

    So actors, which do not know each other, seldom take the same one.   Without such places: the first.
    """
    near = [place for place in places if place[0] >= 0][:SPREAD] or places[:1]
    key = lambda place: hashlib.sha256(f"{name} {place[1]} {place[2]}".encode()).digest()  # noqa: E731
    return min(near, key=key)[1:] if near else None


def read_standings(store: Readable) -> list[Standing]:
    """Return where the slots are, by their heartbeats."""
    beats = (read_beat(store, slot) for slot in read_control(store).slot_names)
    return [
        Standing(b.slot, b.step, b.data, b.inner, b.rate)
        for b in beats
        if b is not None and b.phase in ("train", "wait")
    ]


def filled_places(store: Readable) -> Callable[[str, int], bool]:
    """Return a function: (slot, generation) -> whether it has a bundle, as LIST shows it now.

    It lists a hundred generations at a time, so that a long run costs no more than a short one.
    """
    seen: dict[tuple[str, int], set[int]] = {}

    def is_filled(slot: str, generation: int) -> bool:
        hundred = slot, generation // 100
        if hundred not in seen:
            keys = store.list(f"{layout.ROLLOUTS}{slot}/{hundred[1]:08d}")
            seen[hundred] = {int(key.split("/")[2]) for key in keys if key.count("/") == 3}
        return generation in seen[hundred]

    return is_filled


class Actor:
    """One actor of a run.   tell: called with a line for each bundle."""

    def __init__(
        self, run: Run, name: str, clock: Clock, scratch: Path, tell: Callable[[str], None], engine: str = ""
    ) -> None:
        refuse_run(run)
        self._run = run
        self._name = name
        self._clock = clock
        self._tell = tell
        record = model_record(run)
        model = start_folder(run, record, scratch / "model")
        files = fetch_files(run, scratch / "code")
        (scratch / "inner").mkdir()
        seeds = Seeds(0, derive_seed(run.config.seed, "actor", name))
        inner = replace(run.config.inner, vllm=None) if engine else run.config.inner
        self._loop: Any = build_inner(inner, model, files, seeds, scratch=scratch / "inner")
        refuse_other_base(record.base, self._loop.model)
        self._sampler = self._new_sampler(engine, scratch / "engine")
        self._follower = WeightsFollower(run.store, self._emit)
        self._weights = 0
        self._takes_s = 0.0
        self._pace = Pace(run.config.outer.sync_every, inner.gradient_accumulation_steps, self._sampler.served)

    def _new_sampler(self, engine: str, scratch: Path) -> "Sampler":
        from inner import use_engine
        from inner.rollouts.acting import Sampler

        if engine not in ("", "transformers"):
            use_engine(engine, self._loop.trainer, name=self._name, folder=scratch)
        return Sampler(self._loop.trainer)

    def act(self) -> bool:
        """Sample for one place, if one is open.   Return whether it did."""
        if (newest := self._follower.poll()) is not None:
            newest.load_into(self._loop.model)
            self._sampler.load()
            self._weights = newest.step
        store = self._run.store
        places = open_places(
            read_standings(store), filled_places(store), self._pace, weights=self._weights,
            staleness=self._run.config.fleet.staleness, takes_s=self._takes_s,
        )  # fmt: skip
        place = chosen_place(places, self._name)
        if place is None:
            return False
        self._fill(*place)
        return True

    def _fill(self, slot: str, generation: int) -> None:
        from diloco.replica.rollouts import BucketPlaces
        from inner.rollouts.recorded import BundlePlace

        began = self._clock.now()
        made = self._sampler.sample(share_of(self._run.config, slot), generation)
        places = BucketPlaces(
            self._run.store, self._clock, self._emit, run=self._run.record.nonce, slot=slot, by=0,
            engine=self._sampler.engine, staleness=self._run.config.fleet.staleness, actor=self._name,
        )  # fmt: skip
        outer = self._run.record.parent.outer_steps + self._weights
        late = "" if places.deliver(BundlePlace(outer, generation, 0), made) else ", too late"
        self._takes_s = self._clock.now() - began
        self._tell(
            f"{self._name}: {slot} generation {generation}, weights {self._weights}, {self._takes_s:.1f} s{late}"
        )

    def _emit(self, event: str, **fields: Any) -> None:
        self._tell(f"{self._name}: {event}: {', '.join(f'{k} {v}' for k, v in fields.items())}")


def refuse_run(run: Run) -> None:
    """Raise ConfigError for a run that has no use for actors."""
    if run.config.script is not None or run.config.inner.loop != "grpo":
        raise ConfigError('this run has no rollouts of [inner]; start actors for a run with inner.loop = "grpo"')
    for name in ("record_rollouts", "broadcast_weights"):
        if not getattr(run.config.fleet, name):
            raise ConfigError(
                f"this run was launched without fleet.{name}, so an actor could not reach its replicas. Start a run "
                f"with `--set fleet.{name}=true`"
            )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m diloco.actor", description="Sample rollouts for a run.")
    parser.add_argument("url", help="the run: a folder or a bucket, as for `diloco train --run`")
    parser.add_argument("--name", default="a00", help="of this actor, in its bundles")
    parser.add_argument(
        "--engine", default="", metavar="KIND[:ADDRESS]",
        help="openai:http://HOST:PORT, llama_cpp:BASE.gguf, transformers; left out: as the run's replicas sample",
    )  # fmt: skip
    typed = parser.parse_args(argv)
    try:
        return _run_actor(typed.url, typed.name, SystemClock(), typed.engine)
    except (ConfigError, InnerError, RendezvousError) as error:
        print(f"{typed.name}: {error}", file=sys.stderr, flush=True)
        return exitcodes.GAVE_UP if isinstance(error, StoreError | GaveUp) else exitcodes.USER_ERROR
    except KeyboardInterrupt:
        return exitcodes.LEFT


def _run_actor(url: str, name: str, clock: Clock, engine: str) -> int:
    if not layout.is_word(name):
        raise ConfigError(f"--name {name!r}: use letters, digits and _")
    run = open_patiently(url, clock)
    run = replace(run, store=PatientStore(run.store, clock, PATIENCE_S))
    tell = lambda text: print(text, flush=True)  # noqa: E731
    with tempfile.TemporaryDirectory(prefix="actor-") as scratch:
        actor = Actor(run, name, clock, Path(scratch), tell, engine)
        pause = IDLE_S
        while (end := too_late(run, clock)) is None:
            if actor.act():
                pause = IDLE_S
            else:
                clock.sleep(pause)
                pause = min(2 * pause, LONGEST_IDLE_S)  # each look costs requests
    tell(f"{name}: {end[1]}")
    return end[0]


if __name__ == "__main__":
    sys.exit(main())
