"""`diloco launch`: what it finds in folders as people keep them: packages, configurations, modules above the script."""

from pathlib import Path

import pytest

from diloco.run.config import FleetConfig
from executors.preflight.run_url import UsageError
from executors.preflight.script import packages_of, read_script

JOINS = "from diloco import DiLoCoCallback\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sent(name: str, *arguments: str) -> set[str]:
    found = read_script(name, arguments, is_module=False, more=(), fleet=FleetConfig())
    return set(found.config.files)


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_py", ".py").replace("_yaml", ".yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_pips_other_lines_are_no_mistakes(tmp_path: Path) -> None:
    """Before: an address without a name was refused, also for replicas here, which install nothing."""
    lines = (
        "git+https://github.com/huggingface/peft.git",  # ours
        "git+https://github.com/someone/Thing.git@v1.2  # newest",
        "git+ssh://git@github.com/a/b.git#egg=bee&subdirectory=x",
        "https://files.example/w/part-1.0-py3-none-any.whl",
        "./here",
        "file:///here/part-2.0-py3-none-any.whl",
        "bleach[css] @ file:///croot/bleach_1732  # as pip freeze writes in conda",
        "einops==0.8 # shapes",
    )
    (tmp_path / "requirements.txt").write_text("\n".join(lines))
    wanted = (lines[1].split()[0], lines[2], lines[3], "bleach[css]", "einops==0.8")
    assert packages_of("train.py", "", tmp_path) == wanted
    (tmp_path / "requirements.txt").write_bytes("\r\n".join(lines).encode("utf-16"))  # as PowerShell writes it
    assert packages_of("train.py", "", tmp_path) == wanted


def test_a_script_in_a_subfolder_may_import_from_the_folder_above(folder: Path) -> None:
    """Before: MedicalGPT's `from training.template import …`, in training/dpo.py, was not sent."""
    write(
        folder, training__dpo_py=f"{JOINS}import beside\nfrom training.template import T\nfrom lib.io import load\n",
        training__beside_py="import rewards\n", training__template_py="T = 1\n", training__other_py="", rewards_py="",
        lib__io_py="", unused_py="",
    )  # fmt: skip
    code = {"training/dpo.py", "training/beside.py", "training/template.py", "rewards.py", "lib/io.py"}
    assert sent("training/dpo.py") == code


def test_a_script_may_import_from_src_and_have_its_trainer_there(folder: Path) -> None:
    """Before: `meets neither DiLoCoCallback nor make_diloco`, also with `--file src`."""
    write(
        folder, scripts__train_py="from training.grpo import main\n", train_py="import training.grpo\n",
        src__training__grpo_py=f"{JOINS}from core import x\n", src__core__x_py="", src__training__other_py="",
    )  # fmt: skip
    files = {"src/training/grpo.py", "src/core/x.py", "src/training/other.py"}
    assert sent("scripts/train.py") == {"scripts/train.py"} | files and sent("train.py") == {"train.py"} | files
    (folder / "src").rename(folder / "lib")
    found = read_script("train.py", (), is_module=False, more=("lib",), fleet=FleetConfig())
    assert "lib/core/x.py" in found.config.files


def test_a_sent_configuration_names_files_too(folder: Path) -> None:
    """From its own folder or from here, also through another configuration; no code, and no folder."""
    write(
        folder, train_py=f"{JOINS}open('configs/run.yaml')\n", base_yaml="data: [no.jsonl]\n", train__x_py="",
        configs__run_yaml='extends: base.yaml\ndata: "data/rows.txt"\ncode: train/x.py\n',
        configs__base_yaml="template:   ./data/t.yaml  # comment\n", data__t_yaml="", data__other_yaml="",
    )  # fmt: skip
    (folder / "data/rows.txt").write_text("rows")
    named = {"configs/run.yaml", "configs/base.yaml", "base.yaml", "data/rows.txt", "data/t.yaml"}
    assert sent("train.py") == {"train.py"} | named


def test_values_that_load_dotenv_reads_are_told(folder: Path) -> None:
    write(folder, train_py=f"{JOINS}from dotenv import load_dotenv\nload_dotenv()\n")
    (folder / ".env").write_text("HF_TOKEN=x\n")
    notes = read_script("train.py", (), is_module=False, more=(), fleet=FleetConfig()).notes
    assert any(note.startswith("does not send .env, which has the name of a secret") for note in notes)


@pytest.mark.parametrize(
    ("lines", "fresh"),
    [
        ('import os\nos.environ["HF_ENDPOINT"] = "x"\n', True),
        ('import os\nos.environ.setdefault("HF_HOME", "y")\n', True),
        ("from unsloth import FastLanguageModel\n", True),
        ('import os\nos.environ["HF_TOKEN"] = "z"\nos.environ["WANDB_PROJECT"] = "mine"\n', False),
        ("import unslothful\n", False),
    ],
)
def test_a_script_that_comes_before_its_libraries_starts_without_them(folder: Path, lines: str, fresh: bool) -> None:
    """Before: HF_ENDPOINT of a mirror, set in the script's first line, had no effect, and unsloth came too late."""
    write(folder, train_py=f"{lines}{JOINS}")
    config = read_script("train.py", (), is_module=False, more=(), fleet=FleetConfig()).config
    assert config.script.fresh == fresh and config.mathematics()["script"].get("fresh", False) == fresh


def test_a_notebook_is_refused_by_name(folder: Path) -> None:
    """Before: its JSON is valid Python, so each replica raised NameError: null."""
    (folder / "train.ipynb").write_text('{"cells": [null, "DiLoCoCallback"]}')
    with pytest.raises(UsageError, match=r"is a notebook.*nbconvert --to script train\.ipynb"):
        sent("train.ipynb")


def test_a_module_that_is_not_valid_python_counts_only_beside_the_script(folder: Path) -> None:
    """Before: one module of a package, with syntax of a newer Python, stopped a script that does not import it."""
    write(folder, train_py=f"{JOINS}from lib import good\n", lib__good_py="", lib__newer_py="def f(:\n")
    found = read_script("train.py", (), is_module=False, more=(), fleet=FleetConfig())
    assert "lib/newer.py" in found.config.files
    assert any("may not need: lib/newer.py, line 1: def f(:" in note for note in found.notes)


def test_rows_that_differ_between_replicas_are_told(folder: Path) -> None:
    """Before: MedicalGPT's `train_test_split(test_size=0.1)` made replicas train on rows that others held out."""

    def told(code: str) -> list[str]:
        write(folder, train_py=f"{JOINS}{code}\n")
        notes = read_script("train.py", (), is_module=False, more=(), fleet=FleetConfig()).notes
        return [note.split(" without")[0] for note in notes if "without a seed" in note]

    assert told("x = rows.train_test_split(test_size=0.1)") == ["the code calls train_test_split()"]
    assert told("from sklearn import train_test_split\ntrain_test_split(x, y)") == ["the code calls train_test_split()"]
    assert told("rows.shuffle().map(f)") == ["the code calls shuffle()"]
    seeded = ("set_seed(1)\nx.shuffle()", "x.shuffle(seed=1)", "x.train_test_split(**more)", "random.shuffle(x)")
    assert [told(code) for code in seeded] == [[]] * 4
