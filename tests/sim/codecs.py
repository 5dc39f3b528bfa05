"""The body and the residual that a replica's codec should have made, for the observer.

    work ─┐                    ┌─▶ body ──▶ named by an offer, averaged by all replicas
    kept ─┴─▶ written(…) ──────┴─▶ kept: residual and ages; all of a body that no offer names goes back into it

bf16 is spelled out here.  The other formats have references of their own (tests/rendezvous/test_codecs.py), so their
codecs are called; the observer itself keeps track of each residual's owner and destination, and that it goes there
once.

Not promised: anything about the formats.
"""

from dataclasses import dataclass

import numpy as np

from rendezvous.codecs import get_codec


@dataclass
class Kept:
    """One fragment's residual, and how long its elements have waited."""

    residual: np.ndarray
    age: np.ndarray

    @classmethod
    def nothing(cls, size: int) -> "Kept":
        return cls(np.zeros(size, np.float32), np.zeros(size, np.uint8))

    def copy(self) -> "Kept":
        return Kept(self.residual.copy(), self.age.copy())

    def arrays(self, name: str, fragment: int) -> dict[str, np.ndarray]:
        """As a goodbye leaves them."""
        ages = {f"age.{fragment}": self.age} if name != "fp32" and get_codec(name).ages else {}
        return {f"residual.{fragment}": self.residual} | ages


@dataclass
class Sent:
    """A body that stands in the bucket, and what its codec kept."""

    key: str
    body: bytes
    kept: Kept


def written(name: str, x: np.ndarray, kept: Kept, theta: np.ndarray) -> tuple[bytes, Kept]:
    """-> the body of x plus the kept residual, and the state kept afterwards."""
    kept = kept.copy()
    if name == "fp32":
        return x.tobytes(), kept
    if name == "bf16":
        s = x + kept.residual
        body = upper_halves(s)
        return body, Kept(s - from_upper_halves(body), kept.age)
    c = get_codec(name)
    out = np.zeros(c.max_body_size(x.size), np.uint8)
    if not c.exact:
        return out[: c.encode(x, out, kept.residual, theta)].tobytes(), kept
    sum(c.encode_each(x, out, [(0, x.size)], kept.residual, *([kept.age] if c.ages else [])))
    return out.tobytes(), kept


def taken_back(name: str, sent: Sent) -> Kept:
    """No offer names that body."""
    if name == "fp32":
        return sent.kept.copy()
    return Kept(sent.kept.residual + decoded(name, sent.body, sent.kept.residual.size), sent.kept.age.copy())


def encoded(name: str, x: np.ndarray) -> bytes:
    """A mean, which has no residual."""
    if name in ("fp32", "bf16"):
        return x.tobytes() if name == "fp32" else upper_halves(x)
    out = np.zeros(get_codec(name).max_body_size(x.size), np.uint8)
    return out[: get_codec(name).encode(x, out)].tobytes()


def decoded(name: str, body: bytes, size: int) -> np.ndarray:
    if name in ("fp32", "bf16"):
        return np.frombuffer(body, np.float32) if name == "fp32" else from_upper_halves(body)
    out = np.empty(size, np.float32)
    get_codec(name).decode(np.frombuffer(body, np.uint8), out)
    return out


def shards(name: str, size: int, least: int) -> list[tuple[int, int]]:
    """The elements of each shard of a vector: `least` and more, where a codec's bodies can be cut."""
    align = 1 if name == "fp32" else get_codec(name).align
    width = -(-max(least, -(-size // 64)) // align) * align
    return [(at, min(at + width, size)) for at in range(0, size, width)]


def cut(name: str, body: bytes, size: int, least: int) -> list[bytes]:
    """The body of each shard."""
    ranges = shards(name, size, least)
    if len(ranges) == 1 or (name != "fp32" and not get_codec(name).exact):
        return [body]
    places = [(4 * a, 4 * b) if name == "fp32" else get_codec(name).byte_range(a, b) for a, b in ranges]
    return [body[a:b] for a, b in places]


# ---------------------------------------------------------------------- bf16, in our own words


def upper_halves(x: np.ndarray) -> bytes:
    """The upper halves of fp32 numbers, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()


def from_upper_halves(body: bytes) -> np.ndarray:
    return (np.frombuffer(body, np.uint16).astype(np.uint32) << 16).view(np.float32)
