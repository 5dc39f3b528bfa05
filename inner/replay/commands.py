"""Find the command in a turn. Two turns are compared by their commands.

    "I will look around first.\\n```\\nls -a\\n```"  ─┐
    "Let us see what is there.\\n```bash\\nls -a\\n```" ┴─▶ key "fenced"  ─▶ the same command: both votes count for it

    name          a turn's command is                                              written by
    action        the tool calls with all arguments; without one the whole text    (default if no form is known)
    calls         the tool calls without arguments in SPOKEN                       tau-bench, OpenHands
    fenced        the last ``` block                                               SWE-agent, thought_action
    command_tag   the last <command> … </command>                                  SWE-agent, xml_thought_action
    function_tag  <function=NAME><parameter=NAME>VALUE</parameter></function>      SWE-smith, OpenHands without tools
    react         Action: NAME, Action Input: …; or Action: {"name", "arguments"}  ReAct, tau-bench

With every key, a turn with tool calls is compared by its calls, and a turn without a command by its whole text. So a
key can only make different texts the same action; equal texts stay equal. Readers of trace formats write the form that
most turns have into the states (`action_form`). The argument `key=` of replay_trace, extract_dpo_pairs and
pair_outcomes replaces it for all states: a name above, or your function (a turn's text -> its command, "" for none).

Not promised: a comparison of meaning. `cat a` and `cat ./a` are two commands.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from inner.replay.actions import action_key, action_message, calls_key, text_key
from inner.replay.untrusted import load_json
from inner.settings.inner import InnerError

Key = Callable[[str], str]
Calls = list[tuple[str, Any]]  # names and arguments

# Arguments that are only text for a person: two agents that hand over to a human act alike, whatever they write.
SPOKEN = {
    "think": {"thought"},
    "finish": {"message", "outputs", "task_completed"},
    "transfer_to_human_agents": {"summary"},
}

_FENCE = re.compile(r"^```(\S*)[^\S\n]*$", re.M)
_COMMAND_TAG = re.compile(r"<command>(.*?)</command>", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
_ACTION = re.compile(r"^Action:[^\S\n]*", re.M)
_INPUT = re.compile(r"^Action Input:[^\S\n]*", re.M)


def key_of(name: str | Key | None, form: str | None = None) -> Key:
    """Return the function for a `key=`.   None: the key of the state's form, or "action" for a state without a form."""
    if callable(name):
        return name
    chosen = name or form or "action"
    if chosen not in KEYS:
        raise InnerError(
            f"key is {chosen!r}: choose {', '.join(KEYS)}, or pass a function from a turn's text to a text."
        )
    return KEYS[chosen]


def form_of(turns: Iterable[str]) -> str | None:
    """Return the form that most turns have, if it is at least half of them; None for tool calls or plain text."""
    texts = [text for text in turns if text.strip()]
    open_texts = [text for text in texts if "tool_calls" not in action_message(text)]
    counts = {name: sum(find(text) is not None for text in open_texts) for name, find in _FINDERS.items()}
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] and 2 * counts[best] >= len(texts) else None


def has_command(text: str, form: str | None) -> bool:
    """Whether the turn has a tool call, or a command in this form."""
    return "tool_calls" in action_message(text) or (form in _FINDERS and _FINDERS[form](text) is not None)


def last_fenced_block(text: str) -> str | None:
    """Return the last outermost block between ``` lines, as SWE-agent's parser does; None for a text without one."""
    opened: list[re.Match[str]] = []
    last, text = None, text.strip()
    for mark in _FENCE.finditer(text):
        if opened and not mark[1]:
            start = opened.pop()
            last = (start, mark) if not opened else last
        else:
            opened.append(mark)
    return None if last is None else text[last[0].end() : last[1].start()]


def last_command_tag(text: str) -> str | None:
    found = _COMMAND_TAG.findall(text)
    return found[-1] if found else None


def function_tags(text: str) -> Calls | None:
    found = _FUNCTION.findall(text)
    return [(name, {p: _parse_value(v) for p, v in _PARAMETER.findall(body)}) for name, body in found] or None


def react_action(text: str) -> Calls | None:
    parts = _ACTION.split(text.strip())
    if len(parts) < 2:
        return None
    name, *given = _INPUT.split(parts[-1], maxsplit=1)
    if given:
        return [(name.strip(), _parse_value(given[0]))]
    call = _parse_value(name)
    named = isinstance(call, dict) and isinstance(call.get("name"), str)
    return [(call["name"], call.get("arguments"))] if named else None


def _key_for(find: Callable[[str], str | Calls | None], marks: tuple[str, str] = ("", "")) -> Key:
    def key(text: str) -> str:
        made = action_message(text).get("tool_calls")
        if made:
            return _calls_key([(call["function"]["name"], call["function"]["arguments"]) for call in made])
        command = find(text)
        if command is None:
            return action_key(text)
        return _calls_key(command) if isinstance(command, list) else text_key(command).join(marks)

    return key


def _calls_key(calls: Calls) -> str:
    return calls_key([(name, _drop_spoken(name, arguments)) for name, arguments in calls])


def _drop_spoken(name: str, arguments: Any) -> Any:
    if not isinstance(arguments, Mapping):
        return arguments
    return {key: value for key, value in arguments.items() if key not in SPOKEN.get(name, ())}


def _parse_value(written: str) -> Any:
    """Decode a parameter's text: `[1, 2]` becomes a list, `ls` stays text."""
    try:
        return load_json(written.strip())
    except ValueError:
        return written.strip("\n")


_FINDERS: dict[str, Callable[[str], str | Calls | None]] = {
    "function_tag": function_tags,
    "command_tag": last_command_tag,
    "fenced": last_fenced_block,
    "react": react_action,
}
KEYS: dict[str, Key] = {"action": action_key, "calls": _key_for(lambda text: None)}
# The marks stay in the key, so that a turn with the plain text `ls` is not equal to the command `ls`.
_MARKS = {"fenced": ("```\n", "\n```"), "command_tag": ("<command>", "</command>")}
KEYS |= {name: _key_for(find, _MARKS.get(name, ("", ""))) for name, find in _FINDERS.items()}
