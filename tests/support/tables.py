"""Settings upon settings, table by table."""

from collections.abc import Mapping
from typing import Any


def merge_tables(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later settings win; a table keeps those that later layers leave out."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            below = merged.get(key)
            both = isinstance(below, Mapping) and isinstance(value, Mapping)
            merged[key] = merge_tables(below, value) if both else value  # type: ignore[arg-type]
    return merged
