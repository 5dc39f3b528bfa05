"""The command line: the user's commands, and the terminal's output."""
