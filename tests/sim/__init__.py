"""The real engine in a made-up world: seeded, in virtual time.  `python -m tests.sim 1000`."""
