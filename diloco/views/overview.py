"""Compute the numbers of a live view from a report.  Pure functions, without torch.

    commits     … ●──43 s──● t−1 ──43 s──● t        seconds per step: median of the newest PACE_STEPS intervals
                                         └─ now      ETA: (T − t) of these, minus the time of the open step
    commit t    samples 192 of r01 ──▶ samples per second of r01: 192 / 43 s, including its waits
    beat        phase, inner i of H, read at 12:00:03, written at 12:00:01: 2 s old, or silent
    clocks      r01's heartbeat of 09:00 follows r00's commit of 12:00: r01's clock is behind, it was written at 12:00
                r00's heartbeat is of 14:00, and it is 12:00 here: r00's clock is ahead, its commits date no heartbeat
    steps       reward, loss, KL, entropy, length; evaluation ──▶ a MetricCurve each, by outer step

An overview has no costs, because only executors know prices (executors/supervision/costs.py).

Not promised: the ETA of a fleet that changes (it uses the current seconds per step), or the age of a heartbeat whose
writer's clock is ahead, or is behind while no other replica closes outer steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from diloco.process.processes import host_words
from diloco.runlog.learning import over_replicas
from diloco.runlog.reader import Report
from diloco.runlog.sessions import SessionSummary
from diloco.runlog.steps import Step
from rendezvous.agreement.membership import REQUESTS
from rendezvous.layout import is_slot
from rendezvous.records.records import Beat
from rendezvous.stores.open import stays_here

PACE_STEPS = 10
OLD_SESSIONS = 4  # replaced sessions that are shown beside the newest of each slot
FOLLOWED = 100  # newest outer steps that may show when a heartbeat was written
SKEW_S = 60.0  # least difference of a clock that counts as wrong
SILENT_S, SILENT_FAR_S = 3.0, 15.0  # age of a heartbeat; a store far away gets one every 5 s
LABELS = {
    "reward": "reward",
    "loss": "loss",
    "kl": "KL",
    "entropy": "entropy",
    "completion_length": "length",
    "evaluation": "held out",
}


@dataclass(frozen=True)
class MetricCurve:
    """One metric by outer step: (step, mean over the replicas that were read).   label: the displayed name."""

    name: str
    label: str
    points: tuple[tuple[int, float], ...]

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points]


@dataclass(frozen=True)
class SessionRow:
    """One session of a slot, or a slot without a claim yet (generation 0).

    place: the platform, or the machine's name.   phase: of its heartbeat; "silent", "starting", or the kind of its end.
    inner, inner_steps: i of H, None outside of training.   beat_age_s: None if it has no heartbeat.
    beat_unread_s: seconds since the last read of its heartbeat.   counted: number of outer steps that used its work.
    ended: Unix time.   end: the end as text.   why: the reason, in a line.   is_newest: no later one is in the slot.
    """

    slot: str
    generation: int
    place: str = ""
    device: str = ""
    phase: str = "starting"
    step: int | None = None
    inner: int | None = None
    inner_steps: int = 0
    samples_per_s: float | None = None
    beat_age_s: float | None = None
    beat_unread_s: float = 0.0
    counted: int = 0
    ended: float | None = None
    end: str = ""
    why: str = ""
    note: str = ""
    is_newest: bool = True

    @property
    def name(self) -> str:
        return f"{self.slot}-{self.generation}" if self.generation else self.slot

    @property
    def is_live(self) -> bool:
        return self.ended is None


@dataclass(frozen=True)
class Overview:
    """A live view's numbers.   state: "not begun", "running", "done" or "stopped".

    step: number of committed outer steps.   steps: number of wanted steps, 0 if unlimited.   step_s: seconds per step.
    eta_s: time until the end.   open_s: time since the newest commit.   snapshot_age_s: the newest snapshot's.
    """

    name: str
    url: str
    state: str
    step: int
    steps: int
    elapsed_s: float
    open_s: float | None
    step_s: float | None
    eta_s: float | None
    snapshot: int | None
    snapshot_age_s: float | None
    rows: tuple[SessionRow, ...]
    series: tuple[MetricCurve, ...]


def overview(report: Report, now: float, *, read_at: Mapping[str, float] | None = None) -> Overview:
    """Compute the overview.   now: Unix time.   read_at: slot -> time of its heartbeat's read (default: now)."""
    state = run_state(report)
    step_s = seconds_per_step(report.steps)
    open_s = now - newest_step_at(report, now) if report.steps and state == "running" else None
    snapshot = report.snapshot if report.steps else None
    return Overview(
        name=report.name,
        url=report.url,
        state=state,
        step=report.head,
        steps=report.wanted.steps,
        elapsed_s=_elapsed_s(report, state, now),
        open_s=open_s,
        step_s=step_s,
        eta_s=_eta_s(report, state, step_s, open_s),
        snapshot=snapshot,
        snapshot_age_s=None if snapshot is None else _snapshot_age_s(report, snapshot, now),
        rows=session_rows(report, now, read_at or {}),
        series=series_of(report),
    )


def aged(seen: Overview, by_s: float) -> Overview:
    """Return the same overview `by_s` seconds later, without new records."""
    rows = tuple(
        row
        if row.beat_age_s is None
        else replace(row, beat_age_s=row.beat_age_s + by_s, beat_unread_s=row.beat_unread_s + by_s)
        for row in seen.rows
    )
    later = lambda age: None if age is None else age + by_s  # noqa: E731
    eta_s = None if seen.eta_s is None else max(0.0, seen.eta_s - by_s)
    running_s = by_s if seen.state == "running" else 0.0
    return replace(
        seen,
        elapsed_s=seen.elapsed_s + running_s,
        open_s=later(seen.open_s),
        eta_s=eta_s,
        snapshot_age_s=later(seen.snapshot_age_s),
        rows=rows,
    )


def run_state(report: Report) -> str:
    if report.done:
        return "done"
    if report.stopped:
        return "stopped"
    return "running" if report.sessions or report.head else "not begun"


def _elapsed_s(report: Report, state: str, now: float) -> float:
    """Return the seconds from the run's begin to now, or to its end or stop."""
    if state == "not begun" or not report.began:
        return 0.0
    return max(0.0, {"done": report.ended, "stopped": report.last_sign}.get(state, now) - report.began)


def seconds_per_step(steps: Sequence[Step]) -> float | None:
    """Return the median seconds of the newest outer steps; None before the second commit."""
    gaps = step_gaps(steps[-PACE_STEPS - 1 :])
    return median(gaps) if gaps else None


def step_gaps(steps: Sequence[Step]) -> list[float]:
    """Return the seconds of outer steps. If the time falls by SKEW_S at a commit, compare each closer's commits."""
    pairs = list(pairwise(steps))
    if any(before.at - step.at >= SKEW_S for before, step in pairs):
        newest, own = dict[str, Step](), list[tuple[Step, Step]]()
        for step in steps:
            own += [(newest[step.by], step)] if step.by in newest else []
            newest[step.by] = step
        pairs = own or pairs
    return [max(0.0, step.at - before.at) / (step.t - before.t) for before, step in pairs]


def _eta_s(report: Report, state: str, step_s: float | None, open_s: float | None) -> float | None:
    if state != "running" or step_s is None or not report.wanted.steps:
        return None
    return max(0.0, (report.wanted.steps - report.head) * step_s - min(open_s or 0.0, step_s))


def _snapshot_age_s(report: Report, snapshot: int, now: float) -> float | None:
    """Return the age of this step's θ, by the commit that made it; None if that was not read."""
    made = report.began if snapshot == 0 else next((s.at for s in report.steps if s.t == snapshot - 1), None)
    return None if made is None else max(0.0, now - made)


# -------------------------------------------------------------------- rows


def session_rows(report: Report, now: float, read_at: Mapping[str, float]) -> tuple[SessionRow, ...]:
    """Return all sessions, by slot and generation; in an unfinished run also a row for each unclaimed slot."""
    newest = {session.slot: session for session in report.sessions}
    rates = samples_per_second(report.steps)
    rows = [_session_row(session, is_newest=session is newest[session.slot]) for session in report.sessions]
    beats = {(slot, beat.generation): beat for slot, beat in report.beats.items()}
    rows = [
        _with_beat(row, beat, report, now=now, read_at=read_at.get(row.slot, now), rate=rates.get(row.slot))
        if row.is_live and (beat := beats.get((row.slot, row.generation))) is not None
        else row
        for row in rows
    ]
    if not report.done:
        rows += [SessionRow(slot, 0) for slot in unclaimed_names(report)]
    return tuple(sorted(rows, key=lambda row: (row.slot, row.generation)))


def unclaimed_names(report: Report) -> list[str]:
    """Return the slots and actors without a session.   An actor `--name a07` does not ask for a00 … a06."""
    wanted, claimed = report.wanted, {session.slot for session in report.sessions}
    asked_for = [name for name in wanted.member_names if is_slot(name) or wanted.is_kept(name) or name in wanted.guests]
    return [name for name in asked_for if name not in claimed]


def rows_to_show(rows: Sequence[SessionRow]) -> list[SessionRow]:
    """Return each slot's newest session, and the few earlier sessions that ended last."""
    before = sorted((row for row in rows if not row.is_newest), key=lambda row: row.ended or 0.0)
    late = {row.name for row in before[-OLD_SESSIONS:]}
    return [row for row in rows if row.is_newest or row.name in late]


def _session_row(session: SessionSummary, *, is_newest: bool) -> SessionRow:
    row = SessionRow(
        session.slot, session.generation, host_words(session.host.partition("/")[0]), session.device,
        counted=len(session.commits), is_newest=is_newest,
    )  # fmt: skip
    if is_newest and session.how == "running":
        return row
    ended = session.claimed if session.ended is None else session.ended
    return replace(row, phase=session.how, ended=ended, end=session.end, why=session.why)


def _with_beat(
    row: SessionRow, beat: Beat, report: Report, *, now: float, read_at: float, rate: float | None
) -> SessionRow:
    written = written_at(beat, report, now)
    phase = "silent" if beat.phase != "left" and read_at - written > silent_s(report) else beat.phase
    return replace(
        row,
        phase=phase,
        step=beat.step,
        inner=beat.inner if phase == "train" else None,
        inner_steps=inner_steps_per_round(report),
        samples_per_s=rate if phase not in ("silent", "left") else None,
        beat_age_s=max(0.0, now - written),
        beat_unread_s=max(0.0, now - read_at),
        note=beat.note,
    )


def written_at(beat: Beat, report: Report, now: float) -> float:
    """Return the Unix time at which a heartbeat was written: by its clock, but not before the steps that it follows.

    A replica whose clock is behind is alive while the outer steps that it has applied are new."""
    return max([beat.at, *(min(step.at, now) for step in dated_steps(report, now) if step.t < beat.step)])


def dated_steps(report: Report, now: float) -> list[Step]:
    """Return the newest outer steps, except steps that a session with a clock ahead of this machine's has closed.

    The time of a step is too early if its closer's clock is behind."""
    newest = report.steps[-FOLLOWED:]
    beats = (report.beats.get(by.rpartition("-")[0]) for by in {step.by for step in newest})  # of thousands of slots
    told = [(session_of(beat), beat.at) for beat in beats if beat is not None]
    told += [(step.by, step.at) for step in newest]
    ahead = {session for session, at in told if at - now >= SKEW_S}
    return [step for step in newest if step.by not in ahead]


def session_of(beat: Beat) -> str:
    return f"{beat.slot}-{beat.generation}"


def newest_step_at(report: Report, now: float) -> float:
    """Return the Unix time of the newest commit: not before earlier commits, and corrected by its closer's clock lead.

    The lead of a session that has been replaced is unknown. Then the usual seconds count from the newest dated step."""
    step, dated = report.steps[-1], dated_steps(report, now)
    beats = [beat for beat in report.beats.values() if session_of(beat) == step.by]
    lead = max([beat.at - now for beat in beats if beat.at - now >= SKEW_S], default=0.0)
    if step.at - lead - now >= SKEW_S and dated:
        last = max(dated, key=lambda one: one.at)
        return min(now, last.at + (step.t - last.t) * (seconds_per_step(report.steps) or 0.0))
    return max([min(step.at - lead, now), *(min(one.at, now) for one in dated)])


def is_fresh(beat: Beat, report: Report, now: float) -> bool:
    """Whether the heartbeat is no older than a live session's may be."""
    return now - written_at(beat, report, now) <= silent_s(report)


def silent_s(report: Report) -> float:
    """Return the maximal age of a live session's heartbeat, in seconds; a slow store delays its writing and reading."""
    return (SILENT_S if stays_here(report.url) else SILENT_FAR_S) + REQUESTS * report.request_s


def inner_steps_per_round(report: Report) -> int:
    """Return the inner steps between two syncs."""
    return report.setting("outer", "sync_every", 1) // max(1, report.setting("outer", "fragments", 1))


def samples_per_second(steps: Sequence[Step]) -> dict[str, float]:
    """Return slot -> samples of its newest listed work, per second of that outer step."""
    found = dict[str, float]()
    for step, before in zip(reversed(steps[-PACE_STEPS:]), reversed(steps[-PACE_STEPS - 1 : -1]), strict=False):
        if (took := step.at - before.at) > 0:
            found = {slot: count / took for slot, count in step.samples.items()} | found
    return found


# -------------------------------------------------------------------- curves


def series_of(report: Report) -> tuple[MetricCurve, ...]:
    """Return one curve for each metric with a value."""
    points: dict[str, list[tuple[int, float]]] = {name: [] for name in LABELS}
    for step in report.steps:
        for name, value in step_values(step).items():
            points[name].append((step.t, value))
    points["evaluation"] = [(found.step, found.headline[1].mean) for found in report.evaluations]
    return tuple(MetricCurve(name, LABELS[name], tuple(found)) for name, found in points.items() if found)


def step_values(step: Step) -> dict[str, float]:
    """Return means over the replicas whose numbers were read. If no reward is fresh, late rewards count."""
    rewards = [step.mean_reward] if step.mean_reward is not None else list(step.reward.values())
    numbers = {name: value for name, value in over_replicas(step).items() if name in LABELS}
    return {"reward": fmean(rewards), **numbers} if rewards else numbers
