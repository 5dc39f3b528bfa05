"""Choose which of a run's older snapshots stay if there is no room for all: snapshots at ages of about powers of two.

Not promised: snapshots at exact ages; only snapshots that the replicas wrote can stay.
"""

from collections.abc import Iterable
from itertools import pairwise

ALWAYS = 64  # level of the oldest snapshot, which stays: no run lasts for 2^64 periods
_RULERS = [(share, -1) for share in range(ALWAYS, 0, -1)] + [(1, lowest) for lowest in range(1, ALWAYS + 1)]


def thin_snapshots(steps: Iterable[int], floor: int, every: int, room: int) -> set[int]:
    """Choose at most `room` of the snapshots below `floor`, at ages of about powers of two, including the first one.

    every: steps of a period, from one snapshot to the next.   A cell of level l is 2^l aligned periods.  The level of a
    snapshot is the largest l for which it is the first snapshot of its cell; this never changes.  The snapshot stays
    until it is 2^(l + share) periods old, if l is not below the lowest level.  The largest share is chosen, and then
    the smallest lowest level, with which the snapshots of a run without gaps fit.  As the run grows, the share only
    falls and the lowest level only rises, so a deleted snapshot is never chosen again.
    """
    ordered = sorted(set(steps))
    levels = {t: _snapshot_level(before, t, every) for before, t in pairwise(ordered)}
    levels |= dict.fromkeys(ordered[:1], ALWAYS)
    ages = {t: floor // every - t // every for t in ordered if t < floor}
    for share, lowest in _RULERS:
        if _at_most(share, lowest, floor // every) <= room:
            stay = {t for t, age in ages.items() if levels[t] >= lowest and age < 2 ** (share + max(0, levels[t]))}
            if len(stay) <= room:
                return stay
    return set()


def _at_most(share: int, lowest: int, periods: int) -> int:
    """Return the largest number of snapshots that stay in a run without gaps.

    Each 2^(l+1) periods have one snapshot of level l; the first snapshot also stays.
    """
    levels = range(max(0, lowest), periods.bit_length())
    return 1 + sum(min(1 << (share - 1), (((periods - 1) >> level) + 1) >> 1) for level in levels)


def _snapshot_level(before: int, t: int, every: int) -> int:
    """Return the highest bit in which the period numbers of steps `before` and `t` differ; -1 if they are equal."""
    return ((before // every) ^ (t // every)).bit_length() - 1
