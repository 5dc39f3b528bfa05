"""Report each outer step of one replica: an event with its numbers, and a warning if it did less than it seems.

    commit, mean ──note_mean──▶ ρ, norms, cosines (safety.py) ──emit_step──▶ log: step … warning … nothing_learned
                                LoRA's cross term (cross_term.py)

A replica warns about its own offer, and the committer warns about the commit, so a fleet has each warning once.

Not promised: numbers of steps without this replica; their participants log them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from diloco.outer.flat import trainable_parameters
from diloco.outer.safety import Finding, Tracker, is_due, replica_findings
from diloco.process.processes import device_name
from diloco.process.session import Session
from rendezvous.records.records import Commit, Offer

if TYPE_CHECKING:
    from diloco.outer.cross_term import FactorWatch
    from diloco.outer.loop import OuterLoop


class StepReport:
    """The numbers and warnings of the steps that `loop` takes."""

    def __init__(self, session: Session, loop: "OuterLoop") -> None:
        self._session = session
        self._loop = loop
        outer = loop.state.optimizers
        sizes = [loop.state.size(f) for f in range(len(outer))]
        self._tracker = Tracker(sizes, outer[0].param_groups[0]["momentum"], loop.rules)
        self._factors = _watch_factors(session, loop)

    def note_mean(self, commit: Commit, mean: np.ndarray) -> None:
        """Compute the numbers of a committed mean, before its outer step is taken."""
        self._tracker.mean(commit, mean)
        if self._factors is not None:
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
        if self._factors is not None:
            numbers |= self._factors.take_number()
        self._session.emit(
            "step", step=commit.t, device=device_name(), h=mine.h if mine else 0,
            listed=commit.lists_offer(commit.t, rv.slot), theta=rv.base,
            bytes_up=mine.size if mine else 0, bytes_down=sum(o.size for o in commit.offers),
            delta_norm=mine.norm if mine else 0.0,
            **numbers, **({"empty": True} if outer.stood else {}), **spent, **stats,
        )  # fmt: skip
        if is_due(rv.idle_steps):
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


def _watch_factors(session: Session, loop: "OuterLoop") -> "FactorWatch | None":
    """Return the cross term's watch; None for a model without LoRA."""
    if not any(".lora_" in name for name, _ in trainable_parameters(loop.model)):
        return None
    from diloco.outer.cross_term import FactorWatch

    return FactorWatch(session, loop)


def likely_cause(stats: dict[str, float]) -> str:
    """Return why all pseudogradients may be zero, judged by the inner loop's numbers."""
    if stats.get("lr") == 0:
        return "the learning rate is 0: look at inner.lr and its schedule"
    if stats.get("reward_std") == 0 or ("reward" in stats and stats.get("grad_norm") == 0):
        level = stats.get("reward", 0.0)
        return f"every group's rewards are equal (mean {level:.2f}), so no advantage: the task is too hard or too easy"
    if stats.get("grad_norm") == 0:
        return "all gradients are 0: is the loss connected to trainable parameters?"
    rate = f"a learning rate of {stats['lr']:g} may be too small for their dtype" if "lr" in stats else "look at the lr"
    return f"parameters did not change: {rate}, or the optimizer does not have the model's parameters"
