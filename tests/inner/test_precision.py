"""The dtypes of trained weights: float16 is refused for every source of a model, bfloat16 warns once per session."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from inner.channels.teacher import DistillationTeacher
from inner.models.precision import PrecisionWarning, casts_products, check_precision, lost_updates, refuse_float16
from inner.settings.inner import InnerError
from tests.inner.test_toolworld import small_folder
from tests.inner.test_trainer import B, make, measure, rollouts
from tests.support.fleet import Fleet


def model(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)


def test_float16_is_refused_and_would_be_nan() -> None:
    half = model(torch.float16)
    with pytest.raises(InnerError, match=r"float16 \(0\.weight and others\) cannot be trained.*Use float32"):
        check_precision(half)
    optimizer = torch.optim.AdamW(half.parameters(), lr=1e-3)
    for p in half.parameters():
        p.grad = torch.full_like(p, 1e-5)  # its square is 0 in float16
    optimizer.step()
    assert all(p.isnan().all() or p.isinf().all() for p in half.parameters())


def test_what_is_frozen_may_be_float16() -> None:
    mixed = model(torch.float16).requires_grad_(False)
    mixed.add_module("adapter", nn.Linear(4, 4))
    refuse_float16(mixed.named_parameters())
    assert lost_updates(mixed.named_parameters()) is None


def test_bfloat16_warns_with_what_is_lost() -> None:
    with pytest.warns(PrecisionWarning, match=r"40 of 40 trained weights are bfloat16.*\|w\| / 256 is rounded away"):
        check_precision(model(torch.bfloat16))
    assert "on every |w| above 0.00026" in str(lost_updates(model(torch.bfloat16).named_parameters(), lr=1e-6))
    check_precision(model(torch.float32))


def test_the_bound_is_that_of_the_format() -> None:
    """No update above |w| / 256 is lost, none below |w| / 512 survives (w ≥ 0, so the step is away from zero)."""
    w = torch.linspace(0.5, 4.0, 5000).bfloat16()
    assert ((w + (w.float() / 255).bfloat16()) != w).all()
    assert ((w + (w.float() / 520).bfloat16()) == w).all()


@pytest.mark.slow
def test_each_life_says_it_once_in_its_journal(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, inner={"dtype": "bfloat16", "lr": 1e-2}, fleet={"replicas": 1, "steps": 3})
    fleet.start("r00")
    assert fleet.wait() == {"r00": [0]}
    lines = [line for path in Path(fleet.url).glob("log/r*/*.jsonl") for line in path.read_text().splitlines()]
    said = [event for event in map(json.loads, lines) if event.get("kind") == "bf16"]
    assert len(said) == 1 and "rounded away" in said[0]["text"]
    assert fleet.logs().count("rounded away") == 1  # and once on the terminal


@pytest.mark.parametrize(
    ("autocast", "weights", "gpu", "casts"),
    [
        ("auto", "float32", True, True),
        ("auto", "float32", False, False),
        ("auto", "bfloat16", True, False),
        ("bfloat16", "float32", False, True),
        ("bfloat16", "bfloat16", True, False),
        ("off", "float32", True, False),
    ],
)
def test_where_products_are_cast(autocast: str, weights: str, gpu: bool, casts: bool) -> None:
    assert casts_products(autocast, weights, gpu) is casts


def test_autocast_keeps_masters_and_all_terms() -> None:
    """GRPO and SDPO on one batch, with and without autocast: other bits, the same direction, gradients in float32."""
    found = {}
    batch = None
    for autocast in ("off", "bfloat16"):
        trainer = make(alpha_sdpo=0.5, sdpo_teacher="round", config={"autocast": autocast})
        made = rollouts(trainer)
        batch = batch or made
        assert trainer.args.bf16 is (autocast == "bfloat16")
        found[autocast] = measure(trainer.model, lambda t=trainer, b=batch: t._compute_loss(t.model, b))
        assert all(p.dtype == torch.float32 == p.grad.dtype for p in trainer.model.parameters() if p.grad is not None)
        assert trainer._metrics["train"]["loss/sdpo_kl"][0] > 0
    (loss, gradient), (loss16, gradient16) = found["off"], found["bfloat16"]
    assert len(batch["advantages"]) == B and not torch.equal(gradient, gradient16)
    assert torch.cosine_similarity(gradient, gradient16, dim=0) > 0.999
    torch.testing.assert_close(loss16, loss, rtol=0.02, atol=2e-3)


class Products(TorchDispatchMode):
    """Note the dtypes of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in ("aten.mm.default", "aten.addmm.default"):
            self.dtypes.add(args[-1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("autocast", ["off", "bfloat16"])
def test_rollouts_come_from_the_products_of_training(autocast: str, lora: bool) -> None:
    """`PeftModel.generate` calls its base model, whose forward accelerate does not wrap: float32, whatever trains."""
    options = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])} if lora else {}
    trainer = make(config={"autocast": autocast}, **options)
    prompts = [trainer._render_ids(row["prompt"], True) for row in list(trainer.train_dataset)[:4]]
    with Products() as seen:
        trainer._generate_single_turn(prompts, None, {}, 1)
    assert seen.dtypes == {torch.bfloat16 if autocast == "bfloat16" else torch.float32}


def test_a_teacher_under_autocast_has_its_own_weights() -> None:
    """Autocast's cache knows a weight by its parameter, and the teacher's are swapped into the student's."""
    student = AutoModelForCausalLM.from_pretrained(small_folder())
    teacher = DistillationTeacher("frozen", student, ema_rate=0.0)
    with torch.no_grad():
        for p in student.parameters():
            p.mul_(1.5)
    rows = [[1, 2, 3, 4]]
    device = torch.device("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        alone = teacher.logits(rows, [(0, 0, 4)], device)
        own = student(input_ids=torch.tensor(rows)).logits[0]  # its cast weights stay in the cache of this context
        after = teacher.logits(rows, [(0, 0, 4)], device)
    assert torch.equal(alone, after) and not torch.allclose(after, own.to(after.dtype), atol=0.1)
