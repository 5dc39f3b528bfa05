"""The points of a run's curves, for trackers: which outer steps are complete, and their numbers.  Pure functions.

    row s = s outer steps are done          row 0: only θ₀'s evaluation, if there is one
      r00/…     numbers of r00 from θ_{s−1} to θ_s: in its offer and in its "step" event
      fleet/…   means over the replicas with fresh offers in commit s−1; counts are summed
      outer/…   ρ, effective step, … of commit s−1
      eval/…    θ_s on held-out prompts: mean, standard error, prompts

    commit s−1 exists ──▶ each awaited replica logged it, or a later step, or has ended ──▶ row s is complete
                          └─ or PATIENCE_S have passed since the commit

A log is written in order, so a replica that has logged a later step adds no more numbers to this step.  A complete row
is written only once.

Not promised: the numbers of a live replica that logs nothing for PATIENCE_S, also if the reader's clock is ahead by
PATIENCE_S.
"""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from diloco.runlog.evaluation import Evaluation, read_evaluations
from diloco.runlog.learning import COUNTS
from diloco.runlog.reader import Report
from diloco.runlog.sessions import SessionSummary
from diloco.runlog.steps import NUMBERS, Step

PATIENCE_S = 600.0  # age of a commit from which its row waits for no replica; equal to the default of a run's give_up_s
EVALUATION_S = 1800.0  # the age of a commit from which its row waits for no evaluation, which may take minutes
SILENT_S = 60.0  # a replica without a heartbeat for so long is not awaited, unless a commit counts it
SUMS = (*COUNTS, "samples", "bytes_up", "bytes_down")
OUTER = (*NUMBERS, "outer_lr", "moved", "participants", "empty")
ABOUT = ("at", "event", "slot", "generation", "who", "step", "theta", "device", "listed", *OUTER)


@dataclass(frozen=True)
class CurvePoint:
    """Row `step` of all curves.   at: time of its commit (Unix time)."""

    step: int
    at: float
    numbers: dict[str, float]


@dataclass(frozen=True)
class LoggedSteps:
    """The logs, by outer step.   newest: session -> the newest outer step that it logged.   steps: step -> its events.

    evaluated: (session, step) with a scored share of θ_step.   evaluations: step -> the mean of all shares."""

    newest: Mapping[str, int] = field(default_factory=dict[str, int])
    steps: Mapping[int, list[dict[str, Any]]] = field(default_factory=dict[int, list[dict[str, Any]]])
    evaluated: AbstractSet[tuple[str, int]] = frozenset()
    evaluations: Mapping[int, Evaluation] = field(default_factory=dict[int, Evaluation])


def read_logged_steps(events: Sequence[dict[str, Any]]) -> LoggedSteps:
    newest = dict[str, int]()
    steps = dict[int, list[dict[str, Any]]]()
    evaluated = set[tuple[str, int]]()
    for event in events:
        step = event.get("step")
        if event["event"] == "step" and step is not None:
            newest[event["who"]] = max(step, newest.get(event["who"], step))
            steps.setdefault(step, []).append(event)
        elif event["event"] == "evaluated" and step is not None:
            evaluated.add((event["who"], step))
    return LoggedSteps(newest, steps, evaluated, {found.step: found for found in read_evaluations(events)})


# -------------------------------------------------------------------- complete rows


def complete_rows(report: Report, logged: LoggedSteps, *, start: int, now: float, over: AbstractSet[str]) -> int:
    """Return n such that rows start … n−1 are complete.   now: Unix time.   over: sessions ended before the last look.

    A session may write its last log after the reader read logs and before it read ends; so `over` is one look older.
    """
    n = start
    while n <= len(report.steps) and is_complete(report, logged, n, now=now, over=over):
        n += 1
    return n


def is_complete(report: Report, logged: LoggedSteps, row: int, *, now: float, over: AbstractSet[str]) -> bool:
    if row == 0:  # replicas evaluated θ₀ before their offers for commit 0
        return is_complete(report, logged, 1, now=now, over=over)
    if row > len(report.steps):
        return False
    step = report.steps[row - 1]
    awaited = [
        session for session in report.sessions if session.name not in over and _is_awaited(session, step, report, now)
    ]
    silent = [session for session in awaited if logged.newest.get(session.name, -1) < step.t]
    if silent and now - step.at <= PATIENCE_S:
        return False
    if not _is_evaluation_due(report, row) or now - step.at > EVALUATION_S:
        return True
    scored = {name for name, s in logged.evaluated if s == row}
    return all(session.name in scored or logged.newest.get(session.name, -1) >= row for session in awaited)


def _is_awaited(session: SessionSummary, step: Step, report: Report, now: float) -> bool:
    """Whether a row waits for this session, because it trained in this outer step."""
    if any(t == step.t for t, _ in session.commits):
        return True
    if session.slot not in report.slots:
        return False  # an actor's
    began = session.joined is not None and session.joined_step <= step.t
    beat = report.beats.get(session.slot)
    if not began or session.how != "running" or beat is None or beat.generation != session.generation:
        return False
    return beat.at > step.at or now - beat.at < SILENT_S


def _is_evaluation_due(report: Report, row: int) -> bool:
    every = report.setting("eval", "every", 0)
    return every > 0 and (row % every == 0 or row == report.wanted.steps)


def is_over(report: Report, written: int) -> bool:
    """Whether the run is done and all its rows are written.   written: number of rows, with row 0."""
    return report.done and written > len(report.steps)


# -------------------------------------------------------------------- a row's numbers


def curve_point(report: Report, logged: LoggedSteps, row: int) -> CurvePoint | None:
    """Return the complete row `row`; None for row 0 of a run without evaluations."""
    numbers = _evaluation_numbers(logged.evaluations.get(row))
    if row == 0:
        return CurvePoint(0, report.began, _finite(numbers)) if numbers else None
    step = report.steps[row - 1]
    by_slot = {slot: _replica_numbers(step, slot, logged.steps.get(step.t, [])) for slot in _slots(step, logged)}
    flat = {f"{slot}/{name}": value for slot, found in by_slot.items() for name, value in found.items()}
    fleet = _fleet_numbers(report, step, [by_slot[slot] for slot in step.fresh if slot in by_slot])
    outer = {f"outer/{name}": value for name, value in step.numbers.items() if name in OUTER}
    outer |= {"outer/empty": 1.0} if step.empty else {}
    return CurvePoint(row, step.at, _finite({**fleet, **numbers, **outer, **flat}))


def _slots(step: Step, logged: LoggedSteps) -> list[str]:
    by_event = {e["slot"] for e in logged.steps.get(step.t, [])}
    return sorted({*step.fresh, *step.reward, *step.learned, *by_event})


def _replica_numbers(step: Step, slot: str, events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return a slot's numbers from its offer and its event; of two sessions, prefer the session that trained."""
    mine = sorted((e for e in events if e["slot"] == slot), key=lambda e: (bool(e.get("h")), e["generation"]))
    logged = {k: float(v) for k, v in mine[-1].items() if k not in ABOUT and type(v) in (int, float)} if mine else {}
    offered = dict(step.learned.get(slot, {}))
    offered |= {"reward": step.reward[slot]} if slot in step.reward else {}
    offered |= {"h": float(step.h[slot])} if slot in step.h else {}
    return {**logged, **offered}


def _fleet_numbers(report: Report, step: Step, fresh: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for numbers in fresh for name in numbers)
    found = dict[str, float]()
    for name in names:
        values = [numbers[name] for numbers in fresh if name in numbers]
        found[f"fleet/{name}"] = math.fsum(values) if name in SUMS else fmean(values)
    before = report.steps[step.t - 1].at if step.t else report.began
    return {
        **found,
        "fleet/replicas": len(step.fresh),
        "fleet/late": len(step.carried),
        "fleet/seconds": step.at - before,
        "fleet/elapsed_s": step.at - report.began,
    }


def _evaluation_numbers(evaluation: Evaluation | None) -> dict[str, float]:
    """Return name -> mean and error over held-out prompts, for each score."""
    if evaluation is None:
        return {}
    found = {"eval/prompts": float(evaluation.headline[1].prompts)}
    for kind, scores in evaluation.scores.items():
        for name, score in scores.items():
            found |= {f"eval/{kind}/{name}": score.mean, f"eval/{kind}/{name}_error": score.error}
    return found


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
