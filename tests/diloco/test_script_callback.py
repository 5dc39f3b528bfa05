"""DiLoCoCallback: a stock trainer of Transformers or TRL as a replica.

The scripts are a person's own; nothing of this project but the callback is in them.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.utils import RepeatSampler

from diloco import DiLoCoCallback, OuterError, StoreManager, make_diloco
from diloco.process import exitcodes
from diloco.process.session import Session
from diloco.process.watchdog import Watchdog
from diloco.run.library import LAUNCHED, OPENED, ensure_slot, one_spelling
from diloco.runlog.reader import read_report
from diloco.script.callback import (
    ALONE,
    follow_run,
    generation_steps,
    refuse_fights,
    refuse_flat_shards,
    rounds_of,
    total_steps,
)
from diloco.script.rollouts import calling_trainer
from diloco.script.rows import ShareSampler, give_share, refuse_small_share, skip_used, unshared_words, used_batches
from diloco.views.samples import session_samples
from inner.data.order import Share
from rendezvous.clock import SystemClock
from rendezvous.stores.open import open_store
from tests.support.ranks import FAST
from tests.support.tiny_models import tiny_model_folder

ROWS = [{"prompt": f"{i} plus {i + 1} is", "completion": f" {2 * i + 1}."} for i in range(48)]
QUIET: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "bf16": False}


def trainer_of(kind: str, folder: Path, callbacks: list[Any], **more: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder("llama"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder("llama"))
    settings = {
        "output_dir": str(folder / "out"), "per_device_train_batch_size": 4, "max_steps": 8, "learning_rate": 1e-2,
        "logging_steps": 1, **QUIET, **more,
    }  # fmt: skip
    kinds: dict[str, Any] = {"model": model, "processing_class": tokenizer, "callbacks": callbacks}
    if kind == "sft":
        return SFTTrainer(args=SFTConfig(**settings), train_dataset=Dataset.from_list(ROWS), **kinds)
    if kind == "dpo":
        pairs = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": " no"} for r in ROWS]
        return DPOTrainer(args=DPOConfig(**settings), train_dataset=Dataset.from_list(pairs), **kinds)
    grpo = GRPOConfig(num_generations=4, max_completion_length=6, **settings)
    data = Dataset.from_list([{"prompt": r["prompt"]} for r in ROWS])
    return GRPOTrainer(args=grpo, train_dataset=data, reward_funcs=[vowels], **kinds)


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(c in "aeiou" for c in text) / 6 for text in completions]


def weights_of(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])


# -------------------------------------------------------------------- one replica is the script


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["sft", pytest.param("dpo", marks=pytest.mark.slow), "grpo"])
def test_one_replica_with_a_plain_outer_step_is_the_script_alone(kind: str, tmp_path: Path) -> None:
    alone = trainer_of(kind, tmp_path, [])
    alone.train()
    callback = DiLoCoCallback(f"file://{tmp_path}/run", outer_lr=1.0, outer_momentum=0.0, sync_every=4)
    one = trainer_of(kind, tmp_path, [callback])
    one.train()
    losses = [[x["loss"] for x in trainer.state.log_history if "loss" in x] for trainer in (one, alone)]
    assert one.state.global_step == 8 and losses[0] == losses[1]
    assert torch.equal(weights_of(one), weights_of(alone))
    store = open_store(f"file://{tmp_path}/run")
    report = read_report(store)
    assert report.head == 2 and report.done
    found = session_samples(store, "r00", 1, 100)
    assert {row for row, *_ in found} == ({1, 2} if kind == "grpo" else set())  # outer steps
    assert all(" plus " in asked and reward == pytest.approx(vowels([said])[0]) for _, _, asked, said, reward in found)


def test_without_a_run_the_script_trains_alone_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DILOCO_RUN", raising=False)
    trainer = trainer_of("sft", tmp_path, [DiLoCoCallback()], max_steps=2)
    with pytest.warns(UserWarning, match=ALONE):
        trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("given", [{"run": "runs/other"}, {"slot": "r00"}], ids=str)
def test_a_script_that_names_another_run_or_slot_than_its_launcher_is_refused(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else three replicas of `diloco launch` would all claim r00, and fence each other."""
    monkeypatch.setenv("DILOCO_RUN", "runs/mine")
    monkeypatch.setenv("DILOCO_SLOT", "r01")
    with pytest.raises(OuterError, match=r'and DILOCO_(RUN|SLOT) is ".*Leave (run|slot) out'):
        DiLoCoCallback(**given)
    assert DiLoCoCallback(run="runs/mine").slot == "r01"


# -------------------------------------------------------------------- a fleet


def live(folder: Path, slot: str, kind: str) -> None:
    """A process of a person's script, as a launcher starts it: the run is named in its environment alone."""
    torch.set_num_threads(1)
    os.environ.update(DILOCO_RUN=f"file://{folder}/run", DILOCO_SLOT=slot, DILOCO_REPLICAS="3")
    trainer = trainer_of(kind, folder / slot, [DiLoCoCallback(sync_every=2)], max_steps=12)
    trainer.train()
    torch.save(weights_of(trainer), folder / f"{slot}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_three_replicas_of_a_script_one_killed_hold_the_same_weights(kind: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start = {s: context.Process(target=live, args=(tmp_path, s, kind)) for s in ("r00", "r01", "r02")}
    for one in start.values():
        one.start()
    store = open_store(f"file://{tmp_path}/run")
    until = time.monotonic() + 240
    while store.get("steps/0000000001/commit.json") is None and time.monotonic() < until:
        time.sleep(0.02)
    victim = start["r01"]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    again = context.Process(target=live, args=(tmp_path, "r01", kind))
    again.start()
    for one in (start["r00"], start["r02"], again):
        one.join(300)
        assert one.exitcode == 0
    first, *others = (torch.load(tmp_path / f"{slot}.pt") for slot in start)
    assert all(torch.equal(first, other) for other in others)
    report = read_report(store)
    assert report.head == 6 and report.done


# -------------------------------------------------------------------- leaving, and speaking for one


class At(TrainerCallback):
    """Does something at a step."""

    def __init__(self, step: int, what: Callable[[], object]) -> None:
        self.step, self.what = step, what

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.what()


def test_a_process_that_is_asked_to_end_leaves_with_its_work(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    end = At(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    callback = DiLoCoCallback(f"file://{tmp_path}/run", sync_every=4)
    trainer = trainer_of("sft", tmp_path, [callback, end])
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == exitcodes.LEFT and signal.getsignal(signal.SIGTERM) is before
    store = open_store(f"file://{tmp_path}/run")
    assert [x.end for x in read_report(store).sessions] == ["left"] and store.list("steps/0000000000/offer/")
    again = trainer_of("sft", tmp_path, [DiLoCoCallback(f"file://{tmp_path}/run", sync_every=4)])
    again.train()
    report = read_report(store)
    assert report.done and report.head == 2 and again.state.global_step == 8
    assert [len(x.commits) for x in report.sessions] == [1, 1], "a step of the one that left, one of the next"


@pytest.mark.slow
def test_a_script_that_raises_is_told_when_its_process_ends(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.diloco.test_script_callback import At, trainer_of\n"
        "from diloco import DiLoCoCallback\n"
        f"trainer_of('sft', Path({str(tmp_path)!r}), [DiLoCoCallback('file://{tmp_path}/run', sync_every=4), "
        "At(5, lambda: 1 / 0)]).train()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    (crash,) = read_report(open_store(f"file://{tmp_path}/run")).of_kind("crashed")
    assert crash["error"] == "ZeroDivisionError: division by zero"


def test_a_script_that_joins_a_finished_run_ends_with_its_weights(tmp_path: Path) -> None:
    """A trainer asks whether to stop only after a step, so it takes one; that step is taken back."""
    run, ends = f"file://{tmp_path}/run", list[torch.Tensor]()
    for slot in ("r00", "r00", "r01"):
        OPENED.clear()  # each is a process of its own
        ours = DiLoCoCallback(run, slot=slot, sync_every=4)
        trainer = trainer_of("sft", tmp_path, [ours], lr_scheduler_type="constant")
        trainer.train()
        ends.append(weights_of(trainer))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])
    assert read_report(open_store(run)).head == 2


@pytest.mark.slow
def test_a_second_training_in_a_finished_run_is_refused(tmp_path: Path) -> None:
    """Before: it took no step, and its model got the weights of the finished run."""
    run = f"file://{tmp_path}/run"
    first = trainer_of("sft", tmp_path, [DiLoCoCallback(run, sync_every=4)])
    first.train()
    second = trainer_of("sft", tmp_path, [DiLoCoCallback(f"{tmp_path}/./run/", sync_every=2)], max_steps=12)
    before = weights_of(second)
    for trainer in (first, second):
        with pytest.raises(OuterError, match=r"has already trained in .*take no step. Name another run"):
            trainer.train()
    assert torch.equal(weights_of(second), before)
    trainer_of("sft", tmp_path, [DiLoCoCallback(f"file://{tmp_path}/other", sync_every=4)]).train()


def test_a_training_that_stops_by_itself_leaves_the_run_and_is_not_done(tmp_path: Path) -> None:
    """Before: its leave record said "done", and `diloco status` showed it so."""

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 5

    trainer_of("sft", tmp_path, [DiLoCoCallback(f"file://{tmp_path}/run", sync_every=4), Stops()]).train()
    report = read_report(open_store(f"file://{tmp_path}/run"))
    (session,) = report.sessions
    assert not report.done and (session.end, session.why) == ("left", "its training ended before the run was done")


def test_trackers_are_the_first_replicas(tmp_path: Path) -> None:
    begun: list[str] = []
    tracker = type("Tracker", (TrainerCallback,), {"on_train_begin": lambda *_, **__: begun.append("run")})
    tracker.__module__ = "transformers.integrations.integration_utils"
    for slot in ("r01", "r00"):
        callback = DiLoCoCallback(f"file://{tmp_path}/{slot}", slot=slot, sync_every=4, replicas=2)
        trainer = trainer_of("sft", tmp_path, [tracker(), callback], max_steps=8)
        assert any(type(one) is tracker for one in trainer.callback_handler.callbacks) == (slot == "r00")


def test_a_callback_that_is_added_late_tells_which_trackers_have_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: r01's tracker had begun a run of its own, without a word."""
    tracker = type("Tracker", (TrainerCallback,), {"__module__": "transformers.integrations.integration_utils"})
    trainer = trainer_of("sft", tmp_path, [tracker()])
    callback = DiLoCoCallback(f"file://{tmp_path}/run", slot="r01", sync_every=4, replicas=1)
    trainer.add_callback(callback)
    monkeypatch.setattr(callback, "join", lambda *_, **__: 8)  # r01 alone would wait for r00
    with pytest.raises(AssertionError), pytest.warns(UserWarning, match=r"has begun a run for r01.*callbacks=\[…\]"):
        trainer.train()


def test_the_first_replica_alone_pushes_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: a plain `trainer.push_to_hub()` behind the training, as in TRL's notebooks, was done by all at once."""
    pushed: list[str] = []
    monkeypatch.setattr(Trainer, "push_to_hub", lambda self, *_, **__: pushed.append("once"))
    for slot in ("r01", "r00"):
        callback = DiLoCoCallback(f"file://{tmp_path}/{slot}", slot=slot, sync_every=4, replicas=2)
        trainer_of("sft", tmp_path, [callback]).push_to_hub(dataset_name="mine")
    assert pushed == ["once"]


# -------------------------------------------------------------------- rows


def loader_of(sampler: Any, size: int) -> Any:
    return type("Loader", (), {"batch_sampler": BatchSampler(sampler, size, drop_last=False)})()


def test_rows_in_the_datasets_order_are_dealt_at_random() -> None:
    """Before: of rows that alternate, one of two replicas of KTO, which reads in order, had all desirable ones."""
    shares = [list(ShareSampler(SequentialSampler(range(64)), Share(7, index, 2), start=0))[:32] for index in range(2)]
    assert sorted([*shares[0], *shares[1]]) == list(range(64)) and all(share == sorted(share) for share in shares)
    assert all(8 < sum(row % 2 for row in share) < 24 for share in shares)


@pytest.mark.parametrize("make", [RandomSampler, SequentialSampler])
def test_each_row_is_one_replicas_in_each_pass(make: Any) -> None:
    rows = list(range(12))
    seen: Counter[int] = Counter()
    for index in range(3):
        loader = loader_of(make(rows), 2)
        assert give_share(loader, Share(7, index, 3), used=0, is_alone=False)
        assert len(list(loader.batch_sampler)) == 6, "a pass of the trainer is as long as before"
        seen.update(i for batch in loader_of(make(rows), 2).batch_sampler for i in batch)
        stream = ShareSampler(make(rows), Share(7, index, 3), 0)
        first = [i for i, _ in zip(stream._stream, range(4), strict=False)]
        assert len(set(first)) == 4
        seen.update(dict.fromkeys(first, 100))
    assert all(count // 100 == 1 for count in seen.values()) and set(seen) == set(rows)


def test_a_replacement_goes_on_where_its_slot_was() -> None:
    def stream(start: int) -> list[int]:
        sampler = RepeatSampler(range(20), mini_repeat_count=2, batch_size=2, repeat_count=3, seed=1)
        loader = loader_of(sampler, 4)
        assert give_share(loader, Share(5, 1, 2), used=start, is_alone=False)
        return [i for batch in loader.batch_sampler for i in batch]

    whole = stream(0)
    assert whole[:12] == whole[:4] * 3, "a generation's prompts are repeated"
    assert stream(3)[: len(whole) - 12] == whole[12:]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_replacement_goes_on_after_passes_whose_last_step_was_short(drop_last: bool) -> None:
    """Before: a pass of 6 batches in steps of 4 counted as 8, and its last batch as a full one: rows were left out."""

    def loader() -> DataLoader[Any]:
        batches = BatchSampler(RandomSampler(range(22)), 4, drop_last)
        return DataLoader(list(range(22)), batch_sampler=batches)  # type: ignore[arg-type]

    give_share(first := loader(), Share(5, 1, 2), used=0, is_alone=False)
    rows = [row for _ in range(3) for batch in first.batch_sampler for row in batch]  # type: ignore[union-attr]
    length = len(rows) // 3
    used = used_batches(first, 2 * -(-len(first) // 4) + 1, accumulation=4)  # two passes, and a step of 4 batches
    give_share(second := loader(), Share(5, 1, 2), used=used, is_alone=False)
    assert next(iter(second.batch_sampler)) == rows[2 * length + 16 :][:4]  # type: ignore[call-overload]
    assert used_batches(Stream(3), 5, accumulation=4) == 20, "nothing tells where a pass without a length ends"


def test_ranks_with_seeds_of_their_own_read_one_share() -> None:
    """Each rank takes its part of the batches; with an order for each seed, both read some rows, and neither others."""

    def rows_of(rank: int) -> list[int]:
        callback = DiLoCoCallback("runs/x", "r01", replicas=2)
        callback.loop, callback.manager = Mock(), Mock()
        callback.manager.group.tell = lambda message: 40  # rank 0's seed
        callback.begin_at(0, 40 + rank, loader := loader_of(RandomSampler(range(20)), 2), {}, 10, 10)
        return [i for batch in loader.batch_sampler for i in batch]

    assert rows_of(0) == rows_of(1)


def test_one_replica_at_the_front_reads_as_without_a_run() -> None:
    loader = loader_of(sampler := RandomSampler(range(9)), 2)
    assert give_share(loader, Share(0, 0, 1), used=0, is_alone=True)
    assert loader.batch_sampler.sampler is sampler
    assert not give_share(object(), Share(0, 0, 1), used=0, is_alone=True), "a stream has no sampler"


class Stream(IterableDataset[Any]):
    """Numbered rows without a length."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        yield from ({"input_ids": torch.full((8,), i), "labels": torch.full((8,), i)} for i in range(self.rows))


class Reads(TrainerCallback):
    """Note the first token of each batch that the model gets."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
        note = lambda module, given, named: self.read.append(int(named["input_ids"][0, 0]))  # noqa: E731
        trainer["model"].register_forward_pre_hook(note, with_kwargs=True)


@pytest.mark.quick(1)
@pytest.mark.parametrize("rows", [100, 13], ids=["longer than the run", "shorter than what was used"])
def test_a_replacement_goes_on_in_a_stream_where_its_slot_was(rows: int, tmp_path: Path) -> None:
    def train(*more: Any) -> list[int]:
        reads = Reads()
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(tiny_model_folder("llama"))
        args = TrainingArguments(str(tmp_path), max_steps=24, per_device_train_batch_size=1, **QUIET)
        ours = DiLoCoCallback(f"file://{tmp_path}/run", sync_every=4)
        trainer = Trainer(model=model, args=args, train_dataset=Stream(rows), callbacks=[ours, reads, *more])  # type: ignore[arg-type]
        with suppress(SystemExit):
            trainer.train()
        return reads.read

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # alone, it has nothing to tell
        first = train(At(15, lambda: os.kill(os.getpid(), signal.SIGTERM)))
        second = train()
    assert first == [i % rows for i in range(16)]
    began = [i % rows for i in range(16, 24)] if rows > 16 else [i % rows for i in range(8)]
    assert second == began
    assert read_report(open_store(f"file://{tmp_path}/run")).done


def test_rows_that_are_not_dealt_are_told_in_words_that_fit() -> None:
    weighted = DataLoader(list(range(4)), sampler=WeightedRandomSampler([1.0] * 4, 4))  # type: ignore[arg-type]
    assert unshared_words(weighted, is_alone=True, begins_again=False) == ""
    assert "WeightedRandomSampler draws rows by itself" in unshared_words(weighted, is_alone=False, begins_again=False)
    told = unshared_words(DataLoader(Stream(3)), is_alone=True, begins_again=True)
    assert told.startswith("the dataset has no length, so a session") and "all replicas" not in told
    assert not skip_used(weighted, 3), "it is no loader of accelerate"


def test_a_share_that_fills_no_batch_is_refused() -> None:
    with pytest.raises(OuterError, match="2 rows for 3 replicas"):
        refuse_small_share(loader_of(RandomSampler(range(2)), 1), 3)
    sampler = RepeatSampler(range(10), 2, batch_size=8)
    with pytest.raises(OuterError, match="share of 5 rows does not fill one batch"):
        refuse_small_share(loader_of(sampler, 8), 2)
    assert len(sampler.data_source) == 10, "it only looks"
    refuse_small_share(loader_of(sampler, 8), 1)
    refuse_small_share(object(), 9)  # a stream


# -------------------------------------------------------------------- steps, rates, refusals


def test_epochs_are_the_fleets_and_max_steps_one_replicas() -> None:
    epochs = TrainingArguments(output_dir="x", use_cpu=True)
    assert total_steps(epochs, planned=90, replicas=4) == 23
    assert total_steps(TrainingArguments(output_dir="x", max_steps=90, use_cpu=True), planned=90, replicas=4) == 90
    assert rounds_of(90, 20) == 5 and rounds_of(90, 20, most=100) == 5 and rounds_of(90, 20, most=99) == 4
    with pytest.raises(OuterError, match=r"6 optimizer steps are fewer than one round of 20.*sync_every = 1"):
        rounds_of(6, 20)


@pytest.mark.parametrize("length", [{"max_steps": -1, "num_train_epochs": 1}, {"max_steps": 11}], ids=str)
def test_a_trainer_whose_epochs_end_inside_a_round_takes_whole_rounds(length: dict[str, Any], tmp_path: Path) -> None:
    """An epoch has 12 steps: the third round of 5 would need 15, so the script ended with the run unfinished."""
    trainer = trainer_of("sft", tmp_path, [DiLoCoCallback(f"file://{tmp_path}/run", sync_every=5)], **length)
    trainer.train()
    report = read_report(open_store(f"file://{tmp_path}/run"))
    assert report.done and report.head == 2 and len(report.sessions) == 1 and trainer.state.global_step == 10


def test_no_sync_comes_inside_a_generation() -> None:
    args = GRPOConfig(
        output_dir="x", per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=2,
        steps_per_generation=8, num_iterations=2, use_cpu=True, bf16=False,
    )  # fmt: skip
    assert generation_steps(args) == 8
    assert generation_steps(TrainingArguments(output_dir="x", use_cpu=True)) == 1


def test_the_rate_is_a_function_of_the_runs_step() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
    at = [40]
    follow_run(scheduler, lambda: at[0], planned=50, steps=100)  # its own plan has half as many steps
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.8)
    at[0] = 60
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.7)


def test_a_schedule_of_epochs_gets_the_runs_epoch() -> None:
    """Lightning's schedules take a step after each epoch, unless told; here an epoch has 12 optimizer steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler, seen, at = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch), list[float](), [0]
    follow_run(scheduler, lambda: at[0], planned=48, steps=24, each=12)  # two replicas
    for at[0] in (0, 5, 6, 12, 18, 23):
        scheduler.step()
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == [1, 1, 0.5, 0.25, 0.125, 0.125]


@pytest.mark.parametrize(("steps", "told"), [(100, "restarts it. A LambdaLR"), (25, "after 25 of its 100 steps. Give")])
def test_a_schedule_that_cannot_follow_the_run_is_told(steps: int, told: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    with pytest.warns(UserWarning, match=f"CosineAnnealingLR is not a function of the step alone.*{told}"):
        follow_run(scheduler, lambda: 0, planned=100, steps=steps)


def test_mistyped_words_and_two_callbacks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OuterError, match=r'slot = \'0\' .*Use "r00"'):
        DiLoCoCallback("runs/x", slot="0")
    monkeypatch.setenv("DILOCO_REPLICAS", "three")
    with pytest.raises(OuterError, match="DILOCO_REPLICAS = 'three' is not a number of replicas"):
        DiLoCoCallback("runs/x")
    monkeypatch.delenv("DILOCO_REPLICAS")
    two = [DiLoCoCallback(f"file://{tmp_path}/run", sync_every=4) for _ in range(2)]
    with pytest.raises(OuterError, match="it has two DiLoCoCallbacks"):
        trainer_of("sft", tmp_path, two).train()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"callbacks": [EarlyStoppingCallback(2)], "eval_strategy": "steps"}, "would end this replica alone"),
        ({"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps"}, "would replace θ"),
        ({"max_steps": 3}, "fewer than one round of 4"),
        ({"auto_find_batch_size": True}, "Set per_device_train_batch_size"),
    ],
)
def test_what_would_fight_with_the_run_is_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    callbacks = [DiLoCoCallback(f"file://{tmp_path}/run", sync_every=4), *settings.get("callbacks", ())]
    settings = {name: value for name, value in settings.items() if name != "callbacks"}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder("llama"))
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
    args = TrainingArguments(**{"output_dir": str(tmp_path), "max_steps": 8, "eval_steps": 2, **QUIET, **settings})
    trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)  # type: ignore[arg-type]
    with pytest.raises(OuterError, match=words):
        trainer.train()
    assert not (tmp_path / "run").exists(), "nothing was founded"


def test_fp16_from_the_launcher_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `accelerate launch --mixed_precision fp16` sets it; a GPU's trainer would scale its gradients."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    args = TrainingArguments(**{"output_dir": str(tmp_path), "max_steps": 8, **QUIET})
    with pytest.raises(OuterError, match=r"fp16 .its own, or its launcher's mixed_precision. scales gradients"):
        refuse_fights(args, Mock(global_step=0), [])


class Replaces(TrainerCallback):
    """A person's callback that gives the trainer another optimizer in the middle of its training."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            calling_trainer().optimizer = torch.optim.SGD(calling_trainer().model.parameters(), lr=0.1)


def test_an_optimizer_that_comes_later_is_refused_at_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps would pass the run by: the trainer would count none, and never end."""
    monkeypatch.setattr(DiLoCoCallback, "_listen", lambda callback: None)  # they stay until a trainer's own end
    trainer = trainer_of("sft", tmp_path, [DiLoCoCallback(f"file://{tmp_path}/run", sync_every=4), Replaces()])
    with pytest.raises(OuterError, match=r"did not make this step.*Give the trainer its optimizer before train"):
        trainer.train()
    assert trainer.state.global_step == 2


class Ones(Trainer):
    """A trainer whose loss is 1 in each step."""

    def training_step(self, *given: Any, **more: Any) -> torch.Tensor:
        super().training_step(*given, **more)
        return torch.ones(())


def ones(folder: Path, callbacks: list[Any]) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder("llama"))
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 64
    args = TrainingArguments(**{"output_dir": str(folder), "max_steps": 12, "logging_steps": 1, **QUIET})
    return Ones(model=model, args=args, train_dataset=rows, callbacks=callbacks)  # type: ignore[arg-type]


def test_the_logged_loss_is_a_mean_over_the_steps_that_were_taken(tmp_path: Path) -> None:
    """In a replacement, whose step begins at the run's, and after a round that ends early, where it jumps."""
    callback = DiLoCoCallback(f"file://{tmp_path}/run", sync_every=4)

    def end_round() -> None:
        assert callback.loop is not None
        callback.loop.rounds.session.rv.h_cap = 2

    first = ones(tmp_path, [callback, At(5, end_round), At(9, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    with pytest.raises(SystemExit):
        first.train()
    second = ones(tmp_path, [DiLoCoCallback(f"file://{tmp_path}/run", sync_every=4)])
    second.train()
    steps = [[one["step"] for one in trainer.state.log_history if "loss" in one] for trainer in (first, second)]
    losses = [one["loss"] for trainer in (first, second) for one in trainer.state.log_history if "loss" in one]
    assert 6 not in steps[0] and 8 in steps[0] and steps[1][0] > 8, f"neither jumped: {steps}"
    assert set(losses) == {1.0}
    if hasattr(second, "_initial_global_step"):  # older releases of transformers divide by all steps of the run
        assert second.state.log_history[-1]["train_loss"] == pytest.approx(1.0)


class Looks(TrainerCallback):
    """Let half a second pass in each prediction step, and twenty in a save, as the heartbeat's thread sees them."""

    def __init__(self, ours: DiLoCoCallback) -> None:
        self.ours = ours
        self.looks, self.hung = Counter[str](), list[str]()

    def look(self, what: str, seconds: float) -> None:
        assert self.ours.loop is not None
        self.looks[what] += 1
        for _ in range(round(2 * seconds)):
            if self.ours.loop.rounds.watchdog.look(0.5) is not None:
                self.hung.append(what)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.ours.loop is not None
        self.ours.loop.rounds.watchdog = Watchdog(SystemClock(), least_s=2.0)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.look("prediction", 0.5)


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_an_evaluation_and_a_save_are_no_inner_step_that_hangs(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(DiLoCoCallback(f"file://{tmp_path}/run", sync_every=4))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder("llama"))
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
    when = {"eval_strategy": strategy, "save_strategy": strategy, "eval_steps": 2, "save_steps": 2}
    args = TrainingArguments(
        **{"output_dir": str(tmp_path), "max_steps": 8, "per_device_eval_batch_size": 1, **QUIET, **when}
    )
    trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows, callbacks=[looks.ours, looks])  # type: ignore[arg-type]
    save = trainer._save_checkpoint
    monkeypatch.setattr(trainer, "_save_checkpoint", lambda *given: (looks.look("save", 20.0), save(*given)))
    trainer.train()
    assert looks.looks["prediction"] >= 32 and looks.looks["save"] >= 2 and not looks.hung
    assert read_report(open_store(f"file://{tmp_path}/run")).done


def test_a_training_that_begins_again_after_it_raised_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two outer loops would hang on one optimizer, and each H inner steps would be two outer steps."""
    monkeypatch.setattr(DiLoCoCallback, "_listen", lambda callback: None)
    raised: list[str] = []

    def run_out_of_memory() -> None:
        if not raised:
            raised.append("once")
            raise RuntimeError("CUDA out of memory.")

    run = f"file://{tmp_path}/run"
    trainer = trainer_of("sft", tmp_path, [DiLoCoCallback(run, sync_every=4), At(5, run_out_of_memory)])
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    with pytest.raises(OuterError, match=r"the training began again after an error.*In a notebook, first make"):
        trainer.train()
    assert read_report(open_store(run)).head == 1


def test_other_ways_to_share_a_model_are_refused() -> None:
    usual: dict[str, Any] = {
        "fp16": False, "load_best_model_at_end": False, "auto_find_batch_size": False, "deepspeed": None, "fsdp": None,
    }  # fmt: skip
    refuse_fights(Mock(**{**usual, "fsdp": True, "fsdp_config": {"version": 2}}), Mock(global_step=0), [])
    for changed, told in (
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "FSDP 1, whose parameters are flat"),
        ({"deepspeed": "zero3.json"}, "DeepSpeed keeps its own copy of the weights. Use FSDP2"),
    ):
        with pytest.raises(OuterError, match=told):
            refuse_fights(Mock(**{**usual, **changed}), Mock(global_step=0), [])
    flat = type("FullyShardedDataParallel", (), {})()
    with pytest.raises(OuterError, match="fsdp_version: 2 in accelerate's config"):
        refuse_flat_shards(flat)


@pytest.mark.parametrize("launched", [True, False], ids=["launched", "by hand"])
def test_a_second_loop_in_one_process_is_refused(
    launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: it joined with the session that had ended, without heartbeats; by hand, it took no step."""
    url = f"file://{tmp_path}/run"
    if launched:
        ensure_slot(open_store(url), SystemClock(), "r00", replicas=1, min_replicas=1, steps=1)
        monkeypatch.setitem(LAUNCHED, one_spelling(url), Session(open_store(url), "r00", FAST))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_diloco(model, optimizer, StoreManager(url, steps=1, replicas=1), sync_every=2):
        for _ in range(3):
            model(torch.ones(2)).square().sum().backward()
            optimizer.step()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    stores = open_store(url), open_store(str(tmp_path / "link"))
    for spelled in (url, f"{tmp_path}/./run/", f"{tmp_path}/link", *stores):
        with pytest.raises(OuterError, match="has already trained in"):
            StoreManager(spelled, steps=1)


def test_a_worker_that_runs_the_script_again_takes_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: under "spawn" and without a main guard, a DataLoader's worker joined in its parent's slot."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)  # as `spawn` sets it
    with pytest.raises(OuterError, match=r"worker process of `multiprocessing` runs this script.*__main__"):
        StoreManager(f"file://{tmp_path}/run", steps=1, replicas=1)
    assert not (tmp_path / "run").exists()
