"""Verbs that look at a run and change nothing: status, report, logs, and back along its steps."""
