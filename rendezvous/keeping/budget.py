"""The kept part of a run: a budget of bytes, spent on the needed blobs first and on the past after that.

    snapshots   ●               ●               ●       ●   ●   ●       ages of about powers of two
    means                                   ├───────────────────▶       as far back as fits: means_from
    deltas                                          ├───────────▶       with the bytes left: deltas_from
                                                        ├───┼───▶       the window: kept under any budget
                                                        f   s   head    the two newest complete snapshots
    of a step from f to s the window has the mean alone, where it is announced: deltas would be needed only if both that
    mean and snapshot s were damaged; from s on, where the mean is
    spent in this order: window, older snapshots, means, deltas
    so the deltas go first (oldest first), then the means, then the snapshots thin out

The answer is a pure function of records that are never deleted (commits, manifests), so all collectors come to the same
one, on any replica, at any moment.  A later answer never asks for blobs that an earlier one gave up: ages only grow.

The window itself follows the budget: `snapshot_period` gives the number of steps to the next snapshot, so that the
window, at its largest, fits.  `largest_window` with one step between snapshots is the floor: no smaller budget is kept
to (decision 033).

Not promised: the exact byte.  The budget counts bodies that a commit lists.  A body of a replica that was killed before
its offer, or whose offer expired, goes with its step.  Where steps are faster than the store deletes, deleting comes
later.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from rendezvous.agreement.rules import Rules
from rendezvous.records.records import Commit

_SHARE = 0.95  # 6 % of the deltas expired in the simulations of the protocol, and others die with their replica
LATE = 3  # steps: the one that is decided just now, and two that may follow while blobs are deleted
COMPLETE = 3  # snapshots: the two newest, and one that is on its way
FULL_ENOUGH = 4  # a run that would fit so many times is not read back for its exact size
ALWAYS = 64  # the level of the oldest snapshot: no run lasts for 2^64 periods
_RULERS = [(share, -1) for share in range(ALWAYS, 0, -1)] + [(1, lowest) for lowest in range(1, ALWAYS + 1)]


@dataclass(frozen=True)
class Sizes:
    """Bytes that one outer step leaves in the bucket: the listed deltas, and the mean if it is written down."""

    deltas: int
    mean: int


def sizes_of(commit: Commit, elements: int, rules: Rules) -> Sizes:
    """Bytes that a committed step leaves.   elements: of its fragment; 0 if unknown (then bodies are fp32)."""
    bodies = [o.size for o in commit.offers]
    if commit.mode == "sharded":
        return Sizes(sum(bodies), max(bodies, default=0))
    mean = 4 * elements or max(bodies, default=0)
    return Sizes(sum(bodies), mean if is_mean_announced(sum(bodies), mean, rules) else 0)


def parts_of(commit: Commit) -> list[int]:
    """The parts in which its mean is written down, if it is; a part without shards never is (reduce.py: parts)."""
    if commit.mode != "sharded":
        return [0]
    shards = max(len(o.shards) for o in commit.offers)
    owners = len(commit.owners)
    cuts = [round(j * shards / owners) for j in range(owners + 1)]
    return [j for j in range(owners) if cuts[j] < cuts[j + 1]]


def is_mean_announced(bodies: int, mean: int, rules: Rules) -> bool:
    """Whether the closer of a step that is reduced directly writes the mean down.   bodies, mean: bytes."""
    return rules.announce and 2 * mean <= bodies


@dataclass(frozen=True)
class Window:
    """The steps that a reader may need, at any budget: those of the two newest complete snapshots.

    floor, newest: their steps.   carry: steps for which a delta may still be listed.
    snapshot: bytes of one.   every: steps from one to the next.
    """

    floor: int
    newest: int
    carry: int
    snapshot: int
    every: int

    @property
    def first_listable(self) -> int:
        """The first step of which a commit in the window may list a delta."""
        return max(0, self.floor - self.carry)

    def bytes_needed(self, t: int, step: Sizes) -> int:
        """Bytes of a committed step that stay at any budget."""
        if t < self.floor:
            return 0
        return step.mean + (step.deltas if t >= self.newest or not step.mean else 0)


def snapshot_period(budget: int, every: int, snapshot: int, step: Sizes) -> int:
    """Outer steps from one snapshot to the next, `every` at most, by which the window fits into the budget.

    snapshot: bytes of one.   step: bytes that each step leaves.   1 where nothing fits; `every` without a budget.
    """
    each = _each_in_window(step)
    if not budget or not each:
        return every
    return max(1, min(every, int((_SHARE * budget - _beside(snapshot, step)) // each)))


def largest_window(period: int, snapshot: int, step: Sizes) -> int:
    """The least budget in which the window has room, with a snapshot every `period` steps."""
    return ceil((_beside(snapshot, step) + period * _each_in_window(step)) / _SHARE)


def _beside(snapshot: int, step: Sizes) -> int:
    """Bytes beside the steps from one snapshot to the next."""
    return COMPLETE * snapshot + LATE * (step.deltas + step.mean)


def _each_in_window(step: Sizes) -> int:
    """Bytes that a step between two snapshots costs: means stay for two periods, deltas that have one stay for one."""
    return 2 * step.mean + step.deltas if step.mean else 2 * step.deltas


@dataclass(frozen=True)
class Kept:
    """The blobs to keep.   snapshots: those below the floor that stay.   means_from, deltas_from: first steps with any.

    A step in the window whose mean is not announced keeps its deltas.
    over: bytes by which the window alone exceeds the budget; 0 if it does not.
    """

    snapshots: frozenset[int]
    means_from: int
    deltas_from: int
    over: int = 0


def choose_kept(
    budget: int,
    head: int,
    known: Mapping[int, Sizes],
    window: Window,
    older: Collection[int],
    *,
    most: int | None = None,
) -> Kept | None:
    """The part of the steps below `head` that stays; None if more commits must be read first.

    known: sizes of the newest steps, without a gap; maybe not of all, or of none.   older: snapshots below the floor.
    most: bytes of the largest known step, from a caller that asks in every step; None: computed here.
    It leaves room for a snapshot that is on its way, for LATE steps, and a twentieth for bodies that no commit lists.
    """
    newest = known.get(head - 1, Sizes(0, 0))
    room = _SHARE * budget - _beside(window.snapshot, newest)
    for t in range(head - 1, window.floor - 1, -1):
        if t not in known and room >= 0:
            return None
        if t not in known:
            break
        room -= window.bytes_needed(t, known[t])
    if room < 0:
        return Kept(frozenset(), window.floor, window.newest, over=int(-room))
    if not known:
        return None
    most = max(one.deltas + one.mean for one in known.values()) if most is None else most
    if FULL_ENOUGH * (head * most + len(older) * window.snapshot) <= room:
        return Kept(frozenset(older), 0, 0)
    snapshots = thin_snapshots(older, window.floor, window.every, int(room // max(1, window.snapshot)))
    room -= len(snapshots) * window.snapshot
    means_from, room = _reach_back(window.floor, room, {t: one.mean for t, one in known.items()})
    if means_from and means_from - 1 not in known:
        return None
    bodies = {t: one.deltas + one.mean * (t >= window.floor) - window.bytes_needed(t, one) for t, one in known.items()}
    deltas_from, _ = _reach_back(window.newest, room, bodies)
    if deltas_from and deltas_from - 1 not in known:
        return None
    return Kept(frozenset(snapshots), means_from, deltas_from)


def _reach_back(end: int, room: float, sizes: Mapping[int, int]) -> tuple[int, float]:
    """Return the first step from which on all below `end` have room, and the room that is left."""
    while end and (size := sizes.get(end - 1, room + 1)) <= room:
        end = end - 1
        room = room - size
    return end, room


def thin_snapshots(steps: Iterable[int], floor: int, every: int, room: int) -> set[int]:
    """Choose at most `room` of the snapshots below `floor`, at ages of about powers of two, the first one among them.

    every: steps from one to the next.   A snapshot that is the first in its cell of 2^l periods, and in none that is
    larger, has level l, for ever.  It stays until it is 2^(l + share) periods old, if l is not below a lowest level.
    The share is the largest, and then the lowest level the smallest, by which all have room in a run without gaps.
    Both only change for the worse as the run grows, so a snapshot that has gone is not asked for again.
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
    """The largest number that stays of a run without gaps: one of level l in 2^(l+1) periods, and the first one."""
    levels = range(max(0, lowest), periods.bit_length())
    return 1 + sum(min(1 << (share - 1), (((periods - 1) >> level) + 1) >> 1) for level in levels)


def _snapshot_level(before: int, t: int, every: int) -> int:
    """The highest bit in which the numbers of their periods differ; -1 within one period."""
    return ((before // every) ^ (t // every)).bit_length() - 1
