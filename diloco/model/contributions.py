"""Read a committed step's mean and each listed offer's contribution, without write access.

    published mean ──────────────────────▶ ḡ          fewer bytes, so it is read first
    listed deltas ──▶ x₁ … x_N ──▶ Σwx/Σw ─▶ ḡ          if no mean was published, or it is damaged

A damaged blob is not repaired here; a replica that needs the blob repairs it (rendezvous/means/reduce.py).

Not promised: x before its codec. A lossy codec sends the residual later, or never.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rendezvous.codecs import get_codec
from rendezvous.means.poison import is_valid_body
from rendezvous.means.reduce import Reducer, refuse_misweighed
from rendezvous.records.records import Commit, Listed


@dataclass(frozen=True)
class Contribution:
    """The contribution of a listed offer.   vector: None if it cannot be read; `flaw` is the reason.

    counts: whether it is in the mean; False for a body that the rules leave out."""

    listed: Listed
    vector: np.ndarray | None
    flaw: str = ""
    counts: bool = True


def read_mean(reducer: Reducer, commit: Commit, out: np.ndarray) -> str:
    """Write the mean of `commit` into `out`. Return its source, "announced" or "deltas".

    Raises BadCommit, Corrupt.
    """
    refuse_misweighed(commit, reducer.rules)
    if reducer.parts.read_announced(commit, out) is None:
        return "announced"
    for _ in reducer.parts.make_all(commit, out):
        pass
    return "deltas"


def read_contributions(reducer: Reducer, commit: Commit, elements: int) -> Iterator[Contribution]:
    """Yield each listed offer with its decoded pseudogradient.   The next offer overwrites the vector."""
    bodies = reducer.bodies
    vector = np.empty(elements, np.float32)
    for listed in commit.offers:
        if flaw := bodies.record_flaw(listed, elements):
            yield Contribution(listed, None, f"counts for nothing: {flaw}", counts=False)
            continue
        body = bodies.read_body(listed, bodies.grid(elements), None)
        if isinstance(body, str):
            yield Contribution(listed, None, body)
        elif not is_valid_body(reducer.rules.codec, body, elements):
            flaw = "counts for nothing: it has values that are not finite, or bytes that no encoder writes"
            yield Contribution(listed, None, flaw, counts=False)
        else:
            get_codec(reducer.rules.codec).decode(body, vector)
            yield Contribution(listed, vector)
