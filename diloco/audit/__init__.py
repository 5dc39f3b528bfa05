"""Audit a run: check records, explain steps, find causes.   Needs torch, writes nothing.

verify.py   recompute θ, compare digests   explain.py   one outer step as text      (facts: step_facts.py)
bisect.py   since which step?              blame.py     which pseudogradients?      (a user's command: judge.py)
"""
