"""Finds the packages that replicas on other machines need to score a run's task, and packages that pip cannot find.

    inner.data.task, eval.task ── no rewards of the user's own ──▶ reasoning-gym==0.1.25, the taskset's own package
                                                                        └──▶ `pip` of each place that is elsewhere

The packages get the versions installed on this machine, because it makes the task's rows with them.

    all of a place's `pip` ─▶ `pip index versions NAME`, by the pip of this machine, with its settings
                                ├ no such package, or no version that fits ─▶ a line of the quote, not an error: an
                                │                                             image may use another index
                                └ no answer, or no pip                     ─▶ no line

Not promised: a view of the packages in the user's own image; that an image builds: its platform may lack a wheel.
"""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from diloco.run.config import RunConfig
from executors.platforms import FAR
from executors.platforms.places import Place
from inner.tasks.installed import has_tasksets
from inner.tasks.spec import MODULES

BUILT_IN = "verifiers.v1.tasksets"
BOX_PACKAGES = ("e2b", "modal")  # providers of boxes whose Python package has the provider's name
ANSWER_S = 20.0
Versions = Callable[[str], Sequence[str] | None]  # package -> its versions, newest first; None: no answer


def scoring_tasks(config: RunConfig) -> list[str]:
    """Return the tasks whose packages replicas use, to score or to play: "reasoning-gym:chain_sum", …"""
    task = config.inner.data.task if config.inner.sampling.agent else config.inner.scoring_task
    if task is None:
        return []
    held_out = config.eval.task if config.eval is not None else None
    return sorted({task, held_out or task})


def task_requirements(config: RunConfig) -> list[str]:
    """Return name==version of each package for the task's scorers and boxes that pip can install elsewhere."""
    names = {name for task in scoring_tasks(config) for name in _distributions(task) if not _is_local(name)}
    boxes = config.inner.sampling.boxes
    names |= {boxes} if boxes in BOX_PACKAGES and not _is_local(boxes) else set()
    return [f"{name}=={metadata.version(name)}" for name in sorted(names)]


def with_requirements(place: Place, needed: list[str]) -> dict[str, list[str]]:
    """Return {"pip": the place's packages plus the missing packages}, or {}; keep packages as the user spelled them."""
    named = named_packages(place)
    missing = [text for text in needed if not any(_name_of(text) == _name_of(other) for other in named)]
    return {"pip": [*named, *missing]} if missing and "code" not in place.options else {}


def task_fault(config: RunConfig, place: Place) -> str:
    """Return why replicas at this place could not score the run's task, or ""."""
    if place.executor not in FAR:
        return ""
    for task in scoring_tasks(config):
        if config.inner.vllm is not None and task.startswith("verifiers:") and has_tasksets():
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
    plugged = re.findall(r'"([^"]+\.py):\w+"', json.dumps(config.inner.data.task_options, default=str))
    if plugged and not any(key in place.options for key in ("image", "code")):
        return (
            f"inner.data.task_options: {plugged[0]} is a file of this machine, and will not be on {place.executor}. "
            "Move the function into the taskset's package, or take an image that has the file (`--option image=NAME`)"
        )
    return ""


def named_packages(place: Place, option: str = "pip") -> list[str]:
    """Return the place's option, a list or "A,B", as a list."""
    named = place.options.get(option, ())
    return [name for name in (named.split(",") if isinstance(named, str) else named) if name]


def _left_here(task: str, place: Place) -> str:
    """Return the taskset's module if no package index has it and no option of the place adds it, else ""."""
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
    return "" if has_tasksets() and importlib.util.find_spec(f"{BUILT_IN}.{module}") else module


def _distributions_of(module: str) -> list[str]:
    return metadata.packages_distributions().get(module, [])


def _is_local(name: str) -> bool:
    """Whether a package is not installed, or is installed from a folder or URL, so that no index has it."""
    try:
        return metadata.distribution(name).read_text("direct_url.json") is not None
    except metadata.PackageNotFoundError:
        return True


def is_installed(requirement: str) -> bool:
    """Whether this machine has the requirement's package.  False for another text, such as a URL."""
    try:
        metadata.distribution(Requirement(requirement).name)
    except (InvalidRequirement, metadata.PackageNotFoundError):
        return False
    return True


def _name_of(requirement: str) -> str:
    return requirement.partition("==")[0].partition("[")[0].strip().replace("_", "-").lower()


# -------------------------------------------------------------------- known to pip?


def pip_versions(name: str) -> Sequence[str] | None:
    """Return the versions of a package, newest first; [] if the index has no version, None if pip gave no answer."""
    options = ["--pre", "--retries", "1", "--timeout", "5", "--disable-pip-version-check"]
    command = [sys.executable, "-P", "-m", "pip", "index", "versions", name, *options]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    for line in asked.stdout.splitlines():
        if line.startswith("Available versions: "):
            return line.removeprefix("Available versions: ").split(", ")
    is_answer = "No matching distribution found" in asked.stderr and "Retrying" not in asked.stderr
    return [] if is_answer else None


def unknown_packages(places: Iterable[Place], versions_of: Versions) -> list[str]:
    """Return a line for each package that a rented machine would install but that the index does not have."""
    texts = sorted({text for place in places if place.executor in FAR for text in named_packages(place)})
    with ThreadPoolExecutor(max_workers=8) as threads:
        return [line for line in threads.map(lambda text: _fault_of(text, versions_of), texts) if line]


def _fault_of(text: str, versions_of: Versions) -> str:
    try:
        asked = Requirement(text)
    except InvalidRequirement:  # a path, or options of pip
        return ""
    is_elsewhere = asked.url or (asked.marker is not None and not asked.marker.evaluate())
    versions = None if is_elsewhere else versions_of(asked.name)
    if versions is None or any(asked.specifier.filter(versions, prereleases=True)):
        return ""
    if not versions:
        return f"pip finds no package {asked.name!r} from here: correct its name, or the image may not be built"
    return f"pip finds no version of {asked.name} with {asked.specifier} from here; the newest is {versions[0]}"
