"""The packages that a rented machine gets: our wheel, and pinned versions of others."""
