"""Parse the name of a task into the package that makes it and the name in that package.

    "reasoning-gym:chain_sum"  ─▶ package reasoning-gym, its dataset chain_sum           inner/tasks/gym.py
    "verifiers:my-taskset"     ─▶ package verifiers, the taskset package my-taskset      inner/tasks/tasksets.py
    "harbor:FOLDER"            ─▶ a folder of Harbor tasks beside the run.toml           inner/tasks/harbor.py

    laptop:   spec ──make.py──▶ rows {prompt, answer, task, entry} ──▶ a file that the run carries
    replica:  completion, task, entry ──score.py──▶ reward

Not promised: that the package is installed; inner/tasks/installed.py checks it.  No package is imported here.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any, Self

from inner.errors import InnerError

MODULES = {"reasoning-gym": "reasoning_gym", "verifiers": "verifiers"}  # package (and extra) ─▶ module to import
HARBOR = "harbor"  # needs no package
ACTS = "acts"  # column of a row that is being made: whether its task needs more than a reply
PROVIDERS = ("local", "e2b", "modal", "hf")  # providers of boxes (inner/extras/boxes/starting.py)
PRICED = ("local", "hf")  # providers for which we know the price of a box


@dataclass(frozen=True)
class TaskSpec:
    """The spec of a task's rows.   task: "PACKAGE:NAME".   version: the package's; "" until rows exist."""

    task: str
    size: int
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    acts: bool = False  # whether an agent plays the rows

    @property
    def package(self) -> str:
        return self.task.partition(":")[0]

    @property
    def name(self) -> str:
        return self.task.partition(":")[2]

    @property
    def installed_version(self) -> str:
        return "" if self.package == HARBOR else metadata.version(self.package)

    def to_json(self) -> str:
        return json.dumps({k: v for k, v in asdict(self).items() if k != ACTS or v}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


def is_task(spelling: Any) -> bool:
    """Whether the spelling begins with a package of MODULES, or is a folder of Harbor tasks."""
    return isinstance(spelling, str) and ":" in spelling and spelling.partition(":")[0] in (*MODULES, HARBOR)


def check_spelling(setting: str, task: str | None) -> None:
    """Raise InnerError for a spelling that names no task of a known package.   setting: "inner.data.task"."""
    if task is None or (is_task(task) and task.partition(":")[2].strip()):
        return
    packages = " or ".join([*(f"{name}:NAME" for name in MODULES), f"{HARBOR}:FOLDER"])
    raise InnerError(f'{setting} = {task!r} names no task. Write {packages}, such as "reasoning-gym:chain_sum".')
