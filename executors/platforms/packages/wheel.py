"""Packs this installation as a wheel with its package versions, so that a rented machine runs the same code.

    diloco, executors, inner, rendezvous (+ yours) ─▶ serverless_diloco-0.1.0-py3-none-any.whl  ┐
    every distribution that is installed here      ─▶ constraints.txt    name==version          ├─▶ digest
    the wheel, with its extras                     ─▶ requirements.txt   -c constraints.txt     ┘
    vllm: the versions of constraints-vllm.txt, and vLLM in addition to the wheel

Equal files give equal bytes and an equal digest.  We pack the files that Python imports here, so an editable tree is
shipped in its present state; packing needs no build and no network.

Not promised: that another Python or another platform finds the same versions on its package index, or that the index
gives the same files for them (decision 072).
"""

import base64
import hashlib
import io
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from executors.platforms.base import ExecutorError
from executors.platforms.packages import versions

PROJECT = "serverless-diloco"
PACKAGES = ("diloco", "executors", "inner", "rendezvous")
EXTRAS = "train,diloco,replay,serverless"
_KEY = re.compile(r"id_(rsa|dsa|ecdsa|ed25519)(_sk)?|.*\.(pem|key|p12|pfx|jks|kdbx)", re.IGNORECASE)
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip can store


@dataclass(frozen=True)
class Shipment:
    """The files for a rented machine, by name.   digest: the digest of all files.   wheel: the wheel's file name.

    left_out: hidden files and key files in your packages, which are not shipped."""

    files: dict[str, bytes]
    digest: str
    wheel: str
    left_out: tuple[str, ...] = ()


def pack_code(mount: str, packages: Sequence[str] = (), *, vllm: bool = False) -> Shipment:
    """Return the files that belong under `mount`/{digest}/.   packages: your own top-level packages to ship, too."""
    project = _own_distribution()
    wheel = f"serverless_diloco-{project.version}-py3-none-any.whl"
    code = _build_wheel(project, [*PACKAGES, *packages])
    pins = versions.VLLM_PINS.read_bytes() if vllm else _constraints_file()
    digest = hashlib.sha256(code + pins).hexdigest()[:16]
    extras = versions.VLLM_EXTRAS if vllm else EXTRAS
    others = versions.VLLM_NEEDS if vllm else ()
    seal = hashlib.sha256(code).hexdigest()
    needs = f"-c constraints.txt\n{PROJECT}[{extras}] @ file://{mount}/{digest}/{wheel}#sha256={seal}\n"
    needs += "".join(f"{name}\n" for name in others)
    files = {wheel: code, "constraints.txt": pins, "requirements.txt": needs.encode()}
    return Shipment(files, digest, wheel, left_out(packages))


def _own_distribution() -> metadata.Distribution:
    try:
        return metadata.distribution(PROJECT)
    except metadata.PackageNotFoundError:
        raise ExecutorError(
            f"{PROJECT} is not installed here, so its requirements are unknown: `pip install -e .` in its folder"
        ) from None


def _build_wheel(project: metadata.Distribution, packages: Sequence[str]) -> bytes:
    """Return a zip of the packages, with metadata for pip."""
    info = f"serverless_diloco-{project.version}.dist-info"
    files = {name: path.read_bytes() for package in packages for name, path in _package_files(package)}
    files[f"{info}/METADATA"] = (project.read_text("METADATA") or "").encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: diloco\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = (project.read_text("entry_points.txt") or "").encode()
    files[f"{info}/RECORD"] = _record_file(files, f"{info}/RECORD")
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name in sorted(files):
            wheel.writestr(zipfile.ZipInfo(name, EPOCH), files[name], zipfile.ZIP_DEFLATED)
    return body.getvalue()


def _package_files(package: str) -> Iterator[tuple[str, Path]]:
    """Yield (name in the wheel, file) of a top-level package or module, without files that are not shipped."""
    spec = util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ExecutorError(f"cannot ship `{package}`: Python finds no module of that name here. Install or correct it")
    origin = Path(spec.origin)
    if spec.submodule_search_locations is None:
        yield origin.name, origin
        return
    for path in sorted(origin.parent.rglob("*")):
        name = path.relative_to(origin.parent)
        if path.is_file() and path.suffix != ".pyc" and stays_here(name) is None:
            yield f"{package}/{name.as_posix()}", path


def stays_here(name: Path) -> Path | None:
    """Return the part of this path that is hidden or is a key file, so that it is not shipped; else None."""
    parts = [*reversed(name.parents), name]
    return next((part for part in parts if part.name.startswith(".") or _KEY.fullmatch(part.name)), None)


def left_out(packages: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the files and folders in your own packages that are not shipped."""
    found = dict[str, None]()
    for spec in filter(None, map(util.find_spec, packages)):
        for folder in map(Path, spec.submodule_search_locations or ()):
            kept = (stays_here(path.relative_to(folder)) for path in sorted(folder.rglob("*")))
            found |= {f"{spec.name}/{part.as_posix()}": None for part in kept if part is not None}
    return tuple(found)


def _record_file(files: dict[str, bytes], own: str) -> bytes:
    seal = lambda body: base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()  # noqa: E731
    rows = [f"{name},sha256={seal(body)},{len(body)}" for name, body in sorted(files.items())]
    return "\n".join([*rows, f"{own},,", ""]).encode()


def _constraints_file() -> bytes:
    """Return a line per distribution that came from an index; a local version such as "2.13.0+cpu" becomes "2.13.0"."""
    found: dict[str, str] = {}
    for d in metadata.distributions():
        told = d.metadata  # each access to it, or to d.version, reads and parses the file
        name = re.sub(r"[-_.]+", "-", told["Name"] or "").lower()
        if name and d.read_text("direct_url.json") is None:
            found.setdefault(name, versions.portable_requirement(name, told["Version"]))
    return "".join(f"{found[name]}\n" for name in sorted(found) if "==" in found[name]).encode()
