"""Replicas as Hugging Face Jobs."""
