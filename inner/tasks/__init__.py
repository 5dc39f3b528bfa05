"""Tasks from packages: a package makes the prompts, and its scorer is the reward (docs/data.md)."""
