"""The inner loop: prompts, completions, log-probs, rewards, losses.

    build_inner(config, model_dir, files, seeds) -> InnerLoop      makes a ready loop in one call
        loop = "grpo"         TRL's GRPOTrainer + hint distillation at tool errors    inner/train/grpo.py
        loop = "supervised"   next-token loss on one text or token file               inner/train/supervised.py

`import inner` imports neither torch nor trl: Python loads the module of a name at the first access. You can import a
name whose package is missing. When you use it, an ImportError says what to install.

Not promised: anything about other machines. This package does not know of other replicas.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inner.channels.consensus import ConsensusScore, recorded_answers
    from inner.channels.lessons import Rollout
    from inner.channels.llm_hints import LLMHints
    from inner.channels.process_head import ProcessHead, train_process_head
    from inner.channels.process_reward import ProcessReward, turn_states
    from inner.channels.spans import hinted_spans, span_batch
    from inner.extras.engines.choose import use_engine
    from inner.extras.rollout_check.check import RolloutCheck, check_rollouts
    from inner.losses.divergence import generalized_jsd_loss
    from inner.losses.opd import entropy_aware_opd_loss, eopd_loss
    from inner.losses.preference import dpo_loss, sequence_logprobs, simpo_loss
    from inner.losses.sdpo import sdpo_loss
    from inner.losses.taid import TAIDScheduler, taid_loss
    from inner.replay.ask import Replay, ReplayStopped, replay_trace
    from inner.replay.normalize import (
        DJNormalizer,
        NormalizedDPOPair,
        replay_and_normalize_trace,
        replay_and_normalize_trace_sync,
    )
    from inner.replay.pairs import DPOPair, extract_dpo_pairs, load_pairs, pair_outcomes, reward_pairs, save_pairs
    from inner.replay.states import TraceState, TraceWarning, load_states, save_states
    from inner.replay.teachers import DEFAULT_TEACHERS, Teacher, TeacherAction
    from inner.replay.traces import harbor_states, openhands_states, swe_agent_states, tau_bench_states
    from inner.settings.inner import Files, InnerConfig, InnerError, InnerLoop, Seeds
    from inner.settings.objectives import PO_OBJECTIVES
    from inner.settings.poconfig import make_dr_grpo_config, make_po_config
    from inner.train.build import build_inner, publish_model
    from inner.train.compose import LossParts, build_batch, compose_loss
    from inner.train.supervised import SupervisedLoop
    from inner.train.trainer import ComposerReplicationTrainer
    from inner.usercode.check import check_inner
    from inner.worlds.toolworld import ToolWorld

__all__ = [
    "DEFAULT_TEACHERS", "PO_OBJECTIVES", "ComposerReplicationTrainer", "ConsensusScore", "DJNormalizer", "DPOPair",
    "Files", "InnerConfig", "InnerError", "InnerLoop", "LLMHints", "LossParts", "NormalizedDPOPair", "ProcessHead",
    "ProcessReward", "Replay", "ReplayStopped", "Rollout", "RolloutCheck", "Seeds", "SupervisedLoop", "TAIDScheduler",
    "Teacher", "TeacherAction", "ToolWorld", "TraceState", "TraceWarning", "build_batch", "build_inner", "check_inner",
    "check_rollouts", "compose_loss", "dpo_loss", "entropy_aware_opd_loss", "eopd_loss", "extract_dpo_pairs",
    "generalized_jsd_loss", "harbor_states", "hinted_spans", "load_pairs", "load_states", "make_dr_grpo_config",
    "make_po_config", "openhands_states", "pair_outcomes", "publish_model", "recorded_answers",
    "replay_and_normalize_trace", "replay_and_normalize_trace_sync", "replay_trace", "reward_pairs", "save_pairs",
    "save_states", "sdpo_loss", "sequence_logprobs", "simpo_loss", "span_batch", "swe_agent_states", "taid_loss",
    "tau_bench_states", "train_process_head", "turn_states", "use_engine",
]  # fmt: skip

_NAMES = {  # a module -> the public names that it defines
    "inner.channels.consensus": ("ConsensusScore", "recorded_answers"),
    "inner.channels.lessons": ("Rollout",),
    "inner.channels.llm_hints": ("LLMHints",),
    "inner.channels.process_head": ("ProcessHead", "train_process_head"),
    "inner.channels.process_reward": ("ProcessReward", "turn_states"),
    "inner.channels.spans": ("hinted_spans", "span_batch"),
    "inner.errors": ("InnerError",),
    "inner.extras.engines.choose": ("use_engine",),
    "inner.extras.rollout_check.check": ("RolloutCheck", "check_rollouts"),
    "inner.losses.divergence": ("generalized_jsd_loss",),
    "inner.losses.opd": ("entropy_aware_opd_loss", "eopd_loss"),
    "inner.losses.preference": ("dpo_loss", "sequence_logprobs", "simpo_loss"),
    "inner.losses.sdpo": ("sdpo_loss",),
    "inner.losses.taid": ("TAIDScheduler", "taid_loss"),
    "inner.replay.ask": ("Replay", "ReplayStopped", "replay_trace"),
    "inner.replay.normalize": (
        "DJNormalizer", "NormalizedDPOPair", "replay_and_normalize_trace", "replay_and_normalize_trace_sync",
    ),
    "inner.replay.pairs": ("DPOPair", "extract_dpo_pairs", "load_pairs", "pair_outcomes", "reward_pairs", "save_pairs"),
    "inner.replay.states": ("TraceState", "TraceWarning", "load_states", "save_states"),
    "inner.replay.teachers": ("DEFAULT_TEACHERS", "Teacher", "TeacherAction"),
    "inner.replay.traces": ("harbor_states", "openhands_states", "swe_agent_states", "tau_bench_states"),
    "inner.settings.inner": ("Files", "InnerConfig", "InnerLoop", "Seeds"),
    "inner.settings.objectives": ("PO_OBJECTIVES",),
    "inner.settings.poconfig": ("make_dr_grpo_config", "make_po_config"),
    "inner.train.build": ("build_inner", "publish_model"),
    "inner.train.compose": ("LossParts", "build_batch", "compose_loss"),
    "inner.train.supervised": ("SupervisedLoop",),
    "inner.train.trainer": ("ComposerReplicationTrainer",),
    "inner.usercode.check": ("check_inner",),
    "inner.worlds.toolworld": ("ToolWorld",),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}

_EXTRA = {"httpx": "replay"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'inner' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as missing:
        package = (missing.name or "").split(".")[0]
        if package in ("", "inner"):  # a file of this package is missing: no extra would help
            raise
        return _absent(name, package, _EXTRA.get(package, "train"), missing)
    globals()[name] = value
    return value


def _absent(name: str, package: str, extra: str, cause: ModuleNotFoundError) -> type:
    """Return a class to import and subclass. Its constructor raises an ImportError that says what to install."""

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise ImportError(f"{name} needs {package}: pip install 'serverless-diloco[{extra}]'") from cause

    return type(name, (), {"__init__": refuse, "__module__": _HOME[name]})


def __dir__() -> list[str]:
    return __all__
