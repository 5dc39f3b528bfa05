"""`python -m diloco.replica RUN_URL --slot r00`: one replica of a run."""

import sys

from diloco.replica.replica import main

sys.exit(main())
