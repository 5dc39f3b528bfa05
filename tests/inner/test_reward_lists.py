"""Several rewards with weights: what is refused, how the files travel, what is summed, and what each is logged as."""

from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.model.fetch import fetch_files
from diloco.run.config import ConfigError, RunConfig
from diloco.run.founding import open_run
from inner.errors import RewardFailed
from inner.settings.inner import InnerConfig, InnerError, Seeds
from inner.train.grpo import GrpoLoop
from inner.train.task import load_task
from inner.usercode.check import check_data, check_inner
from inner.usercode.reward_calls import RewardCalls
from rendezvous.clock import SystemClock
from tests.inner.test_reward_calls import make_reward_calls
from tests.inner.test_toolworld import SMALL, small_folder
from tests.inner.test_trainer import make, rollouts
from tests.support.tables import merge_tables

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")

REWARDS = """
calls = []

def first(completions, log_metric, **columns):
    calls.append("first")
    log_metric("kl", len(completions))
    for number in range(100):
        log_metric(f"z{number:03d}" + "x" * 1000, number)
    log_metric("odd", "a text")
    return [float(i % 2) for i in range(len(completions))]

async def second(completions, **columns):
    calls.append("second")
    return [None if i == 0 else 2.0 for i in range(len(completions))]

def together(completions, **columns):
    return [float(len(calls))] * len(completions)
"""
LIST = {"a.py:first": 1.0, "a.py:second": 0.25}


def with_functions(functions: dict[str, Any], **settings: Any) -> InnerConfig:
    return InnerConfig(**merge_tables(SMALL, {"rewards": {"functions": functions}, **settings}))


def run_config(folder: Path, functions: dict[str, Any]) -> RunConfig:
    folder.mkdir(exist_ok=True)
    (folder / "a.py").write_text(REWARDS)
    inner = merge_tables(SMALL, {"rewards": {"functions": functions}})
    return RunConfig.from_dict({"inner": inner, "outer": {"sync_every": 2}}, folder)


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ({"a.py:f": "1"}, 'has no weight. Write "file.py:function" = 1.0'),
        ({"a.py:f": True}, "has no weight"),
        ({"a.py:f": float("nan")}, "has no weight"),
        ({"a.py": 1.0}, "names no function"),
        ({"a.py:f": 1.0, "b.py:f": 1.0}, "'a.py:f' and 'b.py:f' have the same name"),
        ({"a.py:f": 0.0, "a.py:g": 0}, "every reward the weight 0"),
    ],
)
def test_a_list_that_cannot_be_says_which_line(functions: dict[str, Any], words: str) -> None:
    with pytest.raises(InnerError) as refused:
        with_functions(functions)
    assert words in str(refused.value)


def test_weights_stand_in_one_place() -> None:
    with pytest.raises(InnerError, match=r"Move the function into that table as a line of its own: \"b.py:g\" = 1.0"):
        InnerConfig(rewards={"function": "b.py:g", "functions": LIST})
    with pytest.raises(InnerError, match=r"Leave inner.trl.reward_weights out"):
        with_functions(LIST, trl={"reward_weights": [1.0, 2.0]})


def test_a_list_with_a_missing_file_is_refused_on_the_laptop(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"inner.rewards.functions: there is no file .*b\.py"):
        run_config(tmp_path, {**LIST, "b.py:g": 1.0})
    (tmp_path / "b.py").write_text("def g(:\n")
    config = run_config(tmp_path, {**LIST, "b.py:g": 1.0})
    with pytest.raises(InnerError, match=r"inner.rewards.functions = 'b.py:g' is not Python"):
        check_data(config.inner, config.user_files())
    config = run_config(tmp_path, {"a.py:third": 1.0})
    with pytest.raises(InnerError, match="it defines first, second, together"):
        check_inner(config.inner, config.user_files())


def test_a_run_keeps_the_list_wherever_its_files_lie(tmp_path: Path) -> None:
    config = run_config(tmp_path / "here", LIST)
    run = open_run(config, str(tmp_path / "run"), SystemClock())
    files = fetch_files(run, tmp_path / "code")
    assert run.config.inner.rewards.weights == config.inner.rewards.weights
    assert list(run.config.inner.rewards.weights) == ["reward.first", "reward.second"]
    task = load_task(run.config.inner, files)
    assert [reward.__name__ for reward in task.rewards] == ["first", "second"]
    assert task.rewards[0].__globals__ is task.rewards[1].__globals__, "one file is one module"
    moved = run_config(tmp_path / "there", dict(reversed(LIST.items())))
    assert moved.mathematics() == config.mathematics(), "neither the folder nor the order of the lines counts"
    assert run_config(tmp_path / "there", {**LIST, "a.py:second": 0.5}).mathematics() != config.mathematics()


def test_rewards_are_summed_by_weight_and_logged_by_name(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = run_config(tmp_path, LIST)
    task = load_task(config.inner, config.user_files())
    model: Any = AutoModelForCausalLM.from_pretrained(small_folder())
    tokenizer: Any = AutoTokenizer.from_pretrained(small_folder())
    loop = GrpoLoop(config.inner, model, tokenizer, task, Seeds(data=0, noise=11))
    loop.train(lambda: True)
    found = loop.pop_metrics()
    assert found["reward/first"] == 0.5 and found["reward/second"] == 2.0
    size = config.inner.generation_size
    assert found["logged/kl"] == size and "kl" not in found, "what a reward logs is not TRL's"
    logged = [name for name in found if name.startswith("logged/")]
    assert len(logged) == 32 and max(map(len, logged)) == 64 and "logged/odd" not in found, "an offer carries them"
    assert found["reward"] == pytest.approx(0.5 + 0.25 * 2.0 * (size - 1) / size), "None: that one does not count"


def test_one_reward_stays_one_line_and_one_number() -> None:
    assert InnerConfig(rewards={"function": "a.py:f"}).rewards.named == {"reward": "a.py:f"}
    assert InnerConfig(rewards={"function": "a.py:f"}).rewards.weights == {}


def test_all_rewards_none_ends_the_session_at_the_third_batch_in_a_row() -> None:
    def unsure(completions: list[Any], **columns: Any) -> list[None]:
        return [None] * len(completions)

    def shy(completions: list[Any], **columns: Any) -> list[None]:
        return [None] * len(completions)

    trainer = make(reward=[unsure, shy], reward_calls=make_reward_calls(group=8)[0])
    for _ in range(2):
        rollouts(trainer)
    with pytest.raises(RewardFailed, match=r"3 generations in a row .* every reward \(unsure, shy\) was None"):
        rollouts(trainer)


NOTHING, ONE = torch.full((4, 2), torch.nan), torch.tensor([[torch.nan, 1.0]])


def made_of(calls: RewardCalls, *parts: torch.Tensor) -> None:
    """A generation whose parts, the first and the refills, have these rewards."""
    for part in parts:
        calls.settle(part, torch.ones(2), 4)
    calls.check_known(["a", "b"])


def test_a_generation_with_one_number_begins_the_count_again() -> None:
    calls, _ = make_reward_calls()
    for _ in range(3):
        made_of(calls, NOTHING)
        made_of(calls, NOTHING, NOTHING, NOTHING)  # refills of dynamic sampling are not generations
        with calls.uncounted():
            calls.settle(ONE, torch.ones(2), 1)  # nor is an evaluation
        made_of(calls, NOTHING, ONE, NOTHING)
    for _ in range(2):
        made_of(calls, NOTHING)
    with pytest.raises(RewardFailed, match="3 generations in a row"):
        made_of(calls, NOTHING)


def test_an_inner_step_is_left_out_only_if_none_of_its_batches_has_a_reward() -> None:
    calls, _ = make_reward_calls()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    taken: list[bool] = []
    optimizer.step = lambda: taken.append(True)  # type: ignore[method-assign]
    calls.skip_rewardless(optimizer)

    def step(*batches: torch.Tensor) -> bool:
        for batch in batches:
            calls.settle(batch, torch.ones(2), 4)
        before = len(taken)
        optimizer.step()
        return len(taken) > before

    assert [step(ONE, NOTHING), step(NOTHING, ONE), step(NOTHING, ONE, NOTHING)] == [True] * 3
    assert [step(NOTHING), step(), step(NOTHING, NOTHING)] == [False] * 3, "() goes on with the same generation"
    assert step(ONE) and step()
