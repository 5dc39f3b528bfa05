"""A package that this environment has, as if it were not installed; and tests that need torchft."""

import sys
from importlib.util import find_spec

import pytest

HAS_TORCHFT = find_spec("torchft") is not None
needs_torchft = pytest.mark.skipif(not HAS_TORCHFT, reason="torchft has no wheels for this system or Python")


class Without:
    """An importer to which a package is not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, *_: object) -> None:
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def forget_torchft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the rest of a test run as on a machine without torchft."""
    for name in [one for one in sys.modules if f"{one}.".startswith(("torchft.", "diloco.outer.fragments.in_place."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without("torchft"), *sys.meta_path])
