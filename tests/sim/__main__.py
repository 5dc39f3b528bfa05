"""`python -m tests.sim 1000`: simulated schedules; see simulate.py."""

import sys

from tests.sim.simulate import main

sys.exit(main(sys.argv[1:]))
