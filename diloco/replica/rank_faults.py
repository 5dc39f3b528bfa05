"""Name the settings that a replica of several ranks cannot have yet.

    config, K ─▶ "" or one sentence, before anything is started

Not promised: that the other settings have been tried on GPUs.  No torch here.
"""

from diloco.run.config import BUCKET, RunConfig


def rank_fault(config: RunConfig, ranks: int) -> str:
    """Return why this run's replicas cannot have several ranks, or "".   ranks: number of ranks per replica."""
    inner, outer = config.inner, config.outer
    policy = inner.objective_settings
    reasons = {
        f'rendezvous = "{config.rendezvous}" needs one process': config.rendezvous != BUCKET,
        'inner.loop = "supervised" trains in one process': inner.loop == "supervised",
        "[inner.vllm] generates for one process": inner.vllm is not None,
        "inner.process.head scores with a whole model, and without [inner.lora] the model is in shards": (
            inner.process is not None and inner.process.head is not None and inner.lora is None
        ),
        '[inner.process] with scale_rewards = "batch" compares the turns of one process': (
            inner.process is not None and policy.get("scale_rewards") == "batch"
        ),
        "inner.sampling.boxes are rented by one process": inner.sampling.boxes is not None,
        f'inner.grpo.objective = "{inner.grpo.objective}" was tested in one process only': (
            bool(policy.get("dynamic_sampling")) or policy.get("loss_type") == "gmpo"
        ),
        'inner.optimizer = "muon" needs whole matrices, and without [inner.lora] matrices are in shards': (
            inner.optimizer == "muon" and inner.lora is None
        ),
        f'inner.optimizer = "{inner.optimizer}" was tested in one process only': (
            inner.optimizer not in ("adamw", "muon")
        ),
        "inner.trl.beta compares with a reference model, which was tested in one process only": bool(
            inner.trl.get("beta")
        ),
        "inner.rewards.functions has a reward model, which was tested in one process only": any(
            name.startswith("hub:") for name in inner.rewards.functions
        ),
        "[eval] needs the whole model's outer steps (outer.fragments = 1, fragment_sync_delay = 0)": (
            config.eval is not None and (outer.fragments > 1 or outer.fragment_sync_delay > 0)
        ),
        "inner.lora.base was tested in one process only": inner.lora is not None and inner.lora.base is not None,
    }
    found = next((text for text, holds in reasons.items() if holds), "")
    return found and (
        f"each replica is to have {ranks} devices, and {found}. Leave that setting out, or use one device for each "
        "replica and more replicas"
    )
