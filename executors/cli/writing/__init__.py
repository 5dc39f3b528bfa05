"""Verbs that write a run's results elsewhere, or check them."""
