"""Defines a state of a recorded trace: the messages before the student's action, and the action.

    {"state_id": "tau/3/1/t4",                  unique
     "state_messages": [{"role": …}, …],        everything before the action, chat form
     "student_action": "<tool_call> … ",        the student's action as one string (actions.py)
     "tools": [ … ],                            JSON schemas, if there are tools
     "reward": 0.0, "error": "Error: …",        of the whole trace; the tool's result if the action failed
     "late_rewards": {"human": 0.7},            of the whole trace, by judges that came after the training
     "student_entropy": 1.3}                    nats: over the group's actions here, or per token, as you choose

A file has one JSON object per line. A line that cannot be used is left out, and a TraceWarning names it. A JSON file
has one trace or a list of traces; SWE-agent's attempts and τ²-bench's simulations are traces of their own.

Whether a tool's result is an error, and its message (error_record):

    {'error': text, …}  as TRL writes it, the same in JSON      "Error: …"      a traceback      ──▶ {"error": text, …}

The environment may add error_kind and hint_template_key; the hint gets them unchanged.

Not promised: that two states come from different episodes; that each result is read as a person would read it.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryFile
from typing import Any, NotRequired, TypedDict

from inner.replay.actions import Message
from inner.replay.untrusted import load_json
from inner.settings.inner import InnerError

_TURN = {"role", "action", "observation", "kind"}  # a list of objects with one of these keys is one trace
_FORMATS = {  # a record with this key: what it is, and what to do
    "state_messages": "this is a state: use load_states",
    "traj": "this is an episode of τ-bench: use tau_bench_states",
    "simulations": "these are results of τ²-bench: use tau_bench_states",
    "steps": "this is a trajectory of Harbor: use harbor_states",
    "history": "this is a trace of SWE-agent (use swe_agent_states) or OpenHands (use openhands_states)",
    "trajectory": "this is a trace of SWE-agent: use swe_agent_states",
    "messages": "this is a chat: use swe_agent_states",
    "conversations": "these are chats: for swe_agent_states, name the list `messages`, with role and content",
    "kind": "this is one event of OpenHands: write all events as one list in a .json file, for openhands_states",
}
_SAYS_ERROR = re.compile(r"(?:Error|ERROR): |Unknown action |Traceback \(most recent call last\)")


class TraceState(TypedDict):
    state_id: str
    state_messages: list[Message]
    student_action: str
    tools: NotRequired[list[dict[str, Any]]]
    reward: NotRequired[float | None]
    late_rewards: NotRequired[dict[str, float]]
    error: NotRequired[str | None]
    student_entropy: NotRequired[float]
    action_form: NotRequired[str]  # how the trace writes commands: a name in commands.py
    error_kind: NotRequired[str]  # if the environment names it
    hint_template_key: NotRequired[str]


class TraceWarning(UserWarning):
    """A line of a trace file was left out. The message names file and line."""


def load_states(path: str | Path) -> list[TraceState]:
    """Load the states that `save_states` wrote."""
    return read_lines(path, lambda row, number: [checked_state(row)])


def save_states(states: Iterable[TraceState], path: str | Path) -> None:
    save_lines(states, path)


def save_lines(rows: Iterable[Mapping[str, Any]], path: str | Path) -> None:
    """Write the rows.   If a row raises an error, `path` stays as it was."""
    with TemporaryFile("w+", encoding="utf-8") as made:
        made.writelines(_json_line(row) + "\n" for row in rows)
        made.seek(0)
        with Path(path).open("w", encoding="utf-8") as file:
            copyfileobj(made, file)


def checked_state(row: Any) -> TraceState:
    """Return the row if it is a state; else raise ValueError, which names the fault."""
    if not isinstance(row, dict):
        raise ValueError(f"a state must be an object, this is a {type(row).__name__}")
    for key, kind in (("state_id", str), ("state_messages", list), ("student_action", str)):
        if not isinstance(row.get(key), kind):
            hint = "" if "state_messages" in row else seen_format(row)
            raise ValueError(f"{key} is {row.get(key)!r:.60}, not a {kind.__name__}{hint}")
    checked_messages(row["state_messages"])
    return row  # pyright: ignore[reportReturnType]


def recorded_turns(row: Any, *keys: str) -> list[Any]:
    """Return the turns or events of a trace: the value of the first of these keys, or the record, if it is a list."""
    if isinstance(row, list):
        return row
    if not isinstance(row, dict):
        raise ValueError(f"a trace must be an object, this is a {type(row).__name__}")
    found = [row[key] for key in keys if key in row]
    if not found:
        raise ValueError(f"no {' or '.join(map(repr, keys))}{seen_format(row)}")
    if not isinstance(found[0], list) or not found[0]:
        raise ValueError("there are no messages")
    return found[0]


def seen_format(row: Mapping[str, Any]) -> str:
    """Return a record's keys, and if its format is known, the reader of this format."""
    known = [said for key, said in _FORMATS.items() if key in row]
    return f" (its keys are {', '.join(map(repr, [*row][:6]))}{'; ' * bool(known)}{''.join(known[:1])})"


def checked_messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise ValueError("there are no messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} has no role: {message!r:.60}")
    return messages


def read_lines(path: str | Path, read: Callable[[Any, int], list[Any]]) -> list[Any]:
    """Call `read(record, its number)` for each line of a .jsonl, or each record of a JSON file; join the results.

    A bad record is left out with a warning. Raises InnerError if all records are bad."""
    path = Path(path)
    found = []
    bad = []
    for number, parse in _read_records(path):
        try:
            found += read(parse(), number)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            place = "line" if path.suffix == ".jsonl" else "record"
            bad.append(f"{path}, {place} {number}: {_describe_error(error)}. It is left out.")
            warnings.warn(bad[-1], TraceWarning, stacklevel=3)
    if bad and not found:
        raise InnerError(f"{path}: nothing in it could be used.\n  {bad[0]}\n  next: is this the right file?")
    return found


def _read_records(path: Path) -> Iterator[tuple[int, Callable[[], Any]]]:
    if not path.is_file():
        raise InnerError(f"there is no file {path}. Check the path.")
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from ((number, partial(load_json, line)) for number, line in enumerate(lines, 1) if line.strip())
        return
    try:
        document = load_json(path.read_bytes())
    except ValueError as error:
        raise InnerError(
            f"{path} is not JSON: {error}. Files with one JSON object per line are called .jsonl."
        ) from error
    yield from ((number, lambda record=record: record) for number, record in enumerate(_traces_in(document), 1))


def _traces_in(document: Any) -> list[Any]:
    """Return the traces of a JSON file. An attempt or a simulation has the file's other fields under `file`."""
    if isinstance(document, list):
        return [document] if _objects(document) and not _TURN.isdisjoint(document[0]) else document
    for key in ("attempts", "simulations"):
        if isinstance(document, dict) and _objects(document.get(key)):
            return [{**run, "file": document} for run in document[key]]
    return [document]


def _objects(value: Any) -> bool:
    """Whether the value is a list of objects, and not empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(member, dict) for member in value)


def _json_line(row: Mapping[str, Any]) -> str:
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate: JSON must escape it
        return json.dumps(row)
    return text


def _describe_error(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error}"
    return f"no {error}" if isinstance(error, KeyError) else str(error)


# -------------------------------------------------------------------- a tool's result


def error_record(content: object) -> dict[str, Any] | None:
    """Return {"error": text, and keys that the environment added}; None if `content` is not an error."""
    if not isinstance(content, str):
        return None
    if content.startswith(("{'error':", '{"error":')):
        record = _parse_record(content)
        return record if record is not None and record["error"] else None
    return {"error": content} if _SAYS_ERROR.match(content) else None


def _parse_record(content: str) -> dict[str, Any] | None:
    for parse in (ast.literal_eval, json.loads):
        try:
            record = parse(content)
            _ = str(record["error"])
            return record
        except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError):  # not in this form
            continue
    return None
