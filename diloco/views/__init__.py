"""What a reader of a run is shown: overview, troubles, curves, comparison; page/ and trackers/ below."""
