"""The trainer and its loops; `build` makes one from settings."""
