"""Make one file, which the run stores, from prompts in several files, Hub datasets or a task; and from the modules
beside the user's code that it imports.

    prompts = ["hub:openai/gsm8k/main:train", "more.jsonl"]          [eval] prompts = "hub:openai/gsm8k/main:test"
        │ read, checked row by row                                       │
        ▼                                                                ▼
    ~/.cache/diloco/data/<digest>/prompts.jsonl                      …/eval.jsonl
    RunConfig: "hub:openai/gsm8k@<commit>/main:train", and the path of that file

A replica reads the run's file, and needs neither the Hub nor a token; so all replicas read the same bytes.  The
file's digest is part of the run; it depends only on the rows.

`check_held_out`: before a run begins, [eval]'s prompts can be read, and are not training prompts.

Not promised: a dataset that does not fit into this machine's memory; that prompts which differ in a word are different
tasks.
"""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, time
from decimal import Decimal
from hashlib import sha256
from math import sqrt
from pathlib import Path
from typing import Any

from diloco.run.config import ConfigError, RunConfig
from diloco.run.sections import EvalConfig, EvalError
from diloco.run.sibling_modules import find_siblings, join_siblings, zip_modules
from inner.data.faults import answered_words
from inner.data.hub_data import PREFIX, HubDataset, pin_dataset, read_dataset
from inner.data.prompts import Numbered, check_rows, load_prompts, read_rows
from inner.errors import InnerError
from inner.settings.inner import Files, InnerConfig
from inner.settings.task import EVAL, MODULES, DataSettings, is_code, is_one_file, setting_of
from inner.tasks.make import make_rows
from inner.tasks.spec import HARBOR, TaskSpec
from inner.usercode.reward_model import pin_reward_model

BOX_WORLD = """from inner.extras.boxes.world import harbor_environment

Harbor = harbor_environment("{provider}")
"""
MOST_NAMED = 8  # modules in the line that says what a run carries
SPLITS = {"prompts": "train", EVAL: "test"}  # the default splits


def gather_data(config: RunConfig, say: Callable[[str], None] = lambda text: None) -> RunConfig:
    """Write all rows to files on this machine's disk. Return the config with pinned datasets and reward models.

    Raises ConfigError for rows that cannot be read."""
    inner, evaluation = _pin_reward_models(config.inner), config.eval
    boxes = inner.sampling.boxes
    config = replace(config, inner=inner)
    if inner.data.task is not None:
        path = _gather_task("prompts", inner.data.task_spec, inner.data, say, folder=config.folder, boxes=boxes)
        config = replace(config, gathered={**config.gathered, "prompts": path})
    elif inner.data.prompts is not None and not is_one_file(inner.data.prompts):
        prompts, path = gather_rows("prompts", inner.data.prompts, config.folder, inner.data, say)
        inner = replace(inner, data=replace(inner.data, prompts=prompts))
        config = replace(config, inner=inner, gathered={**config.gathered, "prompts": path})
    if evaluation is not None and evaluation.task is not None:
        spec, known = evaluation.task_spec(inner), _training_prompts(config)
        path = _gather_task(EVAL, spec, inner.data, say, known=known, folder=config.folder, boxes=boxes)
        config = replace(config, gathered={**config.gathered, EVAL: path})
    elif evaluation is not None and not is_one_file(evaluation.prompts):
        prompts, path = gather_rows(EVAL, evaluation.prompts, config.folder, inner.data, say)
        config = replace(config, eval=replace(evaluation, prompts=prompts), gathered={**config.gathered, EVAL: path})
    config = _with_environment(config)
    if inner.data.task is not None:
        from diloco.run.task_agents import with_agent

        config = with_agent(config, _write_once, say)
    return _gather_modules(config, say)


def _with_environment(config: RunConfig) -> RunConfig:
    """Return the config with an environment for Harbor tasks, a file that the run carries, if it names only boxes."""
    sampling = config.inner.sampling
    if sampling.boxes is None or sampling.environment is not None:
        return config
    path = _write_once("environment", BOX_WORLD.format(provider=sampling.boxes).encode(), "py")
    inner = replace(config.inner, sampling=replace(sampling, environment=f"{path.name}:Harbor"))
    return replace(config, inner=inner, gathered={**config.gathered, "environment": path})


def _gather_modules(config: RunConfig, say: Callable[[str], None]) -> RunConfig:
    """Return the config with a .zip of the modules beside the user's code that this code imports, if any."""
    paths = [config.path_of(kind, name) for kind, name in config.inner.named_files.items() if is_code(kind)]
    if not (modules := join_siblings({path: find_siblings(path) for path in paths if path.is_file()})):
        return config
    names = sorted(modules)
    shown = names if len(names) <= MOST_NAMED else [*names[:3], f"{len(names) - 3} more modules"]
    say(f"the run carries {', '.join(shown)}, too, which its code imports")
    path = _write_once(MODULES, zip_modules(modules), "zip")
    return replace(config, gathered={**config.gathered, MODULES: path})


def _pin_reward_models(inner: InnerConfig) -> InnerConfig:
    try:
        pinned = {spelling: pin_reward_model(spelling) for spelling in inner.rewards.models.values()}
    except InnerError as error:
        raise ConfigError(str(error)) from error
    functions = {pinned.get(spelling, spelling): weight for spelling, weight in inner.rewards.functions.items()}
    return replace(inner, rewards=replace(inner.rewards, functions=functions)) if pinned else inner


def gather_rows(
    kind: str, spelling: str | list[str], folder: Path, data: DataSettings, say: Callable[[str], None]
) -> tuple[str | list[str], Path]:
    """Write all rows, unchanged, into one .jsonl. Return the prompts setting with commits filled in, and its path.

    folder: the base of relative paths.
    """
    pinned = list[str]()
    rows = list[Any]()
    first: dict[str, Any] | None = None
    for one in [spelling] if isinstance(spelling, str) else spelling:
        try:
            name, numbered = _open_source(kind, one, folder)
            if one.startswith(PREFIX):
                say(f"{setting_of(kind)}: reads {name}")
            what = f"{setting_of(kind)} = {name!r}"
            found = list(numbered)
            checked = check_rows(what, found, data, first)
            rows += [_as_json(what, *row) for row in found]
        except InnerError as error:
            raise ConfigError(str(error)) from error
        first = first or checked[0]
        pinned.append(name)
    return pinned[0] if isinstance(spelling, str) else pinned, _write_once(kind, "".join(rows).encode())


def _gather_task(
    kind: str,
    spec: TaskSpec,
    data: DataSettings,
    say: Callable[[str], None],
    known: Sequence[Any] = (),
    folder: Path = Path(),
    boxes: str | None = None,
) -> Path:
    """Write a .jsonl of the task's rows, except prompts in `known`, and return its path."""
    setting = setting_of(kind, spec.task)
    if spec.package == HARBOR and not boxes:
        raise ConfigError(f'{setting} = {spec.task!r} runs in boxes. Set, e.g., inner.sampling.boxes = "local"')
    from inner.tasks.installed import refuse_absent

    try:
        refuse_absent(setting, spec.task)
        say(f"{setting}: makes {spec.size:,} rows of {spec.task}, seed {spec.seed}")
        made = make_rows(setting, spec, chat=data.task_chat, known=known, folder=folder)
    except InnerError as error:
        raise ConfigError(str(error)) from error
    if made.left_out:
        say(f"{setting}: {made.left_out:,} rows that are among the training prompts were left out")
    if len(made.rows) < spec.size:
        say(f"{setting}: there are {len(made.rows):,} rows; {setting}_size = {spec.size}")
    return _write_once(kind, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made.rows).encode())


def _training_prompts(config: RunConfig) -> list[Any]:
    """Return the training rows' prompts, and a task's entries."""
    data = config.inner.data
    if data.source is None:
        return []
    try:
        rows = load_prompts(data.source, {"prompts": config.path_of("prompts", data.source)}, data)
        return [row[name] for name in ("prompt", "entry") for row in rows if name in row]
    except InnerError as error:
        raise ConfigError(str(error)) from error


def _open_source(kind: str, spelling: str, folder: Path) -> tuple[str, Iterator[Numbered]]:
    """Return the source's name (with the commit, for the Hub) and its rows."""
    setting = setting_of(kind)
    if not spelling.startswith(PREFIX):
        return spelling, read_rows(f"{setting} = {spelling!r}", folder / spelling)
    named = HubDataset.parse(spelling, setting)
    dataset = pin_dataset(named if named.split else replace(named, split=SPLITS[kind]), setting)
    return str(dataset), read_dataset(dataset, setting)


def _as_json(what: str, where: str, row: Any) -> str:
    def as_text(value: Any) -> str:
        if isinstance(value, date | time | Decimal):
            return str(value)
        raise InnerError(
            f"{what}, {where} holds a {type(value).__name__}, which no reward could read from the run. Save the "
            "dataset without that column, for example as Parquet, and name the file."
        )

    text = json.dumps(row, ensure_ascii=False, default=as_text)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate: JSON can escape it, UTF-8 cannot encode it
        text = json.dumps(row, default=as_text)
    return text + "\n"


def _write_once(kind: str, body: bytes, ending: str = "jsonl") -> Path:
    """Write these bytes into this user's cache, which is never cleaned, and return the path."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base / "diloco" / "data" / sha256(body).hexdigest()[:32] / f"{kind}.{ending}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # removed with its file if the disk is full
            unfinished = Path(folder, path.name)
            unfinished.write_bytes(body)
            os.replace(unfinished, path)
    except OSError as error:
        raise ConfigError(
            f"{setting_of(kind)}: its rows ({len(body):,} bytes) cannot be kept in {path.parent}: {error}. Free some "
            "space, or set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return path


def check_held_out(config: EvalConfig, inner: InnerConfig, files: Files) -> str:
    """Return warnings about copies among the held-out prompts, and about prompts with an answer in them, or "".

    Raises InnerError for prompts that cannot be read, lack a column, or are training prompts."""
    held_out, same = load_prompts(config.source, files, inner.data, kind=EVAL), 0
    if inner.data.source is not None:
        training = load_prompts(inner.data.source, files, inner.data)
        if missing := sorted(set(training[0]) - set(held_out[0])):
            setting = setting_of(EVAL, config.source)
            raise EvalError(
                f"{setting} = {config.source!r} has no column {', '.join(missing)}, which the training prompts "
                "have and the reward may ask for. Write it in every line."
            )
        refuse_overlap(training, held_out, columns=_acts(inner))
        asked = {_as_text(row["prompt"]) for row in training}
        same = sum(_as_text(row["prompt"]) in asked for row in held_out)
    copies = _copies_in_words([_text_of(row, columns=_acts(inner)) for row in held_out])
    answered = answered_words(setting_of(EVAL, config.source), [row["prompt"] for row in held_out])
    shared = f"warning: {same} of the {len(held_out)} prompts of [eval] are training prompts in rows with other columns"
    return "\n".join(filter(None, [shared if same else "", copies, answered]))


def _copies_in_words(texts: Sequence[str]) -> str:
    """Return a warning if some of the held-out prompts are equal; else ""."""
    if len(different := set(texts)) == len(texts):
        return ""
    times = sqrt(sum(count**2 for count in Counter(texts).values()) / len(texts))
    return (
        f"warning: of the {len(texts)} prompts of [eval], only {len(different)} are different. Each copy counts as a "
        f"prompt of its own, so the standard error is shown up to {times:.1f} times too small. Take the copies out."
    )


def _acts(inner: InnerConfig) -> bool:
    """Whether other columns than the prompt decide what a rollout meets: games may all have one prompt."""
    sampling = inner.sampling
    return bool(sampling.environment or sampling.boxes or sampling.agent) or inner.model == "toolworld"


def _text_of(row: Mapping[str, Any], *, columns: bool) -> str:
    return _as_text(row["prompt"]) + (str(sorted(row.items())) if columns else "")


def refuse_overlap(
    training: Iterable[Mapping[str, Any]], held_out: Iterable[Mapping[str, Any]], *, columns: bool = False
) -> None:
    """Raise EvalError for held-out prompts that are training prompts: their rewards would measure memory.

    columns: rows are the same if all columns are."""
    known = {_text_of(row, columns=columns) for row in training}
    held_out = list(held_out)
    shared = [row for row in held_out if _text_of(row, columns=columns) in known]
    if shared:
        raise EvalError(
            f"{len(shared)} of the {len(held_out)} prompts of eval.prompts are among the training prompts, the first: "
            f"{_as_text(shared[0]['prompt'])[:80]}. Take them out of one of the two files."
        )


def _as_text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)
