"""The image that Modal's containers start from: Debian, this Python, and the packages that run here, at their versions.

    requirements of serverless-diloco[train,diloco,replay,serverless] ──closure──▶ torch==2.13.0, trl==1.16.0, …
    diloco · executors · inner · rendezvous ──▶ mounted when a container starts: no new build when they change

Not promised: the same wheels as here.  A CPU-only torch of this machine is the CUDA one there.
"""

import importlib.util
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from executors.base import ExecutorError
from executors.modal_sdk import sdk

PROJECT, EXTRAS = "serverless-diloco", ("train", "diloco", "replay", "serverless")
PACKAGES = ("diloco", "executors", "inner", "rendezvous")
THERE_ALREADY = {"modal"}  # Modal brings its client along
NO_SOURCE = ["**/__pycache__", "**/*.pyc"]


def image_of(base: Any = None) -> Any:
    """A modal.Image with everything but the project itself.

    base: one that has all of it, or the name of one in a registry that gets it, or None for a plain Debian.
    """
    image, version = sdk().Image, f"{sys.version_info.major}.{sys.version_info.minor}"
    if base is None:
        return image.debian_slim(python_version=version).uv_pip_install(*pins())
    if isinstance(base, str):
        return image.from_registry(base, add_python=version).uv_pip_install(*pins())
    return base


def with_source(image: Any, entrypoints: Iterable[str]) -> Any:
    """And the project, as it is here; and the packages of entry points that are not the project's."""
    tops = {name.partition(":")[0].partition(".")[0] for name in entrypoints}
    tops = tops.difference(PACKAGES, sys.stdlib_module_names)
    others = sorted(t for t in tops if importlib.util.find_spec(t) is not None)
    image = image.add_local_python_source(*PACKAGES, ignore=NO_SOURCE)
    return image.add_local_python_source(*others) if others else image


def pins() -> list[str]:
    """name==version of every package that the project needs, as it is installed here."""
    found: dict[str, str] = {}
    todo = [(PROJECT, frozenset(EXTRAS))]
    seen = set(todo)
    while todo:
        name, extras = todo.pop()
        for requirement in _needed(name, extras):
            key = canonicalize_name(requirement.name)
            step = (key, frozenset(requirement.extras))
            if key in THERE_ALREADY or step in seen or (version := _version(key)) is None:
                continue
            seen.add(step)
            todo.append(step)
            found[key] = version.partition("+")[0]  # "+cpu" and the like are not on PyPI
    found.pop(PROJECT, None)
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def _needed(name: str, extras: frozenset[str]) -> list[Requirement]:
    try:
        texts = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        raise ExecutorError(
            f"{name} is not installed as a package here: run `pip install -e .` in its folder"
        ) from None
    found = [Requirement(text) for text in texts]
    return [r for r in found if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras | {""})]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
