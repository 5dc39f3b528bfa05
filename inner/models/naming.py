"""Decides from its spelling alone which kind of model inner.model names; defines plain data for models.

    toolworld, tiny   built in code          is_gguf_file   a .gguf file          is_hub_name   a model on the Hub
    KnownModel  checked before the start (known.py)     HubModel, HubError  for models on the Hub (hub_model.py)

Not promised: that a model of that name exists.  No torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inner.settings.inner import BUILT_IN_MODELS

NOT_CHECKED = "not checked: "  # begins a note about a model that the Hub did not confirm
ASK_S = 4.0  # seconds to wait for the Hub: without a network, a DNS lookup may take minutes


@dataclass(frozen=True)
class KnownModel:
    """A model that exists.   folder: its files here; None: only the Hub has them.   note: a text for the user."""

    folder: Path | None = None
    note: str = ""


class HubError(RuntimeError):
    """The Hub did not give a run's model. The message says what to do next.   final: another try would not help."""

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


@dataclass(frozen=True)
class HubModel:
    """A commit on the Hub.   files: name in the repository -> SHA-256, 64 hexadecimal digits."""

    name: str
    commit: str
    files: Mapping[str, str]


def is_hub_name(model: str) -> bool:
    """Whether inner.model names a model on the Hub, not a folder or file on this machine."""
    return model not in BUILT_IN_MODELS and not is_gguf_file(model) and not Path(model).is_dir()


def is_gguf_file(model: str) -> bool:
    return model.lower().endswith(".gguf")
