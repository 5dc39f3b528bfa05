"""`diloco track` with a SIGKILL before its k-th write of this process.   python -m tests.support.tracker_victim K ARGS…

The kill comes between two rows, where a tracker's own threads and helper processes may have any part of the
earlier rows in hand.   K = -1: none.
"""

import os
import signal
import sys

from diloco.views.trackers import feed
from executors.cli import main as cli


def main() -> int:
    left = int(sys.argv[1])
    write = feed.Feed._write

    def write_or_die(self, state, point):
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return write(self, state, point)

    feed.Feed._write = write_or_die
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
