"""Make the data of a run's page from a report: a small head that changes, and chunks of outer steps.  Pure functions.

    report ──▶ head      name, state, sessions, evaluations, events, costs, rollouts, config          rewritten
           └─▶ chunk n   outer steps CHUNK·n … CHUNK·(n+1) − 1, by column: times, metrics, bytes      mostly final

    head["chunks"][n] is the version of chunk n. A page requests only changed chunks again, the newest first.

A number is rounded to five digits; a number that is not finite is null.  Texts are as replicas wrote them, without
control characters; a page must show them as text (assets/, freeze.py).

The contributors to each outer step, one letter per slot:

    step      0 1 2 3 4
    r00       f f f f f      f  fresh: listed by this step's own commit      g  the same, its weight lowered by the gate
    r01       f f l . f      l  late: of this step, listed by a later commit
    r02       f f x x f      x  lost: a session trained here, but its work does not count     w  may still be listed
                             .  no session trained here

A session trained in a step if it ran for more than half of the step's time, or was cut off in it.

Not promised: that "x" is exact, because times of different machines are compared; every event and all of a rollout
(NEWEST_EVENTS, LONGEST).
"""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.events import KINDS, MARKED, ON_PAGE, event_text
from diloco.runlog.evaluation import evaluation_dict
from diloco.runlog.learning import over_replicas
from diloco.runlog.reader import Report, shown
from diloco.runlog.sessions import BAD_ENDS, SessionSummary
from diloco.runlog.steps import NUMBERS, PARTS, Step
from diloco.runlog.summary import actor_words, checks, curve_of, headline, kept_words  # fmt: skip
from diloco.runlog.worth import worth, worth_words
from diloco.views.overview import Overview, SessionRow, overview, step_values
from rendezvous.layout import is_actor

FORMAT = 1  # format of head and chunks; a page shows only data of its own format
CHUNK = 100  # outer steps in a chunk
NEWEST_EVENTS = 300
LONGEST = 2000  # the limit of one text of the config or of an event, in characters
MARKS = 2000
OUTER = (*NUMBERS, "outer_lr")


@dataclass(frozen=True)
class Beside:
    """Data that a page shows beside its report.   costs: those of `diloco costs --json`.   early, late: rollouts.

    troubles: found in the report, worst first.   read_at: slot -> time of its heartbeat's read.   partial: some
    records are not read yet.   poll_s: seconds until a page requests again, 0: never.
    """

    costs: Mapping[str, Any] | None = None
    early: Sequence[Mapping[str, Any]] = ()
    late: Sequence[Mapping[str, Any]] = ()
    troubles: Sequence[Mapping[str, Any]] = ()
    read_at: Mapping[str, float] | None = None
    partial: bool = False
    poll_s: float = 0.0


def page_data(report: Report, now: float, beside: Beside | None = None) -> dict[str, Any]:
    """Return {"head": …, "chunks": […]}.   now: Unix time."""
    chunks = chunks_of(report)
    return {"head": head_of(report, now, beside or Beside(), encode_chunks(chunks)), "chunks": chunks}


def head_of(report: Report, now: float, beside: Beside, chunks: "EncodedChunks") -> dict[str, Any]:
    seen = overview(report, now, read_at=beside.read_at)
    began = report.began  # visits every event
    return {
        "format": FORMAT,
        "made": now,
        "poll_s": beside.poll_s,
        "partial": beside.partial,
        "stale": "",
        **_numbers_of(seen, report, began),
        "result": _result(report),
        "about": _about(report),
        "headline": headline(report),
        "worth": worth_words(worth(report)),
        "checks": [{"ok": check.ok, "text": check.text} for check in checks(report)],
        "troubles": list(beside.troubles),
        "actors": actor_words(report),
        "messages": _messages(report),
        "slots": report.slots,
        "sessions": _sessions(report, seen, began),
        "counted": chunks.counted,
        "marks": _marks(report, began),
        "evaluations": [evaluation_dict(evaluation) for evaluation in report.evaluations],
        "events": _events(report, began),
        "explanations": {kind: about.text for kind, about in KINDS.items() if kind in ON_PAGE},
        "costs": beside.costs,
        "parent": report.config.get("parent"),
        "config": _shortened({k: v for k, v in report.config.items() if k != "parent"}),
        "early": list(beside.early),
        "late": list(beside.late),
        "chunk": CHUNK,
        "chunks": chunks.versions,
    }


def _numbers_of(seen: Overview, report: Report, began: float) -> dict[str, Any]:
    numbers = {k: v for k, v in vars(seen).items() if k not in ("open_s", "rows", "series")}
    return {
        **{name: brief(value) if name.endswith("_s") else value for name, value in numbers.items()},
        "began": began,
        "last_sign": report.last_sign,
        "replicas": report.wanted.replicas,
        "min_replicas": report.wanted.min_replicas,
    }


def _result(report: Report) -> dict[str, Any] | None:
    """Return the run's result: held out if there are two evaluations, else the replicas' curve.

    error: the standard error of the last value, None if unknown."""
    held = [one.headline[1] for one in report.evaluations]
    if len(held) > 1:
        first, last = brief(held[0].mean), brief(held[-1].mean)
        return {"name": "held-out reward", "first": first, "last": last, "error": brief(held[-1].error)}
    curve = curve_of(report)
    if not (ends := curve.ends):
        return None
    return {"name": f"{curve.name}, in training", "first": brief(ends[0]), "last": brief(ends[1]), "error": None}


def _about(report: Report) -> str:
    """Describe the model, its data and its training in one line."""
    at = lambda *path: _setting_at(report.config, "inner", *path)  # noqa: E731
    data = at("data", "prompts") or at("data", "task") or at("data", "text") or ""
    found = [
        str(at("model") or ""),
        f"LoRA r = {rank}" if (rank := at("lora", "r")) else "",
        str(data),
        str(at("rewards", "function") or ""),
        "GRPO" if at("loop") == "grpo" else str(at("loop") or ""),
    ]
    return " · ".join(word[:LONGEST] for word in found if word)


def _setting_at(config: Mapping[str, Any], *path: str) -> Any:
    """Return a setting of a config by any release; None if it is missing."""
    found: Any = config
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _messages(report: Report) -> list[str]:
    found = [report.damage] if report.damage else []
    if report.passed_over:
        found.append(f"{report.passed_over} lines or objects under log/ are not events; passed over")
    return [*found, *kept_words(report)]


# -------------------------------------------------------------------- sessions, events


def _sessions(report: Report, seen: Overview, began: float) -> list[dict[str, Any]]:
    rows = {(row.slot, row.generation): row for row in seen.rows}
    return [_session(session, rows[session.slot, session.generation], began) for session in report.sessions]


def _session(session: SessionSummary, row: SessionRow, began: float) -> dict[str, Any]:
    return {
        "name": session.name,
        "slot": session.slot,
        "actor": is_actor(session.slot),
        "place": row.place,
        "device": session.device,
        "claimed": brief(session.claimed - began),
        "joined": None if session.joined is None else brief(session.joined - began),
        "joined_step": session.joined_step,
        "ended": None if session.ended is None else brief(session.ended - began),
        "bad": session.how in BAD_ENDS,
        "end": session.end,
        "why": session.why,
        "counted": len(session.commits),
        **_live_numbers(row),
    }


def _live_numbers(row: SessionRow) -> dict[str, Any]:
    if not row.is_live:
        return {"phase": ""}
    measured = {"samples_per_s": brief(row.samples_per_s), "beat_age_s": brief(row.beat_age_s)}
    return {"phase": row.phase, "inner": row.inner, "inner_steps": row.inner_steps, "note": row.note, **measured}


def _marks(report: Report, began: float) -> list[dict[str, Any]]:
    """Return the marks on the curves, by time: sessions that were lost, and slots that came back."""
    found = list[tuple[float, str, str]]()
    for session in report.sessions:
        if session.how in BAD_ENDS and session.ended is not None:
            found.append((session.ended, "lost", f"{session.name} {session.how}"))
        if session.joined is not None and (session.generation > 1 or session.joined_step > 0):
            words = "is back" if session.generation > 1 else "joined"
            found.append((session.joined, "joined", f"{session.name} {words}"))
    times = [step.at for step in report.steps]
    return [
        {"at": brief(at - began), "step": brief(step_at(times, at)), "kind": kind, "text": text}
        for at, kind, text in sorted(found)[-MARKS:]
    ]


def step_at(ends: Sequence[float], at: float) -> float:
    """Return a time's place on the axis of outer steps. The time of commit t is at t."""
    t = sum(end <= at for end in ends)
    if t == 0 or t == len(ends):
        return t - 0.5
    return t - 1 + (at - ends[t - 1]) / max(ends[t] - ends[t - 1], 1e-6)


def _events(report: Report, began: float) -> list[dict[str, Any]]:
    """Return the newest events, the newest first."""
    known = [e for e in report.events if e["event"] in ON_PAGE][-NEWEST_EVENTS:]
    return [
        {
            "at": brief(e["at"] - began),
            "kind": e["event"],
            "who": e["who"],
            "slot": e["slot"],
            "loud": e["event"] in MARKED,
            "text": _shortened(event_text(e)),
        }
        for e in reversed(known)
    ]


def _shortened(value: Any) -> Any:
    """Return the value as plain data with printable, shortened texts."""
    if isinstance(value, str):
        text = shown(value)
        return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    if isinstance(value, Mapping):
        return {str(shown(str(k))): _shortened(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_shortened(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, int | None) else str(value)


# -------------------------------------------------------------------- outer steps


@dataclass(frozen=True)
class EncodedChunks:
    """Chunks as bytes.   bodies: chunk's number -> body.   versions: every chunk's; None if it was not read.

    counted: slot -> how often its work was fresh, gated, late, lost."""

    bodies: Mapping[int, bytes] = field(default_factory=dict[int, bytes])
    versions: Sequence[str | None] = ()
    counted: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, dict[str, int]])


def encode_chunks(chunks: Sequence[Mapping[str, Any]]) -> EncodedChunks:
    bodies = {chunk["first"] // CHUNK: json_bytes(chunk) for chunk in chunks}
    versions = [version_of(bodies[n]) if n in bodies else None for n in range(max(bodies, default=-1) + 1)]
    return EncodedChunks(bodies, versions, tally([(chunk["slots"], chunk["who"]) for chunk in chunks]))


def chunks_of(report: Report) -> list[dict[str, Any]]:
    """Return the chunks of the steps that were read.  After `Live.glance`, these are only the newest steps."""
    slots = report.slots
    who = contribution_rows(report, slots)
    began = report.began
    numbers = sorted({step.t // CHUNK for step in report.steps})
    at = [[i for i, step in enumerate(report.steps) if step.t // CHUNK == n] for n in numbers]
    return [_chunk(report.steps[i[0] : i[-1] + 1], began, slots, who[i[0] : i[-1] + 1]) for i in at]


def _chunk(steps: Sequence[Step], began: float, slots: Sequence[str], who: Sequence[str]) -> dict[str, Any]:
    """Make columns of equal length.   who: a letter per slot.   by_slot: each replica's reward."""
    metrics = [step_values(step) | over_replicas(step, ("grad_norm",)) for step in steps]
    by_slot = {slot: [brief(_headline_of(step, slot)) for step in steps] for slot in slots}
    return {
        "format": FORMAT,
        "first": steps[0].t,
        "slots": list(slots),
        "at": [round(step.at - began, 3) for step in steps],
        "by": [step.by for step in steps],
        "who": list(who),
        "empty": [step.t for step in steps if step.empty],
        "metrics": _columns(metrics),
        "numbers": _columns([{k: v for k, v in step.numbers.items() if k in OUTER} for step in steps]),
        "seconds": _columns([{part: step.part(part) for part in PARTS} if step.seconds else {} for step in steps]),
        "up": [sum(step.up.values()) for step in steps],
        "down": [sum(step.down.values()) for step in steps],
        "by_slot": {slot: values for slot, values in by_slot.items() if any(v is not None for v in values)},
    }


def _headline_of(step: Step, slot: str) -> float | None:
    reward = step.reward.get(slot)
    return reward if reward is not None else step.learned.get(slot, {}).get("loss") if not step.reward else None


def _columns(rows: Sequence[Mapping[str, float | None]]) -> dict[str, list[float | None]]:
    """Return one list per name that has a value in any row."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if brief(value) is not None)
    return {name: [brief(row.get(name)) for row in rows] for name in names}


def brief(value: float | None) -> float | None:
    """Round to five digits; None for a value that is not finite."""
    if value is None or not math.isfinite(value):
        return None
    if abs(value) >= 1e5:
        return round(value, 1)
    return float(f"{value:.5g}")


# -------------------------------------------------------------------- as bytes


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """Encode as ASCII JSON without <, > and &, so that it cannot end a <script> or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("ascii")


def version_of(body: bytes) -> str:
    """Return the version of these bytes; other bytes have another version."""
    return hashlib.sha256(body).hexdigest()[:12]


FRESH, GATED, LATE, LOST, WAITS, ABSENT = "fglxw."
NAMES = {FRESH: "fresh", GATED: "gated", LATE: "late", LOST: "lost"}


def contribution_rows(report: Report, slots: Sequence[str]) -> list[str]:
    """Return one text per outer step that was read, with one letter per slot."""
    column = {slot: i for i, slot in enumerate(slots)}
    rows = [[ABSENT] * len(slots) for _ in report.steps]
    times = [report.began, *(step.at for step in report.steps)]
    first_waiting = _first_that_waits(report)
    first = report.steps[0].t if report.steps else 0
    for session in [x for x in report.sessions if x.slot in column]:  # not actors
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
    """Return the steps in which a session trained.   times: the run's beginning, and each commit's time."""
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
