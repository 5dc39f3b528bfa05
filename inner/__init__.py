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
    from inner.replay.pairs import DPOPair, extract_dpo_pairs, load_pairs, pair_outcomes, save_pairs
    from inner.replay.states import TraceState, TraceWarning, load_states, save_states
    from inner.replay.teachers import DEFAULT_TEACHERS, Teacher, TeacherAction
    from inner.replay.traces import openhands_states, swe_agent_states, tau_bench_states
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
    "DEFAULT_TEACHERS",
    "PO_OBJECTIVES",
    "ComposerReplicationTrainer",
    "ConsensusScore",
    "DJNormalizer",
    "DPOPair",
    "Files",
    "InnerConfig",
    "InnerError",
    "InnerLoop",
    "LLMHints",
    "LossParts",
    "NormalizedDPOPair",
    "ProcessHead",
    "ProcessReward",
    "Replay",
    "ReplayStopped",
    "Rollout",
    "RolloutCheck",
    "Seeds",
    "SupervisedLoop",
    "TAIDScheduler",
    "Teacher",
    "TeacherAction",
    "ToolWorld",
    "TraceState",
    "TraceWarning",
    "build_batch",
    "build_inner",
    "check_inner",
    "check_rollouts",
    "compose_loss",
    "dpo_loss",
    "entropy_aware_opd_loss",
    "eopd_loss",
    "extract_dpo_pairs",
    "generalized_jsd_loss",
    "hinted_spans",
    "load_pairs",
    "load_states",
    "make_dr_grpo_config",
    "make_po_config",
    "openhands_states",
    "pair_outcomes",
    "publish_model",
    "recorded_answers",
    "replay_and_normalize_trace",
    "replay_and_normalize_trace_sync",
    "replay_trace",
    "save_pairs",
    "save_states",
    "sdpo_loss",
    "sequence_logprobs",
    "simpo_loss",
    "span_batch",
    "swe_agent_states",
    "taid_loss",
    "tau_bench_states",
    "train_process_head",
    "turn_states",
]

_HOME = {
    "DEFAULT_TEACHERS": "inner.replay.teachers",
    "PO_OBJECTIVES": "inner.settings.objectives",
    "ComposerReplicationTrainer": "inner.train.trainer",
    "DJNormalizer": "inner.replay.normalize",
    "DPOPair": "inner.replay.pairs",
    "Files": "inner.settings.inner",
    "InnerConfig": "inner.settings.inner",
    "InnerError": "inner.errors",
    "InnerLoop": "inner.settings.inner",
    "LLMHints": "inner.channels.llm_hints",
    "LossParts": "inner.train.compose",
    "NormalizedDPOPair": "inner.replay.normalize",
    "Replay": "inner.replay.ask",
    "ReplayStopped": "inner.replay.ask",
    "Seeds": "inner.settings.inner",
    "SupervisedLoop": "inner.train.supervised",
    "TAIDScheduler": "inner.losses.taid",
    "Teacher": "inner.replay.teachers",
    "TeacherAction": "inner.replay.teachers",
    "ToolWorld": "inner.worlds.toolworld",
    "TraceState": "inner.replay.states",
    "TraceWarning": "inner.replay.states",
    "build_batch": "inner.train.compose",
    "build_inner": "inner.train.build",
    "check_inner": "inner.usercode.check",
    "compose_loss": "inner.train.compose",
    "dpo_loss": "inner.losses.preference",
    "entropy_aware_opd_loss": "inner.losses.opd",
    "eopd_loss": "inner.losses.opd",
    "extract_dpo_pairs": "inner.replay.pairs",
    "generalized_jsd_loss": "inner.losses.divergence",
    "hinted_spans": "inner.channels.spans",
    "load_pairs": "inner.replay.pairs",
    "load_states": "inner.replay.states",
    "make_dr_grpo_config": "inner.settings.poconfig",
    "make_po_config": "inner.settings.poconfig",
    "openhands_states": "inner.replay.traces",
    "pair_outcomes": "inner.replay.pairs",
    "publish_model": "inner.train.build",
    "replay_and_normalize_trace": "inner.replay.normalize",
    "replay_and_normalize_trace_sync": "inner.replay.normalize",
    "replay_trace": "inner.replay.ask",
    "save_pairs": "inner.replay.pairs",
    "save_states": "inner.replay.states",
    "sdpo_loss": "inner.losses.sdpo",
    "sequence_logprobs": "inner.losses.preference",
    "simpo_loss": "inner.losses.preference",
    "RolloutCheck": "inner.extras.rollout_check.check",
    "check_rollouts": "inner.extras.rollout_check.check",
    "ConsensusScore": "inner.channels.consensus",
    "recorded_answers": "inner.channels.consensus",
    "Rollout": "inner.channels.lessons",
    "ProcessReward": "inner.channels.process_reward",
    "turn_states": "inner.channels.process_reward",
    "ProcessHead": "inner.channels.process_head",
    "train_process_head": "inner.channels.process_head",
    "span_batch": "inner.channels.spans",
    "swe_agent_states": "inner.replay.traces",
    "taid_loss": "inner.losses.taid",
    "tau_bench_states": "inner.replay.traces",
}

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
