"""Small tasks, built in code. They need no downloads."""
