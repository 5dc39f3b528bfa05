"""The reward of a sum: is the number there, and is it alone?

0              the number is not in the text
0.3 + 0.7 s    it is, and makes the share s of the text's characters: 1 for the number alone
"""

import re
from typing import Any


def text_of(completion: Any) -> str:
    """The text of a completion, which is a list of messages where the prompt is one."""
    return completion[0]["content"] if isinstance(completion, list) else completion


def score(text: str, answer: str) -> float:
    text = text.strip()
    return 0.3 + 0.7 * len(answer) / len(text) if answer in re.findall(r"\d+", text) else 0.0


def answer(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [score(text_of(c), a) for c, a in zip(completions, answer, strict=True)]
