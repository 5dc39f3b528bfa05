"""Actors as a supervisor keeps them: names, places, prices, starts and ends; toys that sample nothing."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.actor.actor import take_name
from diloco.process import exitcodes
from diloco.run.config import ConfigError
from diloco.run.record import Run
from diloco.runlog.reader import Report, read_report
from diloco.runlog.sessions import SessionSummary
from diloco.runlog.summary import actor_words
from executors.cli.looking.status import cost_line, status_table
from executors.platforms.base import ExecutorError
from executors.platforms.on_host.executor import LocalProcessExecutor
from executors.platforms.places import Place, place_of, places_of
from executors.preflight.quote import PlaceRequest, actors_in, wanted_places
from executors.supervision import starts
from executors.supervision.costs import Bill, Costs
from executors.supervision.supervisor import Supervisor
from rendezvous import layout
from rendezvous.agreement.membership import Wanted, claim, newest_claim, read_control, write_control
from rendezvous.agreement.salvage import read_standing_control
from rendezvous.clock import SystemClock
from rendezvous.stores.memory import MemoryStore
from tests.executors.test_supervisor import HERE as REPLICAS
from tests.executors.test_supervisor import QUICK, found
from tests.support.command import asked
from tests.support.fleet import ENDLESS

TOYS = "tests.support.toy_actors"
CLOCK = SystemClock()


@pytest.fixture
def executor():
    made = LocalProcessExecutor([TOYS])
    yield made
    made.close()


def supervised(run: Run, executor: LocalProcessExecutor, **more) -> Supervisor:
    return Supervisor(run, executor, CLOCK, entrypoint=f"{REPLICAS}:replica", limits=QUICK, **more)


def kept_by(sessions: Report, slot: str) -> list[str]:
    return [x.how for x in sessions.sessions if x.slot == slot]


# -------------------------------------------------------------------- a supervisor's fleet


def test_a_killed_actor_is_started_again_and_all_end_with_the_run(tmp_path, executor, monkeypatch):
    monkeypatch.setattr(starts, "ACTOR", f"{TOYS}:toy_actor")
    run = found(tmp_path, steps=ENDLESS)
    write_control(run.store, CLOCK, actors=2)
    priorities = list[tuple[int, int]]()

    def kill_one(supervisor: Supervisor, report: Report) -> None:
        beat, handle = report.beats.get("a00"), supervisor.handle("a00")
        if handle and beat and beat.pid == handle.pid and beat.inner > 2 and not report.of_kind("lost"):
            priorities.append((os.getpriority(os.PRIO_PROCESS, handle.pid), os.getpriority(os.PRIO_PROCESS, 0)))
            os.kill(handle.pid, signal.SIGKILL)
        again = beat is not None and beat.generation == 2 and beat.inner > 2
        if again and report.head >= 2 and report.wanted.steps == ENDLESS:
            write_control(run.store, CLOCK, steps=report.head + 1)

    outcome = supervised(run, executor, each_tick=kill_one).supervise()
    report = read_report(run.store)
    assert outcome.code == exitcodes.DONE, outcome
    assert all(actor > mine for actor, mine in priorities) and priorities, "a round waits for replicas alone"
    assert kept_by(report, "a00") == ["lost", "ended"] and len(kept_by(report, "a01")) == 1
    assert {x.slot for x in report.sessions} == {"r00", "r01", "a00", "a01"} and report.slots == ["r00", "r01"]
    assert {e["slot"] for e in report.of_kind("ended")} == {"r00", "r01", "a00", "a01"}
    (lost,) = report.of_kind("lost")
    assert lost["slot"] == "a00" and lost["counted"] > 2, "its bundles are its work"
    (words,) = actor_words(report)
    assert words.startswith("2, 0 bundles, 0 too late"), words
    assert all(set(step.fresh) <= {"r00", "r01"} for step in report.steps)


@pytest.mark.slow
def test_an_actor_that_cannot_start_ends_no_run(tmp_path, executor, monkeypatch):
    monkeypatch.setattr(starts, "ACTOR", f"{TOYS}:broken_actor")
    run = found(tmp_path)
    write_control(run.store, CLOCK, actors=1)
    assert supervised(run, executor).supervise().code == exitcodes.DONE
    report = read_report(run.store)
    (given_up,) = report.of_kind("actor_given_up")
    assert given_up["slot"] == "a00" and "configuration" in given_up["text"] and report.done
    assert "a00" in "\n".join(status_table(report))


@pytest.mark.slow
def test_fewer_actors_wanted_drains_the_last_one(tmp_path, executor, monkeypatch):
    monkeypatch.setattr(starts, "ACTOR", f"{TOYS}:toy_actor")
    run = found(tmp_path, steps=ENDLESS)
    write_control(run.store, CLOCK, actors=2)

    def shrink(supervisor: Supervisor, report: Report) -> None:
        if report.wanted.actors == 2 and all(a in report.beats and report.beats[a].inner for a in ("a00", "a01")):
            write_control(run.store, CLOCK, actors=1)
        left = "a01" in report.beats and report.beats["a01"].phase == "left"
        if left and report.wanted.steps == ENDLESS:
            write_control(run.store, CLOCK, steps=report.head + 2)

    assert supervised(run, executor, each_tick=shrink).supervise().code == exitcodes.DONE
    ends = {e["slot"]: e["exit_code"] for e in read_report(run.store).of_kind("ended")}
    assert ends["a01"] == exitcodes.LEFT and ends["a00"] == exitcodes.DONE


# -------------------------------------------------------------------- names and wishes


def test_actors_are_members_and_no_slots() -> None:
    store = MemoryStore("memory://x")
    wanted = write_control(store, CLOCK, replicas=2, steps=9, min_replicas=1, actors=3)
    assert wanted.slot_names == ["r00", "r01"] and wanted.member_names == ["r00", "r01", "a00", "a01", "a02"]
    wanted = write_control(store, CLOCK, drain="a02")
    assert [name for name in wanted.member_names if wanted.is_kept(name)] == ["r00", "r01", "a00", "a01"]
    wanted = write_control(store, CLOCK, drain="r01")
    wanted = write_control(store, CLOCK, actors=4)
    assert not wanted.is_kept("r01") and wanted.is_kept("a02") and wanted.is_kept("a03"), "a drain of r01 stays"
    wanted = write_control(store, CLOCK, actors=0)
    assert not any(wanted.is_kept(f"a0{i}") for i in range(4)) and len(wanted.member_names) == 6
    assert wanted.is_to_leave("a00") and write_control(store, CLOCK, stop=True).is_to_leave("r00")
    with pytest.raises(ValueError, match="neither a slot"):
        write_control(store, CLOCK, drain="x1")


def test_lost_control_records_still_name_the_actors_that_claimed() -> None:
    store = MemoryStore("memory://x")
    write_control(store, CLOCK, replicas=1, steps=9, min_replicas=1, actors=1)
    for name in ("r00", "a00", "a04"):
        claim(store, CLOCK, name)
    store.put(layout.commit_key(0), b"{}")
    store.delete([layout.control_key(0)])
    write = read_standing_control(store)[0]
    assert write.member_names == ["r00", *(f"a0{i}" for i in range(5))]


def test_actors_by_hand_get_names_of_their_own(tmp_path: Path) -> None:
    run = found(tmp_path)
    write_control(run.store, CLOCK, actors=2)
    assert [take_name(run, CLOCK) for _ in range(2)] == [("a02", 1), ("a03", 1)]
    wanted = read_control(run.store)
    assert wanted.actors == 2 and not wanted.is_to_leave("a03") and not wanted.is_kept("a03")
    assert newest_claim(run.store, "a03").pid == os.getpid()
    assert take_name(run, CLOCK, "a02") == ("a02", 0) and take_name(run, CLOCK, "a07") == ("a07", 0)
    records = read_control(run.store).records
    assert take_name(run, CLOCK, "a07") == ("a07", 0) and read_control(run.store).records == records
    assert take_name(run, CLOCK) == ("a08", 1)
    with pytest.raises(ConfigError, match=r"has had 9 actors.*is called a09"):
        take_name(run, CLOCK, "a7777")


# -------------------------------------------------------------------- places and prices

MODAL = Place("modal", 8, gpu=("L4",), actors=True)


def test_actors_have_places_of_their_own() -> None:
    places = places_of(
        [
            Place("modal", 2, gpu=("H100",)),
            Place(),
            Place("modal", 2, gpu=("L4",), actors=True),
            Place("hf-jobs", 1, actors=True),
        ]
    )
    at = lambda name: (place_of(places, name).executor, place_of(places, name).gpu)  # noqa: E731
    assert [at(name) for name in ("r01", "r05", "publish")] == [
        ("modal", ("H100",)),
        ("local", ()),
        ("modal", ("H100",)),
    ]
    assert [at(name)[0] for name in ("a00", "a01", "a02", "a03")] == ["modal", "modal", "hf-jobs", "hf-jobs"]
    assert places_of([MODAL]) == (Place(), MODAL), "replicas run here if they have no place"
    assert place_of((Place("local"),), "a03").executor == "local", "actors without a place go where replicas are"
    with pytest.raises(ExecutorError, match="not valid"):
        places_of([{"executor": "modal", "actors": "yes"}])


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (("--actors", "4"), (Place("local", 4, actors=True),)),
        (("--actors", "modal:8:L4"), (MODAL,)),
        (("--actors", "modal:8:L4", "--actors", "2"), (MODAL, Place("local", 2, actors=True))),
        (("--actors", "0"), ()),
        ((), None),
    ],
)
def test_actors_as_typed(typed: tuple[str, ...], expected: tuple[Place, ...] | None) -> None:
    wish = asked("resume", "r", *typed).places
    assert wish.actors == expected
    assert actors_in(wish, Wanted(actors=3)) == (3 if expected is None else sum(p.count for p in expected))


def test_options_reach_the_actors_places_and_replicas_keep_theirs() -> None:
    before = [Place("modal", 2, gpu=("H100",)).to_dict()]
    wish = asked("resume", "r", "--actors", "modal:8:L4", "--secret", "aws").places
    assert wanted_places(wish, before) == (
        Place("modal", 2, gpu=("H100",), secrets=("aws",)),
        Place("modal", 8, gpu=("L4",), secrets=("aws",), actors=True),
    )
    both = [*before, MODAL.to_dict()]
    assert wanted_places(PlaceRequest(executor="local"), both) == (Place("local"), MODAL), "actors stay where they are"
    assert wanted_places(PlaceRequest(actors=()), both) == (Place("modal", 2, gpu=("H100",)),)
    assert wanted_places(PlaceRequest(actors=(MODAL,)), ()) == (Place(), MODAL)


@pytest.mark.parametrize("wrong", ["modal", "modal:x", "-1", "modal:0", "2:H100", "", "9" * 9, "local:2,modal:1"])
def test_actors_need_a_number(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        asked("train", "c", "--run", "r", f"--actors={wrong}")
    assert "must look like 4, modal:8 or modal:8:L4" in capsys.readouterr().err


def test_the_actors_share_of_the_costs_is_told() -> None:
    bills = tuple(Bill(s, 1, "modal", 2.0, 0.0, 3600.0) for s in ("r00", "a00"))
    assert "$2.00 of it for actors" in cost_line(Costs(bills), Wanted())
    assert "actors" not in cost_line(Costs(bills[:1]), Wanted())


def test_the_report_counts_what_actors_sampled_and_odd_lines_are_no_numbers() -> None:
    event = {"who": "a00-1", "slot": "a00", "generation": 1, "at": 1.0}
    events = [{**event, "event": "sampled", "stands": stands} for stands in (True, True, False)]
    events += [{**event, "event": "rollouts_found", "bundles": b, "expired": e} for b, e in ((2, 1), ("x", None))]
    session = SessionSummary("a00", 1, 7, "vm", 1.0)
    report = Report("x", "memory://", {}, Wanted(), [], [session], events, {}, 0)
    (words,) = actor_words(report)
    assert words == "1, 3 bundles, 1 too late; 2 trained on, 1 too old or too far from the policy"
    assert f"  actors: {words}" in status_table(report)
    assert actor_words(replace(report, sessions=[])) == []
    steps = [{**event, "slot": "r00", "event": kind, "step": 9} for kind in ("step", "sampled")]
    (words,) = actor_words(replace(report, events=[*events, *steps]))  # before: 4 bundles of the run, and 0 trained on
    assert words == "1, since outer step 9: 1 bundles, 0 too late; 0 trained on, 0 too old or too far from the policy"
