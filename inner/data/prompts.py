"""Read prompts from one file: rows that have a `prompt`, and columns for the reward.

    .jsonl .json .csv .parquet ─read─▶ rows ─inner.data.columns: renamed─▶ {"prompt": …, …} ─inner.data.system─▶ rows

A prompt is a text or a list of messages; a system prompt turns texts into messages.  Held-out prompts ([eval]) are
read in the same way.  diloco/run/data_files.py first joins several files and Hub datasets to one file.  No torch.

Not promised: types for a .csv; its columns are texts.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from inner.data.faults import disguise, half_character
from inner.data.rendering import text_of
from inner.printable import first_line
from inner.settings.inner import Files, InnerError
from inner.settings.task import DataSettings, setting_of
from inner.tasks.spec import is_task

ENCODING = "utf-8-sig"  # removes the mark that spreadsheets put before the first column's name
TRL_OWN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
Row = dict[str, Any]
Numbered = tuple[str, Any]  # (place in the file: "line 3" or "row 3"; the value that was read)


def local_file(kind: str, spelling: str | list[str], files: Files) -> Path:
    """Return the local copy of the file that the config calls `spelling`."""
    path = files.get(kind)
    if path is None:
        raise InnerError(
            f'{setting_of(kind)} = {spelling!r}: no local copy was handed in. Pass files={{"{kind}": path}}.'
        )
    if Path(path).is_dir():
        from inner.data.refusals import folder_words

        raise InnerError(f"{setting_of(kind)} = {spelling!r}: {folder_words(Path(path))}.")
    if not Path(path).is_file():
        raise InnerError(
            f"{setting_of(kind)} = {spelling!r}: there is no file {path}. Check the path in {setting_of(kind)}."
        )
    if kind == "pairs" and (fault := disguise(Path(path))):
        raise InnerError(f"{setting_of(kind)} = {spelling!r} {fault}.")
    return Path(path)


def load_prompts(
    spelling: str | list[str], files: Files, data: DataSettings, limit: int | None = None, kind: str = "prompts"
) -> list[Row]:
    """Load rows that all have a `prompt`.   kind: what the user's file is for.   Raises InnerError."""
    path = local_file(kind, spelling, files)
    name = f"{setting_of(kind, spelling)} = {spelling!r}"
    named = replace(data, columns={}) if is_task(spelling) else data  # a task's columns already have their final names
    return check_rows(name, islice(read_rows(name, path), limit), named)


def check_rows(name: str, rows: Iterable[Numbered], data: DataSettings, first: Row | None = None) -> list[Row]:
    """Return the rows as training uses them. Rows without one of the columns have None there, as in `datasets`.

    first: a row of another source, whose columns these rows must have."""
    checked = list[Row]()
    for where, found in rows:
        row = _checked_row(name, where, _named_columns(name, where, found, data.columns))
        checked.append(_with_system(name, where, row, data.system))
        _refuse_other_kind(name, where, checked[-1]["prompt"], checked[0]["prompt"])
    if not checked:
        raise InnerError(f"{name} is empty. It needs rows with a `prompt`.")
    columns = dict.fromkeys(column for row in checked for column in row)
    if first is not None and set(columns) != set(first):
        differing = ", ".join(sorted(map(str, set(columns) ^ set(first))))
        raise InnerError(f"{name}: column {differing} is not in every source. Write it everywhere.")
    return [row if len(row) == len(columns) else {column: row.get(column) for column in columns} for row in checked]


# -------------------------------------------------------------------- reading


def read_rows(name: str, path: Path) -> Iterator[Numbered]:
    """Yield a file's rows.   name: the setting, for messages.   Raises InnerError for an unknown kind of file."""
    if fault := disguise(path):
        raise InnerError(f"{name} {fault}.")
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise InnerError(
            f"{name} does not end with {', '.join(READERS)}, so it cannot be read. Convert it, or rename it."
        )
    try:
        yield from read(name, path)
    except UnicodeDecodeError as error:
        raise InnerError(f"{name} cannot be read: {error}. Save it again, as UTF-8.") from error


def _read_jsonl(name: str, path: Path) -> Iterator[Numbered]:
    with path.open(encoding=ENCODING) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"line {number}", _json_of_line(name, number, line)


def _keys_once(pairs: list[tuple[str, Any]]) -> Row:
    """Make the object of JSON. Python's own reader keeps the last value of a key that stands twice."""
    if len(row := dict(pairs)) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object names {twice!r} twice, and only the last value would be read")
    return row


_of_json = json.JSONDecoder(object_pairs_hook=_keys_once).decode


def _json_of_line(name: str, number: int, line: str) -> Any:
    whole = (
        f"Write one JSON object per line{', or name a file that is one list .json' if line.strip()[0] == '[' else ''}."
    )
    try:
        found = _of_json(line)
    except (ValueError, RecursionError) as error:
        raise InnerError(f"{name}, line {number} is not JSON: {error}. {whole}") from error
    if isinstance(found, list):
        raise InnerError(f"{name}, line {number} is a list. {whole}")
    return found


def _read_json(name: str, path: Path) -> Iterator[Numbered]:
    try:
        found = _of_json(path.read_text(encoding=ENCODING))
    except (ValueError, RecursionError) as error:
        raise InnerError(f"{name} is not JSON: {error}. Write one list of objects, or name it .jsonl.") from error
    if not isinstance(found, list):
        raise InnerError(f"{name} holds a {type(found).__name__}. Write one list of objects, or name it .jsonl.")
    return _numbered(found)


def _read_csv(name: str, path: Path) -> Iterator[Numbered]:
    from inner.data.csv_rows import read_csv  # most runs have no .csv

    with path.open(encoding=ENCODING, newline="") as lines:
        yield from read_csv(name, lines)


def _read_parquet(name: str, path: Path) -> Iterator[Numbered]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as missing:
        raise InnerError(f"reading {name} needs {missing.name}: pip install 'serverless-diloco[train]'") from missing
    try:
        file = ParquetFile(path)
        if len({*file.schema_arrow.names}) < len(file.schema_arrow.names):
            raise InnerError(f"{name} has two columns with one name, and only one would be read. Rename one of them.")
        yield from _numbered(row for batch in file.iter_batches() for row in batch.to_pylist())
    except (ArrowException, OSError) as error:
        raise InnerError(f"{name} is not a Parquet file, so save it again: {first_line(error)}") from error
    except OverflowError as error:  # for example "infinity" of PostgreSQL
        raise InnerError(f"{name} has a date or a duration that Python cannot hold. Save it as text.") from error


def _numbered(rows: Iterable[Any]) -> Iterator[Numbered]:
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


READERS: dict[str, Callable[[str, Path], Iterator[Numbered]]] = {
    ".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet,
}  # fmt: skip


# -------------------------------------------------------------------- one row


def _named_columns(name: str, where: str, row: Any, columns: Mapping[str, str]) -> Any:
    """Return the row with its columns renamed.   columns: a column's name in the file -> its new name."""
    if not columns or not isinstance(row, dict):
        return row
    if missing := [column for column in columns if column not in row]:
        raise InnerError(
            f"{name}, {where} has no column {missing[0]!r}, which inner.data.columns renames. It has "
            f"{', '.join(map(repr, row)) or 'none'}. Correct the name in that table."
        )
    renamed = {columns.get(column, column): value for column, value in row.items()}
    if len(renamed) < len(row):
        raise InnerError(
            f"{name}, {where}: inner.data.columns = {dict(columns)} gives two columns one name. Give each its own; "
            f"the file has {', '.join(map(repr, row))}."
        )
    return renamed


def _checked_row(name: str, where: str, row: Any) -> Row:
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str | list) or row["prompt"] in ([], _blank(row)):
        from inner.data.refusals import missing_prompt, prompt_fault

        if fault := prompt_fault(row):
            raise InnerError(f"{name}: the prompt of {where} {fault}.")
        seen = json.dumps(row, ensure_ascii=False, default=str)[:80]
        raise InnerError(f"{name}, {where} has no `prompt`: {seen}. {missing_prompt(row)}.")
    _check_columns(name, where, row)
    for number, message in enumerate(row["prompt"] if isinstance(row["prompt"], list) else (), 1):
        if fault := _message_fault(message):
            raise InnerError(f"{name}, {where}: message {number} of the prompt {fault}.")
    if half := half_character(row["prompt"]):
        raise InnerError(
            f"{name}, {where}: the prompt has {half}, half of a character (a lone surrogate), which no tokenizer "
            "reads. Take it out, or write the whole character."
        )
    return row


def _blank(row: Row) -> str | None:
    """Return the row's prompt if it is a text of only white space; else None.

    A chat without words is accepted: an environment's `reset` may add the text, as in some of TRL's own examples."""
    prompt = row["prompt"]
    return prompt if isinstance(prompt, str) and not prompt.strip() else None


def _check_columns(name: str, where: str, row: Row) -> None:
    """Raise InnerError for columns that TRL cannot pass to rewards under their own names."""
    if own := [column for column in TRL_OWN if column in row]:
        raise InnerError(
            f"{name}, {where}: column {own[0]!r} has a name under which TRL passes something else to rewards. Give it "
            f'another: inner.data.columns = {{{own[0]} = "my_{own[0]}"}}.'
        )
    if seen := [column for column in ("image", "images") if column in row and (column == "image" or row[column] != [])]:
        raise InnerError(
            f"{name}, {where}: column {seen[0]!r} would be shown to the model, which reads text alone. If only the "
            f'reward needs it, give it another name: inner.data.columns = {{{seen[0]} = "picture"}}.'
        )


def _message_fault(message: Any) -> str:
    """Return why a message is not valid for any chat template; "" if it is valid."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        shown = json.dumps(message, ensure_ascii=False, default=str)[:80]
        return f'has no `role`: {shown}. Write {{"role": "user", "content": "…"}}'
    if isinstance(message.get("content"), dict):
        return "has an object for its content. Write a text there"
    try:
        text_of(message.get("content"))
    except InnerError as error:
        return f"cannot be read: {error}. Take the part out"
    return ""


def _refuse_other_kind(name: str, where: str, prompt: str | list[Any], first: str | list[Any]) -> None:
    """Raise InnerError for a text among chats or a chat among texts: TRL treats a batch like its first prompt."""
    if type(prompt) is not type(first):
        kinds = ("a text", "messages") if isinstance(prompt, str) else ("messages", "a text")
        raise InnerError(
            f"{name}, {where}: the prompt is {kinds[0]}, and in the first row it is {kinds[1]}. Write all in one form; "
            "with inner.data.system, each text becomes messages."
        )


def _with_system(name: str, where: str, row: Row, system: str | None) -> Row:
    if system is None:
        return row
    prompt = row["prompt"]
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if messages[0].get("role") == "system":
        raise InnerError(
            f"{name}, {where} begins with a system message of its own, and inner.data.system is set. Leave one out."
        )
    return {**row, "prompt": [{"role": "system", "content": system}, *messages]}
