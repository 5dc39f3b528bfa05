"""Find the form in which a model writes its tool calls, if TRL does not know the model's chat template.

    template ── writes sample turns ──▶ ids ── a known response template reads them ──▶ the same text and calls?
                                                 the templates that TRL knows, the most similar one first

TRL knows some thirty templates by their exact text. Fine-tunes and newer releases write calls in the same forms under
templates of other texts. A form is taken if it reads back a text, a call, and two calls (if the template writes two).

Some known templates (Qwen3's) write a message in another way once a later message follows, so TRL trains with its own
version of them. A template that writes all samples as a known template does gets that template's text, so that TRL
replaces it, too.

Forms that no template of TRL's has are in own_call_forms.py, such as Mistral's and DeepSeek's.

Not promised: other forms; thoughts, which the samples do not have.
"""

import copy
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import trl
from trl.chat_template_utils import (
    add_response_schema,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)

from inner.channels.turn_ids import agreement, context_and_actions, renderer
from inner.data.rendering import render_text
from inner.errors import InnerError
from inner.replay.actions import action_text

log = logging.getLogger(__name__)
Turn = tuple[list[int], list[int]]  # ids of an opened turn, and of what a model writes in it
ASKED = [{"role": "user", "content": "How is the weather in Oslo?"}]
CALLS = [{"function": {"name": "weather", "arguments": {"city": city, "days": 3}}} for city in ("Oslo", "Bergen")]
CALLED = {"role": "assistant", "content": "", "tool_calls": CALLS[:1]}
TOLD = {"role": "tool", "name": "weather", "content": "sunny"}
SAMPLES = ({"content": "It is sunny."}, {"tool_calls": CALLS[:1]}, {"tool_calls": CALLS})
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Return the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The city."},
                    "days": {"type": "integer", "description": "How many days."},
                },
                "required": ["city", "days"],
            },
        },
    }
]


def set_call_form(tokenizer: Any, *, for_trl: bool = True) -> None:
    """Set the tokenizer's `response_template`, if one of TRL's or of ours reads the turns that its template writes.

    for_trl: whether TRL's tool loop will use it. That loop refuses templates that need an id for each call."""
    if getattr(tokenizer, "response_schema", None) or (for_trl and not supports_tool_calling(tokenizer)):
        return  # the tokenizer has a reader of an older kind, or TRL refuses its template
    with suppress(ValueError):  # a template of another text
        add_response_schema(tokenizer)
        return
    turns = [_written(tokenizer, sample) for sample in SAMPLES]
    if None in turns[:-1] or tokenizer.eos_token is None:  # Llama 3.1's template does not write two calls in a turn
        return
    for name, template, known in _known_forms(tokenizer):
        for form in (known, _between(known, tokenizer)):
            reader = copy.copy(tokenizer)
            reader.response_template = form
            if _reads_back(reader, turns):
                log.info("the model's tool calls are read as those of %s", name)
                tokenizer.response_template = form
                if template:
                    _set_known_text(tokenizer, template)
                return


def _set_known_text(tokenizer: Any, template: str) -> None:
    """Give the tokenizer the text that TRL knows, if both write the same: TRL adapts only known texts to training."""
    if is_chat_template_prefix_preserving(tokenizer):
        return
    chats = (ASKED, [{"role": "system", "content": "Be brief."}, *ASKED], [*ASKED, CALLED], [*ASKED, CALLED, TOLD])
    cases = [(chat, tools) for chat in chats for tools in (None, TOOLS)]
    texts = [
        [render_text(tokenizer, chat, tools=tools, chat_template=text) for chat, tools in cases]
        for text in (tokenizer.chat_template, template)
    ]
    if texts[0] == texts[1]:
        tokenizer.chat_template = template


def _known_forms(tokenizer: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield name, text and response template of the chat templates that TRL knows, the most similar template first;
    then our own forms, without a text."""
    words = _words_of(str(tokenizer.chat_template))
    paths = (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(paths)}
    for name in sorted(texts, key=lambda name: -_likeness(words, _words_of(texts[name]))):
        stand_in = copy.copy(tokenizer)
        stand_in.chat_template = texts[name]
        try:
            yield name, texts[name], add_response_schema(stand_in).response_template
        except (ValueError, AttributeError):  # a template without calls; a transformers without response templates
            continue
    from inner.rollouts.own_call_forms import own_forms

    yield from ((name, "", form) for name, form in own_forms())


def _words_of(template: str) -> set[str]:
    return set(re.findall(r"[\w<>|/]+", template))


def _likeness(one: set[str], other: set[str]) -> float:
    return len(one & other) / max(1, len(one | other))


def _written(tokenizer: Any, sample: Mapping[str, Any]) -> Turn | None:
    """Return the ids of an opened turn and of the sample behind them; None if the template cannot write it."""
    state, render = {"state_messages": ASKED, "tools": TOOLS}, renderer(tokenizer)
    try:
        context, (ids,) = context_and_actions(state, [action_text(sample)], render, tokenizer)
    except InnerError:
        return None
    opened = render(ASKED, True, TOOLS)
    before, whole = (str(tokenizer.decode(row)) for row in (opened, context + ids))
    if whole.startswith(before):  # tokens of spaces may stand across the border
        context, ids = opened, tokenizer(whole.removeprefix(before), add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id  # where a model stops sampling
    return context, ids[: ids.index(end) + 1] if end in ids else ids


def _between(known: Any, tokenizer: Any) -> Any:
    """Return the form with this model's own opening and end of a turn."""
    opened, closed = (renderer(tokenizer)(ASKED, is_open, TOOLS) for is_open in (True, False))
    own = tokenizer.decode(opened[agreement(opened, closed) :])
    anchor = {"start_anchor": own} if own else {"start_anchor_pattern": r"\Z"}  # Mistral's turns have no opening
    kept = {name: part for name, part in copy.deepcopy(known).items() if not name.startswith("start_anchor")}
    form: dict[str, Any] = kept | anchor
    if "open" not in form["fields"]["content"]:  # else the form has marks of its own around a text
        form["fields"]["content"]["close_pattern"] = re.escape(tokenizer.eos_token) + r"\s*"
    return form


def _reads_back(tokenizer: Any, turns: Sequence[Turn | None]) -> bool:
    for sample, turn in zip(SAMPLES, turns, strict=True):
        if turn is None:
            continue
        found = parse_response(tokenizer, turn[1], prefix=turn[0], tools=TOOLS)
        made = [call.get("function", call) for call in found.get("tool_calls") or ()]
        calls = [{"function": {key: call.get(key) for key in ("name", "arguments")}} for call in made]
        if (found["content"].strip(), calls) != (sample.get("content", ""), [*sample.get("tool_calls", ())]):
            return False
    return True
