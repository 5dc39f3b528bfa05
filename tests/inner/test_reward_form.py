"""A reward that cannot be called as TRL calls it, or says the same of everything, hears what was meant."""

import json
from functools import partial
from pathlib import Path

import pytest

from inner import InnerConfig, InnerError
from inner.usercode.check import check_inner, constant_reward
from inner.usercode.rehearse import rehearse as rehearse_briefly

rehearse = partial(rehearse_briefly, time_s=120.0)  # a busy machine imports torch in more than its own limit
CHAT = [{"prompt": [{"role": "user", "content": "6 + 1?"}], "answer": "7"}] * 2
TEXT = [{"prompt": "6 + 1?", "answer": "7"}] * 2


def config_of(folder: Path, code: str, rows=CHAT) -> tuple[InnerConfig, dict[str, Path]]:
    (folder / "rewards.py").write_text(code)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = {"model": "x", "data": {"prompts": "prompts.jsonl"}, "rewards": {"function": "rewards.py:score"}}
    return InnerConfig.from_dict(raw), {"reward": folder / "rewards.py", "prompts": folder / "prompts.jsonl"}


HEAD = "  next: write line 1 as `def score(completions, answer, **columns):`; each argument is a list"
ALL = "def score(completions, **columns):\n    "


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def score(completions, answer): ...", ["also passes prompts, completion_ids", "write **columns", HEAD]),
        ("def score(completions, anwser, **_): ...", ["asks for 'anwser'", "did you mean 'answer'?", HEAD]),
        ("def score(completions, solution, **_): ...", ["asks for 'solution'", "they have 'answer'"]),
        ("def score(completion, answer, **_): ...", ["one 'completion'", "all completions of a batch", HEAD]),
        ("def score(prompt, completion): ...", ["one 'prompt'", "one 'completion'", "write **columns"]),
        ("async def score(completions): ...", ["write **columns"]),
        (f"{ALL}return [columns['anwser'] for c in completions]", ["no column 'anwser'", "mean 'answer'?"]),
        (f"{ALL}return [c.strip() for c in completions]", ["rewards.py, line 2", "is a list of messages"]),
        (f"{ALL}return [c['content'] for c in completions]", ["correct the line", 'completion[-1]["content"] for']),
        ("import nothing_of_this_name", ["install what it imports"]),
    ],
)  # fmt: skip
def test_the_advice_is_about_the_mistake(tmp_path, code, told):
    """Before: "run `python rewards.py`; mend the line, or install what it imports" for each of them."""
    with pytest.raises(InnerError) as refused:
        check_inner(*config_of(tmp_path, code))
    assert all(words in str(refused.value) for words in told), refused.value
    assert ("install" in str(refused.value)) == ("import" in code)


@pytest.mark.parametrize(
    ("head", "told"),
    [
        ("open('weights.json')", "next: a run carries code only, not weights.json: write its values into a .py module"),
        (
            "from pathlib import Path\nPath(__file__).with_name('weights.json').read_text()",
            "code only, not weights.json",
        ),
        ("open('shell.json')", "code only, not shell.json"),
        ("open('nowhere.json')", "next: correct the line"),
        ("from .sub.core import f", "next: write `from sub.core import f`, without dots, or put rewards.py above"),
        ("from . import helper", "next: write `import helper`"),
        ("import importlib\nimportlib.import_module('helper')", "next: write `import helper`, so that the run finds"),
        ("import importlib\nimportlib.import_module('nothing_of_this_name')", "next: install what it imports"),
        ("get_ipython().run_line_magic('load_ext', 'autoreload')", "next: take the notebook's magic lines"),
    ],
)
def test_the_advice_about_what_lies_beside_the_file_fits_a_run(tmp_path, monkeypatch, head, told):
    """Before: "correct the line; `python rewards.py` shows …", which works where the file is."""
    shell = tmp_path / "shell"
    shell.mkdir()
    (shell / "shell.json").touch()
    (tmp_path / "weights.json").touch()
    (tmp_path / "helper.py").touch()
    monkeypatch.chdir(shell)
    found = rehearse(*config_of(tmp_path, f"{head}\n{ALL}return [1.0] * len(completions)\n"))
    assert told in found.refused


def test_a_class_is_no_reward_and_no_suggestion(tmp_path):
    """Before: "write `def Scorer(completions, **columns):`", and Scorer was suggested for a misspelt name."""
    code = "class score:\n    def __call__(self, completions, **columns):\n        return [1.0] * len(completions)\n"
    with pytest.raises(InnerError, match=r"score is a class.* Write `score = score\(\)`.* name rewards.py:score"):
        check_inner(*config_of(tmp_path, code))
    with pytest.raises(InnerError, match="defines no 'score'; it defines worth"):
        check_inner(*config_of(tmp_path, "class Scorer: ...\n\ndef worth(completions, **columns): ...\n"))


def test_a_list_of_lists_is_to_be_flattened(tmp_path):
    with pytest.raises(InnerError, match="array: flatten it"):
        check_inner(*config_of(tmp_path, f"{ALL}return [[1.0] for _ in completions]\n"))


def test_a_reward_that_takes_less_by_default_is_called(tmp_path):
    code = "def score(completions, answer='', weight=1.0, *args, **columns):\n    return [weight] * len(answer)\n"
    check_inner(*config_of(tmp_path, code))


@pytest.mark.parametrize(
    ("code", "rows", "cause"),
    [
        ("return [float('7' in c) for c in completions]", CHAT, "as if it were a text; here it is a list of messages"),
        ("return [float(a in c) for c, a in zip(completions, columns['answer'])]", CHAT, 'completion[-1]["content"]'),
        ("return [float(c[-1]['content'] == a) for c, a in zip(completions, columns['answer'])]",
         [{**CHAT[0], "answer": 7}], "A column is a number in the file"),
        ("return [0.0] * len(completions)", CHAT, "each of '7', '' the same, 0, and a group of equal rewards teaches"),
        ("return [0.25] * len(completions)", TEXT, "the same, 0.25"),
    ],
)  # fmt: skip
def test_a_reward_that_is_the_same_for_everything_is_said_with_its_likeliest_cause(tmp_path, code, rows, cause):
    config, files = config_of(tmp_path, ALL + code, rows)
    check_inner(config, files)
    assert cause in constant_reward(config, files) and "diloco check CONFIG" in constant_reward(config, files)


def test_what_is_logged_alone_is_not_blamed_for_equal_rewards(tmp_path):
    """Before: "rewards.py:brief, rewards.py:score returns None for every completion"."""
    _, files = config_of(tmp_path, ALL + "return [0.0] * len(completions)", TEXT)
    more = "def brief(completions, **columns):\n    return [float(len(c)) for c in completions]\n"
    (tmp_path / "rewards.py").write_text(ALL + "return [0.0] * len(completions)\n" + more)
    rewards = {"functions": {"rewards.py:score": 1.0, "rewards.py:brief": 0.0}}
    config = InnerConfig.from_dict({"data": {"prompts": "p.jsonl"}, "rewards": rewards})
    files |= dict.fromkeys(config.rewards.named, tmp_path / "rewards.py")
    assert constant_reward(config, files).startswith("warning: rewards.py:score gives each of")


def test_a_reward_that_knows_nothing_is_refused_unless_it_knows_a_later_row(tmp_path):
    """Before: a warning, and a session that ended at its third batch."""
    config, files = config_of(tmp_path, ALL + "return [None] * len(completions)", TEXT)
    assert "returns None for every completion" in rehearse(config, files).refused
    rows = [{**TEXT[0], "answer": str(i)} for i in range(9)]
    later = ALL + "return [1.0 if a == '8' else None for a in columns['answer']]"
    found = rehearse(*config_of(tmp_path, later, rows))
    assert not found.refused and "learns nothing" in found.warning


def test_a_reward_that_tells_answers_apart_gives_no_warning(tmp_path):
    code = f"{ALL}return [float('7' in c[-1]['content']) for c in completions]"
    assert constant_reward(*config_of(tmp_path, code)) == ""


def test_a_relative_pythonpath_means_this_folder(tmp_path, monkeypatch):
    """Before: "libmod is not installed here", as the child has another working folder."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libmod.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "lib")
    found = rehearse(*config_of(tmp_path, f"import libmod\n{ALL}return [float(len(str(c))) for c in completions]"))
    assert not found.missing and not found.refused


def test_a_refused_reward_hears_which_of_its_settings_were_taken_back(tmp_path):
    """Before: only "expected both vectors to have same dtype", while `python rewards.py` shows no error."""
    head = "import torch\ntorch.set_default_dtype(torch.float64)\nWEIGHTS = torch.ones(3)\n"
    found = rehearse(*config_of(tmp_path, f"{head}{ALL}return [float(torch.ones(3) @ WEIGHTS)] * len(completions)"))
    assert "same dtype" in found.refused and "note: rewards.py calls torch.set_default_dtype" in found.refused


def test_the_warning_is_there_before_the_start_and_one_that_takes_long_hides_no_refusal(tmp_path):
    found = rehearse(*config_of(tmp_path, ALL + "return [float('7' in c) for c in completions]"))
    assert "as if it were a text" in found.warning and not found.refused
    slow = "import time\n" + ALL + "time.sleep(60 if '7' in str(completions) else 0)\n    return [0.0, 0.0]"
    found = rehearse(*config_of(tmp_path, slow), time_s=3.0)
    assert not found.late and not found.warning
