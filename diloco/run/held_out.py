"""Check before a run begins that held-out prompts can be read and are not training prompts.

    [eval] prompts ─▶ rows ─▶ the columns of the training prompts, and none of these prompts

Not promised: that prompts which differ in a word are different tasks.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from diloco.run.sections import EvalConfig, EvalError
from inner.data.prompts import load_prompts
from inner.settings.flat_names import EVAL, setting_of
from inner.settings.inner import Files, InnerConfig


def check_held_out(config: EvalConfig, inner: InnerConfig, files: Files) -> None:
    """Raise InnerError for held-out prompts that cannot be read, lack a column, or are training prompts."""
    held_out = load_prompts(config.source, files, inner.data, kind=EVAL)
    if inner.data.source is not None:
        training = load_prompts(inner.data.source, files, inner.data)
        if missing := sorted(set(training[0]) - set(held_out[0])):
            setting = setting_of(EVAL, config.source)
            raise EvalError(
                f"{setting} = {config.source!r} has no column {', '.join(missing)}, which the training prompts "
                "have and the reward may ask for. Write it in every line."
            )
        refuse_overlap(training, held_out)


def refuse_overlap(training: Iterable[Mapping[str, Any]], held_out: Iterable[Mapping[str, Any]]) -> None:
    """Raise EvalError for held-out prompts that are training prompts: their rewards would measure memory."""
    known = {_as_text(row["prompt"]) for row in training}
    held_out = list(held_out)
    shared = [row for row in held_out if _as_text(row["prompt"]) in known]
    if shared:
        raise EvalError(
            f"{len(shared)} of the {len(held_out)} prompts of eval.prompts are among the training prompts, the first: "
            f"{_as_text(shared[0]['prompt'])[:80]}. Take them out of one of the two files."
        )


def _as_text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)
