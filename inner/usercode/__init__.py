"""The user's files: loaded, tried before the run, and asked patiently during it."""
