"""Which engine a trainer generates with: vLLM's is ours (engine.py), which is loaded when a trainer makes one.

    with engine_instead(dtype): GRPOTrainer(…) ── use_vllm ──▶ Engine(dtype, …)      else transformers' own generation

Not promised: an engine for a trainer that is made outside of the `with`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl.trainer import grpo_trainer

MASKED = "sampling/masked"  # metric: the share of sequences (modes "token_…": of tokens) whose importance weight is 0


@contextmanager
def engine_instead(dtype: str | None) -> Iterator[None]:
    """A GRPOTrainer that is made in here generates with an Engine, if it is to generate with vLLM."""

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
