"""The supervisor's notices: remarks on a run, alerts to a person, curves to a tracker."""

VARIABLE = "DILOCO_ALERT"  # of the supervisor's environment: the address of a webhook
