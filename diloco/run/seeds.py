"""Seeds that are derived from their purpose.

    (run's seed, slot, generation, …) ── SHA-256, its first 31 bits ──▶ a seed

Equal parts give equal seeds on every machine and in every session.  Not promised: different seeds; among millions of
them, some are equal.
"""

import hashlib


def derive_seed(*parts: object) -> int:
    """Return 0 ≤ seed < 2³¹."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little") >> 1
