"""Pack the files of a Harbor task: what its Dockerfile needs, and its tests.

    Dockerfile  FROM, COPY, WORKDIR alone ──▶ base image, working folder, path in the box -> base64
                with any other line       ──▶ working folder, a tar of the whole folder for a provider that builds it

A link to a file of its folder becomes that file, and a link to a folder within a copied folder becomes a second copy.
Other links mean nothing in a box: they are left out, and `plan` names them.  Programs stay executable.

Not promised: .dockerignore; files of more than 16 MiB.
"""

import base64
import io
import os
import posixpath
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from inner.errors import InnerError

MOST_BYTES = 16 << 20
HEREDOC = re.compile(r"(?<!<)<<-?[\"']?([A-Za-z_]\w*)")  # after RUN, COPY or ADD; not a shell's <<<, nor a shift (<< 3)
DEFAULT = "/app"  # the working folder without WORKDIR


@dataclass
class Seen:
    """Facts that no file's content has.   left: links that no box gets.   programs: paths of executables."""

    left: list[Path] = field(default_factory=list[Path])
    programs: set[str] = field(default_factory=set[str])


class Dockerfile(NamedTuple):
    """A Dockerfile.   base: the image of FROM.   folder: the working folder.   files: path in the box -> base64.

    build: the whole folder as a tar, in base64, if the Dockerfile has more than FROM, COPY and WORKDIR; then base and
    files are empty.   odd: the first line that needs a build."""

    base: str
    folder: str
    files: dict[str, str]
    build: str
    odd: str


def read_dockerfile(folder: Path, seen: Seen, *, image: str = "", work: str = "") -> Dockerfile:
    """Return the content of a folder's Dockerfile, as Docker reads it.   Adds to `seen`.   Raises InnerError.

    image: replaces all but the working folder.   work: the working folder, if task.toml names it."""
    lines, work = _lines(folder), work or working_folder(folder) or (DEFAULT if image else "")
    if not work:
        raise InnerError(
            f"{folder}/Dockerfile has a working folder that is '/' or contains a variable. A box needs another: name "
            f"one in task.toml: workdir of [{'verifier.' * (folder.name == 'tests')}environment]."
        )
    if image:
        return Dockerfile("", work, {}, "", "")
    stages = [rest for first, *rest in lines if first.upper() == "FROM"]
    odd = next((words for words in lines if not _is_plain(*words)), ["FROM", *stages[-1]] if len(stages) > 1 else None)
    if odd:
        return Dockerfile("", work, {}, _as_tar(folder, seen), " ".join(odd))
    return Dockerfile("".join(stage[0] for stage in stages), work, _copied_files(folder, lines, seen), "", "")


def working_folder(folder: Path) -> str:
    """Return the last WORKDIR of a folder's Dockerfile, /app without one; "" if it is / or has a variable."""
    work = DEFAULT
    for first, *rest in _lines(folder):
        if first.upper() == "WORKDIR" and rest:
            work = placed(work, rest[0].strip("\"'"))
    return "" if work == "/" or "$" in work else work


def _lines(folder: Path) -> list[list[str]]:
    """Return the words of each instruction of a folder's Dockerfile; no words without a Dockerfile.

    Lines that end with a backslash are joined.   Comments and the texts of heredocs are left out."""
    path = folder / "Dockerfile"
    text = path.read_text("utf-8") if path.is_file() else ""
    found, until = list[list[str]](), ""
    for line in text.replace("\\\n", " ").splitlines():
        words = line.split()
        if until:
            until = "" if line.strip() == until else until
        elif words and not words[0].startswith("#"):
            found.append(words)
            heredoc = HEREDOC.search(line) if words[0].upper() in ("RUN", "COPY", "ADD") else None
            until = heredoc[1] if heredoc else ""
    return found


def _copied_files(folder: Path, lines: Iterable[list[str]], seen: Seen) -> dict[str, str]:
    """Return the files of all COPY lines: path in the box -> base64.   Adds to `seen`."""
    work, files = DEFAULT, dict[str, str]()
    for first, *sources, target in lines:
        if first.upper() == "WORKDIR":
            work = placed(work, target)
        elif first.upper() == "COPY":
            to = placed(work, target)
            is_folder = target.endswith("/") or target == "." or len(sources) > 1 or to == work
            is_folder |= any(path.startswith(f"{to}/") for path in files)
            files |= _copied(folder, sources, to.rstrip("/"), is_folder=is_folder, seen=seen)
    return files


def _is_plain(first: str, *rest: str) -> bool:
    """Whether a line of a Dockerfile is understood without a build."""
    odd = ("$", "\\", "**", "[!")  # characters for a shell, or that patterns of Go and of Python read differently
    plain = not any(word.startswith(("-", "[", "'", '"')) or any(part in word for part in odd) for word in rest)
    words = {"FROM": (1, 3), "COPY": range(2, 1000), "WORKDIR": (1,)}.get(first.upper(), ())
    return plain and len(rest) in words


def _as_tar(folder: Path, seen: Seen) -> str:
    """Return the folder's files as a tar, in base64. The tar depends on nothing else.   Adds links to `seen`."""
    own, out = Seen(), io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz", preset=1) as archive:
        for name, text in pack(folder, "", root=folder, seen=own).items():
            data = base64.b64decode(text)
            member = tarfile.TarInfo(name.lstrip("/"))
            member.size, member.mode = len(data), 0o755 if name in own.programs else 0o644
            archive.addfile(member, io.BytesIO(data))
    seen.left += own.left
    return base64.b64encode(out.getvalue()).decode()


def placed(work: str, target: str) -> str:
    return "/" + posixpath.normpath(posixpath.join(work, target)).lstrip("/")


def _copied(folder: Path, sources: list[str], to: str, *, is_folder: bool, seen: Seen) -> dict[str, str]:
    """Return one COPY's files: path in the box -> base64.   to: a folder for them, or the name of the one file."""
    copied = dict[str, str]()
    for path in [path for source in sources for path in _named(folder, source)]:
        if not _real(path).is_relative_to(_real(folder)):
            raise InnerError(f"{folder}/Dockerfile copies {path}, outside this folder. Move it into the folder.")
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
        if name.encode(errors="replace").decode() != name:
            raise InnerError(f"{source}: the name {name!r} is not UTF-8, and boxes take no other. Rename the file.")
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
    """Yield the files below `path`, and the files to which links lead; add links that lead elsewhere to `left`.

    roots: files must be below the first, folders below the second.   linked: a link led here, so no further link to a
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
