"""The contributors to each outer step, one letter per slot.  Pure functions.

    step      0 1 2 3 4
    r00       f f f f f      f  fresh: listed by this step's own commit      g  the same, its weight lowered by the gate
    r01       f f l . f      l  late: of this step, listed by a later commit
    r02       f f x x f      x  lost: a session trained here, but its work does not count     w  may still be listed
                             .  no session trained here

A session trained in a step if it ran for more than half of the step's time, or was cut off in it.

Not promised: that x is exact, because times of different machines are compared.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from diloco.runlog.reader import Report
from diloco.runlog.sessions import BAD_ENDS, SessionSummary

FRESH, GATED, LATE, LOST, WAITS, ABSENT = "fglxw."
NAMES = {FRESH: "fresh", GATED: "gated", LATE: "late", LOST: "lost"}


def contribution_rows(report: Report, slots: Sequence[str]) -> list[str]:
    """Return one text per outer step that was read, with one letter per slot."""
    column = {slot: i for i, slot in enumerate(slots)}
    rows = [[ABSENT] * len(slots) for _ in report.steps]
    times = [report.began, *(step.at for step in report.steps)]
    first_waiting = _first_that_waits(report)
    first = report.steps[0].t if report.steps else 0
    for session in report.sessions:
        for i in _trained_in(session, times):
            rows[i][column[session.slot]] = WAITS if first + i >= first_waiting else LOST
    for step in report.steps:
        for slot in step.fresh:
            _write(rows, column, step.t - first, slot, GATED if slot in step.gated else FRESH)
        for slot, t in step.carried:
            _write(rows, column, t - first, slot, LATE)
    return ["".join(row) for row in rows]


def _write(rows: list[list[str]], column: Mapping[str, int], i: int, slot: str, letter: str) -> None:
    if 0 <= i < len(rows) and slot in column:
        rows[i][column[slot]] = letter


def _first_that_waits(report: Report) -> int:
    """Return the first step whose unlisted work may still be listed, up to `max_carry` syncs of its fragment later."""
    carry, fragments = report.setting("outer", "max_carry", 2), report.setting("outer", "fragments", 1)
    return report.head if report.done else report.head - carry * fragments


def _trained_in(session: SessionSummary, times: Sequence[float]) -> list[int]:
    """Return the steps in which a session trained.   times: of the run's beginning, and of each commit."""
    joined = session.joined if session.joined is not None else next((at for _, at in session.commits), None)
    if joined is None:
        return []
    ended = session.ended if session.ended is not None else times[-1]
    found = list[int]()
    for t in range(max(0, bisect_right(times, joined) - 1), len(times) - 1):
        start, end = times[t], times[t + 1]
        if start >= ended:
            break
        was_there = min(end, ended) - max(start, joined)
        cut_off = session.how in BAD_ENDS and start < ended <= end
        if cut_off or 2 * was_there > end - start:
            found.append(t)
    return found


def tally(blocks: Sequence[tuple[Sequence[str], Sequence[str]]]) -> dict[str, dict[str, int]]:
    """Count the letters in blocks of (slots, rows). Return slot -> name in NAMES -> count."""
    found = dict[str, dict[str, int]]()
    for slots, rows in blocks:
        for i, slot in enumerate(slots):
            counts = found.setdefault(slot, dict.fromkeys(NAMES.values(), 0))
            for letter, name in NAMES.items():
                counts[name] += sum(row[i] == letter for row in rows)
    return found
