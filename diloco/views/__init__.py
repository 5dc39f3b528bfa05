"""Views of a run for readers: overview, troubles, curves, comparison, page/ and trackers/."""
