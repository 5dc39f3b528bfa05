"""Start models: found, read, adapted; their dtype and optimizer."""
