"""Views of a run for its readers: overview, troubles, curves, comparison; page/ and trackers/ below."""
