"""The transformers model inside whatever stands around it.

    PeftModel(LlamaForCausalLM) ──▶ LlamaForCausalLM ◀── LlamaForCausalLM

Not promised: wrappers of other kinds than PEFT's.
"""

from typing import Any


def causal_lm(model: Any) -> Any:
    """The transformers model inside a PEFT one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
