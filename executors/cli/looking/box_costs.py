"""Sum the use of a run's boxes, by the events of its replicas and actors.

    boxes_used {boxes, box_s, usd} ── summed ──▶ "  boxes      e2b         512    1.40  unknown  not in the sum, nor …"

Not promised: the boxes of a batch whose replica was killed; the provider's invoice.  The spend limit and the sum of
`diloco costs` do not count boxes: a supervisor does not read replicas' whole logs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

APART = "boxes are not in the sum, nor does max_usd count them"


@dataclass(frozen=True)
class BoxCosts:
    """The sum.   usd: None if the price is unknown for some."""

    provider: str
    boxes: int
    hours: float
    usd: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def line(self) -> str:
        price = "unknown" if self.usd is None else f"{self.usd:.2f}"
        return f"  {'boxes':10s} {self.provider:8s} {self.boxes:8d} {self.hours:7.2f} {price:>8s}  {APART}"


def provider_in(config: Mapping[str, Any]) -> str | None:
    """Return the provider that a run.json's config names; None without one, or for a config of odd types."""
    found: Any = config
    for name in ("inner", "sampling", "boxes"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, str) else None


def box_costs(provider: str | None, events: Sequence[Mapping[str, Any]]) -> BoxCosts | None:
    """Return the sum of a run whose config names a provider; None for another one."""
    if provider is None:
        return None
    used = [event for event in events if event["event"] == "boxes_used"]
    known = all("usd" in event for event in used)
    usd = sum(_number(event, "usd") for event in used) if known else None
    boxes = round(sum(_number(event, "boxes") for event in used))
    return BoxCosts(provider, boxes, sum(_number(event, "box_s") for event in used) / 3600, usd)


def _number(event: Mapping[str, Any], name: str) -> float:
    """Return a field; 0 for an implausible number, because any writer may have written the log."""
    value = event.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e12 else 0.0
