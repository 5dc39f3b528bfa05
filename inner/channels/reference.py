"""The replay channel's pairs: their token ids, their log-probs under θ₀, and their order.

    pairs ──pair_ids.py──▶ ids

    reference   log π_θ₀(chosen), log π_θ₀(rejected), summed: one pass over all pairs without gradient, when a session
                builds its trainer. At that time the model has the weights θ₀, on every replica. With an adapter
                (LoRA) the reference is the base model.
    order       micro-batch number m takes entries P·m … P·m + P - 1 of an endless permutation: a function of m and the
                data seed (one per run and slot)

Not promised: that long pairs fit in memory; a batch is as wide as its longest pair.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inner.channels.pair_ids import PairIds, encode_fitting_pairs
from inner.channels.terms import backbone_states, eval_mode, pad_rows, response_logprobs
from inner.data.order import Share, prompt_order
from inner.errors import InnerError
from inner.models.lora import adapter_off
from inner.replay.pairs import DPOPair, checked_pair, training_pairs

PAIRS = 2**65  # salt: pairs get another order than prompts


class ReplayPairs:
    """The pairs of the replay channel.   skip_unfit: leave out pairs that do not fit this model."""

    def __init__(
        self,
        pairs: Sequence[DPOPair] | str | Path,
        render: Callable[..., list[int]],
        tokenizer: Any,
        limit: int | None,
        skip_unfit: bool = False,
    ) -> None:
        found = training_pairs(pairs) if isinstance(pairs, str | Path) else _checked_pairs(pairs)
        self.pairs = encode_fitting_pairs(found, render, tokenizer, limit=limit, skip_unfit=skip_unfit)
        self.reference_N_2: Tensor | None = None

    def pair_order(self, share: Share) -> Callable[[int], int]:
        return prompt_order(len(self.pairs), share.salted(PAIRS))

    def measure_reference(self, model: nn.Module, at_once: int, device: torch.device) -> None:
        """Compute the reference log-probs with this model as it is now, without its adapter."""
        parts = []
        with torch.no_grad(), eval_mode(model), adapter_off(model):
            for first in range(0, len(self.pairs), at_once):
                sums_2P, _ = pair_logprobs(model, self.pairs[first : first + at_once], device)
                parts.append(torch.stack(sums_2P.chunk(2), dim=1).cpu())
        self.reference_N_2 = torch.cat(parts)


def pair_logprobs(
    model: Any, pairs: Sequence[PairIds], device: torch.device, tap: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return summed log-probs and lengths of the responses, (2P,) each, all chosen ones first. One forward.

    tap: a function that the states pass through, before the LM head."""
    rows = [pair.rows[0] for pair in pairs] + [pair.rows[1] for pair in pairs]
    prompts = [len(pair.prompt) for pair in pairs] * 2
    states = backbone_states(model, *pad_rows(rows, device))
    sums = response_logprobs(model, states if tap is None else tap(states), prompts, rows)
    lengths = [len(row) - prompt for row, prompt in zip(rows, prompts, strict=True)]
    return sums, torch.tensor(lengths, dtype=sums.dtype, device=sums.device)


def _checked_pairs(pairs: Sequence[DPOPair]) -> list[DPOPair]:
    found = []
    for i, pair in enumerate(pairs):
        try:
            found.append(checked_pair(pair))
        except ValueError as error:
            raise InnerError(f"pairs[{i}]: {error}. Correct it, or take it out.") from error
    if not found:
        raise InnerError("pairs is empty, and beta_replay is above 0. Pass pairs, or set beta_replay = 0.")
    return found
