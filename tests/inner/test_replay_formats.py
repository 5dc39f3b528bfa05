"""Formats of traces that public projects write. The files here are made for the tests, and are as small as can be."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from inner import (
    InnerError,
    TraceState,
    TraceWarning,
    load_states,
    openhands_states,
    swe_agent_states,
    tau_bench_states,
)
from inner.replay import traces
from inner.replay.wire import wire_messages

SYSTEM, TASK = {"role": "system", "content": "Rules."}, {"role": "user", "content": "Fix it."}
LOOK = {"role": "assistant", "content": "Look.\n```\nls\n```"}
SCHEMA = {"type": "function", "function": {"name": "sh", "parameters": {}}}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., list[TraceState]]:
    def read(reader: Callable[..., list[TraceState]], document: Any, name: str = "trace.json") -> list[TraceState]:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document))
        states = reader(file)
        for state in states:
            assert_every_call_has_an_answer(wire_messages(state["state_messages"]))
        return states

    return read


def assert_every_call_has_an_answer(messages: list[dict[str, Any]]) -> None:
    """An endpoint refuses other chats."""
    asked = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
    assert asked == [message["tool_call_id"] for message in messages if message["role"] == "tool"]


def roles(state: TraceState) -> str:
    return " ".join(message["role"] for message in state["state_messages"])


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"c-{name}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


# SWE-agent, mini-swe-agent, and data sets made with them


def test_a_list_of_turns_is_one_trace(read: Any) -> None:
    """The first mini-swe-agent wrote its messages as a list, and each message was refused as a trace."""
    (state,) = read(swe_agent_states, [SYSTEM, TASK, LOOK])
    assert (roles(state), state["student_action"], state["action_form"]) == ("system user", LOOK["content"], "fenced")


def test_mini_swe_agents_return_code_is_an_error_and_its_exit_is_no_turn(read: Any) -> None:
    turns = [{"role": "assistant", "content": None, "tool_calls": [call("bash", command=text)]} for text in "ab"]
    results = [f"<returncode>{n}</returncode>\n<output>\n</output>" for n in (0, 2)]
    told = [{"role": "tool", "tool_call_id": "c-bash", "content": result} for result in results]
    chat = [SYSTEM, TASK, turns[0], told[0], turns[1], told[1], {"role": "exit", "content": "a patch"}]
    states = read(swe_agent_states, {"info": {}, "messages": chat, "trajectory_format": "mini-swe-agent-1.1"})
    assert [state.get("error") for state in states] == [None, results[1]]


def test_the_names_of_nebius_are_read(read: Any) -> None:
    rows = [
        {"role": "system", "system_prompt": "Rules.", "text": None},
        {"role": "user", "system_prompt": None, "text": "Fix it."},
        {"role": "ai", "system_prompt": None, "text": LOOK["content"]},
    ]
    (state,) = read(swe_agent_states, [{"instance_id": "a", "trajectory": rows}])
    assert state["state_messages"] == [SYSTEM, TASK] and state["student_action"] == LOOK["content"]


def test_each_attempt_of_a_retry_is_a_trace(read: Any) -> None:
    attempts = [{"history": [SYSTEM, TASK, {**LOOK, "content": f"```\n{text}\n```"}]} for text in "ab"]
    states = read(swe_agent_states, {"attempts": attempts, **attempts[1]}, "a.traj")
    assert [state["student_action"] for state in states] == ["```\na\n```", "```\nb\n```"]
    assert len({state["state_id"] for state in states}) == 2


@pytest.mark.parametrize("attempts", [2, [1, 2], []])
def test_a_number_of_attempts_is_not_a_list_of_attempts(read: Any, attempts: Any) -> None:
    assert len(read(swe_agent_states, {"attempts": attempts, "history": [SYSTEM, TASK, LOOK]})) == 1


def test_tools_and_outcome_of_a_chat_are_kept(read: Any) -> None:
    row = {"messages": [SYSTEM, TASK, LOOK], "tools": [SCHEMA], "resolved": True}
    (state,) = read(swe_agent_states, row)
    assert (state.get("tools"), state.get("reward")) == ([SCHEMA], 1.0)


def test_an_error_in_the_second_result_of_a_turn_is_found(read: Any) -> None:
    two = {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b")]}
    told = [
        {"role": "tool", "tool_call_id": f"c-{name}", "content": text}
        for name, text in (("a", "ok"), ("b", "Error: x"))
    ]
    states = read(swe_agent_states, {"messages": [SYSTEM, TASK, two, *told, LOOK]})
    assert [state.get("error") for state in states] == ["Error: x", None]


def test_an_image_leaves_a_mark(read: Any) -> None:
    shown = [{"type": "text", "text": "See: "}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
    (state,) = read(swe_agent_states, {"messages": [{"role": "user", "content": shown}, LOOK]})
    assert state["state_messages"][0]["content"] == "See: [image]"


# OpenHands


def test_a_list_of_events_is_a_log_and_its_tools_are_kept(read: Any) -> None:
    """OpenHands' `save_trajectory_path` and its web page write the events without a `history` around them."""
    events = [
        {"source": "agent", "action": "system", "args": {"content": "Rules.", "tools": [SCHEMA]}},
        {"source": "user", "action": "message", "args": {"content": "Fix it."}},
        {"source": "user", "action": "run", "args": {"command": "date"}},
        {"source": "agent", "action": "condensation", "args": {"summary": "so far"}},
        {"source": "agent", "action": "run", "args": {"command": "ls", "thought": "Look."}},
        {"source": "agent", "observation": "run", "content": "no", "extras": {"metadata": {"exit_code": 2}}},
    ]
    (state,) = read(openhands_states, events)
    assert (roles(state), state.get("tools"), state.get("error")) == ("system user", [SCHEMA], "no")
    assert '{"name": "run", "arguments": {"command": "ls"}}' in state["student_action"]


def test_a_history_of_pairs_is_a_log(read: Any) -> None:
    asked = {"source": "user", "action": "message", "args": {"content": "Fix it."}}
    done = {"source": "agent", "action": "run", "args": {"command": "ls"}}
    seen = {"source": "agent", "observation": "run", "content": "a.py", "extras": {"exit_code": 0}}
    (state,) = read(openhands_states, {"history": [[asked, {"observation": "null"}], [done, seen]]})
    assert roles(state) == "user"


def sdk_text(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def sdk_action(name: str, response: str, thought: str = "") -> dict[str, Any]:
    made = {"id": f"c-{name}", "name": name, "arguments": '{"command": "ls"}', "origin": "completion"}
    action = {"kind": "TerminalAction", "command": "ls"}
    shared = {"tool_call_id": made["id"], "tool_call": made, "llm_response_id": response, "action": action}
    return {"kind": "ActionEvent", "source": "agent", "thought": sdk_text(thought), **shared}


def sdk_result(name: str, **observation: Any) -> dict[str, Any]:
    return {"kind": "ObservationEvent", "tool_call_id": f"c-{name}", "observation": observation}


def test_the_log_of_openhands_agent_sdk(read: Any) -> None:
    """The reader made calls to a tool named after a whole event, as `action` is an object in this log."""
    events = [
        {"kind": "SystemPromptEvent", "system_prompt": sdk_text("Rules.")[0], "tools": [{"kind": "TerminalTool"}]},
        {"kind": "MessageEvent", "source": "user", "llm_message": {"role": "user", "content": sdk_text("Fix it.")}},
        {"kind": "ConversationStateUpdateEvent", "key": "stats", "value": {}},
        sdk_action("a", "r1", "Look twice."),
        sdk_action("b", "r1"),
        sdk_result("a", content=sdk_text("a.py"), is_error=False, exit_code=0),
        sdk_result("b", content=sdk_text("none"), is_error=True, exit_code=None),
        sdk_action("finish", "r2"),
        {"kind": "AgentErrorEvent", "tool_call_id": "c-finish", "error": "no such tool"},
    ]
    first, second = read(openhands_states, {"history": events}, "output.json")
    assert first["student_action"].startswith("Look twice.") and first["student_action"].count("<tool_call>") == 2
    assert (roles(first), roles(second)) == ("system user", "system user assistant tool tool")
    assert (first.get("error"), second.get("error"), "tools" in first) == ("none", "no such tool", False)


def test_a_chat_is_not_a_log_of_events(read: Any) -> None:
    """The reader took SWE-agent's `action`, a command, for the name of a tool."""
    with (
        pytest.warns(TraceWarning),
        pytest.raises(InnerError, match=r"a chat, not OpenHands' log.*use swe_agent_states"),
    ):
        read(openhands_states, {"history": [SYSTEM, TASK, {**LOOK, "action": "ls\n", "thought": "Look."}]})


# τ-bench and τ²-bench


def test_an_error_of_an_agent_without_tool_calls_is_found(read: Any) -> None:
    act = {"role": "assistant", "content": 'Action:\n{"name": "pay", "arguments": {}}'}
    told = {"role": "user", "content": "API output: Error: no money"}
    states = read(
        tau_bench_states, [{"traj": [SYSTEM, TASK, act, told, act, TASK], "reward": 0.0, "info": {"task": {}}}]
    )
    assert [state.get("error") for state in states] == ["Error: no money", None]


def tau2_call(who: str) -> list[dict[str, Any]]:
    made = {"id": f"c-{who}", "name": f"of_{who}", "arguments": {"a": 1}, "requestor": who}
    role = "assistant" if who == "assistant" else "user"
    answer = {"role": "tool", "id": f"c-{who}", "content": "none", "requestor": who, "error": who == "assistant"}
    return [{"role": role, "content": None, "tool_calls": [made]}, answer]


def test_tau2_bench_shows_the_agent_what_the_agent_saw(read: Any) -> None:
    """Not the calls that the simulated user made on its own phone; and the greeting is not an action."""
    greeting = {"role": "assistant", "content": "Hi!", "tool_calls": None}
    chat = [
        greeting,
        TASK,
        *tau2_call("user"),
        TASK,
        *tau2_call("assistant"),
        {"role": "assistant", "content": "Done."},
    ]
    run = {"task_id": "0", "reward_info": {"reward": 1.0}, "messages": chat, "info": None}
    info = {"environment_info": {"domain_name": "telecom", "policy": "Rules."}}
    states = read(tau_bench_states, {"info": info, "tasks": [], "simulations": [run, run]})
    first, second = states[:2]
    assert len(states) == 4 and len({state["state_id"] for state in states}) == 4
    assert first["state_messages"][0] == SYSTEM and roles(first) == "system assistant user user"
    assert "of_assistant" in first["student_action"] and (first.get("error"), first.get("reward")) == ("none", 1.0)
    assert roles(second) == "system assistant user user assistant tool"


# Harbor


def harbor_step(source: str, message: str = "", calls: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    made = [{"tool_call_id": f"c-{name}", "function_name": name, "arguments": {"keys": "ls"}} for name in calls]
    return {"source": source, "message": message, "tool_calls": made or None, **more}


def results(*contents: Any) -> dict[str, Any]:
    return {"results": [{"content": content} for content in contents]}


def harbor(*steps: Mapping[str, Any]) -> dict[str, Any]:
    agent = {"name": "a", "version": "1", "tool_definitions": [SCHEMA]}
    return {"schema_version": "ATIF-v1.6", "session_id": "s", "agent": agent, "steps": steps}


def test_harbors_trajectory(read: Any) -> None:
    document = harbor(
        harbor_step("system", "Rules."),
        harbor_step("user", "Fix it."),
        harbor_step("agent", "Copied.", is_copied_context=True),
        harbor_step("system", "The context was cut."),
        harbor_step("agent", "Look.", ("sh", "wait"), observation=results("<returncode>1</returncode>")),
        harbor_step(
            "agent", "Again.", ("sh",), observation={"results": [{"source_call_id": "c-sh", "content": "a.py"}]}
        ),
        harbor_step("agent", "Say.", observation=results([{"type": "image", "source": {}}])),
        harbor_step("agent", "Done."),
    )
    states = read(traces.harbor_states, document, "hello__x1/agent/trajectory.json")
    assert [state["student_action"].split("\n")[0] for state in states] == ["Look.", "Again.", "Say.", "Done."]
    assert roles(states[-1]) == "system user assistant assistant tool tool assistant tool assistant user"
    assert [message["content"] for message in states[-1]["state_messages"]][4:6] == ["", "<returncode>1</returncode>"]
    assert states[-1]["state_messages"][-1]["content"] == "[image]"
    assert [bool(state.get("error")) for state in states] == [True, False, False, False]
    assert states[0]["state_id"] == "hello__x1/trajectory:1:3" and states[0].get("tools") == [SCHEMA]


# What is refused, and told


@pytest.mark.parametrize(
    ("reader", "document", "said"),
    [
        (load_states, {"history": [], "info": {}}, "state_id is None.*'history', 'info'; this is a trace of SWE-agent"),
        (
            swe_agent_states,
            {"traj": [SYSTEM]},
            "no 'history' or .*'traj'; this is an episode of τ-bench: use tau_bench",
        ),
        (swe_agent_states, harbor(), "'steps'; this is a trajectory of Harbor: use harbor_states"),
        (openhands_states, {"messages": [SYSTEM]}, "no 'history' .*'messages'; this is a chat: use swe_agent_states"),
        (
            tau_bench_states,
            {"conversations": []},
            "'conversations'; these are chats: for swe_agent_states, name the list",
        ),
        (tau_bench_states, {"simulations": [], "tasks": []}, "no 'traj' or 'messages'.*these are results of τ²-bench"),
        (tau_bench_states, {"messages_display": "User: hi"}, r"\(its keys are 'messages_display'\)"),
        (swe_agent_states, [7, 8], "a trace must be an object, this is a int"),
        (swe_agent_states, 7, "a trace must be an object, this is a int"),
        (swe_agent_states, {"messages": [SYSTEM, TASK]}, "the agent did nothing: its messages are 1 system, 1 user"),
        (traces.harbor_states, harbor(harbor_step("user", "x")), "the agent did nothing: its messages are 1 user"),
    ],
)
def test_a_refusal_says_what_was_seen(read: Any, reader: Any, document: Any, said: str) -> None:
    with pytest.warns(TraceWarning), pytest.raises(InnerError, match=said):
        read(reader, document)


def test_an_event_in_a_line_of_its_own_is_explained(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(json.dumps({"kind": "MessageEvent", "id": "1"}))
    with (
        pytest.warns(TraceWarning),
        pytest.raises(InnerError, match="one event of OpenHands: write all events as one list"),
    ):
        openhands_states(tmp_path / "events.jsonl")


def test_a_trace_without_an_action_is_told_and_the_rest_kept(read: Any) -> None:
    with pytest.warns(TraceWarning, match="record 2: the agent did nothing"):
        assert len(read(swe_agent_states, [{"messages": [SYSTEM, TASK, LOOK]}, {"messages": [SYSTEM, TASK]}])) == 1
