"""The Python environment of a container on Modal, as far as one machine can have it.

    FROM … / RUN uv pip install torch==2.13.0 …  ──packages_of──▶ {torch, …} + modal and what it needs
                                                      └─venv_of──▶ bin/python, lib/…/site-packages: links to ours

    with_gpu: its torch says that it was built for CUDA, else for the CPU alone, independent of the one here
    stub_driver: a libcuda.so.1 that shows one GPU

This project is installed here (its dist-info, an editable path); it is in no image of Modal's, so it is never linked.

Not promised: other versions than those that are installed here.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CLIENT = "modal"  # every container has it
PROJECT = "serverless-diloco"


def packages_of(commands: Iterable[str]) -> set[str] | None:
    """The packages that an image's commands install; None if they install none: then the image has its own."""
    words = [w.strip("'\"") for c in commands if "pip install" in c for w in c.split()]
    named = {canonicalize_name(w.partition("==")[0].partition("[")[0]) for w in words if "==" in w or w in _installed()}
    return named or None


def venv_of(packages: set[str] | None, folder: Path, with_gpu: bool = False) -> Path:
    """Its interpreter.   packages: names (None: all that are installed here, but for the project)."""
    python = folder / "bin" / "python"
    if python.exists():
        return python
    wanted = (set(_installed()) if packages is None else packages | _closure(CLIENT)) - {PROJECT}
    home = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    home.mkdir(parents=True)
    for name in sorted(wanted & set(_installed())):
        for top, source in _tops(_installed()[name]):
            if not (home / top).exists():
                os.symlink(source, home / top)
    if (home / "torch").exists():
        _say_build(home / "torch", "'13.0'" if with_gpu else "None")
    base = Path(sys.base_prefix) / "bin"
    (folder / "pyvenv.cfg").write_text(f"home = {base}\ninclude-system-site-packages = false\n")
    python.parent.mkdir()
    os.symlink(Path(sys.executable).resolve(), python)
    return python


def _say_build(torch: Path, cuda: str) -> None:
    """The same torch, whose version.py says for which CUDA it was built ("None": for the CPU alone)."""
    source = torch.readlink()
    torch.unlink()
    torch.mkdir()
    for file in source.iterdir():
        if file.name != "version.py":
            os.symlink(file, torch / file.name)
    text = (source / "version.py").read_text()
    said = re.sub(r"^cuda: Optional\[str\] = .*$", f"cuda: Optional[str] = {cuda}", text, flags=re.M)
    (torch / "version.py").write_text(said)


DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *device, int i) { *device = i; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "NVIDIA Stub 16GB", size); return 0; }
"""


def stub_driver(folder: Path) -> Path:
    """A folder for LD_LIBRARY_PATH with NVIDIA's driver, as far as a look at it goes."""
    if not (folder / "libcuda.so.1").exists():
        folder.mkdir(exist_ok=True)
        (folder / "cuda.c").write_text(DRIVER)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"], cwd=folder, check=True)
    return folder


def _tops(found: metadata.Distribution) -> Iterator[tuple[str, Path]]:
    """Its files and folders in site-packages, by name."""
    for name in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
        yield name, Path(str(found.locate_file(name)))


def _installed() -> dict[str, metadata.Distribution]:
    if not _CACHE:
        _CACHE.update({canonicalize_name(d.metadata["Name"]): d for d in metadata.distributions()})
    return _CACHE


_CACHE: dict[str, metadata.Distribution] = {}


def _closure(name: str) -> set[str]:
    found, todo = {name}, [name]
    while todo:
        for text in metadata.requires(todo.pop()) or []:
            need = Requirement(text)
            key = canonicalize_name(need.name)
            if (
                key in _installed()
                and key not in found
                and (need.marker is None or need.marker.evaluate({"extra": ""}))
            ):
                found.add(key)
                todo.append(key)
    return found
