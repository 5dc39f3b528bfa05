"""Score held-out prompts with the machinery that makes rollouts, and leave training as it was.

    rows ──▶ TRL's generation, tools and rewards, in eval mode, one completion each ──▶ {"reward": [.5, 0, NaN, …], …}

    weights        θ as committed, not the live weights, which may have moved since (`committed_weights`)
    randomness     torch, numpy and random are seeded by the caller and put back afterwards
    numbers        TRL's metrics of evaluation are thrown away; nothing of training's is touched

So a run with evaluation takes the same inner steps, bit for bit, as one without.

Not promised: speed.  TRL computes log-probs of the completions where its settings need them for a loss.
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

if TYPE_CHECKING:
    from inner.rollouts.generation import GenerationTrainer

NEVER = -1  # no inner step: an engine whose weights are of this one fetches them anew


def score_rows(
    trainer: "GenerationTrainer", rows: Sequence[dict[str, Any]], *, greedy: bool, seed: int
) -> dict[str, list[float]]:
    """-> name -> a number per row, NaN where none is known: "reward", the weighted sum, and each reward function's
    where there are several.

    greedy: take the likeliest token each time; else sample as training does."""
    with _eval_settings(trainer, greedy=greedy), _seeded(seed):
        by_function = trainer.reward_completions(copy.deepcopy(list(rows)))
    found = {"reward": total_rewards(by_function, trainer.reward_weights)}
    names: list[str] = trainer.reward_func_names
    if len(names) > 1:
        found |= {name: by_function[:, i].tolist() for i, name in enumerate(names)}
    return found


@contextmanager
def committed_weights(model: nn.Module, theta: Theta | None) -> Iterator[None]:
    """The model with θ as committed, rounded to its dtype.   theta: None for a model that is part of no run.

    A copy of the trainable weights is made only where they differ: right after a sync of one fragment they do not."""
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
    """Eval mode, one completion per row, and sampling or not."""
    uses_engine = hasattr(trainer, "vllm_generation")  # which has its own settings, and no generation_config
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
    """Make vLLM fetch the present weights, and again before the next rollout of training."""
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
    """Random numbers from `seed` inside; those of outside go on where they were."""
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
