"""Read rows from files or the Hub, check them, and deal them out to replicas in a seeded order."""
