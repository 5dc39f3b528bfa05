"""What the supervisor says: remarks on a run, alerts to a person, curves to a tracker."""
