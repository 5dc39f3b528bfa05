"""A store that is the run's no longer: gone, emptied, or another one; for some processes or all, for a while or not.

    folder   a process stays with the folder that it opened first (rendezvous/stores/files.py)
             gone · swapped for another, of some or of all        ─▶ StoreGone until it is back
             emptied, of all                                      ─▶ the same folder, without an object
    bucket   emptied or swapped, of all                           ─▶ the same name, other objects

    away     the dict of objects that stands in the run's place; no replica may commit there, except one that lags so
             far behind that a copy of some seconds ago is all it knows

A closer may have looked before the store was taken and write after: one commit away is allowed to each process, and
none in a folder, which is opened and looked at in every request.  A process that starts while the run is away finds no
run.json, and ends; into a copy that has one nothing is launched: no replica could know.

Not promised: a store that loses only some objects; tests/sim/adversary.py has those.
"""

import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rendezvous import layout
from rendezvous.agreement.chain import ANCHORS
from rendezvous.errors import KeyExists, StoreGone
from tests.sim.replica import Process

if TYPE_CHECKING:
    from tests.sim.simulate import World

SOON = 90.0  # seconds within which replicas notice that their store lost everything


@dataclass(frozen=True)
class Loss:
    """at, lasts: seconds; lasts = 0: for good.   slots: whose store it befalls, () for all.   pins: it is a folder."""

    at: float
    how: str  # "gone" | "emptied" | "older" (a copy of some seconds ago) | "other" (another run's objects)
    lasts: float = 0.0
    slots: tuple[str, ...] = ()
    pins: bool = True


def draw_loss(seed: int, replicas: int) -> Loss:
    r = random.Random(seed ^ 0x105E)
    pins = r.random() < 0.6
    how = r.choice(("gone", "emptied", "older", "other") if pins else ("emptied", "older", "other"))
    some = tuple(layout.slot_name(i) for i in range(replicas) if r.random() < 0.5)
    partly = pins and how != "emptied" and r.random() < 0.6
    for_good = not pins and how == "older"  # a backup that is put in a bucket's place is the run from then on
    lasts = r.choice((0.0, 4.0, 15.0))
    return Loss(r.uniform(5.0, 45.0), how, 0.0 if for_good else lasts, some if partly else (), pins)


class Places:
    """The store that each process finds where the run's should be."""

    def __init__(self, world: "World", loss: Loss) -> None:
        self.w, self.loss = world, loss
        self.is_away = False
        self.back_at = 0.0  # when the run's store was there again
        self._away: dict[str, bytes] = {}
        self._earlier: dict[str, bytes] = {}
        self._line: dict[str, bytes] = {}  # commits of a copy, and those that follow from it
        self._head = 0  # commits when the copy was made
        self._commits = Counter[int]()  # written away, by process

    def begin(self) -> None:
        w, loss = self.w, self.loss
        w.at(max(0.0, loss.at - 8.0), self._copy)
        w.at(loss.at, self._take_away)
        if loss.lasts:
            w.at(loss.at + loss.lasts, self._bring_back)

    def _copy(self) -> None:
        self._earlier, self._head = dict(self.w.objects), len(self.w.observer.commits)

    @property
    def shows(self) -> bool:
        """Whether each request shows that the store is another one: a folder that is not the one opened first."""
        return self.loss.pins and self.loss.how != "emptied"

    def _take_away(self) -> None:
        self.w.fired[f"store {self.loss.how}: {'some' if self.loss.slots else 'all'}"] += 1
        self.is_away = True
        if self.loss.how == "older" and (self.shows or self._head < len(self.w.observer.commits)):
            self._away = dict(self._earlier)
            self._line = {k: v for k, v in self._away.items() if k.endswith("commit.json")}
        elif self.loss.how == "other" and self.w.observer.commits:
            self._away = {
                k: v[::-1] if k.endswith("commit.json") else v
                for k, v in self.w.objects.items()
                if not k.startswith("replicas/")
            }

    def _bring_back(self) -> None:
        """A folder may be back at any time; the objects of a bucket are put back when its replicas have ended."""
        if not self.shows and (left := [p for p in self.w.fleet.living() if not p.trainer_hangs]):
            late = [p.slot for p in left if self.w.now > max(self.loss.at, p.asleep_until, p.hangs_until) + SOON]
            if late:
                self.w.observer.broken("a lost store ends its replicas", f"{late} live")
            self.w.at(self.w.now + 1.0, self._bring_back)
            return
        for stray in [p for p in self.w.processes if not self.shows and (p.strays or p.trainer_hangs)]:
            stray.dead = True  # with its requests in flight
        self.w.fired["store back"] += 1
        self.is_away = False
        self.back_at = self.w.now

    def befalls(self, process: Process) -> bool:
        """Whether this process has another store than the run's now."""
        return self.is_away and (not self.loss.slots or process.slot in self.loss.slots)

    def serve(self, process: Process, verb: str, key: str, body: bytes | None) -> Any:
        """Answer a request to a store that is away.   Raises StoreGone where a folder shows it."""
        self.w.fired["request to a store that is away"] += 1
        process.strays = True
        if self.shows:
            if guard_folder():
                raise StoreGone("the folder is not the one that was opened")
            if self.loss.how == "gone" and verb in ("get", "list"):
                return None if verb == "get" else []
            if verb in ("put", "create"):
                self.w.observer.broken("nothing is written below a mount point", f"{process.slot}: {key}")
        if verb == "get":
            return self._away.get(key)
        if verb == "list":
            return sorted(k for k in self._away if k.startswith(key))
        if verb == "create" and key in self._away:
            raise KeyExists(key)
        if body is None:
            self._away.pop(key, None)
        else:
            self._away[key] = body
            self._note_commit(process, key)
        return None

    def _note_commit(self, process: Process, key: str) -> None:
        if key.endswith("commit.json") and not self._may_go_on(process, layout.commit_step(key)):
            self._commits[process.id] += 1
            self.w.fired["commit away"] += 1
            if self._commits[process.id] > 1:
                self.w.observer.broken("one run, one store", f"{process.slot} commits {key} where the run is not")

    def _may_go_on(self, process: Process, t: int) -> bool:
        """Whether the store is one that was rolled back, for all that a replica which lags can know."""
        rv, keys = process.rv, [layout.commit_key(u) for u in range(t)]
        claimed = t >= ANCHORS or rv is None or layout.claim_key(process.slot, rv.generation) in self._away
        if not claimed or any(key not in self._line or self._away.get(key) != self._line[key] for key in keys):
            return False
        self._line[layout.commit_key(t)] = self._away[layout.commit_key(t)]
        return True

    def refuse_done(self, process: Process) -> None:
        """A replica has ended as if all were well."""
        if self.befalls(process) and not self._line:
            self.w.observer.broken("done means that the run stands", f"{process.slot} ends at step {process.rv.step}")  # type: ignore[union-attr]


def guard_folder() -> bool:
    """Whether a folder store stays with the folder that it opened; a planted bug says no."""
    return True
