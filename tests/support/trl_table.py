"""Writes inner/settings/trl_fields.py from the installed TRL: python -m tests.support.trl_table"""

import dataclasses
import textwrap
import types
import typing
from collections import defaultdict
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "inner" / "settings" / "trl_fields.py"
HEAD = '''"""Lists the settings of TRL's GRPOConfig with their types; tests/support/trl_table.py writes and checks it.

No torch here.
"""

TRL_VERSION = "{version}"
_BY_TYPE = {{
{rows}
}}  # fmt: skip
TRL_FIELDS: dict[str, str] = {{name: kind for kind, names in _BY_TYPE.items() for name in names}}
'''
PLAIN = {bool: "bool", int: "int", float: "float", str: "str", dict: "dict", list: "list", type(None): "None"}


def table_source() -> str:
    import trl
    from trl.trainer.grpo_config import GRPOConfig

    hints = typing.get_type_hints(GRPOConfig)
    by_type = defaultdict[str, list[str]](list)
    for f in dataclasses.fields(GRPOConfig):
        if f.init:
            by_type[type_text(hints[f.name])].append(f.name)
    rows = "\n".join(f'    "{kind}": (\n{_wrapped(names)}\n    ),' for kind, names in by_type.items())
    return HEAD.format(version=trl.__version__, rows=rows)


def _wrapped(names: list[str]) -> str:
    words = ", ".join(f'"{name}"' for name in names) + ","
    return textwrap.fill(words, 120, initial_indent=" " * 8, subsequent_indent=" " * 8)


def type_text(hint: Any) -> str:
    """ "float | None": the types of a TOML value that this field takes."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) or _is_union(hint) else (hint,)
    names = {_name_of(option) for option in options} - {""}
    return " | ".join(sorted(names, key=lambda name: (name == "None", name)))


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Union


def _name_of(option: Any) -> str:
    origin = typing.get_origin(option)
    if origin is typing.Literal:
        return PLAIN[type(typing.get_args(option)[0])]
    kind = origin or option
    if kind in PLAIN:
        return PLAIN[kind]
    return "str" if isinstance(kind, type) and issubclass(kind, str) else ""


if __name__ == "__main__":
    PAGE.write_text(table_source(), encoding="utf-8")
