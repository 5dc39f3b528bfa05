"""Entry point of the command `diloco`, and of `python -m executors.cli`.

After Ctrl-C, or if a bucket or a platform gave no answer, the process ends at once: Python would wait at its end for
threads whose requests no longer matter, for minutes, and a second Ctrl-C there shows a traceback.
"""

import atexit
import os
import sys
from contextlib import suppress

ABANDONING = (75, 130)  # no answer, interrupted


def main() -> int:
    try:
        from executors.cli.main import main as act  # it takes .1 s
    except KeyboardInterrupt:
        return 130
    code = act()
    if code in ABANDONING:
        atexit._run_exitfuncs()
        with suppress(Exception):  # a closed output
            sys.stdout.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
