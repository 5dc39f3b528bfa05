"""`diloco check`: the reward, asked about the first prompts with the model's own tokenizer, in a process of its own."""

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from diloco.run.config import load_config
from executors.cli.checking.verbs import check_lines
from executors.cli.main import main
from inner import InnerConfig, InnerError
from inner.models.known import folder_or_refusal
from inner.usercode.rehearse import ask_child
from inner.usercode.trial import (
    PromptTrial,
    Trial,
    TriedCompletion,
    count_tokens,
    load_tokenizer,
    run_trial,
    try_reward,
)
from inner.worlds.toolworld import ToolWorld
from tests.support.tiny_models import tiny_model_folder

ROWS = [{"prompt": [{"role": "user", "content": f"What is {n} + 1?"}], "answer": str(n + 1)} for n in range(5)]
GOOD = """def score(completions, answer, **_):
    return [float(c[0]["content"] == a) for c, a in zip(completions, answer)]
"""


@cache
def model_folder() -> Path:
    """A tokenizer with a chat template: all that a check reads of a model."""
    folder = tempfile.TemporaryDirectory(prefix="test-check-")
    atexit.register(folder.cleanup)
    ToolWorld(kinds=2, names=4).tokenizer().save_pretrained(folder.name)
    return Path(folder.name)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "rewards.py").write_text(GOOD)
    (tmp_path / "run.toml").write_text(
        f'name = "x"\n[inner]\nmodel = "{model_folder()}"\n[inner.data]\nprompts = "prompts.jsonl"\n'
        '[inner.rewards]\nfunction = "rewards.py:score"\n'
    )
    return tmp_path


def tried(project: Path, **more: Any) -> Trial:
    config = InnerConfig.from_dict(
        {
            "model": str(model_folder()),
            "data": {"prompts": "prompts.jsonl"},
            "rewards": {"function": "rewards.py:score"},
            "sampling": {"max_completion_length": more.get("room", 64)},
        }
    )
    files = {"prompts": project / "prompts.jsonl", "reward": project / "rewards.py"}
    return run_trial(config, files, rows=more.get("rows", 2), given=more.get("given", ()))


@pytest.mark.slow
def test_it_scores_the_rows_answers_the_given_text_and_nothing(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(project / "run.toml"), "--completion", "2", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["prompts"], told["template"], len(told["trials"])) == (5, True, 3)
    found = [[(s["source"], s["reward"]) for s in t["scored"]] for t in told["trials"]]
    assert found == [[("answer", 1.0), ("given", float(n == 1)), ("empty", 0.0)] for n in range(3)]


@pytest.mark.parametrize("module", ["rehearse", "trial"])
def test_threads_that_a_reward_leaves_are_not_waited_for(project: Path, module: str) -> None:
    """Before: `check` showed nothing until its time was over, because Python waited for them."""
    leaves = "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
    (project / "rewards.py").write_text(leaves + GOOD)
    config = load_config(project / "run.toml")
    asked = {"rows": 1, "given": [], "steps": 1}
    found = ask_child(f"inner.usercode.{module}", config.inner, config.user_files(), asked, time_s=120.0)
    assert not found.late and found.answer is not None and not found.answer.get("refused")


def test_an_answer_that_no_completion_has_room_for_is_told(project: Path) -> None:
    rows = [{"prompt": "count", "answer": " ".join(["k0"] * n), "note": "x"} for n in (2, 3, 9, 12)]
    (project / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (project / "rewards.py").write_text(
        "def score(completions, answer, **_):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    tokenizer = load_tokenizer(str(model_folder()))
    lengths = [len(tokenizer(row["answer"], add_special_tokens=False)["input_ids"]) for row in rows]
    room = lengths[1]
    found = tried(project, rows=3, room=room)
    assert (
        f"the row's answer, has more than inner.sampling.max_completion_length = {room} tokens in 2 of 4" in found.cut
    )
    assert f"({max(lengths)} at most)" in found.cut
    assert check_lines(found, "rewards.py:score")[-1] == f"warning: {found.cut}"
    assert not tried(project, rows=3, room=max(lengths)).cut


def test_without_a_network_and_a_cache_a_check_says_the_ways_out_at_once(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(project / "empty"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("inner.usercode.trial.ask_child", lambda *_, **__: pytest.fail("the tokenizer was asked for"))
    for offline, why in (("1", "offline (HF_HUB_OFFLINE)"), ("0", "refused")):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        assert main(["check", str(project / "run.toml"), "--set", "inner.model=me/absent"]) == 2
        said = capsys.readouterr().err
        assert why in said and str(project / "empty") in said
        assert "--set inner.model=FOLDER" in said and "HF_HUB_CACHE=FOLDER" in said


def test_a_cached_tokenizer_is_read_from_the_cache_and_the_hub_is_not_asked(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = project / "hub" / "models--me--mine"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    shutil.copytree(model_folder(), cache / "snapshots" / "abc")
    (cache / "snapshots" / "abc" / "config.json").write_text("{}")
    monkeypatch.setenv("HF_HUB_CACHE", str(project / "hub"))
    config = InnerConfig.from_dict({"model": "me/mine", "data": {"prompts": "p"}, "rewards": {"function": "r.py:s"}})
    monkeypatch.setattr("inner.models.known.ask_hub", lambda *_: pytest.fail("the Hub was asked"))
    assert folder_or_refusal(config) == cache / "snapshots" / "abc"


@pytest.mark.slow
def test_several_rewards_are_tried_as_their_weighted_sum(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The second says nothing of the empty reply: the first alone counts there, as in training."""
    second = "def brief(completions, **_):\n    return [1.0 if c[0]['content'] else None for c in completions]\n"
    (project / "rewards.py").write_text(GOOD + second)
    text = (project / "run.toml").read_text().replace('[inner.rewards]\nfunction = "rewards.py:score"\n', "")
    lines = '[inner.rewards.functions]\n"rewards.py:score" = 2.0\n"rewards.py:brief" = 0.5\n'
    (project / "run.toml").write_text(text + lines)
    assert main(["check", str(project / "run.toml"), "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert [s["reward"] for s in told["trials"][0]["scored"]] == [2.5, 0.0]  # its own answer, and nothing


def test_tokens_are_those_of_the_chat_template(project: Path) -> None:
    found = tried(project)
    tokenizer = load_tokenizer(str(model_folder()))
    text = tokenizer.apply_chat_template(ROWS[0]["prompt"], tokenize=False, add_generation_prompt=True)
    assert found.tokens == (len(tokenizer(text, add_special_tokens=False)["input_ids"]),) * 2


def test_messages_need_a_template() -> None:
    tokenizer = load_tokenizer(str(model_folder()))
    tokenizer.chat_template = None
    with pytest.raises(InnerError, match="no chat template"):
        count_tokens(tokenizer, [{"role": "user", "content": "x"}])
    assert count_tokens(tokenizer, "1 plus 2") > 0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def score(completions, reference, **_):\n    return []\n", "reference"),
        ("def score(completions, **_):\n    return [0.0]\n", "returned 1 values for 2 completions"),
        ("import nothing_of_this_name\n", "nothing_of_this_name"),
    ],
)
def test_a_reward_that_cannot_work_is_shown_with_its_line(project: Path, code: str, words: str) -> None:
    (project / "rewards.py").write_text(code)
    with pytest.raises(InnerError, match=words):
        tried(project)


CURRICULUM = """def score(completions, trainer_state, **_):
    assert trainer_state.epoch is not None
    return [float(trainer_state.global_step == 0 and trainer_state.max_steps == 6)] * len(completions)
"""


@pytest.mark.slow
def test_a_curriculum_reads_the_start_of_the_run_before_the_start(project: Path) -> None:
    """Before: trainer_state was None, so the trial ended with an AttributeError."""
    (project / "rewards.py").write_text(CURRICULUM)
    text = (project / "run.toml").read_text()
    (project / "run.toml").write_text(f"{text}[fleet]\nsteps = 3\n[outer]\nsync_every = 2\n")
    config = load_config(str(project / "run.toml"))
    found = try_reward(config.inner, config.user_files(), rows=1, steps=6)
    assert set(found.rewards) == {1.0}


@pytest.mark.slow
def test_an_interrupted_trial_is_one_sentence(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / "rewards.py").write_text("def score(completions, **_):\n    raise KeyboardInterrupt\n")
    assert main(["check", str(project / "run.toml")]) == 2
    told = capfd.readouterr().err
    assert "the trial was interrupted: KeyboardInterrupt" in told and "Traceback" not in told


def test_a_reward_that_reads_arguments_gets_its_defaults(project: Path) -> None:
    """Before: `unrecognized arguments: {"inner": …`, our JSON."""
    head = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--w', default='1')\nW = p.parse_args().w\n"
    (project / "rewards.py").write_text(
        f"{head}def score(completions, **_):\n    return [float(W)] * len(completions)\n"
    )
    config = load_config(str(project / "run.toml"))
    assert set(try_reward(config.inner, config.user_files(), rows=1).rewards) == {1.0}


def test_a_reward_that_ends_its_process(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / "rewards.py").write_text("import os\nos._exit(3)\n")
    assert main(["check", str(project / "run.toml")]) == 2
    assert "exit code 3" in capfd.readouterr().err


def test_a_template_that_takes_no_system_message_is_not_the_rewards_fault(project: Path) -> None:
    """Before: "rewards.py:score ended its process …; take the exit out"."""
    raw = {"model": str(tiny_model_folder("gemma2")), "data": {"prompts": "prompts.jsonl", "system": "Be brief."}}
    config = InnerConfig.from_dict({**raw, "rewards": {"function": "rewards.py:score"}})
    files = {"prompts": project / "prompts.jsonl", "reward": project / "rewards.py"}
    with pytest.raises(InnerError, match=r"prompt 1 cannot be written by the chat template .*Leave inner.data.system"):
        run_trial(config, files, rows=1, given=())


def test_toolworld_has_a_tokenizer_of_its_own(project: Path) -> None:
    (project / "prompts.jsonl").write_text(
        json.dumps({"prompt": [{"role": "user", "content": "op0 1 2"}], "answer": "3"}) + "\n"
    )
    raw = {"model": "toolworld", "data": {"prompts": "prompts.jsonl"}, "rewards": {"function": "rewards.py:score"}}
    files = {"prompts": project / "prompts.jsonl", "reward": project / "rewards.py"}
    assert run_trial(InnerConfig.from_dict(raw), files, rows=1, given=()).tokens[0] >= 3


def test_a_model_without_a_tokenizer(project: Path, tmp_path: Path) -> None:
    with pytest.raises(InnerError, match="its tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_a_model_folder_without_a_tokenizer_hears_what_plan_says(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: a sentence of transformers that ended with a colon; `plan` had the whole."""
    (tmp_path / "bare").mkdir()
    adapter = Path(shutil.copytree(model_folder(), tmp_path / "adapter"), "adapter_config.json")
    adapter.write_text('{"base_model_name_or_path": "me/base"}')
    for model, words in [
        ("bare", "has no tokenizer (tokenizer.json, …). Next: "),
        ("prompts.jsonl", "is a file. Name the"),
        ("adapter", "has an adapter (adapter_config.json), of me/base. Merge it"),
    ]:
        typed = ["check", str(project / "run.toml"), "--set", f"inner.model={tmp_path / model}"]
        assert main(typed) == 2 and words in capsys.readouterr().err


def test_prompts_that_end_with_an_answer_and_half_characters_in_a_column(project: Path) -> None:
    """Before: nothing was said, and a lone surrogate ended the trial with "TypeError: TextEncodeInput must be …"."""
    answered = [*ROWS[0]["prompt"], {"role": "assistant", "content": "1"}]
    (project / "prompts.jsonl").write_text(json.dumps({"prompt": answered, "answer": "1 \ud83d"}) + "\n")
    trial = tried(project)
    assert "1 of 1 prompts end with a message of the assistant" in "\n".join(check_lines(trial, "rewards.py:score"))


def test_nothing_to_try() -> None:
    with pytest.raises(InnerError, match="needs a reward function"):
        try_reward(InnerConfig(model="toolworld"), {})
    own = InnerConfig(model="toolworld", data={"prompts": "rows.jsonl"}, sampling={"environment": "world.py:World"})
    with pytest.raises(InnerError, match=r"without a rollout: .* with --steps 1 tries it"):  # it may have get_reward
        try_reward(own, {})


def trial_with(*rewards: float | None) -> Trial:
    return Trial(
        1, (3, 4), False, 0.001, (PromptTrial("p" * 90, tuple(TriedCompletion("a", "b", r) for r in rewards)),)
    )


def test_the_words() -> None:
    lines = check_lines(trial_with(1.0, None), "r.py:f")
    assert lines[0] == "1 prompts of 3 to 4 tokens, as plain text"
    assert lines[1].endswith("ppp…") and [line.split("  ")[-1] for line in lines[2:4]] == [" a: b", " a: b"]
    assert "cannot say" in lines[3] and "2 completions in 1 ms" in lines[4] and len(lines) == 5
    assert "teaches nothing" in check_lines(trial_with(0.5, 0.5), "r.py:f")[-1]
    assert "learns nothing" in check_lines(trial_with(None, None), "r.py:f")[-1]
