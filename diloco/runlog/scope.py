"""Which records of a run a view needs.

    view      commits   offers (rewards)       logs of replicas            logs of supervisors
    report    all       all                    all, found by LIST          all
    status    all       first 2, newest 24     newest 24 objects of the    all
                                               two newest generations
    costs     count     none                   none                        all

Bounds hold for what a reader finds at its first look; whatever is written afterwards it reads.

Not promised: that two views count the same garbage in logs; each counts what it reads.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scope:
    """commits: read them, or only count them.   newest: outer steps whose offers, and objects of a replica's log, are
    read; None for all."""

    commits: bool = True
    newest: int | None = None

    def reads_offers(self, t: int, head: int) -> bool:
        """Does the view show what was offered for step t?   head: number of steps at the first look."""
        return self.newest is None or t < self.first or t >= head - self.newest

    @property
    def first(self) -> int:
        """The first outer steps: a curve shows where it began."""
        return 2 if self.newest else 0


EVERYTHING = Scope()
STATUS = Scope(newest=24)
COSTS = Scope(commits=False, newest=0)
GENERATIONS = 2  # of each slot, whose logs are read where not all are
