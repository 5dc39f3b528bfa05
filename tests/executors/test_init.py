"""`diloco init`: the project that it writes runs as it stands."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.run.config import load_config
from diloco.run.data_files import check_held_out
from executors.cli.checking.init import TASKS
from executors.cli.main import main
from inner.usercode.check import check_inner


def ended(*words: str) -> int:
    """The exit code of `diloco …`, returned or raised."""
    try:
        return main(list(words))
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize("task", TASKS)
def test_the_config_the_prompts_and_the_reward_fit_each_other(tmp_path: Path, task: str) -> None:
    folder = tmp_path / "mine"
    assert main(["init", str(folder), "--task", task, "--model", "some/model"]) == 0
    config = load_config(folder / "run.toml")
    assert (config.name, config.inner.model) == ("mine", "some/model") and config.eval is not None
    check_inner(config.inner, config.user_files())
    check_held_out(config.eval, config.inner, config.user_files())
    done = subprocess.run([sys.executable, "test_rewards.py"], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("name", ["🚀run", "a\x7fb", "ünder", 'a"b'])
def test_any_name_of_a_folder_can_be_read_back(name: str, tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / name), "--model", "some/model"]) == 0
    assert load_config(tmp_path / name / "run.toml").name == name


def test_every_setting_that_it_writes_is_explained(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "mine")]) == 0
    lines = (tmp_path / "mine" / "run.toml").read_text().splitlines()
    clear = ("name", "r =", "alpha", "function")
    silent = [x for x in lines if "=" in x and "#" not in x and not x.startswith(clear)]
    assert silent == []


def test_nothing_that_stands_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rewards.py").write_text("mine")
    assert ended("init", str(tmp_path)) == 2
    assert "has rewards.py already" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["rewards.py"]


def test_a_built_in_model_has_its_own_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("init", str(tmp_path / "x"), "--model", "toolworld") == 2
    assert "diloco demo" in capsys.readouterr().err


def test_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "x"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == ["held_out.jsonl", "prompts.jsonl", "rewards.py", "run.toml", "test_rewards.py"]


def test_a_model_on_this_machine_is_named_from_where_the_project_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine", "--model", "weights"]) == 0
    assert load_config("mine/run.toml").inner.model == str(tmp_path / "weights")


def test_a_full_disk_leaves_nothing_that_forbids_the_same_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: an empty run.toml, so "repeat the command" met "has run.toml already"; and /tmp was named as full."""
    folder, write = tmp_path / "mine", Path.write_text

    def full(path: Path, text: str, **how: str) -> int:
        write(path, text[:10], **how)
        if path.name != "prompts.jsonl":
            return 10
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as filled:
        filled.setattr(Path, "write_text", full)
        assert ended("init", str(folder)) == 75
    assert f"for the command's files ({folder}); free some space, then repeat" in capsys.readouterr().err
    assert ended("init", str(folder)) == 0
