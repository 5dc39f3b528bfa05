"""Which runs have a use for actors (diloco/actor.py), from the run's settings alone.

    rollouts of [inner] ∧ fleet.record_rollouts ∧ fleet.broadcast_weights ──▶ actors can sample ahead

Not promised: that the objective takes rollouts of other weights; the actor's trainer checks that.
"""

from dataclasses import replace

from diloco.run.config import ConfigError, RunConfig


def prepared_for_actors(config: RunConfig) -> RunConfig:
    """Return the config with the settings that actors need."""
    return replace(config, fleet=replace(config.fleet, record_rollouts=True, broadcast_weights=True))


def refuse_actors(config: RunConfig) -> None:
    """Raise ConfigError for a run that has no use for actors."""
    if config.script is not None or config.inner.loop != "grpo":
        raise ConfigError('this run has no rollouts of [inner]; start actors for a run with inner.loop = "grpo"')
    for name in ("record_rollouts", "broadcast_weights"):
        if not getattr(config.fleet, name):
            raise ConfigError(
                f"this run was launched without fleet.{name}, so an actor could not reach its replicas. Start a run "
                f"with `--set fleet.{name}=true`, or with `diloco train --actors N`"
            )
