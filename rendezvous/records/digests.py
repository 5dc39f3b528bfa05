"""Digests, by which records name bytes.

    "xxh3-128:99aa06d3…"     detects accidental changes; 26 GiB/s per core
    "sha256:e3b0c442…"       also detects forgeries; 1.7 GiB/s per core with SHA instructions

    the user's code, θ₀'s files, the chain's `prev`           sha256, in every run
    deltas, parts, means, snapshots, residuals                sha256 in a run with a key, xxh3-128 in others

A digest names its kind, so a forger could choose a weak kind.  Therefore the reader knows which kind it needs and
accepts no weaker kind.  XXH3 is not a cryptographic hash: bytes with a given xxh3-128 can be computed directly
(tests/support/second_preimage.py).

Not promised: one digest for the same bytes.  The same bytes have one digest of each kind.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import xxhash

from rendezvous.store import Buffer, Store

XXH3 = "xxh3-128"
SHA256 = "sha256"
_HEX: dict[str, Callable[[Buffer], str]] = {
    XXH3: xxhash.xxh3_128_hexdigest,
    SHA256: lambda body: hashlib.sha256(body).hexdigest(),
}
_HASHES: dict[str, Callable[[], Any]] = {XXH3: lambda: xxhash.xxh3_128(), SHA256: hashlib.sha256}
_DIGITS = {XXH3: 32, SHA256: 64}
_AT_LEAST = {XXH3: (XXH3, SHA256), SHA256: (SHA256,)}


def digest(body: Buffer, kind: str = XXH3) -> str:
    """Return "kind:hex" of these bytes."""
    return f"{kind}:{_HEX[kind](body)}"


class Hasher:
    """A digest of bytes that come in pieces."""

    def __init__(self, kind: str = XXH3) -> None:
        self._kind, self._hash = kind, _HASHES[kind]()

    def update(self, piece: Buffer) -> None:
        self._hash.update(piece)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def digest(self) -> str:
        """Return "kind:hex" of the bytes so far."""
        return f"{self._kind}:{self.hexdigest()}"


def digest_of(pieces: Iterable[Buffer], kind: str = XXH3) -> str:
    """Return "kind:hex" of these pieces, one after another."""
    hasher = Hasher(kind)
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def required_digest_kind(store: Store) -> str:
    """Return the kind of digest that blobs in this store need.

    This is sha256 in a run with a key, so that a writer without the key cannot replace blobs.
    """
    return getattr(store, "digests", None) or XXH3


def is_digest(text: str, kind: str) -> bool:
    """Whether `text` is a digest of this kind or of a stronger kind."""
    found, _, digits = text.partition(":")
    return found in _AT_LEAST[kind] and len(digits) == _DIGITS[found] and not digits.strip("0123456789abcdef")


def has_digest(body: Buffer, announced: str, kind: str) -> bool:
    """Whether these bytes have the announced digest, and this digest is of this kind or a stronger kind."""
    return is_digest(announced, kind) and digest(body, announced.partition(":")[0]) == announced


def has_digest_of(pieces: Iterable[Buffer], announced: str, kind: str) -> bool:
    """Whether these pieces, one after another, have the announced digest, as for `has_digest`."""
    return is_digest(announced, kind) and digest_of(pieces, announced.partition(":")[0]) == announced


def hex_of(announced: str) -> str:
    """Return the hexadecimal digits of a digest, for a key."""
    return announced.partition(":")[2]
