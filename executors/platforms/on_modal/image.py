"""Builds the image of Modal's containers: Debian, this Python version, and the package versions of this machine.

    requirements of serverless-diloco[train,diloco,replay,serverless] ──closure──▶ torch==2.13.0, trl==1.16.0, …
    vllm: the versions of constraints-vllm.txt instead, and an import of vLLM as the last line of the build
    diloco · executors · inner · rendezvous ──▶ mounted when a container starts: no new build when they change

Not promised: the same wheels as on this machine: if its torch is a CPU build, the image still has the CUDA build.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from executors.platforms.base import ExecutorError
from executors.platforms.on_modal.client import sdk
from executors.platforms.packages.versions import OF_TORCH, check_command, portable_requirement, vllm_requirements
from executors.platforms.packages.wheel import EXTRAS, PACKAGES, PROJECT

THERE_ALREADY = {"modal"}  # Modal adds its client to every image
CONTAINER = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
COMPILER = ("gcc", "libc6-dev")  # compiles the codecs' kernels; without the kernels, packing takes three times as long
NO_SOURCE = ["**/__pycache__", "**/*.pyc"]


def image_of(base: Any = None, pip: Sequence[str] = (), *, vllm: bool = False) -> Any:
    """Make a modal.Image with all packages except the project itself.

    base: a modal.Image that has the packages; a registry's image that gets them; or None for a plain Debian.
    pip: further requirements, in pip's syntax, resolved together with ours.
    """
    image = _with_packages(base, pip, vllm_requirements() if vllm else pinned_requirements())
    return image.run_commands(check_command()) if vllm else image


def _with_packages(base: Any, pip: Sequence[str], ours: Sequence[str]) -> Any:
    image = sdk().Image
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if base is None:
        return image.debian_slim(python_version=version).apt_install(*COMPILER).uv_pip_install(*ours, *pip)
    if isinstance(base, str):
        return image.from_registry(base, add_python=version).uv_pip_install(*ours, *pip)
    return base.uv_pip_install(*pip) if pip else base


def fingerprint(base: Any, pip: Sequence[str], entrypoints: Iterable[str], *, vllm: bool = False) -> str:
    """Return the digest of an image and its mounted source; "" for a modal.Image, whose contents are unknown."""
    if base is not None and not isinstance(base, str):
        return ""
    packages = [*pinned_requirements(), *(vllm_requirements() if vllm else ())]
    found = hashlib.sha256(repr((base, sys.version_info[:2], packages, sorted(pip))).encode())
    for package in sorted({*PACKAGES, *_foreign_packages(entrypoints)}):
        for name, path in _package_files(package):
            found.update(f"{name}\0".encode() + path.read_bytes())
    return found.hexdigest()


def _package_files(package: str) -> Iterator[tuple[str, Path]]:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(p for p in Path(folder).rglob("*") if p.is_file() and p.suffix != ".pyc"):
            yield f"{package}/{path.relative_to(folder).as_posix()}", path


def _foreign_packages(entrypoints: Iterable[str]) -> list[str]:
    """Return the packages of entry points that do not belong to this project."""
    tops = {name.partition(":")[0].partition(".")[0] for name in entrypoints}
    return sorted(t for t in tops.difference(PACKAGES, sys.stdlib_module_names) if importlib.util.find_spec(t))


def with_source(image: Any, entrypoints: Iterable[str]) -> Any:
    """Add the project's source on this machine, and the packages of entry points that are not the project's."""
    others = _foreign_packages(entrypoints)
    image = image.add_local_python_source(*PACKAGES, ignore=NO_SOURCE)
    return image.add_local_python_source(*others) if others else image


def pinned_requirements() -> list[str]:
    """Return name==version of every package that the project needs, as installed here (versions.py)."""
    found: dict[str, str] = {}
    todo: list[tuple[str, frozenset[str]]] = [(PROJECT, frozenset(EXTRAS.split(",")))]
    seen = set(todo)
    while todo:
        name, extras = todo.pop()
        for need in _direct_requirements(name, extras):
            key = canonicalize_name(need.name)
            step = (key, frozenset(need.extras))
            if key in THERE_ALREADY or step in seen:
                continue
            seen.add(step)
            if (version := _installed_version(key)) is not None:
                todo.append(step)
                found[key] = portable_requirement(key, version)
            elif need.marker is not None and not key.startswith(OF_TORCH):  # the container needs it, this machine not
                found[key] = f"{key}{need.specifier}"
    found.pop(PROJECT, None)
    return [text for _, text in sorted(found.items()) if text]


def _direct_requirements(name: str, extras: frozenset[str]) -> list[Requirement]:
    try:
        texts = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        raise ExecutorError(
            f"{name} is not installed as a package here: run `pip install -e .` in its folder"
        ) from None
    found = [Requirement(text) for text in texts]
    wanted = [{**CONTAINER, "extra": extra} for extra in extras | {""}]
    return [r for r in found if r.marker is None or any(map(r.marker.evaluate, wanted))]


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
