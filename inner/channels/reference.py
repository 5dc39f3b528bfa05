"""The pairs of the replay channel: their token ids, their log-probs under θ₀, and their order.

    pairs ──pair_ids.py──▶ ids

    reference   log π_θ₀(chosen), log π_θ₀(rejected), summed: one pass without gradient over all pairs, when the trainer
                is built, in every session; the model is the run's θ₀ then, on every replica. With an adapter (LoRA)
                it is the base model.
    order       pairs P·m … P·m + P - 1 of an endless permutation, for micro-batch number m: a function of the data
                seed (one per run and slot) and m

Not promised: pairs that fit into memory however long they are; the batch is as wide as its longest pair.
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

PAIRS = 2**65  # keeps the order of the pairs apart from that of the prompts


class ReplayPairs:
    """The pairs that the replay channel learns from.   skip_unfit: leave out pairs that this model cannot take."""

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
        """The reference: this model, as it is now, without its adapter."""
        parts = []
        with torch.no_grad(), eval_mode(model), adapter_off(model):
            for first in range(0, len(self.pairs), at_once):
                sums_2P, _ = pair_logprobs(model, self.pairs[first : first + at_once], device)
                parts.append(torch.stack(sums_2P.chunk(2), dim=1).cpu())
        self.reference_N_2 = torch.cat(parts)


def pair_logprobs(
    model: Any, pairs: Sequence[PairIds], device: torch.device, tap: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Summed log-probs and lengths of the responses, each (2P,), all chosen ones first. One forward.

    tap: gets to see the states."""
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
            raise InnerError(f"pairs[{i}]: {error}. Mend it, or take it out.") from error
    if not found:
        raise InnerError("pairs is empty, and beta_replay is above 0. Pass pairs, or set beta_replay = 0.")
    return found
