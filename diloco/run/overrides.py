"""`--set inner.lr=2e-6`: settings of the command line in place of a run.toml's.

    "inner.lr=2e-6", "inner.model=a/b" ──▶ {"inner.lr": 2e-06, "inner.model": "a/b"} ──▶ the tables, with these settings

If a model's folder is found only from run.toml's folder, it gets its absolute path here.

Not promised: that a setting's type is right; `RunConfig.from_dict` checks it.
"""

import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from diloco.run.sections import ConfigError
from inner import InnerConfig


def read_overrides(texts: Iterable[str], check: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Return dotted name -> value.   check: raises ConfigError for an unknown name.   Raises ConfigError."""
    return dict(_read_override(text, check) for text in texts)


def with_overrides(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables with these settings.   changes: dotted name -> value."""
    return reduce(_with_setting, changes.items(), dict(raw))


def model_beside(inner: InnerConfig, folder: Path) -> InnerConfig:
    """Return [inner] with the absolute path of a model's folder or file that is found only from run.toml's folder."""
    there = folder / os.path.expanduser(inner.model)
    is_beside = there.exists() and not os.path.exists(inner.model)
    return replace(inner, model=str(there.resolve())) if is_beside else inner


def _read_override(text: str, check: Callable[[Mapping[str, Any]], None]) -> tuple[str, Any]:
    """Parse "inner.lr=2e-6" -> ("inner.lr", 2e-06), "inner.model=a/b" -> (…, "a/b").   Raises ConfigError."""
    name, equals, value = (part.strip() for part in text.partition("="))
    try:
        if not (name and equals and value) or "\n" in value:
            raise ValueError("it needs a name, an = and a value")
        found = _read_value(value)
    except ValueError as error:
        raise ConfigError(
            f"--set {text} cannot be read ({error}). Write NAME=VALUE: --set inner.lr=2e-6, --set outer.codec=int8; "
            "lists and tables as TOML has them: --set 'inner.lora={r = 4}'"
        ) from None
    try:
        check(_with_setting({}, (name, found)))
    except ConfigError as error:
        raise ConfigError(f"--set {text}: {error}") from None
    return name, found


def _read_value(value: str) -> Any:
    """Parse a TOML value. Text needs no quotes; its type is checked later.   Raises ValueError."""
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        if value[0] in "[{\"'":
            raise
        return value


def _with_setting(raw: Mapping[str, Any], change: tuple[str, Any]) -> dict[str, Any]:
    """Return the tables with one more setting.   change: (dotted name, value)."""
    name, value = change
    key, _, rest = name.partition(".")
    below = raw.get(key)
    table = below if isinstance(below, Mapping) else {}
    return {**raw, key: _with_setting(table, (rest, value)) if rest else value}
