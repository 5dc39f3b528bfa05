"""Difference between the product of LoRA's averaged factors and the average of the products, in one layer.

    Aᵢ = A − ΔAᵢ      Bᵢ = B − ΔBᵢ      of each decoded pseudogradient that the commit lists;  Σ wᵢ = 1
    C  = Σ wᵢ BᵢAᵢ − B̄Ā = Σ wᵢ (Bᵢ − B̄)(Aᵢ − Ā)
    cross term = ‖C‖_F / ‖Σ wᵢ BᵢAᵢ‖_F                 0 with freeze_a, for all Bᵢ

The layer is the first one with an adapter.  The layer's elements are the first of fragment 0, so they are in the first
shard of a sharded step. In such a step, only the owner of that shard logs the number; in a direct step all replicas log
the same number.  The number costs neither a request nor a matrix of the layer's size: ‖UV‖_F² = tr(UᵀU·VVᵀ), where U
holds all replicas' columns.

Not promised: a number for each step (rendezvous/means/body_sample.py says when it is missing); similar numbers
for other layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from diloco.outer.flat import trainable_parameters
from diloco.process.session import Session
from rendezvous.means.body_sample import BodySample
from rendezvous.records.records import Commit

if TYPE_CHECKING:
    from diloco.outer.loop import OuterLoop

A_NAME = ".lora_A."
B_NAME = ".lora_B."


@dataclass(frozen=True)
class FactorPair:
    """Positions of A (r × in) and then B (out × r) of one layer in the flat vector of a fragment."""

    a_shape: tuple[int, int]
    b_shape: tuple[int, int]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.a_shape) + math.prod(self.b_shape)

    def split(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Split (…, elements) into A and B."""
        cut = math.prod(self.a_shape)
        lead = values.shape[:-1]
        return values[..., :cut].reshape(*lead, *self.a_shape), values[..., cut:].reshape(*lead, *self.b_shape)


def first_pair(layout: Sequence[tuple[str, Sequence[int]]]) -> FactorPair | None:
    """Return the first layer with both factors trained.   layout: names and shapes in flat order."""
    start = 0
    for (name, shape), (next_name, next_shape) in pairwise(layout):
        if A_NAME in name and next_name == name.replace(A_NAME, B_NAME) and len(shape) == len(next_shape) == 2:
            return FactorPair((shape[0], shape[1]), (next_shape[0], next_shape[1]), start)
        start += math.prod(shape)
    return None


def trains_only_b(names: Sequence[str]) -> bool:
    """Whether A is frozen in every layer."""
    return any(B_NAME in name for name in names) and not any(A_NAME in name for name in names)


def cross_term(a: np.ndarray, b: np.ndarray, weights: Sequence[float]) -> float | None:
    """Compute the cross term.   a: (N, r, in), b: (N, out, r).   None if the mean product is zero or not finite."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    w = np.asarray(weights, np.float64)
    w = (w / w.sum())[:, None, None]
    a = a.astype(np.float64)
    b = b.astype(np.float64)
    whole = _norm_of_sum(w * b, a)
    if whole == 0.0:
        return None
    return _norm_of_sum(w * (b - (w * b).sum(0)), a - (w * a).sum(0)) / whole


def _norm_of_sum(b: np.ndarray, a: np.ndarray) -> float:
    """Compute ‖Σ bᵢ aᵢ‖_F."""
    u = np.concatenate(list(b), axis=1)
    v = np.concatenate(list(a), axis=0)
    return math.sqrt(max(0.0, float(np.sum((u.T @ u) * (v @ v.T)))))


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
        kept = self._reducer.sample
        if self._pair is None or kept is None or (sample := kept.take(commit)) is None:
            return
        weights, deltas = sample
        theta = self._theta.numpy()[self._pair.start : self._pair.stop]
        self._number = cross_term(*self._pair.split(theta - deltas), weights)

    def take_number(self) -> dict[str, float]:
        """Return {"cross_term": number}, or {} if there is no number."""
        return {} if self._number is None else {"cross_term": self._number}
