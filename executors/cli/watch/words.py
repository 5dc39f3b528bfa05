"""The texts of `diloco watch`, cut to the terminal's width.  Pure functions: no terminal, no bucket.

    Overview, Costs ──▶ header_lines   mine · outer step 40 of 500 · 43 s per step · ETA 5 h 30 min
                    ──▶ row_line       r01-2   modal   H100  train   3/6   4.4/s    2 s  after lost: preempted by Modal
                    ──▶ metric_line    › reward      0.10 ▁▂▃▅▆▇ 0.41
                    ──▶ chart_lines    the chosen metric, some lines high
    troubles        ──▶ trouble_lines  ! no outer step for 6 min … · the next thing to do
    events          ──▶ event_lines    12:03:11 r01-1 lost: preempted by Modal · its supervisor starts it again

A cell that does not fit ends with "…".  No information is in colours only.

Not promised: advice for every event; advice does not repeat the event's own text.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from diloco.events import LAUNCH_ENDS, SHOWN, advice_on
from diloco.runlog.reader import Report
from diloco.runlog.sessions import observed_words, own_words
from diloco.runlog.sparkline import sparkline, squeezed
from diloco.units import dollars, duration
from diloco.views.overview import MetricCurve, Overview, SessionRow
from diloco.views.trouble import PAGE, Trouble
from executors.cli.looking.status import hours_words, usd_words
from executors.supervision.costs import Costs
from executors.supervision.money.bills import unpriced
from executors.supervision.notices.messages import found_room
from rendezvous.agreement.membership import Wanted

UNREAD_S = 10.0  # the age of a heartbeat that was read longer ago is marked with "~"
MOST_EVENTS = 400
TOGETHER_S = 30.0  # equal events of several replicas within this time share a line
LABEL = 9  # columns for a metric's name
BLOCKS = " ▁▂▃▄▅▆▇█"


WIDE_FROM = 120  # columns of a terminal


def cut(text: str, width: int) -> str:
    """Return the text, cut to at most `width` characters."""
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"[:width]


# -------------------------------------------------------------------- header


def header_lines(seen: Overview, spent: Costs, wanted: Wanted, width: int) -> list[str]:
    """Return the two lines of the header, without the last parts if the terminal is too narrow for them."""
    of = f" of {seen.steps}" if seen.steps else ""
    pace = [] if seen.step_s is None else [f"{duration(seen.step_s)} per step"]
    first = [f"outer step {seen.step}{of}", *_state_parts(seen), *pace]
    name = cut(seen.name, max(8, width - len(" · ".join(["", *first]))))
    second = [_clock_part(seen), *_money_parts(spent, wanted), *_snapshot_parts(seen)]
    return [_joined([name, *first], width), _joined([part for part in second if part], width)]


def _state_parts(seen: Overview) -> list[str]:
    if seen.state != "running":
        return [seen.state]
    return [] if seen.eta_s is None else [f"ETA {duration(seen.eta_s)}"]


def _clock_part(seen: Overview) -> str:
    if seen.state == "not begun":
        return "no replica has joined yet"
    verb = {"running": "running for", "done": "took", "stopped": "ran for"}[seen.state]
    return f"{verb} {duration(seen.elapsed_s)}"


def _money_parts(spent: Costs, wanted: Wanted) -> list[str]:
    if not (spent.usd or unpriced(spent) or wanted.max_usd or wanted.max_hours):
        return []
    hours = f", {hours_words(spent, wanted)}" if wanted.max_hours else ""
    unknown = f" and {len(unpriced(spent))} launches of unknown price" if unpriced(spent) else ""
    return [f"{usd_words(spent, wanted)}{unknown}{hours}, {dollars(spent.rate)}/h"]


def _snapshot_parts(seen: Overview) -> list[str]:
    if seen.snapshot is None:
        return []
    age = "" if seen.snapshot_age_s is None else f", {duration(seen.snapshot_age_s)} old"
    return [f"snapshot {seen.snapshot}{age}"]


def _joined(parts: Sequence[str], width: int) -> str:
    kept = list(parts)
    while len(kept) > 1 and len(" · ".join(kept)) > width:
        kept.pop()
    return cut(" · ".join(kept), width)


def phases_words(seen: Overview) -> str:
    """Return the number of slots by the phase of their live session: "60 train, 3 wait, 1 silent"."""
    phases = Counter(row.phase for row in seen.rows if row.is_live and row.is_newest)
    return ", ".join(f"{count} {phase}" for phase, count in phases.most_common())


def freshness_line(read_s: float, trouble: str, width: int) -> str:
    """Return the data's age as a line.   read_s: seconds since the last good look.   trouble: the last error, or ""."""
    if trouble:
        return cut(f"! stale: nothing new for {duration(read_s)}; {trouble}", width)
    return f"read {duration(read_s)} ago"


# -------------------------------------------------------------------- rows


CELLS: Sequence[tuple[str, int, int, Callable[[SessionRow], str]]] = (
    # title, size (see _cell) on a narrow and on a wide terminal, text; the session's end fills the rest of the line
    ("session", 8, 10, lambda row: row.name),
    ("place", 8, 16, lambda row: row.place),
    ("device", 7, 18, lambda row: short_device(row.device)),
    ("phase", 9, 10, lambda row: row.phase),
    ("step", 0, -7, lambda row: "" if row.step is None else str(row.step)),
    ("inner", -6, -8, lambda row: "" if row.inner is None else f"{row.inner}/{row.inner_steps}"),
    ("samp/s", -7, -10, lambda row: "" if row.samples_per_s is None else f"{row.samples_per_s:.3g}"),
    ("counted", 0, -9, lambda row: str(row.counted)),
    ("beat", -8, -10, lambda row: _beat_age(row)),
)


def head_line(width: int) -> str:
    """Return the head line of the table: the names of the cells."""
    titles = "".join(_cell(title, size) for (title, *_), size in zip(CELLS, _sizes(width), strict=True))
    return cut(f"{titles}  last end", width)


def row_line(row: SessionRow, ends: Mapping[str, str], width: int) -> str:
    """Return a session's row.   ends: slot -> the end of the slot's previous session."""
    cells = "".join(_cell(text(row), size) for (*_, text), size in zip(CELLS, _sizes(width), strict=True))
    return cut(f"{cells}  {_end_cell(row, ends)}", width)


def phase_cell(width: int) -> tuple[int, int]:
    """Return the first column of a row's phase, and the column after it."""
    *before, phase = _sizes(width)[:4]
    return sum(before), sum(before) + phase


def _sizes(width: int) -> list[int]:
    return [wide if width >= WIDE_FROM else narrow for _, narrow, wide, _ in CELLS]


def _cell(text: str, size: int) -> str:
    """Return the text as a cell.   size: columns; negative: align right, for a number; 0: not shown."""
    text = cut(text, max(0, abs(size) - 1))
    return text.rjust(-size) if size < 0 else text.ljust(size)


def _beat_age(row: SessionRow) -> str:
    """Return the heartbeat's age as "2 s"; "~40 s" if the heartbeat was not read lately, and may be newer."""
    if row.beat_age_s is None:
        return ""
    age = f"{row.beat_age_s:.0f} s" if row.beat_age_s < 100 else f"{row.beat_age_s / 60:.0f} min"
    age = age if row.beat_age_s < 6000 else f"{row.beat_age_s / 3600:.0f} h"
    return f"~{age}" if row.beat_unread_s > UNREAD_S else age


def _end_cell(row: SessionRow, ends: Mapping[str, str]) -> str:
    if row.is_live:
        return row.note or (f"after {ends[row.slot]}" if row.slot in ends and row.is_newest else "")
    return _end_words(row)


def last_ends(rows: Iterable[SessionRow], shown: Iterable[SessionRow]) -> dict[str, str]:
    """Return slot -> end and reason of the slot's previous session, if that session has no row of its own."""
    newest = {row.slot: row for row in rows if not row.is_newest}
    listed = {row.name for row in shown}
    return {slot: _end_words(row) for slot, row in newest.items() if row.name not in listed}


def _end_words(row: SessionRow) -> str:
    if row.why.startswith(row.end):
        return row.why
    return f"{row.end}: {row.why}" if row.why else row.end


def short_device(name: str) -> str:
    """Return a device's name without its vendor: "NVIDIA H100 80GB HBM3" -> "H100 80GB HBM3"."""
    return name.replace("NVIDIA ", "", 1).replace("AMD ", "", 1).replace("GeForce ", "", 1)


# -------------------------------------------------------------------- curves


def metric_line(curve: MetricCurve, width: int, *, chosen: bool) -> str:
    """Return first value, curve and newest value as "› reward   0.10 ▁▂▃▅ 0.41"."""
    mark = "› " if chosen else "  "
    first, last = (number_words(value) for value in (curve.values[0], curve.values[-1]))
    head = f"{mark}{cut(curve.label, LABEL):{LABEL}s} {first:>7s} "
    room = width - len(head) - 8
    return cut(f"{head}{sparkline(curve.values, room) if room > 0 else ''} {last}", width)


def chart_lines(curve: MetricCurve, width: int, height: int) -> list[str]:
    """Return the curve as a chart: its extreme values are on the left, its first and newest outer step below."""
    labels = [number_words(value) for value in (max(curve.values), min(curve.values))]
    margin = max(map(len, labels)) + 1
    room = max(1, width - margin)
    values = squeezed(curve.values, room)
    values = [values[len(values) * i // room] for i in range(room)]  # each value is repeated to fill the width
    low, high = min(values), max(values)
    levels = [8 * (height - 1) * (v - low) / (high - low) if high > low else 4 * (height - 1) for v in values]
    levels = [max(1.0, level) for level in levels]  # so that the lowest value is visible
    rows = ["".join(BLOCKS[int(max(0, min(8, level - 8 * row)))] for level in levels) for row in range(height - 1)]
    left = [labels[0], *[""] * (height - 3), labels[1]] if height > 2 else labels[: height - 1]
    lines = [f"{label:>{margin - 1}s} {row}" for label, row in zip(left, reversed(rows), strict=True)]
    steps = f"{curve.label} by outer step, {curve.points[0][0]} to {curve.points[-1][0]}"
    return [*lines, cut(" " * margin + steps, width)]


def number_words(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1e5 else f"{value:.1e}"


# -------------------------------------------------------------------- troubles and events


def trouble_lines(troubles: Sequence[Trouble], width: int) -> list[str]:
    """Return each finding with the next thing to do, in one line if there is room, else in two."""
    lines = list[str]()
    for found in troubles:
        about = f"{found.slot}: " if found.slot else ""
        seen, advice = f"! {about}{found.text}", f"{found.advice} ({PAGE}#{found.page})"
        whole = f"{seen} · {advice}"
        lines += [whole] if len(whole) <= width else [cut(seen, width), cut(f"  → {found.advice}", width)]
    return lines


def event_lines(report: Report) -> list[str]:
    """Return the events as lines, the newest first."""
    events = [e for e in report.of_kind(*SHOWN) if not found_room(e, report)]
    groups = list[list[Mapping[str, Any]]]()
    for event in reversed(events[-MOST_EVENTS:]):
        if groups and _is_alike(groups[-1][-1], event):
            groups[-1].append(event)
        else:
            groups.append([event])
    return [event_line(group) for group in groups]


def _is_alike(later: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    """Whether both events have the same text and are less than TOGETHER_S apart."""
    return later["at"] - event["at"] < TOGETHER_S and _event_words(later) == _event_words(event)


def event_line(events: Sequence[Mapping[str, Any]]) -> str:
    """Return "12:03:11 r01-1 lost: exit code 1 · its supervisor starts it again"; equal events share a line."""
    when = time.strftime("%H:%M:%S", time.localtime(events[0]["at"]))
    names = list(dict.fromkeys(_name_in(e) for e in reversed(events)))
    about = ", ".join(names) if len(names) <= 4 else f"{names[0]} … {names[-1]} ({len(names)} of them)"
    advice = advice_on(events[0])
    return f"{when} {about} {_event_words(events[0])}" + (f" · {advice}" if advice else "")


def _name_in(event: Mapping[str, Any]) -> str:
    generation = f"-{event['generation']}" if event["generation"] else ""
    return f"{event['slot']}{generation}" if event["slot"] else str(event["who"])


def _event_words(event: Mapping[str, Any]) -> str:
    said = _said(event)
    return event["event"].replace("_", " ") + (f": {said}" if said else "")


def _said(event: Mapping[str, Any]) -> str:
    if event["event"] in LAUNCH_ENDS:
        return observed_words(event)
    if event["event"] == "joined":
        return f"at outer step {event.get('step', 0)}"
    if event["event"] == "launched":
        return f"on {event.get('executor', 'local')}, attempt {event.get('attempt', 1)}"
    said = event.get("text") or event.get("cause") or event.get("trouble") or own_words(event)
    return " ".join(str(said).split())
