"""The packages for a rented machine: this project's wheel, and pinned versions of other packages."""
