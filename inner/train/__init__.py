"""Trainers and inner loops; build.py makes a loop from settings."""
