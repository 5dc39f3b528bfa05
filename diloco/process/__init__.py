"""Parts that any process of a run needs: session, heartbeats, journal, run marks, exit codes, disk space."""
