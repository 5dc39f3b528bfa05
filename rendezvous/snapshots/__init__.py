"""Snapshots of θ and the outer momentum, and the replay from a snapshot to a later step."""
