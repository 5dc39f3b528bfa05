"""Recorded rollouts of a replica in K processes: rank 0 alone uses the bucket, for all ranks.

    find   rank 0: a thread for each of K places (t, g, k) ──▶ a bundle ──tell──▶ rank k: does it fit my rows? ──┐
               ▲                                                 next attempt ◀── no ────────────────────────────┤
               └ once more without actors' bundles, if not all ranks have one                                   yes
                                                            all have one: rank k trains on bundle k ◀───────────┘
    put    rank k ──its own bundle──▶ rank 0: K puts side by side ──▶ all are ours: each trains on its own
                                                                  ──▶ another process was faster: all read theirs back

So an actor samples for one rank at a time, and a bundle is as large as with one process.

TRL gathers over all ranks. So all ranks read bundles, or all make new rollouts. And all train on actors' rollouts, or
all train on their own. A rank's own bundle is then a later attempt beside the actor's. A replacement decides so, too.

Not promised: models in shards (rank_faults.py), where a forward pass of one rank would wait for the other ranks.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from inner.rollouts.recording.bundle import Bundle
from inner.rollouts.recording.recorded import BundlePlace, Unfit

if TYPE_CHECKING:
    from diloco.outer.ranks.group import Group
    from diloco.replica.rollouts import BucketPlaces


class Candidates(NamedTuple):
    """Bundles that the ranks have to check, by rank."""

    bundles: dict[int, Bundle]


class Dealt(NamedTuple):
    """The bundles that the ranks train on.   None: the bundle that the rank itself makes, or has made."""

    bundles: Sequence[Bundle | None]


Question = tuple[int, Bundle | None, "Future[str]"]  # rank, its bundle (None: its thread has ended), the answer
Act = Callable[[int, Unfit], "Bundle | None"]


class LeadingPlaces:
    """Rank 0's Places (inner/rollouts/recording/recorded.py).   places: the ranks' stores, in the ranks' order."""

    def __init__(self, group: "Group", places: "Sequence[BucketPlaces]") -> None:
        self._group = group
        self._places = places

    def find(self, place: BundlePlace, unfit: Unfit) -> Bundle | None:
        """Return this rank's bundle, if all ranks have one."""
        found = self._look(place, unfit, own_only=False)
        if len({bundle is None or bundle.logprobs is None for bundle in found}) == 2:
            self._pass_over(found)
            found = self._look(place, unfit, own_only=True)
        if None in found:
            found = self._pass_over(found)
        for places in self._places:
            places.own_only = True  # from now on, `put` returns no actor's bundle in place of new rollouts
        return self._group.tell(Dealt(found)).bundles[0]

    def _pass_over(self, found: Sequence[Bundle | None]) -> list[Bundle | None]:
        for places, bundle in zip(self._places, found, strict=True):
            if bundle is not None:
                places.pass_over(bundle)
        return [None] * len(found)

    def _look(self, place: BundlePlace, unfit: Unfit, *, own_only: bool) -> list[Bundle | None]:
        for places in self._places:
            places.own_only = own_only
        return self._side_by_side(lambda k, fits: self._places[k].find(_of_rank(place, k), fits), unfit)

    def put(self, place: BundlePlace, made: Bundle, unfit: Unfit) -> Bundle:
        """Record the ranks' new bundles. Return the bundle that counts for this rank's place."""
        parts: list[Bundle] = self._group.gather(made)
        stand = self._side_by_side(lambda k, fits: self._places[k].put(_of_rank(place, k), parts[k], fits), unfit)
        as_made = all(one is part for one, part in zip(stand, parts, strict=True))
        dealt = Dealt([None] * len(stand) if as_made else stand)  # None: each rank has its own bundle already
        return self._group.tell(dealt).bundles[0] or made

    def tell(self) -> None:
        """Log the counts of the last outer step's bundles."""
        for places in self._places:
            places.tell()

    def _side_by_side(self, act: Act, unfit: Unfit) -> list[Bundle | None]:
        """Call act(k, fits) for each rank k, in a thread each; return the results.   fits: calls `unfit` on rank k."""
        asked = SimpleQueue[Question]()

        def run(k: int) -> Bundle | None:
            def fits(bundle: Bundle) -> str:
                asked.put((k, bundle, answer := Future[str]()))
                return answer.result()

            try:
                return act(k, fits)
            finally:
                asked.put((k, None, Future[str]()))

        with ThreadPoolExecutor(self._group.count, "rank") as pool:
            results = [pool.submit(run, k) for k in range(self._group.count)]
            busy = self._group.count
            while busy:
                waiting = dict[int, tuple[Bundle, Future[str]]]()
                while len(waiting) < busy:
                    k, bundle, answer = asked.get()
                    if bundle is None:
                        busy -= 1
                    else:
                        waiting[k] = bundle, answer
                if waiting:
                    self._answer(waiting, unfit)
        return [result.result() for result in results]

    def _answer(self, waiting: dict[int, tuple[Bundle, "Future[str]"]], unfit: Unfit) -> None:
        """Let each rank check its bundle, all at the same time."""
        bundles = {k: bundle for k, (bundle, _) in waiting.items()}
        try:
            self._group.tell(Candidates(bundles))
            told = self._group.gather(_why(unfit, bundles.get(0)))
        except Exception as error:
            for _, answer in waiting.values():
                answer.set_exception(error)
            raise
        for k, (_, answer) in waiting.items():
            answer.set_result(told[k])


class FollowingPlaces:
    """Places of a rank that rank 0 leads."""

    def __init__(self, group: "Group") -> None:
        self._group = group

    def find(self, place: BundlePlace, unfit: Unfit) -> Bundle | None:
        return self._follow(unfit)

    def put(self, place: BundlePlace, made: Bundle, unfit: Unfit) -> Bundle:
        self._group.gather(made)
        return self._follow(unfit) or made

    def _follow(self, unfit: Unfit) -> Bundle | None:
        """Check the bundles that rank 0 sends. Return the bundle that rank 0 then deals to this rank."""
        while isinstance(asked := self._group.tell(None), Candidates):
            self._group.gather(_why(unfit, asked.bundles.get(self._group.index)))
        return asked.bundles[self._group.index]


def _why(unfit: Unfit, bundle: Bundle | None) -> str:
    """Return why a rank cannot train on a bundle.   A ValueError is a reason, as with one process (rollouts.py)."""
    try:
        return "" if bundle is None else unfit(bundle)
    except ValueError as error:
        return str(error) or type(error).__name__


def _of_rank(place: BundlePlace, rank: int) -> BundlePlace:
    """Return a rank's place. Without dynamic sampling, a generation has one bundle for each rank."""
    return place._replace(bundle=rank)
