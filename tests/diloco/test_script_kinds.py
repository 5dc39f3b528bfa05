"""The one line in other trainers and settings: each alone is the script, and two replicas hold equal weights."""

import multiprocessing
import os
from functools import partial
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import (
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from diloco import DiLoCoCallback
from diloco.model.script_model import _saved_name, publish_script_model
from diloco.runlog.reader import read_report
from diloco.script.rollouts import newest_rollouts
from rendezvous.clock import SystemClock
from rendezvous.stores.memory import MemoryStore
from rendezvous.stores.open import open_store
from tests.diloco.test_script_callback import QUIET, ROWS, vowels
from tests.support.tiny_models import tiny_model_folder

ADAPTER = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


class EightBit(torch.optim.Optimizer):
    """Momentum in 8 bits with a scale, as 8-bit optimizers keep it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                momentum = p.grad + 0.9 * (state["bits"].float() * state["scale"] if state else 0)
                state["scale"] = momentum.abs().max() / 127 + 1e-12
                state["bits"] = (momentum / state["scale"]).round().to(torch.int8)
                p.sub_(group["lr"] * momentum)


class Average(TrainerCallback):
    """A person's moving average of the weights, in the list before or after ours."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
        now = [p.detach().clone() for p in trainer["model"].parameters()]
        self.weights = [a.lerp(b, 0.1) for a, b in zip(self.weights or now, now, strict=True)]


def trainer_of(kind: str, folder: Path, callbacks: list[Any]) -> Any:
    torch.manual_seed(0)
    start = tiny_model_folder("llama")
    tokenizer = AutoTokenizer.from_pretrained(start)
    common = {"output_dir": str(folder / "out"), "per_device_train_batch_size": 4, "max_steps": 8, **QUIET}
    given: dict[str, Any] = {"processing_class": tokenizer, "callbacks": callbacks}
    if kind == "vision":
        model = ViTForImageClassification(
            ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=8,
                      patch_size=4, num_labels=2)
        )  # fmt: skip
        images = torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        rows = [{"pixel_values": x, "labels": int(x.mean() > 0)} for x in images]
        args = TrainingArguments(
            learning_rate=1e-2, optim="sgd", **common
        )  # Adam enlarges the last bit of a zero gradient
        return Trainer(model=model, args=args, train_dataset=rows, callbacks=callbacks)  # type: ignore[arg-type]
    if kind == "reward":
        scorer = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1, pad_token_id=0)
        pairs = [{"chosen": r["prompt"] + r["completion"], "rejected": r["prompt"] + " no"} for r in ROWS]
        args = RewardConfig(learning_rate=1e-2, **common)
        return RewardTrainer(model=scorer, args=args, train_dataset=Dataset.from_list(pairs), **given)
    model = AutoModelForCausalLM.from_pretrained(start)
    if kind == "iterations":
        args = GRPOConfig(num_generations=4, max_completion_length=6, num_iterations=2, steps_per_generation=2,
                          learning_rate=1e-2, **common)  # fmt: skip
        data = Dataset.from_list([{"prompt": r["prompt"]} for r in ROWS])
        return GRPOTrainer(model=model, args=args, train_dataset=data, reward_funcs=[vowels], **given)
    more = {"packing": {"packing": True, "max_length": 64}, "accumulation": {"gradient_accumulation_steps": 2}}
    args = SFTConfig(learning_rate=1e-2, **common, **more.get(kind, {}))
    if kind == "8-bit":
        given["optimizers"] = EightBit(model.parameters(), lr=1e-2), None
    adapter = ADAPTER if kind == "peft" else None
    return SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(ROWS), peft_config=adapter, **given)


def test_rollouts_are_logged_with_the_rewards_that_are_known() -> None:
    """Before: TRL's DistillationTrainer, whose rollouts no function scores, ended with an AttributeError."""
    logs = {"prompt": ["p", "p"], "completion": ["a", "b"], "rewards": {"f": [0.5, nan], "g": [2.0, nan]}}
    state = SimpleNamespace(global_step=3)
    distilled = SimpleNamespace(_logs=logs, state=state)
    assert [one["reward"] for one in newest_rollouts(distilled, 4)["rollouts"]] == [None, None]
    scored = SimpleNamespace(_logs=logs, state=state, reward_weights=torch.tensor([1.0, 0.5]))
    scored.reward_func_names = ["f", "g"]
    found = {one["messages"][-1]["content"]: one["reward"] for one in newest_rollouts(scored, 4)["rollouts"]}
    assert found == {"a": 1.5, "b": None}


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


KINDS = ["packing", "peft", "reward", "vision", "accumulation", "iterations", "8-bit"]


@pytest.mark.parametrize(
    "kind", ["peft", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[2:] + KINDS[:1])]
)
def test_one_replica_with_a_plain_outer_step_is_the_script_alone(kind: str, tmp_path: Path) -> None:
    alone = trainer_of(kind, tmp_path, [])
    alone.train()
    run = f"file://{tmp_path}/run"
    one = trainer_of(kind, tmp_path, [DiLoCoCallback(run, outer_lr=1.0, outer_momentum=0.0, sync_every=4)])
    before = weights_of(one.model)
    one.train()
    assert (weights_of(one.model) - weights_of(alone.model)).abs().max() <= 1e-6
    assert one.state.global_step == 8 and not torch.equal(before, weights_of(one.model))
    report = read_report(open_store(run))
    assert report.head == 2 and report.done


@pytest.mark.slow
def test_a_moving_average_sees_what_the_script_alone_sees_before_and_after_the_callback(tmp_path: Path) -> None:
    found = []
    for name in ("alone", "first", "last"):
        average = Average()
        ours = DiLoCoCallback(f"file://{tmp_path}/{name}", outer_lr=1.0, outer_momentum=0.0, sync_every=4)
        both = {"alone": [average], "first": [average, ours], "last": [ours, average]}[name]
        trainer_of("plain", tmp_path, both).train()
        found.append(torch.cat([w.reshape(-1) for w in average.weights]))
    assert max(float((one - found[0]).abs().max()) for one in found[1:]) <= 1e-6


def live(folder: Path, slot: str, kind: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(DILOCO_RUN=f"file://{folder}/run", DILOCO_SLOT=slot, DILOCO_REPLICAS="2")
    trainer = trainer_of(kind, folder / slot, [DiLoCoCallback(sync_every=4)])
    trainer.train()
    torch.save(weights_of(trainer.model), folder / f"{slot}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_replicas_of_it_hold_the_same_weights(kind: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=live, args=(tmp_path, slot, kind)) for slot in ("r00", "r01")]
    for one in both:
        one.start()
    for one in both:
        one.join(240)
        assert one.exitcode == 0
    first, second = (torch.load(tmp_path / f"{slot}.pt") for slot in ("r00", "r01"))
    assert torch.equal(first, second) and first.isfinite().all()
    report = read_report(open_store(f"file://{tmp_path}/run"))
    assert report.done and report.head == 2


LORA = partial(LoraConfig, r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
PROMPT: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
ADAPTERS = {
    "lora": LORA(), "dora": LORA(use_dora=True), "head": LORA(modules_to_save=["lm_head"]),
    "tokens": LORA(trainable_token_indices=[1, 2]), "prompt": PromptTuningConfig(**PROMPT),
    "prefix": PrefixTuningConfig(**PROMPT),
}  # fmt: skip


@pytest.mark.parametrize("kind", ADAPTERS)
def test_each_weight_of_an_adapter_has_its_name_in_peft_s_file(kind: str) -> None:
    """Before: `diloco export` refused DoRA, whose magnitudes PEFT saves under a shorter name, and prompt tuning."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder("qwen3"))
    adapted = get_peft_model(model, ADAPTERS[kind])
    saved = get_peft_model_state_dict(adapted)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    found = {_saved_name(name, set(saved), len(trained)): p for name, p in trained.items()}
    assert len(found) == len(trained) and all(torch.equal(saved[name], p) for name, p in found.items())


def test_an_adapter_that_export_cannot_write_is_told_at_the_start() -> None:
    """Before: the refusal came after the training."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder("qwen3"))
    told: list[str] = []
    session: Any = SimpleNamespace(
        rv=SimpleNamespace(store=MemoryStore()), clock=SystemClock(), emit=lambda event, text: told.append(text)
    )
    for config in (LORA(), PromptEncoderConfig(**PROMPT, encoder_hidden_size=8)):
        session.rv.store = MemoryStore()
        publish_script_model(session, get_peft_model(model, config), None)
    assert len(told) == 1 and "`diloco export` cannot write this run" in told[0] and "prompt_encoder" in told[0]
