"""Describe which steps of a run are still in the bucket, by the replicas' logs of deletions.

    collected: deltas_from 52 · means_from 40 · snapshots 0 8 16 32 40
    ─▶ kept: every step from 40 on, and 0, 8, 16, 32; pseudogradients before 52 are gone (fleet.keep = 20 GB)

Not promised: the newest state; but blobs that are reported as gone are gone.  A step in the
window without a written mean keeps its pseudogradients; `diloco export` checks the blobs themselves.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.runlog.reader import Report

_WIDTH = 24  # most characters of a list of steps


def kept_words(report: "Report") -> list[str]:
    """Describe in at most two lines which steps are left; [] if nothing was deleted."""
    collected = [e for e in report.of_kind("collected") if _is_whole(e)]
    if not collected and report.wanted.keep:
        return [f"`diloco gc` has collected down to {report.wanted.keep}; `diloco verify` says what is left"]
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
