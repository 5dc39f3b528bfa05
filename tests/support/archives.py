"""What must be in the archives that go to PyPI, and what must not: `make dist`.

    python -m tests.support.archives dist ─▶ a line per fault; exit code 1 if there is one

Not promised: that PyPI takes them; `twine check` reads their metadata.
"""

import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

ROOMS = {"diloco", "executors", "inner", "rendezvous"}
MOST_BYTES = 3_000_000


def faults(folder: Path) -> Iterator[str]:
    """Yield the faults of the one wheel and the one sdist in a folder."""
    for kind, pattern, faults_of in (("wheel", "*.whl", faults_of_wheel), ("sdist", "*.tar.gz", faults_of_sdist)):
        found = list(folder.glob(pattern))
        if len(found) != 1:
            yield f"{folder} has {len(found)} archives of the kind {kind}"
        for path in found:
            large = [f"it has {path.stat().st_size} bytes"] if path.stat().st_size > MOST_BYTES else []
            yield from (f"{path.name}: {fault}" for fault in (*large, *faults_of(path)))


def faults_of_wheel(path: Path) -> Iterator[str]:
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        meta = next(name for name in names if name.endswith(".dist-info/METADATA"))
        told = Parser().parsestr(wheel.read(meta).decode())
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    if tops != ROOMS:
        yield f"its top-level names are {sorted(tops)}"
    for room in sorted(ROOMS):
        if f"{room}/py.typed" not in names:
            yield f"{room}/py.typed is missing"
    if not any(name.endswith("licenses/LICENSE") for name in names):
        yield "LICENSE is missing"
    for vendor in sorted({name.rpartition("/")[0] for name in names if "/vendor/" in name}):
        if not any(name.startswith(vendor) and "LICENSE" in name.upper() for name in names):
            yield f"{vendor} has no licence beside it"
    for field in ("Summary", "License-Expression", "Requires-Python", "Classifier", "Keywords"):
        if not told.get(field):
            yield f"its metadata has no {field}"
    yield from (f"{name} is in it" for name in names if "__pycache__" in name or "/tests/" in name)


def faults_of_sdist(path: Path) -> Iterator[str]:
    with tarfile.open(path) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    wanted = ROOMS | {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO"}
    if missing := wanted - tops:
        yield f"it lacks {sorted(missing)}"
    if more := tops - wanted - {".gitignore"}:
        yield f"it has {sorted(more)}, too"


if __name__ == "__main__":
    found = list(faults(Path(sys.argv[1])))
    print("\n".join(found) or "both archives have what they should")
    sys.exit(bool(found))
