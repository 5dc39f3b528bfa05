"""How a generation is cut into micro-batches changes nothing: groups are whole, and every token counts alike."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from inner.channels.lessons import Rollout
from inner.data.order import step_in_generation
from inner.settings.inner import InnerConfig, InnerError
from inner.train.grpo import _silence_libraries
from inner.train.trainer import LESSONS
from tests.inner.test_toolworld import WORLD
from tests.inner.test_trainer import make
from tests.support.tables import merge_tables

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
ROLLOUT: dict[str, Any] = {
    "alpha_sdpo": 1.0, "policy_weight": 0.0, "sdpo_context": "rollout", "sdpo_teacher": "live", "sdpo_success": 0.0,
}  # fmt: skip


class Recorder(TrainerCallback):
    """The gradient after each inner step, and the number of generations made by then."""

    def __init__(self, trainer: Any) -> None:
        self.gradients: list[Tensor] = []
        self.generations: list[int] = []
        self.batches: list[dict[str, Any]] = []
        self.rewards: list[list[float]] = []
        generate, score = trainer._generate_and_score_completions, trainer._calculate_rewards

        def generated(inputs: Any) -> Any:
            self.batches.append(batch := generate(inputs))
            return batch

        def scored(*args: Any, **kwargs: Any) -> Tensor:
            self.rewards.append((found := score(*args, **kwargs))[:, 0].tolist())
            return found

        trainer._generate_and_score_completions, trainer._calculate_rewards = generated, scored
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        grads = [p.grad.flatten() for p in kwargs["model"].parameters() if p.grad is not None]
        self.gradients.append(torch.cat(grads).clone())
        self.generations.append(len(self.batches))


def run_steps(steps: int, config: dict[str, Any], **options: Any) -> Recorder:
    """Some real inner steps in float64."""
    trainer = make(steps=steps, config={"max_grad_norm": 1e9, **config}, **options)
    trainer.model.double()
    recorder = Recorder(trainer)
    with _silence_libraries():
        trainer.train()
    return recorder


def batch_shape(batch_size: int, accumulated: int, **more: Any) -> dict[str, Any]:
    return {"batch_size": batch_size, "gradient_accumulation_steps": accumulated, **more}


# Groups


@pytest.mark.parametrize("objective", ["dr_grpo", *(pytest.param(o, marks=pytest.mark.slow) for o in ("grpo", "dapo"))])
def test_a_group_spread_over_four_micro_batches_is_still_a_group(objective: str) -> None:
    """batch_size 2, num_generations 8: the same completions, advantages and gradient as with batch_size 8."""
    config = {"grpo": {"objective": objective, "dynamic_sampling": 0}, "sampling": {"num_generations": 8}}
    whole = run_steps(1, merge_tables(config, batch_shape(8, 1, grpo={"steps_per_generation": 1})))
    torn = run_steps(1, merge_tables(config, batch_shape(2, 4, grpo={"steps_per_generation": 4})))
    assert len(whole.batches) == len(torn.batches) == 1 and whole.rewards == torn.rewards
    for key in ("completion_ids", "completion_mask", "advantages"):
        assert torch.equal(whole.batches[0][key], torn.batches[0][key])
    advantages = torn.batches[0]["advantages"]
    assert advantages.abs().sum() > 0.1
    rewards = torch.tensor(torn.rewards[0])
    if objective == "dr_grpo":
        torch.testing.assert_close(advantages, rewards - rewards.mean(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(torn.gradients[0], whole.gradients[0], rtol=1e-4, atol=1e-7)
    assert whole.gradients[0].norm() > 1e-4


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"batch_size": 2, "gradient_accumulation_steps": 4}, marks=pytest.mark.slow),
        pytest.param({"batch_size": 2, "grpo": {"steps_per_generation": 4}}, marks=pytest.mark.slow),
        {"batch_size": 2, "gradient_accumulation_steps": 2, "grpo": {"steps_per_generation": 4}},
        {"batch_size": 2, "grpo": {"steps_per_generation": 4, "num_iterations": 2}},
        {"batch_size": 8, "gradient_accumulation_steps": 2},
    ],
)
def test_a_new_generation_is_made_every_boundary_inner_steps(settings: dict[str, Any]) -> None:
    """`boundary` is what H must be a multiple of: counted in a real run, of whole groups."""
    boundary = InnerConfig(sampling={"num_generations": 8}, **settings).boundary
    seen = run_steps(2 * boundary + 1, {"sampling": {"num_generations": 8}, **settings})
    assert seen.generations == [1 + step // boundary for step in range(2 * boundary + 1)]
    for batch in seen.batches:
        sums = batch["advantages"].view(-1, 8).sum(1)
        torch.testing.assert_close(sums, torch.zeros_like(sums), atol=1e-5, rtol=0)
        prompts = batch["prompt_ids"].view(-1, 8, batch["prompt_ids"].size(1))
        assert (prompts == prompts[:, :1]).all()


def test_what_would_tear_a_group_apart_is_refused() -> None:
    InnerConfig(batch_size=2, sampling={"num_generations": 8}, grpo={"steps_per_generation": 4})
    InnerConfig(batch_size=12, sampling={"num_generations": 8}, gradient_accumulation_steps=2)
    for settings, words in (
        ({"batch_size": 2}, "steps_per_generation to 4 or a multiple"),
        ({"batch_size": 12}, r"batch_size to 8 or a multiple of it, or inner.grpo.steps_per_generation to 2"),
        (
            {"batch_size": 2, "grpo": {"steps_per_generation": 2, "num_iterations": 2}},
            "steps_per_generation = 2 completions",
        ),
        ({"batch_size": 2, "gradient_accumulation_steps": 6}, "would be torn apart"),
    ):
        with pytest.raises(InnerError, match=words):
            InnerConfig(sampling={"num_generations": 8}, **settings)


# Tokens of "rollout"


@pytest.mark.slow
def test_the_tokens_of_rollout_count_alike_however_the_step_is_cut() -> None:
    """The same eight rollouts as 8 x 1, 4 x 2 and 2 x 4: one gradient, in float64."""
    varied = {"sampling": {"num_generations": 2, "temperature": 2.0}}
    whole, *others = (run_steps(1, batch_shape(*shape, **varied), **ROLLOUT) for shape in ((8, 1), (4, 2), (2, 4)))
    lengths = {sum(lesson.written) for lessons in whole.batches[0][LESSONS] for lesson in lessons}
    assert len(lengths) > 1, "with rollouts of one length a mean per micro-batch is right, too"
    assert whole.gradients[0].norm() > 1e-3
    for other in others:
        assert torch.equal(other.batches[0]["completion_ids"], whole.batches[0]["completion_ids"])
        torch.testing.assert_close(other.gradients[0], whole.gradients[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("micro", "accumulated", "per_generation", "served", "expected"),
    [
        (0, 1, 1, 1, [0]),
        (5, 4, 4, 4, [0, 1, 2, 3]),
        (6, 2, 4, 4, [2, 3]),  # stale: a generation serves two inner steps
        (5, 4, 2, 2, [0, 1]),  # the step spans two generations, and the second is not there yet
        (3, 2, 1, 2, [0, 0]),  # two iterations over one micro-batch
        (4, 2, 3, 6, [1, 2]),
        (2, 2, 3, 3, [2]),  # a step that straddles two generations
        (3, 2, 3, 3, [0]),
    ],
)
def test_the_micro_batches_of_an_inner_step(
    micro: int, accumulated: int, per_generation: int, served: int, expected: list[int]
) -> None:
    assert step_in_generation(micro, accumulated, per_generation, served) == expected


@pytest.mark.slow
def test_stale_steps_of_rollout_count_alike_as_well() -> None:
    """One generation of 16 for two inner steps: 8 x 1 against 2 x 4 micro-batches, the first step's gradient."""
    whole, torn = (
        run_steps(2, batch_shape(*shape, grpo={"steps_per_generation": 2 * shape[1]}), **ROLLOUT)
        for shape in ((8, 1), (2, 4))
    )
    assert whole.generations == torn.generations == [1, 1]
    torch.testing.assert_close(torn.gradients[0], whole.gradients[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torn.gradients[1], whole.gradients[1], rtol=1e-2, atol=1e-4)


# Evaluation


@pytest.mark.quick(1)
@pytest.mark.parametrize("rows", [4, 8])
def test_evaluation_with_groups_of_another_size(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows in groups of two, in a trainer whose groups have eight: siblings are those of the same prompt."""
    seen: list[list[Rollout]] = []
    groups: list[int] = []

    def lessons(rollouts: list[Rollout], group: int, *args: Any) -> list[list[Any]]:
        seen.append(rollouts)
        groups.append(group)
        return original(rollouts, group, *args)

    import inner.train.trainer

    original = inner.train.trainer.rollout_lessons
    monkeypatch.setattr(inner.train.trainer, "rollout_lessons", lessons)
    trainer = make(**ROLLOUT)
    trainer.args.per_device_eval_batch_size, trainer.num_generations_eval = rows, 2
    with _silence_libraries():
        numbers = trainer.evaluate(eval_dataset=Dataset.from_list(WORLD.rows(rows, seed=2)))
    assert numbers["eval_loss"] >= 0 and set(groups) == {2}
    for rollouts in seen:
        assert all(a.prompt == b.prompt for a, b in zip(rollouts[::2], rollouts[1::2], strict=True))
