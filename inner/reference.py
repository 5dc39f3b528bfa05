"""The pairs of the replay channel as token ids, what θ₀ thought of them, and whose turn it is.

    pair   state_messages (+ tools) │ chosen      ──chat template──▶   prompt ids │ chosen ids
                                    │ rejected                         prompt ids │ rejected ids

    reference   log π_θ₀(chosen), log π_θ₀(rejected), summed: one pass without gradient over all pairs, when the trainer
                is built, in every life; the model is the run's θ₀ then, on every replica. With a fresh adapter (LoRA)
                that is the base model.
    order       pairs P·m … P·m + P - 1 of an endless permutation, for micro-batch number m: a function of the data
                seed (which is of the run and the slot) and m

`chosen` is somebody else's text. The tokens with which this model's template begins and ends turns must not stand in
it: the tokenizer would read them as such, and the student would learn to write the user's turn as well.

Not promised: pairs that fit into memory however long they are; the batch is as wide as its longest pair.
"""

import json
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inner.channels import backbone_states, evaluating, padded, response_logprobs
from inner.errors import InnerError
from inner.order import prompt_order
from inner.replay.actions import action_message
from inner.replay.pairs import DPOPair, checked_pair, training_pairs
from inner.spans import context_and_action

PAIRS = 2**65  # keeps the order of the pairs apart from that of the prompts


@dataclass(frozen=True)
class PairIds:
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    weight: float

    @property
    def rows(self) -> tuple[list[int], list[int]]:
        return self.prompt + self.chosen, self.prompt + self.rejected


class ReplayPairs:
    """What the replay channel learns from. reference: measure θ₀ on all of them now."""

    def __init__(
        self, pairs: Sequence[DPOPair] | str | Path, render: Callable[..., list[int]], tokenizer: Any, limit: int | None
    ) -> None:
        found = training_pairs(pairs) if isinstance(pairs, str | Path) else _checked(pairs)
        marks = turn_marks(render, tokenizer)
        self.pairs = [encoded(pair, render, tokenizer, limit, marks) for pair in found]
        self.reference_N_2: Tensor | None = None

    def order(self, seed: int) -> Callable[[int], int]:
        return prompt_order(len(self.pairs), PAIRS + seed)

    def measure(self, model: nn.Module, at_once: int, device: torch.device) -> None:
        """The reference: this model, as it is now."""
        parts = []
        with torch.no_grad(), evaluating(model):
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
    states = backbone_states(model, *padded(rows, device))
    sums = response_logprobs(model, states if tap is None else tap(states), prompts, rows)
    lengths = [len(row) - prompt for row, prompt in zip(rows, prompts, strict=True)]
    return sums, torch.tensor(lengths, dtype=sums.dtype, device=sums.device)


def encoded(
    pair: DPOPair, render: Callable[..., list[int]], tokenizer: Any, limit: int | None, marks: Set[str] = frozenset()
) -> PairIds:
    """limit: how many positions the model has. marks: what `chosen` must not contain."""
    if found := _marks_in(pair["chosen"], marks):
        raise InnerError(
            f"pair {pair['state_id']}: chosen contains {found!r}, with which this model's chat template marks turns. "
            "The student would learn to end its turn there and to write another's. Take the pair out."
        )
    (prompt, chosen), (_, rejected) = (
        context_and_action(pair, pair[side], render, tokenizer) for side in ("chosen", "rejected")
    )
    for side, ids in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected)):
        if not ids:
            raise InnerError(f"pair {pair['state_id']}: {side} has no tokens under the model's chat template.")
    longest = len(prompt) + max(len(chosen), len(rejected))
    if limit is not None and longest > limit:
        raise InnerError(
            f"pair {pair['state_id']} has {longest} tokens, and the model {limit} positions. Take long states out of "
            "the pairs."
        )
    if chosen == rejected:
        raise InnerError(
            f"pair {pair['state_id']}: chosen and rejected are the same tokens to this model's tokenizer, so there is "
            "nothing to prefer. Take the pair out, or use a tokenizer that tells them apart."
        )
    return PairIds(prompt, chosen, rejected, _weight(pair))


def _marks_in(action: str, marks: Set[str]) -> str | None:
    """The first of them in the text, or in a call's arguments once they are read ("\\u003c" is "<")."""
    written = action + json.dumps(action_message(action), ensure_ascii=False)
    return next((mark for mark in sorted(marks) if mark in written), None)


def turn_marks(render: Callable[..., list[int]], tokenizer: Any) -> set[str]:
    """The special tokens that the template writes around plain turns, and those that begin and end a text."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    special = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = (tokenizer.bos_token, tokenizer.eos_token)
    return {special[i] for i in render(talk, False) if i in special} | {end for end in ends if end}


def _weight(pair: DPOPair) -> float:
    weight = pair.get("weight", 1.0)
    if not (isinstance(weight, int | float) and 0 <= weight < float("inf")):
        raise InnerError(f"pair {pair['state_id']} has weight {weight!r}: it must be a number of 0 or more.")
    return float(weight)


def _checked(pairs: Sequence[DPOPair]) -> list[DPOPair]:
    found = []
    for i, pair in enumerate(pairs):
        try:
            found.append(checked_pair(pair))
        except ValueError as error:
            raise InnerError(f"pairs[{i}]: {error}. Mend it, or take it out.") from error
    if not found:
        raise InnerError("pairs is empty, and beta_replay is above 0. Pass pairs, or set beta_replay = 0.")
    return found
