"""Deletion of old blobs: the budget of bytes, the collector, and the steps that can still be computed."""
