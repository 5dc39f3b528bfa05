"""Write an agent's chat as ids, and read the ids of a reply as a message in OpenAI's form.

    opened    messages, tools                  ──▶ … <user> 7 + 5? <end> <assistant>
    behind    messages behind the last reply   ──▶ (reply … <end>) \\n <tool> 12 <end> <assistant>
    reply     <call> add(7, 5) </call> <end>   ──▶ {"role": "assistant", "tool_calls": [{"id": …, "function": …}]}

`behind` writes a short turn of its own and then the messages, and cuts the ids of that turn off.  So the ids of earlier
turns are those that the model read and sampled, also if the template would write them otherwise (Qwen3's leaves out the
thoughts of earlier turns).

Not promised: images; a template in which the text of a message depends on earlier messages.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import count, takewhile
from typing import Any

from trl.chat_template_utils import parse_response

from inner.channels.turn_ids import MESSAGE_FORMS, agreement
from inner.data.rendering import as_texts, render_ids
from inner.errors import InnerError
from inner.replay.actions import action_key, action_text, plain_text

Message = dict[str, Any]
ROLES = {"developer": "system", "function": "tool"}  # OpenAI's other names of roles


class Chat:
    """The ids of chats with one model.   ends: ids at which the model stops.   options: those of the template."""

    def __init__(self, tokenizer: Any, ends: Sequence[int], **options: Any) -> None:
        self.tokenizer, self.ends, self._options = tokenizer, frozenset(ends), options
        self._marks = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._written = set[str]()  # roles whose messages the template is known to write
        self._number = count()

    def opened(self, messages: Sequence[Message], tools: Any) -> list[int]:
        """Return the ids of the messages with an opened assistant turn.   Raises InnerError."""

        def write(turns: list[Message]) -> list[int]:
            return render_ids(self.tokenizer, turns, opened=True, tools=tools or None, **self._options)

        return _in_a_form(write, messages)

    def behind(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids from behind the end of an assistant's turn to the next opened turn.   Raises InnerError."""
        results = [*takewhile(lambda message: message["role"] == "tool", messages)]
        ids = [{"id": m["tool_call_id"]} if m.get("tool_call_id") else {} for m in results]
        functions = [{"name": m["name"], "arguments": {"s": TURN}} for m in results]
        calls = [{**own, "type": "function", "function": f} for own, f in zip(ids, functions, strict=True)]
        called: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        turns = [called] if calls else []
        for turn in [*turns, {"role": "assistant", "content": TURN}]:  # the last: if the template leaves out calls
            if (text := self._text_behind(turn, messages)) is not None:
                return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        raise InnerError("this model's chat template leaves out the text of an earlier turn")

    def _text_behind(self, turn: Message, messages: Sequence[Message]) -> str | None:
        """Return the text behind a turn's end; None if the template leaves the turn's text out."""
        closed = self._render_text([ASKED, turn], opened=False)
        whole = self._render_text([ASKED, turn, *messages], opened=True)
        self._require_written(turn, messages, whole)
        if not (times := closed.count(TURN)) or whole.count(TURN) < times:
            return None
        rest, own = whole.split(TURN, times)[-1], closed.split(TURN, times)[-1]
        return rest[self._end_of_turn(rest, own) :]

    def _end_of_turn(self, rest: str, own: str) -> int:
        """Return where a turn ends in the text behind its words.   own: that text if the turn is the chat's last."""
        then, last = (self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (rest, own))
        same = agreement(then, last)
        ends = [at + 1 for at in range(same) if then[at] in self.ends]
        if not ends and last[same : same + 1] and last[same] in self.ends and self._are_marks(then[same : same + 2]):
            ends = [same + 1]  # gpt-oss ends a chat with <|return|>, and an earlier turn with <|end|>
        end = max(ends, default=same)
        if not self.tokenizer.is_fast:
            return len(self.tokenizer.decode(then[:end]))
        spans = self.tokenizer(rest, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return spans[end - 1][1] if end else 0

    def _are_marks(self, ids: Sequence[int]) -> bool:
        return len(ids) == 2 and self._marks.issuperset(ids)

    def _require_written(self, turn: Message, messages: Sequence[Message], whole: str) -> None:
        """Raise InnerError if the template leaves out messages of a role, for example tools' results."""
        for at, message in enumerate(messages):
            if message["role"] in self._written:
                continue
            other = {**message, "content": f"{plain_text(message['content'])}."}
            changed = [ASKED, turn, *messages[:at], other, *messages[at + 1 :]]
            if self._render_text(changed, opened=True) == whole:
                raise InnerError(f"this model's chat template leaves out messages of the role {message['role']}")
            self._written.add(message["role"])

    def reply(self, ids: Sequence[int], prefix: list[int], tools: Any) -> Message:
        """Return the message that the model wrote.   prefix: the ids before it.   tools: those of the request."""
        if not tools:
            return {"role": "assistant", "content": self.text(ids)}
        found = parse_response(self.tokenizer, list(ids), prefix=prefix, tools=tools)
        message: Message = {"role": "assistant", "content": found.get("content") or ""}
        if thought := found.get("reasoning_content") or found.get("thinking"):
            message["reasoning_content"] = thought
        if calls := found.get("tool_calls"):
            message["tool_calls"] = [self._wire_call(call.get("function", call)) for call in calls]
        return message

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def _wire_call(self, function: Mapping[str, Any]) -> Message:
        arguments = function.get("arguments")
        written = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        named = {"name": str(function.get("name")), "arguments": written}
        own = function.get("id")  # Mistral's models write an id
        return {"id": str(own or f"call_{next(self._number)}"), "type": "function", "function": named}

    def _render_text(self, messages: Sequence[Message], *, opened: bool) -> str:
        def write(turns: list[Message]) -> str:
            options = {**self._options, "add_generation_prompt": opened}
            return self.tokenizer.apply_chat_template(as_texts(turns), tokenize=False, **options)

        return _in_a_form(write, messages)


def _in_a_form(write: Callable[[list[Message]], Any], messages: Sequence[Message]) -> Any:
    """Return what `write` makes of the messages, in the first form that the template takes.   Raises InnerError."""
    fault: Exception | None = None
    for form in MESSAGE_FORMS:
        try:
            return write(list(form(messages)))
        except InnerError:
            raise
        except Exception as error:  # a template may raise any exception
            fault = fault or error
    roles = ", ".join(str(message["role"]) for message in messages)
    raise InnerError(
        f"this model's chat template cannot write messages of the roles {roles}: {type(fault).__name__}: {fault}"
    ) from fault


ASKED: Message = {"role": "user", "content": "Go on."}
TURN = "tUrN"  # stands for an assistant's text or argument


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return an agent's messages as templates take them: roles by their usual names, tool results with a name."""
    names = dict[str, str]()
    told = list[Message]()
    for message in messages:
        role = str(message.get("role"))
        kept = {key: message[key] for key in ("name", "tool_calls", "tool_call_id") if message.get(key)}
        names |= {str(call.get("id")): call.get("function", call).get("name") for call in kept.get("tool_calls", ())}
        turn: Message = {"role": ROLES.get(role, role), "content": message.get("content") or "", **kept}
        if turn["role"] == "tool":
            turn.setdefault("name", names.get(str(turn.get("tool_call_id"))) or "f")
        told.append(turn)
    return told


def is_same(sent: Message, known: Message) -> bool:
    """Whether an agent sent a known message again, perhaps without outer spaces, its thought or a stop."""
    if sent["role"] != known["role"]:
        return False
    if known.get("tool_calls") or sent.get("tool_calls"):
        return action_key(action_text({**sent, "content": ""})) == action_key(action_text({**known, "content": ""}))
    ours, theirs = plain_text(known["content"]).strip(), plain_text(sent["content"]).strip()
    is_part = known["role"] == "assistant" and bool(theirs) and (ours.endswith(theirs) or ours.startswith(theirs))
    return ours == theirs or is_part
