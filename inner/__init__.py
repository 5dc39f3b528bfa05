"""The inner loop: prompts, completions, log-probs, rewards, losses.

    build_inner(config, model_dir, files, seeds) -> InnerLoop      the whole room in one call
        loop = "grpo"         TRL's GRPOTrainer + hint distillation at tool errors    inner/grpo.py
        loop = "supervised"   next-token loss on one text or token file               inner/supervised.py

Importing `inner` imports neither torch nor trl: a name is loaded when it is first asked for. A name whose package is
missing can still be imported; using it says what to install.

Not promised: anything about other machines. Nothing in this room knows who else is learning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inner.base import Files, InnerConfig, InnerError, InnerLoop, Seeds
    from inner.build import build_inner, publish_model
    from inner.check import check_inner
    from inner.compose import LossParts, build_batch, compose_loss
    from inner.losses.divergence import generalized_jsd_loss
    from inner.losses.opd import entropy_aware_opd_loss
    from inner.losses.preference import dpo_loss, sequence_logprobs, simpo_loss
    from inner.losses.taid import TAIDScheduler, taid_loss
    from inner.supervised import SupervisedLoop
    from inner.trainer import ComposerReplicationTrainer
    from inner.worlds.toolworld import ToolWorld

__all__ = [
    "ComposerReplicationTrainer",
    "Files",
    "InnerConfig",
    "InnerError",
    "InnerLoop",
    "LossParts",
    "Seeds",
    "SupervisedLoop",
    "TAIDScheduler",
    "ToolWorld",
    "build_batch",
    "build_inner",
    "check_inner",
    "compose_loss",
    "dpo_loss",
    "entropy_aware_opd_loss",
    "generalized_jsd_loss",
    "publish_model",
    "sequence_logprobs",
    "simpo_loss",
    "taid_loss",
]

_HOME = {
    "ComposerReplicationTrainer": "inner.trainer",
    "Files": "inner.base",
    "InnerConfig": "inner.base",
    "InnerError": "inner.base",
    "InnerLoop": "inner.base",
    "LossParts": "inner.compose",
    "Seeds": "inner.base",
    "SupervisedLoop": "inner.supervised",
    "TAIDScheduler": "inner.losses.taid",
    "ToolWorld": "inner.worlds.toolworld",
    "build_batch": "inner.compose",
    "build_inner": "inner.build",
    "check_inner": "inner.check",
    "compose_loss": "inner.compose",
    "dpo_loss": "inner.losses.preference",
    "entropy_aware_opd_loss": "inner.losses.opd",
    "generalized_jsd_loss": "inner.losses.divergence",
    "publish_model": "inner.build",
    "sequence_logprobs": "inner.losses.preference",
    "simpo_loss": "inner.losses.preference",
    "taid_loss": "inner.losses.taid",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'inner' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as missing:
        package = (missing.name or "").split(".")[0]
        if package in ("", "inner"):  # one of our own files is gone: that is not a missing extra
            raise
        return _absent(name, package, missing)
    globals()[name] = value
    return value


def _absent(name: str, package: str, cause: ModuleNotFoundError) -> type:
    """A stand-in that can be imported and subclassed, and says what to install when it is used."""

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise ImportError(f"{name} needs {package}: pip install 'serverless-diloco[train]'") from cause

    return type(name, (), {"__init__": refuse, "__module__": _HOME[name]})


def __dir__() -> list[str]:
    return __all__
