"""Build the arguments of a reward's call, and explain why a call fails or all answers get the same reward.

    row ─▶ candidates: every other column's value (one may be the answer) · an empty text
        ─▶ reward(prompts, completions, completion_ids, …, columns)        completions: texts, or lists of messages
             ├─ its signature does not take these    ─▶ `call_fault` names the likely argument
             └─ one value for all completions        ─▶ `sameness` calls it with another form of the arguments. If
                                                        values then differ, the form is the likely cause

Not promised: that the likely cause is the true cause; we do not read the reward's source.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from inner.errors import InnerError

OF_A_TASK = ("task", "entry")  # columns of a task that only its scorer reads
OURS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
Row = Mapping[str, Any]


class _StartState:
    """TRL's TrainerState before a run. Other fields than these two need transformers, whose import takes seconds."""

    global_step = 0
    max_steps = 10**9

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        from transformers import TrainerState

        return getattr(TrainerState(max_steps=self.max_steps), name)


START = _StartState()
Rewards = Sequence[tuple[Callable[..., Any], float]]


def candidates(row: Row) -> list[tuple[str, str]]:
    """Return (column, its value as text) for each column that could be an answer, then ("empty", "")."""
    named = [(name, value) for name, value in row.items() if name != "prompt" and name not in OF_A_TASK]
    return [*((name, str(value)) for name, value in named if isinstance(value, str | int | float)), ("empty", "")]


def call_of(
    row: Row, texts: Sequence[str], ids: Sequence[Sequence[int]], *, chat: bool | None = None
) -> dict[str, Any]:
    """Return the keyword arguments that TRL would pass for some completions of one prompt.

    chat: whether completions are messages. Default: as in the prompt.
    """
    chat = isinstance(row["prompt"], list) if chat is None else chat
    columns = {name: [value] * len(texts) for name, value in row.items() if name != "prompt"}
    completions: list[Any] = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
    nothing = {"trainer_state": START, "log_extra": lambda column, values: None, "log_metric": lambda name, value: None}
    fixed = {"prompts": [row["prompt"]] * len(texts), "completions": completions, "completion_ids": list(ids)}
    return {**fixed, **nothing, **columns}


def weighted_sum(rewards: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the weighted sum of the rewards that are not None, as TRL adds them; None if all that count are None."""
    known = [weight * reward for reward, weight in zip(rewards, weights, strict=True) if weight and reward is not None]
    return sum(known) if known else None


# -------------------------------------------------------------------- a call that fails


def call_fault(function: Callable[..., Any], call: Row) -> str:
    """Return why the function does not take these arguments, and a signature that would; "" if it takes them."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a C function has no signature
        return ""
    try:
        signature.bind(**call)
    except TypeError as error:
        parameters = signature.parameters.values()
        faults = [*_missing_words(parameters, call), *_extra_words(parameters, call)] or [str(error)]
        name = getattr(function, "__name__", "reward")
        code = getattr(inspect.unwrap(function), "__code__", None)
        line = f"line {code.co_firstlineno} as " if code is not None else ""
        head = f"`def {name}({_head(parameters, call)}):`"
        return f"{'; '.join(faults)}.\n  next: write {line}{head}; {_batch_words(call)}"
    return ""


def _named(parameters: Any) -> list[str]:
    return [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name != "self"]


def _meant(name: str, call: Row) -> str:
    """Return the argument that was probably meant by this name; "" if none is similar."""
    columns = [key for key in call if key not in OURS]
    return next(iter(get_close_matches(name, [*columns, "completions", "prompts"], n=1, cutoff=0.7)), "")


def _missing_words(parameters: Any, call: Row) -> Iterator[str]:
    for p in parameters:
        if p.name in call or p.name not in _named([p]) or p.default is not p.empty:
            continue
        if f"{p.name}s" in ("completions", "prompts"):
            yield f"it asks for one {p.name!r}, and is called once with all {p.name}s of a batch, a list"
            continue
        columns = ", ".join(repr(key) for key in call if key not in OURS)
        guess = f"did you mean {meant!r}?" if (meant := _meant(p.name, call)) else f"they have {columns or 'no other'}"
        yield f"it asks for {p.name!r}, and the prompts have no column of that name; {guess}"


def _extra_words(parameters: Any, call: Row) -> Iterator[str]:
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        extra = [key for key in call if key not in _named(parameters)]
        yield f"a run also passes {', '.join(extra)}: write **columns as its last argument, which takes them"


def _head(parameters: Any, call: Row) -> str:
    """Return the arguments that the function should have: its own, with corrected names, and **columns."""
    own = [name if name in call else _meant(name, call) for name in _named(parameters)]
    return ", ".join([*dict.fromkeys(["completions", *filter(None, own)]), "**columns"])


def _batch_words(call: Row) -> str:
    of = "a list of messages" if any(isinstance(c, list) for c in call.get("completions", ())) else "a text"
    return f"each argument is a list with one entry per completion, and a completion is {of}"


# -------------------------------------------------------------------- the same reward for all answers


SILENT = "returns None for every completion, so a run with it learns nothing"


def sameness(rewards: Rewards, rows: Sequence[Row]) -> str:
    """Return what is wrong with rewards that give all candidates of these rows the same number; else ""."""
    if len(values := set(_values(rewards, rows))) != 1:
        return ""
    if values == {None}:
        return SILENT
    tried = ", ".join(dict.fromkeys(repr(text) for row in rows for _, text in candidates(row)))
    tried = tried if len(tried) <= 60 else f"{tried[:60]}…"
    words = f"gives each of {tried} the same, {next(iter(values)):g}, and a group of equal rewards teaches nothing"
    return f"{words}. {likeliest_cause(rewards, rows)}".removesuffix(". ")


def _values(rewards: Rewards, rows: Sequence[Row], *, chat: bool | None = None) -> list[float | None]:
    found = list[float | None]()
    for row in rows:
        texts = [text for _, text in candidates(row)]
        call = call_of(row, texts, [[0] * len(text.split()) for text in texts], chat=chat)
        each = zip(*(reward(**call) for reward, _ in rewards), strict=True)
        found += [weighted_sum(one, [weight for _, weight in rewards]) for one in each]
    return found


def likeliest_cause(rewards: Rewards, rows: Sequence[Row]) -> str:
    """Return a sentence (and a space) on the change of form that makes values differ; "" if no change does."""
    chat = isinstance(rows[0]["prompt"], list)
    as_text = [{k: str(v) if isinstance(v, int | float) else v for k, v in row.items()} for row in rows]
    text = 'the text is completion[-1]["content"]' if chat else "use each as it is"
    here = "a list of messages" if chat else "a text"
    forms: list[tuple[str, Sequence[Row], bool]] = [
        (f"It reads a completion as if it were {'a text' if chat else 'messages'}; here it is {here}: {text}",
         rows, not chat),
        ("A column is a number in the file, and an answer is text: compare with str(…) of it", as_text, chat),
    ]  # fmt: skip
    for cause, again, form in forms:
        with suppress(InnerError):  # after an error, the reward is not for that form
            if len(set(_values(rewards, again, chat=form))) > 1:
                return f"{cause}. "
    return ""
