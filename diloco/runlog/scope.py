"""Which records of a run a view needs.

    view      commits   offers (rewards)       logs of replicas            logs of supervisors
    report    all       all                    all, found by LIST          all
    status    all       first 2, newest 24,    newest 24 objects of the    all
                        4 of each of 8 more,   two newest generations
                        1 of each of 24 more
    costs     count     none                   none                        all
    watch     all       as status, and 4 of    as status, until the         all
                        each of 48 more steps  view goes on in turns
    a small run's watch is as its report, without a LIST

Bounds hold for the records that a reader finds at its first look; it reads all later records, unless a Focus says which
part of the run the next look is about (diloco/views/pace.py).

Not promised: that two views count the same garbage in logs; each counts what it reads.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scope:
    """commits: read them, or only count them.   newest: outer steps whose offers, and objects of a replica's log, are
    read; None for all.   spread: so many steps of the whole run, of each of which `each` offers are read for a curve.
    generations: of each slot, whose logs are read where not all are."""

    commits: bool = True
    newest: int | None = None
    spread: int = 0
    each: int = 4
    generations: int = 2

    def reads_offers(self, t: int, head: int) -> bool:
        """Whether the view shows the offers of step t.   head: number of steps at the first look."""
        if not self.newest:
            return self.newest is None
        return t < CURVE_BEGINS or t >= head - self.newest

    def sampled_offers(self, t: int, head: int) -> int:
        """Return how many of step t's offers are read: for the first steps, or for the curve of the whole run."""
        if self.newest and t < AT_FIRST:
            return SAMPLED
        return self.each if self.spread > 0 and t % max(1, head // self.spread) == 0 else 0


@dataclass(frozen=True)
class Focus:
    """The part of a run that one look of a reader that goes on is about.   The newest commit always is.

    control: the operator's wishes, and the supervisor's beat.   supervisor: its log.   beats: slots whose heartbeat is
    read.   sessions: slots whose new claims, goodbyes and logs are looked for.   logs: slots whose logs alone are.
    None for all slots.   most: offers of a new step, and new objects of one log, that are read; None for all.
    """

    control: bool = True
    supervisor: bool = True
    beats: frozenset[str] | None = None
    sessions: frozenset[str] | None = None
    logs: frozenset[str] = frozenset()
    most: int | None = None

    def reads_beat(self, slot: str) -> bool:
        return self.beats is None or slot in self.beats

    def reads_sessions(self, slot: str) -> bool:
        """Whether the slot's claims, goodbyes and logs are looked for."""
        return self.sessions is None or slot in self.sessions


EVERYTHING = Scope()
STATUS = Scope(newest=24, spread=24, each=1)
COSTS = Scope(commits=False, newest=0)
WHOLE = Focus()
CURVE_BEGINS = 2  # a curve shows the first outer steps, where it began
AT_FIRST = 10  # outer steps that the newest are compared with (diloco/views/learning_troubles.py)
SAMPLED = 4  # offers of a step that stand for all of them in a curve
SMALL_RUN = 1500  # offers: a live view reads all of them, as a report does


def watch_scope(head: int, replicas: int) -> Scope:
    """head: outer steps that are committed."""
    if head * max(1, replicas) <= SMALL_RUN:
        return Scope(newest=SMALL_RUN, generations=SMALL_RUN)
    return Scope(newest=24, spread=48)
