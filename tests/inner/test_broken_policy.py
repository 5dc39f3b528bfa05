"""A policy that could gain by breaking its reward: GRPO on a vocabulary of 64 tokens, one token per answer."""

import tempfile
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from inner.settings.inner import InnerConfig, Seeds
from inner.train.grpo import _silence_libraries, trainer_arguments
from inner.train.trainer import ComposerReplicationTrainer
from inner.usercode.reward_calls import RewardCalls
from tests.inner.test_reward_calls import Listener

torch.set_num_threads(1)
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
N = 64
WRONG, RIGHT, MALFORMED = range(2, 4), range(4, 32), range(32, N)
AT_FIRST = {WRONG: 0.37, RIGHT: 0.12, MALFORMED: 0.51}


def toy_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(N)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t0")


def toy_model() -> Qwen2ForCausalLM:
    """Taught to answer as AT_FIRST has it."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=N, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    share = torch.zeros(N)
    for tokens, mass in AT_FIRST.items():
        share[list(tokens)] = mass / len(tokens)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        logits: Any = model(torch.arange(2, 10)[:, None]).logits
        optimizer.zero_grad()
        (-(logits[:, -1].log_softmax(-1) * share).sum(-1).mean()).backward()
        optimizer.step()
    return model


def train_toy(broken: str, steps: int, model: Any = None) -> tuple[list[float], Mapping[str, list[float]]]:
    """-> the share of malformed answers in each batch, and what the trainer has noted of each step."""
    shares: list[float] = []

    def reward(completions: list[str], **columns: Any) -> list[float]:
        answers = [int(text[1:]) if text else 0 for text in completions]
        if len(answers) == 32:
            shares.append(sum(a not in RIGHT and a not in WRONG for a in answers) / len(answers))
        if any(a not in RIGHT and a not in WRONG for a in answers):
            raise ValueError("no answer in it")
        return [1.0 if a in RIGHT else -1.0 for a in answers]

    config = InnerConfig(
        model="toy", lr=3e-3, batch_size=32, data={"prompts": "p.jsonl"}, rewards={"function": "r.py:f"},
        sampling={"num_generations": 8, "max_completion_length": 1}, grpo={"objective": "grpo"},
    )  # fmt: skip
    calls = RewardCalls(3, 0.0, 8, time.monotonic, Listener(), broken)
    with tempfile.TemporaryDirectory() as folder, _silence_libraries():
        arguments = trainer_arguments(config, Seeds(data=0, noise=1), folder)
        arguments.max_steps = steps
        trainer = ComposerReplicationTrainer(
            model=model or toy_model(), reward_funcs=reward, args=arguments, processing_class=toy_tokenizer(),
            train_dataset=Dataset.from_list([{"prompt": f"t{i}"} for i in range(2, 10)]), reward_calls=calls,
        )  # fmt: skip
        trainer.log = lambda *said: None  # type: ignore[method-assign]
        trainer.train()
    return shares, trainer._metrics["train"]


@pytest.mark.slow
def test_a_policy_gains_nothing_by_breaking_its_reward() -> None:
    shares, noted = train_toy("worst", steps=150)
    assert shares[0] > 0.4 and sum(shares[-20:]) / 20 < 0.05 and sum(noted["reward"][-20:]) / 20 > 0.9


@pytest.mark.slow
def test_where_a_broken_reward_counts_as_none_it_stays_broken_behind_a_perfect_reward() -> None:
    """The setting "none" keeps the fault: the reward that is shown leaves out a quarter of the completions."""
    shares, noted = train_toy("none", steps=300)
    assert sum(shares[-20:]) / 20 > 0.15 and sum(noted["reward"][-20:]) / 20 > 0.99
