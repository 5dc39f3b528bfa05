"""Errands: a task with long completions, built from ToolWorld's words, tokenizer and warm start.

    <user> 1 op2 2 op0 … 12 op1 <end>                                       twelve errands, each of one of `kinds` kinds
    <assistant> 1 op2 use t2_5 2 op0 use t0_1 … 12 op1 use t1_7 <end>       four words for each, 49 tokens

    reward    the share of errands with all four words right and in their places

The warm start teaches the form, and any of the `names` names of a kind, all equally likely. RL has to find the right
names from one number for twelve of them. A missing word moves all words after it, so no later errand counts.

Not promised: any claim about language models.
"""

import random
from collections.abc import Sequence
from typing import Any

from inner import ToolWorld

ERRANDS, LONGEST = 12, 64  # errands of a prompt; limit of a completion's tokens
Message = dict[str, Any]


class Errands(ToolWorld):
    """ToolWorld's words for another task."""

    def dialogue(self, rng: random.Random) -> list[Message]:
        kinds = self.drawn(rng)
        answer = " ".join(line(i, kind, self.name(kind, rng.randrange(self.names))) for i, kind in enumerate(kinds, 1))
        return [asked(kinds), {"role": "assistant", "content": answer}]

    def drawn(self, rng: random.Random) -> list[int]:
        return [rng.randrange(self.kinds) for _ in range(ERRANDS)]

    def rows(self, n: int = 2000, seed: int = 0) -> list[dict[str, Any]]:
        """Return `n` rows: prompt (messages), and the lines of the right answer."""
        rng = random.Random(seed)
        return [self._row(self.drawn(rng)) for _ in range(n)]

    def _row(self, kinds: Sequence[int]) -> dict[str, Any]:
        lines = [line(i, kind, self.right_name(kind)) for i, kind in enumerate(kinds, 1)]
        return {"prompt": [asked(kinds)], "lines": lines}


def asked(kinds: Sequence[int]) -> Message:
    return {"role": "user", "content": " ".join(f"{i} op{kind}" for i, kind in enumerate(kinds, 1))}


def line(i: int, kind: int, name: str) -> str:
    return f"{i} op{kind} use {name}"


def errands_done(completions: list[list[Message]], lines: list[list[str]], **columns: Any) -> list[float]:
    """Return each completion's share of right errands."""
    return [share_done(turns[-1]["content"].split(), want) for turns, want in zip(completions, lines, strict=True)]


def share_done(words: Sequence[str], lines: Sequence[str]) -> float:
    return sum(words[4 * i : 4 * i + 4] == one.split() for i, one in enumerate(lines)) / len(lines)
