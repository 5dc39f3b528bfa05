"""A whole run on Hugging Face Jobs: GRPO replicas on ToolWorld as jobs, through the real client, one of them preempted.

The Hub is tests/support/hf_server.py, the run's bucket tests/support/s3_server.py, the audit tests/support/audit.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.process import exitcodes
from diloco.run.config import load_config
from diloco.run.founding import open_run
from diloco.run.record import Run, read_run
from diloco.runlog.reader import Report, read_report
from diloco.runlog.summary import checks
from executors.cli import main as cli
from executors.platforms.base import ReplicaSpec, State
from executors.platforms.on_hf_jobs.executor import HFJobsExecutor
from executors.platforms.places import Place, build_executor
from executors.supervision.hosted import start_hosted
from executors.supervision.slots.plan import Limits
from executors.supervision.supervisor import Supervisor
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.clock import SystemClock
from rendezvous.stores.open import open_store
from tests.support.audit import Audit, check_run
from tests.support.entrypoints import marks
from tests.support.fleet import ENDLESS
from tests.support.hf_server import HFServer
from tests.support.ranks import children_of
from tests.support.s3_server import S3Server

URL, STEPS, WAIT_S = "s3://bucket/runs/jobs", 3, 200.0
ROOT = Path(__file__).parents[2]
CONFIG = """
name = "jobs"
[fleet]
replicas = {n}
steps = {steps}
min_replicas = {n}
give_up_s = 120.0
[outer]
sync_every = 2
snapshot_every = 2
[inner]
loop = "grpo"
model = "toolworld"
batch_size = 16
"""


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with S3Server(access_key="AKIDTEST") as server:
        keys = {"AWS_ACCESS_KEY_ID": "AKIDTEST", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        for name, value in {**keys, "AWS_ENDPOINT_URL": server.endpoint}.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HFServer]:
    with HFServer(grace_s=5.0) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_TOKEN", server.token)
        yield server


def config(folder: Path, n: int, steps: int) -> Path:
    """Every step needs every replica: so a replacement must join, however long it takes."""
    (folder / "run.toml").write_text(CONFIG.format(n=n, steps=steps))
    return folder / "run.toml"


def founded(folder: Path, s3: S3Server, n: int = 3) -> Run:
    """A run whose place is Hugging Face Jobs: the bucket's keys go as secrets, where it is as plain variables."""
    run = open_run(load_config(config(folder, n, STEPS)), URL, SystemClock())
    secrets = ("HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    env = {"AWS_ENDPOINT_URL": s3.endpoint, "AWS_REGION": "us-east-1"}
    place = Place("hf-jobs", secrets=secrets, env=env, timeout_s=3600.0)
    write_control(run.store, SystemClock(), places=[place.to_dict()])
    return run


def preempt(hub: HFServer, slot: str, from_step: int) -> Callable[[Supervisor, Report], None]:
    """Once, in the middle of an outer step.  The run ends two steps after the one that takes its place has joined."""
    ended = list[int]()

    def tick(supervisor: Supervisor, report: Report) -> None:
        handle, beat = supervisor.handle(slot), report.beats.get(slot)
        if handle and beat and beat.host == handle.place and beat.step >= from_step and not report.of_kind("killed"):
            hub.preempt(handle.native)
            supervisor.emit("killed", slot=slot, step=beat.step)
        if not ended and any(x.name == f"{slot}-2" and x.joined for x in report.sessions):
            ended.append(report.head + 2)
            write_control(supervisor.run.store, SystemClock(), steps=ended[0])

    return tick


def audited(folder: Path, steps: int) -> Audit:
    """Download the bucket, and replay it."""
    store = open_store(URL)
    for key in store.list(""):
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(store.get(key) or b"")
    return check_run(folder, steps)


def wait_for(happens: Callable[[], object], otherwise: Callable[[], object]) -> None:
    until = time.monotonic() + WAIT_S
    while not happens():
        assert time.monotonic() < until, otherwise()
        time.sleep(0.1)


def outputs(hub: HFServer) -> str:
    return "\n".join(f"{j.asked['labels']}: {text}" for j in hub.jobs.values() for _, text in j.lines[-15:])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_replicas_one_of_them_preempted_finish_the_run(tmp_path: Path, hub: HFServer, s3: S3Server) -> None:
    run = founded(tmp_path, s3)
    write_control(run.store, SystemClock(), steps=ENDLESS)
    executor = build_executor([Place("hf-jobs")])
    outcome = Supervisor(run, executor, SystemClock(), each_tick=preempt(hub, "r01", 1)).supervise()
    assert outcome.code == exitcodes.DONE, (outcome.text, outputs(hub))
    report = read_report(run.store)
    found = audited(tmp_path / "bucket", report.head)
    assert all(c.ok for c in checks(report)), checks(report)
    assert len(found.listed) >= 3 * report.head
    lives = {x.name: x for x in report.sessions}
    assert lives["r01-2"].commits, "the one that replaced it has worked"
    ends = {s.handle.slot: s.state for s in executor.poll(executor.find(URL))}
    assert {ends[s] for s in ("r00", "r01", "r02")} == {State.SUCCEEDED} and hub.live() == []
    told = json.dumps([{k: v for k, v in j.asked.items() if k != "secrets"} for j in hub.jobs.values()])
    assert "AKIDTEST" not in told and hub.token not in told and "AKIDTEST" not in outputs(hub)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_of_two_devices_is_one_replica_and_a_killed_rank_ends_it(
    tmp_path: Path, hub: HFServer, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Place, "devices", property(lambda place: 2))  # as --gpu a10g-largex2; no GPU is here
    run = founded(tmp_path, s3, n=2)
    write_control(run.store, SystemClock(), steps=ENDLESS)
    killed = list[int]()

    def kill_a_rank(supervisor: Supervisor, report: Report) -> None:
        beat = report.beats.get("r01")
        if beat is not None and beat.step >= 1 and not killed:
            killed.extend(children_of(beat.pid))
            os.kill(killed[0], signal.SIGKILL)
        if report.wanted.steps == ENDLESS and any(x.name == "r01-2" and x.joined for x in report.sessions):
            write_control(run.store, SystemClock(), steps=report.head + 2)

    outcome = Supervisor(run, build_executor([Place("hf-jobs")]), SystemClock(), each_tick=kill_a_rank).supervise()
    assert outcome.code == exitcodes.DONE, (outcome.text, outputs(hub))
    report = read_report(run.store)
    (lost,) = report.of_kind("lost")
    assert (lost["slot"], lost["exit_code"], len(killed)) == ("r01", -signal.SIGKILL, 1), lost
    assert any("rank 1 of 2 ended (killed by SIGKILL)" in line for line in lost["tail"]), lost
    audited(tmp_path / "bucket", report.head)
    assert hub.live() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_leaves_it_to_a_supervisor_that_is_a_job_too(tmp_path: Path, hub: HFServer, s3: S3Server) -> None:
    hub.plain = {"HF_ENDPOINT": hub.endpoint}  # a real job need not be told where the Hub is
    command = [sys.executable, str(ROOT / "examples" / "hf_jobs_grpo.py"), URL, "--yes", "--detach"]
    command += ["--config", str(config(tmp_path, 2, 2))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "r01: a job of tester on cpu-basic, 0.01 USD per hour" in done.stdout
    executor, store = HFJobsExecutor(), open_store(URL)
    (supervisor,) = executor.find(URL)
    assert done.stdout.splitlines()[-1] == f"supervised by the job {supervisor.native}"
    wait_for(lambda: read_report(store).done, lambda: outputs(hub))
    (result,) = executor.collect([supervisor], timeout=WAIT_S)
    assert result.state is State.SUCCEEDED, outputs(hub)
    audited(tmp_path / "bucket", 2)
    assert hub.live() == []


@pytest.mark.slow
def test_a_supervisor_at_its_time_limit_starts_the_next_one(
    tmp_path: Path, hub: HFServer, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    founded(tmp_path, s3)
    monkeypatch.setattr("executors.platforms.on_hf_jobs.executor.WATCH_S", 10.0)
    hub.plain = {"HF_ENDPOINT": hub.endpoint, "DILOCO_TEST": "yes"}
    executor = HFJobsExecutor(packages=("tests",))
    first = start_hosted(executor, URL)
    wait_for(lambda: hub.jobs[first.native].stage == "RUNNING", lambda: outputs(hub))
    hub.held = True  # new jobs stay in the queue
    (result,) = executor.collect([first], timeout=WAIT_S)
    assert result.exit_code == exitcodes.RESUME, outputs(hub)
    (second,) = [h for h in HFJobsExecutor().find(URL) if h.slot == "supervisor"]
    assert (second.attempt, hub.jobs[second.native].stage) == (2, "SCHEDULING")
    asked = hub.jobs[second.native].asked
    assert asked["secrets"].keys() == {"HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert json.loads(asked["command"][-3])["timeout_s"] == 12 * 3600.0


@pytest.mark.slow
def test_a_crash_loop_ends_with_its_last_lines_and_nobody_left(tmp_path: Path, hub: HFServer, s3: S3Server) -> None:
    run = founded(tmp_path, s3, n=1)
    run.store.put(layout.MODEL_MANIFEST, b"{}")  # nothing to publish
    executor, crash = HFJobsExecutor(packages=("tests",)), "tests.executors.test_supervisor:crash"
    limits = Limits(failures=2, backoff_s=0.01)
    outcome = Supervisor(run, executor, SystemClock(), entrypoint=crash, limits=limits).supervise()
    assert outcome.code == 1 and "failed 2 times in a row" in outcome.text, outcome.text
    assert "ImportError: no module named spoons" in outcome.text
    assert len(hub.jobs) == 2 and hub.live() == []


def test_stop_from_another_process_ends_every_job(tmp_path: Path, hub: HFServer, s3: S3Server, capsys) -> None:
    founded(tmp_path, s3)
    hub.grace_s = 1.0
    specs = [
        ReplicaSpec(
            URL, slot, 1, "tests.support.entrypoints:stubborn", kwargs={"folder": str(tmp_path), "who": f"{slot}.1"}
        )
        for slot in ("r00", "r01", "r02")
    ]
    handles = HFJobsExecutor(packages=("tests",)).launch_replicas(specs)  # by a laptop that is gone now
    wait_for(lambda: all(marks(tmp_path, "start", f"{h.slot}.1") for h in handles), lambda: outputs(hub))
    began = time.monotonic()
    assert cli.main(["stop", URL, "--grace", "0.2"]) == 0, capsys.readouterr()
    assert time.monotonic() - began < WAIT_S
    assert hub.live() == [] and {j.stage for j in hub.jobs.values()} == {"CANCELED"}


SUPERVISOR = """
import sys
from tests.executors.test_hf_jobs_run import idle
idle(sys.argv[1]).supervise()
"""


def idle(url: str, **more: Any) -> Supervisor:
    """A supervisor of replicas that only wait to be told to leave."""
    entry, executor = "tests.executors.test_local:polite", HFJobsExecutor(packages=("tests",))
    return Supervisor(read_run(url), executor, SystemClock(), entrypoint=entry, **more)


def leave_once_all_run(supervisor: Supervisor, report: Report) -> None:
    handles = [supervisor.handle(slot) for slot in report.wanted.slot_names]
    if all(handles) and all(s.state is State.RUNNING for s in supervisor.executor.poll([h for h in handles if h])):
        supervisor.leave()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", [1, 4, 6, 7, 8, 9, 10, 11, 14, 20])
def test_a_supervisor_killed_at_any_request_starts_nobody_twice_and_orphans_nobody(
    tmp_path: Path, hub: HFServer, s3: S3Server, moment: int
) -> None:
    founded(tmp_path, s3).store.put(layout.MODEL_MANIFEST, b"{}")  # nothing to publish
    first = subprocess.Popen([sys.executable, "-c", SUPERVISOR, URL], cwd=ROOT)
    wait_for(lambda: len(hub.requests) >= moment or first.poll() is not None, lambda: outputs(hub))
    first.kill()
    assert first.wait() == -signal.SIGKILL
    outcome = idle(URL, each_tick=leave_once_all_run).supervise()
    assert outcome.code == exitcodes.LEFT, outcome.text
    ran = [j.asked["labels"] for j in hub.jobs.values() if j.started is not None]
    assert sorted(x["slot"] for x in ran) == ["r00", "r01", "r02"], ran
    assert hub.live() == [] and all(j.stage != "SCHEDULING" for j in hub.jobs.values())


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("url", "more", "why"),
    [
        ("runs/demo", [], "replicas on hf-jobs cannot reach it"),
        (URL, ["--hardware", "h9000"], "no hardware is called h9000; there are"),
        (URL, ["--hardware", "a10g-small", "--max-usd", "0.01"], "starting this would pass max_usd = 0.01"),
    ],
)
def test_the_example_says_what_is_wrong_before_anything_is_rented(
    tmp_path: Path, hub: HFServer, s3: S3Server, url: str, more: list[str], why: str
) -> None:
    command = [sys.executable, str(ROOT / "examples" / "hf_jobs_grpo.py"), url, "--yes", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=ROOT)
    assert done.returncode != 0 and why in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert hub.jobs == {} and s3.keys("bucket", "") == []
