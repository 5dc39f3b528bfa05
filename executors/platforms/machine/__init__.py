"""The rented machine: its GPU, a disk or a memory that is full, the log file of a process."""
