"""Packages that rented machines would install, and that pip does not find.

    requirements of the places ─▶ `pip index versions NAME`, by the pip of this machine, with its settings
                                     ├ no such package, or no version that fits ─▶ a line of the quote
                                     └ no answer, or no pip                     ─▶ nothing is said

A quote only tells it, because an image may use another index.

Not promised: that an image can be built. Its platform may lack a wheel that this machine's platform has.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from packaging.requirements import InvalidRequirement, Requirement

from executors.platforms import FAR
from executors.platforms.places import Place
from executors.preflight.task_packages import named_packages

ANSWER_S = 20.0
Versions = Callable[[str], Sequence[str] | None]  # package -> its versions, newest first; None: no answer


def pip_versions(name: str) -> Sequence[str] | None:
    """Return the versions of a package, newest first; [] if the index has none, None if pip gave no answer."""
    options = ["--pre", "--retries", "1", "--timeout", "5", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "index", "versions", name, *options]
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
    """Return a line for each package that a rented machine would install and the index does not have."""
    texts = sorted({text for place in places if place.executor in FAR for text in named_packages(place)})
    with ThreadPoolExecutor(max_workers=8) as threads:
        return [line for line in threads.map(lambda text: _fault_of(text, versions_of), texts) if line]


def _fault_of(text: str, versions_of: Versions) -> str:
    try:
        asked = Requirement(text)
    except InvalidRequirement:  # a path, or options of pip
        return ""
    versions = None if asked.url else versions_of(asked.name)
    if versions is None or any(asked.specifier.filter(versions, prereleases=True)):
        return ""
    if not versions:
        return f"pip finds no package {asked.name!r} from here: correct its name, or the image may not be built"
    return f"pip finds no version of {asked.name} with {asked.specifier} from here; the newest is {versions[0]}"
