"""Call the user's reward on the first prompts as a run does, with the model's own tokenizer (`diloco check`).

    row ── chat template, tokenizer ──▶ prompt, its tokens
     └── completions: every other column's value (one may be the answer) · the caller's own · an empty text
               └──▶ reward(prompts, completions, completion_ids, columns) ──▶ numbers

    parent ── {"inner", "files", "rows", "given", "answer"} ──▶ this module ──▶ {"trials"} or {"refused"}

This module runs in a child process, as in rehearse.py: the user's code may hang, exit, or crash.  Prints go to stderr.

Not promised: a trial of an environment's tools, whose state only a rollout has; the same result for other prompts.
"""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from inner.data.faults import HALF, answered_words
from inner.data.rendering import prompt_ids, render_text, text_of
from inner.data.template_fault import require_template, template_fault
from inner.models.known import folder_or_refusal, refuse_adapter, require_tokenizer
from inner.models.naming import is_gguf_file
from inner.printable import first_line
from inner.settings.inner import Files, InnerConfig, InnerError
from inner.settings.task import setting_of
from inner.usercode.apart import take_notes
from inner.usercode.rehearse import ask_child, end_child, read_asked
from inner.usercode.reward_form import call_of, candidates, likeliest_cause, weighted_sum

MOST_PROMPTS = 1000  # at most so many prompts whose lengths are measured
TIME_S = 120.0


@dataclass(frozen=True)
class TriedCompletion:
    """One result.   source: a column of the row, "given" or "empty".   reward: None if it cannot be judged."""

    source: str
    completion: str
    reward: float | None


@dataclass(frozen=True)
class PromptTrial:
    """Results for one prompt.   prompt: the last message's text."""

    prompt: str
    scored: tuple[TriedCompletion, ...]


@dataclass(frozen=True)
class Trial:
    """All results.   tokens: lengths of the shortest and the longest prompt.   seconds: time of all the reward's calls.

    template: whether the chat template wrote the prompts; else they are plain text.
    cause: if the reward is the same for everything, the likely cause, as text.
    cut: text about answers that are longer than a completion may be.   answered: text about prompts with an answer.
    """

    prompts: int
    tokens: tuple[int, int]
    template: bool
    seconds: float
    trials: tuple[PromptTrial, ...]
    cause: str = ""
    cut: str = ""
    answered: str = ""

    @property
    def rewards(self) -> list[float | None]:
        return [scored.reward for trial in self.trials for scored in trial.scored]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Trial":
        trials = tuple(
            PromptTrial(t["prompt"], tuple(TriedCompletion(**s) for s in t["scored"])) for t in raw["trials"]
        )
        tokens = (raw["tokens"][0], raw["tokens"][1])
        return cls(**{**raw, "tokens": tokens, "trials": trials})


def try_reward(
    config: InnerConfig,
    files: Files,
    *,
    rows: int = 3,
    given: Sequence[str] = (),
    time_s: float = TIME_S,
    steps: int | None = None,
) -> Trial:
    """Call the reward on the first `rows` prompts in a child process.  Raises InnerError if that is not possible.

    steps: inner steps of the run."""
    if config.sampling.environment is not None:
        raise InnerError(
            "inner.sampling.environment is set, and an environment's state cannot be made without a rollout: "
            "`diloco plan` builds it and checks its tools; `diloco train` with --steps 1 tries it"
        )
    if config.sampling.agent is not None:
        raise InnerError(
            "inner.sampling.agent is set, and an agent needs the model for its reward: `diloco train` with --steps 1 "
            "tries it"
        )
    if not (config.rewards.named or config.scoring_task) or config.data.source is None:
        raise InnerError(
            "this check needs a reward function (not only a reward model) and prompts: set "
            "inner.rewards.function and inner.data.prompts, or inner.data.task"
        )
    code = config.own_code or config.scoring_task
    path = Path(config.model)
    if path.is_dir():
        refuse_adapter(path, f"inner.model = {config.model!r}")
        require_tokenizer(path, f"inner.model = {config.model!r}")
    is_here = path.is_dir() or (is_gguf_file(config.model) and path.exists())
    found = path if is_here else folder_or_refusal(config)
    model = config.model if found is None else str(found.absolute())
    asked = {"rows": rows, "given": list(given), "steps": steps}
    child = ask_child("inner.usercode.trial", replace(config, model=model), files, asked, time_s=time_s, prints=True)
    if child.late:
        raise InnerError(f"{code} and the tokenizer took longer than {time_s:.0f} s; find the call that it waits for")
    if (answer := child.answer) is None:
        raise InnerError(f"{code} ended its process with exit code {child.code}; take the exit out")
    if "refused" in answer:
        raise InnerError(answer["refused"])
    return Trial.from_dict(answer)


# -------------------------------------------------------------------- in the child process


def run_trial(config: InnerConfig, files: Files, *, rows: int, given: Sequence[str]) -> Trial:
    from inner.data.prompts import load_prompts
    from inner.tasks.score import score_replies
    from inner.usercode.userfiles import weighted_rewards

    rewards = weighted_rewards(config, files) if config.scoring_task is None else [(score_replies, 1.0)]
    prompts = load_prompts(config.data.source or "", files, config.data)
    tokenizer = _tokenizer_of(config)
    switches = config.trl.get("chat_template_kwargs") or {}
    switches = json.loads(switches) if isinstance(switches, str) else switches
    write = partial(render_text, tokenizer, **switches)
    for number, row in enumerate(prompts[:MOST_PROMPTS] if tokenizer.chat_template else (), 1):
        if isinstance(row["prompt"], list) and (fault := template_fault(write, row["prompt"], config)):
            raise InnerError(
                f"{setting_of('prompts', config.data.source)} = {config.data.source!r}, prompt {number} {fault}"
            )
    lengths = [count_tokens(tokenizer, row["prompt"], switches) for row in prompts[:MOST_PROMPTS]]
    began = time.perf_counter()
    trials = [_try_row(rewards, tokenizer, row, given) for row in prompts[:rows]]
    seconds = time.perf_counter() - began
    template = any(isinstance(row["prompt"], list) for row in prompts)
    values = {scored.reward for trial in trials for scored in trial.scored}
    cause = likeliest_cause(rewards, prompts[:rows]) if len(values) == 1 else ""
    tokens = (min(lengths), max(lengths))
    cut = cut_answers(trials, prompts, tokenizer, config.completion_length)
    answered = answered_words(setting_of("prompts", config.data.source), [row["prompt"] for row in prompts])
    return Trial(len(prompts), tokens, template, seconds, trials=tuple(trials), cause=cause, cut=cut, answered=answered)


def cut_answers(trials: Sequence[PromptTrial], prompts: Sequence[Mapping[str, Any]], tokenizer: Any, room: int) -> str:
    """Return a warning if some rows' best answers have more than `room` tokens, a completion's limit; else ""."""
    best = [_best_sources(trial) for trial in trials]
    column = next((name for name in best[0] if all(name in sources for sources in best)), None) if best else None
    texts = [str(row[column]) for row in prompts[:MOST_PROMPTS] if column in row] if column is not None else []
    lengths = [len(_ids_of(tokenizer, text)) for text in texts]
    if not (longer := [length for length in lengths if length > room]):
        return ""
    return (
        f"the best answer that was tried, the row's {column}, has more than inner.sampling.max_completion_length = "
        f"{room} tokens in {len(longer)} of {len(lengths)} rows ({max(longer)} at most): training cuts off its end, "
        "and the reward sees only its beginning. Raise the limit, unless a shorter text is worth as much"
    )


def _best_sources(trial: PromptTrial) -> list[str]:
    """Return the columns with the prompt's highest reward, if that is above 0 and above the empty text's reward."""
    known = {scored.source: scored.reward for scored in trial.scored if scored.reward is not None}
    best = max(known.values(), default=0.0)
    columns = [name for name, reward in known.items() if name not in ("empty", "given") and reward == best]
    return columns if best > known.get("empty", -math.inf) else []


def _tokenizer_of(config: InnerConfig) -> Any:
    if config.model != "toolworld":
        return load_tokenizer(config.model, config.revision)
    from inner.worlds.toolworld import ToolWorld

    return ToolWorld(kinds=config.toolworld.kinds, names=config.toolworld.names).tokenizer()


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """Load the run's tokenizer. For a model on the Hub, this reads or downloads only small files."""
    from transformers import AutoTokenizer

    path = Path(name)
    where = (str(path.parent), {"gguf_file": path.name}) if is_gguf_file(name) else (name, {})
    try:
        return AutoTokenizer.from_pretrained(where[0], revision=revision or "main", **where[1])
    except Exception as error:  # OSError, ValueError; others from faulty mirrors of the Hub
        first = first_line(error)
        raise InnerError(f"inner.model = {name!r}: its tokenizer cannot be loaded: {first}. Check the name") from error


def count_tokens(tokenizer: Any, prompt: str | list[dict[str, Any]], options: Mapping[str, Any] | None = None) -> int:
    """Count a prompt's tokens as the model reads it: messages go through the chat template, with `options`."""
    require_template(tokenizer, prompt)
    return len(prompt_ids(tokenizer, prompt, **(options or {})))


def _ids_of(tokenizer: Any, text: str) -> list[int]:
    whole = HALF.sub("\ufffd", text)  # no tokenizer reads half characters
    return tokenizer(whole, add_special_tokens=False)["input_ids"]


def _try_row(
    rewards: Sequence[tuple[Any, float]], tokenizer: Any, row: dict[str, Any], given: Sequence[str]
) -> PromptTrial:
    tried = candidates(row)
    tried[-1:-1] = [("given", text) for text in given]
    texts = [text for _, text in tried]
    asked = call_of(row, texts, [_ids_of(tokenizer, text) for text in texts])
    weights = [weight for _, weight in rewards]
    values = [weighted_sum(of_one, weights) for of_one in zip(*(reward(**asked) for reward, _ in rewards), strict=True)]
    prompt = row["prompt"]
    shown = text_of(prompt[-1].get("content", "")) if isinstance(prompt, list) else prompt
    return PromptTrial(str(shown), tuple(TriedCompletion(*t, v) for t, v in zip(tried, values, strict=True)))


def main(asked: Mapping[str, Any]) -> None:
    try:
        found = asdict(run_trial(*read_asked(asked), rows=asked["rows"], given=asked["given"]))
    except InnerError as error:
        found = {"refused": str(error)}
    except KeyboardInterrupt:
        found = {"refused": "the trial was interrupted: KeyboardInterrupt, from the keyboard or raised by your code"}
    except Exception as error:  # an error outside the user's code, because a reward's errors are InnerErrors
        found = {"refused": f"the trial ended with {type(error).__name__}: {error}"}
    for note in take_notes():
        print(f"warning: {note}", file=sys.stderr)
    Path(asked["answer"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    end_child()
