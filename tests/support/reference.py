"""docs/configuration.md, made from the dataclasses that declare the settings.

    RunConfig ──▶ one table per table of a run.toml: key · type · default · mark · sentence
    python -m tests.support.reference writes it
    FIRST_RUN (keys that `diloco init` writes), TUNING ──▶ mark; a key in neither is for experts

Not promised: explanations. The guides explain how to use the settings.
"""

import json
import types
import typing
from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any

from diloco.run.config import RunConfig
from inner.settings.tables import Bounds, Table, default_of, field_types, table_class
from inner.settings.trl import HANDED_THROUGH, OWNED
from inner.settings.trl_fields import TRL_FIELDS, TRL_VERSION
from tests.support.site_pages import DOCS

PAGE = DOCS / "configuration.md"
HEAD = """# Every setting of a run.toml

The command `python -m tests.support.reference` makes this page from the code. A key that you leave out has its default.
A dash (–) means no default, or a default that depends on the model. TOML takes dotted keys: `sdpo.weight = 0.1`
below `[inner]` is `weight = 0.1` below `[inner.sdpo]`. Paths are relative to the folder of run.toml. The guides are
[channels.md](channels.md) and [operations.md](operations.md).

Each key has a mark. *First run*: `diloco init` writes it. *Tuning*: it may make a run that works better, cheaper or
larger. *Expert*: leave it out, unless a page or a message of this project names it.

## First run
"""
FIRST_RUN = (
    "name", "fleet.replicas", "fleet.steps", "outer.sync_every", "inner.model", "inner.batch_size", "inner.lr",
    "inner.lora.r", "inner.lora.alpha", "inner.data.prompts", "inner.rewards.function",
    "inner.sampling.num_generations", "inner.sampling.max_completion_length", "eval.prompts", "eval.every",
)  # fmt: skip
TUNING = (
    "seed", "outer.lr", "outer.momentum", "outer.codec", "outer.snapshot_every", "outer.sync_seconds", "inner.loop",
    "inner.dtype", "inner.autocast", "inner.optimizer", "inner.weight_decay", "inner.max_grad_norm",
    "inner.gradient_accumulation_steps", "inner.gradient_checkpointing", "inner.trl", "inner.schedule.lr_shape",
    "inner.schedule.lr_warmup", "inner.schedule.lr_steps", "inner.schedule.lr_end", "inner.schedule.lr_replicas",
    "inner.lora.targets", "inner.lora.dropout", "inner.data.columns", "inner.data.system", "inner.data.task",
    "inner.data.task_options", "inner.data.task_size", "inner.data.text", "inner.data.context_length",
    "inner.rewards.functions", "inner.rewards.timeout_s", "inner.rewards.retries", "inner.sampling.temperature",
    "inner.sampling.environment", "inner.sampling.max_tool_calling_iterations", "inner.sampling.tool_workers",
    "inner.sampling.tool_timeout_s", "inner.sampling.environment_timeout_s", "inner.sampling.boxes",
    "inner.grpo.objective", "inner.grpo.dynamic_sampling", "inner.sdpo.weight", "inner.sdpo.context",
    "inner.replay.weight", "inner.replay.pairs", "inner.process.weight", "inner.process.function", "inner.vllm.memory",
    "inner.vllm.max_model_length", "inner.vllm.sleep", "fleet.min_replicas", "fleet.keep", "fleet.log_rollouts",
    "log.to", "log.project", "eval.task", "eval.task_size", "eval.samples",
)  # fmt: skip


def reference_page() -> str:
    return "\n".join([HEAD, _first_run(), *(_section(*found) for found in list_tables(RunConfig)), _trl_section()])


def mark_of(name: str) -> str:
    return "first run" if name in FIRST_RUN else "tuning" if name in TUNING else "expert"


def list_keys() -> Iterator[tuple[str, Field[Any]]]:
    """Yield (dotted name, declaration) of each setting with a sentence, in the page's order."""
    for path, cls in list_tables(RunConfig):
        for f in fields(cls):
            if f.metadata.get("sentence"):
                yield f"{path}.{f.name}" if path else f.name, f


def _first_run() -> str:
    found = dict(list_keys())
    rows = [f"| `{name}` | {_default_text(found[name])} | {_sentence(found[name])} |" for name in FIRST_RUN]
    return "\n".join(["| key | default | |", "|---|---|---|", *rows, ""])


def list_tables(cls: type, path: str = "") -> Iterator[tuple[str, type]]:
    """Yield (dotted name, class) of this table and of its subtables; "" for the top of the file."""
    yield path, cls
    for f in fields(cls):
        if (below := table_class(field_types(cls)[f.name])) is not None:
            yield from list_tables(below, f"{path}.{f.name}" if path else f.name)


def _section(path: str, cls: type) -> str:
    title = f"## `[{path}]`" if path else "## At the top"
    about = f"\n{(cls.__doc__ or '').strip().splitlines()[0]}\n" if path else ""
    keys = [f for f in fields(cls) if f.metadata.get("sentence")]
    rows = [_row(f, field_types(cls)[f.name], mark_of(f"{path}.{f.name}" if path else f.name)) for f in keys]
    return "\n".join([title, about, "| key | type | default | mark | |", "|---|---|---|---|---|", *rows, ""])


def _trl_section() -> str:
    """List the settings that [inner.trl] passes to TRL, and the keys that set TRL's other settings."""
    rows = [f"| `{name}` | {TRL_FIELDS[name].replace(' | ', ' or ')} |" for name in HANDED_THROUGH]
    owned: dict[str, list[str]] = {}
    for name, instead in OWNED.items():
        owned.setdefault(instead, []).append(f"`{name}`")
    others = [f"- {_instead(key)}: {', '.join(names)}" for key, names in owned.items()]
    about = f"The run passes these to GRPOConfig of TRL {TRL_VERSION}. TRL's documentation explains them."
    table = ["| key | type |", "|---|---|", *rows]
    return "\n".join(
        [
            "## `[inner.trl]`",
            "",
            about,
            "",
            *table,
            "",
            "The run sets TRL's other settings itself. Use these keys in their place:",
            "",
            *others,
            "",
        ]
    )


def _instead(key: str) -> str:
    """Convert "nothing: the run trains" -> "no key (the run trains)"."""
    nothing, _, why = key.partition("nothing: ")
    return key if nothing else f"no key ({why})"


def _row(f: Field[Any], hint: Any, mark: str) -> str:
    limits = _limits_text(f.metadata.get("bounds", Bounds()))
    return f"| `{f.name}` | {_type_text(hint)} | {_default_text(f)} | {mark} | {_sentence(f)}{limits} |"


def _default_text(f: Field[Any]) -> str:
    default = default_of(f)
    return "–" if default is None else f"`{json.dumps(default)}`"


def _sentence(f: Field[Any]) -> str:
    return f.metadata["sentence"].replace("|", "\\|")


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
    """Return the dotted names of settings that have no description."""
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
