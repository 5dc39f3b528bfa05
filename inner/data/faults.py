"""Describe the fault of a file or of a row of prompts, for messages.

    other bytes than the name says gzip, zip, Parquet, HTML, a pointer of Git LFS
    half a character               which no tokenizer reads
    a chat that is answered        a warning

Not promised: every format there is.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from inner.data.rendering import HALF

DATA = (".jsonl", ".json", ".csv", ".parquet")
BEGINS = (  # a file's first bytes -> the file's kind, and the next thing to do
    (rb"PAR1(\x15|\Z)", "is a Parquet file. Name it .parquet"),  # first: skipped for a file named .parquet
    (rb"version https://git-lfs", "is a Git LFS pointer, not the data. Next: `git lfs pull` there"),
    (rb"\x1f\x8b", "is compressed by gzip. Next: `gunzip -c {0} > {1}`, and name that file"),
    (rb"PK\x03\x04", "is a zip archive (.xlsx is one, too). Unpack it, or save the table as .csv"),
    (rb"\x28\xb5\x2f\xfd", "is compressed by zstd. Next: `unzstd {0} -o {1}`, and name that file"),
    (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", "is compressed by bzip2. Next: `bunzip2 -c {0} > {1}`, and name that file"),
    (rb"\xfd7zXZ", "is compressed by xz. Next: `xz -dc {0} > {1}`, and name that file"),
    (rb"(?i)<(!doctype|html)\b", "is a web page. Download the file itself (Hub links: `resolve` in place of `blob`)"),
)


def disguise(path: Path) -> str:
    """Return a file's kind, by its first bytes, and the next thing to do; "" if a reader of rows may read the file."""
    with path.open("rb") as file:
        start = file.read(64).lstrip(b"\xef\xbb\xbf \r\n")
    unpacked = path.with_name(path.stem if path.suffix.lower() not in DATA else f"unpacked-{path.name}")
    names, begins = (quote(str(path)), quote(str(unpacked))), BEGINS[path.suffix.lower() == ".parquet" :]
    return next((words.format(*names) for begin, words in begins if re.match(begin, start)), "")


def half_character(prompt: Any) -> str:
    """Return the escape of a lone surrogate in the prompt, or in a part of it at any depth, or ""."""
    if isinstance(prompt, str):
        found = HALF.search(prompt)
        return f"\\u{ord(found[0]):04x}" if found else ""
    parts = [*prompt, *prompt.values()] if isinstance(prompt, Mapping) else prompt if isinstance(prompt, list) else []
    return next(filter(None, map(half_character, parts)), "")


def answered_words(name: str, prompts: Sequence[Any]) -> str:
    """Return a warning about chats whose last message is the assistant's, or "".   name: the setting."""
    ends = [n for n, p in enumerate(prompts, 1) if isinstance(p, list) and p[-1].get("role") == "assistant"]
    if not ends:
        return ""
    return (
        f"warning: {name}: {len(ends):,} of {len(prompts):,} prompts end with a message of the assistant, the first: "
        f"prompt {ends[0]}. The model writes a further message behind that answer. If that answer is the one to learn, "
        "take it out of the prompt, and give it to the reward in a column of its own"
    )
