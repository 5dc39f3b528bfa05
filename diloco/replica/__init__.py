"""The process of one replica.   replica.py: it joins, trains, ends.   evaluation.py: held-out prompts."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one replica, under the name that launches write down (`diloco.replica:main`); return its exit code."""
    from diloco.replica.replica import main as run

    return run(argv)
