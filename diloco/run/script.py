"""The user's own script as a run's inner loop: `diloco launch train.py`, in the place of [inner] of a run.toml.

    diloco launch     run.json       files, arguments, the desired fleet; its outer settings are not known yet
    the first replica whose script reaches DiLoCoCallback or make_diloco
                      script.json    outer settings and layout of the parameters; the other replicas compare theirs

Readers take both as one record, so H, codec and other settings are in the same place as in every other run.

Not promised: that two sessions of a script do the same; its arguments and files are the same bytes for all.
"""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from diloco.run.config import FleetConfig, OuterConfig, RunConfig

FILES = "script/"  # begins a file's path in run.json
URL, SLOT, REPLICAS = "DILOCO_RUN", "DILOCO_SLOT", "DILOCO_REPLICAS"  # variables of the process that runs a script


@dataclass(frozen=True)
class Script:
    """A script that each replica runs.   path: the file's path in the folder, or the module that `python -m` names.

    packages: requirements of the script that a rented machine installs (PEP 723, requirements.txt).
    fresh: a process here begins without imported libraries, because the script must run before their import.
    """

    path: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    packages: tuple[str, ...] = ()
    fresh: bool = False

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> "Script":
        """Return the script.   raw: the table of run.json's config."""
        arguments, packages = (tuple(raw.get(name, ())) for name in ("arguments", "packages"))
        is_module, fresh = (bool(raw.get(name)) for name in ("is_module", "fresh"))
        return cls(str(raw["path"]), arguments, is_module, packages, fresh=fresh)

    def __str__(self) -> str:
        return shlex.join([*["-m"] * self.is_module, self.path, *self.arguments])


@dataclass(frozen=True)
class ScriptConfig(RunConfig):
    """The config of a launched script.   files: path in the script's folder -> file here.

    steps: outer steps in all; None: as many as the script asks for.
    """

    own_script: Script = field(default_factory=lambda: Script(""))
    files: Mapping[str, Path] = field(default_factory=dict, compare=False)
    steps: int | None = None

    @property
    def script(self) -> Script:
        return self.own_script

    def mathematics(self) -> dict[str, Any]:
        """Return the script's name and arguments; its files count by their digests, the outer step by script.json."""
        own = asdict(self.own_script)
        own |= {name: list(own[name]) for name in ("arguments", "packages")}
        return {"outer": {}, "script": {name: value for name, value in own.items() if name != "fresh" or value}}

    def to_dict(self) -> dict[str, Any]:
        script = self.mathematics()["script"]
        return {"name": self.name, "outer": {}, "fleet": asdict(self.fleet), "script": script}

    def user_files(self) -> dict[str, Path]:
        return {FILES + name: path for name, path in self.files.items()}


def stored_config(raw: Mapping[str, Any]) -> ScriptConfig:
    """Return the config.   raw: run.json's config, with script.json's outer settings if there is such a file."""
    known = {f.name for f in fields(OuterConfig)}
    outer = OuterConfig.of({k: v for k, v in raw["outer"].items() if k in known and (k, v) != ("sync_seconds", 0)})
    fleet = FleetConfig.from_dict({k: v for k, v in raw["fleet"].items() if v is not None})
    return ScriptConfig(name=raw["name"], outer=outer, fleet=fleet, own_script=Script.of(raw["script"]))
