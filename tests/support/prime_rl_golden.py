"""Numbers of PRIME-RL's own losses, for machines that do not have it: tests/data/prime_rl_golden.json.

    python -m tests.support.prime_rl_golden        with prime_rl importable; its wandb may be missing

The numbers in the repository were made from commit 559b44772e471d1538537b8805cc77f3824a5e64 (0.8.0, 2026-08-21), its
packages/prime-rl-configs, and torch 2.13 on a CPU: inputs, losses, gradients and metrics as fp32 bits.  No line of
PRIME-RL is here.

Not promised: the last bit of exp on another kind of CPU; `probe` says whether this one gives the same.
"""

import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

PATH = Path(__file__).parents[1] / "data" / "prime_rl_golden.json"
COMMIT = "559b44772e471d1538537b8805cc77f3824a5e64"


@dataclass
class Sample:
    """Has the names of PRIME-RL's LossInputs."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


def samples() -> dict[str, tuple[Sample, dict[str, float]]]:
    """Name -> a sample, and the settings of the default loss."""
    found: dict[str, tuple[Sample, dict[str, float]]] = {}
    for seed, settings in enumerate(
        ({}, {"adv_tau": 0.5, "kl_tau": 0.1}, {"dppo_mask_high": 0.05, "dppo_mask_low": 0.0})
    ):
        found[f"drawn {seed}"] = drawn(seed), settings
    weighted = drawn(7)
    weighted.loss_weights = torch.tensor([0.0, 0.5, 2.0, 1.0] * 12)
    found["weights"] = weighted, {}
    zero = drawn(8)
    zero.advantages = torch.zeros(48)
    found["A = 0"] = zero, {"dppo_mask_low": 0.01}
    empty = drawn(9)
    empty.loss_mask = torch.zeros(48, dtype=torch.bool)
    found["empty mask"] = empty, {}
    no_reference = drawn(10)
    no_reference.ref_logprobs = None
    found["no reference"] = no_reference, {}
    at = drawn(11)
    moved = torch.exp(at.trainer_logprobs) - torch.exp(at.inference_logprobs)
    high, low = float(moved.max()), float(-moved.min())
    found["at both thresholds"] = at, {"dppo_mask_high": high, "dppo_mask_low": low}
    found["just inside them"] = at, {"dppo_mask_high": below(high), "dppo_mask_low": below(low)}
    far = drawn(12)
    far.trainer_logprobs[:4], far.inference_logprobs[:4] = (
        torch.tensor([0.0, -80.0, -0.0, -100.0]),
        torch.tensor([-30.0, -1.0, 0.0, -100.0]),
    )
    found["far apart"] = far, {}
    found["one token"] = Sample(*(t[:1] for t in (at.trainer_logprobs, at.inference_logprobs, at.inference_logprobs)),
                                advantages=torch.ones(1), loss_mask=torch.ones(1, dtype=torch.bool)), {}  # fmt: skip
    return found


def drawn(seed: int, tokens: int = 48) -> Sample:
    rng = np.random.default_rng(seed)
    trainer = np.log(rng.uniform(0.02, 0.98, tokens)).astype(np.float32)
    other = np.clip(np.exp(trainer) + rng.normal(0, 0.2, tokens), 0.01, 0.99)
    reference = np.clip(np.exp(trainer) + rng.normal(0, 0.2, tokens), 0.01, 0.99)
    return Sample(
        torch.from_numpy(trainer), torch.from_numpy(np.log(other).astype(np.float32)),
        torch.from_numpy(np.log(reference).astype(np.float32)),
        torch.from_numpy(rng.normal(size=tokens).astype(np.float32)), torch.from_numpy(rng.uniform(size=tokens) < 0.8),
    )  # fmt: skip


def below(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(0)))


def bits(tensor: Tensor) -> list[int]:
    return tensor.detach().float().reshape(-1).contiguous().view(torch.int32).tolist()


def outcome(sample: Sample, loss: Any) -> dict[str, Any]:
    """loss(sample) -> loss and gradient, as bits; metrics as numbers."""
    sample = Sample(**{**vars(sample), "trainer_logprobs": sample.trainer_logprobs.clone().requires_grad_()})
    found = loss(sample)
    found.loss.backward()
    assert sample.trainer_logprobs.grad is not None
    metrics = {name: float(value.detach()) for name, value in found.metrics.items()}
    return {"loss": bits(found.loss), "gradient": bits(sample.trainer_logprobs.grad), "metrics": metrics}


def probe() -> list[int]:
    """exp of the samples' log-probabilities, on this CPU."""
    return bits(torch.exp(torch.cat([sample.trainer_logprobs for sample, _ in samples().values()])))


def main() -> None:
    sys.modules.setdefault("wandb", types.ModuleType("wandb"))
    from prime_rl.configs.trainer import DefaultLossConfig  # pyright: ignore
    from prime_rl.trainer.rl.loss import LossInputs, default_loss_fn, ref_kl_loss_fn  # pyright: ignore

    made: dict[str, Any] = {"commit": COMMIT, "probe": probe(), "default": {}, "ref_kl": {}}
    for name, (sample, settings) in samples().items():
        made["default"][name] = outcome(
            sample, lambda s, c=settings: default_loss_fn(LossInputs(**vars(s)), DefaultLossConfig(**c))
        )
        if sample.ref_logprobs is not None:
            made["ref_kl"][name] = outcome(sample, lambda s: ref_kl_loss_fn(LossInputs(**vars(s))))
    PATH.write_text(json.dumps(made, separators=(",", ":")) + "\n")
    print(f"{PATH}: {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
