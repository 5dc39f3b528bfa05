"""What a run costs: its limit for a supervisor (limit.py), and its bills (bills.py)."""
