"""Run one replica of a run: `python -m diloco.replica RUN_URL --slot r00`."""

import sys

from diloco.replica import main

sys.exit(main())
