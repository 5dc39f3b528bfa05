"""Verbs that change the desired state of a running fleet: scale, drain and stop."""
