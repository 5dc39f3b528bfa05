"""The costs of a run: its limit for a supervisor (limit.py), and its bills (bills.py)."""
