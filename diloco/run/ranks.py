"""What a replica of several ranks cannot do yet.

    config, K ─▶ "" or one sentence, before anything is started

Not promised: that the rest has been seen on GPUs.  No torch here.
"""

from diloco.run.config import BUCKET, ConfigError, RunConfig


def refuse_ranks(config: RunConfig, ranks: int) -> None:
    """Raise ConfigError for a run whose replicas cannot have several ranks.   ranks: of one replica."""
    inner, fleet = config.inner, config.fleet
    asked = config.script is None
    reasons = {
        "`diloco launch` starts a script in one process": not asked,
        f'rendezvous = "{config.rendezvous}" needs one process; use the bucket': config.rendezvous != BUCKET,
        'inner.loop = "supervised" trains in one process': asked and inner.loop == "supervised",
        "[inner.vllm] generates for one process": inner.vllm is not None,
        "[inner.sdpo] has a teacher in one process": inner.sdpo.is_used,
        "[inner.replay] reads its pairs in one process": inner.replay.is_used,
        "[inner.process] scores the turns of one process": inner.process is not None,
        "inner.sampling.boxes are rented by one process": inner.sampling.boxes is not None,
        f'inner.grpo.objective = "{inner.grpo.objective}" fills its groups in one process': (
            bool(inner.objective_settings.get("dynamic_sampling")) or inner.objective_settings.get("loss_type") == "gmpo"
        ),
        f'inner.optimizer = "{inner.optimizer}" was not seen on several': inner.optimizer != "adamw",
        "fleet.record_rollouts (and so actors) record what one process generates": fleet.record_rollouts,
    }
    if found := next((text for text, holds in reasons.items() if holds), ""):
        raise ConfigError(
            f"each replica is to have {ranks} devices, and {found}. Leave that out, or use one device for each replica "
            "and more replicas"
        )
