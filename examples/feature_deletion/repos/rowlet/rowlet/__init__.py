"""rowlet: small tables from and to text."""
