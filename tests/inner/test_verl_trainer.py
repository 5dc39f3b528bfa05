"""verl's v1 trainer with our terms: its own _compute_advantage, the real TransferQueue, a policy of Transformers.

`make test-backends` has verl."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny_models import tiny_model_folder

pytestmark = [
    pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed: make test-backends"),
    pytest.mark.timeout(300),
]
ROOT = Path(__file__).parents[2]
PROMPT, RESPONSES = [5, 6, 7], [[8, 9, 10, 11], [12, 13], [14, 15, 16], [9, 9, 9, 9, 9]]
REWARDS = [1.0, 0.0, 0.25, 1.0]
HINT = [40, 41]


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import ray  # pyright: ignore
    import transfer_queue as tq  # pyright: ignore

    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    tq.init()
    yield tq
    tq.close()
    ray.shutdown()


class Worker:
    """The policy behind verl's verb: it reads sequences from the queue, and writes the log-prob of each next token."""

    def __init__(self, tq: Any, dp: int = 1) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(tiny_model_folder("llama")).eval()
        self._tq, self._dispatch_info, self._dp = tq, dict[str, list[int]](), dp
        self.asked: list[list[list[int]]] = []

    def _query_dispatch_info(self, role: str) -> list[int]:
        return list(range(self._dp))

    @torch.no_grad()
    def log_probs(self, ids: list[int]) -> torch.Tensor:
        """log π of each next token; the last place has none."""
        logits = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return torch.cat([logits[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0], torch.zeros(1)])

    def compute_log_prob(self, meta: Any) -> Any:
        data = self._tq.kv_batch_get(keys=meta.keys, partition_id=meta.partition_id)
        rows = [row.tolist() for row in data["input_ids"].unbind()]
        self.asked.append(rows)
        found = torch.nested.as_nested_tensor([self.log_probs(row) for row in rows], layout=torch.jagged)
        fields = __import__("tensordict").TensorDict({"log_probs": found}, batch_size=len(rows))
        return self._tq.kv_batch_put(keys=meta.keys, partition_id=meta.partition_id, fields=fields)


def trainer_of(tq: Any, name: str, *, dp: int = 1, **settings: Any) -> Any:
    from omegaconf import OmegaConf  # pyright: ignore
    from verl.trainer.ppo.v1 import get_trainer_cls  # pyright: ignore

    algorithm = {
        "adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False, "rollout_correction": None,
        "norm_adv_by_std_in_grpo": True, **settings,
    }  # fmt: skip
    cls = get_trainer_cls(name)
    made = object.__new__(cls)
    made.config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 4}}})
    made.actor_rollout_wg = Worker(tq, dp)
    if name != "sync":
        from inner.extras.verl.trainer import weights_in

        made._weights = weights_in(made.config.algorithm)
    return made


def put(tq: Any, worker: Worker, extras: Mapping[int, Any] = MappingProxyType({})) -> Any:
    """Put four outputs of two prompts as verl's agent loop does; of one session, two outputs."""
    from tensordict import NonTensorStack, TensorDict  # pyright: ignore

    keys = ["a_0_0", "a_1_0", "b_0_0", "b_0_1"]
    nested = lambda parts: torch.nested.as_nested_tensor(parts, layout=torch.jagged)  # noqa: E731
    scores = [torch.zeros(len(r)) for r in RESPONSES]
    for row, reward in zip(scores, REWARDS, strict=True):
        row[-1] = reward
    old = [worker.log_probs([*PROMPT, *r])[len(PROMPT) - 1 : -1] for r in RESPONSES]
    masks = [torch.ones(len(r), dtype=torch.int64) for r in RESPONSES]
    masks[0][1] = 0  # a tool's token
    fields = TensorDict(
        {
            "uid": NonTensorStack(*[key[0] for key in keys]), "response_mask": nested(masks),
            "rm_scores": nested(scores), "old_log_probs": nested(old),
            "extra_fields": NonTensorStack(*[{"composer": extras[i]} if i in extras else {} for i in range(4)]),
        },
        batch_size=4,
    )  # fmt: skip
    meta = tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=[{} for _ in keys])
    meta.extra_info["temperature"] = 1.0
    return meta


def advantages(tq: Any, trainer: Any, batch: Any) -> list[torch.Tensor]:
    trainer._compute_advantage(batch, metrics={})
    found = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages"])
    return list(found["advantages"].unbind())


def test_the_modes_are_registered_by_the_entry_point() -> None:
    code = "import verl; from verl.trainer.ppo.v1 import get_trainer_cls as g; print(g('composer_sync').__name__)"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "ComposerPPOTrainerSync" in done.stdout, done.stderr[-2000:]


def test_without_weights_the_advantages_are_verls_also_of_sessions_with_two_outputs(queue: Any) -> None:
    """By an estimator of our own, verl would count each output of a session: 1.49 off."""
    import inner.extras.verl.plugin  # noqa: F401

    theirs = trainer_of(queue, "sync")
    mine = trainer_of(queue, "composer_sync", alpha_sdpo=0.0, beta_replay=0.0)
    expected = advantages(queue, theirs, put(queue, theirs.actor_rollout_wg))
    found = advantages(queue, mine, put(queue, mine.actor_rollout_wg))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert not mine.actor_rollout_wg.asked


@pytest.mark.parametrize("dp", [1, 2])
def test_the_terms_are_the_teachers_pull_and_the_centred_consensus(queue: Any, dp: int) -> None:
    import inner.extras.verl.plugin  # noqa: F401
    from inner.extras.verl.trainer import composer_fields

    first = composer_fields(  # a hint behind the first token, about the third and fourth
        response_length=4, hinted_ids=[*PROMPT, 8, *HINT, 9, 10, 11], at=[-1, 6, 7, 8],
        turns=[(0, 2), (2, 4)], scores=[1.0, None],
    )  # fmt: skip
    second = composer_fields(response_length=2, turns=[(0, 2)], scores=[0.5])
    plain = trainer_of(queue, "sync")
    trainer = trainer_of(queue, "composer_sync", dp=dp, alpha_sdpo=0.1, beta_replay=0.5)
    worker = trainer.actor_rollout_wg
    base = advantages(queue, plain, put(queue, worker))
    found = advantages(queue, trainer, put(queue, worker, {0: first, 1: second}))
    hinted = worker.log_probs([*PROMPT, 8, *HINT, 9, 10, 11])
    alone = worker.log_probs([*PROMPT, *RESPONSES[0]])
    pull = torch.tensor([0, 0, hinted[6] - alone[4], hinted[7] - alone[5]])  # the tool's token is no action
    torch.testing.assert_close(found[0], base[0] + 0.1 * pull + 0.5 * torch.tensor([0.25, 0, 0, 0]))
    torch.testing.assert_close(found[1], base[1] - 0.5 * 0.25)
    assert all(torch.equal(a, b) for a, b in zip(found[2:], base[2:], strict=True))
    assert [len(rows) for rows in worker.asked] == [dp] and pull.abs().max() > 0
    with pytest.raises((ValueError, RuntimeError)):
        queue.kv_batch_get(keys=["a_0_0_0"], partition_id="composer_hinted")


def test_rows_that_verl_pads_with_bring_nothing(queue: Any) -> None:
    """They are copies of the first row, with its extra fields."""
    import inner.extras.verl.plugin  # noqa: F401
    from inner.extras.verl.trainer import composer_fields

    fields = composer_fields(response_length=4, hinted_ids=[*PROMPT, *HINT, 8, 9, 10, 11], at=[5, 6, 7, 8])
    trainer = trainer_of(queue, "composer_sync", alpha_sdpo=0.1)
    base = advantages(queue, trainer_of(queue, "sync"), put(queue, trainer.actor_rollout_wg))
    batch = put(queue, trainer.actor_rollout_wg, {0: fields})
    batch.tags[0] = {"is_padding": True}
    assert all(torch.equal(a, b) for a, b in zip(advantages(queue, trainer, batch), base, strict=True))


def test_a_log_prob_that_is_no_number_is_refused(queue: Any) -> None:
    import inner.extras.verl.plugin  # noqa: F401
    from inner.extras.verl.trainer import composer_fields

    fields = composer_fields(response_length=4, hinted_ids=[*PROMPT, *HINT, 8, 9, 10, 11], at=[5, 6, 7, 8])
    trainer = trainer_of(queue, "composer_sync", alpha_sdpo=0.1)
    batch = put(queue, trainer.actor_rollout_wg, {0: fields})
    trainer.actor_rollout_wg.log_probs = lambda ids: torch.full((len(ids),), float("-inf"))
    with pytest.raises(ValueError, match=r"not a finite number\. Leave the token out"):
        trainer._compute_advantage(batch, metrics={})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"alpha_spdo": 0.1}, "algorithm.alpha_spdo is not a setting of this trainer; it has alpha_sdpo"),
        ({"beta_dpo": 0.1}, "algorithm.beta_dpo is not a setting"),
        ({"alpha_sdpo": -0.1}, "must be a finite number, 0 or more"),
        ({"beta_replay": float("nan")}, "must be a finite number, 0 or more"),
        ({"alpha_sdpo": "big"}, "must be a finite number, 0 or more"),
        ({"alpha_sdpo": 0.1, "rollout_correction": {"bypass_mode": True}}, "would be noise. Set bypass_mode=false"),
        ({"adv_estimator": "grpo_composer"}, "Set algorithm.adv_estimator=grpo"),
    ],
)
def test_a_misspelt_weight_is_refused_before_the_run(settings: dict[str, Any], words: str) -> None:
    """In silence it would be plain GRPO."""
    from omegaconf import OmegaConf  # pyright: ignore
    from verl.trainer.ppo.v1 import get_trainer_cls  # pyright: ignore

    import inner.extras.verl.plugin  # noqa: F401

    config = OmegaConf.create({"algorithm": {"adv_estimator": "grpo", **settings}})
    with pytest.raises(ValueError, match=words):
        get_trainer_cls("composer_sync")(config)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hinted_ids": [1, 2, 3], "at": [1, 2]}, "`at` has 2 places for 4 response tokens"),
        ({"hinted_ids": [1, 2, 3], "at": [-1, 0, 1, 2]}, "`at` has the place 0, and there are 3 hinted ids"),
        ({"hinted_ids": [1, 2, 3], "at": [-1, -1, 1, 3]}, "`at` has the place 3, and there are 3 hinted ids"),
        ({"turns": [(0, 2)]}, "1 turns have 0 scores"),
        ({"turns": [(2, 5)], "scores": [1.0]}, r"turn \(2, 5\) does not lie in a response of 4 tokens"),
    ],
)
def test_fields_that_do_not_fit_their_response_are_refused(fields: dict[str, Any], words: str) -> None:
    from inner.extras.verl.trainer import composer_fields

    with pytest.raises(ValueError, match=words):
        composer_fields(response_length=4, **fields)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_the_constructor_makes_of_each_mode_what_verl_makes_of_its_own(queue: Any, mode: str) -> None:
    """Before: verl compared "composer_sync" with its own names, so it took the buffer and settings of no mode."""
    from verl.trainer.ppo.v1 import get_trainer_cls  # pyright: ignore

    import inner.extras.verl.plugin  # noqa: F401
    from examples.verl.on_cpu import verl_config

    rollout = "actor_rollout_ref.rollout"
    sizes = ["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8", f"{rollout}.nnodes=1"]
    sizes += ["trainer.v1.separate_async.parameter_sync_step=2", "actor_rollout_ref.hybrid_engine=false"]
    sizes += [f"{rollout}.n_gpus_per_node=1", f"{rollout}.checkpoint_engine.backend=nccl"]

    def made(name: str, *more: str) -> Any:
        config = verl_config([f"trainer.v1.trainer_mode={name}", *sizes, *more])
        return get_trainer_cls(name)(config)

    mine, own = made(f"composer_{mode}", "+algorithm.alpha_sdpo=0.1"), made(mode)
    found = (mine.trainer_mode, mine.parameter_sync_step)
    assert found == (own.trainer_mode, own.parameter_sync_step) == (mode, 2 if mode == "separate_async" else 1)
    assert type(mine.replay_buffer) is type(own.replay_buffer) and mine.config.trainer.v1.trainer_mode == mode


def test_the_example_says_what_its_page_says() -> None:
    """Of another CPU a sampled token may be another one, so rewards are compared up to a tenth."""
    page = (ROOT / "docs" / "backends.md").read_text()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "examples.verl.on_cpu", "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=280)
    said, told = done.stdout.splitlines(), page.partition("ComposerPPOTrainerSync: ")[2].splitlines()
    assert said[0] == f"ComposerPPOTrainerSync: {told[0]}", done.stderr[-2000:]
    number = re.compile(r"step +\d+: reward ([\d.]+), hinted tokens +(\d+)")
    for one, line in zip(said[1:], told[1:5], strict=True):
        found, expected = number.match(one), number.match(line)
        assert found and expected and abs(float(found[1]) - float(expected[1])) <= 0.1, (one, line)
        assert int(found[2]) > 300, "almost each answer of the start model is wrong, so it gets a hint"
