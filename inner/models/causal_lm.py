"""Get the transformers model out of its wrapper, and make it generate and count positions as a run needs.

    PeftModel(LlamaForCausalLM) ──▶ LlamaForCausalLM ◀── LlamaForCausalLM

Positions are counted from a row's first token, for models with absolute positions:

    ids        ·  ·  a  b  c        left padding, as in TRL
    without    0  1  2  3  4        not the policy that generated: GPT-2's log-probs are .75 nats off
    with       0  0  0  1  2        as `generate` counts them

TRL's losses pass no positions. Rotary positions are relative, so this module does not change a model with them, and its
results stay TRL's, bit for bit.

Only run.toml says how to sample, both in rollouts and in [eval]:

    start model's generation_config.json    num_beams 4, min_new_tokens 8, epsilon_cutoff .01, eos [2, 7], …
                                            └ dropped ───────────────────────────────────┘   └ kept: eos, pad, bos

`generate` fills each missing field from the model's generation config. So a field that TRL does not set would have the
model's value. The model's files, and an export, keep their config, because engines read it.

Not promised: wrappers other than PEFT's; to recognise a position table that is neither an nn.Embedding of the model's
length nor has a usual name; the same sampling for vLLM, which reads only stop tokens from that config.
"""

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig

from inner.errors import InnerError

SPARE = 8  # extra rows that a position table may have: OPT's has 2


def causal_lm(model: Any) -> Any:
    """Return the transformers model inside a PEFT model, or the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def sample_as_asked(model: Any) -> None:
    """Remove all fields from the model's generation config except its special tokens."""
    inner = causal_lm(model)
    own = inner.generation_config
    inner.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )


def name_parts(model: Any) -> None:
    """Give the model two names that TRL's loss reads: of its backbone (Llama 4) and its number of experts (Granite)."""
    inner = causal_lm(model)
    if inner.base_model is inner and isinstance(getattr(inner, "model", None), nn.Module):
        inner.base_model_prefix = "model"
    config = inner.config.get_text_config()
    if not hasattr(config, "num_experts") and hasattr(config, "num_local_experts"):
        config.num_experts = config.num_local_experts


def number_positions(model: Any) -> None:
    """Pass absolute positions to every forward of the backbone.

    Raises InnerError if the backbone's forward takes no position_ids.
    Does nothing for relative positions, and nothing at a second call."""
    backbone = causal_lm(model).base_model
    if not has_absolute_positions(model):
        return
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        raise InnerError(
            f"inner.model is a {type(causal_lm(model)).__name__}, with absolute positions and no position_ids. "
            "Prompts of different lengths are padded on the left, so it would be trained on shifted positions. "
            "Take a model with rotary positions, or one that takes position_ids."
        )
    if _add_positions not in backbone._forward_pre_hooks.values():
        backbone.register_forward_pre_hook(_add_positions, with_kwargs=True)


def has_absolute_positions(model: Any) -> bool:
    """Whether the model's output depends on where a row begins."""
    inner = causal_lm(model)
    longest = getattr(inner.config.get_text_config(), "max_position_embeddings", None) or 0
    tokens = inner.get_input_embeddings()
    return any(_is_table(m, longest) for m in inner.base_model.modules() if m is not tokens)


def _is_table(module: nn.Module, longest: int) -> bool:
    if type(module).__name__.endswith(("PositionalEmbedding", "PositionEmbedding")):
        return True
    return isinstance(module, nn.Embedding) and 0 < longest <= module.num_embeddings <= longest + SPARE


def _add_positions(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    mask_B_T, ids = named.get("attention_mask"), named.get("input_ids", given[0] if given else None)
    if named.get("position_ids") is not None or not isinstance(mask_B_T, Tensor) or ids is None:
        return None
    if mask_B_T.shape != ids.shape:  # with a cache, `generate` counts positions itself
        return None
    counted = (mask_B_T.long().cumsum(dim=-1) - 1).clamp(min=0)
    return given, {**named, "position_ids": counted}
