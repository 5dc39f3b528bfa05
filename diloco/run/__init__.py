"""A run's settings and records, and how one is founded."""
