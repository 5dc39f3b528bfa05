"""Read traces of other projects as states: one state per turn of the assistant.

    tau_bench_states    {"reward", "traj": [messages]}       error: a tool result "Error…" or "Unknown action…"
    swe_agent_states    {"history": [messages]}              error: a text that matches SWE_ERROR
                        {"messages": [messages]}             SWE-smith's chats, the same
    openhands_states    {"history": [events]}                error: `error`, exit code ≠ 0, "ERROR:", a refused edit

    system  user  assistant  tool  assistant  tool  …
    ╰── messages ──╯ action   │
    ╰────── messages ────────────╯ action           state_id = file : record : turn

Each state names the form in which its trace writes commands (`action_form`, commands.py), for the comparison of
teachers and student. For SWE-agent and SWE-smith, the form is derived from the turns.

`tools` are the JSON schemas that the agent had. The files lack them; without schemas, teachers cannot call tools.

Not promised: that every SWE-agent error is found. The files do not mark errors, so the reader
finds an error only by its text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from inner.replay.actions import Message, action_text, plain_text
from inner.replay.commands import form_of
from inner.replay.states import TraceState, checked_messages, read_lines

Tools = Sequence[Mapping[str, Any]]

SWE_ERROR = re.compile(
    r"introduced new syntax error|^Traceback \(most recent call last\)|^Error: |command not found", re.M
)
_IPYTHON_ERROR = ("[Your proposed edit has introduced", "[No exact match found", "ERROR:")
_NO_ARGUMENTS = {
    *("id", "timestamp", "source", "message", "action", "args", "thought", "cause", "llm_metrics"),
    *("keep_prompt", "is_confirmed", "confirmation_state", "action_risk", "security_risk", "kernel_init_code"),
    *("blocking", "is_static", "hidden", "is_input", "cwd", "impl_source", "tool_call_metadata"),
}


def tau_bench_states(path: str | Path, tools: Tools = ()) -> list[TraceState]:
    """Read sierra-research/tau-bench: `historical_trajectories/*.json`, or one episode per line in a .jsonl."""

    def episode(row: Any, number: int) -> list[TraceState]:
        turns = checked_messages(row["traj"])
        return _trace_states(_record_name(path, number), turns, _tau_error, tools, row.get("reward"))

    return read_lines(path, episode)


def swe_agent_states(path: str | Path, tools: Tools = ()) -> list[TraceState]:
    """Read SWE-agent/SWE-agent and SWE-smith: one `.traj`, or SWE-smith's chats in a .jsonl.

    Demonstrations inside the history are left out."""

    def trajectory(row: Any, number: int) -> list[TraceState]:
        recorded = row["messages"] if "history" not in row and "messages" in row else row["history"]
        turns = [_swe_turn(turn) for turn in checked_messages(recorded) if not turn.get("is_demo")]
        return _trace_states(_record_name(path, number), turns, _swe_error, tools, None)

    return read_lines(path, trajectory)


def openhands_states(path: str | Path, tools: Tools = ()) -> list[TraceState]:
    """Read All-Hands-AI/OpenHands: `output.jsonl` of an evaluation or of the resolver."""

    def log(row: Any, number: int) -> list[TraceState]:
        turns = checked_messages(_openhands_turns(row["history"]))
        return _trace_states(_record_name(path, number), turns, lambda turn: turn.get("error"), tools, None)

    return read_lines(path, log)


def _trace_states(
    name: str, turns: list[Message], error_of: Callable[[Message], str | None], tools: Tools, reward: float | None
) -> list[TraceState]:
    """Return a state for every assistant turn with an action: the action and the messages before it."""
    clean = [_clean_turn(turn) for turn in turns]
    form = form_of(action_text(turn) for turn in clean if turn["role"] == "assistant") or "calls"
    states: list[TraceState] = []
    for i, turn in enumerate(clean):
        if turn["role"] != "assistant" or not i or not action_text(turn):
            continue
        after = turns[i + 1] if i + 1 < len(turns) and turns[i + 1]["role"] != "assistant" else {}
        state: TraceState = {
            "state_id": f"{name}:{i}",
            "state_messages": clean[:i],
            "student_action": action_text(turn),
            "reward": reward,
            "error": error_of(after) if after else None,
            "action_form": form,
        }
        if tools:
            state["tools"] = [dict(tool) for tool in tools]
        states.append(state)
    return states


def _clean_turn(turn: Message) -> Message:
    """Keep the fields that a chat template reads: role, content, calls with their ids."""
    kept = {key: turn[key] for key in ("role", "name", "tool_call_id") if turn.get(key)}
    kept["content"] = plain_text(turn.get("content"))
    if turn.get("tool_calls"):
        kept["tool_calls"] = turn["tool_calls"]
    return kept


def _record_name(path: str | Path, number: int) -> str:
    return f"{Path(path).stem}:{number}"


def _tau_error(turn: Message) -> str | None:
    text = plain_text(turn.get("content"))
    return text if turn["role"] == "tool" and text.startswith(("Error", "Unknown action")) else None


def _swe_error(turn: Message) -> str | None:
    text = plain_text(turn.get("content"))
    return text if SWE_ERROR.search(text) else None


def _swe_turn(turn: Message) -> Message:
    ids = turn.get("tool_call_ids")
    return {**turn, "tool_call_id": ids[0]} if turn.get("role") == "tool" and ids else turn


# OpenHands: a log of events, not a chat


def _openhands_turns(events: Sequence[Mapping[str, Any]]) -> list[Message]:
    turns: list[Message] = []
    for event in events:
        read = _observation_turn if "observation" in event else _action_turn
        turn = read(event, turns)
        if turn is not None:
            turns.append(turn)
    return turns


def _action_turn(event: Mapping[str, Any], turns: Sequence[Message]) -> Message | None:
    args: Mapping[str, Any] = event.get("args") or event
    action = event.get("action")
    text = plain_text(args.get("content"))
    if action in ("recall", "change_agent_state", "null", None):
        return None
    if action == "system":
        return {"role": "system", "content": text}
    if action == "message":
        mine = event.get("source") == "agent" or (event.get("source") is None and len(turns) > 0)
        return {"role": "assistant" if mine else "user", "content": text}
    return {"role": "assistant", "content": plain_text(args.get("thought")), "tool_calls": [_event_call(event, args)]}


def _event_call(event: Mapping[str, Any], args: Mapping[str, Any]) -> Message:
    """Return the model's call if the log has it; else make one from the action and its arguments."""
    made = event.get("tool_call_metadata") or {}
    for choice in (made.get("model_response") or {}).get("choices") or ():
        for call in choice["message"].get("tool_calls") or ():
            if call.get("id") == made.get("tool_call_id"):
                return {"id": call["id"], "type": "function", "function": call["function"]}
    given = {key: value for key, value in args.items() if key not in _NO_ARGUMENTS and value not in (None, "", {})}
    return {"type": "function", "function": {"name": str(event["action"]), "arguments": json.dumps(given)}}


def _observation_turn(event: Mapping[str, Any], turns: Sequence[Message]) -> Message | None:
    if event["observation"] in ("recall", "agent_state_changed", "null"):
        return None
    called = bool(turns) and bool(turns[-1].get("tool_calls"))
    turn = {"role": "tool" if called else "user", "content": plain_text(event.get("content"))}
    if called and turns[-1]["tool_calls"][0].get("id"):
        turn["tool_call_id"] = turns[-1]["tool_calls"][0]["id"]
    return turn | {"error": (turn["content"] or "failed, and said nothing") if _openhands_failed(event) else None}


def _openhands_failed(event: Mapping[str, Any]) -> bool:
    extras = event.get("extras") or {}
    exit_code = event.get("exit_code", (extras.get("metadata") or {}).get("exit_code", 0))
    text = plain_text(event.get("content"))
    if event["observation"] == "run":
        return exit_code != 0
    return event["observation"] == "error" or text.startswith(_IPYTHON_ERROR)
