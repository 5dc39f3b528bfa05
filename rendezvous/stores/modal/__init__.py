"""A store inside a Modal app: blocks of a Volume, and names of a Dict."""
