"""HFJobsExecutor through the real huggingface_hub, against support/hf_server.py; the contract has its own test."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from diloco.process import exitcodes
from executors.platforms.base import REPLICA, ExecutorError, Handle, ReplicaSpec, State, Unavailable
from executors.platforms.container import end_lines
from executors.platforms.on_hf_jobs import client
from executors.platforms.on_hf_jobs.client import HubJob, run_label
from executors.platforms.on_hf_jobs.executor import END_LINES, HFJobsExecutor
from executors.platforms.on_hf_jobs.executor import ended as how_it_ended
from executors.platforms.on_hf_jobs.job_spec import START_S
from executors.platforms.packages import wheel
from executors.platforms.packages.wheel import pack_code
from executors.supervision.hosted import start_hosted
from rendezvous.clock import SystemClock
from rendezvous.stores.memory import MemoryStore
from tests.support.hf_http import NAMESPACE
from tests.support.hf_server import HFServer
from tests.support.s3_server import S3Server

RUN, WAIT_S = "s3://bucket/runs/one", 120.0
JOBS, JOB = f"^/api/jobs/{NAMESPACE}$", r"^/api/jobs/[^/]+/[0-9a-f]+$"
FOREVER = 1 << 30


class QuickClock(SystemClock):
    """Does not wait for long."""

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.02))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HFServer]:
    with HFServer(grace_s=2.0) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_TOKEN", server.token)
        yield server


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """In place of the run's bucket, which this process reads."""
    store = MemoryStore()
    monkeypatch.setattr("executors.supervision.hosted.open_signed", lambda url: store)
    return store


@pytest.fixture
def executor(hub: HFServer) -> HFJobsExecutor:
    return made()


def made(**options: Any) -> HFJobsExecutor:
    return HFJobsExecutor(**{"packages": ("tests",), "clock": QuickClock(), **options})


def spec(function: str = "polite", slot: str = "r00", attempt: int = 1, **more: Any) -> ReplicaSpec:
    kwargs = {"folder": "/tmp", "who": f"{slot}.{attempt}", **more.pop("kwargs", {})}
    return ReplicaSpec(RUN, slot, attempt, f"tests.support.entrypoints:{function}", kwargs=kwargs, **more)


def waiting(folder: Path, *slots: str) -> list[ReplicaSpec]:
    return [spec("polite", slot, kwargs={"folder": str(folder)}) for slot in slots]


def only(outcome: list[Any]) -> Any:
    (one,) = outcome
    return one


def wait_for(happens: Callable[[], object]) -> None:
    until = time.monotonic() + WAIT_S
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.02)


def started(hub: HFServer, handle: Handle, word: str = "here I am") -> None:
    wait_for(lambda: any(word in text for _, text in hub.jobs[handle.native].lines))


def state_of(executor: HFJobsExecutor, handle: Handle) -> State:
    return only(executor.poll([handle])).state


def ended(executor: HFJobsExecutor, handle: Handle) -> Any:
    return only(executor.collect([handle], timeout=WAIT_S))


# -------------------------------------------------------------------- what is asked for


def test_a_job_is_asked_for_once_with_its_labels_its_limit_and_its_secrets_apart(hub, monkeypatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    executor = made(secrets=("HF_TOKEN", "AWS_SECRET_ACCESS_KEY"), env={"REGION": "eu"}, timeout_s=7200)
    hub.held = True
    handle = only(executor.launch_replicas([spec(gpu=("no-such", "t4-small", "a10g-small"))]))
    asked = hub.jobs[handle.native].asked
    assert asked["labels"].items() >= {"run": run_label(RUN), "slot": "r00", "attempt": "1"}.items()
    assert (asked["attempts"], asked["timeoutSeconds"], asked["flavor"]) == (1, 7200 + START_S, "t4-small")
    assert asked["environment"] == {"REGION": "eu"}
    assert asked["secrets"] == {"HF_TOKEN": hub.token, "AWS_SECRET_ACCESS_KEY": "very-secret"}
    elsewhere = json.dumps({k: v for k, v in asked.items() if k != "secrets"}) + json.dumps(handle.to_dict())
    assert "very-secret" not in elsewhere and hub.token not in elsewhere
    assert only(asked["volumes"])["readOnly"] is True and asked["dockerImage"].startswith(
        "ghcr.io/astral-sh/uv:python3."
    )
    told = json.loads(asked["command"][-2])
    assert told["timeout_s"] == 7200 and asked["command"][-1] == "hf-jobs"
    assert handle.usd_per_hour == pytest.approx(0.4002) and handle.launched_at == pytest.approx(time.time(), abs=60)


def test_the_code_of_this_tree_is_shipped_once(hub, executor, monkeypatch) -> None:
    monkeypatch.setattr(
        "executors.platforms.on_hf_jobs.job_spec.pack_code", cache(pack_code)
    )  # this tree may be edited meanwhile
    handles = executor.launch_replicas([spec("where", f"r{i:02d}") for i in range(3)])
    sites = {json.dumps(r.value["from"]) for r in executor.collect(handles, timeout=WAIT_S)}
    assert all(str(hub.root / "sites") in path for path in json.loads(only(list(sites))).values())
    assert hub.count("POST", "/batch$") == 1
    other = made()
    assert ended(other, only(other.launch_replicas([spec("where", "r04")]))).ok
    assert hub.count("POST", "/batch$") == 1, "what is in the bucket is not sent again"


def test_equal_files_give_equal_bytes() -> None:
    """So a wheel that is in the bucket is not sent again."""
    build = wheel._build_wheel.__wrapped__  # pyright: ignore  # tests/conftest.py keeps its answers
    first, second = (build(wheel._own_distribution(), ("inner.tasks", "diloco.actor")) for _ in range(2))
    assert first == second


def test_a_job_gets_the_packages_that_pip_names(hub) -> None:
    hub.held = True
    handle = only(made(pip=["judge<2", "numpy"]).launch_replicas([spec()]))
    command = hub.jobs[handle.native].asked["command"]
    named = [word for before, word in pairwise(command[: command.index("python")]) if before == "--with"]
    assert named == ["judge<2", "numpy"] and "--with-requirements" in command


def test_a_requirement_can_stand_for_the_code_and_an_image_that_lacks_it_tells_its_last_lines(hub) -> None:
    executor = made(code="serverless-diloco==99")
    result = ended(executor, only(executor.launch_replicas([spec()])))
    assert hub.buckets == {} and result.state is State.FAILED
    assert "ended before the replica started" in result.reason
    assert "serverless-diloco==99 was not found in the package registry" in result.reason


def test_an_image_that_has_it_all_downloads_no_package(hub) -> None:
    """Before: each launch and each replacement got torch anew, at the GPU's price."""
    hub.held = True
    executor = made(code="image", image="ghcr.io/me/diloco:1", hardware="a10g-small")
    asked = hub.jobs[only(executor.launch_replicas([spec()])).native].asked
    assert asked["command"][:3] == ["python", "-m", "executors.platforms.container"] and hub.buckets == {}
    assert asked["dockerImage"] == "ghcr.io/me/diloco:1" and not asked.get("volumes")
    text = "\n".join(executor.plan([spec()]).lines)
    assert "code: what ghcr.io/me/diloco:1 has installed" in text and "downloads" not in text


def test_the_plan_tells_prices_limits_and_names_of_secrets_and_starts_nothing(hub) -> None:
    executor = made(hardware="a10g-small", timeout_s=3600)
    plan = executor.plan([spec(), spec(slot="r01", gpu=("t4-small",))])
    text = "\n".join(plan.lines)
    assert "r00: a job of tester on a10g-small, 1.00 USD per hour, at most 1:15:00 h" in text
    assert "r01: a job of tester on t4-small, 0.40 USD per hour" in text
    assert "4 GB: minutes, say 3, about $0.05 on a10g-small)" in text and "about $0.02 on t4-small)" in text
    assert "secrets from this environment: HF_TOKEN" in text and hub.token not in text
    assert plan.usd_per_hour == pytest.approx(1.0002 + 0.4002) and hub.jobs == {} and hub.buckets == {}


def test_an_unknown_unit_of_price_is_a_price_that_nobody_knows(hub, executor, monkeypatch) -> None:
    monkeypatch.setattr("executors.platforms.on_hf_jobs.client.PER_HOUR", {})
    plan = executor.plan([spec()])
    assert plan.usd_per_hour is None and "its price is unknown" in plan.lines[0]


# -------------------------------------------------------------------- bad input


def test_without_credentials_it_says_how_to_get_them(hub, executor, monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(ExecutorError, match=r"no credentials for Hugging Face.*hf auth login"):
        executor.launch_replicas([spec()])
    assert hub.requests == []


def test_a_token_that_is_refused_is_told_with_what_to_do(hub, executor, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ExecutorError, match=r"Invalid credentials.*hf auth login") as told:
        executor.launch_replicas([spec()])
    assert "hf_wrong" not in str(told.value)


def test_unknown_hardware_lists_what_there_is(hub) -> None:
    executor = made(hardware="h9000")
    with pytest.raises(
        ExecutorError, match=r"no hardware is called h9000; there are .*cpu-basic 0\.01 · .*t4-small 0\.40"
    ):
        executor.launch_replicas([spec()])
    assert hub.jobs == {}


def test_a_time_out_above_the_platforms_limit_is_the_platforms_word(hub, executor) -> None:
    with pytest.raises(ExecutorError, match="would not start r00: timeoutSeconds must be at most"):
        executor.launch_replicas([spec(timeout_s=1e6)])
    assert hub.count("POST", JOBS) == 1, "what is refused is not tried again"


@pytest.mark.parametrize("run", ["runs/demo", "file:///runs/demo", "memory://demo"])
def test_a_run_on_this_machine_is_refused_before_anything_is_rented(hub, executor, run: str) -> None:
    with pytest.raises(ExecutorError, match=r"is on this machine, and Hugging Face Jobs cannot reach it.*s3://"):
        executor.launch_replicas([replace(spec(), run=run)])
    assert hub.jobs == {} and hub.buckets == {}


def test_a_secret_that_is_named_but_missing(hub, executor) -> None:
    with pytest.raises(ExecutorError, match=r"the secret WANDB_API_KEY is named but not set.*export WANDB_API_KEY="):
        executor.launch_replicas([spec(secrets=("WANDB_API_KEY",))])
    assert hub.jobs == {}


def test_without_the_sdk_it_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ExecutorError, match=r"pip install 'serverless-diloco\[serverless\]'"):
        HFJobsExecutor()


def test_no_plan_no_credits(hub, executor) -> None:
    hub.fault("402", method="POST", path=JOBS, times=FOREVER)
    with pytest.raises(ExecutorError, match=r"would not start r00.*add credits"):
        executor.launch_replicas([spec()])


@pytest.mark.slow
def test_a_store_that_fails_the_look_from_inside(hub, monkeypatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with S3Server(overwrites=True) as s3:
        env = {"AWS_ACCESS_KEY_ID": "A", "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": s3.endpoint}
        executor = made(env=env, secrets=("HF_TOKEN", "AWS_SECRET_ACCESS_KEY"))
        handle = only(executor.launch_replicas([ReplicaSpec(RUN, "r00", 1, REPLICA, (RUN, "--slot", "r00"))]))
        result = ended(executor, handle)
        assert s3.keys("bucket", "") == []
    assert (result.state, result.exit_code) == (State.FAILED, exitcodes.USER_ERROR)
    assert "r00: from inside hf-jobs: silently overwrites" in result.reason


# -------------------------------------------------------------------- each launch once


@pytest.mark.slow
def test_of_two_jobs_of_one_launch_the_newest_is_cancelled(hub, executor, tmp_path) -> None:
    """Two processes listed before either had started one."""
    first = only(executor.launch_replicas(waiting(tmp_path, "r00")))
    hub.fault("behind", method="GET", path=JOBS)
    second = only(made().launch_replicas(waiting(tmp_path, "r00")))
    assert second.native == first.native and len(hub.jobs) == 2
    wait_for(lambda: [j.stage for j in hub.jobs.values()][1] == "CANCELED")
    assert state_of(executor, first) in (State.PENDING, State.RUNNING)


def test_a_hub_that_fails_for_a_while_starts_one_job_each(hub, executor, tmp_path) -> None:
    for kind in ("503", "dropped", "lost"):
        hub.fault(kind, method="POST", path=JOBS)
    hub.fault("503", method="GET", path="^/api", times=3)
    handles = executor.launch_replicas(waiting(tmp_path, "r00", "r01", "r02"))
    assert len(hub.jobs) == 3 and {h.native for h in handles} == set(hub.jobs)


def test_a_launch_that_was_given_up_leaves_no_job_behind(hub, executor, tmp_path) -> None:
    """Every answer to it is lost, and no list can be read: later its job is seen, and cancelled."""
    other = only(executor.launch_replicas(waiting(tmp_path, "r00")))
    hub.fault("lost", method="POST", path=JOBS)
    hub.fault("503", method="POST", path=JOBS, times=FOREVER)
    listed = hub.count("GET", JOBS)
    doubt = ReplicaSpec.from_dict(
        {**spec("polite", "r01").to_dict(), "kwargs": {"folder": str(tmp_path), "who": "r01.1"}}
    )
    hub.blind_after = listed + 1
    with pytest.raises(Unavailable):
        executor.launch_replicas([doubt])
    assert len(hub.jobs) == 2
    hub.blind_after, hub.faults = 0, []
    executor.poll([other])
    wait_for(lambda: {j.asked["labels"]["slot"]: j.stage for j in hub.jobs.values()}["r01"] == "CANCELED")
    assert state_of(executor, other) in (State.PENDING, State.RUNNING)


LAUNCHER = """
import sys
from executors.platforms.on_hf_jobs.executor import HFJobsExecutor
from tests.executors.test_hf_jobs import waiting
from pathlib import Path
HFJobsExecutor(packages=("tests",)).launch_replicas(waiting(Path(sys.argv[1]), "r00", "r01", "r02"))
"""


@pytest.mark.slow
def test_a_launcher_killed_at_any_request_orphans_nobody_and_starts_nobody_twice(hub, executor, tmp_path) -> None:
    for moment in range(2, 12):
        hub.jobs.clear()
        hub.requests.clear()
        launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], stderr=subprocess.DEVNULL)
        wait_for(lambda moment=moment, p=launcher: len(hub.requests) >= moment or p.poll() is not None)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        again = made()
        handles = again.launch_replicas(waiting(tmp_path, "r00", "r01", "r02"))
        alive = [j for j in hub.jobs.values() if j.stage in ("SCHEDULING", "RUNNING")]
        assert {h.native for h in handles} == {j.id for j in alive} and len(alive) == 3, moment
        assert again.find(RUN) == handles
        again.cancel(handles)
        assert all(r.state is State.CANCELLED for r in again.collect(handles, timeout=WAIT_S))


# -------------------------------------------------------------------- time-outs


def test_a_time_out_that_was_silently_cut_short_is_read_back(hub, executor, tmp_path) -> None:
    hub.limit_s = 1800
    handle = only(executor.launch_replicas(waiting(tmp_path, "r00")))
    status = only(executor.poll([handle]))
    assert status.state is State.FAILED
    assert f"gave it a time-out of 1800 s and not the {6 * 3600 + START_S} s" in status.reason
    wait_for(lambda: all(j.stage == "CANCELED" for j in hub.jobs.values()))


@pytest.mark.slow
def test_a_time_out_that_the_hub_does_not_tell_is_noticed_at_the_end(hub, executor, tmp_path) -> None:
    hub.tells_limit, hub.limit_s = False, 2
    handle = only(executor.launch_replicas([spec("stubborn", kwargs={"folder": str(tmp_path)})]))
    result = ended(executor, handle)
    assert result.state is State.LOST
    assert "Job timeout: ended by Hugging Face after" in result.reason
    assert f"and not the {6 * 3600 + START_S} s that were asked for" in result.reason


@pytest.mark.slow
def test_a_replica_leaves_by_itself_before_its_limit(hub, executor, tmp_path) -> None:
    result = ended(executor, only(executor.launch_replicas([replace(waiting(tmp_path, "r00")[0], timeout_s=3.0)])))
    assert (result.state, result.exit_code) == (State.FAILED, exitcodes.RESUME)


# -------------------------------------------------------------------- ends


@pytest.mark.slow
def test_killed_preempted_and_out_of_memory(hub, executor, tmp_path) -> None:
    killed, preempted, stubborn = executor.launch_replicas(
        [*waiting(tmp_path, "r00", "r01"), spec("stubborn", "r02", kwargs={"folder": str(tmp_path)})]
    )
    for handle in (killed, preempted, stubborn):
        started(hub, handle)
    hub.kill(killed.native)
    hub.preempt(preempted.native)
    hub.preempt(stubborn.native)
    lost, left, late = executor.collect([killed, preempted, stubborn], timeout=WAIT_S)
    assert (lost.state, lost.exit_code) == (State.LOST, None) and "the job ended and left no report" in lost.reason
    assert (left.state, left.exit_code) == (State.FAILED, exitcodes.LEFT)
    assert late.state is State.LOST


@pytest.mark.slow
def test_a_value_that_is_longer_than_the_tail_of_a_log(hub, executor) -> None:
    length = 4000 * (END_LINES + 5) // len(r"\u00e9")
    wanted = ReplicaSpec(RUN, "r00", 1, "tests.executors.test_container:long_answer", kwargs={"length": length})
    assert ended(executor, only(executor.launch_replicas([wanted]))).value == "é" * length


@pytest.mark.slow
def test_a_deleted_job_is_lost(hub, executor, tmp_path) -> None:
    handle = only(executor.launch_replicas(waiting(tmp_path, "r00")))
    started(hub, handle)
    job = hub.jobs.pop(handle.native)
    assert state_of(executor, handle) is State.LOST
    hub.jobs[job.id] = job


@pytest.mark.parametrize(
    ("stage", "message", "lines", "state", "reason"),
    [
        ("ERROR", "OOM killed", ["diloco-started: r00.1"], State.FAILED, "OOM killed"),
        ("ERROR", "node lost", ["diloco-started: r00.1", "x"], State.LOST, "ended and left no report (node lost)"),
        ("ERROR", "", ["x"] * END_LINES, State.LOST, "the job ended and left no report (no message)"),
        (
            "ERROR",
            "bad image",
            ["pulling", "denied"],
            State.FAILED,
            "before the replica started: bad image\npulling\ndenied",
        ),
        ("ERROR", "exit 3", end_lines({"exit_code": 3, "reason": "fenced"}), State.FAILED, "fenced"),
        (
            "ERROR",
            "exit 137",
            end_lines({"exit_code": -9, "reason": "killed by SIGKILL"}),
            State.LOST,
            "killed by SIGKILL",
        ),
        ("CANCELED", "", end_lines({"exit_code": 0, "reason": "done"}), State.SUCCEEDED, "exit code 0 (done)"),
        ("CANCELED", "", [], State.CANCELLED, "cancelled"),
        (
            "ERROR",
            "Job timeout",
            end_lines({"exit_code": 4, "reason": "left"}),
            State.FAILED,
            "left; Job timeout: ended by",
        ),
        ("ERROR", "no log", [], State.LOST, "the job ended and left no report (no log)"),
    ],
)
def test_what_last_words_mean(stage: str, message: str, lines: list[str], state: State, reason: str) -> None:
    found = how_it_ended(Handle(RUN, "r00", 1, "hf-jobs", native="x"), HubJob("x", "r00", 1, stage, message), lines)
    assert found.state is state and reason in found.reason


# -------------------------------------------------------------------- watching


def test_many_are_launched_at_once_and_polled_in_one_batch(hub, tmp_path) -> None:
    """32 launches take as many round trips as one: what there is per job is in flight together."""
    hub.held, hub.page = True, 40

    def requests(act: Callable[[], object]) -> Counter[str]:
        before = len(hub.requests)
        act()
        return Counter(method for method, path in hub.requests[before:] if re.search(JOBS, path))

    alone, all_together = made(), made()
    one = requests(lambda: alone.launch_replicas(waiting(tmp_path, "r99")))
    started = hub.gather("POST", JOBS, 32)
    many = requests(lambda: all_together.launch_replicas(waiting(tmp_path, *(f"r{i:02d}" for i in range(32)))))
    assert one["POST"] == 1 and many == {**one, "POST": 32}
    assert started.most == 32, "one launch waited for the other"
    assert len(hub.jobs) == 33
    handles, hub.page = all_together.find(RUN), 10
    polled = requests(lambda: pending(all_together, handles))
    assert polled == {"GET": 4}, "four pages of ten"


@pytest.mark.slow
def test_a_poll_asks_for_live_jobs_however_many_have_ended(hub, tmp_path) -> None:
    """Before: it listed every job that the run ever had, in pages, until ten seconds were over and all was stale."""
    hub.held, hub.page = True, 5
    executor = made()
    *old, live = executor.launch_replicas(waiting(tmp_path, *(f"r{i:02d}" for i in range(31))))
    for handle in old:
        hub.jobs[handle.native].end("COMPLETED", None)
    before = len(hub.requests)
    assert state_of(executor, live) is State.PENDING
    assert sum(re.search(JOBS, path) is not None for _, path in hub.requests[before:]) == 1
    assert state_of(executor, old[0]) is State.SUCCEEDED, "it is looked up by its id"


def test_a_stage_that_the_hub_adds_is_alive_and_is_asked_for(hub, tmp_path) -> None:
    """Before: lists asked for two stages by name, so a job in a third one was nobody's, and was never ended."""
    hub.held = True
    executor = made()
    (handle,) = executor.launch_replicas(waiting(tmp_path, "r00"))
    hub.jobs[handle.native].stage = "PAUSED"
    assert state_of(executor, handle) is State.RUNNING, "it is looked up by its id"
    executor.poll([handle])
    assert [h.native for h in executor.orphans(RUN, [])] == [handle.native], "the next list has it"


def pending(executor: HFJobsExecutor, handles: list[Handle]) -> None:
    assert [s.state for s in executor.poll(handles)] == [State.PENDING] * 33


def test_a_hub_that_does_not_answer_makes_stale_statuses(hub, executor, tmp_path) -> None:
    handle = only(executor.launch_replicas(waiting(tmp_path, "r00")))
    wait_for(lambda: state_of(executor, handle) is State.RUNNING)
    hub.fault("503", path="^/api", times=2)
    for _ in range(2):
        status = only(executor.poll([handle]))
        assert (status.state, status.stale) == (State.RUNNING, True)
    assert not only(executor.poll([handle])).stale
    hub.fault("503", path=JOBS, times=1)
    assert only(made().poll([handle])).state is State.STARTING, "who has never seen it guesses"


def test_an_end_is_told_only_once_its_last_lines_could_be_read(hub, executor, tmp_path) -> None:
    handle = only(executor.launch_replicas([spec("exits", kwargs={"folder": str(tmp_path), "code": 5})]))
    hub.fault("503", path="/logs", times=2)
    wait_for(lambda: hub.jobs[handle.native].stage == "ERROR")
    for _ in range(2):
        status = only(executor.poll([handle]))
        assert not status.state.ended and status.stale
    status = only(executor.poll([handle]))
    assert (status.state, status.exit_code) == (State.FAILED, 5)


@pytest.mark.slow
def test_an_end_whose_log_is_gone_is_told_without_it(hub, executor, tmp_path) -> None:
    handle = only(executor.launch_replicas([spec("exits", kwargs={"folder": str(tmp_path), "code": 5})]))
    hub.fault("404", path="/logs", times=FOREVER)
    wait_for(lambda: hub.jobs[handle.native].stage == "ERROR")
    status = only(executor.poll([handle]))
    assert (status.state, status.stale) == (State.LOST, False) and "exit code: 5" in status.reason


@pytest.mark.slow
def test_a_cancellation_that_the_hub_did_not_hear_is_asked_again(hub, executor, tmp_path) -> None:
    handle = only(executor.launch_replicas(waiting(tmp_path, "r00")))
    started(hub, handle)
    hub.fault("503", path="/cancel$", times=2)
    executor.cancel([handle])
    assert hub.jobs[handle.native].why == ""
    assert ended(executor, handle).state is State.CANCELLED
    assert hub.count("POST", "/cancel$") == 3


def test_a_job_that_a_log_names_and_that_is_another_run_s_is_left_alone(hub, executor, tmp_path) -> None:
    theirs = only(executor.launch_replicas([replace(waiting(tmp_path, "r00")[0], run="s3://bucket/runs/two")]))
    ours = only(executor.launch_replicas(waiting(tmp_path, "r00")))
    forged = replace(theirs, run=RUN)
    fresh = made()
    fresh.cancel([forged])
    assert state_of(fresh, forged) in (State.PENDING, State.RUNNING) and not hub.count("POST", "/cancel$")
    assert fresh.poll([forged])[0].handle.native == ours.native, "the launch that it claims to be"
    fresh.cancel([ours])
    assert ended(fresh, ours).state is State.CANCELLED and hub.count("POST", "/cancel$") == 1


def test_a_cancellation_waits_until_the_hub_says_whose_the_job_is(hub, executor, tmp_path) -> None:
    handle = only(executor.launch_replicas(waiting(tmp_path, "r00")))
    fresh = made()
    hub.fault("503", method="GET", path=JOB)
    fresh.cancel([handle])
    assert not hub.count("POST", "/cancel$")
    assert ended(fresh, handle).state is State.CANCELLED


@pytest.mark.slow
def test_lines_come_once_however_the_stream_breaks(hub, executor, tmp_path) -> None:
    kwargs = {"folder": str(tmp_path), "lines": 40, "pause_at": 20}
    handle = only(executor.launch_replicas([spec("speaks", kwargs=kwargs)]))
    started(hub, handle, "line 19")
    hub.fault("stream", path="/logs$", after=5)
    hub.fault("503", path=JOB, times=1)  # as the client looks whether the job has ended
    hub.fault("503", path="/logs$", times=1)
    hub.fault("stream", path="/logs$", after=12)
    told = executor.follow(handle)
    first = [next(told) for _ in range(20)]
    (tmp_path / "go").touch()
    assert [*first, *told] == [f"line {i}" for i in range(40)]


# -------------------------------------------------------------------- the supervisor as a job


def test_one_supervisor_job_per_run(hub, executor, memory) -> None:
    hub.held = True
    first, again = start_hosted(executor, RUN), start_hosted(made(), RUN)
    assert first.native == again.native and len(hub.jobs) == 1
    job = hub.jobs[first.native]
    assert job.asked["flavor"] == "cpu-basic" and job.asked["labels"]["slot"] == "supervisor"
    *_, module, told, _, options = job.asked["command"]
    assert module == "executors.supervision.hosted" and json.loads(told)["argv"] == [RUN]
    assert HFJobsExecutor(**json.loads(options)) and hub.token not in options
    executor.cancel([first])
    assert start_hosted(executor, RUN).attempt == 2 and job.stage == "CANCELED"


def test_labels_keep_to_the_hubs_characters_and_tell_runs_apart() -> None:
    long = "s3://bücket/" + "a/b c" * 40
    labels = [run_label(u) for u in (long, long + "x", "s3://a/b", "gs://a/b", NAMESPACE)]
    assert len(set(labels)) == 5 and run_label("s3://a/b/") == run_label("s3://a/b")
    assert all(len(x) <= 60 and x.replace("-", "").isalnum() and x.isascii() for x in labels)
    assert labels[2].startswith("a-b-") and os.sep not in labels[2]


def test_a_silent_hub_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: `diloco setup hf` stood still without a word, because the SDK's client has no time limit."""
    monkeypatch.setenv("HF_TOKEN", "hf_test_token")
    monkeypatch.setattr(client, "ANSWER_S", 0.2)
    monkeypatch.setattr(huggingface_hub.utils.get_session(), "timeout", None)  # restored for the other tests
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(Exception, match="timed out") as late:
            client.Hub("", SystemClock()).api.whoami()
    assert client.is_transient(late.value)
