"""Modules beside the user's code: found by its syntax, one .zip of equal bytes, importable where only the run is."""

import subprocess
import sys
from pathlib import Path

import pytest

from diloco.model.fetch import fetch_files
from diloco.run.config import ConfigError, load_config
from diloco.run.data_files import gather_data
from diloco.run.founding import open_run
from diloco.run.sibling_modules import find_siblings, join_siblings, zip_modules
from inner.usercode.reward_words import user_lines
from rendezvous.clock import SystemClock

REWARD = """
import json, os.path
import helpers
def score(completions, **columns):
    from words.lists import WORDS
    return [float(helpers.one() + len(WORDS)) for _ in completions]
"""
CONFIG = """
name = "mine"
[inner]
model = "toolworld"
rewards.function = "code/rewards.py:score"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code = tmp_path / "code"
    (code / "words").mkdir(parents=True)
    (tmp_path / "run.toml").write_text(CONFIG)
    (code / "rewards.py").write_text(REWARD)
    (code / "helpers.py").write_text("import deeper\ndef one():\n    return deeper.ONE\n")
    (code / "deeper.py").write_text("ONE = 1\n")
    (code / "words" / "__init__.py").write_text("")
    (code / "words" / "lists.py").write_text("from . import more\nWORDS = more.MORE\n")
    (code / "words" / "more.py").write_text("MORE = ['a']\n")
    for name in ("json", "torch", "unused"):
        (code / f"{name}.py").write_text("raise SystemExit\n")
    return tmp_path


def test_what_is_imported_is_found(folder: Path) -> None:
    (folder / "code" / "helpers.py").write_text("import deeper, json, torch\ndef one():\n    return deeper.ONE\n")
    found = find_siblings(folder / "code" / "rewards.py")
    assert sorted(found) == ["deeper.py", "helpers.py", "words/__init__.py", "words/lists.py", "words/more.py"]
    assert find_siblings(folder / "code" / "deeper.py") == {}
    (folder / "code" / "rewards.py").write_text("def broken(:\n")
    assert find_siblings(folder / "code" / "rewards.py") == {}


def test_two_that_import_each_other_end(folder: Path) -> None:
    (folder / "code" / "deeper.py").write_text("import helpers\nimport rewards\n")
    assert "rewards.py" not in find_siblings(folder / "code" / "rewards.py")


def test_equal_files_give_equal_bytes(folder: Path) -> None:
    found = find_siblings(folder / "code" / "rewards.py")
    body = zip_modules(found)
    for path in found.values():
        path.write_bytes(path.read_bytes())  # younger
    assert zip_modules(dict(reversed(found.items()))) == body


def test_two_modules_of_one_name(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    (other / "environment.py").write_text("import helpers\n")
    (other / "helpers.py").write_text("TWO = 2\n")
    codes = [folder / "code" / "rewards.py", other / "environment.py"]
    with pytest.raises(ConfigError, match=r"imports .* imports .* two modules of one name"):
        join_siblings({code: find_siblings(code) for code in codes})


def test_a_replica_has_them_and_nothing_else_of_the_folder(folder: Path) -> None:
    told = list[str]()
    config = gather_data(load_config(folder / "run.toml"), told.append)
    assert any("the run carries deeper.py, helpers.py, words/__init__.py" in text for text in told)
    run = open_run(config, f"{folder}/run", clock=SystemClock())
    assert run.config.inner.rewards.function is not None and "modules" not in run.config.inner.to_dict()
    files = fetch_files(run, folder / "fetched")
    assert files["modules"].name == "modules.zip" and sorted(files) == ["modules", "reward"]
    (folder / "empty").mkdir()
    said = "from inner.usercode.userfiles import load_reward\nfrom pathlib import Path\n" + (
        f"files = { ({k: str(v) for k, v in files.items()})!r}\n"
        "print(load_reward('reward', 'rewards.py:score', {k: Path(v) for k, v in files.items()})(completions=['x']))"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", said], capture_output=True, text=True, cwd=folder / "empty",
        env={"PYTHONPATH": root, "PATH": ""}, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "[2.0]", done.stderr


def test_another_module_is_another_run(folder: Path) -> None:
    from rendezvous.errors import WrongRun

    open_run(gather_data(load_config(folder / "run.toml")), f"{folder}/run", clock=SystemClock())
    (folder / "code" / "deeper.py").write_text("ONE = 2\n")
    with pytest.raises(WrongRun, match="modules file"):
        open_run(gather_data(load_config(folder / "run.toml")), f"{folder}/run", clock=SystemClock())


def test_an_error_names_the_module_in_which_it_arose(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder / "code"))
    (folder / "code" / "words" / "more.py").write_text("from json import loud\n")
    with pytest.raises(ImportError) as caught:
        exec(compile("import words.lists\n", str(folder / "code" / "rewards.py"), "exec"), {})
    lines = user_lines(caught.value, folder / "code" / "rewards.py").splitlines()
    assert lines[0].startswith("  rewards.py, line 1: ")
    assert lines[1] == "  words/more.py, line 1: from json import loud"
    assert lines[-1].endswith("install a version of json that has this name, or leave the import out of more.py.")


def test_many_modules_are_counted(folder: Path) -> None:
    for number in range(20):
        (folder / "code" / "words" / f"list{number}.py").write_text("")
    (folder / "code" / "words" / "lists.py").write_text("".join(f"from . import list{n}\n" for n in range(20)))
    told = list[str]()
    gather_data(load_config(folder / "run.toml"), told.append)
    assert any("__init__.py, 22 more modules, too" in text for text in told)
