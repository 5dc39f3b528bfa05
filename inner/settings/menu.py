"""Describes the objectives: the menu of `diloco objectives` (docs/channels.md), and a warning on knobs without effect.

Not promised: a stable text. Programs should read the table PO_OBJECTIVES.
"""

from collections.abc import Mapping
from typing import Any

from inner.settings.objectives import PO_OBJECTIVES, Objective, find_objective, inert_knobs


def format_menu(settings: Mapping[str, Any] | None = None) -> str:
    """Describe every objective: formula, knobs, when to use it, and the knobs without effect under these settings.

    settings: gradient_accumulation_steps, steps_per_generation, num_iterations; None or missing: the preset's value."""
    here = {k: v for k, v in (settings or {}).items() if v is not None}
    return "\n\n".join(_menu_entry(name, preset, here) for name, preset in PO_OBJECTIVES.items())


def _menu_entry(name: str, preset: Objective, here: Mapping[str, Any]) -> str:
    run = dict(here)
    accumulated = run.get("gradient_accumulation_steps", 1)
    if preset.stale > 1 and run.get("num_iterations", 1) == 1:
        run.setdefault("steps_per_generation", preset.stale * accumulated)
    knobs = inert_knobs(name, run)
    state = f"inert on-policy: {', '.join(knobs)}; what is left: {preset.on_policy}" if knobs else "active"
    if preset.stale > 1 and not knobs and "steps_per_generation" not in here:
        state += f", with its own steps_per_generation = {preset.stale * accumulated}"
    shown = {**preset.fixed, **preset.values}
    return "\n".join(
        [
            f"{name:9s} {preset.title} ({preset.paper})",
            f"  loss    {preset.formula}",
            f"  knobs   {', '.join(f'{k} = {v}' for k, v in shown.items())}",
            f"  when    {preset.when}",
            f"  here    {state}",
        ]
    )


def inert_text(name: str, knobs: tuple[str, ...]) -> str:
    """Return the warning that these knobs have no effect."""
    return (
        f"objective = {name!r}: this run is exactly on-policy, so {', '.join(knobs)} "
        f"{'do' if len(knobs) > 1 else 'does'} nothing; what is left is {find_objective(name).on_policy}. Set "
        "steps_per_generation to 4 · gradient_accumulation_steps, or num_iterations = 2, for stale steps."
    )
