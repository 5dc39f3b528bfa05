"""A prompt as a text model reads it.  Rollouts, [eval], hints, pairs, `check` and pre-flight render here, and nowhere
else.

    messages ── text parts joined ──▶ chat template (tools, switches) ──▶ ids
    a text ──▶ tokenizer ──▶ ids, with one BOS: a text that a template wrote has its own

The row stays as the file has it: a reward sees the parts.

Not promised: images and sound.  No torch here.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from inner.errors import InnerError

Message = Mapping[str, Any]


def text_of(content: Any) -> Any:
    """A list of text parts as one text; anything else as it is.   Raises InnerError for a part that is not text."""
    if not isinstance(content, list):
        return content
    return "".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if isinstance(text, str):
        return text
    kind = part.get("type", "unknown") if isinstance(part, Mapping) else type(part).__name__
    raise InnerError(f"a content has a part of the kind {str(kind)!r}, and the model reads text alone")


def as_texts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with the parts of each content joined."""
    return [{**m, "content": text_of(m["content"])} if "content" in m else {**m} for m in messages]


def render_ids(
    tokenizer: Any, messages: Sequence[Message], *, opened: bool, tools: Any = None, **options: Any
) -> list[int]:
    """The ids of a chat.   opened: with the opening of an assistant's turn.   options: of the template."""
    return tokenizer.apply_chat_template(
        as_texts(messages), tools=tools, tokenize=True, return_dict=False, add_generation_prompt=opened, **options
    )


def render_text(tokenizer: Any, messages: Sequence[Message], *, tools: Any = None, **options: Any) -> str:
    """Return the text whose ids `prompt_ids` returns."""
    return tokenizer.apply_chat_template(
        as_texts(messages), tools=tools or None, tokenize=False, add_generation_prompt=True, **options
    )


def template_fault(write: Callable[[Sequence[Message]], str], prompt: Sequence[Message], config: Any) -> str:
    """Return "" or why the prompt's text does not reach the model.   write: `render_text` with a template.

    config: an InnerConfig, for the message."""
    try:
        written = write(prompt)
    except Exception as error:  # a template refuses by raising any of jinja's errors
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


def prompt_ids(tokenizer: Any, prompt: str | Sequence[Message], *, tools: Any = None, **options: Any) -> list[int]:
    """The ids that a completion goes on from."""
    if not isinstance(prompt, str):
        return render_ids(tokenizer, prompt, opened=True, tools=tools or None, **options)
    ids: list[int] = tokenizer(prompt)["input_ids"]
    twice = tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2
    return ids[1:] if twice else ids
