"""The packages that score a run's task, for replicas on other machines.

    inner.data.task, eval.task ── no rewards of the user's own ──▶ reasoning-gym==0.1.25, the taskset's own package
                                                                        └──▶ `pip` of each place that is elsewhere

They have the versions installed here, which also make the rows.

Not promised: the packages that an image or a command line of the user adds.
"""

import importlib.util
from collections.abc import Iterator
from importlib import metadata

from diloco.run.config import RunConfig
from executors.platforms import FAR
from executors.platforms.places import Place
from inner.tasks.spec import MODULES

BUILT_IN = "verifiers.v1.tasksets"


def scoring_tasks(config: RunConfig) -> list[str]:
    """Return the tasks whose own scorers replicas use: "reasoning-gym:chain_sum", …"""
    task = config.inner.scoring_task
    if task is None:
        return []
    held_out = config.eval.task if config.eval is not None else None
    return sorted({task, held_out or task})


def task_requirements(config: RunConfig) -> list[str]:
    """Return name==version of each package that pip can install elsewhere."""
    names = {name for task in scoring_tasks(config) for name in _distributions(task) if not _is_local(name)}
    return [f"{name}=={metadata.version(name)}" for name in sorted(names)]


def with_requirements(place: Place, needed: list[str]) -> dict[str, list[str]]:
    """Return {"pip": the place's packages and the missing ones}, or {}.  The user's spelling of a package stays."""
    named = named_packages(place)
    missing = [text for text in needed if not any(_name_of(text) == _name_of(other) for other in named)]
    return {"pip": [*named, *missing]} if missing and "code" not in place.options else {}


def task_fault(config: RunConfig, place: Place) -> str:
    """Return why replicas at this place could not score the run's task, or ""."""
    if place.executor not in FAR:
        return ""
    for task in scoring_tasks(config):
        if config.inner.vllm is not None and task.startswith("verifiers:"):
            from executors.platforms.packages.versions import pinned_version

            return (
                f"inner.data.task = {task!r} with [inner.vllm]: verifiers wants mcp 2.0.0, and the versions with vLLM "
                f"have {pinned_version('mcp')}. Leave [inner.vllm] out, or take a task of reasoning-gym"
            )
        if missing := _left_here(task, place):
            return (
                f"inner.data.task = {task!r}: {missing} is a folder of this machine, and will not be on "
                f"{place.executor}. Publish it and name it with `--pip`, or take an image that has it "
                "(`--option image=NAME`)"
            )
    return ""


def named_packages(place: Place, option: str = "pip") -> list[str]:
    """Return the place's option, a list or "A,B", as a list."""
    named = place.options.get(option, ())
    return [name for name in (named.split(",") if isinstance(named, str) else named) if name]


def _left_here(task: str, place: Place) -> str:
    """Return the taskset's module if it is on no index and no option of the place adds it, else ""."""
    module = _taskset_module(task)
    if not module or any(key in place.options for key in ("image", "code")):
        return ""
    named = [*named_packages(place), *named_packages(place, "packages")]
    brought = {_name_of(name).replace("-", "_") for name in named}
    local = all(_is_local(name) for name in _distributions_of(module))
    return module if local and module not in brought else ""


def _distributions(task: str) -> Iterator[str]:
    yield task.partition(":")[0]
    if module := _taskset_module(task):
        yield from _distributions_of(module)


def _taskset_module(task: str) -> str:
    """Return the import name of a taskset's own package, by verifiers' rule; "" if verifiers contains it."""
    package, _, name = task.partition(":")
    module = name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    if package != "verifiers" or importlib.util.find_spec(MODULES[package]) is None:
        return ""
    return "" if importlib.util.find_spec(f"{BUILT_IN}.{module}") else module


def _distributions_of(module: str) -> list[str]:
    return metadata.packages_distributions().get(module, [])


def _is_local(name: str) -> bool:
    """Whether it is installed from a folder or a URL, so that no index has it, or is not installed at all."""
    try:
        return metadata.distribution(name).read_text("direct_url.json") is not None
    except metadata.PackageNotFoundError:
        return True


def _name_of(requirement: str) -> str:
    return requirement.partition("==")[0].partition("[")[0].strip().replace("_", "-").lower()
