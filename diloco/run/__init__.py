"""A run's settings and records, and a run's creation."""
