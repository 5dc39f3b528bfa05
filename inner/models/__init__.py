"""Find, read and adapt start models; their dtype and optimizer."""
