"""Held-out scores: which weights make them, that a seed fixes them, and that training does not notice."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inner.rollouts.scoring import committed_weights
from inner.usercode.apart import begin_session, keep_apart
from inner.usercode.reward_calls import StandaloneHost
from tests.inner.test_grpo import after, build
from tests.inner.test_toolworld import WORLD

ROWS = WORLD.rows(24, seed=77)


def parameters_of(loop: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in loop.model.parameters()]


def test_a_seed_fixes_the_samples_and_greedy_needs_none() -> None:
    loop = build()
    sampled = [loop.score(ROWS, greedy=False, seed=seed)["reward"] for seed in (1, 1, 2)]
    greedy = [loop.score(ROWS, greedy=True, seed=seed)["reward"] for seed in (1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert greedy[0] == greedy[1]
    assert set(sampled[0]) <= {0.0, 1.0} and 0 < sum(sampled[0]) < len(ROWS)


def test_training_takes_the_same_bits_with_and_without_it() -> None:
    plain = build()
    plain.train(after(4))
    looked = build()
    looked.score(ROWS[:8], greedy=True, seed=3)
    calls: list[int] = []

    def stop() -> bool:
        calls.append(1)
        looked.score(ROWS[:8], greedy=len(calls) % 2 == 0, seed=len(calls))
        return len(calls) == 4

    looked.train(stop)
    assert all(torch.equal(a, b) for a, b in zip(parameters_of(plain), parameters_of(looked), strict=True))
    numbers, others = plain.pop_metrics(), looked.pop_metrics()
    assert numbers == others and numbers["samples"] == 32


def test_random_numbers_of_the_users_code_go_on_where_they_were() -> None:
    loop = build()
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    loop.score(ROWS[:8], greedy=False, seed=1)
    assert (random.random(), np.random.rand()) == expected


def test_a_rewards_random_numbers_go_on_where_they_were() -> None:
    """`verify --inner` takes no evaluation again: without this, it accuses every replica that had one."""
    drawn = list[float]()

    def noisy(completions: list[Any], **columns: Any) -> list[float]:
        drawn.append(random.random())
        return [0.0 for _ in completions]

    def numbers(*, with_evaluation: bool) -> list[float]:
        drawn.clear()
        begin_session()
        random.seed(5)
        loop = build()
        loop.trainer.reward_funcs[0] = loop._reward_calls.wrap_reward(keep_apart(noisy, Path("r.py")))
        steps = iter((1, 2))

        def stop() -> bool:
            if (step := next(steps)) == 1 and with_evaluation:
                before = len(drawn)
                loop.score(ROWS[:8], greedy=True, seed=3)
                assert len(drawn) > before
                del drawn[before:]
            return step == 2

        loop.train(stop)
        return list(drawn)

    assert numbers(with_evaluation=True) == numbers(with_evaluation=False)


def test_the_weights_are_the_committed_ones_not_the_live_ones() -> None:
    loop = build()
    committed = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
    loop.follow(lambda: 0, lambda: committed.items(), lambda: 1)
    before = loop.score(ROWS, greedy=True, seed=0)
    with torch.no_grad():
        for p in loop.model.parameters():
            p.mul_(0.0)
    live = parameters_of(loop)
    assert loop.score(ROWS, greedy=True, seed=0) == before
    assert all(torch.equal(a, b) for a, b in zip(parameters_of(loop), live, strict=True))
    loop.follow(lambda: 1, lambda: [(name, p.detach()) for name, p in loop.model.named_parameters()], lambda: 1)
    assert loop.score(ROWS, greedy=True, seed=0) != before


def test_nothing_is_copied_where_the_weights_are_the_committed_ones_already() -> None:
    model = torch.nn.Linear(3, 3)
    data = [p.data_ptr() for p in model.parameters()]
    same = lambda: [(name, p.detach().double()) for name, p in model.named_parameters()]  # noqa: E731
    with committed_weights(model, same):
        assert [p.data_ptr() for p in model.parameters()] == data
    with committed_weights(model, lambda: [(name, p.detach() + 1) for name, p in model.named_parameters()]):
        assert [p.data_ptr() for p in model.parameters()] != data
    assert [p.data_ptr() for p in model.parameters()] == data


def test_a_prompt_without_a_reward_is_nan_and_training_counts_none_missing(tmp_path: Any) -> None:
    (tmp_path / "rewards.py").write_text(
        "def score(completions, kind, **columns):\n    return [None if k == 0 else 1.0 for k in kind]\n"
    )
    loop = build(files={"reward": tmp_path / "rewards.py"}, rewards={"function": "rewards.py:score"})
    scores = loop.score(ROWS, greedy=True, seed=0)["reward"]
    assert [score != score for score in scores] == [row["kind"] == 0 for row in ROWS]
    assert loop._reward_calls.take_missing() == 0


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_models_mode_is_put_back(mode: str) -> None:
    loop = build()
    getattr(loop.model, mode)()
    loop.score(ROWS[:4], greedy=True, seed=0)
    assert loop.model.training == (mode == "train")


def test_an_answer_that_breaks_its_reward_counts_in_an_evaluation_too(tmp_path: Any) -> None:
    """Left out, a policy that answers half of the prompts with nonsense would look perfect."""
    (tmp_path / "rewards.py").write_text(
        "def score(completions, kind, b, **columns):\n"
        "    if any(k == 0 for k in kind):\n"
        "        raise ValueError('no answer in it')\n"
        "    return [float(n % 2) for n in b]\n"
    )
    loop = build(files={"reward": tmp_path / "rewards.py"}, rewards={"function": "rewards.py:score"})
    loop._reward_calls.host = Quiet()
    scores = loop.score(ROWS, greedy=True, seed=0)["reward"]
    assert scores == [0.0 if row["kind"] == 0 else float(row["b"] % 2) for row in ROWS] and 1.0 in scores
    assert loop._reward_calls.take_missing() == 0 and not loop.pop_metrics().get("reward_broken")


class Quiet(StandaloneHost):
    def pause(self, seconds: float) -> None: ...
