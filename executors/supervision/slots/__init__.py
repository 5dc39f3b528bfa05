"""One run's slots: what was seen of each, what should be done, and what doing it found."""
