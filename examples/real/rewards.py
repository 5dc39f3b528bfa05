"""The reward of a sum: does the reply contain the number, and end with it?

0      the number is not in the reply
0.3    the reply goes on after the number
1      the number ends the reply
"""

import re
from typing import Any


def text_of(completion: Any) -> str:
    """Return a completion's text; a completion is a list of messages if its prompt is."""
    return completion[0]["content"] if isinstance(completion, list) else completion


def score(text: str, answer: str) -> float:
    numbers = re.findall(r"\d+", text)
    stops = re.search(r"\d+\.?\s*$", text) is not None
    if stops and numbers[-1] == answer:
        return 1.0
    return 0.3 if answer in numbers else 0.0


def answer(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [score(text_of(c), a) for c, a in zip(completions, answer, strict=True)]
