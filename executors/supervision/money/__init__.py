"""The costs of a run: how a supervisor keeps the limit (limit.py), and the bills of launches (bills.py)."""
