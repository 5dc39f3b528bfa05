"""Measures a model's entropy at the states of recorded traces, for traces whose own student is not available.

    state_messages (+ tools) │ the recorded action     one forward per state, without gradient
                             └─ H(π(· | tokens before)), at each of the action's tokens ──▶ mean, in nats per token

The result is written as `student_entropy`; replay_trace(min_student_entropy=) and --unsure choose states by it. In a
run's own traces, student_entropy is the entropy over a group's actions: another scale, so we keep an existing value.

Not promised: the entropy of the agent that acted; we measure the entropy of this model. A context with more tokens than
the model has positions loses its beginning.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from inner.channels.terms import backbone_states, causal_lm, eval_mode, logits_at, pad_rows
from inner.channels.turn_ids import context_and_actions, renderer
from inner.data.template_fault import require_template
from inner.errors import InnerError
from inner.replay.states import TraceState


def measure_entropy(model: nn.Module, tokenizer: Any, states: Iterable[TraceState]) -> list[TraceState]:
    """Return the states, each with `student_entropy`.   Raises InnerError if the template cannot write one."""
    with torch.no_grad(), eval_mode(model):
        return [state if "student_entropy" in state else _measured(model, tokenizer, state) for state in states]


def _measured(model: Any, tokenizer: Any, state: TraceState) -> TraceState:
    context, action = _ids(tokenizer, state)
    limit = getattr(causal_lm(model).config.get_text_config(), "max_position_embeddings", None) or len(context + action)
    action = action[: limit - 1]
    context = context[-(limit - len(action)) :]
    device = next(model.parameters()).device
    hidden = backbone_states(model, *pad_rows([context + action], device))
    logits_N_V = logits_at(model, hidden, [(0, len(context) - 1, len(action))]).float()
    entropy = torch.distributions.Categorical(logits=logits_N_V).entropy()
    return {**state, "student_entropy": float(entropy.mean())}


def _ids(tokenizer: Any, state: TraceState) -> tuple[list[int], list[int]]:
    """Return the ids of the messages and of the action."""
    require_template(tokenizer, state["state_messages"])
    try:
        context, (action,) = context_and_actions(state, [state["student_action"]], renderer(tokenizer), tokenizer)
    except InnerError as error:
        raise InnerError(
            f"state {state['state_id']}: {error}. Take the state out, or measure with a model whose template takes its "
            "messages."
        ) from error
    if not context or not action:
        raise InnerError(f"state {state['state_id']} has no tokens before its action, or no tokens in it. Take it out.")
    return context, action
