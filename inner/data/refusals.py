"""Say what to do with a folder, with a row that lacks a column, or whose prompt is neither a text nor messages.

    {"id": 7, "query": "2 + 2?"}    ─▶  inner.data.columns = {query = "prompt"}

Not promised: the right column; it is the likeliest by its name.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inner.data.faults import DATA

LIKELY = (  # columns that hold the question in public datasets, the likeliest first
    *("question", "problem", "query", "instruction", "problem_statement", "input", "messages", "conversations", "text"),
)


def folder_words(path: Path) -> str:
    """Return the message for a folder where a data file belongs."""
    saved = f"is a folder that save_to_disk wrote. Next, in Python: datasets.load_from_disk({str(path)!r})"
    if (path / "dataset_dict.json").is_file():
        splits = sorted(p.name for p in path.iterdir() if p.is_dir())
        split = "train" if "train" in splits else (splits or ["train"])[0]
        return f"{path} {saved}[{split!r}].to_parquet('{path.name}-{split}.parquet'), and name that file"
    if (path / "dataset_info.json").is_file():
        return f"{path} {saved}.to_parquet('{path.name}.parquet'), and name that file"
    found = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.suffix.lower() in DATA and p.is_file())
    there = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
    return f"{path} is a folder. Name a file in it, or a list of files; it has {there or 'no ' + ', '.join(DATA)}"


def absent_columns(name: str, rows: Sequence[Any]) -> str:
    """Return a warning about columns that some rows lack, or "".   rows: the rows as they were read."""
    of_row = [row for row in rows if isinstance(row, dict)]
    counts = Counter(column for row in of_row for column in row)
    lacking = {column: count for column, count in counts.items() if count < len(of_row)}
    if not lacking:
        return ""
    words = ", ".join(f"{column!r} in {count:,}" for column, count in lacking.items())
    return f"warning: {name}: of {len(of_row):,} rows, column {words}; the others have None there. Check the spelling"


def prompt_fault(row: Any) -> str:
    """Return the kind of a refused row's prompt, and the next thing to do.  Return "" for a row without a `prompt`."""
    if not isinstance(row, dict) or "prompt" not in row:
        return ""
    prompt = row["prompt"]
    kind = {type(None): "null", dict: "an object", bool: "a truth value"}.get(type(prompt), f"a number ({prompt})")
    kind = "empty" if isinstance(prompt, str | list) else kind
    mend = "Put it into a list, [{…}]" if isinstance(prompt, dict) else "Write a text or messages there"
    return f"is {kind}. {mend}, or take the row out"


def missing_prompt(row: Any) -> str:
    """Return the next thing to do for a row without a `prompt`, by the columns that it has."""
    columns = {name: value for name, value in row.items() if name} if isinstance(row, dict) else {}
    likely = next((name for name in LIKELY if isinstance(columns.get(name), str | list) and columns[name]), None)
    if likely is not None and isinstance(columns[likely], list):
        first = columns[likely][0]
        if isinstance(first, Mapping) and {"from", "value"} <= set(first):
            return (
                f"{likely} has turns as ShareGPT writes them. Write the turns before the answer to learn as "
                '{"prompt": [{"role": "user", "content": "…"}]}'
            )
    example = likely or "question"
    found = ", ".join(map(repr, columns)) if columns and likely is None else ""
    return (
        'Write {"prompt": "…"} or {"prompt": [{"role": "user", "content": "…"}]}, plus the columns of your reward; or '
        f'name the column that is the prompt: inner.data.columns = {{{example} = "prompt"}}'
        + (f". It has the columns {found:.300}" if found else "")
    )
