"""A worker with the checker's model is believed; one with another model, temperature or numbers made up is not."""

import copy
import math
import types
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inner import check_rollouts
from inner.extras.rollout_check.check import _token_statistics

Rollout = tuple[list[int], list[int], list[float]]


def small_model(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, tie_word_embeddings=False)).eval()
    model.lm_head.weight.data *= 20.0  # else every token is as likely as another
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model(0)


@torch.no_grad()
def answers(model: Any, temperature: float = 1.0, count: int = 6, length: int = 40) -> list[Rollout]:
    rng = torch.Generator().manual_seed(3)
    found: list[Rollout] = []
    for i in range(count):
        tokens, logps = [i + 1, 5], list[float]()
        for _ in range(length):
            every = (model(input_ids=torch.tensor([tokens])).logits[0, -1].float() / temperature).log_softmax(-1)
            tokens.append(int(torch.multinomial(every.exp(), 1, generator=rng)))
            logps.append(float(every[tokens[-1]]))
        found.append((tokens[:2], tokens[2:], logps))
    return found


def asked(model: Any, rollouts: list[Rollout]) -> list[Rollout]:
    """The same tokens with the log-probs of the right model."""
    return [(p, c, _token_statistics(model, p, c, 1.0)[0].tolist()) for p, c, _ in rollouts]


def test_an_honest_worker_is_believed(model: Any) -> None:
    found = check_rollouts(model, answers(model))
    assert found.doubts == [] and found.disagreement < 1e-4 and found.tokens == 240 and found.positions == 32


@pytest.mark.slow
def test_so_is_one_with_another_dtype(model: Any) -> None:
    assert check_rollouts(model, answers(copy.deepcopy(model).bfloat16())).doubts == []


def test_and_one_at_the_temperature_that_was_asked_for(model: Any) -> None:
    assert check_rollouts(model, answers(model, 0.7), temperature=0.7).doubts == []


@pytest.mark.quick(1)
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_another_temperature_is_found_even_when_the_right_model_gave_the_numbers(
    model: Any, temperature: float
) -> None:
    rollouts = answers(model, temperature)
    assert "its log-probs are not the model's" in check_rollouts(model, rollouts).doubts[0]
    (doubt,) = check_rollouts(model, asked(model, rollouts)).doubts
    assert ("likelier" if temperature < 1 else "less likely") in doubt


def test_another_model_is_found_either_way(model: Any) -> None:
    rollouts = answers(small_model(1))
    assert len(check_rollouts(model, rollouts).doubts) == 2
    assert "less likely than draws" in check_rollouts(model, asked(model, rollouts)).doubts[0]


def test_numbers_that_are_made_up_are_found(model: Any) -> None:
    rollouts = [(p, c, [-1.0] * len(c)) for p, c, _ in answers(model)]
    assert check_rollouts(model, rollouts).doubts
    for bad in (math.nan, math.inf, -math.inf):
        assert check_rollouts(model, [(p, c, [bad] * len(c)) for p, c, _ in rollouts]).doubts


@pytest.mark.slow
def test_a_few_tokens_without_a_log_prob_are_left_out(model: Any) -> None:
    """vLLM has none for some; one of them made an honest worker a doubted one."""
    rollouts = answers(model)
    for _, _, claimed in rollouts[:1]:
        claimed[3] = math.nan
    found = check_rollouts(model, rollouts, positions=10_000)
    assert found.doubts == [] and (found.positions, found.tokens) == (239, 240)
    for _, _, claimed in rollouts:
        claimed[:3] = [math.nan] * 3
    assert check_rollouts(model, rollouts, positions=10_000).doubts, "more than one of twenty"


def test_the_surprise_is_that_of_the_formula(model: Any) -> None:
    prompt, completion, _ = answers(model, count=1, length=3)[0]
    with torch.no_grad():
        logps, entropy, spread = _token_statistics(model, prompt, completion, 1.0)
        every = model(input_ids=torch.tensor([prompt + completion])).logits[0, 1:4].double().softmax(-1)
    for t in range(3):
        p = every[t]
        assert logps[t] == pytest.approx(float(p[completion[t]].log()))
        assert entropy[t] == pytest.approx(float(-(p * p.log()).sum()))
        assert spread[t] == pytest.approx(float((p * (p.log() + entropy[t]) ** 2).sum()))
    found = check_rollouts(model, [(prompt, completion, logps.tolist())])
    assert found.surprise == pytest.approx(float((-logps - entropy).sum() / spread.sum().sqrt()))


@pytest.mark.slow
def test_the_surprise_of_honest_workers_is_a_standard_normal(model: Any) -> None:
    z = [check_rollouts(model, [rollout]).surprise for rollout in answers(model, count=60, length=20)]
    mean = sum(z) / len(z)
    spread = (sum((v - mean) ** 2 for v in z) / (len(z) - 1)) ** 0.5
    assert abs(mean) < 0.4 and 0.7 < spread < 1.3


class Sure:
    """A model with the same logits everywhere, (V,)."""

    device = torch.device("cpu")

    def __init__(self, logits: torch.Tensor) -> None:
        self.every = logits.log_softmax(-1)
        self._table = torch.nn.Embedding(len(logits), 1)

    def get_input_embeddings(self) -> Any:
        return self._table

    def __call__(self, input_ids: torch.Tensor) -> Any:
        return types.SimpleNamespace(logits=self.every.expand(1, input_ids.shape[1], -1))

    def draws(self, count: int, rng: torch.Generator) -> list[Rollout]:
        tokens = torch.multinomial(self.every.exp(), count, replacement=True, generator=rng)
        return [([1], tokens.tolist(), self.every[tokens].tolist())]


@pytest.mark.parametrize("sure", [0.5, 0.99, 0.999, 0.9999])
def test_an_honest_worker_of_a_model_that_is_sure_of_itself_is_believed(sure: float) -> None:
    """At .999 one in thirty has |z| > 5 by a single rare token; the normal distribution says one in two million."""
    logits = torch.full((16,), math.log((1 - sure) / 15))
    logits[0] = math.log(sure)
    model, rng = Sure(logits), torch.Generator().manual_seed(0)
    found = [check_rollouts(model, model.draws(32, rng)) for _ in range(400)]
    assert not [f.doubts for f in found if f.doubts]
    if sure == 0.999:
        assert sum(abs(f.surprise) > 5 for f in found) > 4, "or this test says nothing"


def test_and_a_worker_with_another_temperature_is_not() -> None:
    logits = torch.full((16,), math.log(0.001 / 15))
    logits[0] = math.log(0.999)
    model, rng = Sure(logits), torch.Generator().manual_seed(0)
    others = [check_rollouts(model, [(p, c, model.every[c].tolist())]) for p, c, _ in Sure(logits / 2).draws(256, rng)]
    assert "less likely than draws" in others[0].doubts[0] and others[0].chance < 1e-20


def test_the_chance_is_that_of_a_normal_variable_where_the_surprise_is_one() -> None:
    model = Sure(torch.linspace(-1, 1, 16))
    tokens = [0] * 300 + [15] * 40
    found = check_rollouts(model, [([1], tokens, model.every[tokens].tolist())])
    assert found.surprise > 5 and math.log(found.chance) == pytest.approx(-(found.surprise**2) / 2, rel=0.25)


def test_a_token_that_the_model_never_draws_is_found_and_one_that_it_has_not_is_refused() -> None:
    logits = torch.zeros(8)
    logits[3] = -math.inf
    model = Sure(logits)
    assert check_rollouts(model, [([1], [0, 1, 2], [-math.log(7)] * 3)]).doubts == []
    assert len(check_rollouts(model, [([1], [0, 3, 2], [-math.log(7)] * 3)]).doubts) == 1
    assert len(check_rollouts(model, [([1], [3], [-math.inf])]).doubts) == 2
    for tokens in ([8], [-1]):
        with pytest.raises(ValueError, match="the model has 8 tokens, numbered from 0"):
            check_rollouts(model, [([1], tokens, [-1.0])])


@pytest.mark.parametrize("rollout", [([], [1], [0.0]), ([1], [], []), ([1], [1, 2], [0.0])])
def test_a_rollout_that_does_not_fit_is_refused(model: Any, rollout: Rollout) -> None:
    with pytest.raises(ValueError, match="it needs a prompt, and as many log-probs as completion tokens"):
        check_rollouts(model, [rollout])
    with pytest.raises(ValueError, match="no rollout"):
        check_rollouts(model, [])
