"""Config files that are none, and spellings of files and objects that are not there."""

from pathlib import Path

import pytest

from diloco.run.config import ConfigError, load_config
from diloco.unreadable import object_hint

GOOD = """
[inner]
model = "toolworld"
[inner.data]
prompts = "prompts.jsonl"
[inner.rewards]
function = "SPELLING"
"""
REWARDS = "import re\n\nclass _Hidden: ...\n\ndef score(completions, **columns):\n    return [0.0] * len(completions)\n"


def complaint(folder: Path, text: str | bytes, name: str = "run.toml") -> str:
    (folder / "prompts.jsonl").write_text('{"prompt": "1 + 1"}\n')
    (folder / "rewards.py").write_text(REWARDS)
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as refused:
        load_config(folder / name)
    return str(refused.value)


@pytest.mark.parametrize(
    "spelling",
    [
        "rewards.score", "rewards:score", "rewards.py", "rewards/score", "score", "rewards", "rewards.py::score",
        "rewards.py.score", "rewards.py:score:x", "rewards.scor", "./rewards.score",
    ],
)  # fmt: skip
def test_a_reward_spelled_otherwise_hears_how_it_is_spelled(tmp_path: Path, spelling: str) -> None:
    said = complaint(tmp_path, GOOD.replace("SPELLING", spelling))
    assert f"inner.rewards.function = {spelling!r}" in said
    assert f'Did you mean "{"./" if spelling[0] == "." else ""}rewards.py:score"?' in said


def test_a_file_with_a_slip_in_its_name_hears_of_the_one_beside_it(tmp_path: Path) -> None:
    assert "reward.py. Did you mean rewards.py?" in complaint(tmp_path, GOOD.replace("SPELLING", "reward.py:score"))
    near = GOOD.replace("SPELLING", "rewards.py:score").replace("prompts.jsonl", "prompt.jsonl")
    assert "Did you mean prompts.jsonl?" in complaint(tmp_path, near)
    said = complaint(tmp_path, GOOD.replace("SPELLING", "zzz"))
    assert "names no file and object" in said and "Did you mean" not in said
    with pytest.raises(ConfigError, match=r"there is no file .*runs.toml. Did you mean run.toml\?"):
        load_config(tmp_path / "runs.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "x"\n[fleet]\nreplicas = 2 3\n', "line 3: replicas = 2 3\n  Expected newline"),
        ('name = "x"\n\n[fleet\nreplicas = 2\n', "line 3: [fleet\n"),
        ("[inner]\nmodel = Qwen/Qwen2.5-0.5B # small\n", 'Text needs quotes: "Qwen/Qwen2.5-0.5B"'),
        ('name = "x"\nname = "y"\n', 'line 2: name = "y"\n'),
        ('name = """x\n', 'line 1: name = """x\n'),
        (b"\xff\xfen\x00", "not text in UTF-8"),
    ],
)
def test_a_line_that_is_no_toml_is_shown(tmp_path: Path, text: str | bytes, said: str) -> None:
    found = complaint(tmp_path, text)
    assert found.startswith(str(tmp_path / "run.toml")) and said in found, found


def test_what_is_no_config_at_all_is_told_what_it_is(tmp_path: Path) -> None:
    script = "import trl\n\ndef my_reward(completions):\n    return []\n\ntrainer = trl.GRPOTrainer()\n"
    said = complaint(tmp_path, script, "grpo.py")
    assert "is a Python script" in said and "diloco init FOLDER" in said and 'function = "grpo.py:my_reward"' in said
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(ConfigError, match=r"is a folder.*did you mean .*run.toml\?"):
        load_config(tmp_path)


def test_code_inside_a_prompt_makes_no_script_of_a_config(tmp_path: Path) -> None:
    said = complaint(tmp_path, '[inner.data]\nsystem = """\nimport os\ndef f(x):\n"""\n[fleet]\nreplicas = 2 3\n')
    assert "line 7: replicas = 2 3" in said and "script" not in said, said


def test_the_mark_that_an_editor_puts_in_front_is_no_fault(tmp_path: Path) -> None:
    assert "name = 3 must be str" in complaint(tmp_path, b"\xef\xbb\xbfname = 3\n")


def test_a_class_is_suggested_for_an_environment_alone(tmp_path: Path) -> None:
    (tmp_path / "zoo.py").write_text("class Scorer: ...\n\ndef worth(): ...\n")
    assert object_hint("reward", "zoo", tmp_path) == ' Did you mean "zoo.py:worth"?'
    assert object_hint("environment", "zoo", tmp_path) == ' Did you mean "zoo.py:Scorer"?'
