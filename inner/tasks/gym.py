"""reasoning-gym: 106 procedural datasets, each with its own scorer.

    row i = create_dataset(name, seed = 1,000,000 · task_seed, size, **options)[i]

The package seeds row i with seed + i, so neighbouring seeds share all rows but one. So our seeds are a million apart.

    entry: the package's whole row as a Python literal, because JSON does not keep tuples, and two datasets score
           differently without tuples
    reply ── the last <answer>…</answer>, else the whole reply ──▶ score_answer(answer, entry)
    composite: datasets = [{name, weight, config}, …]      config: that dataset's options

Not promised: that a row of a composite has another seed than each row of its datasets alone.
"""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from difflib import get_close_matches
from typing import Any

from inner.errors import InnerError
from inner.tasks.spec import TaskSpec

SPREAD = 1_000_000  # distance between the package seeds of two task seeds
FURTHER = 10  # make at most this many times the size in rows, because some may be left out
GALLERY = "https://github.com/open-thought/reasoning-gym/blob/main/GALLERY.md"
OURS = {"seed": "task_seed", "size": "task_size"}


def make_rows(spec: TaskSpec) -> Iterator[dict[str, Any]]:
    """Yield the dataset's rows, also beyond spec.size if the dataset has more.   Raises InnerError."""
    dataset = _open_dataset(spec)
    for index in range(FURTHER * spec.size):
        try:
            found = dataset[index]
        except Exception as error:
            if isinstance(error, IndexError) and index >= spec.size:
                return
            raise InnerError(f"row {index} cannot be made: {_words(error)}. Change the task's options.") from error
        prompt = [{"role": "user", "content": found["question"]}]
        yield {"prompt": prompt, "answer": found["answer"], "entry": as_literal(found)}


def open_scorer(spec: TaskSpec) -> Callable[[Sequence[str], Sequence[str]], list[float]]:
    """Return a function (replies, entries) -> one score each."""
    from reasoning_gym.utils import extract_answer  # pyright: ignore[reportMissingImports]

    dataset = _open_dataset(spec)

    def score_one(reply: str, entry: str) -> float:
        answer = extract_answer(reply)
        try:
            return float(dataset.score_answer(reply.strip() if answer is None else answer, ast.literal_eval(entry)))
        except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, SyntaxError):
            return 0.0  # some scorers fail on a reply without a number

    return lambda replies, entries: [score_one(*both) for both in zip(replies, entries, strict=True)]


def as_literal(value: Any) -> str:
    """Return text for ast.literal_eval; numpy's strings and numbers become Python's.   Raises InnerError."""
    text = repr(_plain(value))
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise InnerError(f"its rows have values that are no literals: {text[:80]}. Choose another dataset.") from error
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value)) if type(value) in (tuple, list) else tuple(map(_plain, value))
    if isinstance(value, str):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _open_dataset(spec: TaskSpec) -> Any:
    import reasoning_gym  # pyright: ignore[reportMissingImports]
    from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]

    options = _checked_options(spec, DATASETS[_known(spec.name)][1])
    try:
        if spec.name == "composite":
            parts: list[Any] = [{"name": one} if isinstance(one, str) else one for one in options.get("datasets", ())]
            options["datasets"] = [_composed(spec, **part) for part in parts]
        return reasoning_gym.create_dataset(spec.name, seed=SPREAD * spec.seed, size=spec.size, **options)
    except InnerError:
        raise
    except Exception as error:
        raise InnerError(f"{spec.name} refuses these options: {_words(error)}. Correct them: {options}.") from error


def _known(name: str) -> str:
    from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]

    if name in DATASETS:
        return name
    near = get_close_matches(name, DATASETS, n=1)
    guess = f"did you mean reasoning-gym:{near[0]}?" if near else f"choose one of its {len(DATASETS)}: {GALLERY}"
    raise InnerError(f"reasoning-gym has no dataset {name!r}; {guess}")


def _composed(spec: TaskSpec, name: str, weight: float = 1.0, config: Mapping[str, Any] | None = None) -> Any:
    """Return a composite's dataset, as an object of the package.   Raises InnerError for a wrong name or option."""
    from reasoning_gym.composite import DatasetSpec  # pyright: ignore[reportMissingImports]
    from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]

    part = replace(spec, task=f"{spec.package}:{name}", options=config or {})
    return DatasetSpec(name, weight, _checked_options(part, DATASETS[_known(name)][1]))


def _checked_options(spec: TaskSpec, config: type) -> dict[str, Any]:
    """Check the task's options. TOML has no tuples, so a list becomes a tuple if the default is one."""
    known = {f.name: f for f in fields(config)}
    for name in spec.options:
        if name in OURS:
            raise InnerError(f"task_options.{name} is set by the run. Write {OURS[name]} beside the task.")
        if name not in known:
            own = sorted(known.keys() - OURS.keys())
            near = get_close_matches(name, own, n=1)
            guess = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(own)}"
            raise InnerError(f"{spec.name} has no option {name!r}; {guess}")
    are_tuples = {name for name, f in known.items() if _is_tuple(f)}
    return {name: tuple(v) if name in are_tuples and isinstance(v, list) else v for name, v in spec.options.items()}


def _is_tuple(f: Any) -> bool:
    default = f.default_factory() if f.default_factory is not MISSING else f.default
    return isinstance(default, tuple)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".: ")
