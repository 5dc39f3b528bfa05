"""Entry point of the command `diloco`, and of `python -m executors.cli`.

After Ctrl-C, or if a bucket or a platform gave no answer, the process ends at once: Python would wait at its end, for
minutes, for threads whose requests no longer matter, and a second Ctrl-C would show a traceback.  In other cases, it
waits for END_S: a reward that `eval` or `verify --inner` called may have left threads that never end.
"""

import atexit
import os
import sys
import threading
from contextlib import suppress

ABANDONING = (75, 130)  # no answer, interrupted
END_S = 10.0


def main() -> int:
    try:
        from executors.cli.main import main as act  # it takes .1 s
    except KeyboardInterrupt:
        return 130
    code = act()
    if code in ABANDONING:
        end_now(code)
    late = threading.Timer(END_S, end_now, [code])
    late.daemon = True
    late.start()
    return code


def end_now(code: int) -> None:
    """End this process without waiting for its threads."""
    atexit._run_exitfuncs()
    with suppress(Exception):  # a closed output
        sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
