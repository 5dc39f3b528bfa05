"""Load the user's files, try them before the run, and call them safely during it."""
