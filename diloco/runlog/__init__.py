"""Read a run from its bucket, without torch and without writes: open a run, look at it, read its report."""
