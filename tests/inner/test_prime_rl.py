"""PRIME-RL's losses, bit for bit: its own numbers from a file, and itself where it is installed (`make test-backends`).

tests/data/prime_rl_golden.json ══ loss_fn at α = 0              the default loss
                                ══ loss_fn at α = 1, τ_adv = 0   its ref_kl, up to the order of a sum
"""

import json
import os
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from inner.extras.prime_rl import loss_fn
from tests.support.prime_rl_golden import PATH, Sample, drawn, outcome, probe, samples

ROOT = Path(__file__).parents[2]
GOLDEN: dict[str, Any] = json.loads(PATH.read_text())
SAMPLES = samples()
SAME_EXP = probe() == GOLDEN["probe"]


def check(found: dict[str, Any], golden: dict[str, Any], *, exactly: bool) -> None:
    assert found["metrics"].keys() >= golden["metrics"].keys()
    for name, value in golden["metrics"].items():
        assert found["metrics"][name] == pytest.approx(value, rel=1e-6, abs=1e-12), name
    if SAME_EXP and exactly:
        assert (found["loss"], found["gradient"]) == (golden["loss"], golden["gradient"])
    for name in ("loss", "gradient"):
        mine, theirs = (torch.tensor(x[name], dtype=torch.int32).view(torch.float32) for x in (found, golden))
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", SAMPLES)
def test_without_channels_it_is_the_default_loss(name: str) -> None:
    sample, settings = SAMPLES[name]
    check(outcome(sample, lambda s: loss_fn(s, **settings)), GOLDEN["default"][name], exactly=True)


@pytest.mark.parametrize("name", GOLDEN["ref_kl"])
def test_the_distillation_alone_is_its_ref_kl(name: str) -> None:
    sample, _ = SAMPLES[name]
    found = outcome(sample, lambda s: loss_fn(s, alpha_sdpo=1.0, adv_tau=0.0))
    check({**found, "metrics": {}}, {**GOLDEN["ref_kl"][name], "metrics": {}}, exactly=False)
    golden = GOLDEN["ref_kl"][name]["metrics"]["ref_kl"]
    assert found["metrics"]["sdpo/ref_kl"] == pytest.approx(golden, rel=1e-6, abs=1e-12)


def test_the_golden_cases_are_what_their_names_say() -> None:
    at, settings = SAMPLES["at both thresholds"]
    moved = torch.exp(at.trainer_logprobs) - torch.exp(at.inference_logprobs)
    assert (moved == settings["dppo_mask_high"]).any() and (moved == -settings["dppo_mask_low"]).any()
    golden = {name: GOLDEN["default"][name]["metrics"] for name in GOLDEN["default"]}
    assert golden["at both thresholds"]["is_masked"] == 0 < golden["just inside them"]["is_masked"]
    assert golden["A = 0"]["is_masked"] > 0 == golden["A = 0"]["is_masked_low"], "A = 0 takes the low branch, uncounted"
    assert GOLDEN["default"]["empty mask"]["loss"] == [0]


def test_channels_add_up() -> None:
    sample = drawn(3)
    both = loss_fn(sample, alpha_sdpo=0.25).loss
    channel = loss_fn(sample, alpha_sdpo=1.0, adv_tau=0.0, kl_tau=0.0).loss
    assert torch.allclose(both, loss_fn(sample).loss + 0.25 * channel, rtol=1e-5)


def test_the_distillation_moves_the_policy_to_the_reference() -> None:
    """Its gradient over all tokens a state has is that of KL(π ‖ π_ref)."""
    logits = torch.randn(5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    reference = torch.randn(5, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    logps = logits.log_softmax(-1)
    old = logps.detach()
    sample = Sample(logps, old, reference, torch.zeros(5), torch.ones(5, dtype=torch.bool), old.exp())
    loss_fn(sample, alpha_sdpo=1.0, kl_tau=0.0).loss.backward()
    mine, logits.grad = logits.grad, None
    (logits.log_softmax(-1).exp() * (logits.log_softmax(-1) - reference)).sum().backward()
    assert mine is not None and logits.grad is not None
    assert torch.allclose(mine, logits.grad, atol=1e-6)


def test_alpha_without_a_reference_says_which_algorithm_has_one() -> None:
    with pytest.raises(ValueError, match=r"needs ref_logprobs, and this batch has none.*opsd"):
        loss_fn(SAMPLES["no reference"][0], alpha_sdpo=0.1)


def test_zeros_that_upstream_packs_for_a_missing_reference_are_no_reference() -> None:
    """As a target they are probability 1 for every token."""
    sample = drawn(0)
    filled = Sample(**{**vars(sample), "ref_logprobs": torch.zeros_like(sample.trainer_logprobs)})
    with pytest.raises(ValueError, match=r"each of this sample's ref_logprobs is 0.*probability 1"):
        loss_fn(filled, alpha_sdpo=0.1)
    empty = Sample(**{**vars(filled), "loss_mask": torch.zeros_like(sample.loss_mask)})
    assert loss_fn(empty, alpha_sdpo=0.1).loss == 0 and torch.isfinite(loss_fn(filled).loss)


@pytest.mark.parametrize("garbage", [-torch.inf, torch.nan])
def test_what_a_reference_says_of_masked_tokens_does_not_matter(garbage: float) -> None:
    sample = drawn(0)
    assert sample.ref_logprobs is not None and not sample.loss_mask.all()
    dirty = torch.where(sample.loss_mask, sample.ref_logprobs, garbage)
    clean, other = (loss_fn(s, alpha_sdpo=0.1) for s in (sample, Sample(**{**vars(sample), "ref_logprobs": dirty})))
    assert torch.equal(clean.loss, other.loss)
    assert torch.equal(clean.metrics["sdpo/ref_kl"], other.metrics["sdpo/ref_kl"])


def test_inputs_of_the_notes_days_will_do() -> None:
    """Before 2026-06 PRIME-RL had no loss_weights, and teacher_logprobs for ref_logprobs."""
    sample = drawn(0)
    old = {name: v for name, v in vars(sample).items() if name not in ("loss_weights", "ref_logprobs")}
    assert torch.equal(loss_fn(types.SimpleNamespace(**old)).loss, loss_fn(sample).loss)  # type: ignore[arg-type]
    named = types.SimpleNamespace(**old, teacher_logprobs=sample.ref_logprobs)
    assert torch.equal(loss_fn(named, alpha_sdpo=0.1).loss, loss_fn(sample, alpha_sdpo=0.1).loss)  # type: ignore[arg-type]


def test_a_sample_of_no_tokens_is_0() -> None:
    empty = Sample(**{name: None if v is None else v[:0] for name, v in vars(drawn(0)).items()})
    assert loss_fn(empty).loss == 0 == loss_fn(empty, alpha_sdpo=0.1).loss


def test_pairs_are_said_to_do_nothing() -> None:
    with pytest.warns(UserWarning, match="beta_dpo = 0.1 does nothing in PRIME-RL"):
        found = loss_fn(drawn(0), beta_dpo=0.1).loss
    assert torch.equal(found, loss_fn(drawn(0)).loss)


def test_what_does_not_fit_is_refused() -> None:
    sample = drawn(0)
    with pytest.raises(ValueError, match=r"advantages has shape \(1, 48\).*one sample"):
        loss_fn(Sample(**{**vars(sample), "advantages": sample.advantages[None]}))
    with pytest.raises(ValueError, match="Pass one sample"):
        loss_fn(Sample(**{k: None if v is None else v[None] for k, v in vars(sample).items()}))
    with pytest.raises(ValueError, match=r"loss_mask is torch.float32"):
        loss_fn(Sample(**{**vars(sample), "loss_mask": sample.loss_mask.float()}))
    with pytest.raises(ValueError, match=r"dppo_mask_low = -0.1, kl_tau = nan: must be at least 0"):
        loss_fn(sample, dppo_mask_low=-0.1, kl_tau=float("nan"))


def config_of_the_page() -> dict[str, Any]:
    page = (ROOT / "docs" / "backends.md").read_text()
    return tomllib.loads(page.partition("```toml\n")[2].partition("```")[0])


def test_the_config_of_the_page_names_this_function_and_its_settings() -> None:
    loss = config_of_the_page()["trainer"]["loss"]
    module, _, name = loss["import_path"].rpartition(".")
    assert getattr(__import__(module, fromlist=[name]), name) is loss_fn and loss["type"] == "custom"
    loss_fn(drawn(0), **loss["kwargs"])


@pytest.mark.slow
def test_it_needs_torch_and_nothing_else() -> None:
    heavy = "{'transformers', 'trl', 'prime_rl'}"
    code = f"import sys; import inner.extras.prime_rl; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


# ---------------------------------------------------------------------- the real one


@pytest.fixture(scope="module")
def upstream() -> Iterator[Any]:
    if find_spec("prime_rl") is None:
        pytest.skip("prime-rl is not installed: docs/backends.md")
    import_module("inner.worlds.toolworld")  # before the stub: accelerate asks for wandb's spec, and a stub has none
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("wandb") is None:
            patch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
        yield import_module("prime_rl.trainer.rl.loss")


@pytest.mark.parametrize("name", SAMPLES)
def test_it_is_upstreams_bit_for_bit_through_its_own_config(upstream: Any, name: str) -> None:
    from prime_rl.configs.trainer import CustomLossConfig, DefaultLossConfig  # pyright: ignore

    sample, settings = SAMPLES[name]
    custom = {**config_of_the_page()["trainer"]["loss"], "kwargs": settings}
    ours, theirs = (upstream.setup_rl_loss_fn(c) for c in (CustomLossConfig(**custom), DefaultLossConfig(**settings)))
    mine, expected = (outcome(sample, lambda s, f=f: f(upstream.LossInputs(**vars(s)))) for f in (ours, theirs))
    assert mine == expected


def test_a_packed_batch_goes_through_upstreams_compute_loss(upstream: Any) -> None:
    from prime_rl.configs.trainer import CustomLossConfig, DefaultLossConfig  # pyright: ignore

    parts = [drawn(seed, 20) for seed in range(3)]
    kwargs: dict[str, Any] = {
        name: [getattr(p, name) for p in parts]
        for name in ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_mask")
    }
    kwargs |= {
        "rl_weights": None,
        "ce_weights": None,
        "ref_kl_weights": None,
        "rl_scale": 48,
        "ce_scale": 1,
        "ref_kl_scale": 1,
    }
    config = config_of_the_page()["trainer"]["loss"]
    losses = [
        upstream.compute_loss(rl_loss_fn=upstream.setup_rl_loss_fn(c), **kwargs)[0]
        for c in (CustomLossConfig(**{**config, "kwargs": {}}), DefaultLossConfig())
    ]
    assert torch.equal(*losses)


def test_no_custom_loss_is_called_for_samples_of_opsd(upstream: Any) -> None:
    """Why alpha_sdpo wants an algorithm of its own: upstream routes samples with a reference to its fixed ref_kl."""
    seen = list[Any]()

    def spy(inputs: Any) -> Any:
        seen.append(inputs.ref_logprobs)
        return loss_fn(inputs)

    one, zero = torch.ones(20), torch.zeros(20)
    parts = [drawn(seed, 20) for seed in range(2)]
    names = ("trainer_logprobs", "inference_logprobs", "advantages")
    upstream.compute_loss(
        **{name: [getattr(p, name) for p in parts] for name in names},
        ref_logprobs=[parts[0].ref_logprobs, zero], loss_mask=[one > 0, one > 0], rl_weights=[zero, one],
        ce_weights=None, ref_kl_weights=[one, zero], rl_loss_fn=spy, rl_scale=20, ce_scale=1, ref_kl_scale=20,
    )  # fmt: skip
    assert len(seen) == 1 and torch.equal(seen[0], zero), "the sample of opsd was not given, and the other has zeros"


# ---------------------------------------------------------------------- the example


def example() -> Any:
    spec = spec_from_file_location("on_cpu", ROOT / "examples" / "prime_rl" / "on_cpu.py")
    assert spec is not None and spec.loader is not None
    sys.modules["on_cpu"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def the_table() -> dict[str, Any]:
    return tomllib.loads((ROOT / "examples/prime_rl/trainer.toml").read_text())["trainer"]["loss"]


def test_the_example_divides_as_upstream_does(upstream: Any) -> None:
    """With prime-rl, the example calls its functions; without, it does the same itself, up to the order of a sum."""
    module, samples = example(), [drawn(seed, 20 + seed) for seed in range(3)]
    for sample in samples:
        sample.loss_weights = None
    theirs = module.upstream_loss(the_table())(samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "find_spec", lambda name: None)
        mine = module.loss_of(the_table())(samples)
    assert torch.allclose(mine, theirs, rtol=1e-6) and theirs != 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_says_what_its_page_says() -> None:
    """Of another CPU a sampled token may be another one, so rewards are compared up to a tenth."""
    page = (ROOT / "docs" / "backends.md").read_text()
    command = [sys.executable, "examples/prime_rl/on_cpu.py", "--steps", "4"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, env=env)
    said, told = done.stdout.splitlines(), page.partition("inner.extras.prime_rl.loss_fn, alpha ")[2].splitlines()
    assert said[0].startswith("inner.extras.prime_rl.loss_fn, alpha 0.3; prime-rl's own functions: "), done.stderr
    number = re.compile(r"step +\d+: reward ([\d.]+), loss \+[\d.]+")
    for one, line in zip(said[1:], told[1:5], strict=True):
        found, expected = number.match(one), number.match(line)
        assert found and expected and abs(float(found[1]) - float(expected[1])) <= 0.1, (one, line)
