"""Write recorded turns as ids, as this model's chat template writes them.

    opened     … <user> 7 + 5? <assistant> <think>                       the template opens a turn, here with a thought
    finished   … <user> 7 + 5? <assistant> <think> </think> It is 12. <end>
               └──────────── context ─────────────┘└────── action ────────┘

The context ends where a finished turn no longer agrees with the opened turn. A thought that the opening closes itself
(`<think></think>`) stays in the context, also if finished turns leave it out: in rollouts the model continues it.

Templates differ in the messages that they take. Mistral's templates need an id of nine characters for each call, and
DeepSeek-V3's template needs arguments as JSON text; so a template that refuses the messages gets the messages in these
forms, too. A call that the template leaves out is written as text. A template that leaves out a tool's result is an
error: the model would act without the result.

Not promised: ids that the model would have sampled (these come from the tokenizer); calls of earlier turns, if the
template leaves calls out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import takewhile
from typing import Any

from inner.data.rendering import render_ids, text_of
from inner.errors import InnerError
from inner.replay.actions import Message, action_message, action_text, parse_arguments
from inner.replay.wire import wire_messages

Render = Callable[..., list[int]]  # (messages, opened, tools) -> ids; opened: they end with an assistant's opening
Write = Callable[[Sequence[Message], bool], list[int]]


def renderer(tokenizer: Any) -> Render:
    """Return a Render with the tokenizer's own template."""
    return lambda messages, opened, tools=None: render_ids(tokenizer, messages, opened=opened, tools=tools)


def context_and_actions(
    state: Mapping[str, Any], actions: Sequence[str], render: Render, tokenizer: Any
) -> tuple[list[int], list[list[int]]]:
    """Return the ids of a state's messages with an opened assistant turn, and the ids of each action after them.

    Raises InnerError if the template cannot write them."""
    messages = state["state_messages"]
    try:
        opened, closed, *finished = _written(messages, actions, render, state.get("tools"))
    except InnerError:
        raise
    except Exception as error:  # a template may raise any exception
        roles = ", ".join(dict.fromkeys(str(message.get("role")) for message in messages))
        raise InnerError(
            f"this model's chat template cannot write it ({type(error).__name__}: {error}); its messages have the "
            f"roles {roles}"
        ) from error
    return _cut(opened, agreement(opened, closed), list(zip(actions, finished, strict=True)), tokenizer)


def _cut(
    opened: list[int], least: int, finished: Sequence[tuple[str, list[int]]], tokenizer: Any
) -> tuple[list[int], list[list[int]]]:
    """Return the context, and each action's ids after it.   least: the length of the messages, without an opening."""
    agreed = [agreement(opened, ids) for _, ids in finished]
    stays = [
        n < least or _stays(opened[n:], ids[n:], action, tokenizer)
        for (action, ids), n in zip(finished, agreed, strict=True)
    ]
    end = min((n for n, stay in zip(agreed, stays, strict=True) if not stay), default=len(opened))
    turns = [
        opened[end:] + _own_ids(action, ids[n:], tokenizer) if stay else _ended(ids[min(n, end) :], tokenizer)
        for (action, ids), n, stay in zip(finished, agreed, stays, strict=True)
    ]
    return opened[:end], turns


def _written(messages: Sequence[Message], actions: Sequence[str], render: Render, tools: Any) -> list[list[int]]:
    """Return the ids of the messages with an opened turn, without an opened turn, and with each action. Writes the
    messages in the first form that the template takes."""
    failed = list[Exception]()
    for form in MESSAGE_FORMS:

        def write(turns: Sequence[Message], opened: bool, form: Any = form) -> list[int]:
            return render(list(form(turns)), opened, tools)

        try:
            written = [write(messages, True), write(messages, False)]
            _require_last_message(messages, written[0], write)
            return written + [_finished(messages, action, write) for action in actions]
        except Exception as error:
            failed.append(error)
    raise failed[0]


def _finished(messages: Sequence[Message], action: str, write: Write) -> list[int]:
    turn = action_message(action)
    if turn.get("tool_calls"):
        whole, mute = write([*messages, turn], False), None
        with suppress(Exception):  # a template may refuse a turn with neither text nor calls
            mute = write([*messages, {"role": "assistant", "content": turn["content"]}], False)
        if whole != mute:
            return whole
    return write([*messages, {"role": "assistant", "content": action}], False)


def _require_last_message(messages: Sequence[Message], opened: list[int], write: Write) -> None:
    """Raise InnerError if the template leaves out the text of the last message, for example of a tool's result."""
    text = str(text_of(messages[-1].get("content") or "")) if messages else ""
    if not text.strip():
        return
    others = list[list[int]]()
    for other in ("", f"{text}."):
        with suppress(Exception):  # a template may refuse an empty text
            others.append(write([*messages[:-1], {**messages[-1], "content": other}], True))
    if others and all(ids == opened for ids in others):
        raise InnerError(
            f"this model's chat template leaves out the text of its last message (role {messages[-1].get('role')})"
        )


# -------------------------------------------------------------------- forms of messages


def _as_objects(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages with each call's arguments as an object, and without ids."""
    return ({**m, **action_message(action_text(m))} if m.get("tool_calls") else m for m in messages)


def _with_ids(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages with arguments as objects, and an id of nine characters for each call and its result."""
    for message in _as_json(messages):
        calls = [
            {**call, "function": {**call["function"], "arguments": parse_arguments(call["function"])}}
            for call in message.get("tool_calls") or ()
        ]
        yield {**message, "tool_calls": calls} if calls else message


def _as_json(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages with arguments as JSON text, and the same ids."""
    ids = dict[str, str]()
    waiting = list[str]()  # the last turn's calls without a result
    for message in wire_messages(messages):
        if message.get("tool_calls"):
            made = {call["id"]: _nine(call["id"], len(ids) + i) for i, call in enumerate(message["tool_calls"])}
            ids |= made
            waiting = list(made.values())
            calls = [{**call, "id": made[call["id"]]} for call in message["tool_calls"]]
            yield {**message, "content": message.get("content") or "", "tool_calls": calls}
        elif message.get("role") == "tool":
            name = ids.get(message["tool_call_id"]) or next(iter(waiting), f"call{len(ids):05d}")
            waiting = [other for other in waiting if other != name]
            yield {**message, "tool_call_id": name}
        else:
            yield message


def _nine(own: str, number: int) -> str:
    """Return a call's own id if it has nine letters and digits, as Mistral's models write them; else a new id."""
    return own if len(own) == 9 and own.isalnum() else f"call{number:05d}"


MESSAGE_FORMS = (_as_objects, _with_ids, _as_json)  # one after the other, until the template takes the messages


# -------------------------------------------------------------------- ids


def agreement(one: list[int], other: list[int]) -> int:
    """Return how many ids at the beginning are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _stays(rest: list[int], behind: list[int], action: str, tokenizer: Any) -> bool:
    """Whether `rest`, the ids of a turn's opening that the finished turn does not repeat, stays in the context.

    It stays if it is a whole thought (with an opening and a closing mark) or spaces, and if the finished turn's ids
    from there on (`behind`) begin with the action."""
    if not rest:
        return False
    before, found, _ = tokenizer.decode(behind).partition(action.strip())
    marks = sum(i in _added_tokens(tokenizer) for i in rest)
    is_closed = (marks > 0 and marks % 2 == 0) or not tokenizer.decode(rest).strip()
    return is_closed and bool(found) and not before.strip()


def _own_ids(action: str, behind: list[int], tokenizer: Any) -> list[int]:
    """Return the finished turn's ids if they begin with the action; else the action's text as ids, and an end."""
    if tokenizer.decode(behind).startswith(action.strip()):
        return _ended(behind, tokenizer)
    ids = tokenizer(action, add_special_tokens=False)["input_ids"]
    return ids + ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])


def _ended(ids: list[int], tokenizer: Any) -> list[int]:
    """Return the ids with an end of the turn. Some templates write it with the next turn only."""
    end: int | None = tokenizer.eos_token_id
    special = _added_tokens(tokenizer)
    has_end = any(special.get(i) or i == end for i in ids)
    return ids if end is None or has_end else [*ids, end]


@lru_cache(maxsize=2)
def _added_tokens(tokenizer: Any) -> dict[int, bool]:
    """Return id -> whether it is special, for the tokens that are outside the tokenizer's own vocabulary."""
    return {i: token.special for i, token in tokenizer.added_tokens_decoder.items()}
