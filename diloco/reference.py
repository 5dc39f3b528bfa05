"""docs/configuration.md, made from the dataclasses that declare the settings.

    RunConfig ──▶ one table per table of a run.toml: key · type · default · sentence      python -m diloco.reference

Not promised: prose. What a setting is for in a larger picture stands in the guides.
"""

import json
import types
import typing
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from diloco.run.config import RunConfig
from inner.settings.tables import Bounds, Table, default_of, field_types, table_class
from inner.settings.trl import HANDED_THROUGH, OWNED
from inner.settings.trl_fields import TRL_FIELDS, TRL_VERSION

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
HEAD = """# Every setting of a run.toml

Made from the code (`python -m diloco.reference`); a test keeps it so. A key that is left out has the default; – means
that there is none, or that it depends on the model. TOML takes dotted keys, too: `sdpo.weight = 0.1` below `[inner]` is
`weight = 0.1` below `[inner.sdpo]`. Paths start at the run.toml. The guides: [channels.md](channels.md),
[operations.md](operations.md).
"""


def reference_page() -> str:
    return "\n".join([HEAD, *(_section(*found) for found in list_tables(RunConfig)), _trl_section()])


def list_tables(cls: type, path: str = "") -> Iterator[tuple[str, type]]:
    """-> (dotted name, class) of this table and of those below it; "" for the top of the file."""
    yield path, cls
    for f in fields(cls):
        if (below := table_class(field_types(cls)[f.name])) is not None:
            yield from list_tables(below, f"{path}.{f.name}" if path else f.name)


def _section(path: str, cls: type) -> str:
    title = f"## `[{path}]`" if path else "## At the top"
    about = f"\n{(cls.__doc__ or '').strip().splitlines()[0]}\n" if path else ""
    rows = [_row(f, field_types(cls)[f.name]) for f in fields(cls) if f.metadata.get("sentence")]
    return "\n".join([title, about, "| key | type | default | |", "|---|---|---|---|", *rows, ""])


def _trl_section() -> str:
    """List the settings that [inner.trl] hands through, and the keys that set the rest in a run."""
    rows = [f"| `{name}` | {TRL_FIELDS[name].replace(' | ', ' or ')} |" for name in HANDED_THROUGH]
    owned: dict[str, list[str]] = {}
    for name, instead in OWNED.items():
        owned.setdefault(instead, []).append(f"`{name}`")
    others = [f"- {instead}: {', '.join(names)}" for instead, names in owned.items()]
    about = f"Handed through to GRPOConfig of TRL {TRL_VERSION}, whose documentation says what each does."
    table = ["| key | type |", "|---|---|", *rows]
    return "\n".join(
        [
            "## `[inner.trl]`",
            "",
            about,
            "",
            *table,
            "",
            "The run sets all others itself. In their place:",
            "",
            *others,
            "",
        ]
    )


def _row(f: Field[Any], hint: Any) -> str:
    default = default_of(f)
    shown = "–" if default is None else f"`{json.dumps(default)}`"
    limits = _limits_text(f.metadata.get("bounds", Bounds()))
    sentence = f.metadata["sentence"].replace("|", "\\|")
    return f"| `{f.name}` | {_type_text(hint)} | {shown} | {sentence}{limits} |"


def _type_text(hint: Any) -> str:
    words = {int: "integer", float: "number", str: "text", bool: "true or false", list: "list", dict: "table"}
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return " or ".join(words[o] for o in options if o is not type(None))


def _limits_text(bounds: Bounds) -> str:
    if bounds.one_of:
        return f" One of {', '.join(f'`{name}`' for name in bounds.one_of)}."
    signs = ((bounds.least, "≥"), (bounds.above, ">"), (bounds.most, "≤"), (bounds.below, "<"))
    found = [f"{sign} {limit:g}" for limit, sign in signs if limit is not None]
    return f" ({', '.join(found)})" if found else ""


def missing_sentences() -> list[str]:
    """Dotted names of settings without a sentence."""
    missing = []
    for path, cls in list_tables(RunConfig):
        for f in fields(cls):
            plain = table_class(field_types(cls)[f.name]) is None and f.name not in ("folder", "gathered", "overrides")
            if plain and not f.metadata.get("sentence", "").strip().endswith((".", ")")):
                missing.append(f"{path}.{f.name}" if path else f.name)
        if issubclass(cls, Table) and not cls.__doc__:
            missing.append(path)
    return missing


if __name__ == "__main__":
    PAGE.write_text(reference_page(), encoding="utf-8")
