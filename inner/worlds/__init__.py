"""Small worlds to learn in, built in code: no downloads."""
