"""The numbers of a live view, out of a report.  Pure; no torch here.

    commits     … ●──43 s──● t−1 ──43 s──● t        seconds per step: median of the newest PACE_STEPS intervals
                                         └─ now      ETA: (T − t) of these, less what the open step has taken so far
    commit t    samples 192 of r01 ──▶ samples per second of r01: 192 / 43 s, with all its waiting
    beat        phase, inner i of H, read at 12:00:03, written at 12:00:01: 2 s old, or silent
    steps       reward, loss, KL, entropy, length; evaluation ──▶ a MetricCurve each, by outer step

Money is not in it: prices are known to executors (executors/supervision/costs.py).

Not promised: an ETA of a fleet that changes; it counts with the seconds per step of just now.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from diloco.process.host import host_words
from diloco.runlog.learning import over_replicas
from diloco.runlog.reader import Report, SessionSummary, Step
from rendezvous.records.records import Beat

PACE_STEPS = 10
OLD_SESSIONS = 4  # that ended and were replaced, shown beside the newest of each slot
SILENT_S, SILENT_FAR_S = 3.0, 15.0  # without a beat; on a store that is not on this machine they come every five
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
    """One metric by outer step: (step, mean over the replicas that were read).   label: for people."""

    name: str
    label: str
    points: tuple[tuple[int, float], ...]

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points]


@dataclass(frozen=True)
class SessionRow:
    """One session of a slot, or a slot without a claim yet (generation 0).

    place: the platform, or the machine's name.   phase: of its beat; "silent", "starting", or how it ended.
    inner, inner_steps: i of H, None outside of training.   beat_age_s: None where it has no beat of its own.
    beat_unread_s: since the reader last looked at its beat.   counted: outer steps that list its work.
    ended: Unix time.   end: how, in words.   why: the reason, in a line.   is_newest: of its slot.
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
    """state: "not begun", "running", "done", "stopped".   step: outer steps that are committed.   steps: T, 0: no end.

    step_s: seconds per outer step.   eta_s: until T.   open_s: since the newest commit.   snapshot_age_s: of its θ.
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
    """now: Unix time.   read_at: slot -> when its beat was read (default: now)."""
    state = run_state(report)
    step_s = seconds_per_step(report.steps)
    open_s = now - report.steps[-1].at if report.steps and state == "running" else None
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
    """Return the same overview some seconds later, when nothing new has been read."""
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
    """Return the run's elapsed seconds; its clock stands once no session runs any more."""
    if state == "not begun":
        return 0.0
    return max(0.0, {"done": report.ended, "stopped": report.last_sign}.get(state, now) - report.began)


def seconds_per_step(steps: Sequence[Step]) -> float | None:
    """Return the median seconds of the newest outer steps; None before there are two commits."""
    newest = [step.at for step in steps[-PACE_STEPS - 1 :]]
    gaps = [max(0.0, later - sooner) for sooner, later in pairwise(newest)]
    return median(gaps) if gaps else None


def _eta_s(report: Report, state: str, step_s: float | None, open_s: float | None) -> float | None:
    if state != "running" or step_s is None or not report.wanted.steps:
        return None
    return max(0.0, (report.wanted.steps - report.head) * step_s - min(open_s or 0.0, step_s))


def _snapshot_age_s(report: Report, snapshot: int, now: float) -> float | None:
    """Since θ of this step came to be, by the commit before it; None where that was not read."""
    made = report.began if snapshot == 0 else next((s.at for s in report.steps if s.t == snapshot - 1), None)
    return None if made is None else max(0.0, now - made)


# -------------------------------------------------------------------- rows


def session_rows(report: Report, now: float, read_at: Mapping[str, float]) -> tuple[SessionRow, ...]:
    """Return all sessions, by slot and generation, and a row for each unclaimed slot while the run goes on."""
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
        rows += [SessionRow(slot, 0) for slot in report.wanted.slot_names if slot not in newest]
    return tuple(sorted(rows, key=lambda row: (row.slot, row.generation)))


def rows_to_show(rows: Sequence[SessionRow]) -> list[SessionRow]:
    """Each slot's newest session, and the latest few that ended before."""
    before = sorted((row for row in rows if not row.is_newest), key=lambda row: row.ended or 0.0)
    late = {row.name for row in before[-OLD_SESSIONS:]}
    return [row for row in rows if row.is_newest or row.name in late]


def _session_row(session: SessionSummary, *, is_newest: bool) -> SessionRow:
    row = SessionRow(
        session.slot, session.generation, place_of_host(session.host), session.device,
        counted=len(session.commits), is_newest=is_newest,
    )  # fmt: skip
    if is_newest and session.how == "running":
        return row
    ended = session.claimed if session.ended is None else session.ended
    return replace(row, phase=session.how, ended=ended, end=session.end, why=session.why)


def _with_beat(
    row: SessionRow, beat: Beat, report: Report, *, now: float, read_at: float, rate: float | None
) -> SessionRow:
    phase = phase_of(beat, report.url, read_at)
    return replace(
        row,
        phase=phase,
        step=beat.step,
        inner=beat.inner if phase == "train" else None,
        inner_steps=inner_steps_per_round(report),
        samples_per_s=rate if phase not in ("silent", "left") else None,
        beat_age_s=max(0.0, now - beat.at),
        beat_unread_s=max(0.0, now - read_at),
        note=beat.note,
    )


def phase_of(beat: Beat, url: str, read_at: float) -> str:
    """The phase that a replica tells, or "silent" where its beat was old when it was read."""
    return "silent" if beat.phase != "left" and read_at - beat.at > silent_s(url) else beat.phase


def silent_s(url: str) -> float:
    """Return how old the beat of a living session may be, in seconds."""
    return SILENT_S if url.startswith(("file://", "memory://")) or "://" not in url else SILENT_FAR_S


def inner_steps_per_round(report: Report) -> int:
    """Inner steps between two meetings."""
    return report.setting("outer", "sync_every", 1) // max(1, report.setting("outer", "fragments", 1))


def place_of_host(host: str) -> str:
    """ "modal/r01.2" -> "modal"; a user's own machine has its name."""
    return host_words(host.partition("/")[0])


def samples_per_second(steps: Sequence[Step]) -> dict[str, float]:
    """Slot -> what its newest listed work learned from, per second of that outer step."""
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
    """Means over the replicas whose numbers were read; the reward where it came late, too."""
    rewards = [step.mean_reward] if step.mean_reward is not None else list(step.reward.values())
    numbers = {name: value for name, value in over_replicas(step).items() if name in LABELS}
    return {"reward": fmean(rewards), **numbers} if rewards else numbers
