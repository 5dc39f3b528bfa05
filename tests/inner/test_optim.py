"""The inner optimizer's family, its rate by the committed outer step, and what float32 masters keep."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from inner import InnerConfig, InnerError
from inner.models.optim import RunSchedule, make_optimizer
from inner.models.other_optimizers import MuonAndAdamW
from inner.settings.inner import lr_factor
from inner.settings.task import LoraSettings

SUPERVISED: dict[str, Any] = {"loop": "supervised", "model": "tiny", "data": {"text": "a.txt"}}


def config_with(**settings: Any) -> InnerConfig:
    return InnerConfig(**SUPERVISED, **settings)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Embedding(6, 4), "layer": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})


def give_gradients(model: nn.Module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


# ---------------------------------------------------------------- the rate


def rates(schedule: dict[str, Any], steps: int = 11) -> list[float]:
    settings = config_with(schedule=schedule).schedule
    return [round(settings.lr_factor(t), 4) for t in range(steps)]


def test_the_shapes() -> None:
    assert rates({}) == [1.0] * 11
    assert rates({"lr_warmup": 3})[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates({"lr_shape": "linear", "lr_steps": 4}) == [1.0, 0.75, 0.5, 0.25] + [0.0] * 7
    assert rates({"lr_shape": "linear", "lr_steps": 5, "lr_warmup": 1, "lr_end": 0.2})[:7] == [
        0.5,
        1.0,
        0.8,
        0.6,
        0.4,
        0.2,
        0.2,
    ]
    cosine = rates({"lr_shape": "cosine", "lr_steps": 10, "lr_end": 0.1})
    assert cosine == [round(0.1 + 0.9 * (1 + math.cos(math.pi * t / 10)) / 2, 4) for t in range(11)]


def test_the_rate_grows_with_the_replicas_that_are_averaged() -> None:
    """inner.lr is one machine's; 0 replicas, before the first outer step of a session alone, count as one."""
    for way, expected in {"constant": [1, 1, 1, 1], "sqrt": [1, 1, 2, 3], "linear": [1, 1, 4, 9]}.items():
        settings = config_with(schedule={"lr_replicas": way})
        assert [lr_factor(settings, 5, n) for n in (0, 1, 4, 9)] == expected
    both = config_with(schedule={"lr_replicas": "sqrt", "lr_warmup": 3})
    assert lr_factor(both, 1, 4) == 2 * 0.5


def test_by_default_it_grows_with_the_root_for_adapters_too() -> None:
    """docs/studies/tuned.md, T5 and T6; of adapters docs/studies/pretrained.md, P3, P4 and P6."""
    assert lr_factor(config_with(), 5, 4) == 2
    adapter = InnerConfig(lora=LoraSettings(r=4, alpha=8.0))
    assert lr_factor(adapter, 5, 4) == 2


def test_a_session_with_the_moments_of_the_one_before_needs_no_warm_up() -> None:
    def rates_of(moments: bool, joined_at: int = 2) -> list[float]:
        model = small_model()
        optimizer = make_optimizer(config_with(lr=1.0), model)
        if moments:
            give_gradients(model)
            optimizer.step()
        schedule = RunSchedule(optimizer, config_with(lr=1.0), start=6, warmup_steps=3)
        schedule.follow(lambda: joined_at, lambda: 1)
        seen = list[float]()
        for _ in range(4):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return seen

    assert rates_of(moments=False) == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert rates_of(moments=True) == [1, 1, 1, 1]
    assert rates_of(moments=False, joined_at=0) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"lr_shape": "step"}, "inner.schedule.lr_shape = 'step' is not known. Use one of: constant, linear, cosine"),
        ({"lr_shape": "cosine"}, "ends after inner.schedule.lr_steps = None outer steps"),
        ({"lr_shape": "linear", "lr_steps": 3, "lr_warmup": 3}, "must be more than inner.schedule.lr_warmup = 3"),
        ({"lr_replicas": "cubic"}, "lr_replicas = 'cubic' is not known. Use one of: constant, sqrt, linear"),
        ({"lr_steps": 3}, 'do nothing with inner.schedule.lr_shape = "constant"'),
        (
            {"lr_shape": "linear", "lr_steps": 3, "lr_end": 1.5},
            "lr_end = 1.5 must be at least 0 and at most 1",
        ),
        ({"lr_warmup": -1}, "inner.schedule.lr_warmup = -1 must be at least 0"),
    ],
)
def test_a_schedule_that_cannot_be(schedule: dict[str, Any], words: str) -> None:
    with pytest.raises(InnerError) as refused:
        config_with(schedule=schedule)
    assert words in str(refused.value)


def test_a_replacement_is_where_the_others_are() -> None:
    """The rate is a function of the committed step alone, not of the session; it holds from its first step on."""
    config = config_with(lr=0.5, schedule={"lr_shape": "linear", "lr_steps": 10})
    model = small_model()
    committed = [0]
    runs = []
    for start in (0, 24):
        optimizer = make_optimizer(config, model)
        schedule = RunSchedule(optimizer, config, start, 0)
        if start:
            committed[0] = 4
        schedule.follow(lambda: committed[0], lambda: 1)
        runs.append((optimizer, schedule))
    assert [o.param_groups[0]["lr"] for o, _ in runs] == [0.5, 0.3]
    for step in (4, 4, 5):
        committed[0] = step
        for optimizer, schedule in runs:
            optimizer.step()
            schedule.step()
        assert {round(o.param_groups[0]["lr"], 9) for o, _ in runs} == {0.5 * (10 - step) / 10}


# ---------------------------------------------------------------- the family


def test_muon_moves_matrices_and_adamw_the_rest() -> None:
    config = config_with(optimizer="muon", lr=1e-2, weight_decay=0.1)
    both, apart = small_model(), small_model()
    optimizer = make_optimizer(config, both)
    matrices = [apart.layer.weight]  # pyright: ignore[reportAttributeAccessIssue]
    others = [p for p in apart.parameters() if p is not matrices[0]]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    for seed in range(3):
        give_gradients(both, seed)
        give_gradients(apart, seed)
        for each in (optimizer, muon, adam):
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(both.parameters(), apart.parameters(), strict=True))
    assert seen == [1, 1, 1] and isinstance(optimizer, MuonAndAdamW) and len(optimizer.param_groups) == 2
    optimizer.zero_grad()
    assert all(p.grad is None for p in both.parameters())


def test_a_schedule_reaches_both_halves() -> None:
    config = config_with(optimizer="muon", lr=1.0, schedule={"lr_warmup": 3})
    optimizer = make_optimizer(config, small_model())
    RunSchedule(optimizer, config, 0, 0).follow(lambda: 1, lambda: 1)
    assert [part.param_groups[0]["lr"] for part in optimizer.parts] == [0.5, 0.5]  # type: ignore[attr-defined]


def test_eight_bits_want_their_package_and_a_device() -> None:
    with pytest.raises(InnerError, match=r"needs bitsandbytes.*pip install bitsandbytes|needs a CUDA device"):
        make_optimizer(config_with(optimizer="adamw8bit"), small_model())


def test_an_optimizer_that_is_none() -> None:
    with pytest.raises(InnerError, match=r"inner\.optimizer = 'sgd' is not known\. Use one of: adamw, muon, adamw8bit"):
        config_with(optimizer="sgd")


# ---------------------------------------------------------------- precision


def moved(dtype: torch.dtype) -> torch.Tensor:
    """How far 100 steps of lr 1e-6 carry weights of the size that models have, with the same gradients."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4096, generator=generator) * 0.02
    weight = nn.Parameter(start.bfloat16().to(dtype))
    holder = nn.Module()
    holder.register_parameter("weight", weight)
    optimizer = make_optimizer(config_with(lr=1e-6), holder)
    first = weight.detach().float().clone()
    for _ in range(100):
        weight.grad = (torch.randn(4096, generator=generator) * 0.1 + first.sign()).to(dtype)
        optimizer.step()
    return weight.detach().float() - first


def test_float32_masters_keep_what_bfloat16_loses() -> None:
    exact, masters, half = moved(torch.float64), moved(torch.float32), moved(torch.bfloat16)
    share = lambda found: (found.norm() / exact.norm()).item()  # noqa: E731
    assert (masters - exact).norm() / exact.norm() < 1e-3 and abs(share(masters) - 1) < 1e-3
    assert (half == 0).float().mean() > 0.9, "nine of ten weights have not moved at all"
    assert (half - exact).norm() / exact.norm() > 0.5, "most of the change is lost"
