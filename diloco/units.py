"""Checks and rounding of logged numbers; durations, sizes and money as text, the same in every view.

    0.21 s · 9.5 s · 95 s · 5 min 30 s · 42 min · 3 h 05 min · 2 d 03 h      3 digits: 512 B · 9.83 MB · 2.2 TB
    $12.30 · $0.0031                                                     below a cent: two significant digits

Not promised: that the sum of rounded numbers is the rounded sum.
"""

import math
from collections.abc import Mapping
from typing import Any

MOST = 1e60  # ‖x‖₂ of fp32 numbers is below 1e44, and the squares and sums of such numbers are finite

MOST_TEXT = 2000  # at most so many characters of a text in a log


def is_reckonable(value: Any) -> bool:
    """Whether sums and squares of `value` are finite; False only for some floats: NaN, infinity, 1e308."""
    return not isinstance(value, float) or abs(value) <= MOST


def rounded(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Round to seven digits; a Unix time keeps its milliseconds.  Leave NaN and infinity out; cut long texts."""
    short = lambda v: round(v, 3) if abs(v) >= 1e6 else float(f"{v:.7g}")  # noqa: E731
    finite = {k: v for k, v in fields.items() if not isinstance(v, float) or math.isfinite(v)}
    return {k: short(v) if isinstance(v, float) else _short_texts(v) for k, v in finite.items()}


def _short_texts(value: Any) -> Any:
    """Cut the middle out of long texts, also in lists; half of a surrogate pair becomes "?"."""
    if isinstance(value, list | tuple):
        return [_short_texts(item) for item in value]
    if not isinstance(value, str):
        return value
    text = value if len(value) <= MOST_TEXT else f"{value[: MOST_TEXT // 2]} … {value[-MOST_TEXT // 2 :]}"
    return text.encode(errors="replace").decode()


def duration(seconds: float) -> str:
    """Format a duration in at most two units."""
    if seconds < 0:
        return f"−{duration(-seconds)}"
    whole = round(seconds)
    if whole < 10:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"
    if whole < 120:
        return f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def byte_size(count: float) -> str:
    """Format a number of bytes, in units of 1000."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if count < 999.5:
            break
        count, unit = count / 1000, larger
    return f"{count:.0f} {unit}" if unit == "B" or count >= 999.5 else f"{count:.3g} {unit}"


def dollars(usd: float) -> str:
    """Format an amount of money."""
    digits = 2 if usd >= 0.01 or usd <= 0 else min(9, 1 - math.floor(math.log10(usd)))
    return f"${usd:.{digits}f}"
