"""`diloco launch`: what of a user's script travels, and replicas that run it, one of them killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM

from diloco.outer.managers.manager import StoreManager
from diloco.process import exitcodes
from diloco.run import library, sibling_modules
from diloco.run.config import FleetConfig, OuterError
from diloco.run.record import read_run
from diloco.run.script import Script
from diloco.runlog.reader import read_report
from diloco.runlog.sessions import SessionSummary, apply_event
from executors.cli.starting import launch
from executors.preflight import script as script_module
from executors.preflight.run_url import UsageError
from executors.preflight.script import Gathered, packages_of, read_script
from executors.preflight.secret_names import is_secret
from executors.supervision.supervisor import FAILED, Outcome
from rendezvous.agreement.membership import read_control, write_control
from rendezvous.clock import SystemClock
from rendezvous.stores.open import open_store
from tests.support.ranks import children_of

AUTHOR = ("-c", "user.name=me", "-c", "user.email=me@example.org")
TRAIN = """
import json, sys, time
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments
from diloco import DiLoCoCallback
from helper import EVERY
torch.set_num_threads(1); torch.manual_seed(0)
class Slow(TrainerCallback):
    def on_step_end(self, *args, **more):
        time.sleep(0.05)
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=32))
args = TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, max_steps=int(sys.argv[1]), learning_rate=3e-3, report_to=[],
    use_cpu=True, logging_steps=1, save_strategy="no", disable_tqdm=True)
rows = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in json.load(open("rows.json"))]
Trainer(model=model, args=args, train_dataset=rows, callbacks=[Slow(), DiLoCoCallback(sync_every=EVERY)]).train()
print("weights", float(sum(p.detach().double().sum() for p in model.parameters())))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's folder: a script, a module beside it, and data that the script names."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "helper.py").write_text("EVERY = 5\n")
    (tmp_path / "rows.json").write_text(json.dumps([[(k + i) % 64 for i in range(16)] for k in range(64)]))
    (tmp_path / "large.bin").write_bytes(b"x" * 100)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(name: str = "train.py", *arguments: str, more: tuple[str, ...] = (), is_module: bool = False) -> Gathered:
    return read_script(name, arguments, is_module=is_module, more=more, fleet=FleetConfig())


LIGHT = ("--executor", "local", "--option", "preload=diloco.replica.replica")  # these scripts end before they need more


def diloco(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "executors.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


# -------------------------------------------------------------------- what travels


def test_a_script_travels_with_what_it_imports_and_names(folder: Path) -> None:
    found = read("train.py", "20")
    assert sorted(found.config.files) == ["helper.py", "rows.json", "train.py"]
    assert found.notes[0] == "sends helper.py, rows.json, train.py"
    assert str(found.config.script) == "train.py 20" and found.config.name == "train"


def test_what_an_argument_names_is_sent_too(folder: Path) -> None:
    (folder / "rewards.py").write_text("import shapes\ndef score(completions, **_): ...\n")
    (folder / "shapes.py").write_text("")
    for name in ("data", "model", "empty"):
        (folder / name).mkdir()
    (folder / "data" / "rows.jsonl").write_text("{}")
    (folder / "model" / "config.json").write_text("{}")
    with (folder / "train.py").open("a") as script:
        script.write('\nMODEL, OTHERS = "model", ("empty", ".", "..", "../model", "")\n')
    found = read("train.py", "--reward_funcs", "rewards.score", "--extra=large.bin", "--dataset_name", "data")
    assert {"rewards.py", "shapes.py", "large.bin"} <= set(found.config.files)
    assert [note for note in found.notes if "the folder" in note] == [
        "does not send the folder data, which an argument names; --file data sends it",
        "does not send the folder model, which the code names; --file model sends it",
    ]


def test_a_name_in_a_command_that_a_note_tells_is_quoted(folder: Path) -> None:
    (folder / "my data").mkdir()
    (folder / "my data" / "rows.jsonl").write_text("{}")
    assert read("train.py", "my data").notes[-1].endswith("; --file 'my data' sends it")
    assert str(Script("pkg.train", ("a b",), is_module=True)) == "-m pkg.train 'a b'"


def test_a_file_or_folder_is_sent_when_it_is_asked_for(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "a.txt").write_text("a")
    assert {"large.bin", "data/a.txt"} <= set(read(more=("large.bin", "data")).config.files)


def test_what_git_ignores_is_not_sent_and_the_note_says_how(folder: Path) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    (folder / ".gitignore").write_text("*.json\n")
    found = read()
    assert "rows.json" not in found.config.files
    assert "does not send rows.json, which git ignores; --file rows.json sends it" in found.notes
    for typed in ("rows.json", "./rows.json", str(folder / "rows.json"), f"../{folder.name}/rows.json"):
        assert "rows.json" in read(more=(typed,)).config.files


def test_git_is_asked_about_what_lies_behind_a_link_or_in_a_submodule(folder: Path) -> None:
    """Before: git refused the whole question, and all that it ignores was sent."""
    for there in (folder, folder / "sub"):
        there.mkdir(exist_ok=True)
        subprocess.run(["git", "init", "-q"], check=True, cwd=there)
    (folder / "sub/old.json").touch()
    subprocess.run(["git", "-C", "sub", *AUTHOR, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    subprocess.run(["git", "-c", "advice.addEmbeddedRepo=false", "add", "sub"], check=True)
    for at in (".gitignore", "sub/.gitignore"):
        (folder / at).write_text("*.json\n")
    (folder / "data").mkdir()
    (folder / "data/a.json").touch()
    (folder / "data/a.txt").touch()
    (folder / "link").symlink_to("data")
    (folder / "helper.py").write_text("EVERY = 5\nNAMES = 'link/a.txt', 'link/a.json', 'data/a.json', 'sub/old.json'\n")
    assert set(read().config.files) == {"train.py", "helper.py", "link/a.txt"}


def test_git_is_asked_once_about_all_folders_of_a_repository(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: once per folder; 1,500 of them took 15 s."""
    subprocess.run(["git", "init", "-q"], check=True)
    (folder / ".gitignore").write_text("kept/b/\n")
    for name in ("kept/a/x.txt", "kept/a/deep/x.txt", "kept/b/x.txt"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    (folder / "helper.py").write_text("EVERY = 5\nNAMES = 'kept/a/x.txt', 'kept/a/deep/x.txt', 'kept/b/x.txt'\n")
    asked, run = list[str](), subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda words, **given: asked.append(words[1]) or run(words, **given))
    assert {name for name in read().config.files if name[:4] == "kept"} == {"kept/a/x.txt", "kept/a/deep/x.txt"}
    assert asked == ["check-ignore"]


def test_a_name_that_is_not_utf_8_is_refused(folder: Path) -> None:
    """Before: a UnicodeEncodeError with a traceback."""
    (folder / "odd").mkdir()
    (folder / "odd/\udcff.txt").touch()
    with pytest.raises(UsageError, match=r"--file odd: the name 'odd/\\udcff\.txt' is not UTF-8"):
        read(more=("odd",))


def test_a_file_is_found_through_a_link_to_the_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a ValueError, or "there is no such file"."""
    link = tmp_path_factory.mktemp("above") / "link"
    link.symlink_to(folder)
    (folder / "data").mkdir()
    (folder / "data/a.txt").touch()
    (folder / "linked").symlink_to("data")
    for typed in (link / "large.bin", link, link / "data"):
        found = read(more=(str(typed),)).config.files
        assert ("large.bin" in found) == ("data" not in typed.name) and ("data/a.txt" in found) == (
            "bin" not in typed.name
        )
    assert "linked/a.txt" in read(more=("linked/a.txt",)).config.files, "the name by which the script opens it"
    monkeypatch.chdir(link.parent)
    assert "large.bin" in read("link/train.py", more=("link/large.bin",)).config.files


def test_an_ignored_folder_is_sent_when_it_is_asked_for(folder: Path) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    (folder / ".gitignore").write_text("data/\n*.log\n")
    for name in ("data", "kept"):
        (folder / name).mkdir()
        for file in ("rows ä.jsonl", "old.log"):
            (folder / name / file).write_text("{}")
    sent = set(read(more=("./data/", "kept")).config.files)
    assert {"data/rows ä.jsonl", "data/old.log", "kept/rows ä.jsonl"} <= sent and "kept/old.log" not in sent
    sent = set(read(more=(".",)).config.files)
    assert "rows.json" in sent and not any(name.startswith(("data/", ".git/")) for name in sent), "git's word holds"


def test_a_path_that_goes_up_and_down_is_sent_once(folder: Path) -> None:
    (folder / "helper.py").write_text("EVERY = 5\nROWS = ('./rows.json', 'sub/../rows.json')\n")
    (folder / "sub").mkdir()
    assert sorted(read().config.files) == ["helper.py", "rows.json", "train.py"]


NAMES = (".env", ".env.local", ".envrc", "prod.env", "id_rsa", "server.pem", "my_secrets.json", "credentials.json")
TOKENS = ("hf_token", "token.txt", "slack_token.txt", "team_hf_token.txt", "kaggle_token.json", "hf_read_token")
KEPT = (
    "service_account.json",
    "client_secret_1.apps.google.com.json",
    "gcp-credentials.json",
    "api_key.txt",
)


@pytest.mark.parametrize("name", [*NAMES, *TOKENS, *KEPT])
def test_a_secret_is_never_sent(name: str, folder: Path) -> None:
    (folder / name).write_text("s3cret")
    (folder / "helper.py").write_text(f"EVERY = 5\nKEY = open({name!r}).read()\n")
    found = read()
    assert name not in found.config.files
    assert any(note.startswith(f"does not send {name}, which has the name of a secret") for note in found.notes)
    with pytest.raises(UsageError, match=f"{re.escape(name)} has the name of a secret"):
        read(more=(name,))
    (folder / "notes.txt").symlink_to(name)
    with pytest.raises(UsageError, match=f"--file notes.txt: {re.escape(name)} has the name of a secret"):
        read(more=("notes.txt",))


CODE = (
    "token_utils", "next_token", "train_token_classifier", "credentials_check", "tokens", "secretary", "tokenization",
    "read_tokens", "load_credentials", "secret_sharing", "secrets_example", "monkey",
)  # fmt: skip
DATA = (
    "special_token.json", "special_tokens_map.json", "tokenizer.json", "added_token.txt", "conf/.env.example",
    "secretary.csv", "passwords.jsonl", "tokens.txt", "credentials.json.example",
)  # fmt: skip


def test_what_only_sounds_like_a_secret_is_sent(folder: Path) -> None:
    """Before: such a module was refused, such data was left out without a word, and a template ended `--file conf`."""
    (folder / "conf").mkdir()
    for name in DATA:
        (folder / name).write_text("{}")
    for name in CODE:
        (folder / f"{name}.py").write_text("# DiLoCoCallback\n")
    (folder / "helper.py").write_text(f"EVERY = 5\nFILES = {DATA}\nimport {', '.join(CODE)}\n")
    assert {*DATA, *(f"{name}.py" for name in CODE)} <= set(read(more=("conf",)).config.files)
    assert "token_utils.py" in read("token_utils.py").config.files


MODULES = (
    "secrets", "hf_token", "token", "api_keys", "my_apikey", "github_tokens", "passwords", "prod_secrets",
    "db_credentials", "dbCredentials", "secrets_local", "stripe_secret", "slack_token", "prod_secrets/__init__",
)  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_a_module_with_a_secret_s_own_name_is_one(name: str) -> None:
    assert is_secret(f"{name}.py")


def test_a_file_with_a_key_in_it_stays_unless_it_is_asked_for(folder: Path) -> None:
    """Before: my-project-12ab.json, the name of Google's own download, was sent into the bucket in plain."""
    key = json.dumps({"type": "service_account", "private_key": "-----BEGIN PRIVATE KEY-----\nMIIE\n"})
    (folder / "my-project-12ab.json").write_text(key)
    (folder / "helper.py").write_text(f"EVERY = 5\nFILE = 'my-project-12ab.json'\nKEY = 'hf_{'aB' * 17}'\n")
    found = read()
    assert "my-project-12ab.json" not in found.config.files
    assert any("does not send my-project-12ab.json, which holds a key" in note for note in found.notes)
    assert any("sends helper.py with a key in it" in note for note in found.notes)
    assert "my-project-12ab.json" in read(more=("my-project-12ab.json",)).config.files


def test_a_module_of_secrets_is_refused(folder: Path) -> None:
    (folder / "my_secrets.py").write_text("KEY = 's3cret'\n")
    (folder / "helper.py").write_text("EVERY = 5\nimport my_secrets\n")
    with pytest.raises(UsageError, match=r"imports my_secrets\.py, which has the name of a secret.*--secret"):
        read()


def test_a_link_that_leads_out_of_the_folder_is_not_sent(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "private.txt"
    outside.write_text("mine")
    (folder / "notes.txt").symlink_to(outside)
    (folder / "round").symlink_to("round")
    (folder / "helper.py").write_text("EVERY = 5\nTEXT = 'notes.txt', 'round'\nOTHER = '../x'\n")
    assert "notes.txt" not in read().config.files


def test_a_module_travels_with_what_it_imports_from_its_package(folder: Path) -> None:
    """Before: pkg/train.py travelled alone, and each replica ended with a ModuleNotFoundError."""
    for name in ("pkg/deep", "other", "json"):
        (folder / name).mkdir(parents=True)
    for name, text in {
        "pkg/__init__.py": "import helper\n",
        "pkg/train.py": "from diloco import DiLoCoCallback\nfrom .deep.rows import ROWS\nimport other.words, json\n",
        "pkg/alone.py": "# DiLoCoCallback\n", "pkg/deep/rows.py": "ROWS = 'large.bin'\n", "other/words.py": "",
        "json/__init__.py": "", "unused.py": "",
    }.items():  # fmt: skip
        (folder / name).write_text(text)
    package = {f"pkg/{name}.py" for name in ("__init__", "train", "deep/rows")}
    assert set(read("pkg.train", is_module=True).config.files) == {*package, "helper.py", "other/words.py", "large.bin"}
    alone = set(read("pkg.alone", is_module=True).config.files)
    assert alone == {"pkg/__init__.py", "pkg/alone.py", "helper.py"}


def test_of_its_own_package_a_module_takes_only_what_it_imports(folder: Path) -> None:
    """Before: `from . import data` took the whole package, and was refused for a module of secrets in it."""
    for name, text in {
        "__init__": "", "train": "# DiLoCoCallback\nfrom . import data\nfrom .. import above\n",
        "data": "from .deep import rows\nimport pkg.words.all\n", "deep/__init__": "", "deep/rows": "",
        "words/all": "from ..kinds import *\n", "kinds": "", "unused": "", "prod_secrets": "",
    }.items():  # fmt: skip
        (folder / "pkg" / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (folder / "pkg" / f"{name}.py").write_text(text)
    needed = ("__init__", "train", "data", "deep/__init__", "deep/rows", "words/all", "kinds")
    assert set(read("pkg.train", is_module=True).config.files) == {f"pkg/{name}.py" for name in needed}
    assert "pkg/unused.py" in read("pkg.train", is_module=True, more=("pkg/unused.py",)).config.files


def test_modules_that_an_argument_or_all_names_are_sent(folder: Path) -> None:
    for name, text in {
        "__init__": "", "train": "# DiLoCoCallback\nfrom .models import *\n", "unused": "",
        "models/__init__": "__all__ = ['big', 'deep']\n", "models/big": "", "models/deep/layers": "",
        "models/deep/__init__": "from . import layers\n", "rewards": "from . import shapes\n", "shapes": "",
    }.items():  # fmt: skip
        (folder / "pkg" / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (folder / "pkg" / f"{name}.py").write_text(text)
    found = read("pkg.train", "--reward_funcs", "pkg.rewards.score", is_module=True).config.files
    needed = ("__init__", "train", "models/__init__", "models/big", "rewards", "shapes")
    assert set(found) == {f"pkg/{name}.py" for name in (*needed, "models/deep/__init__", "models/deep/layers")}


@pytest.mark.parametrize(
    ("typed", "sent"),
    [
        ("--reward=rewards.maths:score", ["rewards/maths.py", "shapes.py"]),
        ("rewards.maths.score,shapes.f", ["rewards/maths.py", "shapes.py"]),
        ("['rewards.maths.score']", ["rewards/maths.py", "shapes.py"]),
        ("rewards/maths.py", ["rewards/maths.py", "shapes.py"]),
        ("./rewards/maths.py:score", ["rewards/maths.py", "shapes.py"]),
        ("shapes:f", ["shapes.py"]),
        ("https://rewards.maths/shapes.py", []),
        ("meta/shapes-1.py", []),
        ("1.5e-3", []),
    ],
)
def test_an_argument_may_name_modules_in_several_ways(typed: str, sent: list[str], folder: Path) -> None:
    """Before: `rewards.score` alone; a path without its imports."""
    (folder / "rewards").mkdir()
    (folder / "rewards/maths.py").write_text("import shapes\n")
    (folder / "shapes.py").write_text("")
    assert sorted(read("train.py", typed).config.files) == sorted(["helper.py", "rows.json", "train.py", *sent])


def test_a_module_that_python_cannot_read_is_refused(folder: Path) -> None:
    """Before: the traceback of a SyntaxError."""
    (folder / "helper.py").write_bytes(b"# coding: latin-1\nEVERY = '\xe4'\n")
    assert "helper.py" in read().config.files
    (folder / "helper.py").write_text("EVERY = (\n")
    with pytest.raises(UsageError, match=r"helper\.py, line 1: EVERY = \(: .* Correct the line"):
        read()


def test_each_local_package_is_walked_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 modules that import each other by full names took 27 s instead of 1."""
    (folder / "lib").mkdir()
    for i in range(20):
        (folder / "lib" / f"m{i}.py").write_text("".join(f"from lib.m{k} import x{k}, y{k}\n" for k in range(20)))
    (folder / "train.py").write_text("# DiLoCoCallback\nfrom lib.m0 import x0\nimport lib.m1\n")
    asked = list[str]()
    monkeypatch.setattr(sibling_modules, "_is_installed", lambda name, folder: asked.append(name))
    assert len(read("train.py").config.files) == 21
    assert asked == ["lib"]


@pytest.mark.parametrize("typed", ["/data.txt", "../code/data.txt"])
def test_a_file_beside_a_script_of_another_folder_is_sent(
    typed: str, folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path_factory.mktemp("above") / "code"
    (code.parent / "proj").mkdir()
    folder.rename(code)
    (code / "data.txt").write_text("x")
    monkeypatch.chdir(code.parent / "proj")
    more = f"{code}{typed}" if typed.startswith("/") else typed
    assert read("../code/train.py", more=(more,)).config.files["data.txt"] == code / "data.txt"


def test_a_link_s_data_is_that_of_the_current_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `python link.py` reads it.   Before: only files beside the link's target were sent; --file refused others."""
    work = tmp_path_factory.mktemp("work")
    monkeypatch.chdir(work)
    Path("train.py").symlink_to(folder / "train.py")
    Path("helper.py").write_text("raise SystemExit\n")  # Python finds the one beside the target
    Path("rows.json").write_text("[]")
    Path("more.txt").write_text("")
    with (folder / "train.py").open("a") as script:
        script.write("\nTEXTS = 'helper.py', 'large.bin'\n")
    found = read("train.py", more=("more.txt",)).config.files
    assert found == {
        "train.py": folder / "train.py", "helper.py": folder / "helper.py", "rows.json": work / "rows.json",
        "large.bin": folder / "large.bin", "more.txt": work / "more.txt",
    }  # fmt: skip


def test_a_script_or_module_that_is_a_link_travels_by_the_name_that_python_uses(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: no file was sent for the script, and a module was a traceback."""
    shared = tmp_path_factory.mktemp("shared")
    (folder / "helper.py").rename(shared / "helper.py")
    (folder / "helper.py").symlink_to(shared / "helper.py")
    assert set(read().config.files) == {"train.py", "helper.py", "rows.json"}
    monkeypatch.chdir(shared)
    Path("link.py").symlink_to(folder / "train.py")
    found = read("link.py")
    assert str(found.config.script) == "train.py" and {"train.py", "helper.py"} <= set(found.config.files)
    assert found.config.name == "link", "as the run's folder"
    Path("linked").symlink_to(folder)
    monkeypatch.chdir(folder)
    assert set(read(f"{shared}/linked/train.py").config.files) == {"train.py", "helper.py", "rows.json"}


def test_a_module_that_is_installed_below_the_folder_is_not_sent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a virtual environment in it."""
    (folder / "venv" / "installed").mkdir(parents=True)
    (folder / "venv" / "installed" / "__init__.py").write_text("from . import train\n")
    (folder / "venv" / "installed" / "train.py").write_text("# DiLoCoCallback\n")
    monkeypatch.syspath_prepend(folder / "venv")
    assert read("installed.train", is_module=True).config.files == {}


def test_files_above_the_limit_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_module, "MOST_BYTES", 50)
    with pytest.raises(UsageError, match=r"a run takes 50 B at most: .*large.bin \(100 B\)"):
        read(more=("large.bin",))


def test_an_option_behind_the_script_is_told(folder: Path) -> None:
    assert any("--replicas comes after the script" in note for note in read("train.py", "--replicas", "4").notes)


def test_an_installed_module_is_found_and_must_join(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"json\.tool meets neither DiLoCoCallback nor make_diloco"):
        read("json.tool", is_module=True)
    found = read("train", "20", is_module=True)
    assert "train.py" in found.config.files and str(found.config.script) == "-m train 20"


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no script train.py"),
        ("def f(:\n", "train.py, line 1: def f.*Correct the line"),
        ("print('DiLoCo')\n", "train.py meets neither DiLoCoCallback nor make_diloco"),
        ("# /// script\n# dependencies = [\n# ///\nDiLoCoCallback\n", "block of train.py is not TOML"),
        ("# /// script\n# dependencies = [1]\n# ///\nDiLoCoCallback\n", "must be a list of texts"),
        ("# /// script\n# dependencies = ['a b']\n# ///\nDiLoCoCallback\n", "'a b', which is not a requirement"),
        ("# /// script\n# a = 1\n# ///\n\n# /// script\n# a = 1\n# ///\nDiLoCoCallback\n", "has 2 blocks"),
    ],
)
def test_a_script_that_cannot_run_is_refused_before_anything_is_written(
    text: str | None, words: str, folder: Path
) -> None:
    (folder / "train.py").unlink() if text is None else (folder / "train.py").write_text(text)
    with pytest.raises(UsageError, match=words):
        read()
    done = diloco("launch", "train.py")
    assert done.returncode == exitcodes.USER_ERROR and not (folder / "runs").exists()


def test_packages_are_those_of_the_block_and_of_requirements_but_not_ours(tmp_path: Path) -> None:
    source = '# /// script\n# requires-python = ">=3.11"\n# dependencies = ["torch", "wandb>=0.2"]\n# ///\n'
    (tmp_path / "requirements.txt").write_text("# what we need\nwandb==9\neinops  # shapes\n-r other.txt\ntrl\n")
    assert packages_of("train.py", source, tmp_path) == ("wandb>=0.2", "einops")
    assert packages_of("train.py", "import torch\n", None) == ()


def test_a_dry_run_says_what_it_would_send_and_starts_nothing(folder: Path) -> None:
    done = diloco("launch", "--replicas", "2", "--dry-run", "train.py", "20")
    assert done.returncode == 0 and not (folder / "runs").exists()
    assert "sends helper.py, rows.json, train.py" in done.stderr
    assert "r01: " in done.stdout and done.stdout.endswith("nothing was started\n")


def test_a_dry_run_refuses_where_the_launch_would(folder: Path) -> None:
    """Before: the dry run said what it would start there."""
    (folder / "photos").mkdir()
    (folder / "photos" / "one.jpg").write_text("")
    lost = open_store(f"file://{folder}/lost")
    write_control(lost, SystemClock(), replicas=1)
    for url, told in (("photos", "photos holds one.jpg"), ("lost", "run.json has vanished, though control/000000")):
        for dry_run in ([], ["--dry-run"]):
            done = diloco("launch", *dry_run, "--yes", "--run", url, "train.py", "20")
            assert done.returncode == exitcodes.USER_ERROR and told in done.stderr


@pytest.mark.parametrize(
    ("options", "environ", "told"),
    [
        (("--executor", "modal", "--gpu", "H100:8", "--gpu", "A100:4"), {}, "H100:8 has 8, A100:4 has 4"),
        (("--executor", "local"), {"WORLD_SIZE": "8"}, "WORLD_SIZE = 8 is set here, as a launcher does"),
    ],
    ids=["devices", "launcher"],
)
def test_a_launch_refuses_places_that_train_refuses(
    options: tuple[str, ...], environ: dict[str, str], told: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: `launch` checked no place, and each replica refused to start."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    done = diloco("launch", "--dry-run", "--run", f"file://{folder}/run", *options, "train.py", "20")
    assert done.returncode == exitcodes.USER_ERROR and told in done.stderr


# -------------------------------------------------------------------- the end of a script


@pytest.mark.parametrize(
    ("failing", "repeated", "code", "told"),
    [
        ("", "", 0, ""), ("r01", "", 0, "failed in r01 (exit"), ("r00 r01", "", FAILED, "in r00, r01 ("),
        ("r00 r01", "r00", 0, ""), ("r00 r01", "r03", 0, ""),
    ],
)  # fmt: skip
def test_a_script_that_fails_after_its_training_is_told_and_everywhere_it_is_a_failure(
    failing: str, repeated: str, code: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: `diloco launch` ended with 0 and without a word, though no replica had saved its model; a failure was
    told for ever, though you had repeated the script's last part."""
    sessions = {(slot, 1): SessionSummary(slot, 1, 7, "here", 0.0, how="done") for slot in ("r00", "r01")}
    sessions |= {("r02", 1): SessionSummary("r02", 1, 7, "here", 0.0, how="left")}
    for slot in failing.split():
        at = {"slot": slot, "generation": 1, "at": 2.0}
        apply_event(sessions, {"event": "crashed", "error": "ValueError: no rows", **at})
        apply_event(sessions, {"event": "lost", "exit_code": 1, **at})
    sessions |= {(slot, 2): SessionSummary(slot, 2, 7, "here", 3.0, how="done") for slot in repeated.split()}
    monkeypatch.setattr(launch, "Reader", lambda *_: Mock(refresh=lambda: Mock(sessions=[*sessions.values()])))
    run = Mock(url="runs/x", **{"config.script": Script("my train.py", ("--name", "a b"))})
    ended = launch.end_of(run, Outcome(0, "all is committed"))
    assert ended.code == code and told in ended.text and ("ValueError: no rows" in ended.text) == bool(told)
    again = f"DILOCO_RUN=runs/x DILOCO_SLOT={failing[:3]} python 'my train.py' --name 'a b'`"
    assert (again in ended.text) == bool(told)
    assert [x.end for x in sessions.values()].count("done, then failed") == len(failing.split())


# -------------------------------------------------------------------- replicas


@pytest.mark.slow
def test_a_script_that_never_joins_ends_the_run_with_one_sentence(folder: Path) -> None:
    (folder / "train.py").write_text("# DiLoCoCallback\nprint('nothing to do')\n")
    done = diloco("launch", "--replicas", "1", *LIGHT, "train.py")
    assert done.returncode == exitcodes.USER_ERROR
    assert "train.py ended and never joined the run, so nothing was averaged" in done.stderr + done.stdout


def test_a_loop_that_names_a_run_of_its_own_is_refused_until_it_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: with README's loop, each launched replica waited for ten minutes, alone in a run of its own folder."""
    status = SimpleNamespace(phase="boot")
    session = SimpleNamespace(rv=SimpleNamespace(slot="r01", members=SimpleNamespace(status=status)))
    monkeypatch.setitem(library.LAUNCHED, "file:///runs/train", session)
    with pytest.raises(OuterError, match=r'has the run "runs/loop" and the slot "r00".* slot "r01"\. Write Store'):
        StoreManager("runs/loop", "r00")
    status.phase = "left"
    library.refuse_other_run("runs/next", "r00")


@pytest.mark.slow
def test_a_script_that_raises_before_it_joins_ends_the_run_with_its_traceback(folder: Path) -> None:
    (folder / "train.py").write_text("# DiLoCoCallback\nimport no_such_package\n")
    done = diloco("launch", "--replicas", "1", *LIGHT, "train.py")
    assert done.returncode == exitcodes.USER_ERROR
    said = done.stderr + done.stdout
    assert "No module named 'no_such_package'" in said and "train.py raised ModuleNotFoundError" in said
    assert "lists behind `sends`; --file adds files and folders" in said


@pytest.mark.slow
def test_a_refusal_of_the_callback_ends_the_run_with_its_sentence_alone(folder: Path) -> None:
    """Before: a traceback of 20 lines stood in front of it."""
    (folder / "train.py").write_text(
        "# DiLoCoCallback\nfrom diloco import OuterError\nraise OuterError('no fp16 here')\n"
    )
    done = diloco("launch", "--replicas", "1", *LIGHT, "train.py")
    said = done.stderr + done.stdout
    assert done.returncode == exitcodes.USER_ERROR
    assert "train.py: no fp16 here" in said and "Traceback" not in said


@pytest.mark.slow
def test_a_script_that_exits_with_a_message_ends_the_run_with_it(folder: Path) -> None:
    (folder / "train.py").write_text("# DiLoCoCallback\nimport sys\nsys.exit('no token for the judge')\n")
    done = diloco("launch", "--replicas", "1", *LIGHT, "train.py")
    assert done.returncode == exitcodes.USER_ERROR
    assert "train.py ended with sys.exit('no token for the judge')" in done.stderr + done.stdout


@pytest.mark.slow
def test_a_corrected_script_is_founded_again_at_the_same_place(folder: Path) -> None:
    (folder / "train.py").write_text("# DiLoCoCallback\nraise SystemExit(2)\n")
    assert diloco("launch", "--replicas", "1", "train.py", "5").returncode == exitcodes.USER_ERROR
    assert "train  outer step 0  " in diloco("status", "runs/train").stdout
    again = diloco("resume", "runs/train")
    assert again.returncode == exitcodes.USER_ERROR and "sys.exit(2)" in again.stderr, "the script says why"
    (folder / "train.py").write_text(TRAIN)
    assert diloco("launch", "--replicas", "1", "train.py", "5").returncode == 0
    assert diloco("status", "runs/train").stdout.startswith("train  outer step 1 of 1  ")
    by_hand = {**os.environ, "DILOCO_RUN": f"file://{folder}/runs/train", "DILOCO_SLOT": "auto"}
    assert subprocess.run([sys.executable, "train.py", "5"], env=by_hand).returncode == 0
    assert read_report(open_store(f"file://{folder}/runs/train/again")).wanted.guests == {"r01"}, (
        "it found the new place"
    )


@pytest.mark.slow
def test_replicas_of_a_script_one_killed_end_with_equal_weights(folder: Path) -> None:
    launched = subprocess.Popen([sys.executable, "-m", "executors.cli", "launch", "--replicas", "2", "train.py", "60"])
    url = f"file://{folder}/runs/train"
    pid = pid_after_step(url, "r01", step=2)
    os.kill(pid, signal.SIGKILL)
    assert launched.wait(240) == 0
    run = read_run(url)
    report = read_report(run.store)
    assert report.done and report.head == 12 and {x.name for x in report.sessions} == {"r00-1", "r01-1", "r01-2"}
    logs = [line for slot in ("r00", "r01") for line in diloco("logs", url, slot).stdout.splitlines()]
    assert len({line for line in logs if line.startswith("weights ")}) == 1
    assert run.config.outer.sync_every == 5 and run.record.config["name"] == "train"
    assert read_control(run.store).steps == 12
    assert diloco("export", url, "--to", "exported", "--push", "me/mine", "--dry-run").returncode == 0
    digest = json.loads(diloco("verify", url, "--step", "12", "--json").stdout)["digests"]["12"]
    assert f"`{digest}`" in (folder / "exported" / "README.md").read_text()
    model = Qwen2ForCausalLM.from_pretrained(folder / "exported")
    assert f"weights {float(sum(p.detach().double().sum() for p in model.parameters()))}" in logs


@pytest.mark.slow
def test_replicas_of_two_devices_run_a_script_in_two_processes_one_killed(folder: Path) -> None:
    words = ["launch", "--replicas", "2", "--executor", "local", "--option", "devices=2", "train.py", "60"]
    launched = subprocess.Popen([sys.executable, "-m", "executors.cli", *words])
    url = f"file://{folder}/runs/train"
    os.kill(children_of(pid_after_step(url, "r01", step=2))[0], signal.SIGKILL)
    assert launched.wait(240) == 0
    report = read_report(read_run(url).store)
    assert report.done and report.head == 12 and {x.name for x in report.sessions} == {"r00-1", "r01-1", "r01-2"}
    (lost,) = report.of_kind("lost")
    assert any("rank 1 of 2 ended (killed by SIGKILL)" in line for line in lost["tail"]), lost
    logs = [line for slot in ("r00", "r01") for line in diloco("logs", url, slot).stdout.splitlines()]
    sums = [line for line in logs if line.startswith("weights ")]
    assert len(sums) == 4 and len(set(sums)) == 1, "each of four processes has the same weights"


APART = """
import os
import torch
from diloco import StoreManager, make_diloco
from diloco.outer.ranks.lead import lead
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
manager = lead(lambda: StoreManager(os.environ["DILOCO_RUN"], os.environ["DILOCO_SLOT"], steps=2))
with make_diloco(model, optimizer, manager, sync_every=4):
    torch.manual_seed(int(os.environ["RANK"]))
    while not manager.done:
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("raise SystemExit('no token for the judge')", "train.py 5 ended with sys.exit('no token for the judge')"),
        ("raise ValueError('no rows')", "train.py 5 raised ValueError: no rows"),
        (
            "import os\nif os.environ['RANK'] == '1': raise ValueError('no rows')",
            "rank 1 of 2 ended (exit code 1): Val",
        ),
        (APART, "the ranks of this replica do not train together: at the first sync, rank 1 has other weights than"),
    ],
)
def test_a_script_that_ends_early_on_two_ranks_says_why(line: str, told: str, folder: Path) -> None:
    (folder / "train.py").write_text(f"{line}\n{TRAIN}")
    done = diloco(
        *[
            "launch",
            "--replicas",
            "1",
            "--no-preflight",
            "--executor",
            "local",
            "--option",
            "devices=2",
            "train.py",
            "5",
        ]
    )
    logs = diloco("logs", "runs/train", "r00").stdout
    assert done.returncode not in (0, None) and told in done.stderr + done.stdout + logs, (done.stderr, logs)


@pytest.mark.slow
def test_the_adapter_of_a_script_with_peft_is_exported(folder: Path) -> None:
    lora = 'LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"], init_lora_weights=False)'
    text = TRAIN.replace(
        "\nargs =", f"\nfrom peft import LoraConfig, get_peft_model\nmodel = get_peft_model(model, {lora})\nargs ="
    )
    (folder / "train.py").write_text(text.replace("model.parameters()", "model.parameters() if p.requires_grad"))
    assert diloco("launch", "--replicas", "1", "train.py", "10").returncode == 0
    done = diloco("export", "runs/train", "--to", "exported")
    assert done.returncode == 0 and "wrote the adapter after 2 outer steps" in done.stdout
    weights = load_file(folder / "exported" / "adapter_model.safetensors")
    assert json.loads((folder / "exported" / "adapter_config.json").read_text())["r"] == 2
    told = f"weights {float(sum(weight.double().sum() for weight in weights.values()))}"
    assert told[:16] in diloco("logs", "runs/train", "r00").stdout
    assert len(weights) == 5 and "base_model.model.model.norm.weight" in weights


@pytest.mark.slow
def test_a_guest_joins_a_supervised_run_leaves_and_is_not_replaced(folder: Path) -> None:
    words = [sys.executable, "-m", "executors.cli", "launch", "--replicas", "2", "train.py", "100000"]
    launched = subprocess.Popen(words)
    url = f"file://{folder}/runs/train"
    pid_after_step(url, "r01", step=2)
    by_hand = {**os.environ, "DILOCO_RUN": url, "DILOCO_SLOT": "auto"}
    guest = subprocess.Popen([sys.executable, "train.py", "100000"], env=by_hand)
    wait_until(lambda: any("r02" in step.fresh for step in read_report(open_store(url)).steps))
    guest.send_signal(signal.SIGTERM)
    assert guest.wait(60) == exitcodes.LEFT
    left_at = read_report(open_store(url)).head
    wait_until(lambda: read_report(open_store(url)).head >= left_at + 5)  # the supervisor has looked many times
    assert diloco("stop", "runs/train").returncode == 0 and launched.wait(120) == exitcodes.LEFT
    report = read_report(open_store(url))
    assert report.wanted.replicas == 2 and report.wanted.guests == {"r02"}
    assert {x.name: x.how for x in report.sessions} == {"r00-1": "left", "r01-1": "left", "r02-1": "left"}
    assert {e["slot"] for e in report.of_kind("launched")} == {"r00", "r01"}


@pytest.mark.slow
def test_a_launched_run_resumes_from_the_bucket_and_refuses_another_script(folder: Path) -> None:
    assert diloco("launch", "--replicas", "1", "--steps", "2", "train.py", "60").returncode == 0
    assert read_report(open_store(f"file://{folder}/runs/train")).head == 2, "the operator's steps, not the script's"
    (folder / "train.py").rename(folder / "moved.py")
    assert diloco("resume", "runs/train", "--steps", "4").returncode == 0
    assert read_report(open_store(f"file://{folder}/runs/train")).head == 4
    (folder / "train.py").write_text(TRAIN.replace("3e-3", "1e-3"))
    other = diloco("launch", "--replicas", "1", "train.py", "60")
    assert other.returncode == exitcodes.USER_ERROR and "script/train.py file (digest" in other.stderr
    assert "use another --run URL for this script, or the script that the run was started with" in other.stderr


def pid_after_step(url: str, slot: str, step: int) -> int:
    """The process of a slot, once an outer step is committed."""
    store: Any = open_store(url)
    wait_until(lambda: store.get(f"steps/{step:010d}/commit.json") is not None)
    return next(e["pid"] for e in read_report(store).of_kind("launched") if e.get("slot") == slot)


def wait_until(holds: Callable[[], bool], limit_s: float = 240) -> None:
    until = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)
