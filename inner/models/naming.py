"""The meaning of inner.model by its spelling alone, as plain data.

    toolworld, tiny   built in code          is_gguf_file   a .gguf file          is_on_hub   a model on the Hub
    KnownModel  found before the start (known.py)       HubModel, HubError  of the Hub (hub_model.py)

Not promised: that a model of that name exists.  No torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inner.settings.inner import BUILT_IN_MODELS, InnerConfig

NOT_CHECKED = "not checked: "  # begins a note about a model that could not be asked for
ASK_S = 4.0  # for the Hub's answer; without a network a name look-up alone may take minutes


@dataclass(frozen=True)
class KnownModel:
    """folder: where its files are on this machine (None: nowhere).   note: what a person should know of it."""

    folder: Path | None = None
    note: str = ""


class HubError(RuntimeError):
    """The Hub did not give what a run names; the message has the next thing to do.   final: asking again is in vain."""

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


@dataclass(frozen=True)
class HubModel:
    """files: name in the repository -> SHA-256, 64 hexadecimal digits."""

    name: str
    commit: str
    files: Mapping[str, str]


def is_on_hub(config: InnerConfig) -> bool:
    """Whether inner.model names a model on the Hub, and not a folder or file of this machine."""
    return is_hub_name(config.model)


def is_hub_name(model: str) -> bool:
    return model not in BUILT_IN_MODELS and not is_gguf_file(model) and not Path(model).is_dir()


def is_gguf_file(model: str) -> bool:
    return model.lower().endswith(".gguf")
