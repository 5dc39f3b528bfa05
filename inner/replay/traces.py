"""Read traces of other projects as states: one state per turn of the assistant.

    tau_bench_states    {"reward", "traj": [messages]}       error: a tool result "Error…" or "Unknown action…"
                        {"simulations": [{"messages"}]}      τ²-bench, the same
    swe_agent_states    {"history": [messages]}              error: a text that matches SWE_ERROR
                        {"messages": [messages]}             mini-swe-agent, SWE-smith, other chats: the same
    openhands_states    {"history": [events]}, [events]      error: `error`, exit code ≠ 0, "ERROR:", a refused edit
    harbor_states       {"steps": [steps]}                   error: a text that matches SWE_ERROR

    system  user  assistant  tool  assistant  tool  …
    ╰── messages ──╯ action   │
    ╰────── messages ────────────╯ action           state_id = file : record : turn

Each state names the form in which its trace writes commands (`action_form`, commands.py), for the comparison of
teachers and student. For SWE-agent and SWE-smith, the form is derived from the turns.

`tools` are the JSON schemas that the agent had. Few files have these schemas (Harbor's and OpenHands' files may);
without schemas, teachers cannot call tools. A trace without an action of the agent is left out with a warning.

Not promised: that every SWE-agent error is found, since the reader finds an error only by its text; that the agent
saw all messages of a state and no others, since agents shorten and enrich what their model gets; that the last step of
SWE-agent (`submit`) is a state, since some histories lack it.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from inner.replay.actions import Message, action_text, plain_text
from inner.replay.commands import form_of
from inner.replay.states import TraceState, checked_messages, read_lines, recorded_turns

Tools = Sequence[Mapping[str, Any]]

SWE_ERROR = re.compile(
    r"introduced new syntax error|^Traceback \(most recent call last\)|^Error: |command not found|<returncode>(?!0<)",
    re.M,
)
_IPYTHON_ERROR = ("[Your proposed edit has introduced", "[No exact match found", "ERROR:")
_NO_ACT = ("recall", "change_agent_state", "condensation", "condensation_request", "loop_recovery", "null", None)
_NO_ARGUMENTS = {
    *("id", "timestamp", "source", "message", "action", "args", "thought", "cause", "llm_metrics"),
    *("keep_prompt", "is_confirmed", "confirmation_state", "action_risk", "security_risk", "kernel_init_code"),
    *("blocking", "is_static", "hidden", "is_input", "cwd", "impl_source", "tool_call_metadata"),
}


def tau_bench_states(path: str | Path, tools: Tools = ()) -> list[TraceState]:
    """Read sierra-research/tau-bench (`historical_trajectories/*.json`, or one episode per line in a .jsonl) and
    tau2-bench (a file with `simulations`).

    For tau2-bench, the system message is the domain's policy. Turns that only the user saw are left out."""

    def episode(row: Any, number: int) -> list[TraceState]:
        turns = checked_messages(_tau_turns(row))
        reward = row.get("reward", (row.get("reward_info") or {}).get("reward"))
        return _trace_states(_record_name(path, number), turns, _tau_error, tools, reward)

    return read_lines(path, episode)


def swe_agent_states(path: str | Path, tools: Tools = ()) -> list[TraceState]:
    """Read SWE-agent/SWE-agent, mini-swe-agent and SWE-smith: a `.traj`, a `.traj.json`, or chats in a .jsonl.

    Other chats with `messages` are read, too. Demonstrations inside the history are left out."""

    def trajectory(row: Any, number: int) -> list[TraceState]:
        recorded = recorded_turns(row, "history", "messages", "trajectory")
        turns = [turn for turn in checked_messages([*map(_swe_turn, recorded)]) if not turn.get("is_demo")]
        told = row if isinstance(row, dict) else {}
        reward = None if told.get("resolved") is None else float(told["resolved"])
        return _trace_states(_record_name(path, number), turns, _swe_error, tools or told.get("tools") or (), reward)

    return read_lines(path, trajectory)


def openhands_states(path: str | Path, tools: Tools = ()) -> list[TraceState]:
    """Read All-Hands-AI/OpenHands: `output.jsonl` of an evaluation or the resolver, or a list of events in a .json."""

    def log(row: Any, number: int) -> list[TraceState]:
        events = recorded_turns(row, "history")
        turns = checked_messages(_openhands_turns(events))
        name, known = _record_name(path, number), tools or _recorded_tools(events)
        return _trace_states(name, turns, lambda turn: turn.get("error"), known, None)

    return read_lines(path, log)


def harbor_states(path: str | Path, tools: Tools = ()) -> list[TraceState]:
    """Read a Harbor trial's `agent/trajectory.json` (ATIF).

    Left out: system steps after the first user step, and states of steps that were copied from another trajectory."""
    trial = Path(path).resolve().parent.parent.name

    def trajectory(row: Any, number: int) -> list[TraceState]:
        turns = checked_messages(_harbor_turns(recorded_turns(row, "steps")))
        known = tools or (row.get("agent") or {}).get("tool_definitions") or ()
        return _trace_states(f"{trial}/{_record_name(path, number)}", turns, _swe_error, known, None)

    return read_lines(path, trajectory)


def _trace_states(
    name: str, turns: list[Message], error_of: Callable[[Message], str | None], tools: Tools, reward: float | None
) -> list[TraceState]:
    """Return a state for every assistant turn with an action: the action and the messages before it.

    Turns with `given` were not made by the agent in this trace. Raises ValueError for a trace without a state."""
    clean = [_clean_turn(turn) for turn in turns]
    form = form_of(action_text(turn) for turn in clean if turn["role"] == "assistant") or "calls"
    states: list[TraceState] = []
    for i, turn in enumerate(clean):
        if turn["role"] != "assistant" or not i or not action_text(turn) or turns[i].get("given"):
            continue
        after = takewhile(lambda turn: turn["role"] != "assistant", turns[i + 1 :])
        state: TraceState = {
            "state_id": f"{name}:{i}",
            "state_messages": clean[:i],
            "student_action": action_text(turn),
            "reward": reward,
            "error": next(filter(None, map(error_of, after)), None),
            "action_form": form,
        }
        if tools:
            state["tools"] = [dict(tool) for tool in tools]
        states.append(state)
    if not states:
        roles = ", ".join(f"{count} {role}" for role, count in Counter(turn["role"] for turn in clean).items())
        raise ValueError(f"the agent did nothing: its messages are {roles}")
    return states


def _clean_turn(turn: Message) -> Message:
    """Keep the fields that a chat template reads: role, content, calls with their ids."""
    kept = {key: turn[key] for key in ("role", "name", "tool_call_id") if turn.get(key)}
    kept["content"] = plain_text(turn.get("content"))
    if turn.get("tool_calls"):
        kept["tool_calls"] = [call if "function" in call else _function_call(call) for call in turn["tool_calls"]]
    return kept


def _function_call(call: Mapping[str, Any]) -> Message:
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}


def _record_name(path: str | Path, number: int) -> str:
    return f"{Path(path).stem}:{number}"


# τ-bench and τ²-bench


def _tau_turns(row: Any) -> list[Message]:
    recorded = [turn for turn in recorded_turns(row, "traj", "messages") if not _only_the_user_saw(turn)]
    if recorded and recorded[0]["role"] == "assistant" and not recorded[0].get("tool_calls"):
        recorded[0] = {**recorded[0], "given": True}  # the greeting is the benchmark's
    policy = (row.get("file", {}).get("info", {}).get("environment_info") or {}).get("policy")
    system = [{"role": "system", "content": policy}] if policy else []
    return [*system, *({**turn, "tool_call_id": turn.get("tool_call_id") or turn.get("id")} for turn in recorded)]


def _only_the_user_saw(turn: Message) -> bool:
    """Whether the turn is a tool call of τ²-bench's user, or the call's result."""
    return turn.get("requestor") == "user" or (turn["role"] == "user" and bool(turn.get("tool_calls")))


def _tau_error(turn: Message) -> str | None:
    text = plain_text(turn.get("content"))
    result = text.removeprefix("API output: ")  # of an agent without tool calls
    failed = turn.get("error") or result.startswith(("Error", "Unknown action"))
    return result if failed and (turn["role"] == "tool" or result != text) else None


# SWE-agent


def _swe_error(turn: Message) -> str | None:
    text = plain_text(turn.get("content"))
    return text if SWE_ERROR.search(text) else None


def _swe_turn(turn: Message) -> Message:
    """Return the turn with OpenAI's names. nebius/SWE-agent-trajectories has `ai`, `text` and `system_prompt`."""
    role, ids = turn.get("role"), turn.get("tool_call_ids")
    content = turn.get("content") or turn.get("text") or turn.get("system_prompt")
    call = {"tool_call_id": ids[0]} if role == "tool" and ids else {}
    return {**turn, "role": "assistant" if role == "ai" else role, "content": content, **call}


# Harbor: steps with calls and their results


def _harbor_turns(steps: Sequence[Mapping[str, Any]]) -> list[Message]:
    turns: list[Message] = []
    for step in steps:
        if step["source"] == "agent":
            turns += _harbor_action(step)
        elif step["source"] == "user" or all(turn["role"] == "system" for turn in turns):
            turns.append({"role": step["source"], "content": step.get("message")})
    return turns


def _harbor_action(step: Mapping[str, Any]) -> list[Message]:
    """Return the agent's turn and the results: one for each call. Results that name no call are of the last calls."""
    calls = [
        {**call, "id": call["tool_call_id"], "name": call["function_name"]} for call in step.get("tool_calls") or ()
    ]
    given = bool(step.get("is_copied_context")) or step.get("llm_call_count") == 0
    turn = {"role": "assistant", "content": step.get("message"), "tool_calls": calls, "given": given}
    results = (step.get("observation") or {}).get("results") or ()
    if not calls:
        return [turn, *({"role": "user", "content": result.get("content")} for result in results)]
    told = {call["id"]: "" for call in calls}
    for i, result in enumerate(results):
        to = result.get("source_call_id") or [*told][max(i - len(results), -len(told))]
        told[to] = told.get(to, "") + plain_text(result.get("content"))
    return [turn, *({"role": "tool", "tool_call_id": to, "content": text} for to, text in told.items())]


# OpenHands: a log of events, not a chat


def _openhands_turns(log: Sequence[Any]) -> list[Message]:
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


def _recorded_tools(log: Sequence[Any]) -> list[Mapping[str, Any]]:
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
    """Return the model's call if the log has it; else make a call from the action and its arguments."""
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


# OpenHands' agent SDK: `kind` names the event


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
    """Return the turn of an action; None if the action joins the turn before it, because both are of one response."""
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
