"""Files of a Modal volume: blocks of 8 MiB, named by their SHA-256 and sent over HTTP.

    bytes ──cut──▶ block │ block │ rest      sha256 of each without the zeros at its end, which are not sent
    PUT url ──▶ a token for VolumePutFiles2          GET url ──▶ into the caller's memory, zeros added

Not promised: another try after a failure.  An incomplete body raises StoreUnclear.  No error shows the URL, because the
URL has a signature.
"""

import hashlib
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rendezvous.errors import StoreError, StoreUnclear

BLOCK = 8 << 20
BLOCK_S = 120.0


@dataclass(frozen=True)
class Block:
    """A block of a file.   sha256: the digest without the zeros at the end.   size: bytes, with these zeros."""

    sha256: bytes
    size: int


def cut_blocks(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """Cut the bytes into blocks of 8 MiB, without a copy if a piece has a whole block."""
    rest = bytearray()
    for piece in pieces:
        while piece:
            if not rest and len(piece) >= BLOCK:
                yield piece[:BLOCK]
                piece = piece[BLOCK:]
                continue
            took = piece[: BLOCK - len(rest)]
            rest += took
            piece = piece[len(took) :]
            if len(rest) == BLOCK:
                yield memoryview(rest)
                rest = bytearray()
    if rest:
        yield memoryview(rest)


def blocks_of(pieces: Iterable[memoryview]) -> list[Block]:
    """Return the blocks of a file, in order."""
    return [Block(hashlib.sha256(_without_zeros(data)).digest(), len(data)) for data in cut_blocks(pieces)]


def _without_zeros(data: memoryview) -> memoryview:
    """Return `data` without the zeros at its end."""
    if not data or data[-1]:
        return data
    return data[: len(bytes(data).rstrip(b"\0"))]


def block_slices(out: memoryview, start: int) -> list[memoryview]:
    """Cut `out` where the file's blocks end.   start: the byte of the file at which `out` begins."""
    cuts = [0, *range(BLOCK - start % BLOCK, len(out), BLOCK), len(out)]
    return [out[a:b] for a, b in pairwise(cuts)]


def put_block(url: str, data: memoryview) -> bytes:
    """Send one block.   Return the token that the volume needs afterwards."""
    body = bytes(_without_zeros(data))
    request = urllib.request.Request(url, data=body, method="PUT", headers={"Content-Type": "application/octet-stream"})
    return _send_request(request, "write a block to", _read_all)


def _read_all(answer: Any) -> bytes:
    return answer.read()


def get_block(url: str, out: memoryview) -> None:
    """Read one block into `out`; if the body is shorter, zeros follow."""

    def fill_out(answer: Any) -> None:
        got = 0
        while got < len(out) and (count := answer.readinto(out[got:])):
            got += count
        length = answer.headers.get("Content-Length")
        if answer.read(1) or (length is not None and got != int(length)):
            raise StoreUnclear(f"Modal sent {got} bytes of a block: {length} were announced, {len(out)} expected")
        out[got:] = bytes(len(out) - got)

    _send_request(urllib.request.Request(url), "read a block from", fill_out)


def _send_request(request: urllib.request.Request, verb: str, use: Any) -> Any:
    try:
        with urllib.request.urlopen(request, timeout=BLOCK_S) as answer:
            return use(answer)
    except urllib.error.HTTPError as error:
        raise StoreUnclear(f"cannot {verb} Modal's volume: HTTP {error.code}") from None
    except OSError as error:  # the text must not contain the URL, which has a signature
        raise StoreUnclear(f"cannot {verb} Modal's volume: {type(error).__name__}") from None
    except Exception as error:  # an incomplete answer
        if isinstance(error, StoreError):
            raise
        raise StoreUnclear(f"cannot {verb} Modal's volume: {type(error).__name__}") from None
