"""Verbs that change the desired size of a running fleet."""
