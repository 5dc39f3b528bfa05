"""Writes the texts about rewards that failed.

    a failed batch ──▶ failure_text: one line for the log          a session that ends ──▶ explain_end: what to do next

Not promised: the line of the user's code, if the error did not come from the user's file.
"""

import inspect
from pathlib import Path
from typing import Any

from inner.usercode.attempts import Scored


def failure_text(name: str, scored: Scored, *, tries: int, batches: int) -> str:
    """Return the log's line about failed batches.   batches: number of failed batches since the last line."""
    before = f"; {batches} batches with failures since the last report" if batches > 1 else ""
    lost = f"{len(scored.failed)} of {len(scored.values)} completions count without a reward of their own"
    lost += f", {len(scored.blamed)} of them since they break it" if scored.blamed else ""
    return f"{name}: {scored.why} ({lost} after {scored.tries} of {tries} tries){before}"


def explain_end(name: str, reward: Any, scored: Scored, *, batches: int) -> str:
    """Return the error of a session whose rewards gave no number.   batches: number of such batches in a row."""
    often = "the first batch of this session" if batches == 1 else f"{batches} batches in a row"
    shown = f"  {scored.why}"
    if scored.failure is not None:
        from inner.usercode.userfiles import user_lines

        shown = user_lines(scored.failure.error, _file_of(reward))
    return (
        f"the reward {name} gave no number for any completion of {often}, {scored.tries} tries each.\n"
        f"{shown}\n"
        "  This session ends, and its slot is started again: at once, and twice at most, in a run without any outer "
        "step;\n  else after 1, 4, 16, 30 and 30 minutes, and the sixth such end in a row ends the run.\n"
        "  If the reward was away and is back: `diloco resume RUN` goes on from the last commit.\n"
        "  A run keeps its files. A mended one needs `diloco train CONFIG --run RUN --again` while nothing was trained "
        "there,\n  and another --run afterwards.\n"
        "  More patience: inner.rewards.retries, inner.rewards.timeout_s."
    )


def _file_of(reward: Any) -> Path:
    try:
        return Path(inspect.getfile(inspect.unwrap(reward)))
    except TypeError:
        return Path("?")
