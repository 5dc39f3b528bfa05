"""`python -m executors.cli` is the command `diloco`."""

import sys

from executors.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
