"""Verbs that check before a run: settings, accounts, buckets; and a new project to begin with."""
