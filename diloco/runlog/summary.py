"""A run's report as text: one screen, a headline, and checks of this product's promises.

    Report (reader.py) ──▶ summary    one screen, for `diloco report` and the demo
                       ──▶ checks     each promise: kept or not

                       ──▶ kept_words which steps are still in the bucket, by the replicas' logs of deletions

    collected: deltas_from 52 · means_from 40 · snapshots 0 8 16 32 40
    ─▶ kept: every step from 40 on, and 0, 8, 16, 32; pseudogradients before 52 are gone (fleet.keep = 20 GB)

Not promised: that all sessions fit on the screen; the bucket's newest state. But a blob that is reported as gone is
gone.  A step in the window without a written mean keeps its pseudogradients; `diloco export` checks the blobs
themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from diloco.runlog.evaluation import evaluation_words
from diloco.runlog.learning import Curve, headline_curve, learning_words, newest_numbers
from diloco.runlog.reader import Report
from diloco.runlog.sessions import SessionSummary
from diloco.runlog.sparkline import sparkline
from diloco.runlog.steps import NUMBERS, PART_NAMES, PARTS
from diloco.runlog.worth import worth, worth_words
from diloco.units import byte_size, duration
from rendezvous.layout import is_slot

NAME = 24  # the limit of a run's name, in characters, in a line with other text


@dataclass(frozen=True)
class Check:
    ok: bool
    text: str


def checks(report: Report) -> list[Check]:
    """Check this product's promises against the bucket."""
    linked = all(s.linked for s in report.steps)
    with_digests = [s for s in report.steps if s.thetas]
    forks = [s.t for s in with_digests if len(set(s.thetas.values())) > 1]
    compared = sum(len(s.thetas) for s in with_digests)
    so_far = "" if report.done else " so far"
    gaps = report.damage or ("none lost, the chain has no gap" if linked else "but the chain of commits is broken")
    same = f"θ bit-identical on all replicas after each outer step ({compared} digests)"
    unseen = "θ not compared: no digest is known"
    fork = f"θ differs between replicas after outer steps {forks}"
    return [
        Check(linked and not report.damage, f"{report.progress} outer steps committed{so_far}, {gaps}"),
        Check(report.twice == 0, f"{report.twice or 'no'} pseudogradients counted twice"),
        Check(not forks, fork if forks else same if compared else unseen),
    ]


def curve_of(report: Report) -> Curve:
    """Return the run's headline curve: rewards, or losses if the run has no rewards."""
    return headline_curve(report.steps, report.slots)


def summary(report: Report) -> str:
    """Return one screen of text: at most 24 lines of 80 columns."""
    lines = [headline(report), ""]
    lines += [f"  continues from {parent}"] if (parent := report.config.get("parent")) else []
    lines += _curve_lines(report)
    lines += [f"  data, ‖∇‖ per channel: {words}"] if (words := channel_words(report)) else []
    lines += _cost_lines(report)
    lines += [f"  {words}" for words in (*worth_words(worth(report)), *kept_words(report))]
    lines += ["", *_session_lines(report, room=21 - len(lines) - 5), ""]
    lines += [f"  {'ok ' if c.ok else 'NO '} {c.text}" for c in checks(report)]
    return "\n".join(_shortened(line) for line in lines[:24])


def _shortened(line: str, most: int = 80) -> str:
    """Cut a line to `most` columns. Cut a list of numbers only between them, because a cut 0.0022 reads 0.0."""
    if len(line) <= most:
        return line
    whole, mark, _ = line[: most - 1].rpartition(" · ")
    return f"{whole} …" if mark else line[:most]


def headline(report: Report) -> str:
    h = report.setting("outer", "sync_every", 0) or "?"
    return (
        f"{brief_name(report)}: {report.progress} outer steps in {duration(report.seconds)}, "
        f"{_counted_replicas(report)}, H = {h}"
    )


def _counted_replicas(report: Report) -> str:
    """Count the slots that any step counted, also slots that are no longer wanted."""
    counted = {slot for s in report.steps for slot in (*s.fresh, *(late for late, _ in s.carried))}
    return f"{len(counted)} replica{'' if len(counted) == 1 else 's'}" if counted else "no replica counted yet"


def brief_name(report: Report) -> str:
    """Return the run's name, cut to NAME characters so that the numbers after it fit on the line."""
    return report.name if len(report.name) <= NAME else report.name[: NAME - 1] + "…"


def _curve_lines(report: Report) -> list[str]:
    line = curve_of(report)
    if not (known := line.known):
        return ["  no reward and no loss yet", *_held_out_lines(report)]
    lines = [f"  mean {line.name:7s} {known[0]:.3f} {sparkline(line.mean, 48)} {known[-1]:.3f}"]
    if numbers := learning_words(newest_numbers(report.steps), without=line.name):
        lines.append(f"  newest step  {numbers}")
    if late := [f"{s}@{t}" for step in report.steps for s, t in step.carried]:
        lines.append(f"  counted later than their step: {', '.join(late)}")
    return lines + _held_out_lines(report)


def _held_out_lines(report: Report) -> list[str]:
    means = [evaluation.headline[1].mean for evaluation in report.evaluations]
    curve = [f"  held out     {means[0]:.3f} {sparkline(means, 48)} {means[-1]:.3f}"] if len(means) > 1 else []
    return [*curve, *(f"  held out {words}" for words in held_out_words(report))]


def held_out_words(report: Report) -> list[str]:
    """Return the newest evaluation as text, and a text if the run is over and its last θ has no evaluation."""
    found = report.evaluations
    words = [evaluation_words(found)] if found else []
    is_over = report.done and all(session.how != "running" for session in report.sessions)
    if is_over and report.setting("eval", "every", 0) and (not found or found[-1].step < report.head):
        words.append(f"@{report.head}: not evaluated, its replicas ended before; `diloco eval` does it")
    return words


def channel_words(report: Report) -> str:
    """Describe the loss channels in the newest outer step that logs them: each one's share of its data, and the
    norm of its gradient into the backbone; means over replicas.  "" if there is only one channel."""
    newest = max((e["step"] for e in report.of_kind("step") if "grpo_coverage" in e), default=-1)
    events = [e for e in report.of_kind("step") if e["step"] == newest]
    found = []
    for name in ("grpo", "sdpo", "replay"):
        coverage, norm = ([e[k] for e in events if k in e] for k in (f"{name}_coverage", f"{name}_grad_norm"))
        if coverage:
            found.append(f"{name} {fmean(coverage):.0%}" + (f" {fmean(norm):.1g}" if norm else ""))
    return " · ".join(found)


def _cost_lines(report: Report) -> list[str]:
    timed = [s for s in report.steps if s.seconds]
    if not timed:
        return []
    parts = " · ".join(f"{n} {fmean(s.part(p) for s in timed):.2f}" for n, p in zip(PART_NAMES, PARTS, strict=True))
    up, down = (fmean(b for s in timed for b in getattr(s, way).values()) for way in ("up", "down"))
    sizes = f"{byte_size(up)} up, {byte_size(down)} down"
    return [f"  seconds per step: {parts}", f"  bytes per sync and replica: {sizes}", *_outer_lines(report)]


def _outer_lines(report: Report) -> list[str]:
    words = outer_words(report)
    lines = [f"  outer step {words[0]}: {words[1]}"] if words else []
    if gated := [f"{s}@{step.t}" for step in report.steps for s in step.gated]:
        lines.append(f"  too long, counted as one of typical length: {', '.join(gated)}")
    if empty := [str(s.t) for s in report.steps if s.empty]:
        lines.append(f"  mean was zero, θ stayed: {len(empty)} of {report.head} outer steps ({', '.join(empty)})")
    if alone := [s.t for s in report.steps if len(s.fresh) == 1]:
        lines.append(f"  taken by one replica alone (unconfirmed): {len(alone)} of {report.head} outer steps")
    return lines


def outer_words(report: Report) -> tuple[int, str] | None:
    """Return the newest outer step that has numbers, and these numbers as text."""
    for step in reversed(report.steps):
        if step.empty:
            return step.t, "mean was zero, θ stays"
        if step.numbers:
            return step.t, " · ".join(form.format(step.numbers[k]) for k, form in NUMBERS.items() if k in step.numbers)
    return None


def solo_words(report: Report) -> str:
    """Return the warning if a single replica took the newest outer step; else ""."""
    if not report.steps or len(report.steps[-1].fresh) != 1:
        return ""
    last = report.steps[-1]
    return f"solo: outer step {last.t} was taken by {last.fresh[0]} alone, unconfirmed (min_replicas = 1)"


def _session_lines(report: Report, room: int) -> list[str]:
    lines = [f"  {x.name:8s} {_session_words(x, report.began)}" for x in report.sessions if is_slot(x.slot)]
    lines += [f"  actors   {words}" for words in actor_words(report)]
    whys = [f"  {'':8s} {x.name}: {x.why}" for x in report.sessions if x.why]
    lines += whys[max(0, len(whys) - max(0, room - len(lines))) :]  # the latest that fit
    if len(lines) > room:
        lines = [*lines[: room - 1], f"  ... and {len(lines) - room + 1} more sessions"]
    return lines


def actor_words(report: Report) -> list[str]:
    """Return a line about the rollouts that actors sampled, by the logs of actors and replicas; [] without actors.

    If only the newest logs were read (scope.py), both are counted from the first outer step in the replicas' logs."""
    sessions = [x for x in report.sessions if not is_slot(x.slot)]
    if not sessions:
        return []
    step_of = lambda e: s if type(s := e.get("step")) is int else 0  # noqa: E731
    since = min(map(step_of, report.of_kind("step")), default=0)
    sampled, found = ([e for e in report.of_kind(k) if step_of(e) >= since] for k in ("sampled", "rollouts_found"))
    late = sum(not e.get("stands", True) for e in sampled)
    used, old = (sum(n for e in found if type(n := e.get(name)) is int) for name in ("bundles", "expired"))
    count = len({x.slot for x in sessions})
    counts = f"{len(sampled)} bundles, {late} too late; {used} trained on, {old} too old or too far from the policy"
    return [f"{count}, since outer step {since}: {counts}" if since else f"{count}, {counts}"]


def _session_words(session: SessionSummary, began: float) -> str:
    joined = "never joined"
    if session.joined is not None:
        joined = f"joined at {session.joined - began:.1f} s (step {session.joined_step})"
    end = "" if session.ended is None else f" at {session.ended - began:.1f} s"
    return f"{session.end}{end}, counted in {len(session.commits)} steps, {joined}"


_WIDTH = 24  # at most so many characters of a list of steps


def kept_words(report: "Report") -> list[str]:
    """Describe in at most two lines which steps are left; [] if nothing was deleted."""
    collected = [e for e in report.of_kind("collected") if _is_whole(e)]
    if not collected and report.wanted.keep:
        return [f"`diloco gc` has deleted old data (--keep {report.wanted.keep}); `diloco verify` shows what is left"]
    if not collected:
        return []
    newest = max(collected, key=lambda e: (e["deltas_from"], e["means_from"], e["at"]))
    since = min((t for t in newest["snapshots"] if t >= newest["means_from"]), default=newest["means_from"])
    before = _steps([t for t in newest["snapshots"] if t < since])
    keep = report.wanted.keep or report.setting("fleet", "keep", "") or report.setting("fleet", "keep", 0)
    steps = [f"kept: every step from {since} on{before and f', and {before}'}"] if since else []
    gone = newest["deltas_from"]
    return [*steps, *([f"pseudogradients before {gone} are gone (fleet.keep = {keep})"] if gone else [])]


def _is_whole(event: Mapping[str, Any]) -> bool:
    steps = event.get("snapshots")
    numbers = [event.get("deltas_from"), event.get("means_from"), *(steps if isinstance(steps, list) else [None])]
    return all(type(n) is int for n in numbers)


def _steps(steps: list[int]) -> str:
    """Return "0, 8, 16", or the beginning of the list and its length."""
    text = ", ".join(map(str, steps))
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH].rpartition(',')[0]}, … ({len(steps)} of them)"
