"""A supervisor's notices: events of a run, alerts to a webhook, curves to a tracker."""

VARIABLE = "DILOCO_ALERT"  # of the supervisor's environment: the URL of a webhook
