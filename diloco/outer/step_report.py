"""Report each outer step of one replica: an event with its numbers, and a warning if it did less than it seems.

    commit, mean ──note_mean──▶ ρ, norms, cosines (safety.py) ──emit_step──▶ log: step … warning … nothing_learned
                                LoRA's cross term (cross_term.py)

A replica warns about its own offer, and the committer warns about the commit, so a fleet has each warning once.

Not promised: numbers of steps without this replica; their participants log them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from diloco.outer.cross_term import cross_term, first_pair, trains_only_b
from diloco.outer.flat import trainable_parameters
from diloco.outer.safety import Finding, Tracker, replica_findings
from diloco.process.processes import device_name
from diloco.process.session import Session
from rendezvous.means.body_sample import BodySample
from rendezvous.records.records import Commit, Offer

if TYPE_CHECKING:
    from diloco.outer.loop import OuterLoop


class StepReport:
    """The numbers and warnings of the steps that `loop` takes."""

    def __init__(self, session: Session, loop: "OuterLoop") -> None:
        self._session = session
        self._loop = loop
        outer = loop.state.optimizers
        sizes = [loop.state.size(f) for f in range(len(outer))]
        self._tracker = Tracker(sizes, outer[0].param_groups[0]["momentum"], loop.rules)
        self._factors = FactorWatch(session, loop)

    def note_mean(self, commit: Commit, mean: np.ndarray) -> None:
        """Compute the numbers of a committed mean, before its outer step is taken."""
        self._tracker.mean(commit, mean)
        self._factors.note_mean(commit)

    def emit_step(self, commit: Commit, spent: Mapping[str, float]) -> None:
        """Log a step that was just taken.   spent: activity -> seconds."""
        rv = self._session.rv
        offer = rv.last_offer
        fragment = commit.t % rv.rules.fragments
        mine = offer if offer is not None and offer.step == commit.t else None
        stats = mine.stats if mine else {}
        outer = self._loop.state.optimizers[fragment]
        numbers = self._tracker.step(outer.param_groups[0]["lr"])
        self._session.emit(
            "step", step=commit.t, device=device_name(), h=mine.h if mine else 0,
            listed=commit.lists_offer(commit.t, rv.slot), theta=rv.base,
            bytes_up=mine.size if mine else 0, bytes_down=sum(o.size for o in commit.offers),
            delta_norm=mine.norm if mine else 0.0,
            **numbers, **self._factors.take_number(), **({"empty": True} if outer.stood else {}), **spent, **stats,
        )  # fmt: skip
        if rv.idle_steps in (3, 6, 12, 24) or (rv.idle_steps and rv.idle_steps % 50 == 0):
            self._session.emit("nothing_learned", steps=rv.idle_steps, cause=likely_cause(stats))
        self._warn_of_findings(commit, self._own_findings(mine, fragment) if mine else [])
        if self._loop.overlaps:
            self._session.flush_soon()
        else:
            self._session.flush()

    def _own_findings(self, mine: Offer, fragment: int) -> list[Finding]:
        if self._session.rv.idle_steps:  # all replicas have zeros: another event reports that
            return []
        small = any(p.dtype.itemsize < 4 for p in self._loop.fragments[fragment].live)
        return replica_findings(mine.stats, mine.h, mine.zero, small)

    def _warn_of_findings(self, commit: Commit, own: list[Finding]) -> None:
        """Warn about this replica's offer, and about the commit if this replica wrote it."""
        rv = self._session.rv
        for finding, steps in self._tracker.findings(commit, rv.wanted.replicas, own):
            if finding in own or commit.by == rv.name:
                self._session.emit("warning", kind=finding.kind, step=commit.t, steps=steps, text=finding.text)


class FactorWatch:
    """The cross term of LoRA's averaged factors, if this replica has read all replicas' factors of the layer."""

    def __init__(self, session: Session, loop: "OuterLoop") -> None:
        layout = [(name, tuple(p.shape)) for name, p in trainable_parameters(loop.model)]
        pair = first_pair(layout)
        self._pair = pair if pair is not None and pair.stop <= loop.state.size(0) else None
        self._is_exact = trains_only_b([name for name, _ in layout])
        self._theta = loop.thetas[0]
        self._reducer = session.rv.reducer
        self._number: float | None = None
        if self._pair is not None:
            self._reducer.sample = BodySample(
                loop.rules.codec, fragments=loop.rules.fragments, start=self._pair.start, stop=self._pair.stop
            )

    def note_mean(self, commit: Commit) -> None:
        """Compute the cross term before the outer step is taken."""
        self._number = 0.0 if self._is_exact else None
        if self._pair is None or (sample := self._reducer.sample.take(commit)) is None:
            return
        weights, deltas = sample
        theta = self._theta.numpy()[self._pair.start : self._pair.stop]
        self._number = cross_term(*self._pair.split(theta - deltas), weights)

    def take_number(self) -> dict[str, float]:
        """Return {"cross_term": number}, or {} if there is no number."""
        return {} if self._number is None else {"cross_term": self._number}


def likely_cause(stats: dict[str, float]) -> str:
    """Say why all pseudogradients may be zero, by the inner loop's numbers."""
    if stats.get("lr") == 0:
        return "the learning rate is 0: look at inner.lr and its schedule"
    if stats.get("reward_std") == 0 or ("reward" in stats and stats.get("grad_norm") == 0):
        level = stats.get("reward", 0.0)
        return f"every group's rewards are equal (mean {level:.2f}), so no advantage: the task is too hard or too easy"
    if stats.get("grad_norm") == 0:
        return "all gradients are 0: is the loss connected to trainable parameters?"
    rate = f"a learning rate of {stats['lr']:g} may be too small for their dtype" if "lr" in stats else "look at the lr"
    return f"parameters did not change: {rate}, or the optimizer does not hold the model's parameters"
