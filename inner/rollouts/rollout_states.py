"""The states of a sampled rollout, in the form of recorded traces.

    SampledRollout (sample.py) ──▶ a TraceState for each of its own turns in which the student took an action

Not promised: states of turns that are not in the sample.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from inner.replay.actions import Message, action_text
from inner.replay.states import TraceState, error_record
from inner.rollouts.sample import SampledRollout


def rollout_states(
    rollout: SampledRollout, name: str, tools: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
) -> list[TraceState]:
    """Return one state for every turn of the rollout's own in which the student took an action.

    tools  environment's name ("" for none) -> JSON schemas"""
    messages = rollout["messages"]
    states = []
    schemas = (tools or {}).get(rollout["environment"] or "", ())
    for i in range(max(1, rollout["first"]), len(messages)):
        action = action_text(messages[i])
        if messages[i].get("role") != "assistant" or not action:
            continue
        state: TraceState = {
            "state_id": f"{name}:{i}",
            "state_messages": messages[:i],
            "student_action": action,
            "reward": rollout["reward"],
            "error": None,
        }
        state.update(_first_failure(messages[i + 1 :]))  # pyright: ignore[reportCallIssue, reportArgumentType]
        if (entropy := rollout["unsure"].get(str(i))) is not None:
            state["student_entropy"] = entropy
        if schemas:
            state["tools"] = [dict(schema) for schema in schemas]
        states.append(state)
    return states


def _first_failure(results: Sequence[Message]) -> dict[str, Any]:
    """Return the first failed call's error, and error_kind and hint_template_key if the environment named them."""
    for message in results:
        if message.get("role") != "tool":
            break
        if record := error_record(message.get("content")):
            return {key: record[key] for key in ("error", "error_kind", "hint_template_key") if key in record}
    return {}
