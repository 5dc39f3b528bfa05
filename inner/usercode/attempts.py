"""Decide which completions of a batch a reward gets in its next call, if earlier calls failed. Pure functions.

    try 1     the whole batch
    try 2 …   the completions without a reward, group by group; the last try: one by one
              after a try in which every call failed: a pause of 1, 4, 16, … 60 s

    plan_attempts() ── Ask(rows) ──▶ caller ── Values | Failure ──▶ plan_attempts() ── … ──▶ Scored

A completion is blamed (decision 065) in three cases. It failed alone in the last try, not by a connection error, and a
later completion got a number. Its value is not a number, while other completions have numbers. Its reward is
an AtMostWorst. If the last try ends with failures, we score a completion with a number again, to test the reward.

Not promised: right values of a reward that compares completions: after a failure it sees only a part of the batch. A
completion is also blamed if, by chance, the reward's machine hangs only for this completion, at every try.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from inner.usercode.deadline import TimedOut

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
HUNG_IN_A_ROW = 3  # if so many single completions hang in a row, the last try ends
LARGEST = 1e18  # largest reward: the variance of larger ones overflows float32
NOTE_CHARS = 160  # characters of an error in a heartbeat's note

Rows = Sequence[int]
Value = float | None


class AtMostWorst(float):
    """A reward that counts, but not above its group's worst, because the completion has broken its judge."""


@dataclass(frozen=True)
class Failure:
    """One call that returned no values."""

    error: BaseException

    @property
    def summary(self) -> str:
        try:
            text = " ".join(f"{type(self.error).__name__}: {self.error}".split())
        except Exception:  # an error's own __str__
            text = f"{type(self.error).__name__}, whose text cannot be read"
        return text if len(text) <= NOTE_CHARS else f"{text[: NOTE_CHARS - 1]}…"


@dataclass(frozen=True)
class Values:
    """The answer of one call: a number or None per completion.   invalid: position -> description of the bad value."""

    values: list[Value]
    invalid: dict[int, str] = field(default_factory=dict[int, str])


@dataclass(frozen=True)
class Ask:
    """A request to call the reward for these completions.   first: it is the first call, for the whole batch."""

    rows: Rows
    first: bool


@dataclass(frozen=True)
class Again:
    """A try is over, and `missing` completions have no reward.   pause_s: seconds before the next try."""

    number: int
    missing: int
    failure: Failure
    pause_s: float


@dataclass(frozen=True)
class Scored:
    """A batch's rewards.   failed: completions without a finite number for which the reward did not return None.
    blamed: completions that broke the reward: they failed, or have an AtMostWorst.
    why: the last failure, or "".   tries: number of tries made."""

    values: list[Value]
    failed: tuple[int, ...]
    why: str
    tries: int
    failure: Failure | None = None
    blamed: tuple[int, ...] = ()


Answer = Values | Failure | None


def plan_attempts(completions: int, group: int, tries: int) -> Generator[Ask | Again, Answer, Scored]:
    """Yield the next call to make. Send the answer to each Ask, and None to each Again. Return the batch's Scored.

    A part that timed out ends its try, because the next part may hang as long. In the next try that part comes last.
    The last try goes on after a time-out, so that a hung completion costs no sibling. HUNG_IN_A_ROW of them end it.
    """
    values: list[Value] = [None] * completions
    invalid: dict[int, str] = {}
    parts: list[Rows] = [range(completions)]
    failure: Failure | None = None
    suspects: list[int] = []
    blamed = set[int]()
    number = 0
    while parts and number < tries:
        number += 1
        failed: list[Rows] = []
        suspects, blamed, hung = [], set[int](), 0
        for at, rows in enumerate(parts):
            answer = yield Ask(rows, number == 1)
            if isinstance(answer, Values):
                _record_values(rows, answer, values, invalid)
                hung = 0
                if _has_number(answer.values):
                    blamed |= set(suspects)
                    suspects = []
                continue
            assert answer is not None
            failure = answer
            failed.append(rows)
            from inner.connections import is_connection_error  # imported only after a failure

            suspects += rows if len(rows) == 1 and not is_connection_error(answer.error) else ()
            if isinstance(answer.error, TimedOut):
                hung += 1
                if number < tries or hung == HUNG_IN_A_ROW:
                    failed = [*parts[at + 1 :], *failed]
                    break
        if failed and number < tries:
            pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 4 ** (number - 1)) if len(failed) == len(parts) else 0.0
            assert failure is not None
            yield Again(number, sum(map(len, failed)), failure, pause)
        size = 1 if number + 1 == tries else group
        parts = [rows[i : i + size] for rows in failed for i in range(0, len(rows), size)]
    if suspects and _has_number(values):
        answer = yield Ask([next(row for row, value in enumerate(values) if value is not None)], False)
        blamed |= set(suspects) if isinstance(answer, Values) and _has_number(answer.values) else set()
    missing = [row for rows in parts for row in rows]
    why = failure.summary if failure else next(iter(invalid.values()), "")
    blamed |= {row for row, value in enumerate(values) if isinstance(value, AtMostWorst)}
    blamed |= set(invalid if _has_number(values) else ())
    return Scored(values, tuple(sorted([*missing, *invalid])), why, number, failure, tuple(sorted(blamed)))


def _has_number(values: Sequence[Value]) -> bool:
    return any(value is not None for value in values)


def _record_values(rows: Rows, answer: Values, values: list[Value], invalid: dict[int, str]) -> None:
    for at, row in enumerate(rows):
        values[row] = answer.values[at]
        if at in answer.invalid:
            invalid[row] = answer.invalid[at]


def read_values(answer: Any, expected: int) -> Values:
    """Return the values of a reward's answer, one per completion.   Raises ValueError for any other answer."""
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    if not isinstance(answer, list | tuple):
        raise ValueError(f"returned a {type(answer).__name__}. Return a list with one number per completion")
    if len(answer) != expected:
        raise ValueError(f"returned {len(answer)} values for {expected} completions. Return one number each")
    plain = [v.item() if hasattr(v, "item") and prod(getattr(v, "shape", ())) == 1 else v for v in answer]
    valid = [v is None or (isinstance(v, int | float) and abs(v) <= LARGEST) for v in plain]
    invalid = {i: f"returned {value!r}" for i, value in enumerate(plain) if not valid[i]}
    return Values([None if i in invalid else value for i, value in enumerate(plain)], invalid)


def rows_of(columns: Mapping[str, Any], rows: Rows, completions: int) -> dict[str, Any]:
    """Select completions in TRL's keyword arguments: lists with one entry per completion are cut, other values stay."""
    per_completion = {n for n, value in columns.items() if isinstance(value, list) and len(value) == completions}
    return {n: [value[i] for i in rows] if n in per_completion else value for n, value in columns.items()}
