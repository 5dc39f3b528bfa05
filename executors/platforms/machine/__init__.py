"""The machine of a process: its GPU, a full disk, memory that ran out, the log file."""
