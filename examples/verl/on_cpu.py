"""GRPO with hints in verl's parts, on a CPU: the configuration of settings.txt, and a model of 0.1 M parameters.

    .venv/verl/bin/python -m examples.verl.on_cpu                              make test-backends makes .venv/verl
    python -m verl.trainer.main_ppo $(grep -v '#' examples/verl/settings.txt) …       on GPUs (docs/backends.md)

    verl's         configuration · agent loop (agent_loop.py on its own) · TransferQueue · the registered trainer class,
                   made by its constructor · _compute_advantage · ppo_loss
    stand-ins      the engine, and the worker: a model of Transformers in this process

    batch ─▶ agent loop × n ─▶ TransferQueue ─▶ old log π ─▶ composer_sync's advantages ─▶ ppo_loss ─▶ AdamW

Not promised: verl's workers, engines and fit(): they need GPUs.
"""

import argparse
import asyncio
import os
import random
import tempfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
HERE = Path(__file__).parent
STEPS, PROMPTS = 20, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("overrides", nargs="*", help="further settings of verl: algorithm.alpha_sdpo=0")
    given = parser.parse_args()
    import ray  # pyright: ignore[reportMissingImports]
    import transfer_queue as tq  # pyright: ignore[reportMissingImports]

    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    try:
        tq.init()
        train(given.steps, given.overrides)
        tq.close()
    finally:
        ray.shutdown()


def train(steps: int, overrides: list[str]) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = start_model(Path(folder))
        config = verl_config([*settings(), f"actor_rollout_ref.model.path={folder}", *overrides])
        policy = Policy(model, config)
        trainer = trainer_of(config, policy)
        events = asyncio.new_event_loop()
        asyncio.set_event_loop(events)  # an agent loop keeps the event loop in which it was made
        loop = agent_loop_of(config, policy, tokenizer)
        words = f"alpha {config.algorithm.alpha_sdpo}"
        print(f"{type(trainer).__name__}: {config.algorithm.adv_estimator}, {words}", flush=True)
        rng = random.Random(0)
        for step in range(steps):
            batch, reward = events.run_until_complete(sample(config, loop, rng, step))
            metrics: dict[str, Any] = {}
            policy.put_old_log_probs(batch)
            trainer._compute_advantage(batch, metrics)
            moved = policy.update(batch)
            hinted = metrics.get("composer/sdpo_tokens", 0)
            print(f"step {step:2d}: reward {reward:.3f}, hinted tokens {hinted:3d}, loss {moved:+.3f}", flush=True)


def settings() -> list[str]:
    lines = (HERE / "settings.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def verl_config(overrides: list[str]) -> Any:
    """Return verl's own configuration with these overrides, as main_ppo composes it."""
    import verl.trainer  # pyright: ignore[reportMissingImports]
    from hydra import compose, initialize_config_dir  # pyright: ignore[reportMissingImports]

    folder = Path(verl.trainer.__file__).parent / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        return compose("ppo_trainer", overrides)


def start_model(folder: Path) -> tuple[Any, Any]:
    """Write ToolWorld's start model to a folder: it can write calls and follow hints, and guesses names."""
    from examples.verl.agent_loop import WORLD

    tokenizer, model = WORLD.tokenizer(), WORLD.model(seed=0)
    WORLD.warm_start(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer


def trainer_of(config: Any, policy: "Policy") -> Any:
    """Return the trainer that main_ppo would make, with the policy in place of its workers."""
    import_module("inner.extras.verl.plugin")  # an installed package needs no such line: verl finds the entry point
    from verl.trainer.ppo.v1 import get_trainer_cls  # pyright: ignore[reportMissingImports]

    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
    trainer.actor_rollout_wg = policy
    return trainer


def agent_loop_of(config: Any, policy: "Policy", tokenizer: Any) -> Any:
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap  # pyright: ignore[reportMissingImports]
    from verl.utils.dataset.rl_dataset import RLHFDataset  # pyright: ignore[reportMissingImports]

    agent = config.actor_rollout_ref.rollout.agent
    named = {one["name"]: one["_target_"] for one in OmegaConf.load(agent.agent_loop_config_path)}
    module, _, name = named[agent.default_agent_loop].rpartition(".")
    return getattr(import_module(module), name)(
        trainer_config=DictConfigWrap(config), server_manager=policy, tokenizer=tokenizer, processor=None,
        dataset_cls=RLHFDataset, data_config=DictConfigWrap(config.data),
    )  # fmt: skip


async def sample(config: Any, loop: Any, rng: random.Random, step: int) -> tuple[Any, float]:
    """Run the agent loop n times for each of some questions, and put the outputs as verl's worker does."""
    import torch
    import transfer_queue as tq  # pyright: ignore[reportMissingImports]
    from tensordict import NonTensorStack, TensorDict  # pyright: ignore[reportMissingImports]

    asked = [f"op{rng.randrange(6)} {rng.randrange(20)} {rng.randrange(20)}" for _ in range(PROMPTS)]
    rollout = config.actor_rollout_ref.rollout
    how = {"temperature": rollout.temperature}
    outputs = [
        (f"{step}_{p}", await loop.run(how, raw_prompt=[{"role": "user", "content": q}]))
        for p, q in enumerate(asked)
        for _ in range(rollout.n)
    ]  # fmt: skip
    scores = [torch.zeros(len(o.response_ids)) for _, o in outputs]
    for row, (_, o) in zip(scores, outputs, strict=True):
        row[-1] = o.reward_score
    ids = lambda name: _nested([torch.tensor(getattr(o, name)) for _, o in outputs])  # noqa: E731
    fields = TensorDict(
        {
            "uid": NonTensorStack(*[uid for uid, _ in outputs]), "prompts": ids("prompt_ids"),
            "responses": ids("response_ids"), "response_mask": ids("response_mask"), "rm_scores": _nested(scores),
            "input_ids": _nested([torch.tensor(o.prompt_ids + o.response_ids) for _, o in outputs]),
            "extra_fields": NonTensorStack(*[o.extra_fields for _, o in outputs]),
        },
        batch_size=len(outputs),
    )  # fmt: skip
    keys = [f"{uid}_{i}_0" for i, (uid, _) in enumerate(outputs)]
    meta = tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=[{} for _ in keys])
    meta.extra_info["temperature"] = rollout.temperature
    return meta, sum(o.reward_score for _, o in outputs) / len(outputs)


class Policy:
    """The stand-in for verl's engine (`generate`) and for its worker (`compute_log_prob`, and the update)."""

    def __init__(self, model: Any, config: Any) -> None:
        import torch
        from verl.workers.config import ActorConfig  # pyright: ignore[reportMissingImports]

        actor = config.actor_rollout_ref.actor
        self._model, self._longest = model, config.actor_rollout_ref.rollout.response_length
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=actor.optim.lr)
        self._config = ActorConfig(
            strategy="fsdp", rollout_n=config.actor_rollout_ref.rollout.n, ppo_micro_batch_size_per_gpu=1,
            clip_ratio=actor.clip_ratio,
        )  # fmt: skip
        self._dispatch_info = {"actor": [0]}

    async def generate(self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
        """Return one sampled response, as verl's LLMServerClient does."""
        import torch

        temperature, end = sampling_params["temperature"], self._model.config.eos_token_id
        made = self._model.generate(
            torch.tensor([prompt_ids]), do_sample=True, temperature=temperature, top_k=0, max_new_tokens=self._longest,
            eos_token_id=end,
        )  # fmt: skip
        ids = made[0, len(prompt_ids) :].tolist()
        return SimpleNamespace(token_ids=ids, log_probs=None, routed_experts=None, num_preempted=0, extra_fields={})

    def log_probs(self, rows: list[Any], temperature: float) -> list[Any]:
        """Return log π of the token after each place, (length,) a row; the last place has none: 0."""
        import torch

        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logps = (self._model(padded).logits[:, :-1] / temperature).log_softmax(-1)
        found = logps.gather(-1, padded[:, 1:, None])[..., 0]
        return [torch.cat([row[: len(ids) - 1], row.new_zeros(1)]) for row, ids in zip(found, rows, strict=True)]

    def compute_log_prob(self, meta: Any) -> Any:
        """Answer composer_sync as verl's worker does: log π of hinted sequences, through the queue."""
        import torch
        import transfer_queue as tq  # pyright: ignore[reportMissingImports]
        from tensordict import TensorDict  # pyright: ignore[reportMissingImports]

        where = {"keys": meta.keys, "partition_id": meta.partition_id}
        rows = list(tq.kv_batch_get(**where)["input_ids"].unbind())
        with torch.no_grad():
            found = _nested(self.log_probs(rows, meta.extra_info["temperature"]))
        return tq.kv_batch_put(**where, fields=TensorDict({"log_probs": found}, batch_size=len(rows)))

    def put_old_log_probs(self, batch: Any) -> None:
        import torch
        import transfer_queue as tq  # pyright: ignore[reportMissingImports]
        from tensordict import TensorDict  # pyright: ignore[reportMissingImports]

        where = {"keys": batch.keys, "partition_id": batch.partition_id}
        data = tq.kv_batch_get(**where, select_fields=["input_ids", "responses"])
        with torch.no_grad():
            every = self.log_probs(list(data["input_ids"].unbind()), batch.extra_info["temperature"])
        lengths = [len(row) for row in data["responses"].unbind()]
        old = [row[-n - 1 : -1] for row, n in zip(every, lengths, strict=True)]
        tq.kv_batch_put(**where, fields=TensorDict({"old_log_probs": _nested(old)}, batch_size=len(old)))

    def update(self, batch: Any) -> float:
        """Take one step by verl's ppo_loss on the batch's advantages.   Return the loss."""
        import transfer_queue as tq  # pyright: ignore[reportMissingImports]
        from verl.utils import tensordict_utils  # pyright: ignore[reportMissingImports]
        from verl.workers.utils.losses import ppo_loss  # pyright: ignore[reportMissingImports]

        names = ["input_ids", "prompts", "responses", "response_mask", "old_log_probs", "advantages"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        counts = {
            "dp_size": 1, "batch_num_tokens": int(data["response_mask"].values().sum()),
            "global_batch_size": len(batch.keys),
        }  # fmt: skip
        logps = self.log_probs(list(data["input_ids"].unbind()), batch.extra_info["temperature"])
        tensors = {name: data[name] for name in names}
        loss, _ = ppo_loss(
            self._config, {"log_probs": _nested(logps)}, tensordict_utils.get_tensordict(tensors, counts)
        )
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()


def _nested(parts: list[Any]) -> Any:
    import torch

    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


if __name__ == "__main__":
    main()
