"""Trainers and loops. `build` makes a loop from settings."""
