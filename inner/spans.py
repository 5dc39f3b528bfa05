"""Which tokens of a rollout are which turn, and how a hint is put in front of one of them.

    completion   <call> t3_9 a 4 b 5 </call> <end> <tool> {'error': …} <end> <assistant> giveup <end>
    tool_mask      1     1   1 1 1 1    1      1     0        0         0        0          1     1
                 └──────────── turn 0 ───────────┘└────── its tool result ──────┘└──── turn 1 ────┘

    student      prompt … <assistant>            | turn k
    teacher      prompt … hint … <assistant>     | turn k        the same ids, spliced, never tokenised again

The k-th token of the turn is paired with the k-th token of the turn in the teacher's row, by index. Pure functions.

Not promised: error turns that TRL rolled back because the result did not fit; nobody sees those.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Turn:
    """completion[start:end] is what the model wrote; `error` is what its tool call came back with, if it failed."""

    start: int
    end: int
    error: str | None = None


@dataclass(frozen=True)
class Lesson:
    """One turn to distil: the student's completion[start:end], and the teacher's row that ends with the same ids."""

    start: int
    end: int
    teacher_ids: list[int]


def model_turns(tool_mask: Sequence[int]) -> list[tuple[int, int]]:
    """[(start, end)] of the maximal runs of 1 (tokens that the model wrote)."""
    turns: list[tuple[int, int]] = []
    start: int | None = None
    for i, written in enumerate([*tool_mask, 0]):
        if written and start is None:
            start = i
        elif not written and start is not None:
            turns.append((start, i))
            start = None
    return turns


def error_text(content: object) -> str | None:
    """The message in a tool result of the form {'error': message}, the way TRL reports a failed call; else None."""
    if not (isinstance(content, str) and content.startswith("{'error':")):
        return None
    try:
        return str(ast.literal_eval(content)["error"])
    except (
        ValueError,
        SyntaxError,
        KeyError,
        TypeError,
    ):  # a tool printed something that only looks like it
        return None


def read_turns(tool_mask: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """The k-th run of 1s is the k-th assistant message; the tool messages behind it are its results."""
    results: list[list[str | None]] = []
    for message in messages:
        if message.get("role") == "assistant":
            results.append([])
        elif message.get("role") == "tool" and results:
            results[-1].append(error_text(message.get("content")))
    errors = [next((e for e in found if e is not None), None) for found in results]
    spans = model_turns(tool_mask)
    errors += [None] * (len(spans) - len(errors))
    return [Turn(start, end, error) for (start, end), error in zip(spans, errors, strict=False)]


def splice_hint(context: list[int], hint: list[int], opening: list[int], turn: list[int]) -> list[int]:
    """`context` (which may end with the assistant's `opening`) + hint + opening + turn, as ids."""
    if opening and context[-len(opening) :] == opening:
        context = context[: -len(opening)]
    return context + hint + opening + turn
