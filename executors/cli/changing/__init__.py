"""Verbs that change what a running fleet should be: its size."""
