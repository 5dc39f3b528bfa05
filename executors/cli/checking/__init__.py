"""Verbs before a run: check settings, accounts and buckets, and make a new project."""
