"""Write a run's curves to trackers.   tracker.py: a tracker.   make.py: the list of them."""
