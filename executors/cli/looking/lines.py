"""Prints a running run as lines: one key=value line per committed step and per event.

    {"event": "lost", "slot": "r01", …} ──▶ event=lost at=12.31 slot=r01 …       without fields that only programs need
    view_for(out)    a terminal ──▶ Screen, a table that is redrawn in place (status.py)       else ──▶ Lines

Not promised: that a line is up to date; the bucket is read a few times per second.
"""

from collections.abc import Callable
from typing import Any, Protocol, TextIO

from diloco.events import SHOWN
from diloco.runlog.learning import is_shown, over_replicas
from diloco.runlog.reader import SUPERVISOR, Report, first_and_last
from diloco.runlog.steps import Step

SAID = (
    "at", "event", "slot", "who", "generation", "tail", "handle", "launched_at", "useful", "own_fault", "by_reward",
    "began_at", "ended_at",
)  # fmt: skip


class StatusView(Protocol):
    def show(self, report: Report) -> None:
        """Show the present state of the run."""

    def say(self, text: str) -> None:
        """Show a message at the next `show`.  Safe in a signal handler."""


def view_for(out: TextIO) -> StatusView:
    """Return the view for this output."""
    if not out.isatty():
        return Lines(out, from_now=True)
    from executors.cli.looking.status import Screen

    return Screen(out)


class Lines:
    """Prints one line per committed step and event, each once.   form: makes a line's text from its fields.

    from_now: one line for all outer steps before the first `show`, because not all their numbers were read.
    """

    def __init__(
        self, out: TextIO, form: Callable[[dict[str, Any]], str] | None = None, *, from_now: bool = False
    ) -> None:
        self._out = out
        self._form = form or key_values
        self._pass_over_past = from_now
        self._steps = 0
        self._events = set[tuple[Any, ...]]()
        self._said: list[str] = []

    def say(self, text: str) -> None:
        self._said.append(text)

    def show(self, report: Report) -> None:
        while self._said:
            self.write({"note": self._said.pop(0)})
        if self._pass_over_past:
            self._write_past(report)
            self._pass_over_past = False
        news = [(s.at, step_fields(s, report)) for s in report.steps[self._steps :]]
        news += [(e["at"], event_fields(e, report.began)) for e in report.of_kind(*SHOWN) if self._is_new(e)]
        for _, fields in sorted(news, key=lambda one: (one[0], key_values(one[1]))):
            self.write(fields)
        self._steps = report.head

    def _write_past(self, report: Report) -> None:
        if not report.head:
            return
        ends = first_and_last(report)
        rewards = {} if ends is None else {"first_reward": round(ends[0], 4), "newest_reward": round(ends[1], 4)}
        self.write({"steps_before": report.head, "of": report.wanted.steps, **rewards})
        self._steps = report.head
        begun = [e["at"] for e in report.of_kind("started") if e["who"].startswith(SUPERVISOR)]
        since = max([*begun, *(s.at for s in report.steps[-1:])], default=0.0)
        for event in report.of_kind(*SHOWN):
            if event["at"] < since:
                self._is_new(event)

    def write(self, fields: dict[str, Any]) -> None:
        print(self._form(fields), file=self._out, flush=True)

    def _is_new(self, event: dict[str, Any]) -> bool:
        mark = (event["who"], event["at"], event["event"], event["slot"])
        known = mark in self._events
        self._events.add(mark)
        return not known


def step_fields(step: Step, report: Report) -> dict[str, Any]:
    mean = {} if step.mean_reward is None else {"mean_reward": round(step.mean_reward, 4)}
    late = {"late": ",".join(f"{s}@{t}" for s, t in step.carried)} if step.carried else {}
    rewards = {slot: round(r, 4) for slot, r in sorted(step.reward.items())}
    fresh = ",".join(step.fresh)
    gated = {"gated": ",".join(step.gated)} if step.gated else {}
    numbers = {k: float(f"{v:.4g}") for k, v in over_replicas(step).items() if is_shown(k, v)}
    fields = {"step": step.t, "of": report.wanted.steps, "at": round(step.at - report.began, 2), **mean, **rewards}
    fields |= numbers
    return {**fields, "fresh": fresh, **late, **gated, "by": step.by}


def event_fields(event: dict[str, Any], began: float) -> dict[str, Any]:
    about = {"slot": event["slot"]} if event["slot"] else {}
    rest = {k: v for k, v in event.items() if k not in SAID and v is not None}
    generation = {"generation": event["generation"]} if event["generation"] else {}
    return {"event": event["event"], "at": round(event["at"] - began, 2), **about, **generation, **rest}


def key_values(fields: dict[str, Any]) -> str:
    return " ".join(f"{k}={_value_in_words(v)}" for k, v in fields.items())


def _value_in_words(value: Any) -> str:
    text = " ".join(str(value).split())
    return '"' + text.replace('"', "'") + '"' if " " in text or not text else text
