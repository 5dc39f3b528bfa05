"""Read a folder of Harbor tasks as rows. No package is needed.

    FOLDER/NAME/  instruction.md ──▶ prompt          task.toml: timeout_sec of [agent], [verifier]; docker_image,
                                                     workdir, network_mode of [environment]; env of [environment],
                                                     [verifier]; UNSUPPORTED settings are refused
                  environment/Dockerfile FROM, COPY and WORKDIR are read, without variables; with another
                                                     line, the task needs an image that you have built
                  tests/test.sh ──▶ verifier: it writes /logs/verifier/reward.json {"reward": x}, or reward.txt

    task = "harbor:FOLDER"   task_size tasks, in task_seed's order; a row has its whole task, in column `harbor`
    task_options.image       the provider's image or template for all tasks

A link to a file of its folder becomes that file, and a link to a folder within a copied folder becomes a second copy.
Other links mean nothing in a box: they are left out, and `plan` names them.  Programs stay executable.

Not promised: solution/ (it is never read), .dockerignore, several containers, services, health checks, cpus, memory_mb
and gpus (they are options of the provider); files of more than 16 MiB.
"""

import base64
import json
import os
import posixpath
import random
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inner.errors import InnerError
from inner.tasks.spec import TaskSpec

MOST_BYTES = 16 << 20
TEST = "tests/test.sh"
LATER = ("programs", "env", "verifier_env", "offline")  # fields that a row has only if they are not empty
HF_ONLINE = (
    "a box on Hugging Face always has a network, and this task asks for none (network_mode, or the older "
    "allow_internet, in task.toml). Use another provider, or leave the task out."
)
UNSUPPORTED = (  # table, setting, the values that a box has anyway, and what others ask for
    ("", "steps", (None, []), "several instructions with a verifier each"),
    ("environment", "os", (None, "linux", "Linux"), "another operating system"),
    ("environment", "mcp_servers", (None, []), "tools of MCP servers"),
    ("environment", "allowed_hosts", (None, []), "a network with a few hosts alone"),
    ("verifier", "environment", (None,), "a second machine for the verifier"),
    ("verifier", "environment_mode", (None, "shared"), "a second machine for the verifier"),
    ("verifier", "collect", (None, []), "commands between the episode and the verifier"),
)
MACHINES = ("/usr", "/bin", "/lib", "/lib64")  # folders with the programs of a local box's machine


@dataclass(frozen=True)
class HarborTask:
    """One task.   files, tests: absolute path in the box -> base64.   agent_s, verifier_s: limits in seconds.

    programs: paths of those that are executable.   env, verifier_env: variables of all commands, and of the verifier.
    offline: whether its box has no network.   left_out: links that no box gets."""

    name: str
    instruction: str
    image: str
    folder: str
    files: dict[str, str]
    tests: dict[str, str]
    agent_s: float
    verifier_s: float
    programs: list[str] = field(default_factory=list[str])
    env: dict[str, str] = field(default_factory=dict[str, str])
    verifier_env: dict[str, str] = field(default_factory=dict[str, str])
    offline: bool = False
    left_out: list[Path] = field(default_factory=list[Path])

    def dump(self) -> str:
        """Return the column's text.   Without programs and variables, it is that of earlier releases."""
        told = {name: value for name, value in asdict(self).items() if value or name not in LATER}
        return json.dumps({name: value for name, value in told.items() if name != "left_out"}, sort_keys=True)


def make_rows(spec: TaskSpec) -> Iterator[dict[str, Any]]:
    """Yield a row for each task, in the seed's order.   Raises InnerError."""
    if wrong := sorted(spec.options.keys() - {"image"}):
        raise InnerError(f"Harbor tasks have no option {wrong[0]!r}. Their only option is image.")
    tasks = read_tasks(Path(spec.name), image=str(spec.options.get("image", "")))
    random.Random(spec.seed).shuffle(tasks)
    for task in tasks:
        yield {"prompt": [{"role": "user", "content": task.instruction}], "harbor": task.dump()}


def load_harbor(text: str) -> HarborTask:
    """Parse a row's column `harbor`.   Raises InnerError."""
    try:
        return HarborTask(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise InnerError(
            f"the column `harbor` is not a Harbor task ({error!r:.200}). Make the rows with "
            'inner.data.task = "harbor:FOLDER".'
        ) from error


def local_fault(image: str, paths: Iterable[str]) -> str:
    """Return why no local box can hold such a task; "" if one can.   paths: its working folder and its files."""
    if image:
        return f"a local box has no images, and this task has {image!r}. Use another provider, or leave the image out."
    for path in paths:
        if top := [top for top in (*MACHINES, "/dev", "/proc") if f"{path}/".startswith(f"{top}/")]:
            return f"a local box has this machine's {top[0]}, so it cannot have {path}. Use another folder or provider."
    return ""


def unpack(files: dict[str, str]) -> dict[str, bytes]:
    """Return path -> content."""
    return {path: base64.b64decode(text) for path, text in files.items()}


def read_tasks(folder: Path, *, image: str = "") -> list[HarborTask]:
    """Return the tasks below `folder`, or `folder` itself as one task.   image: for all tasks.   Raises InnerError."""
    found = [folder] if (folder / "task.toml").is_file() else sorted(p.parent for p in folder.glob("*/task.toml"))
    if not found:
        raise InnerError(
            f"{folder} has no Harbor task: neither it nor a folder in it has a task.toml. Give another one."
        )
    return [_read_task(one, image) for one in found]


def _read_task(folder: Path, image: str) -> HarborTask:
    seen = _Seen()
    try:
        told: dict[str, Any] = tomllib.loads((folder / "task.toml").read_text("utf-8"))
        _refuse_unsupported(told, folder)
        instruction = (folder / "instruction.md").read_text("utf-8")
        named = _table(told, "environment", folder).get("docker_image", "")
        if not isinstance(named, str):
            raise InnerError(f"{folder}/task.toml: docker_image = {named!r} is not the name of an image. Correct it.")
        _refuse_unusable(folder, image)
        image = image or named
        work, files = ("/app", {}) if image else _read_dockerfile(folder / "environment", seen)
        work = _workdir(told, folder) or work
    except (OSError, ValueError, NotImplementedError) as error:  # glob raises the last for some patterns
        raise InnerError(f"the Harbor task {folder} cannot be read: {error}. Correct it.") from error
    tests = _pack(folder / "tests", "/tests", root=folder / "tests", seen=seen)
    if f"/{TEST}" not in tests:
        raise InnerError(f"the Harbor task {folder} has no verifier: {TEST} is a link out of tests/. Copy it there.")
    return HarborTask(
        name=folder.name, instruction=instruction, image=image, folder=work, files=files, tests=tests,
        agent_s=_seconds(told, "agent", folder),
        verifier_s=_seconds(told, "verifier", folder), programs=sorted(seen.programs & {*files, *tests}),
        env=_variables(told, "environment", folder), verifier_env=_variables(told, "verifier", folder),
        offline=_is_offline(told, folder), left_out=list(dict.fromkeys(seen.left)),
    )  # fmt: skip


def _table(told: dict[str, Any], name: str, folder: Path) -> dict[str, Any]:
    if not isinstance(found := told.get(name, {}), dict):
        raise InnerError(f"{folder}/task.toml: {name} = {found!r} is not a table. Write [{name}].")
    return found


def _refuse_unsupported(told: dict[str, Any], folder: Path) -> None:
    """Refuse a task that asks for more than a box has, and one without an instruction or a verifier."""
    for table, name, usual, what in UNSUPPORTED:
        value = (_table(told, table, folder) if table else told).get(name)
        if value not in usual:
            raise InnerError(
                f"{folder}/task.toml: {f'[{table}] ' * bool(table)}{name} asks for {what}, which a box does not have. "
                "Leave the task out."
            )
    for name in ("instruction.md", TEST):
        if not (folder / name).is_file():
            what = "no verifier" if name == TEST else "no instruction"
            raise InnerError(f"the Harbor task {folder} has {what}: {name} is missing. Add it, or leave the task out.")


def _is_offline(told: dict[str, Any], folder: Path) -> bool:
    """Whether the task's box has no network.   Refuse a network for the episode alone, or for the verifier alone."""
    tables = {name: _table(told, name, folder) for name in ("environment", "agent", "verifier")}
    older = "no-network" if tables["environment"].get("allow_internet") is False else "public"
    mode = tables["environment"].get("network_mode") or older
    for name, table in tables.items():
        own = table.get("network_mode") or mode
        if own != mode or own not in ("public", "no-network"):
            raise InnerError(
                f'{folder}/task.toml: [{name}] network_mode = {own!r} is not possible: a box is "public" or '
                '"no-network", from its start to its end. Use one of them in [environment], or leave the task out.'
            )
    return mode == "no-network"


def _refuse_unusable(folder: Path, image: str) -> None:
    """Refuse a task of several containers without an image for all tasks, and a script that bash cannot read."""
    for compose in sorted((folder / "environment").glob("docker-compose.y*ml")) if not image else ():
        raise InnerError(
            f"the Harbor task {folder} has {compose.name}, and a box is one container. Leave the task out, or build an "
            "image with all that it needs, and name it in task_options.image."
        )
    if b"\r\n" in (folder / TEST).read_bytes():
        raise InnerError(
            f"{folder / TEST} has the line ends of Windows, which bash cannot read. Remove them: "
            f"sed -i 's/\\r$//' {shlex.quote(str(folder / TEST))}"
        )


def _seconds(told: dict[str, Any], name: str, folder: Path) -> float:
    found = _table(told, name, folder).get("timeout_sec", 600)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1e9:
        raise InnerError(f"{folder}/task.toml: [{name}] timeout_sec = {found!r} must be a number between 0 and 1e9.")
    return float(found)


def _workdir(told: dict[str, Any], folder: Path) -> str:
    """Return the working folder that replaces the Dockerfile's; "" if task.toml names none."""
    found = _table(told, "environment", folder).get("workdir") or ""
    if found and (not isinstance(found, str) or not found.startswith("/") or _placed("/", found) == "/"):
        raise InnerError(f"{folder}/task.toml: workdir = {found!r} must be an absolute path below /.")
    return _placed("/", found) if found else ""


def _variables(told: dict[str, Any], name: str, folder: Path) -> dict[str, str]:
    found = _table({"env": _table(told, name, folder).get("env", {})}, "env", folder)
    for variable, value in found.items():
        here = f"{folder}/task.toml: [{name}.env] {variable} = {value!r}"
        if not isinstance(value, str) or "\0" in value or not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", variable):
            raise InnerError(f"{here} must be a text, under a name of letters, digits and _.")
        if "${" in value:
            raise InnerError(f"{here} is of the machine that starts Harbor, which no box can read. Write the value.")
    return found


@dataclass
class _Seen:
    """Holds facts of a task's folders that no file's content has.   left: links that no box gets.   programs: paths."""

    left: list[Path] = field(default_factory=list[Path])
    programs: set[str] = field(default_factory=set[str])


def _read_dockerfile(folder: Path, seen: _Seen) -> tuple[str, dict[str, str]]:
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
                to = _placed(work, target)
                is_folder = target.endswith("/") or target == "." or len(sources) > 1 or to == work
                is_folder |= any(path.startswith(f"{to}/") for path in files)
                files |= _copied(folder, sources, to.rstrip("/"), is_folder=is_folder, seen=seen)
            case ["WORKDIR"], [target] if plain and _placed(work, target) != "/":
                work = _placed(work, target)
            case [first], _ if first.startswith("#"):
                continue
            case _:
                raise InnerError(
                    f"{folder}/Dockerfile has the line {line[:60]!r}, and no image is built here. Build it at your "
                    'provider, and name it: docker_image in task.toml, or inner.data.task_options.image = "NAME".'
                )
    return work, files


def _placed(work: str, target: str) -> str:
    return "/" + posixpath.normpath(posixpath.join(work, target)).lstrip("/")


def _copied(folder: Path, sources: list[str], to: str, *, is_folder: bool, seen: _Seen) -> dict[str, str]:
    """Return one COPY's files: path in the box -> base64.   to: a folder for them, or the name of the one file."""
    copied = dict[str, str]()
    for path in [path for source in sources for path in _named(folder, source)]:
        if not _real(path).is_relative_to(_real(folder)):
            raise InnerError(f"{folder}/Dockerfile copies {path}, which is outside its folder. Copy a file in it.")
        inside = f"{to}/{path.name}" if is_folder and path.is_file() else to
        copied |= _pack(path, inside, root=folder, seen=seen)
    return copied


def _named(folder: Path, source: str) -> list[Path]:
    """Return the files and folders that COPY's source matches; `folder` is the root of its paths."""
    inside = posixpath.normpath(source.lstrip("/") or ".")
    pattern = inside.replace("[^", "[!")  # Go's spelling, and Python's
    found = sorted(folder.glob(pattern)) if set("*?[") & set(inside) else []
    return found or [folder / inside]


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises for links in a circle before Python 3.13


def _pack(source: Path, target: str, *, root: Path, seen: _Seen) -> dict[str, str]:
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
