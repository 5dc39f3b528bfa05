"""Which completions of a batch to ask a reward for next, when some calls of it fail: a pure decision.

    try 1     the whole batch
    try 2 …   what has no reward yet, group by group; the last try: each completion by itself
              a try that brought nothing at all is followed by a pause of 1, 4, 16, … 60 s

    attempts() ── Ask(rows) ──▶ caller ── Values | Failure ──▶ attempts() ── … ──▶ Scored

Not promised: a reward that compares the completions of a batch with each other. After a failure it sees a part of them.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inner.deadline import TimedOut

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
WORDS = 160  # characters of an error in a heartbeat's note

Rows = Sequence[int]
Value = float | None


@dataclass(frozen=True)
class Failure:
    """One call that gave no values."""

    error: BaseException

    @property
    def words(self) -> str:
        text = " ".join(f"{type(self.error).__name__}: {self.error}".split())
        return text if len(text) <= WORDS else f"{text[: WORDS - 1]}…"


@dataclass(frozen=True)
class Values:
    """One call's answer, a number or None for each completion.   unsound: position -> what stood there instead."""

    values: list[Value]
    unsound: dict[int, str] = field(default_factory=dict[int, str])


@dataclass(frozen=True)
class Ask:
    """Call the reward for these completions.   first: with the whole batch, for the first time."""

    rows: Rows
    first: bool


@dataclass(frozen=True)
class Again:
    """A try is over and these have no reward.   pause_s: seconds before the next try."""

    number: int
    missing: int
    failure: Failure
    pause_s: float


@dataclass(frozen=True)
class Scored:
    """A batch's rewards.   failed: completions without a finite number or a None of the reward's own.
    why: of the last failure, "" for none.   tries: that were made."""

    values: list[Value]
    failed: tuple[int, ...]
    why: str
    tries: int
    failure: Failure | None = None


Answer = Values | Failure | None


def attempts(completions: int, group: int, tries: int) -> Generator[Ask | Again, Answer, Scored]:
    """Whom to ask next.  Send it the answer to each Ask (to Again: None); it returns what came of it.

    A part that was not over in time ends its try, since the next one may hang as long, and goes last in the next.
    """
    values: list[Value] = [None] * completions
    unsound: dict[int, str] = {}
    parts: list[Rows] = [range(completions)]
    failure: Failure | None = None
    number = 0
    while parts and number < tries:
        number += 1
        failed: list[Rows] = []
        for at, rows in enumerate(parts):
            answer = yield Ask(rows, number == 1)
            if isinstance(answer, Values):
                _take(rows, answer, values, unsound)
                continue
            assert answer is not None
            failure = answer
            failed.append(rows)
            if isinstance(answer.error, TimedOut):
                failed = [*parts[at + 1 :], *failed]
                break
        if failed and number < tries:
            pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 4 ** (number - 1)) if len(failed) == len(parts) else 0.0
            assert failure is not None
            yield Again(number, sum(map(len, failed)), failure, pause)
        parts = _split(failed, 1 if number + 1 == tries else group)
    missing = [row for rows in parts for row in rows]
    why = failure.words if failure else next(iter(unsound.values()), "")
    return Scored(values, tuple(sorted([*missing, *unsound])), why, number, failure)


def _take(rows: Rows, answer: Values, values: list[Value], unsound: dict[int, str]) -> None:
    for at, row in enumerate(rows):
        values[row] = answer.values[at]
        if at in answer.unsound:
            unsound[row] = answer.unsound[at]


def _split(parts: Sequence[Rows], size: int) -> list[Rows]:
    return [rows[i : i + size] for rows in parts for i in range(0, len(rows), size)]


def read_values(answer: Any, expected: int) -> Values:
    """What a reward returned, by completion.   Raises ValueError where it is no list of that length."""
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    if not isinstance(answer, list | tuple):
        raise ValueError(f"returned a {type(answer).__name__}, not a list with one number per completion")
    if len(answer) != expected:
        raise ValueError(f"returned {len(answer)} values for {expected} completions")
    plain = [value.item() if hasattr(value, "item") else value for value in answer]
    unsound = {i: f"returned {value!r}" for i, value in enumerate(plain) if not _is_reward(value)}
    return Values([None if i in unsound else value for i, value in enumerate(plain)], unsound)


def _is_reward(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


def rows_of(columns: Mapping[str, Any], rows: Rows, completions: int) -> dict[str, Any]:
    """TRL's keyword arguments for some of the completions: a list with an entry for each is cut, others stay."""
    per_completion = {n for n, value in columns.items() if isinstance(value, list) and len(value) == completions}
    return {n: [value[i] for i in rows] if n in per_completion else value for n, value in columns.items()}
