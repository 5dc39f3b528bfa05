"""Dollars as people read them.

    12.3 ─▶ $12.30      0.0031 ─▶ $0.0031      0.00012345 ─▶ $0.00012      below a cent: the first two digits that tell

Not promised: a sum of rounded numbers that is the rounded sum.
"""

import math


def dollars(usd: float) -> str:
    """The words for a sum of money."""
    digits = 2 if usd >= 0.01 or usd <= 0 else min(9, 1 - math.floor(math.log10(usd)))
    return f"${usd:.{digits}f}"
