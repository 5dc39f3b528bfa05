"""A store in Modal's own services: a Dict for entries, and a Volume for files."""
