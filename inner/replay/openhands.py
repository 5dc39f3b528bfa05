"""Make a chat from OpenHands' log of events.

    a log of 0.x                {"action": "run", "args"}         {"observation": "run", "content", "extras"}
    a log of the agent SDK      {"kind": "ActionEvent", …}        {"kind": "ObservationEvent", …}

Left out: what the agent did not do (changes of its state, condensations, actions of the user).

Not promised: that a turn has what OpenHands added to it for its model (knowledge of the repository, directories).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inner.replay.actions import Message, plain_text

_IPYTHON_ERROR = ("[Your proposed edit has introduced", "[No exact match found", "ERROR:")
_NO_ACT = ("recall", "change_agent_state", "condensation", "condensation_request", "loop_recovery", "null", None)
_NO_ARGUMENTS = {
    *("id", "timestamp", "source", "message", "action", "args", "thought", "cause", "llm_metrics"),
    *("keep_prompt", "is_confirmed", "confirmation_state", "action_risk", "security_risk", "kernel_init_code"),
    *("blocking", "is_static", "hidden", "is_input", "cwd", "impl_source", "tool_call_metadata"),
}


def openhands_turns(log: Sequence[Any]) -> list[Message]:
    """Return the chat of a log: a list of events, or of pairs of an action and its observation."""
    turns: list[Message] = []
    for event in (event for entry in log for event in (entry if isinstance(entry, list) else [entry])):
        if "role" in event:
            raise ValueError("a chat, not OpenHands' log of events: use swe_agent_states")
        read = _sdk_turn if "kind" in event else _observation_turn if "observation" in event else _action_turn
        turn = read(event, turns)
        if turn is not None:
            turns.append(turn)
    return turns


def recorded_tools(log: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Return the schemas of the tools that the log's first event gives to the agent."""
    first = log[0] if log and isinstance(log[0], dict) else {}
    tools = (first.get("args") or first).get("tools") or ()
    return [tool for tool in tools if isinstance(tool, dict) and "function" in tool]


def _action_turn(event: Mapping[str, Any], turns: Sequence[Message]) -> Message | None:
    args: Mapping[str, Any] = event.get("args") or event
    action = event.get("action")
    text = plain_text(args.get("content"))
    if action in _NO_ACT or (action != "message" and event.get("source") in ("user", "environment")):
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


# The agent SDK


def _sdk_turn(event: Mapping[str, Any], turns: list[Message]) -> Message | None:
    kind = event["kind"]
    if kind == "SystemPromptEvent":
        return {"role": "system", "content": [event["system_prompt"], event.get("dynamic_context") or {}]}
    if kind == "MessageEvent":
        said = event["llm_message"]
        return {"role": said["role"], "content": [*said["content"], *(event.get("extended_content") or ())]}
    if kind == "ActionEvent":
        return _sdk_action(event, turns)
    return _sdk_result(event) if "tool_call_id" in event else None


def _sdk_action(event: Mapping[str, Any], turns: list[Message]) -> Message | None:
    """Return the turn of an action; None if the action joins the turn before it, as it is of the same response."""
    call, response = {**event["tool_call"], "id": event["tool_call_id"]}, event.get("llm_response_id")
    if turns and response and turns[-1].get("response") == response:
        turns[-1]["tool_calls"].append(call)
        return None
    return {"role": "assistant", "content": event.get("thought"), "tool_calls": [call], "response": response}


def _sdk_result(event: Mapping[str, Any]) -> Message:
    seen = event.get("observation") or {}
    refused = event.get("error") or event.get("rejection_reason")
    text = refused or plain_text(seen.get("content") or seen.get("output"))
    failed = refused or seen.get("is_error") or seen.get("exit_code") not in (None, 0, -1)
    error = (text or "failed, and said nothing") if failed else None
    return {"role": "tool", "tool_call_id": event["tool_call_id"], "content": text, "error": error}
