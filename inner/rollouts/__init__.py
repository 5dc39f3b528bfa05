"""From prompts to completions, as in TRL, and the engines that can generate for TRL."""
