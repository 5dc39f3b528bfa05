"""Read the rows of a .csv file of prompts.

    ,prompt,            0 │ What is 9+28? │ 37    ─▶ {"prompt": "What is 9+28?", "": "37"}
    │        └ "" too, and has texts
    └ "" counts the rows: dropped

At most one column without a name stays, as "", which inner.data.columns may rename.  Of several columns without a name,
the first with a text in a row stays, else the first one. Other columns are dropped if empty or a count of rows.

Not promised: to drop an index that a program sorted or filtered; if another column without a name is beside it, the
file is refused.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, dropwhile, islice
from typing import Any

from inner.errors import InnerError

Numbered = tuple[str, dict[str, Any]]  # ("row 3", its fields)
LONGEST_FIELD = 2**31 - 1  # at most so many characters of a field
UNNAMED = "\0"  # with the column's number, the key of a column without a name until that becomes "" or is dropped
BEYOND = "beyond the header"  # key for a row's fields beyond the header's columns
BEGINS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1}  # first field of a column that counts the rows


def read_csv(name: str, lines: Iterable[str]) -> Iterator[Numbered]:
    """Yield the rows of a file's lines.   name: the setting, for messages.   Raises InnerError."""
    csv.field_size_limit(LONGEST_FIELD)  # Python's own limit is 131,072 characters
    try:
        yield from _with_one_unnamed(name, _whole_rows(name, _open_rows(name, lines)))
    except csv.Error as error:
        raise InnerError(f"{name} is not a CSV file: {error}. Save it again as CSV, or as .jsonl.") from error


def _open_rows(name: str, lines: Iterable[str]) -> Iterable[dict[Any, Any]]:
    reader = csv.DictReader(dropwhile(str.isspace, lines), restkey=BEYOND)  # blank lines before the header
    names = [column or f"{UNNAMED}{i}" for i, column in enumerate(reader.fieldnames or (), 1)]
    if twice := [column for column, n in Counter(names).items() if n > 1]:
        raise InnerError(
            f"{name}: the header names the column {twice[0]!r} twice, and only the last would be read. Give each "
            "column a name of its own."
        )
    reader.fieldnames = names
    return reader


def _whole_rows(name: str, rows: Iterable[dict[str, Any]]) -> Iterator[Numbered]:
    """Yield rows without lines of spaces (csv skips empty lines). Raise InnerError for too few or too many fields."""
    for number, row in enumerate(rows, 1):
        filled = [field for field in row.values() if field is not None]
        if len(filled) == 1 and not str(filled[0]).strip():
            continue
        if None in row.values():  # DictReader's value for a field that the line does not have
            raise InnerError(f"{name}, row {number} has fewer fields than the header. Complete it, or take it out.")
        if BEYOND in row:
            raise InnerError(
                f"{name}, row {number} has {len(row[BEYOND])} fields more than the header. Put quotes around texts "
                "with commas."
            )
        yield f"row {number}", row


def _with_one_unnamed(name: str, rows: Iterator[Numbered]) -> Iterator[Numbered]:
    """Yield rows with at most one column without a name, which is chosen when all rows of such a file are read."""
    whole, full = [*islice(rows, 1)], dict[str, tuple[str, str]]()  # column -> where its first text is, and that text
    begins = {c: field.strip() for c, field in (whole[0][1] if whole else {}).items() if c.startswith(UNNAMED)}
    if not begins:
        yield from chain(whole, rows)
        return
    whole += rows
    for number, (where, row) in enumerate(whole):
        told = {column: row[column] for column in begins if column not in full}
        full |= {c: (where, text) for c, text in told.items() if not _counts(begins[c], text.strip(), number)}
    filled = [column for column in begins if begins[column] or column in full]
    sure = [column for column in filled if column in full and begins[column] not in BEGINS]
    kept = next(iter([*sure, *full, *begins]), "")
    for column, (where, field) in full.items():
        if column != kept or (not sure and len(filled) > 1):  # one of these columns may be a filtered index
            raise InnerError(
                f"{name}, {where} has the field {field[:40]!r} in column {column[1:]}, which the header does not name. "
                "Name the column in the header, or take it out."
            )
    for where, row in whole:
        yield where, {"" if c == kept else c: field for c, field in row.items() if c == kept or c not in begins}


def _counts(first: str, field: str, number: int) -> bool:
    """Whether a column that begins with `first` is empty or counts the rows, by its field in row `number` (from 0)."""
    begin = BEGINS.get(first)
    return not field or (begin is not None and field in (str(begin + number), f"{begin + number}.0"))
