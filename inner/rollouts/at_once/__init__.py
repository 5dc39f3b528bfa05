"""Tool calls and environments of all rollouts at the same time, and their limits."""
