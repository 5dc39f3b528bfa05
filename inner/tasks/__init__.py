"""Tasks out of packages: prompts that a package makes, and its own scorer as the reward (docs/data.md)."""
