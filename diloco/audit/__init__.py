"""Audit a run: check records, explain steps, find causes.   Needs torch, writes nothing.

verify.py   recompute θ, compare digests   explain.py   one outer step as text      (facts: step_facts.py)
records.py  the records, before it         inner.py     are pseudogradients those of their inner steps?
bisect.py   since which step?              blame.py     which pseudogradients?      (a user's command: judge.py)
"""
