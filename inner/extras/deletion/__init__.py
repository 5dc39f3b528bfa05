"""Feature Deletion: remove a feature from a small repository; hidden tests decide whether the agent restored it."""
