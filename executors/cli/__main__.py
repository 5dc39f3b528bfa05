"""Entry point of the command `diloco`, and of `python -m executors.cli`."""

import sys


def main() -> int:
    try:
        from executors.cli.main import main as act  # it takes .1 s
    except KeyboardInterrupt:
        return 130
    return act()


if __name__ == "__main__":
    sys.exit(main())
