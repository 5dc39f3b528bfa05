"""Supervises one run on any platforms: replaces missing replicas, keeps the budget, holds the supervisor's lease."""
