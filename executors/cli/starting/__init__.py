"""Verbs that start or resume a run: here, detached, or as a demo."""
