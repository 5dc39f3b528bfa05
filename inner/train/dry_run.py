"""Do a replica's start without weights: all steps before it generates, with the model's shape only.

    config.json ──▶ a model on the meta device (+ adapter) ──▶ GrpoLoop, as a replica builds it
    each prompt ──▶ template, tools, switches ──▶ ids:  at least one · each id known to the model · with the user's text
                                                        · prompt and completion fit the model's positions
    a tool's result ──▶ ids

    parent ── {"inner", "files", "folder", "held_out", "answer"} ──▶ this module ──▶ {"refused", "note"}

The longest prompts come first. After PROMPTS_S the check stops; the note says how many prompts it left out.

Not promised: that generation fits in memory, or that the template accepts an environment's messages, which only a
rollout receives.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from inner.data.prompts import load_prompts
from inner.data.rendering import render_text
from inner.data.template_fault import template_fault
from inner.settings.inner import Files, InnerConfig, InnerError, Seeds
from inner.settings.task import EVAL, setting_of
from inner.usercode.rehearse import ask_child, end_child, read_asked

TIME_S = 120.0
PROMPTS_S = 30.0
LEARNED = re.compile(r"(^|[._])(wpe|embed_positions|position_embeddings?|pos_emb\w*)([._]|$)")
NO_TOOLS = (
    " The run has tools or an environment. Give a model whose chat template has tools, such as Qwen/Qwen3-0.6B, or "
    "take tools and environment out of the run."
)
CALL_HINTS = {
    "not support tool calling": NO_TOOLS,
    "Unrecognized chat template": " It writes calls in a form that neither TRL nor this project reads. Give the "
    "tokenizer a `response_template` and save it into the model's folder, or take another model for tools.",
}
Spelling = str | list[str] | None


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run.   refused: why no replica could train.   note: the checks that were left out."""

    refused: str = ""
    note: str = ""


def dry_run(config: InnerConfig, files: Files, folder: Path, held_out: Spelling = None) -> DryRun:
    """Try a replica's start in a child process.   folder: has the model.   held_out: [eval] prompts, as configured."""
    asked = {"folder": str(folder.absolute()), "held_out": held_out}
    child = ask_child("inner.train.dry_run", config, files, asked, time_s=TIME_S)
    if child.late:
        return DryRun(note=f"not checked: whether replicas can start (trying that took longer than {TIME_S:.0f} s)")
    if child.answer is not None:
        return DryRun(**child.answer)
    last = (child.stderr.strip().splitlines() or [f"exit code {child.code}"])[-1]
    return DryRun(note=f"not checked: whether replicas can start (trying that here ended with {last:.200})")


# -------------------------------------------------------------------- in the child process


def check_start(
    config: InnerConfig,
    files: Files,
    folder: Path,
    held_out: Spelling = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Build the loop without weights and check prompts and tools; return the checks that were left out, or "".

    Raises InnerError for a config that no replica could train."""
    if config.loop == "supervised":
        return ""
    try:
        loop = build_without_weights(config, files, folder)
    except InnerError:
        raise
    except (ValueError, TypeError, AttributeError, KeyError, ImportError) as error:
        hint = next((words for seen, words in CALL_HINTS.items() if seen in str(error)), "")
        raise InnerError(
            f"no replica can start: a model in the shape of {config.model} raised {type(error).__name__}: {error}{hint}"
        ) from error
    except (NotImplementedError, RuntimeError) as error:  # perhaps caused by the meta device, which no replica uses
        return f"not checked: whether replicas can start ({type(error).__name__}: {error!s:.200})"
    until = clock() + PROMPTS_S
    notes = [_check_prompts(config, loop, "prompts", config.data.source, files, lambda: clock() < until)]
    notes += [_check_prompts(config, loop, EVAL, held_out, files, lambda: clock() < until)]
    _check_tools(config, loop)
    return "\n".join(filter(None, notes))


def build_without_weights(config: InnerConfig, files: Files, folder: Path) -> Any:
    """Return a replica's GrpoLoop with weights that have no values."""
    from inner.train.grpo import GrpoLoop
    from inner.train.task import load_task

    model, tokenizer = load_shape(config, folder)
    task = load_task(config, files, models=False)
    return GrpoLoop(config, model, tokenizer, task, Seeds(data=0, noise=0), has_weights=False)


def load_shape(config: InnerConfig, folder: Path) -> tuple[Any, Any]:
    """Return the model on the meta device, with the run's adapter, and the tokenizer.   Raises InnerError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from inner.train.build import refuse_unreadable, with_padding

    with refuse_unreadable(config.model):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder, local_files_only=True), dtype=getattr(torch, config.dtype)
            )
        with suppress(OSError):  # many models have none
            GenerationConfig.from_pretrained(folder, local_files_only=True)
    tokenizer = with_padding(tokenizer, model)
    if config.lora is not None:
        from inner.models.lora import new_adapter

        model = new_adapter(model, config.lora)
    model.to = lambda *_, **__: model  # a meta tensor has no values to move
    return model, tokenizer


def _check_prompts(
    config: InnerConfig, loop: Any, kind: str, source: Spelling, files: Files, may_go_on: Callable[[], bool]
) -> str:
    if source is None:
        return ""
    rows = load_prompts(source, files, config.data, kind=kind)
    if fault := _observation_fault(loop.trainer, rows[0]):
        raise InnerError(f"{setting_of(kind, source)} = {source!r}, prompt 1 {fault}")
    limits = partial(_ids_fault, config, loop.trainer, positions_of(loop.model))
    by_length = sorted(enumerate(rows, 1), key=lambda row: -len(json.dumps(row[1]["prompt"], default=str)))
    for looked_at, (number, row) in enumerate(by_length):
        if not may_go_on():
            left = len(rows) - looked_at
            return f"not checked: {left:,} of {len(rows):,} prompts, the shorter ones ({setting_of(kind, source)})"
        if fault := _prompt_fault(config, loop.trainer, row["prompt"]) or limits(row["prompt"]):
            raise InnerError(f"{setting_of(kind, source)} = {source!r}, prompt {number} {fault}")
    return ""


def _observation_fault(trainer: Any, row: Mapping[str, Any]) -> str:
    """Return why the row's text cannot take the environment's observation; "" if it can, or if that is unknown."""
    if not isinstance(row["prompt"], str) or trainer.environment_factories is None or trainer.tools:
        return ""
    with suppress(Exception):  # `reset` may need things that only a replica has
        if trainer.environment_factories[None]().reset(**deepcopy(dict(row))) is not None:
            return (
                "is a text, but what the environment's `reset` returns is added to a chat. Write messages, set "
                "inner.data.system (which makes messages), or return None."
            )
    return ""


def _prompt_fault(config: InnerConfig, trainer: Any, prompt: Any) -> str:
    """Return why the chat template cannot render the prompt; "" if it can."""
    if isinstance(prompt, str):
        calls = "is a text, and tools are called in chats. Write messages, or set inner.data.system, to make them."
        return calls if trainer.tools else ""
    tokenizer, options = trainer.processing_class, trainer._template_options()
    text_of = lambda prompt: render_text(tokenizer, prompt, tools=trainer._tools_of(None), **options)  # noqa: E731
    return template_fault(text_of, prompt, config)


def _ids_fault(config: InnerConfig, trainer: Any, positions: int | None, prompt: Any) -> str:
    """Return why the model cannot continue the prompt; "" if it can."""
    try:
        ids = trainer._prompt_ids(prompt)
    except Exception as error:  # e.g. a lone UTF-16 surrogate, which tokenizers refuse
        return f"cannot be read by the tokenizer of {config.model}: {type(error).__name__}: {error}"
    known = trainer.model.get_input_embeddings().weight.shape[0]
    completion = config.completion_length
    if not ids:
        return "has no tokens. Write something there."
    if max(ids) >= known:
        return (
            f"has the token {max(ids)}, and the model's embeddings end at {known - 1}. The tokenizer and the weights "
            f"of {config.model} are not of one model; save both together."
        )
    if positions is not None and len(ids) + completion > positions:
        return (
            f"has {len(ids)} tokens, and with inner.sampling.max_completion_length = {completion} they are more than "
            f"the {positions} positions that {config.model} knows. Shorten the prompt, or lower that setting."
        )
    return ""


def positions_of(model: Any) -> int | None:
    """Return the length of the model's table of position embeddings; None if the model computes positions."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    tables = [*model.named_parameters(), *model.named_buffers()]
    has_table = any(LEARNED.search(name) and limit is not None and tensor.shape[0] >= limit for name, tensor in tables)
    return limit if has_table else None


def _check_tools(config: InnerConfig, loop: Any) -> None:
    """Raise InnerError if the chat template cannot render a tool's result after a call."""
    for schema in next(iter(loop.trainer.tool_schemas().values()), [])[:1]:
        try:
            loop.trainer._get_tool_suffix_ids([{"role": "tool", "name": schema["function"]["name"], "content": "1"}])
        except Exception as error:
            raise InnerError(
                f"inner.sampling.environment = {config.sampling.environment!r}: the chat template of {config.model} "
                f"cannot write a tool's result: {error}. Take a model that calls tools."
            ) from error


def main(asked: Mapping[str, Any]) -> None:
    try:
        answer = {"note": check_start(*read_asked(asked), Path(asked["folder"]), asked["held_out"])}
    except InnerError as error:
        answer = {"refused": str(error)}
    Path(asked["answer"]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    end_child()
