"""Verbs that start a run or go on with one: here, detached, as a demo."""
