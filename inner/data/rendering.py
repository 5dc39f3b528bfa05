"""Render a prompt for a text model. Rollouts, [eval], hints, pairs, `check` and the checks before a run all use this
file.

    messages ── text parts joined ──▶ chat template (tools, switches) ──▶ ids
    a text ──▶ tokenizer ──▶ ids, with one BOS, even if the text already contains it

The row itself does not change: a reward sees the parts of a content.

Not promised: images and sound.  No torch here.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from inner.errors import InnerError

Message = Mapping[str, Any]
HALF = re.compile("[\ud800-\udfff]")  # half of a character beyond U+FFFF: no UTF-8 has it, and no tokenizer reads it


def text_of(content: Any) -> Any:
    """Return a text, or a list of text parts joined, as tokenizers read it; other values as they are.

    Raises InnerError for other parts."""
    if isinstance(content, list):
        content = "".join(_part_text(part) for part in content)
    return whole(content) if isinstance(content, str) else content


def whole(text: str) -> str:
    """Return the text with U+FFFD for each half of a character, as in some names of files."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") if HALF.search(text) else text


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if isinstance(text, str):
        return text
    kind = part.get("type", "unknown") if isinstance(part, Mapping) else type(part).__name__
    raise InnerError(f"a content has a part of the kind {str(kind)!r}, and the model reads text alone")


def as_texts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with the text parts of each content joined."""
    return [{**m, "content": text_of(m["content"])} if "content" in m else {**m} for m in messages]


def render_ids(
    tokenizer: Any, messages: Sequence[Message], *, opened: bool, tools: Any = None, **options: Any
) -> list[int]:
    """Return the ids of a chat.   opened: the ids end with an assistant's opening.   options: for the template."""
    return tokenizer.apply_chat_template(
        as_texts(messages), tools=tools, tokenize=True, return_dict=False, add_generation_prompt=opened, **options
    )


def render_text(tokenizer: Any, messages: Sequence[Message], *, tools: Any = None, **options: Any) -> str:
    """Return the text whose ids `prompt_ids` returns."""
    return tokenizer.apply_chat_template(
        as_texts(messages), tools=tools or None, tokenize=False, add_generation_prompt=True, **options
    )


def prompt_ids(tokenizer: Any, prompt: str | Sequence[Message], *, tools: Any = None, **options: Any) -> list[int]:
    """Return the prompt's ids; the completion continues from them."""
    if not isinstance(prompt, str):
        return render_ids(tokenizer, prompt, opened=True, tools=tools or None, **options)
    ids: list[int] = tokenizer(whole(prompt))["input_ids"]
    twice = tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2
    return ids[1:] if twice else ids
