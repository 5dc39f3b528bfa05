"""Real replica processes that are killed, paused, asked to leave, started late, and started twice.

After every fault: no outer step is lost, no work counts twice, and an independent replay (support/audit.py) reproduces
the θ of every replica after every commit, bit for bit.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from diloco.model.export import state_at
from diloco.process import exitcodes
from diloco.run.config import ConfigError, RunConfig
from diloco.run.footprint import footprint, lines
from diloco.run.founding import open_run
from diloco.runlog.reader import read_report
from diloco.runlog.summary import kept_words, summary
from diloco.units import byte_size
from executors.cli.looking.status import status_dict, status_table
from executors.cli.writing.verbs import best_step
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.clock import SystemClock
from rendezvous.records.records import Beat
from rendezvous.snapshots import record as snapshots
from tests.support.audit import check_run, decoded, logged_digests
from tests.support.fleet import ENDLESS, Fleet

POINTS = {
    "before blob": "before:put:/delta/@3",
    "after blob": "after:put:/delta/@3",
    "before offer": "before:create:/offer/@3",
    "after offer": "after:create:/offer/@3",
    "before commit": "before:create:/commit.json@1",
    "after commit": "after:create:/commit.json@1",
    "in a snapshot": "after:put:snapshots/@1",
    "before the mean is announced": "before:put:/mean/@1",
}


SLOW: dict[str, Any] = {
    "outer": {"sync_every": 30, "snapshot_every": 2}
}  # an outer step lasts for some beats, so that tests can aim


def test_a_fleet_learns_and_agrees(tmp_path: Path) -> None:
    """All three in every step.  With a quorum of two a replica that got no CPU for a while would be left out of one."""
    fleet = Fleet(tmp_path, fleet={"min_replicas": 3})
    fleet.start_all()
    assert fleet.wait() == {"r00": [0], "r01": [0], "r02": [0]}
    found = check_run(tmp_path / "run", 6)
    assert len(found.listed) == 18 and found.late == 0


AIMED = "after commit"  # in every run of the tests


@pytest.mark.parametrize("point", [pytest.param(p, marks=() if p == AIMED else pytest.mark.slow) for p in POINTS])
def test_death_at_every_point(tmp_path: Path, point: str) -> None:
    all_wait = {"min_replicas": 3} if point == "after offer" else {}  # no replica goes on without that offer
    fleet = Fleet(tmp_path, fleet={"steps": ENDLESS, **all_wait})  # r01 closes one of them, at any speeds
    fleet.start("r00")
    fleet.start("r01", die=POINTS[point])
    fleet.start("r02")
    fleet.wait_for(lambda: not fleet.sessions["r01"][0].is_alive())
    assert fleet.sessions["r01"][0].exitcode == -signal.SIGKILL, fleet.logs()
    fleet.start("r01")
    fleet.wait_for(lambda: fleet.counted("r01", 2))
    fleet.end_in(2)
    codes = fleet.wait()
    assert codes == {"r00": [0], "r01": [-9, 0], "r02": [0]}, fleet.logs()
    found = check_run(tmp_path / "run", len(fleet.commits()))
    assert (2, "r01") in found.listed or point != "after offer", "a durable offer outlives its writer"


def test_two_fragments_delay_and_another_cpu(tmp_path: Path) -> None:
    """F = 2, τ = 1, and one replica whose kernels use no vector instructions."""
    fleet = Fleet(tmp_path, outer={"fragments": 2, "fragment_sync_delay": 1, "sync_every": 6}, fleet={"steps": 8})
    fleet.start("r00")
    fleet.start("r01", ATEN_CPU_CAPABILITY="default")
    fleet.start("r02")
    assert fleet.wait() == {"r00": [0], "r01": [0], "r02": [0]}
    check_run(tmp_path / "run", 8)


@pytest.mark.slow
def test_a_merge_of_local_and_global_values_never_enters_a_pseudogradient(tmp_path: Path) -> None:
    fleet = Fleet(
        tmp_path, outer={"fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5, "sync_every": 6}
    )
    fleet.start_all()
    assert fleet.wait() == {"r00": [0], "r01": [0], "r02": [0]}
    check_run(tmp_path / "run", 6)


@pytest.mark.parametrize(
    "codec", [*(pytest.param(c, marks=pytest.mark.slow) for c in ("bf16", "int4", "topk", "bf16-gate")), "int8"]
)
def test_every_codec_agrees_and_survives_a_kill(tmp_path: Path, codec: str) -> None:
    """bf16-gate at a rate at which few weights change in bf16: then its bodies are small, and differ in size."""
    inner = {"lr": 3e-7} if codec == "bf16-gate" else {}
    outer = {"sync_every": 20, "snapshot_every": 2, "codec": codec}
    fleet = Fleet(tmp_path, outer=outer, inner=inner, fleet={"steps": ENDLESS})
    fleet.start("r00")
    fleet.start("r01", die="after:create:/offer/@4")
    fleet.start("r02", ATEN_CPU_CAPABILITY="default")
    fleet.wait_for(lambda: not fleet.sessions["r01"][0].is_alive())
    fleet.start("r01")
    fleet.wait_for(lambda: fleet.counted("r01", 2))
    fleet.end_in(2)
    assert fleet.wait() == {"r00": [0], "r01": [-9, 0], "r02": [0]}, fleet.logs()
    found = check_run(tmp_path / "run", len(fleet.commits()))
    commits = fleet.commits()
    sizes = {o.size for c in commits for o in c.offers}
    assert max(sizes) < 4 * found.theta[0].size / 1.9 and (len(sizes) > 1) == (codec == "bf16-gate")


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_sharded_reduction_survives_the_death_of_an_owner(tmp_path: Path, codec: str) -> None:
    """r01 dies when it is about to announce its part; the others take over, and all hold the bits of the replay."""
    outer = {"sync_every": 20, "snapshot_every": 2, "codec": codec}
    fleet = Fleet(tmp_path, outer=outer, fleet={"steps": ENDLESS})
    fleet.start("r00", TEST_SHARDED="1")
    fleet.start("r01", die="before:put:/mean/@3", TEST_SHARDED="1")
    fleet.start("r02", TEST_SHARDED="1", ATEN_CPU_CAPABILITY="default")
    fleet.wait_for(lambda: not fleet.sessions["r01"][0].is_alive())
    fleet.start("r01", TEST_SHARDED="1")
    fleet.wait_for(lambda: sum(c.mode == "sharded" for c in fleet.seen_commits()) >= 6 and fleet.counted("r01", 2))
    fleet.end_in(2)
    assert fleet.wait() == {"r00": [0], "r01": [-9, 0], "r02": [0]}, fleet.logs()
    check_run(tmp_path / "run", len(fleet.commits()))
    sharded = [c.t for c in fleet.commits() if c.mode == "sharded"]
    announced = [list((tmp_path / "run" / "steps" / f"{t:010d}" / "mean").glob("*.json")) for t in sharded]
    assert all(len(registers) == 3 for registers in announced), "every part of a sharded step is announced"


@pytest.mark.slow
def test_two_fragments_survive_a_kill(tmp_path: Path) -> None:
    fleet = Fleet(
        tmp_path, outer={"fragments": 2, "fragment_sync_delay": 1, "sync_every": 80}, fleet={"steps": ENDLESS}
    )
    fleet.start_all()
    fleet.wait_for(lambda: fleet.training("r01", 3))
    fleet.signal("r01", signal.SIGKILL)
    fleet.start("r01")
    fleet.wait_for(lambda: fleet.counted("r01", 2))
    fleet.end_in(2)
    assert fleet.wait() == {"r00": [0], "r01": [-9, 0], "r02": [0]}
    check_run(tmp_path / "run", len(fleet.commits()))


def test_a_paused_zombie_is_fenced_and_says_so(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, **SLOW, fleet={"steps": ENDLESS})
    fleet.start_all()
    fleet.wait_for(lambda: fleet.training("r02", 1))
    fleet.signal("r02", signal.SIGSTOP)
    zombie = fleet.sessions["r02"][0]
    fleet.start("r02")
    fleet.wait_for(lambda: fleet.counted("r02", 2))
    os.kill(zombie.pid, signal.SIGCONT)
    fleet.wait_for(lambda: not zombie.is_alive())
    fleet.end_in(2)
    codes = fleet.wait()
    assert codes["r02"] == [exitcodes.FENCED, 0], fleet.logs()
    assert "now belongs to generation 2" in fleet.log("r02").read_text()
    check_run(tmp_path / "run", len(fleet.commits()))


@pytest.mark.slow
def test_the_whole_fleet_dies_and_the_same_command_goes_on(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.start_all()
    fleet.wait_for(lambda: fleet.commit(2))
    fleet.kill_all()
    before = len(fleet.commits())
    fleet.start_all()
    codes = fleet.wait()
    assert all(sessions[-1] == 0 for sessions in codes.values()), fleet.logs()
    assert before >= 3
    check_run(tmp_path / "run", 6)


@pytest.mark.slow
def test_a_late_starter_heals_before_its_first_inner_step(tmp_path: Path) -> None:
    """Its first offer starts from the chain's θ: the audit checks the base of every listed offer's commit."""
    fleet = Fleet(tmp_path, **SLOW, fleet={"steps": ENDLESS})
    fleet.start("r00")
    fleet.start("r01")
    fleet.wait_for(lambda: fleet.commit(3))
    fleet.start("r02")
    fleet.wait_for(lambda: fleet.counted("r02"))
    fleet.end_in(1)
    codes = fleet.wait()
    assert codes["r02"] == [0]
    listed = [(c.t, o) for c in fleet.commits() for o in c.offers if o.slot == "r02"]
    assert listed and listed[0][0] >= 4
    check_run(tmp_path / "run", len(fleet.commits()))


def test_sigterm_offers_partial_work_and_leaves(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, outer={"sync_every": 40}, inner={"batch_size": 8}, fleet={"steps": ENDLESS})
    fleet.start_all()
    fleet.wait_for(lambda: fleet.training("r01", 1))
    fleet.signal("r01", signal.SIGTERM)
    fleet.wait_for(lambda: not fleet.sessions["r01"][0].is_alive())
    fleet.end_in(2)
    codes = fleet.wait()
    assert codes == {"r00": [0], "r01": [exitcodes.LEFT], "r02": [0]}, fleet.logs()
    partial = [o for c in fleet.commits() for o in c.offers if o.slot == "r01" and o.h < 40]
    assert partial and partial[-1].leaving and partial[-1].weight == pytest.approx(partial[-1].h / 40)
    check_run(tmp_path / "run", len(fleet.commits()))


@pytest.mark.slow
def test_what_int8_has_not_sent_goes_from_session_to_session(tmp_path: Path) -> None:
    """Two sessions of r01 leave on SIGTERM.  Σ of their pseudogradients = Σ of their decoded bodies + what is left."""
    outer, environ = {"sync_every": 40, "codec": "int8"}, {"TEST_NOTE_DELTAS": str(tmp_path)}
    fleet = Fleet(tmp_path, outer=outer, inner={"batch_size": 8}, fleet={"steps": ENDLESS})
    fleet.start("r00")
    fleet.start("r02")
    for step, session in ((1, 1), (3, 2)):
        fleet.start("r01", **environ)
        fleet.wait_for(
            lambda step=step, session=session: (
                fleet.training("r01", step) and beat_of(fleet, "r01").generation == session
            )
        )
        fleet.signal("r01", signal.SIGTERM)
        fleet.sessions["r01"][-1].join()
    fleet.end_in(2)
    assert fleet.wait() == {"r00": [0], "r01": [exitcodes.LEFT] * 2, "r02": [0]}, fleet.logs()
    check_run(tmp_path / "run", len(fleet.commits()))
    offered = np.sum([np.load(path).astype(np.float64) for path in tmp_path.glob("delta.r01-*.npy")], axis=0)
    bodies = [p.read_bytes() for p in tmp_path.glob("run/steps/*/delta/r01-*.bin")]
    sent = sum(decoded("int8", body, offered.size).astype(np.float64) for body in bodies)
    unsent = [load_file(p)["residual.0"] for p in tmp_path.glob("run/residuals/r01-2-*.bin")]
    assert len(bodies) >= 3 and len(unsent) == 1 and not list(tmp_path.glob("run/residuals/r01-1-*.bin"))
    lost = np.abs(offered - sent - unsent[0])
    assert lost.max() < 1e-3 * np.abs(unsent[0]).max(), "fp32 roundings, and nothing else"


@pytest.mark.slow  # in test_a_paused_zombie_is_fenced_and_says_so the second claim fences the first, too
def test_two_processes_for_one_slot(tmp_path: Path) -> None:
    """The second claim fences the first, which ends and says why; the run goes on with one of them."""
    fleet = Fleet(tmp_path, **SLOW, fleet={"steps": ENDLESS})
    fleet.start_all()
    fleet.wait_for(lambda: fleet.training("r00", 1))
    fleet.start("r00")
    fleet.wait_for(lambda: not fleet.sessions["r00"][0].is_alive() and fleet.counted("r00", 2))
    fleet.end_in(2)
    codes = fleet.wait()
    assert codes["r00"] == [exitcodes.FENCED, 0], fleet.logs()
    assert "now belongs to generation 2" in fleet.log("r00").read_text()
    check_run(tmp_path / "run", len(fleet.commits()))


@pytest.mark.slow
def test_stop_ends_all_and_resume_goes_on(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, **SLOW, fleet={"steps": ENDLESS})
    fleet.start_all()
    fleet.wait_for(lambda: fleet.commit(1))
    write_control(fleet.store, SystemClock(), stop=True)
    codes = fleet.wait()
    assert all(sessions == [exitcodes.LEFT] for sessions in codes.values()), fleet.logs()
    write_control(fleet.store, SystemClock(), resume=True)
    fleet.end_in(3)
    fleet.start_all()
    codes = fleet.wait()
    assert all(sessions == [exitcodes.LEFT, 0] for sessions in codes.values()), fleet.logs()
    check_run(tmp_path / "run", len(fleet.commits()))


def test_fewer_than_min_replicas_says_what_it_waits_for(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, fleet={"give_up_s": 2.0})
    fleet.start("r00")
    codes = fleet.wait()
    assert codes == {"r00": [exitcodes.GAVE_UP]}
    said = fleet.log("r00").read_text()
    assert "min_replicas=2" in said and "r01 was never seen" in said


@pytest.mark.slow
def test_a_window_of_the_run_is_kept_and_the_rest_collected(tmp_path: Path) -> None:
    """Registers stay, blobs behind the second-newest snapshot go; a late starter heals, the head can be exported."""
    fleet = Fleet(tmp_path, fleet={"keep": "window", "steps": 16})
    fleet.start("r00")
    fleet.start("r01")
    fleet.wait_for(lambda: fleet.commit(11))
    fleet.start("r02")
    assert fleet.wait() == {"r00": [0], "r01": [0], "r02": [0]}, fleet.logs()
    run = tmp_path / "run"
    assert len(list(run.glob("steps/*/commit.json"))) == 16
    left = sorted(int(p.parent.parent.name) for p in run.glob("steps/*/delta/*.bin"))
    assert all(t >= 6 for t in left), "the deltas of the first steps are gone (all of them, if the last sweep was)"
    at, state = state_at(fleet.run, fleet.model, None)
    assert at == 16
    assert {state.digest()} == logged_digests(run)[15]
    with pytest.raises(
        ConfigError,
        match=r"θ_3 cannot be computed any more: what is kept \(fleet.keep = window\) reaches back to step",
    ):
        state_at(fleet.run, fleet.model, 3)
    evaluated = [
        {"at": 1.0, "event": "evaluated", "step": step, "share": 0, "shares": 1, "prompts": 1, "total": 1,
         "greedy": {"reward": [1, reward, reward]}}
        for step, reward in ((3, 1.0), (15, 0.5), (16, 0.25))
    ]  # fmt: skip
    log = run / "log" / "r00-9" / "000000.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text("".join(json.dumps(event) + "\n" for event in evaluated))
    assert [e.step for e in read_report(fleet.run.store).evaluations] == [3, 15, 16]
    assert best_step(fleet.run, None) == 15, "the best of those that are kept"


@pytest.mark.slow
def test_bodies_go_while_replicas_die_and_means_tell_every_step_of_the_window(tmp_path: Path) -> None:
    """No room beside the window, and one snapshot after the first: the bodies before it go, where their mean stands."""
    steps, snapshot = 11, 6
    fleet = Fleet(tmp_path, outer={"snapshot_every": snapshot}, fleet={"keep": "window", "steps": steps})
    fleet.start_all()
    fleet.wait_for(lambda: fleet.commit(2))
    fleet.sessions["r01"][-1].kill()
    fleet.start("r01")
    fleet.wait_for(lambda: fleet.commit(7))
    fleet.sessions["r02"][-1].kill()
    fleet.start("r02")
    codes = fleet.wait()
    assert all(sessions[-1] == 0 for sessions in codes.values()), fleet.logs()
    run, report = tmp_path / "run", read_report(fleet.store)
    last = max(report.of_kind("collected"), key=lambda e: e["deltas_from"])
    floor, newest = last["below"], last["deltas_from"]
    whole = {c.t for c in fleet.commits() if all((run / o.blob).exists() for o in c.offers)}
    announced = {int(p.parent.parent.name) for p in run.glob("steps/*/mean/*.json")}
    assert floor >= snapshot and newest == steps, "a finished run keeps what its last two snapshots leave"
    assert whole & set(range(newest)) == set(range(floor, newest)) - announced, "gone, where a mean stands"
    found = check_run(run, steps)
    assert found.unchecked == [t for t in range(newest) if t not in whole]
    for t in (floor, newest, steps):
        assert state_at(fleet.run, fleet.model, t)[1].digest() == found.digests[t]
    assert kept_words(report) == [
        f"kept: every step from {floor} on", f"pseudogradients before {newest} are gone (fleet.keep = window)"
    ]  # fmt: skip
    gone = kept_words(report)[1]
    assert (
        gone in summary(report) and gone in "\n".join(status_table(report)) and gone in status_dict(report, 0.0)["kept"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("key", ["", "a key of sixteen"])
def test_the_bytes_on_disk_stay_within_the_budget_while_replicas_are_killed_and_replaced(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny model: a snapshot has 0.8 MB, a step's bodies 0.4 MB each.  In 40 steps it would leave 70 MB.

    A killed replica may leave a snapshot without a manifest, or a body without an offer: no record names these, so the
    budget leaves only 5 % for them (1 MB here), which two may exceed.  On a busy machine this was 20.2 MB once.
    """
    if key:
        monkeypatch.setenv("DILOCO_RUN_KEY", key)
    keep, steps = 20_000_000, 40
    fleet = Fleet(tmp_path, environ={"DILOCO_RUN_KEY": key} if key else {}, fleet={"keep": "20 MB", "steps": steps})
    fleet.start_all()
    most, killed = 0, 0
    while fleet.commit(steps - 1) is None:
        most = max(most, blob_bytes(tmp_path / "run"))
        if killed < 4 and fleet.commit(6 * killed + 4):
            fleet.sessions["r02"][-1].kill()
            fleet.start("r02")
            killed += 1
        time.sleep(0.02)
    codes = fleet.wait()
    assert killed == 4 and all(sessions[-1] == 0 for sessions in codes.values()), fleet.logs()
    assert most <= 0.95 * keep + killed * 800_000, f"{most} bytes"
    at, state = state_at(fleet.run, fleet.model, None)
    assert at == steps and {state.digest()} == logged_digests(tmp_path / "run")[steps - 1]
    gone = r"θ_3 cannot be computed .* \(fleet.keep = 20 MB\) reaches back to step"
    with pytest.raises(ConfigError, match=gone) as told:
        state_at(fleet.run, fleet.model, 3)
    said = str(told.value).partition("reaches back to step ")[2].partition(". Name one")[0]
    for step in map(int, re.findall(r"\d+", said)):  # the room for older snapshots depends on late replicas
        assert state_at(fleet.run, fleet.model, step)[0] == step, told.value


@pytest.mark.slow
def test_a_small_budget_brings_snapshots_forward_and_holds_at_every_look(tmp_path: Path) -> None:
    """A snapshot every 1,000 steps alone would let the bodies of all steps stay."""
    keep, steps = 14_000_000, 40
    fleet = Fleet(tmp_path, outer={"snapshot_every": 1000}, fleet={"keep": "14 MB", "steps": steps})
    parameters = sum(prod(shape) for _, shape, _ in fleet.model.layout)
    planned = footprint(fleet.config, parameters, 3, steps)
    assert 1 < planned.period < 8 and planned.needed <= keep < planned.in_all / 4
    fleet.start_all()
    most = 0
    while fleet.commit(steps - 1) is None:
        most = max(most, blob_bytes(tmp_path / "run"))
        time.sleep(0.02)
    codes = fleet.wait()
    assert codes == {"r00": [0], "r01": [0], "r02": [0]}, fleet.logs()
    assert f"at most {byte_size(keep)} of" in lines(planned, steps, keep)[1]
    assert planned.needed / 2 < most <= keep, f"{most} bytes"
    made = snapshots.steps_of(fleet.store.list(layout.SNAPSHOTS))
    assert steps / planned.period / 2 <= len(made) <= 2 * steps / planned.period
    at, state = state_at(fleet.run, fleet.model, None)
    assert at == steps and {state.digest()} == logged_digests(tmp_path / "run")[steps - 1]


def beat_of(fleet: Fleet, slot: str) -> Beat:
    beat = fleet.beat(slot)
    assert beat is not None
    return beat


def blob_bytes(run: Path) -> int:
    total = 0
    for path in [*run.glob("steps/*/*/*.bin"), *run.glob("snapshots/*/*.safetensors")]:
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


CRASHES = """
import faulthandler, sys
from diloco.replica.replica import run_member
run_member(sys.argv[1], "r00", lambda run, session: 0)
from huggingface_hub import constants
print(constants.HF_HUB_DISABLE_TELEMETRY)
faulthandler._sigsegv()
"""


@pytest.mark.parametrize(("wanted", "sends_none"), [({}, "True"), ({"HF_HUB_DISABLE_TELEMETRY": "0"}, "False")])
def test_a_crash_of_native_code_shows_its_calls_and_no_telemetry_is_sent(
    tmp_path: Path, wanted: dict[str, str], sends_none: str
) -> None:
    """TRL's telemetry looked up a host in a thread while accelerate changed the environment: SIGSEGV, and no words."""
    environ = {name: value for name, value in os.environ.items() if "TELEMETRY" not in name} | wanted
    code = [sys.executable, "-c", CRASHES, str(tmp_path / "no-run")]
    done = subprocess.run(code, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGSEGV and done.stdout.splitlines()[-1] == sends_none
    assert "Segmentation fault" in done.stderr and 'File "<string>", line 7' in done.stderr


EXITS = """
import sys
from diloco.replica.replica import run_member
def act(run, session):
    raise {raised}
sys.exit(run_member(sys.argv[1], "r00", act))
"""


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        ("SystemExit(2)", "called sys.exit(2)"),
        ("SystemExit(0)", "called sys.exit(0)"),
        ("KeyboardInterrupt", "raised KeyboardInterrupt"),
    ],
)
def test_an_exit_of_the_users_code_is_a_crash_and_its_code_is_not_the_replicas(
    tmp_path: Path, raised: str, words: str
) -> None:
    """Before: sys.exit(2) in an environment's reset ended the run as a mistake in its config, without a reason."""
    (tmp_path / "text.txt").write_text("1 2 3")
    data = {"inner": {"loop": "supervised", "model": "m", "data": {"text": "text.txt"}}, "fleet": {"replicas": 1}}
    url = str(tmp_path / "run")
    run = open_run(RunConfig.from_dict(data, tmp_path), url, SystemClock())
    code = [sys.executable, "-c", EXITS.format(raised=raised), url]
    done = subprocess.run(code, capture_output=True, text=True, timeout=60)
    assert done.returncode == exitcodes.CRASHED, done.stderr
    crashed = read_report(run.store).of_kind("crashed")
    assert [f"your code or a library {words}" in e["error"] for e in crashed] == [True], crashed
