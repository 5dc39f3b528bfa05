"""Places, and one executor for all of them: on processes of this machine and on platforms in memory."""

import json

import pytest

from diloco.process import exitcodes
from executors.platforms.base import ExecutorError, FleetExecutor, Handle, LaunchPlan, ReplicaSpec, State
from executors.platforms.mixed import Mixed
from executors.platforms.on_host.executor import LocalProcessExecutor
from executors.platforms.places import Place, build_executor, mixed_executor, place_of, places_of
from executors.preflight.quote import Quote, write_quote
from executors.supervision.money.budget import Budget
from executors.supervision.shutdown import stop_run
from executors.supervision.supervisor import Supervisor
from rendezvous.agreement.membership import Wanted, read_control, write_control
from rendezvous.records.records import WIRE, Control
from rendezvous.stores.memory import MemoryStore
from tests.support.cloud import Cloud, CloudExecutor
from tests.support.fakes import ManualClock
from tests.support.world import LIMITS, Beating, World

RUN = "memory://run"
SLOTS = [f"r{i:02d}" for i in range(6)]


def spec(slot: str, attempt: int = 1, run: str = RUN) -> ReplicaSpec:
    return ReplicaSpec(run, slot, attempt)


class Two:
    """Two clouds, "red" for two slots and "blue" for the rest."""

    def __init__(self) -> None:
        store, self.clock = MemoryStore(), ManualClock()
        self.red, self.blue = Cloud(store, self.clock, "red", 4.0), Cloud(store, self.clock, "blue", 1.0)
        self.places = (Place("red", 2), Place("blue"))

    def mixed(self) -> FleetExecutor:
        return mixed_executor(self.places, [CloudExecutor(self.red), CloudExecutor(self.blue)], clock=self.clock)


@pytest.fixture
def two():
    return Two()


# -------------------------------------------------------------------- places


def test_slots_fill_the_places_in_their_order_and_the_last_takes_the_rest():
    places = (Place("modal", 2), Place("hf-jobs", 1), Place("local", 1))
    assert [place_of(places, s).executor for s in SLOTS] == ["modal"] * 2 + ["hf-jobs"] + ["local"] * 3
    assert place_of((Place("modal"), Place("local", 1)), "r05").executor == "modal"
    assert place_of(places, "publish").executor == "modal"
    assert places_of(()) == (Place("local"),)


def test_places_go_through_the_bucket_and_old_records_still_read():
    store, clock = MemoryStore(), ManualClock()
    write_control(store, clock, replicas=4, min_replicas=2, steps=9)
    assert read_control(store).places == () and read_control(store).max_usd == 0.0
    places = (Place("modal", 2, ("H100", "A100"), 3600.0, ("s3",), {"A": "b"}, {"region": "us"}), Place())
    write_control(store, clock, places=[p.to_dict() for p in places], max_usd=20.0, max_hours=3.5)
    wanted = read_control(store)
    assert places_of(wanted.places) == places
    assert (wanted.replicas, wanted.max_usd, wanted.max_hours, wanted.until) == (4, 20.0, 3.5, 0.0)
    old = {"kind": "control", "wire": WIRE, "n": 2, "nonce": "n", "at": 0.0, "replicas": 3, "stop": True}
    wanted = wanted.with_control(Control.decode(json.dumps(old).encode()))
    assert wanted.stop and wanted.replicas == 3 and places_of(wanted.places) == places and wanted.max_usd == 20.0


def test_former_places_are_remembered():
    modal, local, hf = ({"executor": name} for name in ("modal", "local", "hf-jobs"))
    wanted = Wanted()
    for n, places in enumerate([(modal, local), (local,), None, (hf,)]):
        wanted = wanted.with_control(Control(n, "n", 0.0, places=places))
    assert wanted.places == (hf,) and wanted.former == (modal, local)
    assert wanted.with_control(Control(4, "n", 0.0, places=(modal,))).former == (local, hf)


# -------------------------------------------------------------------- building


def test_one_kind_of_place_is_that_executor():
    one = build_executor([Place("local", 2, ("any",)), Place("local", options={})])
    assert isinstance(one, LocalProcessExecutor)
    one.close()


def test_places_with_other_options_are_other_executors():
    both = build_executor(
        [Place("local", 1, options={"method": "spawn"}).to_dict(), Place("local", options={"method": "fork"})]
    )
    assert isinstance(both, Mixed) and len({id(e) for e in both._all}) == 2
    both.close()


def test_unknown_executors_and_options_are_named_with_the_known_ones():
    with pytest.raises(ExecutorError, match=r"no executor 'moddal'; there are local, modal, hf-jobs"):
        build_executor([Place("moddal")])
    with pytest.raises(ExecutorError, match=r"local takes no option regoin; it takes .*cores"):
        build_executor([Place("local", options={"regoin": "us"})])


def test_a_former_place_that_cannot_be_built_does_not_stop_the_run():
    one = build_executor([Place("local")], former=[Place("nowhere").to_dict()])
    gone = Handle(RUN, "r00", 1, "nowhere", native="job-1")
    status = one.poll([gone])[0]
    assert status.stale and not status.state.ended
    one.close()


@pytest.mark.parametrize(
    "raw",
    [
        {"executor": 7},
        {"count": "2"},
        {"count": -1},
        {"gpu": "H100"},
        {"timeout_s": []},
        {"env": {"A": 1}},
        {"options": 1},
    ],
)
def test_an_invalid_place_in_the_bucket_is_named_and_can_be_replaced(raw):
    """Before: TypeError or AttributeError wherever it was used, or a negative count that was believed."""
    store, clock = MemoryStore(), ManualClock()
    write_control(store, clock, replicas=2, min_replicas=1, steps=3, places=[raw])
    with pytest.raises(
        ExecutorError, match=rf"a place that is not valid \(its {next(iter(raw))} is .*Name the places again"
    ):
        places_of(read_control(store).places)
    write_quote(store, clock, Quote((Place("local", 2),), LaunchPlan((), 0.0), Budget()))
    wanted = read_control(store)
    assert places_of(wanted.places) == (Place("local", 2),) and wanted.former == (raw,)
    build_executor(wanted.places, wanted.former).close()


# -------------------------------------------------------------------- routing


def test_launches_go_where_the_slot_belongs_and_come_back_in_order(two):
    handles = two.mixed().launch_replicas([spec(s) for s in ("r03", "r00", "r01")])
    assert [(h.slot, h.executor) for h in handles] == [("r03", "blue"), ("r00", "red"), ("r01", "red")]
    assert two.red.calls.count("launch") == two.blue.calls.count("launch") == 1


def test_the_plan_adds_up_and_one_unknown_price_makes_it_unknown(two):
    told = two.mixed().plan([spec(s) for s in SLOTS[:3]])
    assert told.usd_per_hour == 9.0 and len(told.lines) == 3
    two.blue.price = None
    assert two.mixed().plan([spec(s) for s in SLOTS[:3]]).usd_per_hour is None
    assert two.mixed().plan([spec("r00")]).usd_per_hour == 4.0


def test_one_place_that_cannot_launch_fails_its_slots_alone(two):
    two.red.down = "no credentials"
    mixed = two.mixed()
    handles = mixed.launch_replicas([spec(s) for s in SLOTS[:3]])
    statuses = mixed.poll(handles)
    assert [s.state for s in statuses] == [State.LOST, State.LOST, State.PENDING], "no replica is to blame"
    assert statuses[0].reason == "no credentials" and mixed.logs(handles[0]) == ["no credentials"]
    assert mixed.collect(handles, 0.0)[0].state is State.LOST
    mixed.cancel(handles)
    two.blue.down = "503"
    with pytest.raises(ExecutorError, match="no credentials"):
        two.mixed().launch_replicas([spec(s) for s in SLOTS[:3]])


def test_a_platform_that_cannot_be_asked_to_end_its_replicas_hinders_no_other(two):
    mixed = two.mixed()
    handles = mixed.launch_replicas([spec(s) for s in SLOTS[:3]])
    two.red.down = "503"
    with pytest.raises(ExecutorError, match="503"):
        mixed.cancel(handles, 0.0)
    assert two.blue.jobs[SLOTS[2], 1].state is State.CANCELLED and two.red.jobs[SLOTS[0], 1].cancels == 0


def test_handles_are_polled_where_they_run_not_where_their_slot_is_now(two):
    handle = two.mixed().launch_replicas([spec("r00")])[0]
    two.places = (Place("blue", 2), Place("red"))
    moved = mixed_executor(two.places, [CloudExecutor(two.blue), CloudExecutor(two.red)], clock=two.clock)
    two.red.jobs["r00", 1].state = State.RUNNING
    assert moved.poll([handle])[0].state is State.RUNNING
    assert moved.launch_replicas([spec("r00", 2)])[0].executor == "blue"
    moved.cancel([handle])
    assert two.red.jobs["r00", 1].state is State.CANCELLED


def test_find_prefers_who_runs_then_the_newest(two):
    mixed = two.mixed()
    mixed.launch_replicas([spec(s) for s in ("r00", "r01", "r02")])
    CloudExecutor(two.blue).launch_replicas([spec("r00", 2), spec("r01", 2)])
    two.blue.jobs["r00", 2].state = State.LOST  # the older one, on red, still waits
    two.red.jobs["r01", 1].state = State.LOST
    found = {h.slot: (h.executor, h.attempt) for h in mixed.find(RUN)}
    assert found == {"r00": ("red", 1), "r01": ("blue", 2), "r02": ("blue", 1)}


def test_a_platform_that_is_down_leaves_the_others_as_they_are(two):
    mixed = two.mixed()
    handles = mixed.launch_replicas([spec(s) for s in SLOTS[:3]])
    two.red.down = "503"
    assert [s.stale for s in mixed.poll(handles)] == [True, True, False]


class Listing(CloudExecutor):
    """A cloud that lists its processes by label."""

    labelled = True

    def orphans(self, run, known):
        self._ask("orphans")
        return [j.handle for j in self.cloud.jobs.values() if j.handle not in known]

    def sweep(self, run):
        self._ask("sweep")
        return [f"{slot} on {self.name}" for slot, _ in self.cloud.jobs]


def test_a_former_place_that_cannot_be_asked_hides_nothing_elsewhere(two, capsys):
    """Before: a run that was once on Modal could not be supervised where Modal has no token."""
    red, blue = Listing(two.red), Listing(two.blue)
    (handle,) = red.launch_replicas([spec("r00")])
    mixed = mixed_executor((Place("red"),), [red], others=[blue, red], clock=two.clock)
    two.blue.down = "no token"
    assert mixed.find(RUN) == [handle] and mixed.orphans(RUN, []) == [handle]
    warned = capsys.readouterr().err
    assert warned == "warning: blue, a former place of the run, cannot be asked: no token\n", "once"
    with pytest.raises(ExecutorError, match="no token"):
        mixed.sweep(RUN)
    two.blue.down, two.red.down = "", "503"
    two.blue.calls.clear()
    for ask in (mixed.find, mixed.sweep, lambda run: mixed.orphans(run, [])):
        with pytest.raises(ExecutorError, match="503"):
            ask(RUN)
    assert two.blue.calls == ["find", "sweep", "orphans"], "each is asked before an error of another ends the question"


def test_the_short_form_deals_out_ranks(two):
    handles = two.mixed().launch_replicas(n_replicas=3, entrypoint="some.module")
    specs = [two.red.job("r00").spec, two.red.job("r01").spec, two.blue.job("r02").spec]
    assert [s.env["REPLICA_RANK"] for s in specs] == ["0", "1", "2"] and len(handles) == 3


# -------------------------------------------------------------------- a run on both, and its supervisor


class MixedWorld(World):
    """One slot on the cloud, the others on another one."""

    def __init__(self, folder) -> None:
        self.other: Cloud | None = None
        super().__init__(folder, 3, places=[Place("cloud", 1).to_dict(), Place("other").to_dict()])

    def executor(self) -> FleetExecutor:
        self.other = self.other or Cloud(self.run.store, self.clock, "other", 1.0)
        places = places_of(read_control(self.run.store).places)
        return mixed_executor(places, [CloudExecutor(self.cloud), CloudExecutor(self.other)], clock=self.clock)

    def another(self) -> Supervisor:
        if hasattr(self, "supervisor"):
            self.supervisor.lease.beat("left")
        self.supervisor = Supervisor(self.run, self.executor(), self.clock, limits=LIMITS)
        return self.supervisor

    def pass_time(self, seconds: float, supervised: bool = True) -> None:
        assert self.other is not None

        def each() -> None:
            for job in self.other.jobs.values() if self.other else ():
                self.other._beat(job) if self.other and job.alive else None
            self.tick() if supervised else None

        self.cloud.live(seconds, each)


@pytest.fixture
def world(tmp_path):
    made = MixedWorld(tmp_path)
    made.tick()
    assert made.other is not None
    made.cloud.begin("r00")
    made.other.begin("r01", "r02")
    made.pass_time(3)
    return made


def test_a_mixed_fleet_is_one_run(world):
    assert set(world.cloud.jobs) == {("r00", 1)} and set(world.other.jobs) == {("r01", 1), ("r02", 1)}
    world.other.end("r01", -9, State.LOST)
    world.cloud.down = "503"
    world.pass_time(5)
    assert ("r01", 2) in world.other.jobs and ("r00", 2) not in world.cloud.jobs
    assert {e["executor"] for e in world.told("launched")} == {"cloud", "other"}


def test_stop_ends_a_mixed_fleet(world):
    world.supervisor.lease.beat("left")
    world.cloud.job("r00").deaf = world.other.job("r02").deaf = True

    class Both(Beating):
        def sleep(self, seconds: float) -> None:
            before = self.world.clock.now()
            super().sleep(seconds)
            if self.world.clock.now() - before >= 1.0:
                self.world.pass_time(1, supervised=False)

    ends = stop_run(world.run.store, Both(world), 4.0, lambda text: None, world.executor())
    assert not any(e.live for e in ends)
    states = {s: c.job(s).state for c, s in ((world.cloud, "r00"), (world.other, "r01"), (world.other, "r02"))}
    assert states == {"r00": State.CANCELLED, "r01": State.FAILED, "r02": State.CANCELLED}
    assert world.other.job("r01").code == exitcodes.LEFT
