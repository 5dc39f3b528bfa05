"""Write a run's curves to trackers.   tracker.py: the interface. make.py: the list."""
