"""How unsure a model is at states of outside traces: the formula, excerpts of three formats, the replay's gate."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inner import InnerError, Teacher, TraceState, openhands_states, replay_trace, swe_agent_states, tau_bench_states
from inner.channels.state_entropy import measure_entropy
from tests.support.tiny_models import tiny_model_folder

DATA = Path(__file__).parents[1] / "data" / "traces"
STATE: TraceState = {
    "state_id": "s/1",
    "state_messages": [{"role": "user", "content": "list the files"}],
    "student_action": "ls -a",
}


def loaded(name: str) -> tuple[Any, Any]:
    folder = tiny_model_folder(name)
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def qwen() -> tuple[Any, Any]:
    return loaded("qwen3")


def test_it_is_the_mean_entropy_at_the_actions_tokens(qwen: tuple[Any, Any]) -> None:
    model, tokenizer = qwen
    model.train()
    (found,) = measure_entropy(model, tokenizer, [STATE])
    assert model.training and "student_entropy" not in STATE
    context = tokenizer.apply_chat_template(STATE["state_messages"], add_generation_prompt=True, return_dict=False)
    turn = {"role": "assistant", "content": "ls -a"}
    whole = tokenizer.apply_chat_template([*STATE["state_messages"], turn], return_dict=False)
    assert whole[: len(context)] == context
    with torch.no_grad():
        p = model.eval()(torch.tensor([whole])).logits[0, len(context) - 1 : -1].softmax(-1).double()
    assert found["student_entropy"] == pytest.approx(float(-(p * p.log()).sum(-1).mean()), rel=1e-5)


def test_a_model_that_is_sure_has_less(qwen: tuple[Any, Any]) -> None:
    model, tokenizer = loaded("qwen3")
    (before,) = measure_entropy(model, tokenizer, [STATE])
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1000.0)
    (after,) = measure_entropy(model, tokenizer, [STATE])
    assert 0 <= after["student_entropy"] < 0.8 * before["student_entropy"]


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (tau_bench_states, "tau_bench.jsonl"),
        (swe_agent_states, "swe_agent_text.traj"),
        (openhands_states, "openhands.jsonl"),
    ],
)
def test_traces_of_others_pass_the_gate_of_uncertainty(
    qwen: tuple[Any, Any], read: Callable[..., list[TraceState]], name: str, tmp_path: Path
) -> None:
    """The gate refused them all, because they do not say how unsure their agent was."""
    states = read(DATA / name)
    teacher = Teacher("nobody", 0.0, 0.0, base_url="http://127.0.0.1:9/v1", key_env=None)
    with pytest.raises(InnerError, match="measure_entropy"):
        asyncio.run(replay_trace(states, [teacher], 1.0, ledger=tmp_path / "l", min_student_entropy=0.5))
    measured = measure_entropy(*qwen, states)
    values = [state["student_entropy"] for state in measured]
    assert len(values) == len(states) and all(0.0 < value <= torch.log(torch.tensor(400.0)) for value in values)
    asked = asyncio.run(
        replay_trace(measured, [teacher], 1.0, ledger=tmp_path / "m", min_student_entropy=max(values) + 1)
    )
    assert not list(asked), "no state is that unsure, so no teacher is asked"


def test_what_a_state_says_stays_and_a_long_context_loses_its_beginning(qwen: tuple[Any, Any]) -> None:
    model, tokenizer = qwen
    said, long = measure_entropy(
        model,
        tokenizer,
        [{**STATE, "student_entropy": 1.5}, {**STATE, "state_messages": [{"role": "user", "content": "x" * 9000}]}],
    )
    assert said["student_entropy"] == 1.5 and 0 < long["student_entropy"] < 10


def test_a_model_that_cannot_write_the_state_says_which() -> None:
    model, tokenizer = loaded("qwen3")
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        InnerError, match=r"state s/1: this model's chat template cannot write it.*roles must alternate"
    ):
        measure_entropy(model, tokenizer, [STATE])
    tokenizer.chat_template = None
    with pytest.raises(InnerError, match="no chat template"):
        measure_entropy(model, tokenizer, [STATE])
