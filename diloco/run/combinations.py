"""Checks of settings: settings that a lighthouse does not support, settings for actors, columns without a file.

    rollouts of [inner] ∧ fleet.record_rollouts ∧ fleet.broadcast_weights ──▶ actors can sample ahead (diloco/actor/)

Not promised: that the lighthouse answers; a replica reports this when it connects.
"""

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.run.sections import ConfigError, OuterConfigError

if TYPE_CHECKING:
    from diloco.run.config import OuterConfig, RunConfig

ENGINES = ("openai", "llama_cpp", "mlx")  # of inner/extras/engines/choose.py
NEAR = 6  # inner steps; decision 080 has the measurements


def check_lighthouse(outer: "OuterConfig", usual: "OuterConfig") -> None:
    """Raise OuterConfigError for settings that a lighthouse does not support: Gloo sends fp32, without samples.

    usual: the defaults."""
    if outer.codec != "fp32":
        raise OuterConfigError(
            f'outer.codec = {outer.codec!r} works only with the bucket; Gloo sends fp32. Use "fp32" with a lighthouse'
        )
    if outer.weighting == "samples":
        raise OuterConfigError(
            'outer.weighting = "samples" works only with the bucket. Use "steps" or "uniform" with a lighthouse'
        )
    for name in ("norm_gate", "max_carry", "age_discount"):
        value = getattr(outer, name)
        if value not in (getattr(usual, name), 0):  # with a lighthouse, each acts as 0
            raise OuterConfigError(
                f"outer.{name} = {value:g} works only with the bucket: a lighthouse damps nothing, and drops late "
                "work. Leave the line out, or use the bucket"
            )


def check_rendezvous(rendezvous: str, outer: "OuterConfig", usual: "OuterConfig", *, broadcasts: bool) -> None:
    """Check a `rendezvous` that is not the bucket.   broadcasts: fleet.broadcast_weights.   Raises ConfigError."""
    if not re.fullmatch(r"lighthouse://(\[[0-9a-fA-F:]+\]|[^:/@\s]+):\d+", rendezvous):
        raise ConfigError(
            f'rendezvous = {rendezvous!r} is not known. Use "bucket" (or no line), or lighthouse://host:port'
        )
    if broadcasts:
        raise ConfigError(
            "fleet.broadcast_weights = true writes to the bucket, and a run over a lighthouse has no bucket. Leave the "
            "line out, or use the bucket"
        )
    check_lighthouse(outer, usual)


def check_columns(config: "RunConfig") -> None:
    """Raise ConfigError for inner.data.columns without a file or a dataset whose columns it could rename."""
    if not (config.inner.data.prompts or (config.eval is not None and config.eval.prompts)):
        raise ConfigError(
            f"inner.data.columns = {config.inner.data.columns} does nothing here: it is read only where "
            "inner.data.prompts or eval.prompts is set. Leave inner.data.columns out"
        )


def prepared_for_actors(config: "RunConfig") -> "RunConfig":
    """Return the config with the settings that actors need."""
    return replace(config, fleet=replace(config.fleet, record_rollouts=True, broadcast_weights=True))


def refuse_actors(config: "RunConfig") -> None:
    """Raise ConfigError for a run that has no use for actors."""
    if config.script is not None or config.inner.loop != "grpo":
        raise ConfigError('this run has no rollouts for actors; start actors for a run with inner.loop = "grpo"')
    if config.rendezvous != "bucket":
        raise ConfigError(
            f"actors and replicas meet in the bucket, and this run has rendezvous = {config.rendezvous!r}. Start no "
            'actors, or use rendezvous = "bucket" (or no line)'
        )
    objective = config.inner.objective_settings
    if objective.get("dynamic_sampling") or objective.get("loss_type") == "gmpo":
        raise ConfigError(
            f"actors cannot sample for objective = {config.inner.grpo.objective!r}: dynamic sampling and gmpo need "
            "rollouts of the replica's own weights. Start no actors, or choose another objective (diloco objectives)"
        )
    dropout = config.inner.lora.dropout if config.inner.lora else 0.0
    if dropout or config.inner.trl.get("disable_dropout") is False:
        raise ConfigError(
            f"actors cannot sample: inner.lora.dropout = {dropout} (or inner.trl.disable_dropout) stays in the "
            "loss, so the loss's ratio of policies would be noise. Start no actors, or leave the dropout out"
        )
    refuse_engine(config, config.fleet.actor_engine)
    for name in ("record_rollouts", "broadcast_weights"):
        if not getattr(config.fleet, name):
            raise ConfigError(
                f"this run was launched without fleet.{name}, so an actor could not reach its replicas. Start a run "
                f"with `--set fleet.{name}=true`, or with `diloco train --actors N`"
            )


def refuse_engine(config: "RunConfig", typed: str) -> None:
    """Raise ConfigError for an actor's engine that is not known, or that the run cannot use."""
    kind, _, address = typed.partition(":")
    if typed in ("", "transformers"):
        return
    is_usable = "://" in address if kind == "openai" else address or typed == "mlx"  # "mlx": the run's start model
    if kind not in ENGINES or not is_usable:
        raise ConfigError(
            f"the actor's engine {typed!r} is not known. Use openai:http://HOST:PORT, llama_cpp:BASE.gguf, mlx or "
            "transformers, or leave out fleet.actor_engine (by hand: --engine)"
        )
    if config.inner.lora is None:
        raise ConfigError(
            f"the actor's engine {typed!r} takes LoRA adapters only, and this run trains all weights. Name none (with "
            "[inner.vllm], the actor then samples with vLLM in its own process), or start a run with [inner.lora]"
        )


def staleness_of(config: "RunConfig") -> int:
    """Return the outer steps by which an actor's weights may be old: by default, about NEAR inner steps."""
    asked = config.fleet.staleness
    return max(0, NEAR // config.outer.interval - 1) if asked is None else asked
