"""The collector's warning text, imported only when it is needed.   Not promised: stable texts."""


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
