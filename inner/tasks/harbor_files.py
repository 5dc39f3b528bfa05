"""Pack the files of a Harbor task: what COPY of its Dockerfile names, and its tests.

    Dockerfile: FROM, COPY, WORKDIR ──▶ working folder, path in the box -> base64      another line ──▶ InnerError

A link to a file of its folder becomes that file, and a link to a folder within a copied folder becomes a second copy.
Other links mean nothing in a box: they are left out, and `plan` names them.  Programs stay executable.

Not promised: .dockerignore; files of more than 16 MiB.
"""

import base64
import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from inner.errors import InnerError

MOST_BYTES = 16 << 20


@dataclass
class Seen:
    """Holds facts of a task's folders that no file's content has.   left: links that no box gets.   programs: paths."""

    left: list[Path] = field(default_factory=list[Path])
    programs: set[str] = field(default_factory=set[str])


def read_dockerfile(folder: Path, seen: Seen) -> tuple[str, dict[str, str]]:
    """Return (working folder, files) of a Dockerfile of FROM, COPY and WORKDIR, as Docker reads them.

    Adds to `seen`."""
    work, files = "/app", dict[str, str]()
    for line in (folder / "Dockerfile").read_text("utf-8").splitlines() if (folder / "Dockerfile").is_file() else ():
        words = line.split()
        odd = ("$", "\\", "**", "[!")  # a shell's, or of another meaning in Go's patterns than in Python's
        plain = not any(word.startswith(("-", "[", "'", '"')) or any(part in word for part in odd) for word in words)
        match [word.upper() for word in words[:1]], words[1:]:
            case (([] | ["FROM"]), _):
                continue
            case ["COPY"], [*sources, target] if sources and plain:
                to = placed(work, target)
                is_folder = target.endswith("/") or target == "." or len(sources) > 1 or to == work
                is_folder |= any(path.startswith(f"{to}/") for path in files)
                files |= _copied(folder, sources, to.rstrip("/"), is_folder=is_folder, seen=seen)
            case ["WORKDIR"], [target] if plain and placed(work, target) != "/":
                work = placed(work, target)
            case [first], _ if first.startswith("#"):
                continue
            case _:
                table, option = ("verifier.", "verifier_image") if folder.name == "tests" else ("", "image")
                raise InnerError(
                    f"{folder}/Dockerfile has the line {line[:60]!r}, and no image is built here. Build it at your "
                    f"provider, and name it: docker_image of [{table}environment] in task.toml, or inner.data."
                    f'task_options.{option} = "NAME".'
                )
    return work, files


def placed(work: str, target: str) -> str:
    return "/" + posixpath.normpath(posixpath.join(work, target)).lstrip("/")


def _copied(folder: Path, sources: list[str], to: str, *, is_folder: bool, seen: Seen) -> dict[str, str]:
    """Return one COPY's files: path in the box -> base64.   to: a folder for them, or the name of the one file."""
    copied = dict[str, str]()
    for path in [path for source in sources for path in _named(folder, source)]:
        if not _real(path).is_relative_to(_real(folder)):
            raise InnerError(f"{folder}/Dockerfile copies {path}, which is outside its folder. Copy a file in it.")
        inside = f"{to}/{path.name}" if is_folder and path.is_file() else to
        copied |= pack(path, inside, root=folder, seen=seen)
    return copied


def _named(folder: Path, source: str) -> list[Path]:
    """Return the files and folders that COPY's source matches; `folder` is the root of its paths."""
    inside = posixpath.normpath(source.lstrip("/") or ".")
    pattern = inside.replace("[^", "[!")  # Go's spelling, and Python's
    found = sorted(folder.glob(pattern)) if set("*?[") & set(inside) else []
    return found or [folder / inside]


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises for links in a circle before Python 3.13


def pack(source: Path, target: str, *, root: Path, seen: Seen) -> dict[str, str]:
    """Return path in the box -> base64.   source: a file or a folder.   root: the folder that Docker would see.

    Adds to `seen`."""
    out, packed, size = list[Path](), dict[str, str](), 0
    for path in [source] if source.is_file() else _files_below(source, (_real(root), _real(source)), out):
        name = target if path == source else f"{target}/{path.relative_to(source)}"
        size += path.stat().st_size
        if size > MOST_BYTES:
            raise InnerError(f"{source} has more than {MOST_BYTES >> 20} MiB. Build an image, and name it.")
        packed[name] = base64.b64encode(path.read_bytes()).decode()
        (seen.programs.add if path.stat().st_mode & 0o111 else seen.programs.discard)(name)
    if not packed and out:
        raise InnerError(f"{source} has no files, but links that lead out of {root}, or nowhere: {out[0]}. Copy files.")
    if not packed:
        raise InnerError(f"{source} has no files, or is not there. Correct the path, or add its files.")
    seen.left += out
    return packed


def _files_below(path: Path, roots: tuple[Path, Path], left: list[Path], *, linked: bool = False) -> Iterator[Path]:
    """Yield the files below `path`, and those to which links lead; add links that lead elsewhere to `left`.

    roots: files are below the first, and folders below the second.   linked: a link led here, so no further link to a
    folder counts: such links may lead in a circle, or double with each level."""
    real = _real(path)
    again = path.is_symlink() and (linked or _real(path.parent).is_relative_to(real))
    if path.is_file() and real.is_relative_to(roots[0]):
        yield path
    elif path.is_dir() and real.is_relative_to(roots[1]) and not again:
        for one in sorted(path.iterdir()):
            yield from _files_below(one, roots, left, linked=linked or path.is_symlink())
    elif path.is_symlink():
        left.append(path)
