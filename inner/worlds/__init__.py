"""Small tasks, built in code. These tasks need no downloads."""
