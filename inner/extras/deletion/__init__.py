"""Feature Deletion: a feature is taken out of a small repository, and hidden tests decide whether it came back."""
