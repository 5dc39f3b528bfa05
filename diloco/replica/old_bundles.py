"""Deletes a slot's old bundles, in a run with a limit (fleet.keep).

    a bundle's step < the first step whose θ can be computed ──▶ deleted: no audit can use it any more

A bundle that a suspended process writes later is of an old step, so no session uses it.

Not promised: a deletion at once. Every EVERY outer steps the slot looks, because a look costs a LIST and some GETs.
"""

from typing import TYPE_CHECKING

from rendezvous import layout
from rendezvous.background import Background, Emit, submit_reported
from rendezvous.keeping.reach import read_reach
from rendezvous.store import Store

if TYPE_CHECKING:
    from inner.rollouts.recording.recorded import BundlePlace

EVERY = 8


class OldBundles:
    """The bundles of one slot, with their outer steps.   store: without retries; a failed deletion is tried again.

    background: runs the deletions.   emit: called for failures.   ahead: outer steps by which actors sample ahead.
    parent: outer steps of the runs before this one; the numbers of places begin after them.
    """

    def __init__(
        self, store: Store, slot: str, background: Background, emit: Emit, ahead: int = 0, parent: int = 0
    ) -> None:  # fmt: skip
        self._store = store
        self._prefix = f"{layout.ROLLOUTS}{slot}/"
        self._background = background
        self._emit = emit
        self._ahead, self._parent = ahead, parent
        self._steps: dict[str, int] = {}  # prefix of a generation's keys -> its outer step
        self._began = self._newest = -1

    def note(self, place: "BundlePlace") -> None:
        """Note that this place has a bundle; every EVERY outer steps, delete the bundles that no audit can use."""
        self._steps[f"{self._prefix}{place.generation:010d}/"] = place.outer
        if self._newest < 0 or place.outer >= self._newest + EVERY:
            self._newest = place.outer
            submit_reported(self._background, self._sweep, self._emit)

    def _sweep(self) -> None:
        """Delete the bundles of steps whose θ cannot be computed any more."""
        if self._began < 0:
            self._began = self._newest
            others = {key.rpartition("/")[0] + "/" for key in self._store.list(self._prefix)} - set(self._steps)
            self._steps |= dict.fromkeys(others, self._began + self._ahead)  # of earlier sessions, and of this one
        since = self._parent + read_reach(self._store).since
        for prefix in [prefix for prefix, step in list(self._steps.items()) if step < since]:
            self._store.delete(self._store.list(prefix))
            del self._steps[prefix]
