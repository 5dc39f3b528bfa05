"""Positions that are counted from a row's first token, for models whose positions are absolute.

    ids        ·  ·  a  b  c        left padding, as TRL has it
    without    0  1  2  3  4        another policy than the one that generated: GPT-2's log-probs are .75 nats off
    with       0  0  0  1  2        as `generate` counts them

TRL's losses pass no positions.  Rotary ones are relative, so such a model is left alone, and keeps TRL's bits.

Not promised: a table of positions that is neither an nn.Embedding of the model's length nor called so.
"""

import inspect
from typing import Any

from torch import Tensor, nn

from inner.errors import InnerError
from inner.models.causal_lm import causal_lm

SPARE = 8  # rows that a table may have beyond the longest input: OPT's has 2


def number_positions(model: Any) -> None:
    """Give every forward of the backbone its positions, where they are absolute.  Raises InnerError if it takes none.

    A second call changes nothing."""
    backbone = causal_lm(model).base_model
    if not has_absolute_positions(model):
        return
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        raise InnerError(
            f"inner.model is a {type(causal_lm(model)).__name__}, whose positions are absolute and cannot be passed. "
            "Prompts of different lengths are padded on the left, so it would be trained on shifted positions. "
            "Take a model with rotary positions, or one that takes position_ids."
        )
    if _add_positions not in backbone._forward_pre_hooks.values():
        backbone.register_forward_pre_hook(_add_positions, with_kwargs=True)


def has_absolute_positions(model: Any) -> bool:
    """Whether a row's numbers depend on where it begins."""
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
    if mask_B_T.shape != ids.shape:  # a cache holds the tokens before; its owner counts by itself
        return None
    counted = (mask_B_T.long().cumsum(dim=-1) - 1).clamp(min=0)
    return given, {**named, "position_ids": counted}
