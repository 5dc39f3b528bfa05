"""How a mean treats bodies that no encoder writes, and sums that are not finite.

    a body is poisoned ──▶ the mean is made again, of the others (reduce.py)     a sum overflows ──▶ its elements are 0

Not promised: a wrong body with finite values; no reader can tell such a body from a right body.
"""

from typing import TYPE_CHECKING

import numpy as np

from rendezvous.codecs import get_codec
from rendezvous.errors import Corrupt
from rendezvous.means.bodies import OwnBody, Shard, elements_slice, has_shard_digests, total_weight
from rendezvous.means.sums import divide_by_weight
from rendezvous.records.records import Commit, Listed

if TYPE_CHECKING:
    from rendezvous.means.reduce import Reducer


def is_valid_body(name: str, body: np.ndarray, elements: int) -> bool:
    """Whether an encoder could have written these bytes.   name: the codec's name."""
    if name == "fp32":
        return bool(np.isfinite(body.view(np.float32)).all())
    out = np.empty(elements, np.float32)
    try:
        get_codec(name).decode(body, out)
    except Corrupt:
        return False
    return bool(np.isfinite(out).all())


@np.errstate(over="ignore", invalid="ignore")
def mean_of_valid(
    reducer: "Reducer", commit: Commit, offers: list[Listed], group: list[Shard], out: np.ndarray, mine: OwnBody | None
) -> str | None:
    """Write the mean of the valid bodies, shard by shard, because readers may group shards differently.

    Return None, or why a body cannot be read."""
    codec = reducer.rules.codec
    for unit in [[shard] for shard in group] if has_shard_digests(commit) else [group]:
        total = out[elements_slice(unit)]
        good = list[Listed]()
        for listed in offers:
            body = reducer.bodies.read_body(listed, unit, mine)
            if isinstance(body, str):
                return body
            if is_valid_body(codec, body, total.size):
                reducer.add_body(total, body, listed.weight, first=not good)
                good.append(listed)
            else:
                reducer.report_poisoned(commit, listed, "it has values that are not finite, or no encoder wrote it")
        if not good:
            total.fill(0.0)
        elif not divide_by_weight(total, total_weight(good)):
            zero_non_finite(total)
    return None


def zero_non_finite(total: np.ndarray) -> None:
    """Set every element that is not finite to 0."""
    np.nan_to_num(total, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
