"""The process of one replica.   replica.py: join, train, end.   evaluation.py: held-out prompts."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one replica and return its exit code. Launchers start `diloco.replica:main`."""
    from diloco.replica.replica import main as run

    return run(argv)
