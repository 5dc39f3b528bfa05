"""The real verl: its compute_advantage, its ppo_loss and a Ray worker with our estimator.  `make test-backends`."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed: make test-backends"),
    pytest.mark.timeout(300),
]
ROWS, TOKENS = 4, 6


@pytest.fixture(scope="module")
def verl() -> Any:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import verl.trainer.ppo.ray_trainer  # pyright: ignore

    return verl


def batch(verl: Any, *, seed: int = 0) -> tuple[Any, dict[str, torch.Tensor]]:
    """A batch of two groups of two, and the fields of the channel."""
    rng = torch.Generator().manual_seed(seed)
    rewards = torch.zeros(ROWS, TOKENS)
    rewards[:, -1] = torch.tensor([1.0, 0.0, 0.25, 1.0])
    mask = torch.ones(ROWS, TOKENS)
    mask[1, 4:] = 0
    tensors = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "old_log_probs": -torch.rand(ROWS, TOKENS, generator=rng),
    }
    fields = {
        "teacher_logprobs": -torch.rand(ROWS, TOKENS, generator=rng),
        "error_mask": (torch.rand(ROWS, TOKENS, generator=rng) > 0.5).float(),
    }
    return verl.DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(list("aabb"), dtype=object)}), fields


def advantage(verl: Any, data: Any, estimator: str, **settings: Any) -> torch.Tensor:
    from omegaconf import OmegaConf  # pyright: ignore

    config = OmegaConf.create({"adv_estimator": estimator, **settings})
    return verl.trainer.ppo.ray_trainer.compute_advantage(data, estimator, config=config).batch["advantages"]


def test_the_entry_point_is_there_and_has_registered_the_estimator(verl: Any) -> None:
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn  # pyright: ignore

    assert [e.value for e in entry_points(group="verl.plugins") if e.name == "serverless_diloco"] == [
        "inner.extras.verl.plugin"
    ]
    assert get_adv_estimator_fn("grpo_composer").__module__ == "inner.extras.verl.estimator"


@pytest.mark.parametrize("by_std", [True, False])
def test_without_alpha_it_is_verls_grpo_bit_for_bit(verl: Any, by_std: bool) -> None:
    data, fields = batch(verl)
    from inner.extras.verl.estimator import attach_composer_fields

    mine = advantage(verl, attach_composer_fields(data, **fields), "grpo_composer", norm_adv_by_std_in_grpo=by_std)
    other, _ = batch(verl)
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage  # pyright: ignore

    theirs, _ = compute_grpo_outcome_advantage(
        other.batch["token_level_rewards"],
        other.batch["response_mask"],
        other.non_tensor_batch["uid"],
        norm_adv_by_std_in_grpo=by_std,
    )
    assert torch.equal(mine, theirs)


def test_with_alpha_the_fields_arrive_through_verls_own_compute_advantage(verl: Any) -> None:
    from inner.extras.verl.estimator import attach_composer_fields

    data, fields = batch(verl)
    plain = advantage(verl, batch(verl)[0], "grpo_composer")
    mine = advantage(verl, attach_composer_fields(data, **fields), "grpo_composer", alpha_sdpo=0.1)
    gap = (
        (fields["teacher_logprobs"] - data.batch["old_log_probs"]) * fields["error_mask"] * data.batch["response_mask"]
    )
    assert torch.allclose(mine, plain + 0.1 * gap) and not torch.equal(mine, plain)
    assert torch.equal(data.batch["returns"], plain), "returns are another tensor than advantages"


def test_fields_that_do_not_arrive_are_an_error_and_not_plain_grpo(verl: Any) -> None:
    """verl drops what a batch has beside its own fields: here they lie in the batch, and nowhere else."""
    from inner.extras.verl import estimator as ours

    ours._attached.set(None)
    data, fields = batch(verl)
    data.batch["sdpo_teacher_logprobs"], data.batch["sdpo_error_mask"] = (
        fields["teacher_logprobs"],
        fields["error_mask"],
    )
    with pytest.raises(KeyError, match="no teacher's log-probs reached grpo_composer"):
        advantage(verl, data, "grpo_composer", alpha_sdpo=0.1)


def test_rows_that_were_moved_since_are_an_error(verl: Any) -> None:
    from inner.extras.verl.estimator import attach_composer_fields

    for order in ([1, 0, 2, 3], [0, 1, 3, 2]):
        data, fields = batch(verl)
        attach_composer_fields(data, **fields)
        data.reorder(torch.tensor(order))
        with pytest.raises(KeyError, match="belong to other rows than this batch"):
            advantage(verl, data, "grpo_composer", alpha_sdpo=0.1)


def of_one_length(verl: Any, seed: int, uids: str = "aabb") -> tuple[Any, dict[str, torch.Tensor]]:
    """Masks tell nothing about rows here, and rewards little."""
    data, fields = batch(verl, seed=seed)
    data.batch["response_mask"] = torch.ones(ROWS, TOKENS)
    data.batch["token_level_rewards"][:, -1] = torch.tensor([1.0, 1.0, 0.0, 1.0])
    data.non_tensor_batch["uid"] = np.array(list(uids), dtype=object)
    return data, fields


def test_fields_of_the_batch_before_are_an_error_where_all_answers_are_equally_long(verl: Any) -> None:
    from inner.extras.verl.estimator import attach_composer_fields

    first, fields = of_one_length(verl, 0)
    attach_composer_fields(first, **fields)
    advantage(verl, first, "grpo_composer", alpha_sdpo=0.1)
    for uids in ("ccdd", "aabb"):
        with pytest.raises(KeyError, match="to an earlier batch"):
            advantage(verl, of_one_length(verl, 1, uids)[0], "grpo_composer", alpha_sdpo=0.1)


def test_rows_of_a_group_that_changed_places_are_an_error_even_with_one_length_and_reward(verl: Any) -> None:
    from inner.extras.verl.estimator import attach_composer_fields

    data, fields = of_one_length(verl, 0)
    attach_composer_fields(data, **fields)
    data.reorder(torch.tensor([1, 0, 2, 3]))
    with pytest.raises(KeyError, match="belong to other rows than this batch"):
        advantage(verl, data, "grpo_composer", alpha_sdpo=0.1)


def test_a_copy_of_the_same_rows_is_known_where_rows_can_be_told_apart(verl: Any) -> None:
    from inner.extras.verl.estimator import attach_composer_fields

    data, fields = batch(verl)
    attach_composer_fields(data, **fields)
    mine = advantage(verl, data, "grpo_composer", alpha_sdpo=0.1)
    data.batch = data.batch.clone()
    assert torch.equal(mine, advantage(verl, data, "grpo_composer", alpha_sdpo=0.1))


def test_the_last_fields_that_were_attached_count(verl: Any) -> None:
    from inner.extras.verl.estimator import attach_composer_fields

    data, fields = batch(verl)
    once = advantage(verl, attach_composer_fields(data, **fields), "grpo_composer", alpha_sdpo=0.1)
    data, _ = batch(verl)
    attach_composer_fields(data, **{name: torch.zeros_like(t) for name, t in fields.items()})
    twice = advantage(verl, attach_composer_fields(data, **fields), "grpo_composer", alpha_sdpo=0.1)
    assert torch.equal(once, twice)


@pytest.mark.parametrize("garbage", [-torch.inf, torch.nan])
def test_what_lies_in_the_padding_does_not_matter(verl: Any, garbage: float) -> None:
    """0 · −∞ is not a number, and one such token would be the whole batch's loss."""
    from inner.extras.verl.estimator import attach_composer_fields

    data, fields = batch(verl)
    unused = (fields["error_mask"] == 0) | (data.batch["response_mask"] == 0)
    clean = advantage(verl, attach_composer_fields(data, **fields), "grpo_composer", alpha_sdpo=0.1)
    data, fields = batch(verl)
    fields["teacher_logprobs"][unused] = garbage
    data.batch["old_log_probs"][unused] = garbage
    dirty = advantage(verl, attach_composer_fields(data, **fields), "grpo_composer", alpha_sdpo=0.1)
    assert torch.equal(clean, dirty)


def test_a_used_token_without_a_number_and_a_bad_weight_are_refused(verl: Any) -> None:
    from inner.extras.verl.estimator import attach_composer_fields

    data, fields = batch(verl)
    fields["error_mask"][0, 0], fields["teacher_logprobs"][0, 0] = 1, -torch.inf
    with pytest.raises(ValueError, match="1 tokens of the error mask have a log-prob"):
        advantage(verl, attach_composer_fields(data, **fields), "grpo_composer", alpha_sdpo=0.1)
    for alpha in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"algorithm.alpha_sdpo = .* 0 or more"):
            advantage(verl, data, "grpo_composer", alpha_sdpo=alpha)


def test_masks_and_log_probs_may_have_other_dtypes(verl: Any) -> None:
    from inner.extras.verl.estimator import attach_composer_fields

    data, fields = batch(verl)
    plain = advantage(verl, attach_composer_fields(data, **fields), "grpo_composer", alpha_sdpo=0.1)
    other, _ = batch(verl)
    other.batch["response_mask"] = other.batch["response_mask"].long()
    fields = {"teacher_logprobs": fields["teacher_logprobs"].double(), "error_mask": fields["error_mask"].bool()}
    mine = advantage(verl, attach_composer_fields(other, **fields), "grpo_composer", alpha_sdpo=0.1)
    assert mine.dtype == torch.float32 and torch.allclose(mine, plain, atol=1e-7)


def test_groups_of_one_are_verls(verl: Any) -> None:
    from inner.extras.verl.estimator import attach_composer_fields

    data, fields = of_one_length(verl, 0, "abcd")
    plain = advantage(verl, of_one_length(verl, 0, "abcd")[0], "grpo")
    assert torch.equal(advantage(verl, attach_composer_fields(data, **fields), "grpo_composer"), plain)


def test_a_batch_that_is_handed_over_comes_first(verl: Any) -> None:
    """As verl-project/verl#7473 would do."""
    from inner.extras.verl import estimator as ours

    ours._attached.set(None)
    data, fields = batch(verl)
    ours.attach_composer_fields(data, **fields)
    ours._attached.set(None)
    handed, _ = ours.grpo_composer(
        data.batch["token_level_rewards"], data.batch["response_mask"], index=data.non_tensor_batch["uid"],
        config={"alpha_sdpo": 0.1}, batch=data.batch, non_tensor_batch=data.non_tensor_batch,
    )  # fmt: skip
    attached = advantage(verl, ours.attach_composer_fields(data, **fields), "grpo_composer", alpha_sdpo=0.1)
    assert torch.equal(handed, attached)


def test_shapes_that_do_not_fit_are_refused(verl: Any) -> None:
    from inner.extras.verl.estimator import attach_composer_fields

    data, fields = batch(verl)
    with pytest.raises(ValueError, match=r"sdpo_teacher_logprobs.*\(4, 5\).*do not fit response_mask, \(4, 6\)"):
        attach_composer_fields(data, **{**fields, "teacher_logprobs": fields["teacher_logprobs"][:, :5]})


def loss_of(verl: Any, advantages: torch.Tensor, data: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """verl's worker-side ppo_loss on nested tensors -> the loss, and the gradients of the log-probs."""
    from verl.utils import tensordict_utils  # pyright: ignore
    from verl.workers.config import ActorConfig  # pyright: ignore
    from verl.workers.utils.losses import ppo_loss  # pyright: ignore

    def nested(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    lengths, prompt = data.batch["response_mask"].sum(-1).int().tolist(), 2
    old = [row[:n] for row, n in zip(data.batch["old_log_probs"], lengths, strict=True)]
    leaves = [torch.cat([torch.zeros(prompt), row + 0.05 * torch.arange(len(row))]).requires_grad_() for row in old]
    tensors = {
        "input_ids": nested([torch.arange(prompt + n) for n in lengths]),
        "prompts": nested([torch.arange(prompt) for _ in lengths]),
        "responses": nested([torch.arange(n) for n in lengths]),
        "response_mask": nested([torch.ones(n, dtype=torch.long) for n in lengths]), "old_log_probs": nested(old),
        "advantages": nested([row[:n] for row, n in zip(advantages, lengths, strict=True)]),
    }  # fmt: skip
    extras = {"dp_size": 1, "batch_num_tokens": sum(lengths), "global_batch_size": ROWS}
    config = ActorConfig(strategy="fsdp", rollout_n=2, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2)
    loss, _ = ppo_loss(config, {"log_probs": nested(leaves)}, tensordict_utils.get_tensordict(tensors, extras))
    loss.backward()
    return loss.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


def test_the_fields_reach_verls_loss_and_without_alpha_nothing_changes(verl: Any) -> None:
    from inner.extras.verl.estimator import attach_composer_fields

    def loss(estimator: str, **settings: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        data, fields = batch(verl)
        return loss_of(verl, advantage(verl, attach_composer_fields(data, **fields), estimator, **settings), data)

    (plain, slopes), (same, equal), (moved, others) = (
        loss("grpo"),
        loss("grpo_composer"),
        loss("grpo_composer", alpha_sdpo=0.1),
    )
    assert torch.equal(plain, same) and all(map(torch.equal, slopes, equal))
    assert not torch.equal(plain, moved) and not all(map(torch.equal, slopes, others))


WORKER = """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import ray
there = {"env_vars": {"PYTHONPATH": sys.argv[2]}}
ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", _temp_dir=sys.argv[1], runtime_env=there)

@ray.remote
def in_a_worker():
    import torch, verl
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    from tests.inner import test_verl as t
    import verl.trainer.ppo.ray_trainer
    from inner.extras.verl.estimator import attach_composer_fields
    data, fields = t.batch(verl)
    mine = t.advantage(verl, attach_composer_fields(data, **fields), "grpo_composer")
    moved = t.advantage(verl, data, "grpo_composer", alpha_sdpo=0.1)
    plain = t.advantage(verl, t.batch(verl)[0], "grpo")
    module = get_adv_estimator_fn("grpo_composer").__module__
    return os.getpid(), module, torch.equal(mine, plain), torch.equal(moved, plain)

pid, module, same, dropped = ray.get(in_a_worker.remote())
print(pid != os.getpid(), module, same, dropped)
ray.shutdown()
"""


def test_a_ray_worker_has_it_too(verl: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("r")
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(folder), str(ROOT)], capture_output=True, text=True, timeout=240, cwd=ROOT,
        env={**os.environ, "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.strip().splitlines()[-1:] == ["True inner.extras.verl.estimator True False"], done.stderr[-3000:]
