"""Extends TRL's GRPOConfig by the name of its objective, and by two settings that TRL lacks.

    POConfig(GRPOConfig)
        objective              a name of the menu (inner.settings.objectives); the other fields must match it
        dynamic_sampling       limit of further generations per batch, to replace groups with equal rewards; 0: off
        soft_overlong_tokens   a completion that ends in this last part of its limit loses up to 1; 0: off (DAPO, 13)

POConfig checks itself when it is made.

Not promised: that TRL's own trainers read these settings; ComposerReplicationTrainer does.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from trl.trainer.grpo_config import GRPOConfig

from inner.settings.objectives import (
    NEVER_CLIPS,
    PO_OBJECTIVES,
    RATIO_KNOBS,
    ObjectiveError,
    check_settings,
    inert_knobs,
    po_settings,
)


@dataclass
class POConfig(GRPOConfig):
    objective: str = field(default="dr_grpo", metadata={"help": "Name in the menu of objectives."})
    dynamic_sampling: int = field(default=0, metadata={"help": "Further generations per batch, at most."})
    soft_overlong_tokens: int = field(default=0, metadata={"help": "Tokens over which the length penalty rises."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self.objective, vars(self))


def make_po_config(objective: str = "dr_grpo", **overrides: Any) -> POConfig:
    """Return a POConfig (TRL's GRPOConfig and three fields) of the objective with `overrides`. Raises ObjectiveError if
    the overrides make it another objective. Warns if the objective has no effect in this run."""
    known = POConfig.__dataclass_fields__
    if unknown := sorted(set(overrides) - set(known)):
        near = get_close_matches(unknown[0], known, n=1)
        guess = f" Did you mean {near[0]!r}?" if near else " Correct the name, or leave it out."
        raise ObjectiveError(f"TRL's GRPOConfig has no setting {', '.join(unknown)}.{guess}")
    overrides.setdefault("max_completion_length", known["max_completion_length"].default)
    settings = po_settings(objective, overrides)
    config = POConfig(**settings, objective=objective)
    for knob in {*PO_OBJECTIVES[objective].fixed, *PO_OBJECTIVES[objective].values, *RATIO_KNOBS} & set(settings):
        if (held := getattr(config, knob)) != settings[knob]:
            raise ObjectiveError(
                f"objective = {objective!r} did not apply: {knob} = {settings[knob]!r} was asked for and TRL holds "
                f"{held!r}. This TRL version is not supported; use trl 1.16."
            )
    _warn_if_inert(objective, vars(config), overrides)
    return config


def make_dr_grpo_config(**overrides: Any) -> POConfig:
    """Return the config of Dr. GRPO, the default objective."""
    return make_po_config("dr_grpo", **overrides)


def _warn_if_inert(name: str, settings: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    if knobs := inert_knobs(name, settings, asked):
        from inner.settings.menu import inert_text

        warnings.warn(inert_text(name, knobs), stacklevel=3)
    if name in ("gspo", "luspo") and settings["epsilon"] >= NEVER_CLIPS:
        warnings.warn(
            f"objective = {name!r}: epsilon = {settings['epsilon']} never clips, since a sequence's ratio stays within "
            f"a few thousandths of 1. Set epsilon = {PO_OBJECTIVES[name].values['epsilon']}.",
            stacklevel=3,
        )
