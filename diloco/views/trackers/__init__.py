"""The trackers that a run's curves are written to.   tracker.py: a tracker.   make.py: which ones there are."""
