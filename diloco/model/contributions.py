"""The mean of a decided step and each listed offer's part in it, for readers without write access.

    announced mean ──────────────────────▶ ḡ          fewer bytes, so it is asked for first
    listed deltas ──▶ x₁ … x_N ──▶ Σwx/Σw ─▶ ḡ          where nothing was announced, or it is damaged

A damaged blob stays as it is: a replica that needs it puts it back (rendezvous/means/reduce.py).

Not promised: x before its codec; the rest that a lossy codec kept back was sent later, if at all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rendezvous.codecs import get_codec
from rendezvous.means.reduce import Reducer, is_valid_body, refuse_misweighed
from rendezvous.records.records import Commit, Listed


@dataclass(frozen=True)
class Contribution:
    """The contribution of a listed offer.   vector: None where there is none, for the reason that `flaw` has.

    counts: does it count for the mean?  False for a body that the rules leave out."""

    listed: Listed
    vector: np.ndarray | None
    flaw: str = ""
    counts: bool = True


def read_mean(reducer: Reducer, commit: Commit, out: np.ndarray) -> str:
    """Write the mean of `commit` into `out`; -> "announced" or "deltas", by where it was taken from.

    Raises BadCommit, Corrupt.
    """
    refuse_misweighed(commit, reducer.rules)
    if reducer.parts.read_announced(commit, out) is None:
        return "announced"
    for _ in reducer.parts.make_all(commit, out):
        pass
    return "deltas"


def read_contributions(reducer: Reducer, commit: Commit, elements: int) -> Iterator[Contribution]:
    """Each listed offer with its pseudogradient as it counted.   A vector is good until the next is asked for."""
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
            flaw = "counts for nothing: its values are not finite, or no encoder writes such bytes"
            yield Contribution(listed, None, flaw, counts=False)
        else:
            get_codec(reducer.rules.codec).decode(body, vector)
            yield Contribution(listed, vector)
