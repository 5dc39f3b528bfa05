"""Verbs that write what a run has learned somewhere else: trackers."""
