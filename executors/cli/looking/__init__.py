"""Verbs that show a run: status, watch, logs, costs, report, diff."""
