"""Verbs that show a run and change nothing: status, watch, logs, costs, report, diff."""
