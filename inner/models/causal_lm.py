"""Get the transformers model out of its wrapper.

    PeftModel(LlamaForCausalLM) ──▶ LlamaForCausalLM ◀── LlamaForCausalLM

Not promised: wrappers other than PEFT's.
"""

from typing import Any


def causal_lm(model: Any) -> Any:
    """Return the transformers model inside a PEFT model, or the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
