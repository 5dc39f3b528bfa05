"""Decides, purely, which completions of a batch a reward is called for next when some of its calls fail.

    try 1     the whole batch
    try 2 …   the completions without a reward, group by group; the last try: each completion by itself
              a try in which every call failed is followed by a pause of 1, 4, 16, … 60 s

    plan_attempts() ── Ask(rows) ──▶ caller ── Values | Failure ──▶ plan_attempts() ── … ──▶ Scored

A completion is to blame (decision 065) if it fails by itself in a last try in which another one gets a number after it,
and its error is not a connection's; or if its value is not a number, unlike others' of the batch.  A last try that ends
with failures asks for one completion that has a number already: the witness that the reward still answers.

Not promised: a reward that compares the completions of a batch with each other. After a failure it sees a part of them.
If the reward's own machine hangs for one completion alone, at every try, that completion is blamed.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inner.usercode.deadline import TimedOut

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
HUNG_IN_A_ROW = 3  # single completions, before the last try takes the reward itself for hung
LARGEST = 1e18  # of a reward: the variance of a group with larger ones is not a float32
NOTE_CHARS = 160  # characters of an error in a heartbeat's note

Rows = Sequence[int]
Value = float | None


class AtMostWorst(float):
    """A reward that stands, but not above its group's worst: the completion has broken what judges it."""


@dataclass(frozen=True)
class Failure:
    """One call that gave no values."""

    error: BaseException

    @property
    def summary(self) -> str:
        text = " ".join(f"{type(self.error).__name__}: {self.error}".split())
        return text if len(text) <= NOTE_CHARS else f"{text[: NOTE_CHARS - 1]}…"


@dataclass(frozen=True)
class Values:
    """One call's answer, a number or None for each completion.   invalid: position -> the bad value, described."""

    values: list[Value]
    invalid: dict[int, str] = field(default_factory=dict[int, str])


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
    """A batch's rewards.   failed: completions without a finite number and without a None from the reward itself.
    blamed: those that have broken the reward, whether they failed or have an AtMostWorst.
    why: the last failure, "" for none.   tries: the number made."""

    values: list[Value]
    failed: tuple[int, ...]
    why: str
    tries: int
    failure: Failure | None = None
    blamed: tuple[int, ...] = ()


Answer = Values | Failure | None


def _is_connections(error: BaseException) -> bool:
    from inner.connections import is_connection_error

    return is_connection_error(error)


def plan_attempts(completions: int, group: int, tries: int) -> Generator[Ask | Again, Answer, Scored]:
    """Yields the next call to make.  Send it the answer to each Ask (None to Again); it returns the batch's Scored.

    A part that timed out ends its try, since the next part may hang as long.  In the next try that part comes last.
    The last try goes on, so that a completion that hangs the reward costs no sibling, until some in a row have hung.
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
            suspects += rows if len(rows) == 1 and not _is_connections(answer.error) else ()
            if isinstance(answer.error, TimedOut):
                hung += 1
                if number < tries or hung == HUNG_IN_A_ROW:
                    failed = [*parts[at + 1 :], *failed]
                    break
        if failed and number < tries:
            pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 4 ** (number - 1)) if len(failed) == len(parts) else 0.0
            assert failure is not None
            yield Again(number, sum(map(len, failed)), failure, pause)
        parts = _split_parts(failed, 1 if number + 1 == tries else group)
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


def _split_parts(parts: Sequence[Rows], size: int) -> list[Rows]:
    return [rows[i : i + size] for rows in parts for i in range(0, len(rows), size)]


def read_values(answer: Any, expected: int) -> Values:
    """The values that a reward returned, one per completion.   Raises ValueError if it is not a list of that length."""
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    if not isinstance(answer, list | tuple):
        raise ValueError(f"returned a {type(answer).__name__}, not a list with one number per completion")
    if len(answer) != expected:
        raise ValueError(f"returned {len(answer)} values for {expected} completions")
    plain = [value.item() if hasattr(value, "item") else value for value in answer]
    invalid = {i: f"returned {value!r}" for i, value in enumerate(plain) if not is_reward(value)}
    return Values([None if i in invalid else value for i, value in enumerate(plain)], invalid)


def is_reward(value: Any) -> bool:
    """Whether TRL can learn from it: None, or a number whose square is a float32."""
    return value is None or (isinstance(value, int | float) and abs(value) <= LARGEST)


def rows_of(columns: Mapping[str, Any], rows: Rows, completions: int) -> dict[str, Any]:
    """TRL's keyword arguments for some of the completions: a list with an entry for each is cut, others stay."""
    per_completion = {n for n, value in columns.items() if isinstance(value, list) and len(value) == completions}
    return {n: [value[i] for i in rows] if n in per_completion else value for n, value in columns.items()}
