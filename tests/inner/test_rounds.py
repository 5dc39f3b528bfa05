"""Rounds as a function of (t, θ_t, carried), and generation as a function of a question.  No Monarch is needed here."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from inner.channels.teacher import trained_parameters
from inner.errors import InnerError, RewardFailed
from inner.extras import monarch as actors
from inner.extras.monarch.rounds import (
    Round,
    RoundTrainer,
    Weights,
    read_weights,
    refuse_unrepeatable,
    write_moments,
    write_weights,
)
from inner.extras.monarch.wire import Generation, generate, pad_left, read_random_state, until_end, write_random_state
from inner.models.lora import ADAPTER
from inner.settings.inner import InnerConfig, InnerLoop, Seeds
from inner.train.build import build_inner, load_start, publish_model
from tests.inner.test_toolworld import SMALL, small_folder
from tests.support.tables import merge_tables

STEPS = 2
SEEDS = Seeds(data=1, noise=2)


def make_config(**changes: Any) -> InnerConfig:
    return InnerConfig(**merge_tables(SMALL, {"batch_size": 8, "sdpo": {"weight": 0.1}}, changes))


def start_weights() -> Weights:
    return read_weights(load_start(small_folder(), "float32")[0])


def trainer(config: InnerConfig | None = None, **options: Any) -> RoundTrainer:
    return RoundTrainer(config or make_config(), small_folder(), {}, SEEDS, steps=STEPS, **options)


def equal(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def three() -> Iterator[list[Round]]:
    """Three rounds of one trainer, each from where the one before ended."""
    one = trainer()
    rounds: list[Round] = []
    weights = start_weights()
    for t in range(3):
        rounds.append(one.run(t, weights))
        weights = rounds[-1].weights
    yield rounds
    one.close()


@pytest.mark.slow
def test_another_process_would_end_a_round_with_the_same_bits(three: list[Round]) -> None:
    again = trainer().run(2, three[1].weights, three[1].carried)
    assert equal(again.weights, three[2].weights)
    assert again.numbers["reward"] == three[2].numbers["reward"]
    for mine, theirs in zip(again.carried.moments, three[2].carried.moments, strict=True):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[kind], theirs[kind]) for kind in mine)


def test_moments_and_the_number_of_the_round_matter(three: list[Round]) -> None:
    assert not equal(trainer().run(2, three[1].weights).weights, three[2].weights)
    assert not equal(trainer().run(3, three[1].weights, three[1].carried).weights, three[2].weights)


def test_the_rate_follows_the_replicas_of_the_newest_outer_step(three: list[Round]) -> None:
    one = trainer()
    assert one.run(0, start_weights(), replicas=4).numbers["lr"] == pytest.approx(2 * three[0].numbers["lr"])
    one.close()


def test_what_was_drawn_before_does_not_matter(three: list[Round]) -> None:
    """As of a process that has loaded other things first."""

    def draw(loop: InnerLoop) -> None:
        torch.rand(1000)

    torch.manual_seed(77)
    again = trainer(fit=draw).run(0, start_weights())
    assert equal(again.weights, three[0].weights)


@pytest.mark.slow
def test_a_round_out_of_order_begins_anew_with_the_moments_at_hand(three: list[Round]) -> None:
    """The run went on without this replica: it comes back at a later step."""
    one = trainer()
    first = one.run(0, start_weights())
    late = one.run(2, three[1].weights)
    other = trainer().run(2, three[1].weights, first.carried)
    assert equal(late.weights, other.weights)
    one.close()


@pytest.mark.slow
def test_rounds_without_self_teacher_with_accumulation_and_dynamic_sampling() -> None:
    config = make_config(
        sdpo={"weight": 0.0}, gradient_accumulation_steps=2, grpo={"objective": "dapo"}, sampling={"num_generations": 4}
    )
    one, weights, rounds = trainer(config), start_weights(), []
    for t in range(2):
        rounds.append(one.run(t, weights))
        weights = rounds[-1].weights
    again = trainer(config).run(1, rounds[0].weights, rounds[0].carried)
    assert rounds[0].numbers["further_generations"] > 0  # else this test shows nothing of them
    assert equal(again.weights, rounds[1].weights)


@pytest.mark.slow
def test_an_adapter_alone_travels(tmp_path: Path) -> None:
    config = make_config(lora={"r": 2})
    publish_model(config, tmp_path)
    start = read_weights(load_start(tmp_path, "float32", config.lora)[0])
    assert all(".lora_" in name for name in start) and (tmp_path / ADAPTER).is_dir()
    one = RoundTrainer(config, tmp_path, {}, SEEDS, steps=STEPS)
    first = one.run(0, start)
    second = one.run(1, first.weights)
    again = RoundTrainer(config, tmp_path, {}, SEEDS, steps=STEPS).run(1, first.weights, first.carried)
    assert equal(again.weights, second.weights) and not equal(first.weights, start)


@pytest.mark.slow
def test_an_error_of_the_users_comes_out_and_the_next_round_begins_anew(tmp_path: Path, three: list[Round]) -> None:
    (tmp_path / "reward.py").write_text(
        "import pathlib\n"
        "def score(completions, **_):\n"
        f"    if pathlib.Path({str(tmp_path / 'broken')!r}).exists():\n"
        "        raise ZeroDivisionError('the reward of a test')\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    config = make_config(rewards={"function": "reward.py:score", "retries": 0})
    one = RoundTrainer(config, small_folder(), {"reward": tmp_path / "reward.py"}, SEEDS, steps=4)
    good = one.run(0, start_weights())
    (tmp_path / "broken").touch()
    with pytest.raises(RewardFailed, match="the reward of a test"):  # after three batches
        one.run(1, good.weights)
    (tmp_path / "broken").unlink()
    assert equal(one.run(0, start_weights()).weights, good.weights)


def test_rounds_that_depend_on_more_are_refused() -> None:
    with pytest.raises(InnerError, match="multiple of 4"):
        refuse_unrepeatable(make_config(grpo={"steps_per_generation": 4}), 6)
    with pytest.raises(InnerError, match="average over a whole session"):
        refuse_unrepeatable(make_config(sdpo={"teacher": "ema"}), STEPS)
    with pytest.raises(InnerError, match="inside a generation"):
        refuse_unrepeatable(make_config(), 0)
    with pytest.raises(InnerError, match="not of this model"):
        write_weights(torch.nn.Linear(2, 2), {"weight": torch.zeros(2, 2)})
    with pytest.raises(InnerError, match="optimizer state has 1 parameters"):
        model = torch.nn.Linear(2, 2)
        write_moments(torch.optim.Adam(model.parameters()), model, [{}])


def test_moments_are_copies_and_lie_with_their_parameters() -> None:
    model = torch.nn.Linear(2, 1)
    moments = [{"step": torch.tensor(3.0), "exp_avg": torch.ones_like(p)} for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    write_moments(optimizer, model, moments)
    for p, state in zip(model.parameters(), moments, strict=True):
        assert optimizer.state[p]["step"] == 3 and torch.equal(optimizer.state[p]["exp_avg"], state["exp_avg"])
        assert optimizer.state[p]["exp_avg"] is not state["exp_avg"]
    assert set(trained_parameters(model)) == {"weight", "bias"}


# -------------------------------------------------------------------- generation elsewhere


def test_the_answer_is_trls_and_so_is_the_random_state_after_it() -> None:
    loop: Any = build_inner(make_config(), small_folder(), {}, SEEDS)
    trl = loop.trainer
    prompts = [trl._render_ids(row["prompt"], True) for row in list(trl.train_dataset)[:6]]
    prompts[1] = prompts[1][:-1]  # of another length
    torch.manual_seed(5)
    asked = Generation(
        prompt_ids=prompts,
        sampling=trl.generation_config.to_dict(),
        random_state=read_random_state(),
        eos_ids=list(trl.eos_token_ids),
        pad_to=None,
        casts=False,
    )
    theirs, logprobs = trl._generate_single_turn(prompts, None, {}, 1)
    after = read_random_state()
    torch.manual_seed(6)  # the other process is anywhere
    other = load_start(small_folder(), "float32")[0]
    said = generate(other, asked)
    assert said.ids == theirs and logprobs is None
    assert torch.equal(said.random_state[0], after[0])
    assert generate(other, asked).ids == theirs  # and again
    assert generate(other, replace(asked, random_state=after)).ids != theirs


def test_random_states_come_back() -> None:
    state = read_random_state()
    drawn = torch.rand(3)
    write_random_state(state)
    assert torch.equal(torch.rand(3), drawn)


def test_padding_and_ends() -> None:
    ids, mask = pad_left([[1, 2], [3]], 9, None)
    assert ids.tolist() == [[1, 2], [9, 3]] and mask.tolist() == [[1, 1], [0, 1]]
    assert pad_left([[1, 2, 3]], 9, 4)[0].tolist() == [[9, 1, 2, 3]]
    assert until_end([4, 7, 5, 7], [7]) == [4, 7] and until_end([4, 5], [7]) == [4, 5]
    assert until_end([7, 7], [7, 8]) == [7] and until_end([], [7]) == []


# -------------------------------------------------------------------- the package


@pytest.mark.skipif(find_spec("monarch") is not None, reason="torchmonarch is installed")
def test_without_torchmonarch_an_actor_names_the_extra_and_not_the_other_package() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"TrainerActor needs torchmonarch, .*serverless-diloco\[monarch\]"):
        _ = actors.TrainerActor


def test_every_name_of_the_package_is_there_where_torchmonarch_is() -> None:
    for name in actors.__all__:
        try:
            assert getattr(actors, name).__name__ == name
        except ModuleNotFoundError as missing:
            assert (missing.name or "").partition(".")[0] == "monarch" and find_spec("monarch") is None
    with pytest.raises(AttributeError, match="no attribute 'MonarchExecutor'"):
        _ = actors.MonarchExecutor
