"""Put a script's rollouts into the log of its run, where `diloco watch`, the report and `diloco replay` find them.

    trainer._logs of TRL's GRPO, RLOO and distillation: prompt, completion, rewards of the newest generation
        ── each outer step ──▶ RolloutSample ──▶ log/{slot}-{generation}/000000.rollouts.jsonl

Other trainers have no rollouts.  Not promised: schemas of a script's tools; rollouts before the newest generation.
"""

import sys
from math import isnan, nan
from typing import TYPE_CHECKING, Any

from diloco.process.session import Session
from diloco.run.config import FleetConfig
from inner.masking import secrets_here
from inner.rollouts.sample import RolloutSample

if TYPE_CHECKING:
    from diloco.outer.managers.manager import StoreManager
    from diloco.outer.ranks.led import Led


def log_rollouts(trainer: Any, manager: "StoreManager | Led", session: Session) -> None:
    """Log a few of this replica's rollouts with each of its offers."""
    if "completion" not in getattr(trainer, "_logs", {}):
        return
    others = manager.rounds.stats

    def stats() -> dict[str, float]:
        session.add_sample(newest_rollouts(trainer, FleetConfig.log_rollouts))
        return others()

    manager.rounds.stats = stats


def newest_rollouts(trainer: Any, most: int) -> dict[str, Any]:
    """Return the object of inner/rollouts/sample.py with at most `most` rollouts; {} before the first generation."""
    logs, count = trainer._logs, len(trainer._logs["completion"])
    names = getattr(trainer, "reward_func_names", [])  # distillation samples rollouts that no function scores
    weighted = list(zip(trainer.reward_weights.tolist(), names, strict=True)) if names else []
    scores = [[w * r for w, name in weighted if not isnan(r := logs["rewards"][name][i])] for i in range(count)]
    rewards = [sum(known) if known else nan for known in scores]
    sample = RolloutSample(seed=trainer.state.global_step)
    sample.add_batch(list(logs["prompt"]), list(logs["completion"]), rewards)
    rollouts = sample.take(most, secrets_here())
    return {"rollouts": rollouts, "tools": {}} if rollouts else {}


def calling_trainer() -> Any:
    """Return the trainer that called this callback. Transformers passes neither the trainer nor other callbacks."""
    frame: Any = sys._getframe(1)
    while frame is not None and not hasattr(frame.f_locals.get("self"), "callback_handler"):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]
