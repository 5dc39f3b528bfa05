"""A platform that rents machines, in memory and in virtual time: what it does is written in the test.

    cloud = Cloud(store, clock)          jobs, of all launchers; outlives executors and supervisors
    CloudExecutor(cloud)                 the executor; new ones find everything again
    cloud.begin("r00")                   its machine is there: the replica claims its slot
    cloud.live(seconds)                  time passes, replicas beat, `each` is called at every step
    cloud.preempt("r00"), cloud.restart("r00"), cloud.end("r00", code)

A replica here claims, beats, and leaves when control or a cancel says so; it trains nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco.process import exitcodes
from executors.platforms.base import (
    ExecutorError,
    FleetExecutor,
    Handle,
    LaunchPlan,
    Refused,
    ReplicaSpec,
    Result,
    State,
    Status,
    Unavailable,
    unanswered,
)
from executors.platforms.short_form import rank_specs
from rendezvous import layout
from rendezvous.agreement.membership import claim, claims_above, read_control
from rendezvous.errors import Fenced
from rendezvous.records.records import Beat
from rendezvous.store import Store
from tests.support.fakes import ManualClock


@dataclass
class Job:
    """One launch.   alive: its process runs.   deaf: it ignores cancels.   reason: the platform names it."""

    spec: ReplicaSpec
    handle: Handle
    state: State = State.PENDING
    code: int | None = None
    alive: bool = False
    deaf: bool = False
    generation: int = 0
    beats: int = 0
    cancels: int = 0
    reason: str = ""


class Cloud:
    def __init__(self, store: Store, clock: ManualClock, name: str = "cloud", price: float | None = 4.0) -> None:
        self.store, self.clock, self.name, self.price = store, clock, name, price
        self.jobs: dict[tuple[str, int], Job] = {}
        self.down = ""  # why it cannot be reached
        self.refused = ""  # why it refuses every login
        self.no_launch: ExecutorError | None = None  # what it says to a launch
        self.deaf = False  # cancels are answered, and do nothing
        self.calls: list[str] = []
        self.beaten_at: dict[tuple[str, int], list[float]] = {}
        self.box_usd: dict[str, float] = {}  # slot -> US dollars that its heartbeats tell of boxes

    # ------------------------------------------------------------------ what the test does

    def job(self, slot: str) -> Job:
        """The newest of a slot."""
        return max((j for j in self.jobs.values() if j.spec.slot == slot), key=lambda j: j.spec.attempt)

    def running(self, slot: str) -> list[int]:
        """Attempts whose process runs."""
        return [a for (s, a), j in self.jobs.items() if s == slot and j.alive]

    def begin(self, *slots: str) -> None:
        """Their machines are there; they claim."""
        for slot in slots:
            self.start(self.job(slot))

    def start(self, job: Job) -> bool:
        """A (new) process for a launch; False: it found that it is not wanted any more."""
        try:
            job.generation = claim(self.store, self.clock, job.spec.slot, host=job.handle.place, pid=7)
        except Fenced:
            self._over(job, State.FAILED, exitcodes.FENCED)
            return False
        job.state, job.alive = State.RUNNING, True
        return True

    def preempt(self, slot: str) -> None:
        """Its process is gone; the platform still says RUNNING."""
        self.job(slot).alive = False

    def restart(self, slot: str, attempt: int) -> bool:
        """The platform starts the same input again."""
        return self.start(self.jobs[slot, attempt])

    def end(self, slot: str, code: int | None, state: State = State.FAILED) -> None:
        self._over(self.job(slot), state, code)

    def finish(self, slot: str) -> None:
        """Its replica has taken the last step that was wanted, and says goodbye."""
        job = self.job(slot)
        if job.alive or self.start(job):
            self._beat(job, "left")
        self._over(job, State.SUCCEEDED, exitcodes.DONE)

    def live(self, seconds: float, each: Callable[[], Any] = lambda: None, step: float = 1.0) -> None:
        for _ in range(int(seconds / step)):
            self.clock.sleep(step)
            for job in list(self.jobs.values()):
                if job.alive:
                    self._beat(job)
            each()

    # ------------------------------------------------------------------ what replicas do

    def _beat(self, job: Job, phase: str = "train") -> None:
        slot, wanted = job.spec.slot, read_control(self.store)
        if any(True for _ in claims_above(self.store, slot, job.generation)):
            return self._over(job, State.FAILED, exitcodes.FENCED)
        job.beats += 1
        self.beaten_at.setdefault((slot, job.spec.attempt), []).append(self.clock.now())
        leaves = wanted.is_to_leave(slot) or 0 < wanted.until <= self.clock.wall()
        phase = "left" if leaves and not job.deaf else phase
        beat = Beat(slot, job.generation, job.beats, phase, 0, 0, 0.5, self.clock.wall(), job.handle.place, 7)
        beat = replace(beat, box_usd=self.box_usd.get(slot, 0.0))
        self.store.put(layout.beat_key(slot), beat.encode())
        if phase == "left":
            self._over(job, State.FAILED, exitcodes.LEFT)
        return None

    def _over(self, job: Job, state: State, code: int | None) -> None:
        job.alive, job.state, job.code = False, state, code


class CloudExecutor(FleetExecutor):
    """The protocol, on a Cloud."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud, self.name = cloud, cloud.name

    def _ask(self, what: str) -> None:
        self.cloud.calls.append(what)
        if self.cloud.down:
            raise Unavailable(self.cloud.down)
        if self.cloud.refused:
            raise Refused(self.cloud.refused)
        if what == "launch" and self.cloud.no_launch:
            raise self.cloud.no_launch

    def plan(self, specs: Sequence[ReplicaSpec]) -> LaunchPlan:
        self._ask("plan")
        price = self.cloud.price
        return LaunchPlan(tuple(f"{s.slot}: rented" for s in specs), None if price is None else price * len(specs))

    def launch_replicas(self, specs: Sequence[ReplicaSpec] | None = None, **short: Any) -> list[Handle]:
        self._ask("launch")
        specs = rank_specs(self.name, **short) if specs is None else specs
        if refused := [s.gpu for s in specs if "TPU" in s.gpu]:
            raise ExecutorError(f"there is no GPU {refused[0]}")
        return [self._launch(s) for s in specs]

    def _launch(self, spec: ReplicaSpec) -> Handle:
        key = (spec.slot, spec.attempt)
        if key not in self.cloud.jobs:
            native, now = f"job-{spec.slot}.{spec.attempt}", self.cloud.clock.wall()
            handle = Handle(
                spec.run, *key, self.name, native=native, launched_at=now, usd_per_hour=self.cloud.price
            )  # fmt: skip
            self.cloud.jobs[key] = Job(spec, handle)
        return self.cloud.jobs[key].handle

    def poll(self, handles: Iterable[Handle]) -> list[Status]:
        self.cloud.calls.append("poll")
        found = [self.cloud.jobs[h.slot, h.attempt] for h in handles]
        if down := self.cloud.down:
            return [unanswered(Status(j.handle, State.PENDING, down, j.code), down) for j in found]
        known = [Status(j.handle, j.state, j.reason, j.code) for j in found]
        return [unanswered(s, Refused(self.cloud.refused)) for s in known] if self.cloud.refused else known

    def cancel(self, handles: Iterable[Handle], grace_s: float = 15.0) -> None:
        self._ask("cancel")
        for handle in handles:
            job = self.cloud.jobs[handle.slot, handle.attempt]
            job.cancels += 1
            if not self.cloud.deaf and not job.state.ended:
                self.cloud._over(job, State.CANCELLED, None)

    def collect(self, handles: Sequence[Handle], timeout: float | None = None) -> list[Result]:
        return [Result(s.handle, s.state, s.reason, s.exit_code) for s in self.poll(handles)]

    def logs(self, handle: Handle, tail: int | None = None) -> list[str]:
        self._ask("logs")
        return ["its last line"]

    def follow(self, handle: Handle, tail: int | None = None) -> Iterator[str]:
        return iter(self.logs(handle, tail))

    def find(self, run: str) -> list[Handle]:
        self._ask("find")
        slots = {s for s, _ in self.cloud.jobs}
        return [self.cloud.job(s).handle for s in sorted(slots) if self.cloud.job(s).spec.run == run]

    def close(self) -> None:
        pass


def elsewhere(handle: Handle, name: str) -> Handle:
    """The same launch, on another platform."""
    return replace(handle, executor=name)
