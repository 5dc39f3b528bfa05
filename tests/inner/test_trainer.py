"""The trainer against TRL itself: what alpha = 0 must not change, what the SDPO term must be, and what it may cost."""

import json
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.grpo_trainer import GRPOTrainer

from inner.channels.spans import Turn
from inner.data.rendering import text_of, whole
from inner.settings.inner import InnerConfig, InnerError, Seeds
from inner.train.grpo import _silence_libraries, trainer_arguments
from inner.train.trainer import LESSONS, ComposerReplicationTrainer
from tests.inner.test_toolworld import SMALL, WORLD, small_folder
from tests.support.tables import merge_tables

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
B = SMALL["batch_size"]
FOLDER = tempfile.TemporaryDirectory(
    prefix="test-inner-"
)  # transformers makes its output folder, even to keep it empty


def make(cls: type = ComposerReplicationTrainer, steps: int = 2, reward: Any = WORLD.reward, **options: Any) -> Any:
    """A trainer on a fresh copy of the small world, with the settings of our loop and a real last step.

    config: changes to the loop's settings."""
    task = {"environment_factory": options.pop("environment_factory", WORLD.environment())}
    iterations = options.pop("max_tool_calling_iterations", 2)
    config = InnerConfig(**merge_tables(SMALL, options.pop("config", {})))
    own = {"hint": WORLD.hint, **options} if cls is ComposerReplicationTrainer else {}
    arguments = trainer_arguments(config, Seeds(data=0, noise=11), FOLDER.name)
    arguments.max_steps, arguments.max_tool_calling_iterations = steps, iterations
    with _silence_libraries():
        return cls(
            model=AutoModelForCausalLM.from_pretrained(small_folder()),
            reward_funcs=reward,
            args=arguments,
            train_dataset=WORLD.dataset(64),
            processing_class=AutoTokenizer.from_pretrained(small_folder()),
            **task,
            **own,
        )


def rollouts(trainer: Any) -> dict[str, Any]:
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    torch.manual_seed(5)
    rows = [trainer.train_dataset[i // 8] for i in range(B)]
    return trainer._generate_and_score_completions(rows)


def measure(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    value = loss()
    value.backward()
    grads = [p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in model.parameters()]
    return value.detach(), torch.cat(grads).clone()


@pytest.fixture(scope="module")
def trainer() -> Any:
    return make(alpha_sdpo=0.5, sdpo_teacher="live")


@pytest.fixture(scope="module")
def batch(trainer: Any) -> dict[str, Any]:
    found = rollouts(trainer)
    assert 3 < sum(bool(lessons) for lessons in found[LESSONS]) < B  # some rollouts with an error turn, some without
    assert found["advantages"].abs().sum() > 0
    found["advantages"] += 0.3  # on-policy the loss of centred advantages is 0 in value, and 0 equals too easily
    return found


@pytest.fixture(autouse=True)
def reset(request: pytest.FixtureRequest) -> None:
    if "trainer" in request.fixturenames:
        shared = request.getfixturevalue("trainer")
        shared.alpha_sdpo, shared.current_gradient_accumulation_steps = 0.5, 1
        shared._metrics["train"].clear()


def test_alpha_zero_is_trls_loss_and_gradient_bit_for_bit(trainer: Any, batch: dict[str, Any]) -> None:
    trl_loss, trl_grad = measure(trainer.model, lambda: GRPOTrainer._compute_loss(trainer, trainer.model, batch))
    with_sdpo, _ = measure(trainer.model, lambda: trainer._compute_loss(trainer.model, batch))
    trainer.alpha_sdpo = 0.0
    loss, grad = measure(trainer.model, lambda: trainer._compute_loss(trainer.model, batch))
    assert torch.equal(loss, trl_loss) and torch.equal(grad, trl_grad)
    assert trl_loss.abs() > 1e-3 and with_sdpo != trl_loss


def test_a_whole_run_with_alpha_zero_is_trls_run_bit_for_bit() -> None:
    """Plain TRL has none of our caches: so this also shows that they change no rollout."""
    ends, rewards = [], []
    for cls in (GRPOTrainer, ComposerReplicationTrainer):
        scored: list[float] = []

        def reward(scored: list[float] = scored, **columns: Any) -> list[float]:
            scored += (found := WORLD.reward(**columns))
            return found

        trainer = make(cls, reward=reward)
        with _silence_libraries():
            trainer.train()
        ends.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
        rewards.append(scored)
    assert len(rewards[0]) == 2 * B and rewards[0] == rewards[1] and 0 < sum(rewards[0]) < 2 * B
    assert torch.equal(ends[0], ends[1])
    start = torch.cat([p.flatten() for p in AutoModelForCausalLM.from_pretrained(small_folder()).parameters()])
    assert not torch.equal(ends[0], start)


def reference_sdpo(model: Any, batch: dict[str, Any], beta: float) -> Tensor:
    """Its own student forward, an unpadded teacher forward per error turn, and the divergence by its formula."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    student = model(input_ids=ids, attention_mask=mask).logits
    total, width = torch.zeros(()), batch["prompt_ids"].size(1)
    for row, lessons in enumerate(batch[LESSONS]):
        for lesson in lessons:
            n = lesson.end - lesson.start
            assert lesson.teacher_ids[-n:] == batch["completion_ids"][row, lesson.start : lesson.end].tolist()
            with torch.no_grad():
                t = model(input_ids=torch.tensor([lesson.teacher_ids])).logits[0, -n - 1 : -1].softmax(-1)
            s = student[row, width + lesson.start - 1 : width + lesson.end - 1].softmax(-1)
            m = (1 - beta) * s + beta * t
            total = total + (beta * t * (t / m).log() + (1 - beta) * s * (s / m).log()).sum()
    return total / len(batch[LESSONS])


def test_sdpo_equals_a_second_student_forward(trainer: Any, batch: dict[str, Any]) -> None:
    model = trainer.model
    total, total_grad = measure(model, lambda: trainer._compute_loss(model, batch))
    grpo, grpo_grad = measure(model, lambda: GRPOTrainer._compute_loss(trainer, model, batch))
    sdpo, sdpo_grad = measure(model, lambda: reference_sdpo(model, batch, 0.5))
    assert sdpo > 0.01
    torch.testing.assert_close(total - grpo, 0.5 * sdpo, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(total_grad - grpo_grad, 0.5 * sdpo_grad, rtol=1e-3, atol=1e-6)


def test_the_hint_is_spliced_in_front_of_the_failed_turn(trainer: Any, batch: dict[str, Any]) -> None:
    row = next(i for i, lessons in enumerate(batch[LESSONS]) if lessons)
    text = trainer.processing_class.decode(batch[LESSONS][row][0].teacher_ids)
    kind = trainer.train_dataset[row // 8]["kind"]
    assert f"<end> <system> hint use {WORLD.right_name(kind)} <end> <assistant> <call> t{kind}_" in text
    assert text.startswith("<user> op") and text.count("<assistant>") == 1


def test_forwards(trainer: Any, batch: dict[str, Any]) -> None:
    seen: list[bool] = []
    hook = trainer.model.base_model.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    trainer._compute_loss(trainer.model, batch)
    assert seen == [True, False]  # the student once, the teacher without gradient
    seen.clear()
    nothing = {**batch, LESSONS: [[] for _ in range(B)]}
    empty = trainer._compute_loss(trainer.model, nothing)
    assert seen == [True]
    assert empty == GRPOTrainer._compute_loss(trainer, trainer.model, batch)
    seen.clear()
    trainer.alpha_sdpo = 0.0
    trainer._compute_loss(trainer.model, batch)
    assert seen == [True]
    hook.remove()


def test_an_empty_channel_stays_on_the_graph(trainer: Any, batch: dict[str, Any]) -> None:
    states = torch.randn(B, batch["prompt_ids"].size(1) + batch["completion_ids"].size(1), 4, requires_grad=True)
    zero = trainer._sdpo_loss([states], {**batch, LESSONS: [[] for _ in range(B)]})
    zero.backward()
    assert zero == 0 and states.grad is not None and (states.grad == 0).all()


@pytest.mark.parametrize("accumulation", [1, 4])
def test_both_terms_are_divided_by_the_accumulation_steps(
    trainer: Any, batch: dict[str, Any], accumulation: int
) -> None:
    model = trainer.model

    def grads(alpha: float) -> Tensor:
        trainer.alpha_sdpo = alpha
        return measure(model, lambda: trainer._compute_loss(model, batch))[1]

    full, plain = grads(0.5), grads(0.0)
    trainer.current_gradient_accumulation_steps = accumulation
    torch.testing.assert_close(grads(0.5) * accumulation, full, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close((grads(1.0) - grads(0.0)) * accumulation, 2 * (full - plain), rtol=1e-3, atol=1e-6)
    trainer.model.eval()  # in evaluation TRL does not divide, so neither do we
    trainer.alpha_sdpo = 0.5
    assert trainer._loss_divisor() == 1
    trainer.model.train()


def test_metrics_are_undivided_and_appended(trainer: Any, batch: dict[str, Any]) -> None:
    trainer.current_gradient_accumulation_steps = 4
    total = trainer._compute_loss(trainer.model, batch)
    noted = trainer._metrics["train"]
    assert noted["loss/total"] == [pytest.approx(total.item() * 4)]
    assert noted["loss/grpo"][0] + 0.5 * noted["loss/sdpo_kl"][0] == pytest.approx(noted["loss/total"][0], abs=1e-5)
    assert noted["loss/alpha_sdpo"] == [0.5]
    rollouts(trainer)
    covered = noted["sdpo/coverage"][0]
    assert 0 < covered < 1 and noted["sdpo/error_turns"][0] >= covered


def test_lessons_stay_with_their_rollout_through_trls_shuffle() -> None:
    trainer = make(alpha_sdpo=0.1)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    mixed = trainer._prepare_inputs([trainer.train_dataset[i // 8] for i in range(B)])
    lessons = [(row, lesson) for row, found in enumerate(mixed[LESSONS]) for lesson in found]
    assert lessons
    for row, lesson in lessons:
        written = mixed["completion_ids"][row, lesson.start : lesson.end].tolist()
        assert lesson.teacher_ids[-len(written) :] == written
        prompt = mixed["prompt_ids"][row][mixed["prompt_mask"][row].bool()].tolist()
        assert lesson.teacher_ids[:4] == prompt[:4]  # <user> op a b: the row's own question


def test_suffixes_are_cached_per_tool_and_content() -> None:
    trainer = make()
    messages = [{"role": "tool", "name": "t0_1", "content": "7"}]
    plain = GRPOTrainer._get_tool_suffix_ids(trainer, messages)
    first = trainer._get_tool_suffix_ids(messages)
    first.append(-1)  # a caller may write into its list
    assert trainer._get_tool_suffix_ids(messages) == plain
    other = [{"role": "tool", "name": "t0_1", "content": "8"}]
    assert trainer._get_tool_suffix_ids(other) == GRPOTrainer._get_tool_suffix_ids(trainer, other) != plain
    half = [{"role": "tool", "name": "a\udcff", "content": "b\ud800"}]  # before: a TypeError of the tokenizer
    mended = [{"role": "tool", "name": "a\ufffd", "content": "b\ufffd"}]
    assert trainer._get_tool_suffix_ids(half) == GRPOTrainer._get_tool_suffix_ids(trainer, mended)
    assert whole("\ud83d\ude00\udcff") == "\U0001f600\ufffd" and text_of(["a\udcff", {"text": "b"}]) == "a\ufffdb"


def test_without_a_hint_function_the_templates_are_used() -> None:
    trainer = make(alpha_sdpo=0.1, hint=None)
    error = "Tool t0_9 not found."
    hint = trainer.hint(trainer._hint_context({"prompt": "op0 1 2"}, Turn(0, 1, error)), error)
    names = ", ".join(sorted(WORLD.right_name(k) for k in (0, 1)))
    assert hint == f"The tool t0_9 does not exist. Available tools: {names}."


def test_a_hint_sees_the_failed_turn_and_is_asked_for_all_at_once() -> None:
    class Asked:
        def __init__(self) -> None:
            self.prepared: list[Any] = []
            self.called: list[Any] = []

        def prepare(self, failed: list[Any]) -> None:
            assert not self.called
            self.prepared += failed

        def __call__(self, row: Any, error: str) -> str | None:
            self.called.append((row, error))
            return None

    asked = Asked()
    batch = rollouts(make(alpha_sdpo=0.1, hint=asked))
    assert asked.called and asked.called == asked.prepared
    assert not any(batch[LESSONS])
    for row, error in asked.called:
        name = json.loads(row["student_action"].split("\n")[1])["name"]
        assert error == f"Tool {name} not found."
        assert row["state_messages"][0] == row["prompt"][0] and len(row["tools"]) == 2


def test_alpha_with_nothing_that_can_fail_is_refused() -> None:
    with pytest.raises(InnerError, match=r"can never see one.*max_tool_calling_iterations: 0"):
        make(alpha_sdpo=0.1, max_tool_calling_iterations=0)
    with pytest.raises(InnerError, match=r"can never see one \(tools: 0"):
        make(alpha_sdpo=0.1, environment_factory=None)
    make(environment_factory=None)  # plain GRPO needs no tools


def test_refusals() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"beta_replay": 0.1}, "no pairs to learn from"),
        ({"alpha_sdpo": -1.0}, "must be at least 0"),
        ({"beta_replay": -1.0}, "must be at least 0"),
        ({"policy_weight": -1.0}, "must be at least 0"),
        ({"sdpo_teacher": "old"}, "round, frozen, ema, live"),
        ({"sdpo_wrapper": "jsd"}, "none, taid, entropy_opd, eopd"),
        ({"dpo_variant": "ipo"}, "dpo, simpo"),
        ({"sdpo_wrapper": "taid"}, "Set schedule_steps"),
    ]
    for options, words in cases:
        with pytest.raises(InnerError, match=words):
            make(**options)


@pytest.mark.parametrize("tools", [{}, {"environment_factory": WORLD.environment()}], ids=["plain", "tools"])
def test_messages_without_a_chat_template_are_refused_before_the_model_is_prepared(tools: dict[str, Any]) -> None:
    """With tools, TRL's words were that the "provided" template cannot call tools."""
    tokenizer = AutoTokenizer.from_pretrained(small_folder())
    tokenizer.chat_template = None
    with pytest.raises(InnerError, match=r"tokenizer has no chat template. Take an -Instruct model"):
        ComposerReplicationTrainer(
            model=AutoModelForCausalLM.from_pretrained(small_folder()),
            reward_funcs=WORLD.reward,
            train_dataset=WORLD.dataset(1),
            processing_class=tokenizer,
            **tools,
        )


def scored(values: list[float | None], objective: str, other: list[float] | None = None, **trl: Any) -> tuple[Any, Any]:
    """-> the advantages, and equal_groups, of two groups of 8 with these rewards (and others)."""
    rewards: list[Any] = [lambda **_: values, *([lambda **_: other] if other else [])]
    trainer = make(reward=rewards, config={"grpo": {"objective": objective}, "trl": trl})
    advantages = rollouts(trainer)["advantages"]
    return advantages, trainer._metrics["train"]["frac_reward_zero_std"]


@pytest.mark.parametrize("objective", ["grpo", "dr_grpo", "lite_ppo"])
@pytest.mark.parametrize("value", [0.3, *(pytest.param(v, marks=pytest.mark.slow) for v in (0.7, 0.07))])
def test_equal_rewards_have_no_advantage_at_all(objective: str, value: float) -> None:
    """TRL's mean of eight .3 in float32 is not .3; the rest, divided by a deviation of 0, was up to 1e-3."""
    advantages, equal = scored([value] * B, objective)
    assert (advantages == 0).all() and equal == [1.0]
    advantages, equal = scored([None, *[value] * (B - 1)], objective)
    assert (advantages == 0).all() and equal == [1.0]
    advantages, equal = scored([*[value] * 8, *[0.0, 1.0] * 4], objective)
    assert (advantages[:8] == 0).all() and (advantages[8:] != 0).all() and equal == [0.5]


def test_equal_groups_are_about_groups_where_the_batch_differs() -> None:
    advantages, equal = scored([1.0] * 8 + [0.0] * 8, "bnpo")
    assert (advantages == 0).all() and equal == [1.0], "before: 0, since the batch's deviation is not 0"
    _, equal = scored([None] * 8 + [0.0] * 8, "bnpo")
    assert equal == [0.5], "of the first group nothing is known"


def test_rewards_that_are_normalised_one_by_one_are_equal_if_each_is() -> None:
    each = {"multi_objective_aggregation": "normalize_then_sum"}
    advantages, equal = scored([0.3] * B, "grpo", [0.7] * 8 + [0.0, 1.0] * 4, **each)
    assert (advantages[:8] == 0).all() and (advantages[8:] != 0).all() and equal == [0.5]
    advantages, equal = scored([1.0, *[0.0] * 7] * 2, "grpo", [0.0, *[1.0] * 7] * 2, **each)
    assert equal == [0.0], "the sums are equal, and what is summed is not"
