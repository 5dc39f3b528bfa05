"""Rollouts that ran into max_completion_length: no policy loss where TRL masks them, and lessons like any other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from inner.channels.lessons import Rollout, aligned_lesson, hint_lessons, rollout_lessons
from inner.channels.spans import Turn
from inner.settings.inner import InnerConfig, Seeds
from inner.train.grpo import _silence_libraries, trainer_arguments
from inner.train.trainer import LESSONS, ComposerReplicationTrainer
from tests.inner.test_trainer import FOLDER, make, measure, rollouts
from tests.support.audit import check_run
from tests.support.fleet import Fleet
from tests.support.scripted import ENDS, ENVIRONMENT, LENGTH, questions, scripted, scripted_folder, scripted_task
from tests.support.tables import merge_tables

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
SHORT = {
    "grpo": {"objective": "dapo", "dynamic_sampling": 0},
    "sampling": {"max_completion_length": 17},
}  # ToolWorld's second turn is cut off


def lessons_of(batch: dict[str, Any]) -> list[tuple[int, Any]]:
    return [(row, lesson) for row, found in enumerate(batch[LESSONS]) for lesson in found]


def truncated_rows(batch: dict[str, Any]) -> list[int]:
    return [row for row, mask in enumerate(batch["tool_mask"]) if not mask.any()]


def turn_by_turn(model: Any, batch: dict[str, Any], prompts: list[list[int]]) -> Tensor:
    """Σ JSD / rollouts, every row through forwards of its own, without padding or masks."""
    total = torch.zeros(())
    for row, lesson in lessons_of(batch):
        n = lesson.end - lesson.start
        own = torch.tensor([prompts[row] + batch["completion_ids"][row, : lesson.end].tolist()])
        s = model(input_ids=own).logits[0, -n - 1 : -1].softmax(-1)
        with torch.no_grad():
            t = model(input_ids=torch.tensor([lesson.teacher_ids])).logits[0, -n - 1 : -1].softmax(-1)
        m = (s + t) / 2
        total = total + (t * (t / m).log() / 2 + s * (s / m).log() / 2).sum()
    return total / len(batch[LESSONS])


def test_a_lesson_of_a_truncated_rollout_is_that_of_the_whole_one() -> None:
    """The same rollouts, with and without TRL's mask over the truncated ones: the same lessons, value and gradient."""
    found = {}
    for objective in ("dapo", "dr_grpo"):
        trainer = make(
            alpha_sdpo=0.5, sdpo_teacher="live", config=merge_tables(SHORT, {"grpo": {"objective": objective}})
        )
        batch = rollouts(trainer)
        prompts = [
            ids[mask.bool()].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        ]
        with trainer._caught_states(trainer.model) as caught:
            trainer._policy_loss(trainer.model, batch)
        found[objective] = measure(trainer.model, lambda t=trainer, c=caught, b=batch: t._sdpo_loss(c, b))
        if objective == "dapo":
            assert len({row for row, _ in lessons_of(batch)} & set(truncated_rows(batch))) > 5
            expected = measure(trainer.model, lambda t=trainer, b=batch, p=prompts: turn_by_turn(t.model, b, p))
    for value, reference in zip(found["dapo"], found["dr_grpo"], strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found["dapo"][0], expected[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["dapo"][1], expected[1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("objective", ["dapo", "gmpo", "luspo"])
def test_the_policy_loss_of_truncated_rollouts_is_trls(objective: str) -> None:
    """TRL's mask hides them from the attention, ours does not; nothing else in the policy loss may differ."""
    found = []
    for alpha in (0.0, 0.5):
        trainer = make(
            alpha_sdpo=alpha, config=merge_tables(SHORT, {"grpo": {"objective": objective, "steps_per_generation": 1}})
        )
        trainer.mask_truncated_completions |= alpha == 0 and objective != "dapo"
        trainer._masks_truncated |= alpha > 0 and objective != "dapo"
        batch = rollouts(trainer)
        assert 3 < len(truncated_rows(batch)) < len(batch["advantages"])
        batch["advantages"] += 0.3
        loss = measure(trainer.model, lambda t=trainer, b=batch: t._policy_loss(t.model, b))
        found.append((*loss, batch["num_items_in_batch"]))
    for ours, trls in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, trls, rtol=1e-5, atol=1e-7)
    assert found[0][0].abs() > 1e-3


def test_without_the_channel_trl_masks_them_itself() -> None:
    trainer = make(config=SHORT)
    assert trainer.mask_truncated_completions and not trainer._masks_truncated
    batch = rollouts(trainer)
    assert (batch["completion_mask"].sum(1) == 0).any()


def test_old_logprobs_of_a_truncated_rollout_are_those_of_its_own_tokens() -> None:
    """Before the first step π = π_old, so the importance weight of "rollout" is 1 everywhere, or the mask was wrong."""
    sampling = {"num_generations": 8, "temperature": 0.7}  # not the divergence's
    config = merge_tables(SHORT, {"grpo": {"steps_per_generation": 2}, "sampling": sampling})
    trainer = make(
        alpha_sdpo=0.5,
        policy_weight=0.0,
        sdpo_context="rollout",
        sdpo_teacher="frozen",
        sdpo_success=0.0,
        config=config,
    )
    batch = rollouts(trainer)
    rows = [row for row in truncated_rows(batch) if batch[LESSONS][row]]
    assert len(rows) > 3 and "old_per_token_logps" in batch
    now = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
        batch["completion_ids"].size(1),
    )[0]
    torch.testing.assert_close(batch["old_per_token_logps"][rows], now[rows].detach(), rtol=1e-4, atol=1e-4)
    assert now[rows].shape[1] == SHORT["sampling"]["max_completion_length"]  # no padding in rows that were cut off
    with trainer._caught_states(trainer.model) as caught:
        trainer._policy_loss(trainer.model, batch)
    on_policy = {key: value for key, value in batch.items() if key != "old_per_token_logps"}
    torch.testing.assert_close(trainer._sdpo_loss(caught, batch), trainer._sdpo_loss(caught, on_policy))


def test_dynamic_sampling_keeps_the_lessons_with_their_rollouts() -> None:
    trainer = make(alpha_sdpo=0.5, config=merge_tables(SHORT, {"grpo": {"dynamic_sampling": 2}}))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    torch.manual_seed(5)
    batch = trainer._prepare_inputs([trainer.train_dataset[i // 8] for i in range(16)])
    assert trainer._metrics["train"]["dynamic/generations"][0] > 0
    assert (batch["completion_mask"] * batch["tool_mask"]).sum() == batch["num_items_in_batch"]
    check_aligned(batch)


def check_aligned(batch: dict[str, Any]) -> None:
    """Every lesson is about its own rollout's tokens, behind its own prompt."""
    assert lessons_of(batch)
    for row, lesson in lessons_of(batch):
        turn = batch["completion_ids"][row, lesson.start : lesson.end].tolist()
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        assert len(turn) == lesson.end - lesson.start > 0 and lesson.teacher_ids[-len(turn) :] == turn
        start = 4 * len(prompt) // 5  # the hint stands before the assistant's opening
        assert lesson.teacher_ids[:start] == prompt[:start]
        assert len(lesson.teacher_ids) > len(prompt) + len(turn)
        assert batch["completion_mask"][row, : lesson.end].all()


# One check, where a teacher's row is made


def rollout(ids: list[int]) -> Rollout:
    return Rollout({}, [1, 2], ids, (1,) * len(ids), [Turn(1, 3, "failed")], 0.0)


@pytest.mark.parametrize(
    ("ids", "teacher_ids"),
    [
        ([], [1, 2, 7, 8]),  # what zeroed masks made of a truncated rollout
        ([5, 6], [1, 2, 6]),  # cut inside the turn
        ([5, 6, 7, 8], [1, 2, 9, 6]),
        ([5, 6, 7, 8], [1, 2, 7, 6]),
        ([5, 6, 7, 8], [7]),
    ],
)
def test_a_row_that_does_not_end_with_the_turn_is_refused(ids: list[int], teacher_ids: list[int]) -> None:
    with pytest.raises(
        RuntimeError, match=r"does not end with the student's turn. The turn is tokens 1 to 2 of a completion with \d"
    ):
        aligned_lesson(rollout(ids), 1, 3, teacher_ids)


def test_both_contexts_are_checked() -> None:
    def loses_a_token(context: list[int], text: str, turn: list[int]) -> list[int]:
        return context + turn[:-1]

    splice: Any = loses_a_token
    with pytest.raises(RuntimeError, match="does not end with the student's turn"):
        hint_lessons([rollout([5, 6, 7])], lambda row, error: "hint", lambda row, turn: {}, splice)
    with pytest.raises(RuntimeError, match="does not end with the student's turn"):
        rollout_lessons([rollout([5, 6, 7])], 1, 1.0, str, splice)


# Real chat templates


@pytest.mark.quick(1)
@pytest.mark.parametrize("template", ENDS)
def test_lessons_in_a_real_chat_template_are_aligned(template: str, tmp_path: Path) -> None:
    scope: dict[str, Any] = {}
    exec(ENVIRONMENT, scope)
    config = InnerConfig(
        model="m",
        data={"prompts": "p.jsonl"},
        rewards={"function": "r.py:f"},
        sampling={"environment": "w.py:World", "max_completion_length": LENGTH, "num_generations": 2},
        grpo={"objective": "dapo", "dynamic_sampling": 0},
        batch_size=16,
        sdpo={"weight": 0.5},
    )
    folder = scripted_folder(tmp_path, template)
    with _silence_libraries(), scripted():
        trainer = ComposerReplicationTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder),
            reward_funcs=lambda completions, **columns: [float(i % 3) for i in range(len(completions))],
            args=trainer_arguments(config, Seeds(data=0, noise=1), FOLDER.name),
            train_dataset=Dataset.from_list(questions(8)),
            processing_class=AutoTokenizer.from_pretrained(folder),
            environment_factory=scope["World"],
            objective="dapo",
            alpha_sdpo=0.5,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        batch: Any = trainer._prepare_inputs([trainer.train_dataset[i // 2] for i in range(16)])
    check_aligned(batch)
    taught = {row for row, _ in lessons_of(batch)}
    assert (
        len(taught) == 8 and len(taught & set(truncated_rows(batch))) == 4
    )  # the cases 0 and 1 of tests/support/scripted.py
    decode = trainer.processing_class.decode
    for row, lesson in lessons_of(batch):
        turn = str(decode(batch["completion_ids"][row, lesson.start : lesson.end].tolist()))
        assert '"sum"' in turn and turn.endswith(ENDS[template])
        assert f"The tool sum does not exist. Available tools: add.{ENDS[template]}" in decode(lesson.teacher_ids)
    value = trainer._compute_loss(trainer.model, batch)
    assert value.isfinite() and trainer._metrics["train"]["loss/sdpo_kl"][0] > 0


# A fleet of three


TOOLWORLD: dict[str, Any] = {
    "loop": "grpo",
    "model": "toolworld",
    "data": {"text": None},
    "batch_size": 16,
    "toolworld": {"kinds": 2, "names": 4, "warm_start_steps": 250},
    "sampling": {"max_completion_length": 17},
}
CHANNEL: dict[str, Any] = {"grpo": {"objective": "dapo", "dynamic_sampling": 1}, "sdpo": {"weight": 0.5}}


def run_fleet(folder: Path, inner: dict[str, Any], **environ: str) -> list[dict[str, bool]]:
    """Three replicas to the end -> what tests/support/victim.py noted of every lesson of every loss."""
    fleet = Fleet(
        folder, inner=merge_tables(inner, CHANNEL), outer={"sync_every": 2, "snapshot_every": 2},
        fleet={"steps": 3, "give_up_s": 120.0},
    )  # fmt: skip
    for slot in ("r00", "r01", "r02"):
        fleet.start(slot, TEST_NOTE_LESSONS=str(folder), **environ)
    codes = fleet.wait(150.0)
    assert codes == {"r00": [0], "r01": [0], "r02": [0]}, fleet.logs()
    check_run(Path(fleet.url), 3)
    files = list(folder.glob("lessons.*.jsonl"))
    assert len(files) == 3  # each replica had lessons
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def check_notes(notes: list[dict[str, bool]]) -> None:
    truncated = sum(note["truncated"] for note in notes)
    print(f"{len(notes)} lessons, {truncated} of truncated rollouts")
    assert len(notes) > 30 and truncated > 5
    assert all(note["aligned"] and note["whole"] for note in notes)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_fleet_of_three_with_dapo_hints_and_truncated_rollouts(tmp_path: Path) -> None:
    check_notes(run_fleet(tmp_path, TOOLWORLD))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("template", ENDS)
def test_a_fleet_of_three_with_a_real_chat_template(template: str, tmp_path: Path) -> None:
    check_notes(run_fleet(tmp_path, scripted_task(tmp_path, template), TEST_SCRIPTED="1"))
