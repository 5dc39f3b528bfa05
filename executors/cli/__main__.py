"""Entry point: `python -m executors.cli` does the same as the command `diloco`."""

import sys

from executors.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
