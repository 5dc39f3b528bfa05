"""The house: rooms resolve from this checkout, public names import, optional packages are optional, docs are true."""

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from executors.platforms import EXECUTORS
from tests.support.pins import pins

ROOT = Path(__file__).parents[2]
ROOMS = ("diloco", "executors", "inner", "rendezvous")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_this_checkouts(room: str) -> None:
    """Another distribution may install a package of the same name; ours must win."""
    assert Path(str(import_module(room).__file__)).parent.parent == ROOT


def test_the_wheel_has_exactly_the_four_rooms() -> None:
    assert sorted(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == sorted(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_imports_from_its_room(room: str) -> None:
    module = import_module(room)
    assert len(module.__all__) == len(set(module.__all__))  # ruff sees to the order: constants, classes, functions
    for name in module.__all__:
        assert getattr(module, name) is not None


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=180)


@pytest.mark.parametrize("room", ROOMS)
def test_importing_a_room_loads_nothing_heavy(room: str) -> None:
    heavy = "{'torch', 'trl', 'torchft', 'transformers', 'matplotlib'}"
    done = run(f"import sys, {room}; sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("missing", "use", "extra"),
    [
        pytest.param(  # as httpx below, after an import of torch
            "trl", "from inner import ComposerReplicationTrainer; ComposerReplicationTrainer()", "train",
            marks=pytest.mark.slow,
        ),
        ("httpx", "from inner import replay_trace; replay_trace([], [], 1.0)", "replay"),
        ("matplotlib", "from diloco.views.page.charts import write_picture; write_picture(None, None)", "report"),
    ],
)  # fmt: skip
def test_a_missing_package_fails_when_used_and_names_its_extra(missing: str, use: str, extra: str) -> None:
    block = f"import sys; sys.modules[{missing!r}] = None; "
    done = run(block + use)
    assert done.returncode != 0
    assert f"serverless-diloco[{extra}]" in done.stderr, done.stderr[-2000:]


def test_the_notes_extras_resolve() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"train", "replay", "replaysim", "diloco", "serverless", "prime-rl", "monarch", "dev"} <= set(extras)


@pytest.mark.parametrize("python", ["3.11", "3.14", "3.15"])
def test_constraints_satisfy_the_requirements(python: str) -> None:
    """Before: dill 0.3.8 was pinned for each Python, and the demo ended in its TypeError under Python 3.14."""
    from packaging.requirements import Requirement

    pinned = pins(python)
    extras = {k: v for k, v in PROJECT["project"]["optional-dependencies"].items() if k != "vllm"}  # has its own set
    named = [*PROJECT["project"]["dependencies"], *(text for extra in extras.values() for text in extra)]
    for requirement in map(Requirement, named):
        pin = pinned.get(requirement.name.lower().replace("_", "-"))
        if pin is not None and (requirement.marker is None or requirement.marker.evaluate({"python_version": python})):
            assert requirement.specifier.contains(pin), f"{requirement} is pinned to {pin}"


LINK = re.compile(r"\]\(([^)#]+?)(?:#[^)]*)?\)")


PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def test_no_page_has_two_sides_of_a_merge() -> None:
    marks = re.compile(r"^(<<<<<<<|>>>>>>>) ", re.M)
    assert [str(page) for page in PAGES if marks.search(page.read_text())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readmes_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(
        r"(?:^|`)make ([a-z0-9-]+)", (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text(), re.M
    ):
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target}"
    from executors.cli import main as cli

    verbs = subprocess.run(
        [sys.executable, "-m", cli.__name__, "--help"], capture_output=True, text=True, cwd=ROOT, timeout=180
    ).stdout
    for verb in re.findall(r"bin/diloco (\w+)", (ROOT / "README.md").read_text()):
        assert f"    {verb} " in verbs


def test_no_machine_of_ours_is_named() -> None:
    """No path of this checkout or of a home folder in the shipped files."""
    files = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT).stdout.split()
    texts = [p for f in files if (p := ROOT / f).suffix in (".py", ".md", ".toml", ".txt", ".yml") and p.exists()]
    ours = (str(ROOT), f"{Path.home()}/")
    assert not [p.name for p in texts if any(path in p.read_text() for path in ours)]


def test_the_tree_of_errors_names_every_class_below_its_parent():
    """Five classes were missing from it."""
    sources = "\n".join(path.read_text() for path in (ROOT / "rendezvous").rglob("*.py"))
    classes = dict(re.findall(r"^class (\w+)\((\w+)\):", sources, re.M))
    errors = {"RendezvousError"}
    while more := {child for child, parent in classes.items() if parent in errors} - errors:
        errors |= more
    drawn = _parents(import_module("rendezvous.errors").__doc__ or "")
    assert drawn == {(parent, child) for child, parent in classes.items() if child in errors - {"RendezvousError"}}


def _parents(drawing: str) -> set[tuple[str, str]]:
    """ "│   ├── KeyExists   definite …" below "├── StoreError"  ->  {("StoreError", "KeyExists"), …}"""
    above, found = ["RendezvousError"], set()
    for line in drawing.splitlines():
        if (at := re.search(r"[├└]── (\w+)", line)) is not None:
            depth = (at.start() - 4) // 4 + 1
            above[depth:] = [at[1]]
            found.add((above[depth - 1], at[1]))
    return found


def test_the_changelogs_newest_version_is_the_projects() -> None:
    """An entry goes below [Unreleased]; a release gives that part a number and a date."""
    titles = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert titles[0] == ("Unreleased", "") and titles[1][0] == PROJECT["project"]["version"]
    assert all(day for _, day in titles[1:]) and [day for _, day in titles[1:]] == sorted(
        (d for _, d in titles[1:]), reverse=True
    )


def test_each_platform_is_in_the_contract_that_no_platform_knows_another_one() -> None:
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    (apart,) = [one["modules"] for one in contracts if one["name"] == "no platform knows another one"]
    homes = {".".join(home.partition(":")[0].split(".")[:3]) for home in EXECUTORS.values()}
    assert set(apart) == homes
