"""GSM8K: grade-school mathematics with one number as the answer (arXiv 2110.14168).

    {"question": "Natalia sold …", "answer": "… 48+24 = <<48+24=72>>72 clips …\\n#### 72"}
        gsm8k_rows    ──▶   {"prompt": [{"role": "user", "content": "Natalia sold … #### <number>"}], "answer": "72"}
        exact_match   ──▶   1.0 if the completion's final number is 72, else 0.0

    python -m inner.worlds.gsm8k --to prompts.jsonl                       the Hub's openai/gsm8k
    python -m inner.worlds.gsm8k --to prompts.jsonl --source train.jsonl  a local file

Not promised: that the reasoning before a right number is right.
"""

import argparse
import json
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from inner.replay.actions import plain_text
from inner.replay.states import read_lines
from inner.settings.inner import InnerError

HUB_ID = "openai/gsm8k"
ASK = "\n\nThink step by step. End with a line `#### <number>`."
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


def gsm8k_rows(source: str | Path = HUB_ID, split: str = "train", limit: int | None = None) -> list[dict[str, Any]]:
    """Load prompts and answers from the Hub or a local .jsonl. A TraceWarning names each bad line; it is left out."""
    local = str(source).endswith(".jsonl")
    rows = read_lines(source, lambda row, number: [prompt_row(row)]) if local else _from_hub(str(source), split)
    return rows[:limit]


def prompt_row(row: Any) -> dict[str, Any]:
    """Return one problem as a row of a prompts file.   Raises ValueError if its answer has no final number."""
    question = row["question"]
    answer = row["answer"]
    final = final_number(answer, marked=True)
    if final is None:
        raise ValueError(f"the answer of {question[:60]!r} has no `#### <number>`: it ends with {answer[-60:]!r}")
    return {"prompt": [{"role": "user", "content": question.strip() + ASK}], "answer": str(final)}


def exact_match(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1.0 if the final number (after the last `####`, else the last in the text) is the answer, else 0.0."""
    return [
        float(final_number(completion_text(c)) == final_number(a)) for c, a in zip(completions, answer, strict=True)
    ]


def final_number(text: str, marked: bool = False) -> Decimal | None:
    """Return a text's final number; 1,000 = 1000.0 = $1,000.   marked: only a number after `####` counts."""
    _, mark, behind = text.rpartition("####")
    if mark:
        found = _NUMBER.match(behind.strip().removeprefix("<").lstrip("`* "))
        return _parse_decimal(found[0]) if found else None
    numbers = [] if marked else _NUMBER.findall(text)
    return _parse_decimal(numbers[-1]) if numbers else None


def completion_text(completion: Any) -> str:
    """Return a completion's text: the string itself, or the last message's content."""
    return (
        completion if isinstance(completion, str) else plain_text(completion[-1].get("content") if completion else "")
    )


def _parse_decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", "")).normalize() + 0  # -0 is 0
    except InvalidOperation:
        return None


def _from_hub(source: str, split: str) -> list[dict[str, Any]]:
    from datasets import load_dataset

    try:
        data = load_dataset(source, "main", split=split)
    except Exception as error:
        raise InnerError(
            f"{source} could not be loaded from the Hub ({type(error).__name__}: {error}). Without a network, give a "
            "local .jsonl with `question` and `answer`."
        ) from error
    return [prompt_row(row) for row in data]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write GSM8K as a prompts file.")
    parser.add_argument("--to", required=True, type=Path, help="the .jsonl to write")
    parser.add_argument("--source", default=HUB_ID, help="a Hub id or a local .jsonl")
    parser.add_argument("--split", default="train")
    parser.add_argument("--limit", type=int)
    given = parser.parse_args()
    rows = gsm8k_rows(given.source, given.split, given.limit)
    given.to.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} prompts in {given.to}")


if __name__ == "__main__":
    main()
