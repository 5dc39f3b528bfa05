"""One run, at any places: which replicas are missing, what may still be spent, which process supervises."""
