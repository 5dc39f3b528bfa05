"""Checks the installed release of a task's package.

    verifiers from 0.4       tasksets                                   inner/tasks/tasksets.py
    verifiers before 0.3     environments with `load_environment`       inner/tasks/environments.py

Not promised: that the package works.  No package is imported here.
"""

import importlib.util
import re
from importlib import metadata

from inner.errors import InnerError
from inner.tasks.spec import HARBOR, MODULES

# package ─▶ releases that it can be: from, before.  0.3 has neither `load_environment` nor the tasksets of 0.4
USABLE = {"verifiers": (((0, 1, 10), (0, 3)), ((0, 4), (1,)))}


def refuse_absent(setting: str, task: str) -> None:
    """Raise InnerError if the task's package is not installed here, or is too old."""
    package = task.partition(":")[0]
    next_step = f"`pip install 'serverless-diloco[{package}]'`"
    if package != HARBOR and importlib.util.find_spec(MODULES[package]) is None:
        raise InnerError(f"{setting} = {task!r}: the package {package} is not installed here. {next_step}")
    ranges = USABLE.get(package, ())
    if ranges and not any(least <= release_of(package) < above for least, above in ranges):
        here = metadata.version(package)
        raise InnerError(
            f"{setting} = {task!r}: {package} {here} is installed here, and cannot be used. {next_step}, or a release "
            "from 0.1.10 to 0.2 for environments with `load_environment`."
        )


def release_of(package: str) -> tuple[int, ...]:
    """Return the installed release, such as (0, 4, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", metadata.version(package))[:3])


def has_tasksets() -> bool:
    """Whether the installed verifiers has tasksets; an older release has environments with `load_environment`."""
    return release_of("verifiers") >= (0, 4)
