"""Adds options to a rented place that follow from the run's settings.

    [inner.vllm]     vllm: package versions with vLLM
    a task           pip: the package that scores it      a script: its packages
    Modal            max_memory_mib: a limit, as used memory is billed     cores: more for several devices
                     hub_cache: a Volume that keeps a model of the Hub

Options that the place has are kept.   Not promised: memory for the model of a script, whose size is unknown.
"""

from dataclasses import replace
from typing import Any

from diloco.run.config import ConfigError, RunConfig
from executors.platforms import FAR
from executors.platforms.places import Place
from executors.preflight.needs.task_packages import task_requirements, with_requirements
from inner.models.naming import is_hub_name


def fitted_place(place: Place, config: RunConfig) -> Place:
    if place.executor not in FAR:
        return place
    needed = task_requirements(config) if config.script is None else list(config.script.packages)
    options: dict[str, Any] = {"vllm": True} if config.inner.vllm is not None else {}
    if place.executor == "modal":
        options |= _modal_options(place, config)
    return replace(place, options={**options, **place.options, **with_requirements(place, needed)})


def _modal_options(place: Place, config: RunConfig) -> dict[str, Any]:
    from diloco.run.sizing import parameters_of, trained_parameters_of
    from executors.platforms.on_modal.kinds import CORES, HUB_VOLUME, MEMORY_MIB, memory_limit_mib

    options: dict[str, Any] = {}
    if place.devices > 1:
        options = {"cores": CORES * place.devices, "max_memory_mib": MEMORY_MIB * place.devices}
    if config.script is not None or {"max_memory_mib", "hub_cache"} <= {*place.options}:
        return options
    if is_hub_name(config.inner.model):
        options["hub_cache"] = HUB_VOLUME
    try:
        limit = memory_limit_mib(parameters_of(config), trained_parameters_of(config), place.devices)
    except ConfigError:  # the model's size is unknown here: use the platform's default
        return options
    return {**options, "max_memory_mib": limit}
