"""Prepares the replay channel's pairs: their token ids, their log-probs under the start weights θ₀, and their order.

    pair   state_messages (+ tools) │ chosen      ──chat template──▶   prompt ids │ chosen ids
                                    │ rejected                         prompt ids │ rejected ids

    reference   log π_θ₀(chosen), log π_θ₀(rejected), summed over tokens: one pass over all pairs without gradient, when
                a session builds its trainer. At that time the model has the weights θ₀, on every replica. With an
                adapter (LoRA) the reference is the base model.
    order       micro-batch number m takes entries P·m … P·m + P - 1 of an endless permutation: a function of m and the
                data seed (one per run and slot)

`chosen` is the text of another model. `chosen` must not contain tokens with which this model's template begins and ends
turns. The tokenizer would read them as turn marks, and the student would learn to write the user's turn, too.

Templates differ in the messages that they accept: DeepSeek-V3's joins texts with "+" (None as a tool's result is a
TypeError), Gemma's refuses system and tool messages, Cohere's strips a content that may be missing. If the template
cannot write a pair, an error names the pair; with inner.replay.skip_unfit, all replicas leave it out.

Not promised: that an accepted pair looks like this model's own training data; that long pairs fit in memory (a batch is
as wide as its longest pair).
"""

import json
import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inner.channels.terms import backbone_states, eval_mode, pad_rows, response_logprobs
from inner.channels.turn_ids import context_and_actions
from inner.data.order import Share, prompt_order
from inner.errors import InnerError
from inner.models.lora import adapter_off
from inner.replay.actions import action_message
from inner.replay.pairs import DPOPair, checked_pair, training_pairs

log = logging.getLogger(__name__)
SKIP = "Take the pair out, or set inner.replay.skip_unfit = true to leave out all pairs that do not fit."
PAIRS = 2**65  # added to the data seed, so that pairs get another order than prompts


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
    model: Any, pairs: "Sequence[PairIds]", device: torch.device, tap: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return summed log-probs and lengths of the responses, (2P,) each, chosen responses first. Runs one forward.

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


# -------------------------------------------------------------------- token ids


@dataclass(frozen=True)
class PairIds:
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    weight: float

    @property
    def rows(self) -> tuple[list[int], list[int]]:
        return self.prompt + self.chosen, self.prompt + self.rejected


def encode_fitting_pairs(
    pairs: Sequence[DPOPair],
    render: Callable[..., list[int]],
    tokenizer: Any,
    *,
    limit: int | None,
    skip_unfit: bool = False,
) -> list[PairIds]:
    """Encode the pairs that fit this model.   limit: the model's positions.   skip_unfit: leave out the rest.

    render(messages, opened, tools) -> ids.   Raises InnerError for the first pair that does not fit, or if none fits.
    """
    marks = turn_marks(render, tokenizer)
    found = list[PairIds]()
    left_out = list[str]()
    for pair in pairs:
        try:
            found.append(encode_pair(pair, render, tokenizer, limit, marks))
        except InnerError as error:
            if not skip_unfit:
                raise
            left_out.append(str(error))
    if left_out and not found:
        raise InnerError(f"none of the {len(pairs)} pairs fits this model. The first: {left_out[0]}")
    if left_out:
        log.warning("replay: %d of %d pairs are left out. The first: %s", len(left_out), len(pairs), left_out[0])
    return found


def encode_pair(
    pair: DPOPair, render: Callable[..., list[int]], tokenizer: Any, limit: int | None, marks: Set[str] = frozenset()
) -> PairIds:
    """Encode one pair.   limit: how many positions the model has.   marks: strings that `chosen` must not contain."""
    if found := _marks_in(pair["chosen"], marks):
        raise InnerError(
            f"pair {pair['state_id']}: chosen contains {found!r}, with which this model's chat template marks turns. "
            f"The student would learn to end its turn there and to write the next speaker's turn. {SKIP}"
        )
    try:
        prompt, (chosen, rejected) = context_and_actions(pair, [pair["chosen"], pair["rejected"]], render, tokenizer)
    except InnerError as error:
        raise InnerError(f"pair {pair['state_id']}: {error}. {SKIP}") from error
    for side, ids in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected)):
        if not ids:
            raise InnerError(f"pair {pair['state_id']}: {side} has no tokens under the model's chat template. {SKIP}")
    longest = len(prompt) + max(len(chosen), len(rejected))
    if limit is not None and longest > limit:
        raise InnerError(f"pair {pair['state_id']} has {longest} tokens, and the model {limit} positions. {SKIP}")
    if chosen == rejected:
        raise InnerError(
            f"pair {pair['state_id']}: chosen and rejected are the same tokens to this model's tokenizer, so there is "
            "nothing to prefer. Take the pair out, or use a tokenizer that tells them apart."
        )
    return PairIds(prompt, chosen, rejected, _checked_weight(pair))


def _marks_in(action: str, marks: Set[str]) -> str | None:
    """Return the first mark in the text, or in a call's arguments after JSON decoding ("\\u003c" is "<")."""
    written = action + json.dumps(action_message(action), ensure_ascii=False)
    return next((mark for mark in sorted(marks) if mark in written), None)


def turn_marks(render: Callable[..., list[int]], tokenizer: Any) -> set[str]:
    """Return the special tokens that the template writes around plain turns, and bos and eos."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    special = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = (tokenizer.bos_token, tokenizer.eos_token)
    return {special[i] for i in render(talk, False) if i in special} | {end for end in ends if end}


def _checked_weight(pair: DPOPair) -> float:
    weight = pair.get("weight", 1.0)
    if not (isinstance(weight, int | float) and 0 <= weight < float("inf")):
        raise InnerError(f"pair {pair['state_id']} has weight {weight!r}: it must be a number of 0 or more.")
    return float(weight)
