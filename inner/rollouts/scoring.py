"""Score held-out prompts with TRL's generation, tools and rewards, and leave training unchanged.

    rows ──▶ TRL's generation, tools and rewards, in eval mode, one completion each ──▶ {"reward": [.5, 0, NaN, …], …}

    weights        the committed θ, not the live weights, which may have changed since (`committed_weights`)
    randomness     torch, numpy and random are seeded for the call; then their old states are restored, also the user's
    metrics        TRL's evaluation metrics are dropped; training's stay as they are

So a run with evaluation takes the same inner steps, bit for bit, as a run without evaluation.

Not promised: speed.  TRL also computes log-probs of the completions if its settings need them for a loss.
"""

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from inner.channels.teacher import swapped_weights
from inner.channels.terms import eval_mode
from inner.rollouts.toolloop import total_rewards
from inner.settings.inner import Theta
from inner.usercode.apart import own_numbers_kept

if TYPE_CHECKING:
    from inner.rollouts.generation import GenerationTrainer

NEVER = -1  # not a real inner step: an engine at this step loads the weights again


def score_rows(
    trainer: "GenerationTrainer", rows: Sequence[dict[str, Any]], *, greedy: bool, seed: int
) -> dict[str, list[float]]:
    """Return name -> one number per row, NaN if unknown: "reward", the weighted sum, and with several reward functions
    also each function's reward.

    greedy: always take the likeliest token; else sample as training does."""
    with _eval_settings(trainer, greedy=greedy), _seeded(seed), own_numbers_kept():
        by_function = trainer.reward_completions(copy.deepcopy(list(rows)))
    found = {"reward": total_rewards(by_function, trainer.reward_weights).tolist()}
    names: list[str] = trainer.reward_func_names
    if len(names) > 1:
        found |= {name: by_function[:, i].tolist() for i, name in enumerate(names)}
    return found


@contextmanager
def committed_weights(model: nn.Module, theta: Theta | None) -> Iterator[None]:
    """Give the model the committed θ, rounded to its dtype, during a `with`.   theta: None outside a run: no change.

    Copy trainable weights only if they differ from θ. Right after a sync of one fragment they do not differ."""
    if theta is None:
        yield
        return
    parameters = dict(model.named_parameters())
    if all(torch.equal(parameters[name].data, _cast(value, parameters[name])) for name, value in theta()):
        yield
        return
    with swapped_weights(model, {name: _cast(value, parameters[name]).clone() for name, value in theta()}):
        yield


def _cast(value: torch.Tensor, like: nn.Parameter) -> torch.Tensor:
    return value.to(device=like.device, dtype=like.dtype)


@contextmanager
def _eval_settings(trainer: Any, *, greedy: bool) -> Iterator[None]:
    """Set eval mode, one completion per row, and greedy or sampled generation during a `with`."""
    uses_engine = hasattr(trainer, "vllm_generation")  # vLLM has settings of its own
    names = ("num_generations_eval",) if uses_engine else ("num_generations_eval", "generation_config")
    kept = {name: getattr(trainer, name) for name in names}
    try:
        trainer.num_generations_eval = 1
        if greedy and not uses_engine:
            trainer.generation_config = _greedy_config(trainer.generation_config)
        with _fresh_engine(trainer, greedy=greedy), eval_mode(trainer.model):
            yield
    finally:
        for name, value in kept.items():
            setattr(trainer, name, value)
        trainer._metrics["eval"].clear()


def _greedy_config(config: Any) -> Any:
    config = copy.deepcopy(config)
    config.do_sample = False
    config.temperature = config.top_p = config.top_k = config.min_p = None
    return config


@contextmanager
def _fresh_engine(trainer: Any, *, greedy: bool) -> Iterator[None]:
    """Make vLLM load the current weights now, and again before training's next rollout."""
    engine = getattr(trainer, "vllm_generation", None)
    if engine is None:
        yield
        return
    temperature = engine.temperature
    trainer._last_loaded_step = NEVER
    try:
        engine.temperature = 0.0 if greedy else temperature
        yield
    finally:
        engine.temperature = temperature
        trainer._last_loaded_step = NEVER


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed random numbers inside a `with`, and restore the old random states after it."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
