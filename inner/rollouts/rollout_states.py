"""Converts a recorded bundle to rollouts as messages, and a rollout to states as in recorded traces.  No torch.

    bundle (bundle.py) ──▶ SampledRollout (sample.py) ──▶ a TraceState for each turn of the student with an action

Not promised: tokens; states of turns that are not in the sample.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from inner.masking import secret_masker
from inner.replay.actions import Message, action_text
from inner.replay.states import TraceState, error_record
from inner.rollouts.sample import RolloutBatch, SampledRollout


def rollout_states(
    rollout: SampledRollout, name: str, tools: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
) -> list[TraceState]:
    """Return one state for every turn after the prompt in which the student took an action.

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


def bundle_rollouts(payload: bytes, secrets: Iterable[str] = ()) -> list[SampledRollout]:
    """Return all rollouts of a bundle.   secrets: texts to mask.   Raise ValueError if the bytes are not a bundle."""
    try:
        header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
        said = json.loads(header["__metadata__"]["bundle"])
        rewards = safetensors.numpy.load(payload)["rewards"]
        weights = np.asarray(said["weights"], np.float32)
        known = np.nansum(rewards * weights, axis=1)
        totals = np.where(np.isnan(rewards[:, weights != 0]).all(axis=1), np.nan, known).tolist()
        prompts = said.get("opened") or [said["prompts"][i] for i in said["prompt_of"]]
        batch, hidden = RolloutBatch(prompts, said["completions"], totals, said["environments"]), secret_masker(secrets)
        return [json.loads(hidden(json.dumps(batch.rollout_at(i)))) for i in range(len(prompts))]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, SafetensorError, RecursionError) as error:
        raise ValueError(f"not a bundle of rollouts: {type(error).__name__}: {error}") from error


def bundle_tokens(payload: bytes) -> int:
    """Return the number of tokens in a bundle that `bundle_rollouts` can read."""
    ids = safetensors.numpy.load(payload).get("ids")
    if ids is None:
        raise ValueError("not a bundle of rollouts: it has no ids")
    return int(ids.size)
