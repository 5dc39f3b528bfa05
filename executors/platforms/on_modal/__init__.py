"""Replicas as function calls on Modal."""
