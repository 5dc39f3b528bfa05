"""Rented or local boxes in which an episode's commands run."""
