"""The bytes of pseudogradients and means.  The record that names a blob describes it.

    offer.json ── blob, size, digests ──▶ [ f32 f32 f32 … ]        fp32: the raw little-endian vector
                                          [ a codec's output ]     others: rendezvous/codecs, with error feedback
                                            └ shard ┘└ shard ┘     each with a digest of its own

The blob has no header: a reader reads the record first, and cannot interpret a blob without it.
"""

import mmap
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rendezvous.clock import Clock
from rendezvous.codecs import get_codec
from rendezvous.errors import BadDelta
from rendezvous.records.digests import XXH3, digest, has_digest, required_digest_kind
from rendezvous.store import Store

assert sys.byteorder == "little", "blobs are little-endian fp32"

Range = tuple[int, int]  # elements [start, stop)
Piece = tuple[int, str]  # bytes, and the digest that they should have
Coded = list[tuple[float, str]]  # ‖Δ‖² and digest of each shard
InRuns = Callable[[Callable[[list[Range]], Coded], list[Range], int], Coded]


def as_bytes(vector: np.ndarray) -> memoryview:
    """Return the bytes of a contiguous vector, without a copy."""
    if vector.size == 0:
        return memoryview(bytearray())  # memoryview cannot cast an empty array
    return np.ascontiguousarray(vector).data.cast("B")


ABSURD = 1e6  # a pseudogradient with a norm of more than this many times ‖θ‖ would destroy the model


def evenly_sampled(x: np.ndarray) -> np.ndarray:
    """Return at most 2^17 elements of a flat vector, evenly spread.  The spacing is odd, so all columns occur."""
    return x[:: (x.size >> 16) | 1]


def approximate_norm(x: np.ndarray) -> float:
    """Return an estimate of ‖x‖₂ from a sample."""
    some = evenly_sampled(x).astype(np.float64)
    return float(np.sqrt(np.dot(some, some) * (x.size / max(1, some.size))))


def check_shape(delta: np.ndarray, size: int) -> None:
    """Raise BadDelta unless `delta` is a flat fp32 vector of `size` elements.   size: 0 if unknown."""
    if delta.dtype != np.float32 or delta.shape != (size or delta.size,):
        raise BadDelta(
            f"the pseudogradient of this fragment must be a flat fp32 vector of {size or 'any'} elements; got "
            f"{delta.dtype} of shape {delta.shape}; it was not offered"
        )


@np.errstate(over="ignore", invalid="ignore")
def squared_norm(x: np.ndarray) -> float:
    """Return ‖x‖² in fp32; it may be infinite although all elements are finite."""
    return float(np.dot(x, x))


def checked_norm(delta: np.ndarray, scale: float = 0.0, square: float | None = None) -> float:
    """Return ‖Δ‖₂.   Raise BadDelta if Δ is not finite, or if ‖Δ‖₂ > ABSURD · scale.

    scale: ‖θ‖₂, 0 if unknown.   square: ‖Δ‖², if known.
    """
    square = squared_norm(delta) if square is None else square
    if not np.isfinite(square):
        square = float(np.sum(np.square(delta, dtype=np.float64)))
    if not np.isfinite(square):
        bad = int(np.count_nonzero(~np.isfinite(delta)))
        raise BadDelta(
            f"{bad} of {delta.size} elements of the pseudogradient are not finite, so it was not offered. "
            "Lower the inner learning rate or clip gradients; the run continues from the last outer step"
        )
    norm = square**0.5
    if norm > ABSURD * scale > 0:
        raise BadDelta(
            f"the pseudogradient is {norm:.1e} long and θ only {scale:.1e}, so it was not offered: the inner steps "
            "have blown up. Lower the inner learning rate or clip gradients; the run continues from the last outer step"
        )
    return norm


@dataclass(frozen=True)
class Written:
    """A body and its digest.

    shards: digests of its shards (see `digest_of_shards`).   norm: ‖Δ‖₂.   scale: about ‖θ‖₂, 0 if unknown.
    """

    body: np.ndarray
    digest: str
    shards: tuple[str, ...]
    norm: float
    scale: float = 0.0


class Encoder:
    """Encoder of one replica's pseudogradients.

    The part of a pseudogradient that a body loses is added to the fragment's residual, and is sent later.  A residual
    passes to the slot's next generation only if the replica leaves in order; after `kill -9` it starts from zero.
    """

    def __init__(self, name: str, *, feedback: bool = True, digests: str = XXH3) -> None:
        self.name = name
        self.in_runs: InRuns = lambda encode, ranges, size: encode(ranges)  # means/by_threads.py replaces it
        self._feedback = feedback
        self._digests = digests
        self._body, self._free = page_aligned(0), page_aligned(0)  # memory of the last body; free memory for another
        self._residuals: dict[int, np.ndarray] = {}
        self._ages: dict[int, np.ndarray] = {}  # rounds that each element has waited, for codecs with `ages`

    def encode(self, fragment: int, delta: np.ndarray, theta: np.ndarray | None = None) -> np.ndarray:
        """Return the body (uint8), in this encoder's memory: valid until the next call.   theta: θ, for bf16-gate."""
        room = self._next_buffer(body_size(self.name, delta.size))
        if not has_exact_size(self.name):
            feedback = self._feedback_arrays(fragment, delta)
            return room[: get_codec(self.name).encode(delta, room, theta=theta, **feedback)]
        sum(self._encode_each(fragment, delta, [(0, delta.size)], room))
        return room

    def encode_in_shards(
        self, fragment: int, delta: np.ndarray, ranges: list[Range], theta: np.ndarray | None = None
    ) -> Written:
        """Return the body, in this encoder's memory, with its digests and norms.

        Raise BadDelta if the pseudogradient must not be offered; the fragment's residual is then reset.
        """
        scale = 0.0 if theta is None else approximate_norm(theta)
        try:
            if len(ranges) > 1 and has_exact_size(self.name):
                return self._encode_shards(fragment, delta, ranges, scale)
            norm = checked_norm(delta, scale)
            body = self.encode(fragment, delta, theta)
            return Written(body, digest(as_bytes(body), self._digests), (), norm, scale)
        except BadDelta:
            self._residuals.pop(fragment, None)
            self._ages.pop(fragment, None)
            raise

    def _encode_shards(self, fragment: int, delta: np.ndarray, ranges: list[Range], scale: float) -> Written:
        """Encode shard by shard, so that each shard is still in the cache when its digest is computed."""
        body = self._next_buffer(body_size(self.name, delta.size))
        shards = list[str]()
        square = 0.0
        view = as_bytes(body)

        def encode(run: list[Range]) -> Coded:
            digests = (digest(view[slice(*byte_range(self.name, *shard))], self._digests) for shard in run)
            return [*zip(self._encode_each(fragment, delta, run, body), digests, strict=True)]

        self._encode_each(fragment, delta, [], body)  # makes the residual, once for all runs
        for more, shard in self.in_runs(encode, ranges, delta.nbytes):
            square += more
            shards.append(shard)
        return Written(
            body, digest_of_shards(shards, self._digests), tuple(shards), checked_norm(delta, scale, square), scale
        )

    def _encode_each(self, fragment: int, delta: np.ndarray, ranges: list[Range], room: np.ndarray) -> Iterator[float]:
        """Encode range after range into `room`, for codecs whose bodies can be cut.   Yield ‖Δ‖² of each range."""
        if self.name != "fp32":
            return get_codec(self.name).encode_each(delta, room, ranges, **self._feedback_arrays(fragment, delta))
        return (_copy_and_square(delta[a:b], room[4 * a : 4 * b]) for a, b in ranges)

    def _feedback_arrays(self, fragment: int, delta: np.ndarray) -> dict[str, np.ndarray]:
        """Return the fragment's residual and ages, for the codec to update in place; {} without feedback."""
        if not self._feedback:
            return {}
        if fragment not in self._residuals:
            self._residuals[fragment] = page_aligned(delta.nbytes).view(np.float32)
        if get_codec(self.name).ages and fragment not in self._ages:
            self._ages[fragment] = np.zeros(delta.size, np.uint8)
        held = {"residual": self._residuals[fragment], "age": self._ages.get(fragment)}
        return {name: array for name, array in held.items() if array is not None}

    @property
    def unsent_residuals(self) -> dict[str, np.ndarray]:
        """The residuals and their ages, by name."""
        ages = {f"age.{fragment}": age for fragment, age in self._ages.items()}
        return {f"residual.{fragment}": e for fragment, e in self._residuals.items()} | ages

    def restore_residuals(self, unsent: Mapping[str, np.ndarray]) -> None:
        """Set the residuals and ages to those of another encoder (`unsent_residuals`)."""
        for held, kind in ((self._residuals, "residual."), (self._ages, "age.")):
            held.clear()
            held |= {int(name[len(kind) :]): np.array(a) for name, a in sorted(unsent.items()) if name.startswith(kind)}

    def give_away(self, body: np.ndarray) -> None:
        """Stop using this body's memory until `give_back`; the next body gets other memory."""
        if np.may_share_memory(body, self._body):
            self._body = page_aligned(0)

    def give_back(self, body: np.ndarray) -> None:
        """Use this body's memory, which `give_away` gave away, for the next body."""
        if not np.may_share_memory(body, self._body):
            self._free = body

    def _next_buffer(self, size: int) -> np.ndarray:
        if self._body.size < size:  # free memory that is too small is dropped as well
            self._body, self._free = self._free if self._free.size >= size else page_aligned(size), page_aligned(0)
        return self._body[:size]

    def take_back(self, fragment: int, body: np.ndarray) -> None:
        """Add a body's values to the residual, because the body will never count: the next body sends the values."""
        if self.name != "fp32":
            lost = np.empty_like(self._residuals[fragment])
            get_codec(self.name).decode(body, lost)
            self._residuals[fragment] += lost


def _copy_and_square(x: np.ndarray, room: np.ndarray) -> float:
    room.view(np.float32)[:] = x
    return squared_norm(x)


def shard_grid(elements: int, align: int, least: int) -> list[Range]:
    """Return the shards of a vector: at most 64, of at least `least` elements, cut at multiples of `align`.

    The shards do not depend on the number of replicas.
    """
    size = max(least, -(-elements // 64))
    size = -(-size // align) * align
    return [(at, min(at + size, elements)) for at in range(0, max(elements, 1), size)]


def digest_of_shards(shards: Sequence[str], kind: str) -> str:
    """Return the digest of a body in shards: the digest of its shards' digests, so its bytes are read only once."""
    return digest("".join(shards).encode(), kind)


def digested_pieces(written: Written, name: str, ranges: list[Range]) -> list[Piece]:
    """Return (bytes, digest) of each of a body's shards, or of the whole body if it has no shards."""
    if not written.shards:
        return [(written.body.size, written.digest)]
    return [(body_size(name, b - a), shard) for (a, b), shard in zip(ranges, written.shards, strict=True)]


def byte_range(name: str, start: int, stop: int) -> Range:
    """Return the byte range of the elements [start, stop) in a body.   name: the codec's name."""
    return (4 * start, 4 * stop) if name == "fp32" else get_codec(name).byte_range(start, stop)


def codec_alignment(name: str) -> int:
    """Return the number of elements that a codec encodes together."""
    return 1 if name == "fp32" else get_codec(name).align


def has_exact_size(name: str) -> bool:
    """Whether all of this codec's bodies with the same number of elements have the same size."""
    return name == "fp32" or get_codec(name).exact


def body_size(name: str, elements: int) -> int:
    """Return the bytes of a body with so many elements; the largest number if sizes differ."""
    return 4 * elements if name == "fp32" else get_codec(name).max_body_size(elements)


def page_aligned(size: int) -> np.ndarray:
    """Return `size` bytes that begin on a memory page: the OS copies files to and from them up to 4 times faster."""
    return np.frombuffer(mmap.mmap(-1, max(1, size)), np.uint8)[:size]


def fetch_checked(
    store: Store, clock: Clock, key: str, pieces: Sequence[Piece], out: np.ndarray, start: int = 0, tries: int = 4
) -> str | None:
    """Fill `out` (any dtype) from byte `start` of `key`, and check the digest of each piece.

    Return None if the bytes are right, else what is wrong after `tries` reads.
    """
    size = sum(n for n, _ in pieces)
    if out.nbytes != size:
        return f"{key} should have {out.nbytes} bytes here, its record says {size}"
    view = as_bytes(out)
    trouble = ""
    for attempt in range(tries):
        if attempt:
            clock.sleep(0.02 * 2**attempt)
        if not store.get_into(key, view, start):
            trouble = f"{key} is missing or shorter than {start + size} bytes"
        elif (trouble := why_differs(key, view, pieces, required_digest_kind(store))) is None:
            return None
    return trouble


def why_differs(key: str, view: memoryview, pieces: Sequence[Piece], kind: str) -> str | None:
    """Return what is wrong with these bytes, or None.   kind: the weakest accepted kind of digest."""
    at = 0
    for size, want in pieces:
        if not has_digest(view[at : at + size], want, kind):
            return f"{key} has digest {digest(view[at : at + size], kind)}, announced was {want}"
        at += size
    return None
