"""The settings that a run over a lighthouse cannot have.

Not promised: that the lighthouse answers; a replica tells when it connects.
"""

import re
from typing import TYPE_CHECKING

from diloco.run.sections import ConfigError, OuterConfigError

if TYPE_CHECKING:
    from diloco.run.config import OuterConfig


def check_lighthouse(outer: "OuterConfig", usual: "OuterConfig") -> None:
    """Raise OuterConfigError for settings that a lighthouse does not support: Gloo sends fp32, without samples.

    usual: the defaults."""
    if outer.codec != "fp32":
        raise OuterConfigError(
            f'outer.codec = {outer.codec!r} is for the bucket; Gloo sends fp32. Use "fp32" with a lighthouse'
        )
    if outer.weighting == "samples":
        raise OuterConfigError(
            'outer.weighting = "samples" is for the bucket. Use "steps" or "uniform" with a lighthouse'
        )
    for name in ("norm_gate", "max_carry", "age_discount"):
        value = getattr(outer, name)
        if value not in (getattr(usual, name), 0):  # with a lighthouse, each acts as 0
            raise OuterConfigError(
                f"outer.{name} = {value:g} is for the bucket: over a lighthouse nothing is damped, and nothing late "
                "counts. Leave the line away, or use the bucket"
            )


def check_rendezvous(rendezvous: str, outer: "OuterConfig", usual: "OuterConfig", *, broadcasts: bool) -> None:
    """Check a `rendezvous` that is not the bucket.   broadcasts: fleet.broadcast_weights.   Raises ConfigError."""
    if not re.fullmatch(r"lighthouse://(\[[0-9a-fA-F:]+\]|[^:/@\s]+):\d+", rendezvous):
        raise ConfigError(
            f'rendezvous = {rendezvous!r} is not known. Use "bucket" (or no line), or lighthouse://host:port'
        )
    if broadcasts:
        raise ConfigError(
            "fleet.broadcast_weights = true writes into the bucket, and a run over a lighthouse has none. Leave the "
            "line away, or use the bucket"
        )
    check_lighthouse(outer, usual)
