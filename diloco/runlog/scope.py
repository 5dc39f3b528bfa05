"""The records of a run that each view reads.

    view      commits   offers (rewards)       logs of replicas            logs of supervisors
    report    all       all                    all, found by LIST          all
    status    all       first 2, newest 24,    newest 24 objects of the    all
                        4 of each of 8 more,   two newest generations
                        1 of each of 24 more
    costs     count     none                   none                        all
    watch     all       as status, and 4 of    as status, until the         all
                        each of 48 more steps  view continues in turns
    the watch of a small run reads the same as its report, without a LIST

These limits are for a reader's first look. The reader reads all later records, unless a Focus limits the next look to a
part of the run (diloco/views/pace.py).

Not promised: equal counts of invalid log lines in two views; each view counts the lines that it reads.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scope:
    """The records of a view.   commits: read them, or only count them.   newest: how many outer steps' offers, and how
    many objects of a replica's log, are read; None for all.   spread: steps over the whole run with `each` offers read
    for a curve.   generations: number of newest generations per slot whose logs are read, unless `newest` is None."""

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
        """Return how many of step t's offers are read, for the first steps and for the whole run's curve."""
        if self.newest and t < AT_FIRST:
            return SAMPLED
        return self.each if self.spread > 0 and t % max(1, head // self.spread) == 0 else 0


@dataclass(frozen=True)
class Focus:
    """The part of a run that one later look of a reader reads.   It always reads the newest commit.

    control: the desired state, and the supervisor's heartbeat.   supervisor: its log.   beats: slots whose heartbeat
    is read; None: all.   sessions: slots whose new claims, leave records and logs are read; None: all.   logs: slots
    of which only the logs are read.   most: how many offers of a new step, and how many new objects of a log, the look
    reads at most; None: all.
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
        """Whether the slot's claims, leave records and logs are read."""
        return self.sessions is None or slot in self.sessions


EVERYTHING = Scope()
STATUS = Scope(newest=24, spread=24, each=1)
COSTS = Scope(commits=False, newest=0)
WHOLE = Focus()
CURVE_BEGINS = 2  # first outer steps that a curve always shows
AT_FIRST = 10  # first outer steps, which the newest are compared with (diloco/views/learning_troubles.py)
SAMPLED = 4  # offers of a step that represent all of them in a curve
SMALL_RUN = 1500  # a live view reads all offers, like a report, if there are at most so many


def watch_scope(head: int, replicas: int) -> Scope:
    """Return the scope of a live view.   head: number of committed outer steps."""
    if head * max(1, replicas) <= SMALL_RUN:
        return Scope(newest=SMALL_RUN, generations=SMALL_RUN)
    return Scope(newest=24, spread=48)
