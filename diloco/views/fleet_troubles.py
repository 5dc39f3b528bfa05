"""Detect troubles of the fleet: no commit, lost slots, money, pseudogradients that do not count, old snapshots.

    commits  ●──30 s──●──30 s──●──────────────── 130 s ───────▶ now        stalled       > 3 × the median, and a floor
    lost     r01 ✗ · · ✗ · ✗                                               slot_lost     3, with little work between
    spent    ███████████████████████████░░░░░  84 %                        budget        80 % of max_usd or max_hours
    r00      train ███░░░░ wait      r01  train ███████                    waits         a quarter of the time
    commits  snapshot 8 … head 31, one every 4 steps                       snapshot_late
    beat     at 12:00, and a step that it follows at 14:00                 clock         a minute and more
    r00, r02: trl 1.16.0      r01: trl 1.15.0                               versions

Each detector is a pure function of a report, the time and the costs.

Not promised: the cause.  A text names the last observation; docs/troubles.md says where to look.
"""

from collections import Counter, defaultdict
from itertools import pairwise
from statistics import median
from typing import Any

from diloco.runlog.reader import SUPERVISOR, Report
from diloco.runlog.sessions import SessionSummary
from diloco.runlog.steps import PARTS, Step
from diloco.units import dollars, duration
from diloco.views.overview import (
    SKEW_S,
    dated_steps,
    is_fresh,
    newest_step_at,
    run_state,
    seconds_per_step,
    session_of,
    silent_s,
    step_gaps,
    written_at,
)
from diloco.views.trouble import Spending, Trouble, trouble
from rendezvous.records.records import Beat

STALL = 3.0  # × the median of the newest outer steps
LEAST_GAPS = 3  # a run with fewer intervals is warming up
STALL_FLOORS = 20  # × the limit of a live heartbeat's age, so that the replacement of a replica is not a stall
LOSSES = 3
CALM_STEPS = 20  # counted outer steps of a slot after which earlier losses are forgotten
BUDGET_SHARE = 0.8
RECENT_STEPS = 10  # older steps are not reported
WAITS = 0.25  # share of a replica's time that it waits
LEAST_WAITS = 3  # minimal number of timed steps among the newest
SNAPSHOT_SLACK = 3  # outer steps: for the writing of a snapshot, its manifest, and the commit that names it


def stalled(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find a run without a commit for 3 × the median time, unless it is stopped, starts or evaluates."""
    if run_state(report) != "running" or len(report.steps) <= LEAST_GAPS or _evaluates(report, now):
        return []
    median_s = median(step_gaps(report.steps))  # so that a few quick steps (without a slow replica) do not count
    usual_s = max(seconds_per_step(report.steps) or 0.0, median_s)
    open_s = now - _open_since(report, now) - _evaluated_s(report, now)
    if open_s <= max(STALL * usual_s, STALL_FLOORS * silent_s(report)):
        return []
    text = f"no outer step for {duration(open_s)}, where {duration(usual_s)} are usual; {_who_is_there(report, now)}"
    advice = "`diloco logs RUN SLOT` for a silent replica; `diloco resume RUN` if no supervisor runs"
    return [trouble("stalled", text, advice, step=report.head)]


def _open_since(report: Report, now: float) -> float:
    """Return the time of the newest commit, or the later begin of a supervisor or of the first running session."""
    begins = [e["at"] for e in report.of_kind("started") if e["who"].startswith(SUPERVISOR)][-1:]
    slots = set(report.slots)
    running = [x for x in report.sessions if x.how == "running" and x.slot in slots]
    joined = [x.joined for x in running if x.joined is not None]
    return max([newest_step_at(report, now), *begins, *([min(joined)] if joined else [])])


def _evaluates(report: Report, now: float) -> bool:
    """Whether a live replica scores held-out prompts, by its heartbeat.  A watchdog ends one that hangs."""
    return any(b.evaluates and is_fresh(b, report, now) for b in report.beats.values())


def _evaluated_s(report: Report, now: float) -> float:
    """Return the open step's seconds of evaluation."""
    since = newest_step_at(report, now)
    spans = [e.get("seconds") for e in report.of_kind("evaluated") if e["at"] > since]
    return max((s for s in spans if isinstance(s, int | float)), default=0.0)


def _who_is_there(report: Report, now: float) -> str:
    names = report.wanted.slot_names
    there = [b for s, b in sorted(report.beats.items()) if s in names and b.phase != "left"]
    there = [b for b in there if is_fresh(b, report, now)]
    notes = [f"{b.slot}: {b.note}" for b in there if b.note][:1]
    return "; ".join([f"{len(there)} of {len(names)} replicas beat", *notes])


def slot_lost(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find slots with three lost launches, and fewer than CALM_STEPS counted steps between them and after them."""
    if report.done:
        return []
    found = [_lost_in_a_row(report, slot) for slot in report.wanted.slot_names]
    return [one for one in found if one is not None]


def _lost_in_a_row(report: Report, slot: str) -> Trouble | None:
    lost = [e for e in report.of_kind("lost") if e["slot"] == slot and e["who"].startswith(SUPERVISOR)]
    if len(lost) < LOSSES:
        return None
    counted = [at for x in report.sessions if x.slot == slot for _, at in x.commits]
    calm_before = [sum(a["at"] < at <= b["at"] for at in counted) >= CALM_STEPS for a, b in pairwise(lost)]
    first = max((i + 1 for i, calm in enumerate(calm_before) if calm), default=0)
    row = lost[first:]
    if len(row) < LOSSES or sum(at > row[-1]["at"] for at in counted) >= CALM_STEPS:
        return None
    step = sum(s.at <= row[0]["at"] for s in report.steps)
    why = next((x.why for x in reversed(report.sessions) if x.slot == slot and x.why), "")
    text = f"lost {len(row)} times in a row" + (f", the newest: {why}" if why else "")
    return trouble("slot_lost", text, f"`diloco logs RUN {slot}` has its last lines", step=step, slot=slot)


def budget(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find a running run that has used 80 % of max_usd or max_hours."""
    if spent is None or run_state(report) != "running":
        return []
    wanted = report.wanted
    left = []
    if wanted.max_usd and spent.usd >= BUDGET_SHARE * wanted.max_usd:
        lasts = (wanted.max_usd - spent.usd) / spent.usd_per_hour * 3600 if spent.usd_per_hour > 0 else None
        lasting = "" if lasts is None else f", which last for {duration(max(0.0, lasts))}"
        left.append(
            f"{dollars(spent.usd)} of {dollars(wanted.max_usd)} are spent ({spent.usd / wanted.max_usd:.0%}){lasting}"
        )
    if wanted.max_hours and spent.hours >= BUDGET_SHARE * wanted.max_hours:
        left.append(f"{spent.hours:.2f} of {wanted.max_hours:g} hours are over ({spent.hours / wanted.max_hours:.0%})")
    if not left:
        return []
    text = f"{' and '.join(left)}, at outer step {report.progress}"
    advice = "the run ends by itself and nothing is lost; `diloco resume RUN --max-usd X --max-hours H` allows more"
    return [trouble("budget", text, advice, step=report.head)]


def diverged(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find replicas with other weights than the run's, or with numbers that are not finite, until a later commit counts
    their slot."""
    found = list[Trouble]()
    for slot in report.wanted.slot_names:
        sessions = [x for x in report.sessions if x.slot == slot]
        bad = [(event, x) for x in sessions if (event := _newest_divergence(report, x)) is not None]
        if bad and not any(at > bad[-1][0]["at"] for x in sessions for _, at in x.commits):
            found.append(_diverged_words(report, *bad[-1], times=len(bad)))
    return found


def _newest_divergence(report: Report, session: SessionSummary) -> dict[str, Any] | None:
    """Return the newest event about wrong weights, a NaN or an infinity of this session, from any writer."""
    own = [e for e in report.of_kind("diverged", "bad_delta") if e["who"] == session.name]
    sent = [e for e in report.of_kind("poisoned") if f"/delta/{session.name}-" in str(e.get("blob", ""))]
    return max([*own, *sent], key=lambda e: e["at"], default=None)


def _diverged_words(report: Report, event: dict[str, Any], session: SessionSummary, times: int) -> Trouble:
    fault = "a loss, weights or a pseudogradient that are not numbers (NaN or infinity) or far too large"
    advice = "its next session heals from the bucket; if it happens again, set a smaller inner.lr, or use fp32 weights"
    if event["event"] == "diverged":
        fault = "other weights than the run, or a changed base (another digest)"
        advice = "its next session heals from the bucket; if it happens again only on that machine, use another "
        advice += "machine; if it happens on several machines, your own code may write to frozen weights"
    often = f", {times} times by now" if times > 1 else ""
    text = f"{session.name} had {fault}{often}" + (f": {session.why}" if session.why else "")
    return trouble("diverged", text, advice, step=_step_of(report, event["at"]), slot=session.slot)


def forged(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find records by a program without the run's key, in the last RECENT_STEPS outer steps."""
    found = _recent(report, "forged")
    if not found:
        return []
    what = f"{_several_records(found)} without this run's seal and ignored by replicas"
    advice = "another program can write into the bucket: change the bucket's credentials, then `diloco verify RUN`"
    text = f"{what}; the newest: {found[-1].get('key')}"
    return [trouble("forged", text, advice, step=_step_of(report, found[0]["at"]))]


def bad_records(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find invalid offers, doubted rollouts, and poisoned pseudogradients of no known session, in RECENT_STEPS steps.

    `diverged` finds a session's own."""
    names = [f"/delta/{session.name}-" for session in report.sessions]
    recent = _recent(report, "bad_offer", "poisoned", "rollouts_doubted")
    found = [e for e in recent if not any(name in str(e.get("blob", "")) for name in names)]
    if not found:
        return []
    newest = found[-1]
    what = newest.get("key") or newest.get("blob")
    text = f"{_several_records(found)} not valid and ignored by replicas; the newest: {what}: {newest.get('text')}"
    advice = "`diloco explain RUN --step T` has all offers of a step; another program may write into the bucket"
    return [trouble("bad_records", text, advice, step=_step_of(report, found[0]["at"]))]


def _recent(report: Report, *kinds: str) -> list[dict[str, Any]]:
    since = report.steps[-RECENT_STEPS].at if len(report.steps) >= RECENT_STEPS else 0.0
    return [e for e in report.of_kind(*kinds) if e["at"] >= since]


def _several_records(found: list[dict[str, Any]]) -> str:
    """Return "3 records are". An object that several replicas reported counts once."""
    count = len({str(e.get("key") or e.get("blob")) for e in found})
    return f"{count} record{' is' if count == 1 else 's are'}"


def _step_of(report: Report, at: float) -> int:
    return sum(step.at <= at for step in report.steps)


def gated(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find replicas whose pseudogradient was too long in one of the newest outer steps."""
    found: dict[str, list[int]] = {}
    for step in report.steps[-RECENT_STEPS:]:
        for slot in step.gated:
            found.setdefault(slot, []).append(step.t)
    return [_gated_words(slot, steps) for slot, steps in sorted(found.items())]


def _gated_words(slot: str, steps: list[int]) -> Trouble:
    where = f"outer step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
    text = f"its pseudogradient was too long at {where}, and counted as one of typical length (outer.norm_gate)"
    advice = "compare its loss, data and device with the others'"
    return trouble("gated", text, advice, step=steps[0], slot=slot)


def waits(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find replicas that wait at least a quarter of their time for a slower replica, and the cost of these waits."""
    known = [step for step in report.steps[-RECENT_STEPS:] if len(step.seconds) > 1]
    if run_state(report) != "running" or len(known) < LEAST_WAITS:
        return []
    inner_s, shares = _inner_step_s(known), _wait_shares(known)
    slowest = max(inner_s, key=lambda slot: inner_s[slot], default="")
    idle = {slot: share for slot, share in shares.items() if share >= WAITS and slot != slowest}
    if not idle or inner_s[slowest] < (1 + WAITS) * min(inner_s.values()):
        return []
    most = max(idle, key=lambda slot: idle[slot])
    who = f"{most} waits" if len(idle) == 1 else f"{', '.join(sorted(idle))} wait, {most} the most:"
    text = f"{who} {idle[most]:.0%} of its time for {slowest}, whose inner step takes {duration(inner_s[slowest])},"
    text += f" where that of {most} takes {duration(inner_s[most])}"
    if spent is not None and spent.usd_per_hour > 0:
        text += f"; that is about {dollars(sum(idle.values()) / len(shares) * spent.usd_per_hour)} an hour"
    advice = "use GPUs of one kind or a larger outer.sync_every, or remove the slow replica: `diloco drain RUN SLOT`"
    return [trouble("waits", text, advice, step=known[0].t)]


def _inner_step_s(steps: list[Step]) -> dict[str, float]:
    """Return slot -> mean seconds of one inner step, over the inner steps that count."""
    spent, counts = defaultdict[str, float](float), Counter[str]()
    for step in steps:
        for slot, parts in step.seconds.items():
            if step.h.get(slot):
                spent[slot] += parts.get("inner_s", 0.0)
                counts[slot] += step.h[slot]
    return {slot: spent[slot] / counts[slot] for slot in counts}


def _wait_shares(steps: list[Step]) -> dict[str, float]:
    """Return slot -> the share of its time in which it waited for a commit."""
    waited, whole = defaultdict[str, float](float), defaultdict[str, float](float)
    for step in steps:
        for slot, parts in step.seconds.items():
            waited[slot] += parts.get("wait_s", 0.0)
            whole[slot] += sum(parts.get(name, 0.0) for name in PARTS)
    return {slot: waited[slot] / whole[slot] for slot in whole if whole[slot] > 0}


def snapshot_late(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find a run without a snapshot for two periods: a joining replica must replay all steps since then."""
    every = report.setting("outer", "snapshot_every", 0)
    if run_state(report) != "running" or not report.steps or not every:
        return []
    newest = report.snapshot
    behind = report.head - newest
    if behind < 2 * every + SNAPSHOT_SLACK:
        return []
    troubles = [str(e["trouble"]) for e in report.of_kind("not_written") if e.get("trouble")][-1:]
    text = f"the newest snapshot is that of outer step {newest}, {behind} steps ago; one is due every {every} steps"
    advice = "`diloco doctor URL` tests whether large objects can be written"
    return [trouble("snapshot_late", "; ".join([text, *troubles]), advice, step=newest + every)]


def clock(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find running replicas whose clock differs by a minute or more from this machine's, or from the outer steps."""
    running = {x.slot for x in report.sessions if x.how == "running"}
    beats = [beat for slot, beat in sorted(report.beats.items()) if slot in running and beat.phase != "left"]
    skews = [(beat, _skew(beat, report, now)) for beat in beats]
    advice = "set that machine's clock; until then, ages, hours, prices and the order of logs may be wrong"
    if run_state(report) == "running" and len(skews) > 1 and (least := min(skew for _, skew in skews)) >= SKEW_S:
        text = f"this machine's clock is {duration(least)} behind the clocks of all {len(skews)} replicas"
        return [trouble("clock", text, "set this machine's clock; until then, ages and prices are wrong", step=0)]
    return [
        trouble(
            "clock",
            f"its clock is {duration(abs(skew))} {'ahead of this machine' if skew > 0 else 'behind the outer steps'}",
            advice,
            step=beat.step,
            slot=beat.slot,
        )
        for beat, skew in skews
        if run_state(report) == "running" and abs(skew) >= SKEW_S
    ]


def _skew(beat: Beat, report: Report, now: float) -> float:
    """Return by how many seconds a replica's clock is ahead of this machine's; < 0: it is behind outer steps' times."""
    skew = beat.at - min(written_at(beat, report, now), now)
    if abs(skew) >= SKEW_S or now - beat.at < SKEW_S:
        return skew
    latest = fall = 0.0  # times of commits: a later commit may have an earlier time
    for step in dated_steps(report, now):
        if step.by == session_of(beat):
            fall = max(fall, latest - step.at)
        else:
            latest = max(latest, step.at)
    return -fall


def versions(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find running replicas that compute with another version of a library than most of the others."""
    running = [x for x in report.sessions if x.how == "running" and run_state(report) == "running"]
    names = sorted({name for session in running for name in session.versions})
    used = {name: Counter(x.versions[name] for x in running if name in x.versions) for name in names}
    usual = {name: versions.most_common(1)[0][0] for name, versions in used.items()}
    advice = "install the same versions at all places; a replica computes with them from its next session on"
    return [
        trouble(
            "versions",
            f"it runs {name} {session.versions[name]}, and other replicas run {name} {usual[name]}",
            advice,
            step=session.joined_step,
            slot=session.slot,
        )
        for session in running
        for name in names
        if session.versions.get(name, usual[name]) != usual[name]
    ]
