"""Draw a report as one picture, report.png, for a README or a slide.  For reading, use the page (data.py, freeze.py).

    reward, or the loss of a run without rewards, by outer step, per replica and mean, with every kill and return
    one lane per session: starting, training, its counted steps, its end
    the parts of an outer step's time · bytes per sync

matplotlib is imported at the first drawing.  Not promised: a picture of a run without any outer step.
"""

import os
from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from diloco.runlog.learning import Curve
from diloco.runlog.reader import Report
from diloco.runlog.sessions import BAD_ENDS, SessionSummary
from diloco.runlog.steps import PART_NAMES, PARTS
from diloco.runlog.summary import curve_of, headline
from diloco.views.page.data import step_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class ReportError(RuntimeError):
    """The error for a report that cannot be drawn."""


INK, FAINT = "#1f2329", "#c9d1d8"
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#8c6d31")  # Okabe and Ito: colour-blind safe
MARKERS = "osD^vP"
ALARM = "#d55e00"
BOOT = "#9aa4ae"


def write_picture(report: Report, folder: Path) -> Path:
    """Draw report.png into `folder` and return its path."""
    backend = os.environ.pop("MPLBACKEND", None)  # a notebook's backend may not be installed here; a file needs none
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ReportError(
            "drawing a picture needs matplotlib, which is not installed. Next: pip install "
            "'serverless-diloco[report]', or leave out --png: report.html needs nothing"
        ) from None
    finally:
        os.environ.update({} if backend is None else {"MPLBACKEND": backend})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.png"
    fonts: dict[Any, Any] = {"font.family": "sans-serif", "font.size": 9}
    with matplotlib.rc_context(fonts):
        draw_figure(report).savefig(path, dpi=130, facecolor="white")
    return path


def draw_figure(report: Report) -> "Figure":
    """Draw reward, sessions, seconds and bytes in one figure."""
    from matplotlib.figure import Figure

    lanes = max(3, len(report.sessions))
    figure = Figure(figsize=(9.6, 6.6 + 0.26 * lanes), layout="constrained")
    figure.suptitle(headline(report), fontsize=12, fontweight="bold", color=INK)
    grid = figure.add_gridspec(3, 2, height_ratios=[3.0, 0.7 + 0.3 * lanes, 2.3])
    _draw_curve(figure.add_subplot(grid[0, :]), report)
    _draw_sessions(figure.add_subplot(grid[1, :]), report)
    _draw_seconds(figure.add_subplot(grid[2, 0]), report)
    _draw_bytes(figure.add_subplot(grid[2, 1]), report)
    return figure


def _draw_curve(ax: "Axes", report: Report) -> None:
    line = curve_of(report)
    slots = report.slots
    for slot, values in line.by_slot.items():
        i = slots.index(slot)
        ax.plot(
            range(len(values)), _with_gaps(values), label=slot, lw=1, ms=4, alpha=0.85, color=COLOURS[i % 6],
            marker=MARKERS[i % 6],
        )  # fmt: skip
    if line.known:
        ax.plot(range(len(line.mean)), _with_gaps(line.mean), label="mean", color=INK, lw=2.4)
        _unit_scale(ax, line)
    else:
        ax.text(0.5, 0.5, "no reward and no loss was measured", transform=ax.transAxes, ha="center", color=INK)
    _draw_evaluations(ax, report)
    marks = _mark_interruptions(report)
    for place, text, side in marks:
        ax.axvline(place, color=ALARM, lw=1, ls=(0, (4, 3)), zorder=0)
        ax.annotate(
            text, (place, 1), xycoords=("data", "axes fraction"), xytext=(2 if side == "left" else -2, 3),
            textcoords="offset points", color=ALARM, ha=side, va="bottom", fontsize=8,
        )  # fmt: skip
    _style_axes(ax, f"{line.name} by outer step", "outer step", f"{line.name}, mean of its samples")
    if any(text for _, text, _ in marks):  # the texts are between the curve and its title
        ax.set_title(ax.get_title(loc="left"), loc="left", fontsize=10, color=INK, pad=18)
    steps = max(report.wanted.steps, report.head, 1)
    ax.set_xlim(-0.5, steps + 0.3 if report.evaluations else steps - 0.5)
    ax.locator_params(axis="x", integer=True)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor=INK)


def _draw_evaluations(ax: "Axes", report: Report) -> None:
    """Draw rewards on held-out prompts, with two standard errors to each side."""
    for kind, face in (("greedy", INK), ("sampled", "white")):
        found = [(e.step, score) for e in report.evaluations if (score := dict(e.rewards).get(kind))]
        if found:
            steps, scores = zip(*found, strict=True)
            errors = [0.0 if isnan(score.error) else 2 * score.error for score in scores]
            ax.errorbar(
                steps, [score.mean for score in scores], yerr=errors, label=f"held out, {kind}", color=INK, lw=1,
                ls=":", marker="D", ms=5, mfc=face, capsize=3, zorder=5,
            )  # fmt: skip


def _with_gaps(values: Sequence[float | None]) -> list[float]:
    """Replace None with nan, which makes a gap in the curve."""
    return [nan if value is None else value for value in values]


def _unit_scale(ax: "Axes", line: Curve) -> None:
    """Show rewards in [0, 1] on the whole range, so that you can compare two runs by eye."""
    every = [value for values in line.by_slot.values() for value in values if value is not None]
    if line.name == "reward" and all(0 <= value <= 1 for value in every):
        ax.set_ylim(-0.03, 1.05)


def _mark_interruptions(report: Report) -> list[tuple[float, str, str]]:
    """Return (place on the outer steps' axis, text, side) for sessions that were lost or came back; no text if many."""
    found: list[tuple[float, str, str]] = []
    ends = [step.at for step in report.steps]
    for session in report.sessions:
        if session.how in BAD_ENDS and session.ended is not None:
            found.append((step_at(ends, session.ended), f"{session.slot} {session.how}", "right"))
        if session.generation > 1 and session.joined is not None:
            found.append((step_at(ends, session.joined), f"{session.slot} is back", "left"))
    return found if len(found) <= 4 else [(place, "", side) for place, _, side in found]


def _draw_sessions(ax: "Axes", report: Report) -> None:
    names = [x.name for x in report.sessions]
    for lane, session in enumerate(report.sessions):
        _draw_session(ax, lane, session, report)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.7)
    _style_axes(ax, "one lane per session of a replica or an actor (slot-generation)", "seconds since the start", "")
    ax.grid(False)
    ax.set_xlim(left=0)
    ax.legend(
        handles=_session_legend(),
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        labelcolor=INK,
        fontsize=8,
    )


def _draw_session(ax: "Axes", lane: int, session: SessionSummary, report: Report) -> None:
    began = report.began  # read once: it visits every event of the run
    start = session.claimed - began
    end = (session.ended or report.ended) - began
    joined = end if session.joined is None else session.joined - began
    names = [*report.slots, *sorted({x.slot for x in report.sessions} - set(report.slots))]  # actors come last
    colour = COLOURS[names.index(session.slot) % 6]
    ax.barh(lane, joined - start, left=start, height=0.5, color=BOOT, alpha=0.45, lw=0)
    ax.barh(lane, max(0.0, end - joined), left=joined, height=0.5, color=colour, alpha=0.55, lw=0)
    commits = [at - began for _, at in session.commits]
    ax.vlines(commits, lane - 0.33, lane + 0.33, color=INK, lw=1.2)
    if session.how in BAD_ENDS:
        ax.plot(end, lane, marker="X", color=ALARM, ms=10, mew=0, clip_on=False)
    if session.generation > 1 and session.joined is not None:
        ax.plot(joined, lane, marker=">", color=INK, ms=6, mew=0)


def _session_legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Patch(facecolor=BOOT, alpha=0.45, label="starting"),
        Patch(facecolor=COLOURS[0], alpha=0.55, label="training\nor sampling"),
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
        _draw_bars(ax, [s.t for s in steps], heights, bottom, colour=colour, label=name, width=0.8)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    _style_axes(ax, "where an outer step's time goes", "outer step", "seconds, mean per replica")
    _room_above(ax, max(bottom, default=0.0))


def _draw_bytes(ax: "Axes", report: Report) -> None:
    steps = [s for s in report.steps if s.up or s.down]
    for shift, way, colour, name in ((-0.2, "up", COLOURS[4], "up"), (0.2, "down", COLOURS[5], "down")):
        heights = [fmean(getattr(s, way).values()) / 1e3 for s in steps]
        at = [s.t + shift for s in steps]
        ground = [0.0] * len(steps)
        _draw_bars(ax, at, heights, ground, colour=colour, label=name, width=0.38)
    _style_axes(ax, "bytes per sync", "outer step", "kB, mean per replica")
    _room_above(ax, max((fmean(getattr(s, w).values()) / 1e3 for s in steps for w in ("up", "down")), default=0.0))


def _draw_bars(
    ax: "Axes", at: Sequence[float], heights: Sequence[float], bottom: Sequence[float], *,
    colour: str, label: str, width: float,
) -> None:  # fmt: skip
    """Draw like ax.bar, but all bars as one artist, because 6,000 artists take ten seconds to draw."""
    from matplotlib.collections import PolyCollection

    corners = [
        [(x - width / 2, low), (x - width / 2, low + height), (x + width / 2, low + height), (x + width / 2, low)]
        for x, height, low in zip(at, heights, bottom, strict=True)
    ]
    ax.add_collection(PolyCollection(corners, facecolors=colour, label=label, lw=0))
    ax.autoscale_view()


def _room_above(ax: "Axes", highest: float) -> None:
    """Make room for a legend in one row above the bars."""
    ax.set_ylim(0, max(highest, 1e-3) * 1.28)
    ax.locator_params(axis="x", integer=True)
    ax.legend(loc="upper center", ncols=4, frameon=False, labelcolor=INK, fontsize=8, handlelength=1.2)


def _style_axes(ax: "Axes", title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left", fontsize=10, color=INK)
    ax.set_xlabel(x, color=INK)
    ax.set_ylabel(y, color=INK)
    ax.tick_params(colors=INK)
    ax.grid(axis="y", color=FAINT, lw=0.6)
    ax.set_axisbelow(True)
    for side in ax.spines:
        ax.spines[side].set_visible(side in ("left", "bottom"))
        ax.spines[side].set_color(INK)
