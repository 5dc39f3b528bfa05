"""Explain a chat template that is missing or drops the prompt's text: for `check`, checks before a run, the trainer.

Not promised: every fault; we try the template only on the given rows.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from inner.data.prompts import load_prompts
from inner.data.rendering import Message, text_of
from inner.settings.inner import Files, InnerConfig, InnerError
from inner.settings.task import setting_of


def require_template(tokenizer: Any, prompt: str | Sequence[Message]) -> None:
    """Raise InnerError for messages whose tokenizer has no chat template."""
    if not isinstance(prompt, str) and getattr(tokenizer, "chat_template", "") is None:
        raise InnerError(
            "the prompts are messages, and the model's tokenizer has no chat template. Take an -Instruct model, or "
            "write each prompt as text"
        )


def refuse_missing_template(config: InnerConfig, files: Files, folder: Path) -> None:
    """Raise InnerError if the prompts are chats and the tokenizer in the model's folder has no chat template."""
    from inner.models.known import chat_template

    (row,) = load_prompts(config.data.source or "", files, config.data, limit=1)
    if isinstance(row["prompt"], list) and chat_template(folder) is False:
        made_by = "are chats" if config.data.system is None else "become chats by inner.data.system"
        mend = "Set inner.data.task_chat = false" if config.data.task else "Write each prompt as one text"
        mend = mend if config.data.system is None else "Leave inner.data.system out"
        setting = setting_of("prompts", config.data.source)
        raise InnerError(
            f"{setting} = {config.data.source!r} {made_by}, and the tokenizer of {config.model} has no "
            f"chat template. {mend}, or use the -Instruct model."
        )


def template_fault(write: Callable[[Sequence[Message]], str], prompt: Sequence[Message], config: Any) -> str:
    """Return why the prompt's text does not reach the model; "" if it does.   write: `render_text` with a template.

    config: an InnerConfig, for the message."""
    try:
        written = write(prompt)
    except Exception as error:  # a template may refuse with any jinja error
        advice = _advice(write, prompt, config.data.system is not None)
        return f"cannot be written by the chat template of {config.model}: {error}. {advice}"
    newest = next((m for m in reversed(prompt) if m["role"] == "user"), prompt[-1])
    text = str(text_of(newest.get("content") or "")).strip()
    if text in written:
        return ""
    return (
        f"is not what the chat template of {config.model} writes: {text[:60]!r} is left out of {written[-120:]!r}. "
        "Write it as one text, in a message of the role user."
    )


def _advice(write: Callable[[Sequence[Message]], str], prompt: Sequence[Message], is_set: bool) -> str:
    if prompt[0]["role"] == "system":
        with suppress(Exception):
            write(prompt[1:])
            mend = "Leave inner.data.system out" if is_set else "Take the system message out"
            return f"It takes no system message. {mend}, or write its text into the first message of the user."
    return "Write the messages as this model takes them."
