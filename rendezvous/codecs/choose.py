"""Choice of a run's codec, from its size and its links.

    S = 4·P / ratio        direct    up S            down (N−1)·S           each replica reads all other bodies
                           sharded   up S + S/N      down 2(N−1)/N·S        not for topk: sparse bodies have a dense sum
    sync_s = up/bandwidth_up + down/bandwidth_down + encoding of P elements + decoding of N−1 bodies

`choose_codec` takes the first codec of NAMES whose sync takes at most a tenth of the time between syncs. It never takes
bf16-gate, because the number of bf16 weights that change is unknown before the run.

Not promised: that the measured bandwidth stays the same; that two replicas would choose the same codec.  So one choice
is made and stored for the run.
"""

from dataclasses import dataclass
from math import isfinite

from rendezvous.codecs import DENSE, NAMES

_SHARE = 0.1  # part of the time between syncs that a sync may take


@dataclass(frozen=True)
class Traits:
    """Costs of a codec.   ratio: fp32 bytes per sent byte, as papers count.

    encode_ns, decode_ns: nanoseconds per element on one CPU thread, with a residual.
    """

    ratio: float
    encode_ns: float
    decode_ns: float
    why: str


_TRAITS = {
    "fp32": Traits(1, 0.5, 0.6, "nothing is lost"),
    "bf16": Traits(2, 0.8, 0.5, "rounding, with error feedback"),
    "int8": Traits(4, 1.2, 0.5, "1 % of the signal stays in the residual and is sent later"),
    "int4": Traits(8, 1.4, 0.7, "fp4 cost no quality in Streaming DiLoCo, and there is error feedback"),
    "topk": Traits(
        32 / (8 * 3 / 64),
        5,
        0.8,
        "5 % of the elements at 2 bits; the residual keeps the rest, which is sent over tens of outer steps",
    ),
    "bf16-gate": Traits(17, 6, 0.7, "only values that change the bf16 model are sent"),
}
_FORESEEABLE = tuple(name for name in NAMES if name != "bf16-gate")


def nominal_ratio(name: str) -> float:
    """Return the fp32 bytes per sent byte.

    For bf16-gate this depends on the run; we return PULSELoCo's published value for lr 3e-6.
    """
    return _TRAITS[name].ratio


def sync_seconds(name: str, parameters: int, replicas: int, up: float, down: float) -> float:
    """Return the seconds of one sync, direct or sharded, whichever is faster; transfers and coding do not overlap."""
    codec = _TRAITS[name]
    n = replicas
    size = 4 * parameters / codec.ratio
    coding = parameters * 1e-9 * (codec.encode_ns + (n - 1) * codec.decode_ns)
    direct = size / up + (n - 1) * size / down
    sharded = (size + size / n) / up + 2 * (n - 1) / n * size / down
    return coding + (min(direct, sharded) if name in DENSE else direct)


def choose_codec(
    parameters: int, replicas: int, bandwidth_up: float, bandwidth_down: float, compute_s: float
) -> tuple[str, str]:
    """Return (the codec's name, the reason).

    bandwidth_up, bandwidth_down: bytes per second of one replica.   compute_s: seconds between two syncs.
    """
    given = (parameters, replicas, bandwidth_up, bandwidth_down, compute_s)
    if not all(isfinite(v) and v > 0 for v in given):
        raise ValueError(
            f"a choice of codec needs positive numbers, got {parameters} parameters, {replicas} replicas, "
            f"{bandwidth_up} B/s up, {bandwidth_down} B/s down, {compute_s} s between syncs"
        )
    if replicas == 1:
        return "fp32", "one replica sends no pseudogradients, so a lossy codec saves nothing"
    took = {name: sync_seconds(name, parameters, replicas, bandwidth_up, bandwidth_down) for name in _FORESEEABLE}
    fits = [name for name, s in took.items() if s <= _SHARE * compute_s]
    name = fits[0] if fits else min(took, key=lambda name: took[name])
    return name, _explain_choice(name, took, bool(fits), compute_s)


def _explain_choice(name: str, took: dict[str, float], fits: bool, compute_s: float) -> str:
    share = f"{took[name] / compute_s:.1%} of the {_format_seconds(compute_s)} between syncs"
    cost = f"{name} syncs in {_format_seconds(took[name])}, {share}"
    if not fits:
        return f"no codec syncs within {_SHARE:.0%} of the time; the fastest, {cost}. Raise sync_every"
    before = list(took)[: list(took).index(name)]
    slower = f"; {before[-1]} would take {_format_seconds(took[before[-1]])}" if before else ""
    return f"{cost}{slower}. {_TRAITS[name].why[0].upper()}{_TRAITS[name].why[1:]}"


def _format_seconds(s: float) -> str:
    return f"{s:.0f} s" if s >= 10 else f"{s:.1f} s" if s >= 0.1 else f"{1000 * s:.1f} ms"
