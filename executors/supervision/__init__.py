"""The supervision of one run, on any platforms: missing replicas, the budget, the lease of the supervisor."""
