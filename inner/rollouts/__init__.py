"""Prompts to completions, the way TRL does it, and the engines that can do it for TRL."""
