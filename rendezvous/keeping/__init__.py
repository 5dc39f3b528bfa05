"""What may go: a budget of bytes, and how far back a run can still be read."""
