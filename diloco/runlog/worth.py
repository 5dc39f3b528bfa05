"""A run's use and gain, and an estimate for other numbers of replicas from their agreement.  Pure functions.

    used      samples that commits count · hours of all sessions, from claim to end, of each device
    got       headline (reward, or loss), first outer step → newest; the gain per hour of a reward

    Δᵢ = s + nᵢ    a part s that all replicas share, and each one's own noise; c = ‖s‖²/(‖s‖² + ‖n‖²) = cos_pair
    B = (1 − c)/c  ‖n‖²/‖s‖²: the gradient noise scale (arXiv 1812.06162, eq. 2.8), in pseudogradients of one replica
    outer steps to the same point ∝ 1 + B/N        and so the time; replica-hours ∝ N·(1 + B/N) = N + B

So if c is near 0, another replica costs no extra hours and saves a share 1/(N + 1) of the time. If c is near 1, it
saves no time.  The formula assumes outer steps of the best length for each N: docs/studies/tuned.md has its error.

Not promised: the result of a run of another size.  c changes during a run, and with H and the learning rate.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from diloco.runlog.learning import headline_curve

if TYPE_CHECKING:
    from diloco.runlog.reader import Report
    from diloco.runlog.sessions import SessionSummary
    from diloco.runlog.steps import Step

RECENT = 10  # outer steps over which agreement is averaged
LEAST_COSINE = 0.01  # a few steps cannot distinguish a smaller cosine from 0
ALIKE = 0.8  # above this cosine, replicas make nearly the same step; at their best lr, the study's fleets are below 0.8


@dataclass(frozen=True)
class Worth:
    """Use and gain.   hours: the sum over all devices.   first, newest: values of the headline `name`, or None.

    unit: "GPU-hours", or "replica-hours" if a session's device is a CPU or unknown.
    cosine: between two replicas, over the newest steps; None if fewer than two took part.   replicas: number.
    """

    samples: float
    hours: float
    unit: str
    name: str
    first: float | None
    newest: float | None
    cosine: float | None
    replicas: float

    @property
    def gain_per_hour(self) -> float | None:
        """A reward's gain per hour of `unit`; None if unknown, and for a loss, which has no meaningful zero."""
        if self.name != "reward" or self.first is None or self.newest is None or not self.hours:
            return None
        return (self.newest - self.first) / self.hours


def worth(report: "Report") -> Worth:
    headline = headline_curve(report.steps, report.slots)
    first, newest = headline.ends or (None, None)
    on_gpus = all(session.device not in ("", "cpu") for session in report.sessions)
    cosine, replicas = agreement(report.steps)
    return Worth(
        samples=sum(sum(step.samples.values()) for step in report.steps),
        hours=sum(_devices(session) * _seconds(session, report) for session in report.sessions) / 3600,
        unit="GPU-hours" if on_gpus else "replica-hours",
        name=headline.name,
        first=first,
        newest=newest,
        cosine=cosine,
        replicas=replicas,
    )


def agreement(steps: Sequence["Step"]) -> tuple[float | None, float]:
    """Return (mean cosine between two replicas, mean number of replicas) over the newest steps with a cosine."""
    told = [step for step in steps if "cos_pair" in step.numbers and len(step.fresh) > 1][-RECENT:]
    if not told:
        return None, 0.0
    return fmean(step.numbers["cos_pair"] for step in told), fmean(len(step.fresh) for step in told)


def resized(replicas: float, to: float, cosine: float) -> tuple[float, float]:
    """Return (time, replica-hours) that `to` replicas need for the same result, as ratios to what `replicas` need."""
    c = min(1.0, max(LEAST_COSINE, cosine))
    noise = (1 - c) / c
    hours = (to + noise) / (replicas + noise)
    return hours * replicas / to, hours


def _devices(session: "SessionSummary") -> int:
    """Return the number of devices by their name.   "8 × NVIDIA H100 80GB HBM3" -> 8"""
    found = re.match(r"(\d{1,2}) × ", session.device)
    return int(found[1]) if found else 1


def _seconds(session: "SessionSummary", report: "Report") -> float:
    """Return the seconds from claim to end; for a running session, to its newest heartbeat."""
    beat = report.beats.get(session.slot)
    if session.ended is not None:
        until = session.ended
    elif beat is not None and beat.generation == session.generation:
        until = beat.at
    else:
        until = report.ended
    return max(0.0, until - session.claimed)


# -------------------------------------------------------------------- words


def worth_words(found: Worth) -> list[str]:
    """Describe use and gain in at most three lines of 80 columns; [] before an outer step is committed."""
    return [*_used_words(found), *_agreement_words(found)] if found.samples else []


def _used_words(found: Worth) -> list[str]:
    used = f"{found.samples:,.0f} samples in {found.hours:.3g} {found.unit}"
    if found.first is None or found.newest is None:
        return [used]
    rate = "" if found.gain_per_hour is None else f" ({found.gain_per_hour:+.2g}/{found.unit.removesuffix('ours')})"
    return [f"{used}: {found.name} {found.first:.3g} → {found.newest:.3g}{rate}"]


def _agreement_words(found: Worth) -> list[str]:
    if found.cosine is None:
        return []
    (more, *longer), (fewer, *shorter) = _other_sizes(found)
    words = "{} replicas ×{:.2f} time ×{:.2f} hours, {} ×{:.2f} ×{:.2f}".format(more, *longer, fewer, *shorter)
    alike = ["replicas step alike: a larger inner.lr does more than another replica"]
    return [f"agreement {found.cosine:.2f}: {words} (a guess)", *(alike if found.cosine > ALIKE else [])]


def _other_sizes(found: Worth) -> list[tuple[int, float, float]]:
    """Return (replicas, time, hours) for one more and one fewer replica; [] if no two replicas were compared."""
    if found.cosine is None:
        return []
    now = round(found.replicas)
    return [(to, *resized(now, to, found.cosine)) for to in (now + 1, now - 1)]


def worth_dict(found: Worth) -> dict[str, Any]:
    """Return plain data for `--json`, with the ratios for one more and one fewer replica by their number."""
    sizes = {str(n): {"time": round(time, 4), "hours": round(hours, 4)} for n, time, hours in _other_sizes(found)}
    return {**asdict(found), "gain_per_hour": found.gain_per_hour, "resized": sizes}
