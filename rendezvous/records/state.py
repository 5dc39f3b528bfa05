"""The state on which replicas agree, fragment by fragment, and the digests by which they know that they agree.

    array     xxh3-128 of its bytes                              theta.0, momentum.0, …
    fragment  xxh3-128 of its arrays' digests, one after another
    base      xxh3-128 of the fragments' digests, one after another           in every offer, commit and snapshot

An outer step moves one fragment.  So one sync digests that fragment alone, three times: before its pseudogradient is
offered, before it is stepped (both compare with the digest that it should have), and after.  The digests of the others
are remembered; their bytes are compared when their turn comes.  All are compared before a use of the whole state: a
snapshot, a replica's first inner step, the end of a run.  In H inner steps that is 3 times the state, for every F.

Digests are hexadecimal text, in ASCII where they are digested again.  Not promised: that they find a forger.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import xxhash

from rendezvous.errors import Diverged

Arrays = dict[str, np.ndarray]
UNVERIFIED = "unverified"


class ReplicatedState(Protocol):
    """θ and the outer momentum, per fragment.  Its owner applies means to it."""

    def size(self, fragment: int) -> int:
        """Elements of a fragment's flat vector; 0 if that may change from step to step."""
        ...

    def apply(self, fragment: int, mean: np.ndarray) -> None:
        """Take one outer step on one fragment."""
        ...

    def arrays(self, fragment: int) -> Arrays:
        """The fragment's θ and all that its next step depends on, by names that no other fragment uses.

        The arrays are live, contiguous, always in the same order.  {}: for a state that does not show them.
        """
        ...

    def load(self, arrays: Arrays) -> None:
        """Become the state with these arrays of all fragments."""
        ...


def all_arrays(state: ReplicatedState, fragments: int, t: int = 0) -> Arrays:
    """Every fragment's arrays, by name, in the order of their turns from step t on."""
    turns = [(t + i) % fragments for i in range(fragments)]
    return {name: array for f in turns for name, array in state.arrays(f).items()}


def array_digest(array: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).data)


def digest_of_digests(digests: Iterable[str]) -> str:
    return xxhash.xxh3_128_hexdigest("".join(digests).encode())


def base_of(state: ReplicatedState, fragments: int) -> str:
    """The digest of the whole state, from the bytes as they are now."""
    return Digests(state, fragments).base


class Digests:
    """A state's digests as they should be: taken from its bytes when these were right.

    name: whose state it is, for the error.
    """

    def __init__(self, state: ReplicatedState, fragments: int, name: str = "") -> None:
        self._state = state
        self._name = name
        self._right = [self._digest_now(f) for f in range(fragments)]

    @property
    def base(self) -> str:
        return digest_of_digests(self._right) if any(self._right) else UNVERIFIED

    def renew_fragment(self, fragment: int) -> None:
        """Take the digest of a fragment that was stepped: its bytes are right as they are now."""
        self._right[fragment] = self._digest_now(fragment)

    def check_unchanged(self, *fragments: int) -> None:
        """Raise Diverged if the bytes of one of these fragments (default: of any) do not have their right digest."""
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
        arrays = self._state.arrays(fragment).values()
        return digest_of_digests(map(array_digest, arrays)) if arrays else ""
