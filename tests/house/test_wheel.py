"""The wheel that a user installs has all that a command needs: the page's files, templates, pins, kernels' sources.

python -m hatchling build ─▶ wheel ─▶ unpacked, first on sys.path, in an empty directory ─▶ init, report
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.archives import faults_of_wheel
from tests.support.puppets import PuppetRun

pytest.importorskip("hatchling", reason="hatchling builds the wheel: pip install hatchling")
ROOT = Path(__file__).parents[2]
ROOMS = ("diloco", "executors", "inner", "rendezvous")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run_from(unpacked: Path, cwd: Path, *argv: str, codes: tuple[int, ...] = (0,)) -> str:
    """A command of the unpacked wheel, which proves that no module of this tree was imported."""
    code = (
        "import sys; from executors.cli.main import main; code = main(sys.argv[2:]);"
        "ours = [m.__file__ for n, m in sys.modules.items() if n.split('.')[0] in "
        f"{ROOMS} and getattr(m, '__file__', None)];"
        "assert ours and all(f.startswith(sys.argv[1]) for f in ours), ours; sys.exit(code)"
    )
    environ = {**os.environ, "PYTHONPATH": str(unpacked), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(unpacked), *argv], cwd=cwd, env=environ, capture_output=True, text=True
    )
    assert done.returncode in codes, done.stderr
    return done.stdout


def test_every_file_of_the_rooms_is_in_the_wheel(wheel: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("this is no checkout of git")
    assert set(tracked.stdout.split()) <= set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_has_what_pypi_and_type_checkers_want(wheel: Path) -> None:
    assert not list(faults_of_wheel(wheel))


def test_a_report_out_of_the_wheel_is_the_page_of_this_tree(unpacked: Path, tmp_path: Path) -> None:
    run = PuppetRun(tmp_path)
    run.rounds(3)
    here = tmp_path / "elsewhere"
    here.mkdir()
    assert "3 of 100 outer steps" in run_from(unpacked, here, "report", run.url, "--to", str(here))
    page = (here / "report.html").read_text()
    for asset in (ROOT / "diloco/views/page/assets").glob("*.js"):
        assert asset.read_text().strip()[:200] in page, asset.name
    assert len(page) > 50_000


def test_a_project_is_begun_and_planned_out_of_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    run_from(unpacked, tmp_path, "init", "mine")
    assert {"run.toml"} <= {p.name for p in (tmp_path / "mine").iterdir()}
    assert "nothing was started" in run_from(
        unpacked,
        tmp_path / "mine",
        "plan",
        "run.toml",
        codes=(0, 75),  # 75: without a network the model is not at hand
    )
