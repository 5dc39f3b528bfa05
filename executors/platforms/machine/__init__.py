"""The machine of a process: its GPU, memory that ran out, the log file."""
