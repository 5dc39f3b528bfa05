"""A run, read back from its bucket alone.

    control, commits, offers, claims, beats, leaves, logs ──▶ Reader ──▶ Report ──┬▶ summary        one screen
                                                                                  ├▶ checks         said honestly
                                                                                  └▶ write_report   report.html, .png
Anybody who can read the bucket can do this at any time, also while the run goes on; `Reader.refresh` reads only what
is new.  No torch here, and matplotlib only inside `write_report`.

Not promised: times of different machines on one scale (they are the clocks of whoever wrote them), nor what a
replica said after its last outer step before a `kill -9`.
"""

import html
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rendezvous import layout
from rendezvous.membership import Wanted, read_control
from rendezvous.records import Beat, Claim, Commit, Leave, Offer, digest
from rendezvous.store import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SUPERVISOR = "supervisor"  # the supervisor's name where replicas have their slot
PARTS = ("inner_s", "offer_s", "wait_s", "mean_s")
PART_NAMES = ("train", "offer", "wait", "mean")
LAST_WORDS = ("left", "fenced", "gave_up", "diverged", "crashed")  # events after which a life is over
BAD_ENDS = ("killed", "lost", "crashed", "diverged", "gave up")


class ReportError(RuntimeError):
    """The report cannot be drawn."""


@dataclass
class Step:
    """One committed outer step.   reward, h: slot -> of the offer for this step, listed now or carried later."""

    t: int
    at: float
    by: str
    fresh: tuple[str, ...]
    carried: tuple[tuple[str, int], ...]
    linked: bool
    reward: dict[str, float] = field(default_factory=dict)
    h: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)  # slot -> part -> seconds
    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)
    thetas: dict[str, str] = field(default_factory=dict)  # life -> digest of θ after this step

    @property
    def mean_reward(self) -> float | None:
        rewards = [self.reward[s] for s in self.fresh if s in self.reward]
        return fmean(rewards) if rewards else None

    def part(self, name: str) -> float:
        """Seconds of one part, mean over the replicas that told."""
        told = [s[name] for s in self.seconds.values() if name in s]
        return fmean(told) if told else 0.0


@dataclass
class Life:
    """One generation of a slot.   how: running, killed, lost, replaced, left, done, fenced, …"""

    slot: str
    generation: int
    pid: int
    host: str
    claimed: float
    joined: float | None = None
    joined_step: int = 0
    commits: list[tuple[int, float]] = field(default_factory=list)
    ended: float | None = None
    how: str = "running"

    @property
    def name(self) -> str:
        return f"{self.slot}-{self.generation}"


@dataclass
class Report:
    """Everything a person asks about a run."""

    name: str
    url: str
    config: dict[str, Any]
    wanted: Wanted
    steps: list[Step]
    lives: list[Life]
    events: list[dict[str, Any]]  # by time; "who" is the life or "supervisor-N"
    beats: dict[str, Beat]
    twice: int  # pseudogradients that were listed more than once

    @property
    def head(self) -> int:
        return len(self.steps)

    @property
    def done(self) -> bool:
        return 0 < self.wanted.steps <= self.head

    @property
    def began(self) -> float:
        times = [e["at"] for e in self.events] + [x.claimed for x in self.lives] + [s.at for s in self.steps]
        return min(times, default=0.0)

    @property
    def ended(self) -> float:
        times = [s.at for s in self.steps] + [x.ended or x.claimed for x in self.lives]
        return max(times, default=self.began)

    @property
    def slots(self) -> list[str]:
        return sorted({x.slot for x in self.lives} | set(self.wanted.slots))

    def setting(self, section: str, name: str, default: Any = None) -> Any:
        return self.config.get(section, {}).get(name, default)

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] in kinds]


# -------------------------------------------------------------------- reading


def read_report(store: Store) -> Report:
    return Reader(store).refresh()


class Reader:
    """Reads a bucket again and again; what is write-once is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._run: dict[str, Any] = {}
        self._wanted = Wanted()
        self._steps: list[Step] = []
        self._last: bytes | None = None  # the newest commit's bytes
        self._listed: set[tuple[int, str]] = set()
        self._twice = 0
        self._logs: dict[str, list[dict[str, Any]]] = {}
        self._lives: dict[tuple[str, int], Life] = {}

    def refresh(self) -> Report:
        if not self._run:
            self._run = json.loads(self._store.get(layout.RUN) or b"{}").get("config", {})
        self._wanted = read_control(self._store, self._wanted)
        self._read_commits()
        self._read_claims()
        self._read_logs()
        events = sorted((e for lines in self._logs.values() for e in lines), key=lambda e: e["at"])
        beats = {s: Beat.decode(b) for s in self._wanted.slots if (b := self._store.get(layout.beat(s))) is not None}
        self._tell_steps(events)
        self._tell_lives(events, beats)
        lives = [self._lives[k] for k in sorted(self._lives)]
        name = self._run.get("name", "run")
        return Report(name, self._store.url, self._run, self._wanted, self._steps, lives, events, beats, self._twice)

    def _read_commits(self) -> None:
        while (body := self._store.get(layout.commit(len(self._steps)))) is not None:
            c = Commit.decode(body)
            linked = c.prev == (digest(self._last) if self._last is not None else None)
            fresh, carried = tuple(o.slot for o in c.fresh), tuple((o.slot, o.step) for o in c.carried)
            self._steps.append(Step(c.t, c.at, c.by, fresh, carried, linked))
            self._last = body
            for o in c.offers:
                self._twice += (o.step, o.slot) in self._listed
                self._listed.add((o.step, o.slot))
                self._read_offer(o.step, o.slot, o.nonce)
            self._credit(c)

    def _read_offer(self, t: int, slot: str, nonce: str) -> None:
        attempt = 0
        while (body := self._store.get(layout.offer(t, slot, attempt))) is not None:
            offer = Offer.decode(body)
            if offer.nonce == nonce:
                self._steps[t].h[slot] = offer.h
                if "reward" in offer.stats:
                    self._steps[t].reward[slot] = offer.stats["reward"]
                return
            attempt += 1

    def _credit(self, commit: Commit) -> None:
        for slot, generation in sorted({(o.slot, o.generation) for o in commit.offers}):
            life = self._life(slot, generation)
            if life is not None:
                life.commits.append((commit.t, commit.at))

    def _read_claims(self) -> None:
        for slot in self._wanted.slots:
            generation = 1
            while self._life(slot, generation) is not None:
                generation += 1

    def _life(self, slot: str, generation: int) -> Life | None:
        if (slot, generation) not in self._lives:
            body = self._store.get(layout.claim(slot, generation))
            if body is None:
                return None
            c = Claim.decode(body)
            self._lives[slot, generation] = Life(slot, generation, c.pid, c.host, c.at)
        return self._lives[slot, generation]

    def _read_logs(self) -> None:
        for key in self._store.list(layout.LOGS):
            if key not in self._logs:
                owner, generation = layout.log_owner(key)
                lines = (self._store.get(key) or b"").decode(errors="replace").splitlines()
                self._logs[key] = [e for line in lines if (e := _event(line, owner, generation)) is not None]

    def _tell_steps(self, events: Iterable[dict[str, Any]]) -> None:
        for e in events:
            t = e.get("step", -1)
            if e["event"] == "step" and 0 <= t < len(self._steps):
                step, slot = self._steps[t], e["slot"]
                step.seconds[slot] = {p: e[p] for p in PARTS if p in e}
                step.up[slot], step.down[slot] = e.get("bytes_up", 0), e.get("bytes_down", 0)
                if "theta" in e:
                    step.thetas[e["who"]] = e["theta"]
                if e.get("reward") is not None:
                    step.reward.setdefault(slot, e["reward"])

    def _tell_lives(self, events: Iterable[dict[str, Any]], beats: Mapping[str, Beat]) -> None:
        for life in self._lives.values():
            self._end_by_records(life, beats.get(life.slot))
        for e in events:
            self._tell_life(e)

    def _end_by_records(self, life: Life, beat: Beat | None) -> None:
        if life.how == "running" and (body := self._store.get(layout.leave(life.slot, life.generation))) is not None:
            leave = Leave.decode(body)
            life.ended, life.how = leave.at, "done" if leave.reason == "done" else "left"
        successor = self._lives.get((life.slot, life.generation + 1))
        if life.how == "running" and successor is not None:
            life.ended, life.how = successor.claimed, "replaced"

    def _tell_life(self, e: dict[str, Any]) -> None:
        if e["event"] in ("killed", "lost"):
            life = next((x for x in self._lives.values() if (x.slot, x.pid) == (e.get("slot"), e.get("pid"))), None)
            if life is not None and (e["event"] == "killed" or life.how in ("running", "replaced")):
                life.ended, life.how = e["at"], e["event"]
            return
        life = self._lives.get((e["slot"], e["generation"]))
        if life is not None and e["event"] == "joined":
            life.joined, life.joined_step = e["at"], e.get("step", 0)
        if life is not None and e["event"] in LAST_WORDS and life.how in ("running", "replaced", "lost"):
            life.ended, life.how = e["at"], e["event"].replace("_", " ")


def _event(line: str, owner: str, generation: int) -> dict[str, Any] | None:
    """One log line; a supervisor's lines speak of other slots, a replica's of its own."""
    try:
        raw = json.loads(line)
    except ValueError:
        return None
    about = {} if owner == SUPERVISOR else {"slot": owner, "generation": generation}
    return {"slot": "", "generation": 0, **raw, **about, "who": f"{owner}-{generation}"}


# -------------------------------------------------------------------- telling


@dataclass(frozen=True)
class Check:
    ok: bool
    text: str


def checks(report: Report) -> list[Check]:
    """What this product promises, looked up in the bucket."""
    linked = all(s.linked for s in report.steps)
    told = [s for s in report.steps if s.thetas]
    forks = [s.t for s in told if len(set(s.thetas.values())) > 1]
    compared = sum(len(s.thetas) for s in told)
    so_far = "" if report.done else " so far"
    gaps = "none lost, the chain has no gap" if linked else "but the chain of commits is broken"
    same = f"θ bit-identical on all replicas after each outer step ({compared} digests)"
    fork = f"θ differs between replicas after outer steps {forks}"
    return [
        Check(linked, f"{report.head} of {report.wanted.steps} outer steps committed{so_far}, {gaps}"),
        Check(report.twice == 0, f"{report.twice or 'no'} pseudogradients counted twice"),
        Check(not forks, fork if forks else same),
    ]


def first_and_last(report: Report) -> tuple[float, float] | None:
    """Mean reward of the first and of the last outer step that has one."""
    rewards = [r for s in report.steps if (r := s.mean_reward) is not None]
    return (rewards[0], rewards[-1]) if rewards else None


def summary(report: Report) -> str:
    """One screen: at most 24 lines of 80 columns."""
    lines = [_headline(report), ""]
    lines += _reward_lines(report)
    lines += _cost_lines(report)
    lines += ["", *_life_lines(report, room=21 - len(lines) - 5), ""]
    lines += [f"  {'ok ' if c.ok else 'NO '} {c.text}" for c in checks(report)]
    return "\n".join(line[:80] for line in lines[:24])


def _headline(report: Report) -> str:
    seconds = report.ended - report.began
    h = report.setting("outer", "sync_every", "?")
    return (
        f"{report.name}: {report.head} of {report.wanted.steps} outer steps in {seconds:.1f} s, "
        f"{report.wanted.replicas} replicas, H = {h}"
    )


def _reward_lines(report: Report) -> list[str]:
    means = [s.mean_reward for s in report.steps]
    known = [m for m in means if m is not None]
    if not known:
        return ["  no rewards yet"]
    lines = [f"  mean reward  {known[0]:.3f} {sparkline(known[-48:])} {known[-1]:.3f}"]
    if late := [f"{s}@{t}" for step in report.steps for s, t in step.carried]:
        lines.append(f"  counted later than their step: {', '.join(late)}")
    return lines


def _cost_lines(report: Report) -> list[str]:
    told = [s for s in report.steps if s.seconds]
    if not told:
        return []
    parts = " · ".join(f"{n} {fmean(s.part(p) for s in told):.2f}" for n, p in zip(PART_NAMES, PARTS, strict=True))
    up, down = (fmean(b for s in told for b in getattr(s, way).values()) for way in ("up", "down"))
    sizes = f"{nice_bytes(up)} up, {nice_bytes(down)} down"
    return [f"  seconds per step: {parts}", f"  bytes per sync and replica: {sizes}"]


def _life_lines(report: Report, room: int) -> list[str]:
    lines = [f"  {x.name:8s} {_life_words(x, report.began)}" for x in report.lives]
    if len(lines) > room:
        lines = [*lines[: room - 1], f"  ... and {len(lines) - room + 1} more lives"]
    return lines


def _life_words(life: Life, began: float) -> str:
    joined = "never joined"
    if life.joined is not None:
        joined = f"joined at {life.joined - began:.1f} s (step {life.joined_step})"
    end = "" if life.ended is None else f" at {life.ended - began:.1f} s"
    return f"{joined}, counted in {len(life.commits)} steps, {life.how}{end}"


def sparkline(values: list[float]) -> str:
    low, high = min(values), max(values)
    return "".join("▁▂▃▄▅▆▇█"[int(7.99 * (v - low) / (high - low)) if high > low else 0] for v in values)


def nice_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


# -------------------------------------------------------------------- drawing

INK, FAINT = "#1f2329", "#c9d1d8"  # in report.html these two follow the reader's light or dark page
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#8c6d31")  # Okabe and Ito: colour-blind safe
MARKERS = "osD^vP"
ALARM = "#d55e00"
BOOT = "#9aa4ae"


def write_report(report: Report, folder: Path) -> tuple[Path, Path]:
    """Draw report.png and report.html into `folder`; -> their paths."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ReportError(
            "drawing a report needs matplotlib, which is not installed. "
            "Next: pip install 'serverless-diloco[report]', then `diloco report` again"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    png, page = folder / "report.png", folder / "report.html"
    fonts: dict[Any, Any] = {
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9,
        "svg.hashsalt": report.url,
    }
    with matplotlib.rc_context(fonts):
        figure = draw(report)
        figure.savefig(png, dpi=130, facecolor="white")
        svg = io.StringIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    page.write_text(_page(report, svg.getvalue()), encoding="utf-8")
    return page, png


def draw(report: Report) -> "Figure":
    """Reward, the lives of the replicas, seconds and bytes: one figure."""
    from matplotlib.figure import Figure

    lanes = max(3, len(report.lives))
    figure = Figure(figsize=(9.6, 6.6 + 0.26 * lanes), layout="constrained")
    figure.suptitle(_headline(report), fontsize=12, fontweight="bold", color=INK)
    grid = figure.add_gridspec(3, 2, height_ratios=[3.0, 0.7 + 0.3 * lanes, 2.3])
    _draw_reward(figure.add_subplot(grid[0, :]), report)
    _draw_lives(figure.add_subplot(grid[1, :]), report)
    _draw_seconds(figure.add_subplot(grid[2, 0]), report)
    _draw_bytes(figure.add_subplot(grid[2, 1]), report)
    return figure


def _draw_reward(ax: "Axes", report: Report) -> None:
    for i, slot in enumerate(report.slots):
        rewards = [s.reward.get(slot, nan) for s in report.steps]  # nan: a gap where it was away
        if any(slot in s.reward for s in report.steps):
            ax.plot(
                range(len(rewards)),
                rewards,
                label=slot,
                lw=1,
                ms=4,
                alpha=0.85,
                color=COLOURS[i % 6],
                marker=MARKERS[i % 6],
            )
    means = [nan if s.mean_reward is None else s.mean_reward for s in report.steps]
    if first_and_last(report):
        ax.plot(range(len(means)), means, label="mean", color=INK, lw=2.4)
        _unit_scale(ax, report)
    for place, text, side in _interruptions(report):
        ax.axvline(place, color=ALARM, lw=1, ls=(0, (4, 3)), zorder=0)
        ax.annotate(
            text, (place, 1), xycoords=("data", "axes fraction"), xytext=(2 if side == "left" else -2, 3),
            textcoords="offset points", color=ALARM, ha=side, va="bottom", fontsize=8,
        )  # fmt: skip
    _style(ax, "reward by outer step", "outer step", "reward, mean of its samples")
    ax.set_xlim(-0.5, max(report.wanted.steps, report.head, 1) - 0.5)
    ax.locator_params(axis="x", integer=True)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor=INK)


def _unit_scale(ax: "Axes", report: Report) -> None:
    """Rewards that lie in [0, 1] are shown on all of it, so that two runs can be compared by eye."""
    if all(0 <= r <= 1 for s in report.steps for r in s.reward.values()):
        ax.set_ylim(-0.03, 1.05)


def _interruptions(report: Report) -> list[tuple[float, str, str]]:
    """Where on the axis of outer steps somebody was lost or came back, with a word while there is room for it."""
    found: list[tuple[float, str, str]] = []
    for life in report.lives:
        if life.how in BAD_ENDS and life.ended is not None:
            found.append((_step_at(report, life.ended), f"{life.slot} {life.how}", "right"))
        if life.generation > 1 and life.joined is not None:
            found.append((_step_at(report, life.joined), f"{life.slot} is back", "left"))
    return found if len(found) <= 4 else [(place, "", side) for place, _, side in found]


def _step_at(report: Report, at: float) -> float:
    """Where on the axis a time lies: step t's point is drawn at t, when it was committed."""
    ends = [s.at for s in report.steps]
    t = sum(end <= at for end in ends)
    if t == 0 or t == len(ends):
        return t - 0.5
    return t - 1 + (at - ends[t - 1]) / max(ends[t] - ends[t - 1], 1e-6)


def _draw_lives(ax: "Axes", report: Report) -> None:
    names = [x.name for x in report.lives]
    for lane, life in enumerate(report.lives):
        _draw_life(ax, lane, life, report)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.7)
    _style(ax, "one lane per life of a replica (slot-generation)", "seconds since the start", "")
    ax.grid(False)
    ax.set_xlim(left=0)
    ax.legend(
        handles=_life_legend(), loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor=INK, fontsize=8
    )


def _draw_life(ax: "Axes", lane: int, life: Life, report: Report) -> None:
    start, end = life.claimed - report.began, (life.ended or report.ended) - report.began
    joined = end if life.joined is None else life.joined - report.began
    colour = COLOURS[report.slots.index(life.slot) % 6]
    ax.barh(lane, joined - start, left=start, height=0.5, color=BOOT, alpha=0.45, lw=0)
    ax.barh(lane, max(0.0, end - joined), left=joined, height=0.5, color=colour, alpha=0.55, lw=0)
    commits = [at - report.began for _, at in life.commits]
    ax.vlines(commits, lane - 0.33, lane + 0.33, color=INK, lw=1.2)
    if life.how in BAD_ENDS:
        ax.plot(end, lane, marker="X", color=ALARM, ms=10, mew=0, clip_on=False)
    if life.generation > 1 and life.joined is not None:
        ax.plot(joined, lane, marker=">", color=INK, ms=6, mew=0)


def _life_legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Patch(facecolor=BOOT, alpha=0.45, label="starting"),
        Patch(facecolor=COLOURS[0], alpha=0.55, label="training"),
        Line2D([], [], color=INK, lw=0, marker="|", mew=1.4, ms=9, label="its work counts"),
        Line2D([], [], color=ALARM, lw=0, marker="X", mew=0, ms=8, label="killed, lost"),
        Line2D([], [], color=INK, lw=0, marker=">", mew=0, ms=6, label="replacement\nhas healed"),
    ]


def _draw_seconds(ax: "Axes", report: Report) -> None:
    steps = [s for s in report.steps if s.seconds]
    bottom = [0.0] * len(steps)
    for i, (part, name) in enumerate(zip(PARTS, PART_NAMES, strict=True)):
        heights = [s.part(part) for s in steps]
        colour = (COLOURS[0], COLOURS[3], COLOURS[1], COLOURS[2])[i]
        ax.bar([s.t for s in steps], heights, bottom=bottom, color=colour, label=name, width=0.8, lw=0)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    _style(ax, "where an outer step's time goes", "outer step", "seconds, mean per replica")
    _room_above(ax, max(bottom, default=0.0))


def _draw_bytes(ax: "Axes", report: Report) -> None:
    steps = [s for s in report.steps if s.up or s.down]
    for shift, way, colour, name in ((-0.2, "up", COLOURS[4], "up"), (0.2, "down", COLOURS[5], "down")):
        heights = [fmean(getattr(s, way).values()) / 1e3 for s in steps]
        ax.bar([s.t + shift for s in steps], heights, color=colour, label=name, width=0.38, lw=0)
    _style(ax, "bytes per sync", "outer step", "kB, mean per replica")
    _room_above(ax, max((fmean(getattr(s, w).values()) / 1e3 for s in steps for w in ("up", "down")), default=0.0))


def _room_above(ax: "Axes", highest: float) -> None:
    """A legend in one row above the bars."""
    ax.set_ylim(0, max(highest, 1e-3) * 1.28)
    ax.locator_params(axis="x", integer=True)
    ax.legend(loc="upper center", ncols=4, frameon=False, labelcolor=INK, fontsize=8, handlelength=1.2)


def _style(ax: "Axes", title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left", fontsize=10, color=INK)
    ax.set_xlabel(x, color=INK)
    ax.set_ylabel(y, color=INK)
    ax.tick_params(colors=INK)
    ax.grid(axis="y", color=FAINT, lw=0.6)
    ax.set_axisbelow(True)
    for side in ax.spines:
        ax.spines[side].set_visible(side in ("left", "bottom"))
        ax.spines[side].set_color(INK)


# -------------------------------------------------------------------- the page

CSS = """
:root { color-scheme: light dark; --ink: #1f2329; --faint: #c9d1d8; --page: #ffffff; --bad: #b3261e; --good: #1a7f37 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --faint: #3d444d; --page: #0d1117; --bad: #ff7b72; --good: #3fb950 } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 62rem;
       margin: 2rem auto; padding: 0 1rem }
svg { width: 100%; height: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .15rem .7rem; border-bottom: 1px solid var(--faint) }
th:first-child, td:first-child { text-align: left } .wide { overflow-x: auto }
.ok::before { content: "✓ "; color: var(--good) } .no::before { content: "✗ "; color: var(--bad) }
ul { list-style: none; padding: 0 }
code { background: color-mix(in srgb, var(--faint) 40%, transparent); padding: 0 .3em }
"""


def _page(report: Report, svg: str) -> str:
    picture = svg[svg.index("<svg") :].replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")
    found = "".join(f'<li class="{"ok" if c.ok else "no"}">{html.escape(c.text)}</li>' for c in checks(report))
    title = html.escape(_headline(report))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(report.name)}</title><style>{CSS}</style><h1>{title}</h1><ul>{found}</ul>{picture}"
        f"<h2>Outer steps</h2><div class=wide>{_step_table(report)}</div>"
        f"<h2>Lives</h2><div class=wide>{_life_table(report)}</div>"
        f"<p>Read from <code>{html.escape(report.url)}</code>; "
        f"again at any time with <code>diloco report {html.escape(report.url)}</code>.</p></html>\n"
    )


def _step_table(report: Report) -> str:
    head = ["step", "mean reward", *report.slots, "inner steps", "closed by", "later work", "s", "up", "down"]
    rows, before = [], report.began
    for s in report.steps:
        rewards = [_number(s.reward.get(slot)) + ("" if slot in s.fresh else " ·") for slot in report.slots]
        late = ", ".join(f"{slot}@{t}" for slot, t in s.carried)
        inner = "/".join(str(s.h[slot]) for slot in sorted(s.h))
        up, down = (nice_bytes(sum(b.values())) for b in (s.up, s.down))
        rows.append([str(s.t), _number(s.mean_reward), *rewards, inner, s.by, late, f"{s.at - before:.2f}", up, down])
        before = s.at
    return _table(head, rows) + "<p>· means: not in this step's own commit.</p>"


def _life_table(report: Report) -> str:
    head = ["life", "claimed (s)", "joined (s)", "joined at step", "counted in", "end"]
    rows = []
    for x in report.lives:
        joined = ["–", "–"] if x.joined is None else [f"{x.joined - report.began:.1f}", str(x.joined_step)]
        end = x.how + ("" if x.ended is None else f", {x.ended - report.began:.1f} s")
        rows.append([x.name, f"{x.claimed - report.began:.1f}", *joined, f"{len(x.commits)} steps", end])
    return _table(head, rows)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"
