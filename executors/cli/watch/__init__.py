"""`diloco watch`: one screen that follows a run, with actions."""
