"""A supervisor's notices: events of a run, alerts to a webhook, curves to a tracker."""

VARIABLE = "DILOCO_ALERT"  # environment variable of the supervisor: the URL of a webhook
