"""The state of a run, drawn from its bucket.

    a terminal        a small table, redrawn in place
    not a terminal    one key=value line per committed step and per event; one line for all earlier steps

    demo  outer step 5 of 12  reward 0.12 ▁▂▃▅ 0.41  14 s
      slot   phase  step  inner  reward  counted   beat
      r00-1  train     5    3/6   0.412        5   0.1 s
      r01-1  killed at 12.2 s, counted in 4 steps
      r01-2  heal      5                       0   0.1 s
      r02 has offers of r02, needs min_replicas=2; r01 is silent for 8 s, at step 4

The line about the run's supervisor:

    done                                             the run has all its steps, and no replica sends heartbeats
    supervised by pid 7 on modal/supervisor.1        its heartbeat is younger than UNHEARD_S
    … was last heard 3 h 2 min ago                   older: it was killed or cut off; how to replace it
    no supervisor; the last one ended with code 1: … the reason, from the log

Not promised: that a silent supervisor is dead; another supervisor takes over only if the heartbeat does not change.
Not promised: that a line is up to date, as the bucket is read a few times per second.
"""

import shlex
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any, TextIO

from diloco.process import exitcodes
from diloco.process.output import raw_output
from diloco.process.processes import host_words
from diloco.runlog.evaluation import evaluation_dict
from diloco.runlog.learning import Curve, learning_words, newest_numbers
from diloco.runlog.reader import SUPERVISOR, Report, first_and_last
from diloco.runlog.sessions import SessionSummary, observed_words
from diloco.runlog.sparkline import sparkline
from diloco.runlog.summary import actor_words, brief_name, curve_of, held_out_words, kept_words, outer_words, solo_words
from diloco.runlog.worth import worth, worth_dict, worth_words
from diloco.units import dollars, duration
from diloco.views.overview import SessionRow, rows_to_show, session_rows, silent_s, unclaimed_names
from executors.cli.answers import wrap_line
from executors.supervision.costs import Costs
from executors.supervision.holder import still_holding
from executors.supervision.money.bills import unpriced
from executors.supervision.notices.messages import all_troubles, is_listening, message_lines
from inner.printable import printable
from rendezvous.agreement.membership import REQUESTS, Wanted, launch_of
from rendezvous.clock import Clock
from rendezvous.layout import is_actor
from rendezvous.records.records import Beat

INDENT = " " * 12
UNHEARD_S = 60.0  # generous, because the clocks of two machines differ, and reading a large run takes a while


class Screen:
    """A table that is redrawn in place."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._drawn = 0
        self._said = ""

    def say(self, text: str) -> None:
        self._said = text

    def show(self, report: Report) -> None:
        size = shutil.get_terminal_size()
        words = _pieces([f"! {self._said}"] if self._said else [], size.columns - 1)
        table = _pieces(status_table(report, width=size.columns), size.columns - 1)
        lines = [*table[: max(0, size.lines - 1 - max(1, len(words)))], *words]
        up = f"\x1b[{self._drawn}F" if self._drawn else ""
        drawn = "".join(f"{printable(line)}\x1b[K\n" for line in lines)
        raw_output(self._out).write(f"{up}{drawn}\x1b[J")
        self._out.flush()
        self._drawn = len(lines)


def _pieces(lines: Iterable[str], width: int) -> list[str]:
    """Return the lines, wrapped between words: a number that is cut reads as another number."""
    return [piece[:width] for line in lines for piece in wrap_line(line, width)]


def status_table(report: Report, now: float | None = None, width: int = 80) -> list[str]:
    """Return the whole table, for people.   now: Unix time (default: of the newest heartbeat).   width: in columns."""
    now = now or max((b.at for b in report.beats.values()), default=report.ended)
    curve = curve_of(report)
    lines = [_title_line(curve, report, now, width), f"  slot      phase   step  inner {curve.name:>7s}  counted  beat"]
    shown = rows_to_show(session_rows(report, now, {}))
    failed = _failed_starts(report)
    begins = SUPERVISOR in report.beats and is_listening(report.beats[SUPERVISOR], report, now)
    words = "never started" if report.done else "starting" if begins else "not started"
    unclaimed = {name: [f"  {name:9s} {words}"] for name in unclaimed_names(report)}
    for slot in report.wanted.member_names:
        claimed = [row for row in shown if row.slot == slot and row.generation]
        sessions = [
            line for row in claimed for line in [_row_line(row, curve, report.began), *_reason_lines(row.why, width)]
        ]
        lines += [*sessions, *_failed_start(failed.get(slot), report, width)] or unclaimed.get(slot, [])
    learning = learning_words(newest_numbers(report.steps), without=curve.name)
    numbers = [f"  {learning}"] if learning else []
    numbers += [f"  held out {words}" for words in held_out_words(report)]
    outer = outer_words(report)
    numbers += [f"  outer step {outer[0]}: {outer[1]}"] if outer else []
    numbers += [f"  {words}" for words in worth_words(worth(report))]
    numbers += [f"  actors: {words}" for words in actor_words(report)]
    kept = [f"  {words}" for words in kept_words(report)]
    return [*lines, *numbers, *_device_lines(report), *kept, *message_lines(report, now)]


def _device_lines(report: Report) -> list[str]:
    """Return a line that lists each device and the slots that train on it; [] if all slots train on CPUs."""
    live = [x for x in report.sessions if x.how == "running" and x.device]
    names = sorted({x.device for x in live})
    if not names or names == ["cpu"]:
        return []
    shared = [f"{name}: {', '.join(x.slot for x in live if x.device == name)}" for name in names]
    return [f"  on {'; '.join(shared)}"]


def _reason_lines(words: str, width: int) -> list[str]:
    """Return the reason as a line below the session that ended, cut to the width; [] without a reason."""
    room = max(40, width - 1) - len(INDENT)
    return [INDENT + (words if len(words) <= room else words[: room - 1] + "…")] if words else []


def _failed_starts(report: Report) -> dict[str, Mapping[str, Any]]:
    """Return per slot the newest launch that ended before it could claim the slot."""
    newest = {x.slot: x.claimed for x in report.sessions}
    return never_began(report.events, {(x.slot, x.host) for x in report.sessions}, newest)


def _failed_start(end: Mapping[str, Any] | None, report: Report, width: int) -> list[str]:
    if end is None:
        return []
    when = f"at {end['at'] - report.began:.1f} s"
    head = f"  {end['slot']:9s} launch {end.get('attempt', 1)} ended before it joined, {when}"
    return [head, *_reason_lines(observed_words(end), width)]


def _title_line(line: Curve, report: Report, now: float, width: int) -> str:
    """Return the first line; its curve fills the rest of the width."""
    curve = ""
    head = f"{brief_name(report)}  outer step {report.progress}"
    time = f"  {duration(_elapsed_seconds(report, now))}"
    if ends := line.ends:
        first, last = f"  {line.name} {ends[0]:.2f} ", f" {ends[1]:.2f}"
        room = min(24, width - 1 - len(head + first + last + time))
        curve = f"{first}{sparkline(line.mean, room)}{last}" if room > 0 else f"  {line.name}{last}"
    return f"{head}{curve}{time}"


def _elapsed_seconds(report: Report, now: float) -> float:
    """Return the seconds of the run so far; they do not grow before its first event, or after its last replica."""
    if report.done or not report.began:
        return report.seconds
    beating = any(is_listening(b, report, now) for b in report.beats.values())
    return max(0.0, (report.last_sign if report.stopped and not beating else now) - report.began)


def _row_line(row: SessionRow, curve: Curve, began: float) -> str:
    if row.beat_age_s is None:
        when = "" if row.ended is None else f" at {row.ended - began:.1f} s"
        counted = "" if is_actor(row.slot) else f", counted in {row.counted} steps"
        return f"  {row.name:9s} {row.end or 'running'}{when}{counted}"
    mine = curve.by_slot.get(row.slot, [])
    shown = next((f"{value:.3f}" for value in reversed(mine) if value is not None), "")
    inner = "" if row.inner is None else f"{row.inner}/{row.inner_steps}"
    if row.phase == "sample":
        samples = row.note or "no open place yet"
        return f"  {row.name:9s} {row.phase:7s} {row.step:4d}   {samples}  {row.beat_age_s:.1f} s"
    return (
        f"  {row.name:9s} {row.phase:7s} {row.step:4d} {inner:>6s} {shown:>7s} {row.counted:8d}  {row.beat_age_s:.1f} s"
    )


def status_dict(report: Report, now: float) -> dict[str, Any]:
    """Return the answer of `diloco status --json`."""
    ends = first_and_last(report)
    return {
        "name": report.name,
        "url": report.url,
        "outer_step": report.head,
        "steps": report.wanted.steps,
        "done": report.done,
        "stop": report.wanted.stop,
        "replicas": report.wanted.replicas,
        "min_replicas": report.wanted.min_replicas,
        "mean_reward": None if ends is None else ends[1],
        "learning": newest_numbers(report.steps),
        "held_out": [evaluation_dict(evaluation) for evaluation in report.evaluations],
        "solo": bool(solo_words(report)),
        "outer": next((s.numbers for s in reversed(report.steps) if s.numbers), {}),
        "worth": worth_dict(worth(report)),
        "sessions": [_session_status(x, report, now) for x in report.sessions],
        "kept": " · ".join(kept_words(report)),
        "messages": message_lines(report, now),
        "troubles": [asdict(trouble) for trouble in all_troubles(report, now)],
    }


def _session_status(session: SessionSummary, report: Report, now: float) -> dict[str, Any]:
    beat = report.beats.get(session.slot)
    mine = beat if beat is not None and beat.generation == session.generation else None
    newest = {}
    if mine is not None:
        newest = {"phase": mine.phase, "step": mine.step, "inner": mine.inner, "note": mine.note}
        newest["beat_age_s"] = round(now - mine.at, 2)
    fixed = {name: getattr(session, name) for name in ("slot", "generation", "pid", "host", "how", "device")}
    return {**fixed, "counted_in": len(session.commits), "end": session.end, "why": session.why, **newest}


# -------------------------------------------------------------------- money


def cost_line(spent: Costs, wanted: Wanted) -> str:
    hours = f", {hours_words(spent, wanted)}" if wanted.max_hours else ""
    unknown = f", {len(unpriced(spent))} launches at an unknown price" if unpriced(spent) else ""
    on_actors = sum(bill.usd for bill in spent.bills if is_actor(bill.slot))
    part = f" ({dollars(on_actors)} of it for actors)" if on_actors else ""
    return f"{usd_words(spent, wanted)} so far{part}{hours}, {dollars(spent.rate)} per hour now{unknown}"


def usd_words(spent: Costs, wanted: Wanted) -> str:
    """Return the dollars as "$3.00 of $50.00"; "$3.00" without a limit."""
    return dollars(spent.usd) + (f" of {dollars(wanted.max_usd)}" if wanted.max_usd else "")


def hours_words(spent: Costs, wanted: Wanted) -> str:
    """Return the hours with any replica and their limit, as "0.45 of 12 h"."""
    return f"{spent.hours:.2f} of {wanted.max_hours:g} h"


def cost_status(spent: Costs, wanted: Wanted) -> dict[str, Any]:
    """Return the costs and their limits, for `--json`."""
    numbers = {"usd": round(spent.usd, 4), "usd_per_hour": round(spent.rate, 4), "hours": round(spent.hours, 4)}
    return {**numbers, "max_usd": wanted.max_usd, "max_hours": wanted.max_hours}


def cost_table(spent: Costs, report: Report) -> list[str]:
    """Return the table of `diloco costs`: one line per slot and place."""
    rows = []
    for slot, executor in sorted({(b.slot, b.executor) for b in spent.bills}):
        bills = [b for b in spent.bills if (b.slot, b.executor) == (slot, executor)]
        hours = sum(b.seconds for b in bills) / 3600
        usd = sum(b.usd for b in bills)
        price = "unknown" if any(b.usd_per_hour is None for b in bills) else dollars(usd)[1:]
        now = "runs" if any(b.ended is None and not b.pending for b in bills) else ""
        rows.append(f"  {slot:10s} {executor:8s} {len(bills):8d} {hours:7.2f} {price:>8s}  {now}".rstrip())
    if spent.unlogged:
        gone = "from a control record; the log is gone"
        rows.append(f"  {'?':10s} {'':8s} {'':8s} {'':7s} {spent.unlogged:8.2f}  {gone}")
    if spent.untold:
        rows.append(f"  the log of their launch is gone, so their cost is unknown: {', '.join(spent.untold)}")
    each = f", {dollars(spent.usd / report.head)} each" if report.head and spent.usd else ""
    steps = f"; {report.head} outer steps{each}"
    head = f"  {'slot':10s} {'place':8s} {'launches':>8s} {'hours':>7s} {'USD':>8s}"
    return [f"{report.name}: {cost_line(spent, report.wanted)}{steps}", *([head] if rows else []), *rows]


# -------------------------------------------------------------------- supervisor


def describe_supervisor(beat: Beat | None, clock: Clock, report: Report) -> tuple[str, dict[str, Any]]:
    """Return (one line, data for `--json`).   beat: the supervisor's heartbeat; the report has its claim."""
    holder = still_holding(report.url, report.supervisor, beat)
    end = last_end(report)
    if holder is None:
        how = f"ended with code {end['code']}" if end and end["code"] != exitcodes.LEFT else "left"
        words = f"; the last one {how}: {end_words(end['text'])}" if end else ""
        line = _done_words(report, clock) if report.done else f"no supervisor{words}"
        return line, {"supervisor": None, "supervisor_end": end}
    heard_at = beat.at if beat is not None and beat.generation == holder.generation else holder.at
    unheard = round(max(0.0, clock.wall() - heard_at), 1)  # by the clocks of two machines
    about = {"pid": holder.pid, "host": holder.host, "unheard_s": unheard}
    who = f"pid {holder.pid} on {host_words(holder.host)}"
    line = f"supervised by {who}"
    if unheard >= UNHEARD_S + REQUESTS * report.request_s:
        line = (
            f"! its supervisor ({who}) was last heard {duration(unheard)} ago, so lost replicas may not be replaced; "
            f"`diloco resume {shlex.quote(report.url)} --detach` starts another if it is dead"
        )
    return _done_words(report, clock) if report.done else line, {"supervisor": about, "supervisor_end": end}


def _done_words(report: Report, clock: Clock) -> str:
    """Return "done", or the replicas that still work after the last outer step, with their notes."""
    beats = [b for b in report.beats.values() if b.phase != "left"]
    there = [b for b in beats if abs(clock.wall() - b.at) <= silent_s(report)]
    works = ", ".join(f"{b.slot} {b.note or 'is about to leave'}" for b in there)
    return f"all {report.head} outer steps are committed, but not all is done: {works}" if works else "done"


def end_words(text: str) -> str:
    """Return a supervisor's last words without the replica's lines between the first one and the last one.

    A reader of the log has a space in place of each line break; `Supervisor._stop_for` indents the replica's lines."""
    first, *lines = text.strip().split(" " * 5)
    return " ".join([first, *lines[-1:]]).replace("Its last lines:", "Its last line:")


def last_end(report: Report) -> dict[str, Any] | None:
    """Return the newest end of a supervisor in the log; None if that supervisor ended a run that is done."""
    ends = [e for e in report.of_kind("stopped", "crashed") if e["who"].startswith(SUPERVISOR)]
    if not ends or ends[-1].get("code") in (None, exitcodes.DONE):
        return None
    return {"code": ends[-1]["code"], "text": str(ends[-1].get("text", "")), "at": ends[-1]["at"]}


def never_began(
    events: Iterable[Mapping[str, Any]], claimed_hosts: Collection[tuple[str, str]], claimed: Mapping[str, float]
) -> dict[str, Mapping[str, Any]]:
    """Return slot -> the newest end of a launch that never claimed the slot, if no session claimed it since then.

    claimed_hosts: (slot, host) of all sessions.   claimed: slot -> begin of its newest session (Unix time).
    """
    lived = {(slot, launch_of(host, slot)) for slot, host in claimed_hosts}
    newest: dict[str, Mapping[str, Any]] = {}
    for e in events:
        if e["event"] == "lost" and not e["generation"] and (e["slot"], e.get("attempt")) not in lived:
            newest[e["slot"]] = e
    return {slot: e for slot, e in newest.items() if e["at"] > claimed.get(slot, 0.0)}


def costs_dict(spent: Costs) -> dict[str, Any]:
    """Return the costs for `diloco costs --json`."""
    return {
        "usd": spent.usd,
        "usd_per_hour": spent.rate,
        "hours": spent.hours,
        "per_slot": _sum_by_key((b.slot, b.usd) for b in spent.bills),
        "per_executor": _sum_by_key((b.executor, b.usd) for b in spent.bills),
        "usd_boxes": spent.boxes,
        "usd_unlogged": spent.unlogged,
        "unknown_price": sorted({b.slot for b in unpriced(spent)}),
        "unknown_sessions": list(spent.untold),
        "bills": [{**b.to_dict(), "usd": b.usd} for b in spent.bills],
    }


def _sum_by_key(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for key, value in pairs:
        sums[key] += value
    return dict(sorted(sums.items()))
