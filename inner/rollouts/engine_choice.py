"""Give a trainer this project's vLLM engine (engine.py), which is imported only when a trainer makes one.

    with engine_instead(dtype): GRPOTrainer(…) ── use_vllm ──▶ Engine(dtype, …)      else transformers' own generation

Not promised: this engine for a trainer that is made outside the `with`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl.trainer import grpo_trainer

MASKED = "sampling/masked"  # metric: share of sequences ("token_…": of tokens) with importance weight 0


@contextmanager
def engine_instead(dtype: str | None) -> Iterator[None]:
    """Let a GRPOTrainer that is made in this `with`, and uses vLLM, generate with an Engine."""

    def make(**asked: Any) -> Any:
        from inner.rollouts.engine import Engine

        return Engine(dtype=dtype, **asked)

    module: Any = grpo_trainer
    made = module.VLLMGeneration
    module.VLLMGeneration = make
    try:
        yield
    finally:
        module.VLLMGeneration = made
