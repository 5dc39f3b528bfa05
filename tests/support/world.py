"""A run on a cloud (tests/support/cloud.py) and its supervisors, in virtual time."""

from pathlib import Path

from diloco.run.config import RunConfig
from diloco.run.founding import open_run
from diloco.run.record import Run
from diloco.runlog.reader import Report, read_report
from executors.platforms.places import Place
from executors.supervision.costs import Costs
from executors.supervision.money.bills import costs
from executors.supervision.slots.plan import Limits
from executors.supervision.supervisor import Outcome, Supervisor
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from tests.support.cloud import Cloud, CloudExecutor
from tests.support.fakes import ManualClock

LIMITS = Limits(restart_grace_s=60.0, boot_s=120.0, fence_s=30.0, drain_s=20.0, backoff_s=1.0, backoff_most_s=8.0)


class World:
    """A run on a cloud, and its supervisors."""

    def __init__(self, folder: Path, replicas: int = 2, **wishes) -> None:
        raw = {
            "outer": {"sync_every": 1},
            "inner": {"loop": "supervised", "model": "tiny", "data": {"text": "text.txt"}},
            "fleet": {"replicas": replicas, "steps": 6},
        }
        (folder / "text.txt").write_text("a text that nobody reads")
        self.clock = ManualClock()
        self.run: Run = open_run(RunConfig.from_dict(raw, folder), f"memory://{folder}/run", self.clock)
        self.run.store.put(layout.MODEL_MANIFEST, b"{}")
        places = [Place("cloud", gpu=("H100",), timeout_s=3600.0, secrets=("s3-keys",), env={"A": "b"}).to_dict()]
        write_control(self.run.store, self.clock, **{"places": places, **wishes})
        self.cloud = Cloud(self.run.store, self.clock)
        self.outcome: Outcome | None = None
        self.supervisor = self.another()

    def another(self) -> Supervisor:
        """A supervisor that knows nothing; the last one is dead."""
        if hasattr(self, "supervisor"):
            self.supervisor.lease.beat("left")
        self.supervisor = Supervisor(self.run, CloudExecutor(self.cloud), self.clock, limits=LIMITS)
        return self.supervisor

    def tick(self) -> None:
        if self.outcome is None:
            self.outcome = self.supervisor._patient_tick()

    def pass_time(self, seconds: float, supervised: bool = True) -> None:
        """In steps of a second, or of 8 if it is long."""
        self.cloud.live(seconds, self.tick if supervised else lambda: None, 1.0 if seconds <= 100 else 8.0)

    def started(self) -> "World":
        """All replicas beat."""
        self.tick()
        self.cloud.begin(*{slot for slot, _ in self.cloud.jobs})
        self.pass_time(3)
        return self

    def report(self) -> Report:
        return read_report(self.run.store)

    def told(self, *events: str) -> list[dict]:
        return self.report().of_kind(*events)

    def costs(self) -> Costs:
        return costs(self.report(), self.clock.wall())

    def usd(self) -> float:
        return self.costs().usd


class Beating:
    """A clock whose sleep lets the cloud's replicas live."""

    def __init__(self, world: World) -> None:
        self.world, self.debt = world, 0.0

    def now(self) -> float:
        return self.world.clock.now()

    def wall(self) -> float:
        return self.world.clock.wall()

    def sleep(self, seconds: float) -> None:
        self.debt += seconds
        if self.debt < 1.0:
            self.world.clock.sleep(seconds)
        else:
            self.debt = 0.0
            self.world.cloud.live(1)


# -------------------------------------------------------------------- the claim
