"""The result of an audit: differences from the records, and unchecked parts.

    differs   step, blob, replica, text      gone   needed, or in a run that keeps all: differs; else: unchecked

Not promised: an order; the checks add their findings as they come.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from rendezvous.keeping.garbage import blob_stands
from rendezvous.snapshots.record import newest_first
from rendezvous.store import Store

UNSEEN = "that a pseudogradient is the result of its replica's inner steps (--inner takes them again)"


@dataclass(frozen=True)
class Difference:
    """One difference from the records.   slot: the slot that it concerns, or ""."""

    step: int
    blob: str
    slot: str
    text: str

    def in_words(self) -> str:
        of = f", {self.slot}" if self.slot else ""
        return f"step {self.step}{of}: {self.blob}: {self.text}"


@dataclass
class Verdict:
    """The result.   thetas: steps whose θ was computed.   from_deltas, as_announced: steps, by their mean's source."""

    thetas: list[int] = field(default_factory=list[int])
    from_deltas: list[int] = field(default_factory=list[int])
    as_announced: list[int] = field(default_factory=list[int])
    differences: list[Difference] = field(default_factory=list[Difference])
    unchecked: list[str] = field(default_factory=list[str])
    digests: dict[int, str] = field(default_factory=dict[int, str])
    inner: str = ""  # what `diloco verify --inner` found (audit/inner.py)
    stopped: int = 0  # sessions that `--inner` could not follow on this machine

    @property
    def good(self) -> bool:
        return not self.differences and bool(self.thetas) and not self.stopped

    def to_dict(self) -> dict[str, Any]:
        return {"good": self.good, **asdict(self)}

    def lines(self) -> list[str]:
        """Return the verdict as lines of text."""
        reach = f"{self.thetas[0]} to {self.thetas[-1]}" if self.thetas else "of no step"
        means = f"{len(self.from_deltas)} means from their deltas, {len(self.as_announced)} as announced"
        found = [f"differs: {one.in_words()}" for one in self.differences]
        equal = "everything that was compared is equal" if self.thetas else "nothing could be compared"
        last = f"{len(found)} difference{'s' * (len(found) > 1)}" if found else equal
        inner = [self.inner] if self.inner else []
        return [
            f"θ computed again: {reach} ({means})",
            *inner,
            *found,
            *(f"not checked: {u}" for u in self.unchecked),
            f"{last}{self._left_out()}",
        ]

    def _left_out(self) -> str:
        """Return the end of the last line: what was not compared, beside inner steps that `--inner` would take."""
        if self.stopped:
            return f"; the inner steps of {self.stopped} sessions could not be taken on this machine (see above)"
        count = len([one for one in self.unchecked if one != UNSEEN])
        parts = "1 part was" if count == 1 else f"{count} parts were"
        return f"; {parts} not checked (see above)" if count and self.thetas else ""


@dataclass
class Findings:
    """A verdict that the checks fill.   store: the run's store.   keeps_all: whether the run deletes no blob.

    replaced_until: step of the newest confirmed snapshot that was seen; -1: none yet.
    """

    verdict: Verdict
    store: Store
    keeps_all: bool
    replaced_until: int = -1

    def differs(self, step: int, blob: str, slot: str, text: str) -> None:
        self.verdict.differences.append(Difference(step, blob, slot, text))

    def not_checked(self, text: str) -> None:
        self.verdict.unchecked.append(text)

    def missing(self, step: int, blob: str, slot: str = "") -> None:
        """Note a blob that is too short, or gone.   A collector may have deleted it: then it is no difference."""
        if blob_stands(self.store, blob, 1):
            self.differs(step, blob, slot, "is shorter than announced")
        elif self.keeps_all:
            self.differs(step, blob, slot, "is gone, and this run keeps everything (fleet.keep)")
        elif not self._is_replaced(step):
            self.differs(step, blob, slot, "is gone, and no later snapshot replaces it: fleet.keep did not delete it")
        else:
            self.not_checked(f"step {step}: {blob} is gone (collected, fleet.keep)")

    def _is_replaced(self, step: int) -> bool:
        """Whether a confirmed snapshot is newer than the step's bytes, which a collector may then delete."""
        if self.replaced_until <= step:  # a live run writes snapshots, so look again
            confirmed = (snapshot.t for snapshot in newest_first(self.store) if snapshot.confirmed)
            self.replaced_until = next(confirmed, -1)
        return self.replaced_until > step
