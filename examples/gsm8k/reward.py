"""1 for the right final number, else 0. `answer` is a column of prompts.jsonl."""

from inner.worlds.gsm8k import exact_match as score

__all__ = ["score"]
