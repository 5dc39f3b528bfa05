"""DiLoCoCallback in a script that several processes run together."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from diloco.model.fetch import fetch_model
from diloco.outer.ranks.lead import lone_words
from diloco.process import exitcodes
from diloco.process.ranks import Followers
from diloco.replica import replica
from diloco.replica.ranks import _lead_session
from diloco.run.record import ModelRecord
from diloco.runlog.reader import read_report
from rendezvous import layout
from rendezvous.stores.open import open_store
from tests.support import rank_script
from tests.support.fleet import context
from tests.support.ranks import start_ranks, wait, words
from tests.support.tiny_models import tiny_model_folder

SETTINGS = {"max_steps": 8, "learning_rate": 1e-3, "train_sampling_strategy": "sequential"}


def weights(folder: Path, ranks: int, **settings: Any) -> torch.Tensor:
    folder.mkdir()
    outer = {"outer_lr": 0.7, "sync_every": 4}
    act = partial(rank_script.train, "sft", str(folder), {**SETTINGS, **settings}, outer)
    assert wait(start_ranks(ranks, folder / "r00.log", act)) == 0, words(folder)
    report = read_report(open_store(f"file://{folder}/run"))
    assert report.head == 2 and report.done and [x.end for x in report.sessions] == ["done"]
    return torch.load(folder / "weights.pt")


@pytest.mark.parametrize("more", [{}, pytest.param({"fsdp": True}, marks=pytest.mark.slow)], ids=["copies", "shards"])
def test_a_script_on_two_ranks_is_the_script_with_batches_of_twice_the_size(
    more: dict[str, Any], tmp_path: Path
) -> None:
    """8 inner steps, 2 outer steps; the ranks sum gradients in another order."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder("llama"))
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    one = weights(tmp_path / "one", 1, per_device_train_batch_size=4)
    two = weights(tmp_path / "two", 2, per_device_train_batch_size=2, **more)
    moved, apart = (one - start).norm(), (two - one).norm()
    assert moved > 0 and apart < 1e-3 * moved, (moved, apart)


@pytest.mark.parametrize("change", ["frozen", pytest.param("peft", marks=pytest.mark.slow)])
def test_a_launched_model_in_shards_that_is_not_all_trained_is_exported(change: str, tmp_path: Path) -> None:
    """Rank 0 alone knows that it has to publish the model, and cannot gather it alone."""
    act = partial(rank_script.train_launched, change, str(tmp_path))
    assert wait(start_ranks(2, tmp_path / "r00.log", act)) == 0, words(tmp_path)
    store = open_store(f"file://{tmp_path}/run")
    fetch_model(store, ModelRecord.decode(store.get(layout.MODEL_MANIFEST) or b""), tmp_path / "start")
    if change == "peft":
        shapes = {tuple(w.shape) for w in load_file(tmp_path / "start/adapter_model.safetensors").values()}
        assert shapes == {(4, 32), (32, 4)}
    else:
        found = load_file(tmp_path / "start/model.safetensors")
        whole = load_file(Path(tiny_model_folder("llama")) / "model.safetensors")
        assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)


BEGINS = {
    "with its own timeout": 'dist.init_process_group("gloo", timeout=timedelta(seconds=77))',
    "with a store of its own": """
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
dist.init_process_group("gloo", timeout=timedelta(seconds=77), store=store, rank=int(os.environ["RANK"]), world_size=2)
""",
    "in a trainer": """
from transformers import TrainingArguments
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with use_cpu, transformers itself drops the timeout
TrainingArguments("out", ddp_timeout=77, report_to=[]).device
""",
    "never": "",
}
MEETS = """
import os
from datetime import timedelta
import torch
import torch.distributed as dist
assert not dist.is_initialized() and os.environ["DILOCO_RUN"] == "of the run"
{begins}
if dist.is_initialized():
    own = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert own.options._timeout == timedelta(seconds=77), own.options._timeout
from diloco.outer.ranks.group import Group
assert Group().tell(dist.get_rank() + 7) == 7
dist.all_reduce(total := torch.ones(1))
open("found" + os.environ["RANK"], "w").write(str(total.item()))
"""


@pytest.mark.parametrize("begins", BEGINS)
def test_a_launched_script_makes_its_own_group_as_under_torchrun(begins: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MEETS.format(begins=BEGINS[begins]))
    act = partial(rank_script.run_launched, str(tmp_path))
    assert wait(start_ranks(2, tmp_path / "r00.log", act)) == 0, words(tmp_path)
    assert [(tmp_path / f"found{rank}").read_text() for rank in range(2)] == ["2.0", "2.0"]


LEAVES = """
import os, time
if os.environ["RANK"] == "1":
    raise SystemExit(4)
time.sleep(3)
open("found", "w").write("clean")
"""


@pytest.mark.slow
def test_rank_0_has_time_to_leave_after_another_rank_has_left(tmp_path: Path) -> None:
    """It was cut off after two seconds, as if that rank had failed."""
    (tmp_path / "train.py").write_text(LEAVES)
    act = partial(rank_script.run_launched, str(tmp_path))
    assert wait(start_ranks(2, tmp_path / "r00.log", act)) == 0, words(tmp_path)
    assert (tmp_path / "found").read_text() == "clean" and words(tmp_path) == ["r00.log\n"]


EXITS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(2)
time.sleep(120)
"""


def test_the_exit_code_of_a_rank_s_script_is_not_a_replica_s(tmp_path: Path) -> None:
    """Before, sys.exit(2) on rank 1 ended the whole run as a mistake of the user, and 3 was told as fenced."""
    (tmp_path / "train.py").write_text(EXITS)
    act = partial(rank_script.run_launched, str(tmp_path))
    assert wait(start_ranks(2, tmp_path / "r00.log", act)) == exitcodes.CRASHED
    assert "rank 1 of 2 ended (exit code 1): RuntimeError: train.py ended with sys.exit(2)" in words(tmp_path)[0]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_a_launcher_starts_the_ranks(launcher: str, tmp_path: Path) -> None:
    start = {
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"],
        "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "-m"],
    }[launcher]
    words_ = ["tests.support.rank_script", "grpo", str(tmp_path), json.dumps({"max_steps": 4}), '{"sync_every": 2}']
    done = subprocess.run([sys.executable, "-m", *start, *words_], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report = read_report(open_store(f"file://{tmp_path}/run"))
    assert report.head == 2 and report.done and len(report.sessions) == 1
    assert [path.name for path in sorted(tmp_path.glob("ended*"))] == ["ended0", "ended1"]


@pytest.mark.parametrize(
    ("more", "told"),
    [({}, True), ({"WORLD_SIZE": "1"}, False), ({"OMPI_COMM_WORLD_SIZE": "2"}, False)],
    ids=["one process", "a launcher of one", "mpirun"],
)
def test_one_process_in_place_of_several_is_told(more: dict[str, str], told: bool) -> None:
    """`accelerate launch --cpu --num_processes 2` starts one process, and that one trained alone without a word."""
    environ = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert bool(lone_words({**environ, **more})) is told
    assert not lone_words({"ACCELERATE_MIXED_PRECISION": "no"}) and not lone_words({"MASTER_PORT": "29500"})


def end_late(folder: str) -> int:
    """As rank 1 after the training: it reads a file of rank 0's folder."""
    time.sleep(0.5)
    raise ValueError(Path(folder, "eval.txt").read_text())


def lead_late(folder: str, code: int) -> int:
    os.dup2(os.open(f"{folder}/r00.log", os.O_WRONLY | os.O_CREAT), 2)

    def script_session(run: Any, session: Any, tell: Any, end: Callable[[int], int]) -> int:
        Path(folder, "eval.txt").write_text("an evaluation")
        ended = end(code)
        Path(folder, "eval.txt").unlink()
        return ended

    replica.script_session = script_session
    session = Mock()
    followers = Followers(2, partial(end_late, folder))
    followers.is_over, ended = lambda: True, exitcodes.CRASHED
    with patch("diloco.replica.ranks.rank_fault", lambda *_: ""):
        ended = _lead_session(followers, 2, Mock(), session)
    followers.end()
    os._exit(ended if session.emit.called == (ended == exitcodes.CRASHED) else 77)


@pytest.mark.parametrize(("code", "ends"), [(exitcodes.DONE, exitcodes.CRASHED), (exitcodes.LEFT, exitcodes.LEFT)])
def test_an_error_of_another_rank_s_script_after_the_training_is_told(code: int, ends: int, tmp_path: Path) -> None:
    """Before: it was in that rank's log alone, and `launch` ended with 0; rank 0's end removed that rank's files."""
    child = context().Process(target=lead_late, args=(str(tmp_path), code))
    child.start()
    assert wait(child) == ends
    told = "rank 1 of 2 ended (exit code 1): ValueError: an evaluation"
    assert words(tmp_path)[0].count(told) == (ends == exitcodes.CRASHED)
