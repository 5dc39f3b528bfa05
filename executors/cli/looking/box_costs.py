"""Sum the use of a run's boxes, for `diloco costs`.

    boxes_used {boxes, box_s} of replicas and actors ── summed ──▶ "  boxes      e2b         512    1.40     0.14"
    heartbeats: US dollars ─────────────────────────────────────────────────────────────────────────────────┘

Not promised: the boxes of a batch whose replica was killed (neither source has these boxes); the provider's invoice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from executors.supervision.money.bills import number_in
from inner.tasks.spec import PRICED

UNKNOWN = "not in the sum: no price is known (inner.sampling.box_usd_per_hour sets one)"


@dataclass(frozen=True)
class BoxCosts:
    """The sums of a run's box use.   usd: None if no price of this provider is known."""

    provider: str
    boxes: int
    hours: float
    usd: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def line(self) -> str:
        price, why = ("unknown", UNKNOWN) if self.usd is None else (f"{self.usd:.2f}", "")
        return f"  {'boxes':10s} {self.provider:8s} {self.boxes:8d} {self.hours:7.2f} {price:>8s}  {why}".rstrip()


def box_costs(sampling: Mapping[str, Any], events: Sequence[Mapping[str, Any]], usd: float) -> BoxCosts | None:
    """Return the sums of a run whose [inner.sampling] names a provider; None for other runs.   usd: heartbeats' sum.

    An event has the price that the replica knew.  A replica knows no price of a flavor that the environment file chose.
    """
    if not isinstance(provider := sampling.get("boxes"), str):
        return None
    used = [event for event in events if event["event"] == "boxes_used"]
    told = provider in PRICED and all(event.get("usd_per_hour", 0.0) is not None for event in used)
    known = told or sampling.get("box_usd_per_hour") is not None
    boxes = round(sum(number_in(event, "boxes") for event in used))
    return BoxCosts(provider, boxes, sum(number_in(event, "box_s") for event in used) / 3600, usd if known else None)
