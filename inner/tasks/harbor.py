"""Read a folder of Harbor tasks as rows. No package is needed.

    FOLDER/NAME/  instruction.md ──▶ prompt          task.toml: timeout_sec of [agent], [verifier]; docker_image,
                                                     workdir, network_mode of [environment]; env of [environment],
                                                     [verifier]; UNSUPPORTED settings are refused
                  environment/Dockerfile FROM, COPY and WORKDIR are read, without variables; with another
                                                     line, the provider builds it (BUILDERS), or you do
                  tests/test.sh ──▶ verifier: it writes /logs/verifier/reward.json {"reward": x}, or reward.txt
                  environment_mode = "separate" ──▶ the verifier has a box of its own, with the episode's artifacts:
                                                     docker_image of [verifier.environment], or tests/Dockerfile, each
                                                     with its own tests; else a copy of the episode's first box

    task = "harbor:FOLDER"   task_size tasks, in task_seed's order; a row has its whole task, in column `harbor`
    task_options.image, verifier_image       the provider's image or template for all tasks, or all their verifiers
    task_options.without                     patterns of names of folders that are left out

Not promised: solution/ (it is never read), several containers, services, health checks; cpus, memory_mb and gpus, which
are options of the provider.
"""

import base64
import json
import random
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from inner.errors import InnerError
from inner.tasks.harbor_files import Dockerfile, Seen, pack, placed, read_dockerfile
from inner.tasks.spec import TaskSpec

TEST = "tests/test.sh"
OWN = "verifier.environment"  # name of the table about the verifier's own box
TAKEN = ("/tests/", "/logs/verifier/")  # places of the verifier alone
LATER = ("programs", "env", "verifier_env", "offline", "apart", "base", "build")  # fields left out if they are empty
UNSAVED = ("left_out", "odd")  # fields that no row has
OPTIONS = ("image", "verifier_image", "without")
HF_ONLINE = (
    "a box on Hugging Face always has a network, and this task asks for none (network_mode, or the older "
    "allow_internet, in task.toml). Use another provider, or leave the task out."
)
BUILDERS = ("modal", "e2b")  # providers that build a Dockerfile
UNSUPPORTED = (  # setting of a table, the values that a box has anyway, and what other values ask for
    ("steps", (None, []), "several instructions with a verifier each"),
    ("os", (None, "linux", "Linux"), "another operating system"),
    ("mcp_servers", (None, []), "tools of MCP servers"),
    ("allowed_hosts", (None, []), "a network with a few hosts alone"),
    ("collect", (None, []), "commands between the episode and the verifier"),
)
MACHINES = ("/usr", "/bin", "/lib", "/lib64")  # folders with the programs of a local box's machine


@dataclass(frozen=True)
class VerifierBox:
    """The verifier's own box.   artifacts: for each, its path in both boxes and the patterns that are left out.

    image, folder, env, offline, programs, base, build, odd: these fields mean the same as in HarborTask.
    files: the same as in HarborTask; None: the files of the episode's box."""

    image: str
    folder: str
    files: dict[str, str] | None
    env: dict[str, str]
    offline: bool
    artifacts: list[list[str]]
    programs: list[str] = field(default_factory=list[str])
    base: str = ""
    build: str = ""
    odd: str = ""


@dataclass(frozen=True)
class HarborTask:
    """One task.   files, tests: absolute path in the box -> base64.   agent_s, verifier_s: limits in seconds.

    programs: paths of the executable files.   env, verifier_env: variables of all commands, and of the verifier.
    offline: whether its box has no network.   left_out: links that no box gets.
    apart: the verifier's own box; None: it judges in the episode's box.   tests: empty if that box has its own.
    base: the image that FROM names, for providers with images.   build: a tar with a Dockerfile for a provider that
    builds it.   odd: the line of the Dockerfile that needs a build."""

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
    apart: VerifierBox | None = None
    left_out: list[Path] = field(default_factory=list[Path])
    base: str = ""
    build: str = ""
    odd: str = ""

    @property
    def artifact_paths(self) -> list[str]:
        return [path for path, *_ in self.apart.artifacts] if self.apart else []

    def dump(self) -> str:
        """Return the column's text."""
        told = {name: value for name, value in asdict(self).items() if value or name not in LATER}
        return json.dumps({name: value for name, value in told.items() if name not in UNSAVED}, sort_keys=True)


def make_rows(spec: TaskSpec) -> Iterator[dict[str, Any]]:
    """Yield a row for each task, in the seed's order.   Raises InnerError."""
    if wrong := sorted(spec.options.keys() - OPTIONS):
        raise InnerError(f"Harbor tasks have no option {wrong[0]!r}. Their options are {', '.join(OPTIONS)}.")
    for task in in_order(read_tasks(Path(spec.name), spec.options), spec.seed):
        yield {"prompt": [{"role": "user", "content": task.instruction}], "harbor": task.dump()}


def in_order(tasks: Sequence[HarborTask], seed: int) -> list[HarborTask]:
    """Return the tasks in the order of a seed; a run has the first task_size of them."""
    chosen = list(tasks)
    random.Random(seed).shuffle(chosen)
    return chosen


def load_harbor(text: str) -> HarborTask:
    """Parse a row's column `harbor`.   Raises InnerError."""
    try:
        told = json.loads(text)
        return HarborTask(**told | ({"apart": VerifierBox(**told["apart"])} if told.get("apart") else {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise InnerError(
            f"the column `harbor` is not a Harbor task ({error!r:.200}). Make the rows with "
            'inner.data.task = "harbor:FOLDER".'
        ) from error


def build_fault(provider: str, odd: str = "RUN …", *, of_verifier: bool = False) -> str:
    """Return why boxes of this provider cannot have an image that must be built.   odd: the Dockerfile's line."""
    folder, table, option = ("tests", "verifier.", "verifier_image") if of_verifier else ("environment", "", "image")
    return (
        f"{folder}/Dockerfile has the line {odd[:60]!r}, and boxes of {provider} build no images. Use boxes of "
        f"{' or '.join(BUILDERS)}, or build the image yourself, and name it: docker_image of [{table}environment] in "
        f'task.toml, or inner.data.task_options.{option} = "NAME".'
    )


def local_fault(image: str, paths: Iterable[str]) -> str:
    """Return why no local box can hold such a task; "" if one can.   paths: the task's folder and files."""
    if image:
        return f"a local box has no images, and this task has {image!r}. Use another provider, or leave the image out."
    for path in paths:
        if top := [top for top in (*MACHINES, "/dev", "/proc") if f"{path}/".startswith(f"{top}/")]:
            return f"a local box has this machine's {top[0]}, so it cannot have {path}. Use another folder or provider."
    return ""


def unpack(files: dict[str, str]) -> dict[str, bytes]:
    """Return path -> content."""
    return {path: base64.b64decode(text) for path, text in files.items()}


def read_tasks(folder: Path, options: Mapping[str, Any] = MappingProxyType({})) -> list[HarborTask]:
    """Return the tasks below `folder`, or `folder` itself as one task.   options: task_options.   Raises InnerError."""
    without, tasks, faults = _patterns(options), list[HarborTask](), dict[str, str]()
    found = [folder] if (folder / "task.toml").is_file() else sorted(p.parent for p in folder.glob("*/task.toml"))
    if not found:
        raise InnerError(
            f"{folder} has no Harbor task: neither it nor a folder in it has a task.toml. Give another one."
        )
    images = [str(options.get(name, "")) for name in ("image", "verifier_image")]
    for one in found:
        if not any(fnmatchcase(one.name, pattern) for pattern in without):
            try:
                tasks.append(_read_task(one, *images))
            except InnerError as error:
                faults[one.name] = str(error)
    if faults:
        raise InnerError(_told(faults))
    if not tasks:
        raise InnerError(f"inner.data.task_options.without = {without} leaves all tasks of {folder} out. Correct it.")
    return tasks


def _patterns(options: Mapping[str, Any]) -> list[str]:
    """Return the patterns of task_options.without.   Raises InnerError."""
    without = options.get("without", [])
    if not isinstance(without, list) or not all(isinstance(pattern, str) for pattern in without):
        raise InnerError(f'task_options.without = {without!r} must be a list of texts, such as ["docker-*"].')
    return without


def _told(faults: Mapping[str, str]) -> str:
    """Return the first fault, and how to go on if more tasks have one.   faults: a task's name -> its fault."""
    first, *more = faults
    if not more:
        return faults[first]
    names = ", ".join(f'"{name}"' for name in list(faults)[:20]) + f", … ({len(faults)} names)" * (len(faults) > 20)
    return (
        f"{faults[first]} Of the other tasks, {len(more)} cannot be read, either. To leave all of them out: "
        f"inner.data.task_options.without = [{names}]."
    )


def _read_task(folder: Path, image: str, verifier_image: str) -> HarborTask:
    seen = Seen()
    try:
        tables = _tables(tomllib.loads((folder / "task.toml").read_text("utf-8")), folder)
        _refuse_unsupported(tables, folder)
        _refuse_missing(folder, () if verifier_image or tables[OWN].get("docker_image") else (TEST,))
        instruction = (folder / "instruction.md").read_text("utf-8")
        box = tables["environment"]
        _refuse_unusable(folder, image)
        image = image or _image(box, folder)
        docker = read_dockerfile(folder / "environment", seen, image=image, work=_workdir(box, folder))
        apart, has_tests = _read_apart(tables, folder, verifier_image, (image, docker.folder), seen)
    except (OSError, ValueError, NotImplementedError) as error:  # glob raises the last for some patterns
        raise InnerError(f"the Harbor task {folder} cannot be read: {error}. Correct it.") from error
    tests = {} if has_tests else pack(folder / "tests", "/tests", root=folder / "tests", seen=seen)
    if not has_tests and f"/{TEST}" not in tests:
        raise InnerError(
            f"the Harbor task {folder} has no verifier: {TEST} is a link out of tests/, or missing. Add it."
        )
    return HarborTask(
        name=folder.name, instruction=instruction, image=image, tests=tests, **docker._asdict(),
        agent_s=_seconds(tables["agent"], "agent", folder), verifier_s=_seconds(tables["verifier"], "verifier", folder),
        programs=sorted(seen.programs & {*docker.files, *tests}), env=_variables(box, "environment", folder),
        verifier_env=_variables(tables["verifier"], "verifier", folder), apart=apart,
        offline=_is_offline(box, folder, agent=tables["agent"], **({} if apart else {"verifier": tables["verifier"]})),
        left_out=list(dict.fromkeys(seen.left)),
    )  # fmt: skip


def _tables(told: dict[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of task.toml that are read, by name; "": the file itself."""
    found = {"": told} | {name: _table(told, name, folder) for name in ("environment", "agent", "verifier")}
    return found | {OWN: _table({OWN: found["verifier"].get("environment", {})}, OWN, folder)}


def _table(told: dict[str, Any], name: str, folder: Path) -> dict[str, Any]:
    if not isinstance(found := told.get(name, {}), dict):
        raise InnerError(f"{folder}/task.toml: {name} = {found!r} is not a table. Write [{name}].")
    return found


def _refuse_unsupported(tables: dict[str, dict[str, Any]], folder: Path) -> None:
    """Refuse a task that asks for more than a box has."""
    for name, usual, what in UNSUPPORTED:
        for table, values in tables.items():
            if values.get(name) not in usual:
                raise InnerError(
                    f"{folder}/task.toml: {f'[{table}] ' * bool(table)}{name} asks for {what}, which a box does not "
                    "have. Leave the task out."
                )


def _refuse_missing(folder: Path, verifier: Sequence[str]) -> None:
    """Refuse a task without an instruction or a verifier.   verifier: its files; none if an image may have it."""
    for name in ("instruction.md", *verifier):
        if not (folder / name).is_file():
            what = "no verifier" if name == TEST else "no instruction"
            raise InnerError(f"the Harbor task {folder} has {what}: {name} is missing. Add it, or leave the task out.")


def _refuse_unusable(folder: Path, image: str) -> None:
    """Refuse a task of several containers without an image for all tasks, and a script that bash cannot read."""
    for compose in sorted((folder / "environment").glob("docker-compose.y*ml")) if not image else ():
        raise InnerError(
            f"the Harbor task {folder} has {compose.name}, and a box is one container. Leave the task out, or build an "
            "image with all that it needs, and name it in task_options.image."
        )
    if (folder / TEST).is_file() and b"\r\n" in (folder / TEST).read_bytes():
        raise InnerError(
            f"{folder / TEST} has the line ends of Windows, which bash cannot read. Remove them: "
            f"sed -i 's/\\r$//' {shlex.quote(str(folder / TEST))}"
        )


def _read_apart(
    tables: dict[str, dict[str, Any]], folder: Path, image: str, first: tuple[str, str], seen: Seen
) -> tuple[VerifierBox | None, bool]:
    """Return the verifier's own box, None if it has none, and whether this box has its own tests.

    image: the verifiers' image for all tasks.   first: image and working folder of the episode's box."""
    verifier = tables["verifier"]
    mode = verifier.get("environment_mode") or ("separate" if "environment" in verifier else "shared")
    if mode not in ("shared", "separate"):
        raise InnerError(f'{folder}/task.toml: environment_mode = {mode!r} is not known. Use "shared" or "separate".')
    if mode == "shared":
        return None, False
    box = tables[OWN if "environment" in verifier else "environment"]
    image, work = image or _image(tables[OWN], folder), _workdir(box, folder)
    has_tests = bool(image) or (folder / "tests/Dockerfile").is_file()
    if has_tests:
        docker = read_dockerfile(folder / "tests", seen, image=image, work=work)
        if not (image or docker.build or f"/{TEST}" in docker.files):
            raise InnerError(f"{folder}/tests/Dockerfile copies no /{TEST}, the verifier. Copy it: COPY . /tests/")
    else:
        image, docker = first[0], Dockerfile("", work or first[1], {}, "", "")
    return VerifierBox(
        image=image, folder=docker.folder, files=docker.files if has_tests else None,
        base=docker.base, build=docker.build, odd=docker.odd,
        programs=sorted(seen.programs & {*docker.files}), env=_variables(box, "environment", folder),
        offline=_is_offline(box, folder, verifier=verifier), artifacts=_artifacts(tables[""], folder),
    ), has_tests  # fmt: skip


def _artifacts(told: dict[str, Any], folder: Path) -> list[list[str]]:
    """Return each artifact's path in the boxes, and the patterns of its files that are left out."""
    listed = told.get("artifacts", [])
    found = dict[str, list[str]]()
    for entry in listed if isinstance(listed, list) else [listed]:
        one = entry if isinstance(entry, dict) else {"source": entry}
        path, without = one.get("source"), one.get("exclude", [])
        here = f"{folder}/task.toml: the artifact {entry!r}"
        if one.get("service") not in (None, "main"):
            raise InnerError(f"{here} is of a second container, which a box does not have. Leave the task out.")
        if not (isinstance(path, str) and isinstance(without, list) and all(isinstance(text, str) for text in without)):
            raise InnerError(f"{here} must be a path, or a table of source and exclude, a list of texts.")
        place = placed("/", path)
        if not path.startswith("/") or "\0" in path or f"{place}/".startswith(TAKEN) or place in ("/", "/logs"):
            raise InnerError(f"{here} must be an absolute path below /, and not in /tests or /logs/verifier.")
        found[place] = without
    return [[place, *without] for place, without in ({"/logs/artifacts": []} | found).items()]


def _image(box: dict[str, Any], folder: Path) -> str:
    if not isinstance(named := box.get("docker_image") or "", str):
        raise InnerError(f"{folder}/task.toml: docker_image = {named!r} is not the name of an image. Correct it.")
    return named


def _is_offline(box: dict[str, Any], folder: Path, **phases: dict[str, Any]) -> bool:
    """Whether a box has no network.   phases: tables that may ask for another network, which is refused."""
    mode = box.get("network_mode") or ("no-network" if box.get("allow_internet") is False else "public")
    for name, table in {"environment": box, **phases}.items():
        own = table.get("network_mode") or mode
        if own != mode or own not in ("public", "no-network"):
            raise InnerError(
                f'{folder}/task.toml: [{name}] network_mode = {own!r} is not possible: a box is "public" or '
                '"no-network", from its start to its end. Use one of them in [environment], or leave the task out.'
            )
    return mode == "no-network"


def _seconds(table: dict[str, Any], name: str, folder: Path) -> float:
    found = table.get("timeout_sec", 600)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1e9:
        raise InnerError(f"{folder}/task.toml: [{name}] timeout_sec = {found!r} must be a number between 0 and 1e9.")
    return float(found)


def _workdir(box: dict[str, Any], folder: Path) -> str:
    """Return the working folder that replaces the Dockerfile's; "" if task.toml names none."""
    found = box.get("workdir") or ""
    odd = found and (not isinstance(found, str) or not found.startswith("/") or "\0" in found)
    if odd or (found and placed("/", found) == "/"):
        raise InnerError(f"{folder}/task.toml: workdir = {found!r} must be an absolute path below /.")
    return placed("/", found) if found else ""


def _variables(table: dict[str, Any], name: str, folder: Path) -> dict[str, str]:
    found = _table({"env": table.get("env", {})}, "env", folder)
    for variable, value in found.items():
        here = f"{folder}/task.toml: [{name}.env] {variable} = {value!r}"
        if not isinstance(value, str) or "\0" in value or not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", variable):
            raise InnerError(f"{here} must be a text; write letters, digits and _ in its name, no digit first.")
        if "${" in value:
            raise InnerError(f"{here} is of the machine that starts Harbor, which no box can read. Write the value.")
    return found
