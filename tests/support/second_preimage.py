"""Other bytes with the same xxh3-128, by arithmetic: why a digest that finds accidents does not find forgers.

    XXH3 adds up, over the 16 stripes of a block, in each of eight lanes:   Σ d   and   Σ lo(d ⊕ k)·hi(d ⊕ k)   mod 2^64
    d: eight bytes of the file.   k: eight bytes of a secret that is printed in every copy of xxhash.h

A word with hi(d ⊕ k) = 0, or lo = 0, adds nothing to the second sum: two of these set Σ d.  Three words with
hi(d ⊕ k) = 1, 2^31, 2^31 set the second.  So five stripes, 320 bytes, give a block any sums, hence the file its digest.
"""

import random
from collections.abc import Iterator

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
BLOCK, STRIPE, FREE = 1024, 64, 6
WHOLE, HALF = (1 << 64) - 1, (1 << 32) - 1


def forged(original: bytes, payload: bytes, avoid: bytes = b"") -> bytes:
    """Bytes with the length and the xxh3-128 of `original` that begin with `payload`.

    original: longer than a block; it goes on unchanged behind the first block.   payload: at most 640 bytes.
    avoid: bytes that may not stand between the payload and the original's second block.
    """
    assert len(original) > BLOCK and len(payload) <= BLOCK - FREE * STRIPE
    body = bytearray(payload.ljust(BLOCK - FREE * STRIPE, b" "))
    want, have = (list(_sums(part)) for part in (original[:BLOCK], body))
    stripes = range(BLOCK // STRIPE - FREE, BLOCK // STRIPE)
    lanes = []
    for lane in range(8):
        keys = [_key(stripe, lane) for stripe in stripes]
        (d, p), (d0, p0) = want[lane], have[lane]
        lanes.append(_solved(keys, (d - d0) & WHOLE, (p - p0) & WHOLE, set(avoid), random.Random(lane)))
    for stripe in range(FREE):
        body += b"".join(words[stripe].to_bytes(8, "little") for words in lanes)
    return bytes(body) + original[BLOCK:]


def _sums(body: bytes) -> Iterator[tuple[int, int]]:
    for lane in range(8):
        words = [
            (int.from_bytes(body[at + 8 * lane : at + 8 * lane + 8], "little"), _key(at // STRIPE, lane))
            for at in range(0, len(body), STRIPE)
        ]
        yield sum(d for d, _ in words) & WHOLE, sum(_product(d, k) for d, k in words) & WHOLE


def _key(stripe: int, lane: int) -> int:
    at = 8 * (stripe + lane)
    return int.from_bytes(SECRET[at : at + 8], "little")


def _product(d: int, k: int) -> int:
    return ((d ^ k) & HALF) * ((d ^ k) >> 32)


def _solved(keys: list[int], d: int, p: int, avoid: set[int], dice: random.Random) -> list[int]:
    """Words with Σ word = d and Σ lo·hi = p, none of whose bytes is to be avoided; by trying orders and first words."""
    while True:
        order = dice.sample(range(len(keys)), len(keys))
        k = [keys[i] for i in order]
        first = dice.getrandbits(64)
        rest = (p - _product(first, k[0])) & WHOLE
        words = [first, k[1] ^ (1 << 32 | rest & HALF)]
        words += [k[2] ^ (1 << 63 | rest >> 32), k[3] ^ (1 << 63 | rest >> 32)]
        left = (d - sum(words)) & WHOLE
        low = (left - (k[5] & HALF)) & HALF  # k4's word may have any low half, k5's any high half
        four = k[4] & ~HALF | low
        five = (left - four) & WHOLE
        assert five & HALF == k[5] & HALF
        found = dict(zip(order, [*words, four, five], strict=True))
        ordered = [found[i] for i in range(len(keys))]
        if not any(byte in avoid for word in ordered for byte in word.to_bytes(8, "little")):
            return ordered
