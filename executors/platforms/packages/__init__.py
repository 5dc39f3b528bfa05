"""The packages for a rented machine: our wheel, and pinned versions of others."""
