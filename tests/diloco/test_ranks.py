"""Replicas of several ranks: the number of ranks, and how they hold the model, change no bit of a run."""

import faulthandler
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from diloco.audit.inner import recompute_offers
from diloco.audit.offline_eval import OfflineScorer
from diloco.outer.make import make_diloco
from diloco.outer.managers.manager import StoreManager
from diloco.outer.ranks.group import SHOW, join_ranks, place_words, refuse_missing_gpu, write_at_request
from diloco.outer.ranks.led import refuse_apart, refuse_unequal
from diloco.process import exitcodes
from diloco.process import ranks as module
from diloco.process.disk import remove_left_behind
from diloco.process.ranks import Followers, tell_leader, told_twice
from diloco.process.watchdog import where_it_stood
from diloco.replica import main, replica
from diloco.replica.ranks import _has_no_round_left
from diloco.run.config import ConfigError, OuterError
from diloco.runlog.reader import read_report
from rendezvous.agreement.rules import Timing
from rendezvous.stores.open import open_store
from tests.support.fleet import WAIT_S, context
from tests.support.ranks import run_fleet, start, wait, words

slow = pytest.mark.slow


# -------------------------------------------------------------------- (a), (b): equal bits


@pytest.mark.parametrize(
    ("kind", "outer"),
    [
        ("", {"codec": "fp32"}),
        ("sharded", {"codec": "int8", "fragments": 2}),
        pytest.param("", {"codec": "int8", "outer_lr": "auto"}, marks=slow),
        pytest.param("sharded", {"codec": "fp32", "fragments": 2, "outer_lr": 1.0, "outer_momentum": 0.0}, marks=slow),
        pytest.param("sharded", {"codec": "topk"}, marks=slow),
        pytest.param("sharded bfloat16", {"codec": "int4", "fragments": 2}, marks=slow),
        pytest.param("sharded", {"fragment_update_alpha": 0.5, "fragment_sync_delay": 1}, marks=slow),
        pytest.param("bfloat16", {"fragment_update_alpha": 0.25, "fragment_sync_delay": 1, "fragments": 2}, marks=slow),
    ],
    ids=str,
)
def test_two_slots_of_two_ranks_are_two_slots_of_one(kind: str, outer: Mapping[str, Any], tmp_path: Path) -> None:
    settings = {"kind": kind, "sync_every": 6, **outer}
    one = run_fleet(tmp_path / "one", {"r00": 1, "r01": 1}, **settings)
    two = run_fleet(tmp_path / "two", {"r00": 2, "r01": 2}, **settings)
    assert one == two and one["r00"] == one["r01"] and len(set(one["r00"])) == 3
    offers = [offered(tmp_path / name) for name in ("one", "two")]
    assert offers[0] == offers[1] and len(offers[0]) == 3, "the bytes in the bucket are the same"


def offered(folder: Path) -> list[list[str]]:
    """The digests of the pseudogradients that each commit counts."""
    records = [json.loads(path.read_bytes()) for path in sorted((folder / "run/steps").glob("*/commit.json"))]
    return [sorted(offer["digest"] for offer in record["offers"]) for record in records]


@pytest.mark.parametrize("kind", ["sharded", pytest.param("sharded bfloat16", marks=slow)])
def test_slots_of_one_two_and_three_ranks_hold_the_same_bits(kind: str, tmp_path: Path) -> None:
    found = run_fleet(tmp_path / "mixed", {"r00": 1, "r01": 2, "r02": 3}, kind=kind, sync_every=4)
    assert found["r00"] == found["r01"] == found["r02"] and len(set(found["r00"])) == 3


def test_a_slot_of_two_ranks_that_missed_steps_offers_late_and_catches_up(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    commit = folder / "steps/0000000002/commit.json"
    settings: dict[str, Any] = {"replicas": 2, "min_replicas": 1, "steps": 5, "sync_every": 4, "kind": "sharded"}
    ahead = start(tmp_path, "r00", 1, **settings)
    late = start(tmp_path, "r01", 2, faults=f"wait 6 {commit}", **settings)
    assert wait(ahead) == wait(late) == 0, words(tmp_path)
    ends = [json.loads((tmp_path / f"{slot}.json").read_text())[-1] for slot in ("r00", "r01")]
    report = read_report(open_store(f"file://{folder}"))
    assert ends[0] == ends[1] and report.head == 5 and [e["missed"] for e in report.of_kind("caught_up")]


# -------------------------------------------------------------------- (c), (d): a rank dies


POINTS = [(rank, "agree", n) for rank in (0, 1) for n in (1, 3, 6, 7, 8, 9, 10)]  # round 0: 3 … 6, then its sync
POINTS += [(1, "gather", 2), (2, "spread", 40), (0, "spread", 40), (2, "agree", 12)]
FIRST = ((1, "agree", 8), (0, "spread", 40))


@pytest.mark.parametrize(
    ("rank", "call", "n"), [pytest.param(*p, marks=() if p in FIRST else slow) for p in POINTS], ids=str
)
def test_a_killed_rank_ends_its_slot_which_comes_back_with_another_number_of_ranks(
    rank: int, call: str, n: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"replicas": 2, "min_replicas": 2, "steps": 3, "sync_every": 4, "kind": "sharded"}
    other = start(tmp_path, "r01", 1, **settings)
    ranks = max(2, rank + 1)
    assert wait(start(tmp_path, "r00", ranks, faults=f"die {rank} {call} {n}", **settings)) == -signal.SIGKILL
    if rank:
        assert f"rank {rank} of {ranks} ended (killed by SIGKILL)" in words(tmp_path)[0]
    again = start(tmp_path, "r00", 5 - ranks, **settings)
    assert wait(again) == wait(other) == 0, words(tmp_path)
    report = read_report(open_store(f"file://{tmp_path}/run"))
    assert report.head == 3 and report.done
    ends = [json.loads((tmp_path / f"{slot}.json").read_text())[-1] for slot in ("r00", "r01")]
    assert ends[0] == ends[1], "no outer step is lost, and both have its θ"


def test_a_rank_that_raises_ends_its_slot_with_its_words(tmp_path: Path) -> None:
    assert wait(start(tmp_path, "r00", 2, faults="raise 1 2", replicas=1, steps=2, sync_every=4)) == 1
    assert "rank 1 of 2 ended (exit code 1): ValueError: no more; the replica ends with it" in words(tmp_path)[0]


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def lead_one_rank(folder: str) -> int:
    told = list[Any]()
    followers = Followers(2, partial(end_a_program, folder))
    followers.on_told = lambda *message: told.append(message)
    Path(folder, "listens").touch()
    while len(told) < 2:
        time.sleep(0.01)
    followers.end()
    Path(folder, "told.json").write_text(json.dumps(told))
    return 0


def tell_and_end(folder: str) -> int:
    _wait_for(Path(folder, "listens"))
    for number in range(20):
        tell_leader("event", number)
    return 0


def lead_one_that_tells_and_ends(folder: str) -> int:
    told = list[Any]()
    followers = Followers(2, partial(tell_and_end, folder))
    followers.on_told = lambda *message: (told.append(message), followers._ranks[0][0].join())
    Path(folder, "listens").touch()
    while len(told) < 20:
        time.sleep(0.01)
    followers.end()
    return 0


def test_all_messages_of_a_rank_that_has_ended_are_heard(tmp_path: Path) -> None:
    child = context().Process(target=lead_one_that_tells_and_ends, args=(str(tmp_path),))
    child.start()
    assert wait(child) == 0


def test_an_endless_loop_of_two_ranks_ends_with_the_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"replicas": 1, "min_replicas": 1, "steps": 2, "sync_every": 4, "kind": "sharded"}
    assert wait(start(tmp_path, "r00", 2, faults="endless", **settings)) == 0, words(tmp_path)
    report = read_report(open_store(f"file://{tmp_path}/run"))
    assert report.head == 2 and report.done and [one.end for one in report.sessions] == ["done"]


def lead_one_that_ends_well(folder: str, is_over: bool, raises: bool) -> int:
    module.EARLY_S = WAIT_S if raises else 0.5
    out = os.open(f"{folder}/r00.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 2)
    followers = Followers(2, int)  # which ends at once, with 0
    followers.is_over = lambda: is_over
    if raises:
        followers._ranks[0][0].join()
        followers.settle()  # rank 0 has lost contact to it
    else:
        time.sleep(5.0 if is_over else WAIT_S)
    followers.end()
    return 0


@pytest.mark.parametrize("raises", [False, True], ids=["rank 0 goes on", "rank 0 raises"])
@pytest.mark.parametrize("is_over", [False, True])
def test_a_rank_that_ends_well_before_the_run_is_done_ends_its_slot(
    is_over: bool, raises: bool, tmp_path: Path
) -> None:
    """Rank 0 waited for it for half an hour and longer; once rank 0 has left the run, it needs no other rank.

    If rank 0 raised first, its words were Gloo's "Connection reset by peer"."""
    child = context().Process(target=lead_one_that_ends_well, args=(str(tmp_path), is_over, raises))
    child.start()
    assert wait(child) == (0 if is_over else exitcodes.CRASHED)
    told = "rank 1 of 2 ended (exit code 0, before the run was done); the replica ends with it"
    assert (told in words(tmp_path)[0]) != is_over


def close_output(raises: bool) -> int:
    sys.stdout.close()
    sys.stderr.close()
    if raises:
        raise KeyError("no more")
    return 0


def lead_one_without_output(folder: str, raises: bool) -> int:
    out = os.open(f"{folder}/r00.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 2)
    followers = Followers(2, partial(close_output, raises))
    followers._ranks[0][0].join()
    followers.settle()
    followers.end()
    return 0


def wait_late(pid: int, flags: int, real: Callable[[int, int], tuple[int, int]] = os.waitpid) -> tuple[int, int]:
    """Wait for a child such that the main thread gets its exit code, and others wait in vain while it stores it."""
    is_main = threading.current_thread() is threading.main_thread()
    time.sleep(0.0 if is_main else 0.1)
    told = real(pid, flags)
    time.sleep(0.3 if is_main else 0.0)
    return told


def lead_one_whose_exit_code_another_thread_takes(folder: str) -> int:
    os.waitpid = wait_late
    return lead_one_without_output(folder, raises=True)


def test_a_rank_whose_exit_code_another_thread_learns_first_ends_its_replica(tmp_path: Path) -> None:
    """Each Process.start() asks for the exit codes of all children; so the watching thread took it for running."""
    child = context().Process(target=lead_one_whose_exit_code_another_thread_takes, args=(str(tmp_path),))
    child.start()
    assert wait(child) == exitcodes.CRASHED


@pytest.mark.parametrize(("raises", "code"), [(False, 0), (True, exitcodes.CRASHED)])
def test_a_rank_that_cannot_write_its_log_ends_as_it_did(raises: bool, code: int, tmp_path: Path) -> None:
    """The flush at its end failed, so a rank that was done counted as crashed, and one that raised left no words."""
    child = context().Process(target=lead_one_without_output, args=(str(tmp_path), raises))
    child.start()
    assert wait(child) == code
    assert ("rank 1 of 2 ended (exit code 1): KeyError: 'no more'" in words(tmp_path)[0]) is raises


def call_exit(exited: object) -> int:
    sys.exit(exited)  # type: ignore[arg-type]


def lead_one_that_exits(folder: str, exited: object) -> int:
    os.dup2(os.open(f"{folder}/r00.log", os.O_WRONLY | os.O_CREAT), 2)
    followers = Followers(2, partial(call_exit, exited))
    followers._ranks[0][0].join()
    followers.settle()
    followers.end()
    return 0


@pytest.mark.parametrize(("exited", "code"), [(2, exitcodes.CRASHED), ("bad", exitcodes.CRASHED), (0, 0), (None, 0)])
def test_an_exit_of_a_rank_s_code_is_no_exit_code_of_the_replica(exited: object, code: int, tmp_path: Path) -> None:
    """Before: sys.exit(2) in an environment of rank 1 ended the whole run as a mistake in its config."""
    child = context().Process(target=lead_one_that_exits, args=(str(tmp_path), exited))
    child.start()
    assert wait(child) == code
    assert (f"rank 1 of 2 ended (exit code 1): SystemExit: {exited}" in words(tmp_path)[0]) is bool(code)


def lead_one_that_is_stopped(folder: str, signals: list[int]) -> int:
    module.SETTLE_S, module.STOPPED_LOOKS = 0.05, 3
    out = os.open(f"{folder}/r00.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 2)
    followers = Followers(2, partial(_busy, 60.0))
    for number in signals:
        os.kill(followers._ranks[0][0].pid, number)
    time.sleep(1.0 if len(signals) != 1 else WAIT_S)
    followers.end(patience_s=0.0)
    return 0


def _busy(seconds: float) -> int:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(10**6))  # as a long step that answers nothing
    return 0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells whether a process is stopped")
@pytest.mark.parametrize(
    "signals", [[], [signal.SIGSTOP, signal.SIGCONT], [signal.SIGSTOP]], ids=["busy", "continued", "stopped"]
)
def test_a_stopped_rank_ends_its_slot_and_a_busy_one_does_not(signals: list[int], tmp_path: Path) -> None:
    child = context().Process(target=lead_one_that_is_stopped, args=(str(tmp_path), signals))
    child.start()
    assert wait(child) == (exitcodes.HUNG if len(signals) == 1 else 0)
    assert ("rank 1 of 2 is stopped (SIGSTOP); the replica ends with it" in words(tmp_path)[0]) is (len(signals) == 1)


def lead_and_end_all_at_once(folder: str) -> int:
    tempfile.tempdir = folder
    os.setpgid(0, 0)
    Followers(2, partial(_busy, 60.0))
    os.killpg(0, signal.SIGKILL)
    return 0


def test_the_folder_of_ranks_that_were_killed_at_once_goes_with_the_next_session(tmp_path: Path) -> None:
    """Before, it stayed for ever: a supervisor ends a silent replica by killing its process group."""
    child = context().Process(target=lead_and_end_all_at_once, args=(str(tmp_path),))
    child.start()
    assert wait(child) == -signal.SIGKILL
    while list(tmp_path.glob("r*-*")):  # rank 1 may end a moment later
        remove_left_behind(tmp_path)


def end_a_program(folder: str) -> int:
    _wait_for(Path(folder, "listens"))
    os.kill(os.getpid(), signal.SIGTERM)  # a platform signals all processes; rank 0 leaves for all of them
    program = subprocess.Popen(["sleep", "60"])
    program.terminate()
    tell_leader("ended", program.wait(30))
    fork = multiprocessing.get_context("fork")
    runs = fork.Event()
    child = fork.Process(target=lambda: (runs.set(), time.sleep(60)))
    child.start()
    assert runs.wait(30)
    child.terminate()
    child.join(30)
    tell_leader("ended", child.exitcode)
    return 0


@pytest.mark.parametrize("steps", [0, 5])
def test_a_rank_that_ends_well_is_not_missed_after_the_loop_has_left_the_run(steps: int, tmp_path: Path) -> None:
    """Before, in a run without an end, or with a loop shorter than it: rank 0 was ended while it saved its model."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wishes = {"steps": steps} if steps else {}
    timing = Timing(beat=0.1, poll=0.01, give_up=100.0)
    manager = StoreManager(f"file://{tmp_path}/run", "r00", replicas=1, timing=timing, **wishes)
    with make_diloco(model, optimizer, manager, sync_every=2):
        for _ in range(4):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        session: Any = manager.session
        assert not _has_no_round_left(session)
    assert _has_no_round_left(session) and not session.rv.is_done


def test_a_rank_ignores_sigterm_and_its_programs_do_not(tmp_path: Path) -> None:
    child = context().Process(target=lead_one_rank, args=(str(tmp_path),))
    child.start()
    assert wait(child) == 0
    assert json.loads((tmp_path / "told.json").read_text()) == [[1, "ended", -15]] * 2


# -------------------------------------------------------------------- ranks that cannot be a replica


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ("differ", "rank 1 of this replica differs from rank 0 in the outer settings: sync_every is 4 on rank 0, 8"),
        ("apart", "the ranks of this replica do not train together: at the first sync, rank 1 has other weights than"),
        ("unled", "2 processes train this model, and each has a StoreManager of its own, so all would claim one slot"),
        ("unled and met", "2 processes train this model, and each has a StoreManager of its own"),
        ("absent", "rank 1 of 2 has not joined the run, and rank 0 has waited for 0 s. Give DiLoCoCallback to every"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(faults: str, told: str, tmp_path: Path) -> None:
    assert wait(start(tmp_path, "r00", 2, faults=faults, replicas=1, steps=2, sync_every=4)) == 1
    assert told in words(tmp_path)[0]


@pytest.mark.parametrize("apart", [0.0, 1e-6])
def test_ranks_that_differ_by_rounding_or_have_not_moved_train_together(apart: float) -> None:
    refuse_apart([[1e-3, -2e-3], [1e-3, -2e-3 * (1 + apart)]])
    refuse_apart([[0.0, 0.0], [0.0, 0.0]])
    refuse_apart([[], []])


def test_another_model_on_a_rank_is_told() -> None:
    ours, theirs = {"the model": [["a", [2]], ["b", [3]]]}, {"the model": [["a", [2]]]}
    with pytest.raises(OuterError, match=r"rank 1 .* in the model: parameter 1 is \[\['b', \[3\]\]\] on rank 0, \[\]"):
        refuse_unequal([ours, theirs])


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two' is not a number of processes"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE = 4, but RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "h"}, "MASTER_PORT is not set"),
    ],
)
def test_a_launcher_that_is_none_is_refused(environ: dict[str, str], told: str) -> None:
    with pytest.raises(OuterError, match=told):
        join_ranks(environ)


def test_a_rank_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    refuse_missing_gpu(1)
    with pytest.raises(OuterError, match=r"rank 2 has no GPU: this machine shows 2, and each rank .* uses one"):
        refuse_missing_gpu(2)


LEFT = {
    "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMI_RANK": "1",
    "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500",
}  # fmt: skip


def in_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "run_member", lambda url, slot, act, **_: 7)
    assert main(["runs/none"]) == 7


def in_a_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = SimpleNamespace(fragments=1)
    assert recompute_offers(Mock(config=SimpleNamespace(script="train.py", outer=outer))).unchecked


def in_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no rewards to evaluate"):
        OfflineScorer.open(Mock(**{"config.inner.loop": "supervised"}), Mock(), Path())


@pytest.mark.parametrize("act", [in_a_replica, in_a_verification, in_an_evaluation])
def test_one_process_does_not_read_what_a_launcher_left(
    act: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun --nproc-per-node 1, a PyTorchJob's pod, mpirun and srun.   Before: a script's replica read them, too."""
    for name, value in LEFT.items():
        monkeypatch.setenv(name, value)
    act(monkeypatch)
    assert not LEFT.keys() & os.environ.keys()


def test_an_address_without_a_launcher_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LEFT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    module.forget_launcher()
    assert os.environ["MASTER_PORT"] == "29500"


def test_a_replica_that_a_launcher_started_several_times_is_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told_twice(2, {}) == told_twice(2, {"WORLD_SIZE": ""}) == ""
    assert told_twice(2, {"WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"}).startswith(
        "torchrun has started this replica"
    )
    monkeypatch.setenv("WORLD_SIZE", "8")
    for devices in ("1", "2"):
        assert main(["runs/none", "--devices", devices]) == exitcodes.USER_ERROR
        assert "a launcher that sets WORLD_SIZE has started this replica as one of 8" in capfd.readouterr().err


def test_a_replica_of_no_process_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    """Before: --devices 0 ran as 1."""
    with pytest.raises(SystemExit, match="2"):
        main(["runs/none", "--devices", "0"])
    assert "--devices 0: a replica has at least one process. Use 1 or more" in capfd.readouterr().err


def test_a_rank_tells_where_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(module.MEET, str(tmp_path / "meet"))
    over = threading.Event()
    for _ in range(120):  # as many as agents or tools may have: more than faulthandler shows
        threading.Thread(target=over.wait, daemon=True).start()
    write_at_request()
    try:
        os.kill(os.getpid(), SHOW)
    finally:
        faulthandler.unregister(SHOW)
        over.set()
    place = where_it_stood((tmp_path / "rank 1.calls").read_text())
    assert re.search(r" > test_ranks.py:\d+ test_a_rank_tells_where_it_stands$", place) and place.count(" > ") == 3


def test_places_of_ranks_that_wait_come_last() -> None:
    waits = "distributed_c10d.py:4287 all_gather"
    places = {"rank 0": waits, "rank 1": "world.py:7 step", "rank 2": waits, "rank 3": "world.py:7 step", "rank 4": "?"}
    assert place_words(places) == f"rank 4: ?; rank 1, rank 3: world.py:7 step; rank 0, rank 2: {waits}"
    assert where_it_stood("") == "nowhere"


def test_a_rank_on_a_full_disk_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(module.MEET, str(tmp_path / "gone" / "meet"))
    write_at_request()
