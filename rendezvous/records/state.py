"""The state on which replicas agree, fragment by fragment, and the digests that show whether they agree.

    array     xxh3-128 of its bytes                              theta.0, momentum.0, …
    fragment  xxh3-128 of its arrays' digests, one after another
    base      xxh3-128 of the fragments' digests, one after another           in every offer, commit and snapshot

An outer step changes one fragment, so a sync digests only this fragment, three times: before its pseudogradient is
offered, before it is stepped, and after the step.  The first two digests are compared with the stored digest, and the
third is stored.  Each other fragment is compared in the sync that changes it.  All fragments are compared before a
use of the whole state: a snapshot, a replica's first inner step, the end of a run.  So H inner steps digest 3 times the
size of the state, whatever the number of fragments is.

Digests are hexadecimal text; a digest of digests takes their ASCII bytes.  Not promised: detection of forgeries.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import xxhash

from rendezvous.errors import Diverged

Arrays = dict[str, np.ndarray]
Map = Callable[[Callable[[np.ndarray], str], Sequence[np.ndarray], int], Iterable[str]]
UNVERIFIED = "unverified"


class ReplicatedState(Protocol):
    """θ and the outer momentum, per fragment. The state's owner applies means to it."""

    def size(self, fragment: int) -> int:
        """Return the number of elements in a fragment's flat vector; 0 if it may change from step to step."""
        ...

    def apply(self, fragment: int, mean: np.ndarray) -> None:
        """Take one outer step on one fragment."""
        ...

    def arrays(self, fragment: int) -> Arrays:
        """Return the fragment's θ and all arrays on which its next step depends.

        No other fragment uses the same names.  The arrays are the state's own memory, contiguous, and always in the
        same order.  A state that does not show its arrays returns {}.
        """
        ...

    def load(self, arrays: Arrays) -> None:
        """Set the state to these arrays of all fragments."""
        ...


def all_arrays(state: ReplicatedState, fragments: int, t: int = 0) -> Arrays:
    """Return name -> array for all fragments, in the order of their turns from step t on."""
    turns = [(t + i) % fragments for i in range(fragments)]
    return {name: array for f in turns for name, array in state.arrays(f).items()}


def array_digest(array: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).data)


def digest_of_digests(digests: Iterable[str]) -> str:
    return xxhash.xxh3_128_hexdigest("".join(digests).encode())


def base_of(state: ReplicatedState, fragments: int) -> str:
    """Return the digest of the whole state, computed from its present bytes."""
    return Digests(state, fragments).base


class Digests:
    """The right digests of a state, computed when its bytes were known to be right.

    name: the replica's name, for the error.
    """

    def __init__(self, state: ReplicatedState, fragments: int, name: str = "") -> None:
        self._state = state
        self._name = name
        self.map: Map = lambda digest, arrays, size: map(digest, arrays)  # a caller with threads replaces it
        self._right = [self._digest_now(f) for f in range(fragments)]

    @property
    def base(self) -> str:
        return digest_of_digests(self._right) if any(self._right) else UNVERIFIED

    def renew_fragment(self, fragment: int) -> None:
        """Store the digest of a fragment's present bytes, which are right because it was just stepped."""
        self._right[fragment] = self._digest_now(fragment)

    def check_unchanged(self, *fragments: int) -> None:
        """Raise Diverged if the bytes of one of these fragments (default: all) do not have the stored digest."""
        for fragment in fragments or range(len(self._right)):
            now = self._digest_now(fragment)
            right = self._right[fragment]
            if now != right:
                raise Diverged(
                    f"θ of {self._name} changed between outer steps (fragment {fragment} has digest {now}, was "
                    f"{right}): bad memory, or code that writes to the fragments. This replica ends; the next heals "
                    "from the bucket"
                )

    def _digest_now(self, fragment: int) -> str:
        arrays = [*self._state.arrays(fragment).values()]
        each = self.map(array_digest, arrays, sum(a.nbytes for a in arrays))
        return digest_of_digests(each) if arrays else ""
