"""The collector's warning texts, imported only when one is needed.   Not promised: stable texts."""

from collections.abc import Callable
from typing import Any

from rendezvous.background import Emit


def excess_text(over: int, budget: int, floor: int) -> str:
    """Return why a run cannot keep its budget.   over, budget, floor: bytes."""
    advice = (
        f"Less than {floor / 1e9:.3g} GB is not possible, even with a snapshot at every step, which this run writes "
        'now. A new run with a smaller codec (outer.codec = "int8") needs less'
        if budget < floor
        else "A newer snapshot would reduce it, but none is completed: replicas die while they write one, or its "
        "upload takes longer than a round (`diloco doctor URL` measures the link)"
    )
    return (
        f"fleet.keep is {budget / 1e9:.3g} GB, and the blobs that a replica needs to heal take {over / 1e9:.3g} GB "
        f"more: the two newest snapshots and all uploads since. They are kept; older blobs are deleted. {advice}"
    )


def refused_text(error: Exception) -> str:
    """Return why old blobs stay, though fleet.keep lets them go."""
    return (
        "the store refuses to delete old objects, so the run takes more space with every outer step than fleet.keep "
        f"allows: {error}. Training continues; once deleting is allowed, the next outer step deletes what is too much"
    )


TEXTS: dict[str, Callable[..., str]] = {"excess": excess_text, "refused": refused_text}


def warn_once(warned: set[str], emit: Emit, step: int, name: str, *facts: Any) -> None:
    """Emit the warning of this name, if it is not in `warned` yet.   facts: the arguments of its text."""
    if name not in warned:
        warned.add(name)
        emit("warning", kind="keep", step=step, text=TEXTS[name](*facts))
