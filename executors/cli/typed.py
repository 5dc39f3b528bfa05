"""Converts typed words into values, or raises a message that names the mistake.

    "1.7B" ──count──▶ 1_700_000_000     "90m" ──duration──▶ 5400.0     "0" ──positive──▶ ArgumentTypeError: in words

Not promised: that a name exists (a slot, a GPU); the verb or the platform checks it.
"""

import json
import math
import re
from argparse import ArgumentTypeError
from typing import Any

UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def step_or_all(text: str) -> int | None:
    """Return a step; None for "all"."""
    return None if text == "all" else natural(text)


def positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        advice = "; to end a run: diloco stop RUN" if text == "0" else ""
        raise ArgumentTypeError(f"{text!r} must be a whole number of at least 1{advice}")
    return number


def local_path(text: str) -> str:
    """Return a path of this machine: "file:///x" -> "/x"."""
    from rendezvous.stores.open import folder_of
    from rendezvous.stores.urls import plain_spelling

    try:
        path = folder_of(plain_spelling(text))
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    if path is None:
        raise ArgumentTypeError(f"{text!r} is no path of this machine. Give one, and copy the result from there")
    return str(path) if "://" in text else text


def port(text: str) -> int:
    number = natural(text)
    if number > 65535:
        raise ArgumentTypeError(f"{text!r} is not a port; write a number from 0 to 65535")
    return number


def natural(text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise ArgumentTypeError(f"{text!r} must be a whole number of at least 0")
    return int(text)


def amount(text: str) -> float:
    """Return an amount, as "12.50" or "$12.50"."""
    if not re.fullmatch(r"\$?\d{1,12}(\.\d*)?", text):
        raise ArgumentTypeError(f"{text!r} is not an amount; write e.g. 25 or 12.50 (0: no limit)")
    return float(text.removeprefix("$"))


def duration(text: str) -> float:
    """Return seconds: "90m" -> 5400.0."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)([smhd]?)", text)
    if found is None or not float(found[1]):
        raise ArgumentTypeError(f"{text!r} is not a time; write e.g. 90m, 6h or 1d")
    return float(found[1]) * UNITS_S[found[2]]


def seconds(text: str) -> float:
    """Return a finite number of seconds."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds; write e.g. 20 (0: kill at once)")
    return number


def option(text: str) -> tuple[str, Any]:
    """Return key and value: "cpu=4" -> ("cpu", 4); a value that is not JSON is a text."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ArgumentTypeError(f"{text!r} must look like KEY=VALUE, e.g. partition=gpu")
    try:
        return key, json.loads(value, parse_constant=int)  # NaN and Infinity are no JSON: int raises ValueError
    except ValueError:
        return key, value


def word(text: str) -> str:
    """Return the text.   Raise ArgumentTypeError for an empty one, as of "$UNSET"."""
    if not text.strip():
        raise ArgumentTypeError("the value is empty; is a shell variable unset?")
    return text


def secret(text: str) -> str:
    """Return the name of a secret, or PLACE.NAME."""
    if not text.rpartition(".")[2].strip():
        raise ArgumentTypeError(f"{text!r} names no secret; is a variable of this shell unset? Write e.g. --secret aws")
    return text


def place(text: str) -> dict[str, Any]:
    """Return "modal:2:H100,A100" as a place of the run's records (executors/platforms/places.py)."""
    name, _, rest = text.partition(":")
    number, _, gpus = rest.partition(":")
    if not name or (number and not re.fullmatch(r"[1-9]\d*", number)):
        raise ArgumentTypeError(f"{text!r} must look like NAME, NAME:2 or NAME:2:H100,A100")
    found: dict[str, Any] = {"executor": name}
    if number:
        found["count"] = int(number)
    if gpus:
        found["gpu"] = [g for g in gpus.split(",") if g]
    return found


def actors(text: str) -> dict[str, Any]:
    """Return "4", "modal:8" or "modal:8:L4" as a place of actors; 0: no actors from now on."""
    if re.fullmatch(r"\d{1,6}", text, re.ASCII):
        return {"executor": "local", "count": int(text), "actors": True}
    if not re.fullmatch(r"[^\s:,]+:[1-9]\d{0,5}(:[^\s:]+)?", text, re.ASCII) or text[0].isdigit():
        raise ArgumentTypeError(f"{text!r} must look like 4, modal:8 or modal:8:L4")
    return {**place(text), "actors": True}


def count(text: str) -> int:
    """Return a number of parameters: "1.7B" -> 1_700_000_000."""
    scale = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(text[-1:].lower(), 1)
    try:
        number = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e15:
        raise ArgumentTypeError(f"{text!r} is not a number of parameters; write e.g. 50000000, 50M or 1.7B")
    return round(number)
