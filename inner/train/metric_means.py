"""Collect means and counts of metrics since the last read.

note("loss", .7)  note("loss", .5)  count("samples", 32)   ──pop_metrics──▶  {"loss": .6, "samples": 32}   then empty
"""

from collections import defaultdict
from math import isnan


class MetricMeans:
    """Means and counts since the last pop_metrics. As in TRL's metrics, a NaN means "no value" and is left out."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)
        self._counts: dict[str, float] = defaultdict(float)

    def note(self, name: str, value: float) -> None:
        if not isnan(value):
            self._values[name].append(value)

    def count(self, name: str, n: float) -> None:
        self._counts[name] += n

    def pop_metrics(self) -> dict[str, float]:
        means = {name: sum(values) / len(values) for name, values in self._values.items()}
        found = {**means, **self._counts, "samples": self._counts.get("samples", 0.0)}
        self._values.clear()
        self._counts.clear()
        return found
