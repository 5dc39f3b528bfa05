"""Tasks of packages as far as no package is needed: spelling, settings, what is refused on the laptop."""

import json
from pathlib import Path
from typing import Any

import pytest

from diloco.run.config import ConfigError, RunConfig
from diloco.run.data_files import gather_data
from diloco.run.sections import EvalConfig
from inner import InnerConfig, InnerError
from inner.data.prompts import load_prompts
from inner.settings.task import EVAL, DataSettings
from inner.tasks import make, score, spec
from inner.tasks.gym import as_literal
from inner.tasks.make import question_of
from inner.tasks.score import reply_text
from inner.tasks.spec import TaskSpec, is_task

SUM = "reasoning-gym:chain_sum"


def settings(**data: Any) -> RunConfig:
    return RunConfig.from_dict({"inner": {"model": "me/model", "data": data}})


def test_a_task_is_prompts_and_reward(tmp_path: Path) -> None:
    config = settings(task=SUM, system="Be brief.", task_options={"max_terms": 2})
    assert config.inner.named_files == {"prompts": SUM}
    assert config.inner.data.task_spec == TaskSpec(SUM, 1000, 0, {"max_terms": 2})
    assert RunConfig.from_dict(config.to_dict()) == config
    assert config.mathematics() != settings(task=SUM, system="Be brief.").mathematics()
    with pytest.raises(ConfigError, match=r"inner\.data\.task = 'reasoning-gym:chain_sum' is not a single file yet"):
        config.user_files()


def test_a_held_out_task_takes_the_options_of_the_same_task() -> None:
    inner = settings(task=SUM, task_options={"max_terms": 2}).inner
    assert EvalConfig(task=SUM).task_spec(inner) == TaskSpec(SUM, 200, 1, {"max_terms": 2})
    assert EvalConfig(task="reasoning-gym:gcd").task_spec(inner).options == {}
    assert EvalConfig(task=SUM, task_options={}).task_spec(inner).options == {}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"task": SUM, "prompts": "a.jsonl"}, r"inner.data.task = '.*' is set beside inner.data.prompts = 'a.jsonl'"),
        ({"prompts": SUM}, r'inner.data.prompts = "reasoning-gym:chain_sum" is a task. Write inner.data.task = '),
        ({"task": "chain_sum"}, r"inner.data.task = 'chain_sum' names no task. Write reasoning-gym:NAME or verifiers:"),
        ({"task": "verifiers:"}, r"inner.data.task = 'verifiers:' names no task"),
        ({"task": SUM, "task_size": 0}, r"inner.data.task_size = 0 must be greater than 0"),
        ({"task": SUM, "columns": {"a": "b"}}, r"columns = .* read only where inner.data.prompts or eval.prompts is"),
    ],
)
def test_settings_that_contradict_each_other(data: dict[str, Any], words: str) -> None:
    with pytest.raises((InnerError, ConfigError), match=words):
        settings(**data)


def test_columns_are_renamed_in_files_alone(tmp_path: Path) -> None:
    """Of training prompts and held-out ones, one may be a file and the other a task."""
    columns = {"question": "prompt"}
    (tmp_path / "rows.jsonl").write_text('{"question": "2 + 2?"}\n')
    (tmp_path / "task.jsonl").write_text('{"prompt": "3 + 3?"}\n')
    for file, task in (("prompts", EVAL), (EVAL, "prompts")):
        files = {file: tmp_path / "rows.jsonl", task: tmp_path / "task.jsonl"}
        data = DataSettings(columns=columns)
        assert load_prompts("rows.jsonl", files, data, kind=file) == [{"prompt": "2 + 2?"}]
        assert load_prompts(SUM, files, data, kind=task) == [{"prompt": "3 + 3?"}]
    inner = {"model": "me/model", "data": {"task": SUM, "columns": columns}}
    RunConfig.from_dict({"inner": inner, "eval": {"prompts": "rows.jsonl"}}, tmp_path)
    with pytest.raises(ConfigError, match=r"inner\.data\.columns = .* does nothing here"):
        RunConfig.from_dict({"inner": inner, "eval": {"task": SUM}}, tmp_path)


def test_settings_of_a_task_without_one() -> None:
    with pytest.raises(InnerError, match=r"inner.data.task_seed = 3 does nothing here.*inner.data.task is set"):
        InnerConfig.from_dict({"data": {"task_seed": 3}})
    with pytest.raises(InnerError, match=r"eval.task_size does nothing without eval.task"):
        EvalConfig(prompts="a.jsonl", task_size=3)
    with pytest.raises(InnerError, match=r"eval.task = .* is set beside eval.prompts"):
        EvalConfig(prompts="a.jsonl", task=SUM)
    with pytest.raises(InnerError, match=r"inner.data.task = .*loop"):
        InnerConfig.from_dict({"loop": "supervised", "model": "tiny", "data": {"task": SUM, "text": "a.txt"}})


@pytest.mark.parametrize("package", sorted(spec.MODULES))
def test_a_package_that_is_not_installed(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(spec.MODULES, package, "no_such_module_at_all")
    words = rf"{package} is not installed here. `pip install 'serverless-diloco\[{package}\]'`"
    with pytest.raises(ConfigError, match=words):
        gather_data(settings(task=f"{package}:anything"))


def test_a_process_that_dies_is_reported_with_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make.sys, "executable", "/bin/false")
    with pytest.raises(InnerError, match=r"inner.data.task = 'reasoning-gym:chain_sum': its process ended with exit"):
        make.make_rows("inner.data.task", TaskSpec(SUM, 3, 0), chat=True)


# ---------------------------------------------------------------------- with a package of this test


def fake_rows(wanted: TaskSpec) -> Any:
    for n in range(2 * wanted.size):
        yield {"prompt": [{"role": "user", "content": f"{n} + {wanted.seed}?"}], "answer": str(n), "entry": repr(n)}


class Fake:
    """A package's file: the score of a reply is 1 for the entry itself."""

    make_rows = staticmethod(fake_rows)

    @staticmethod
    def open_scorer(wanted: TaskSpec) -> Any:
        return lambda replies, entries: [float(r == e) for r, e in zip(replies, entries, strict=True)]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec.metadata, "version", lambda name: "1.2")
    monkeypatch.setitem(spec.MODULES, "reasoning-gym", "json")
    monkeypatch.setattr(score, "package_module", lambda wanted: Fake)
    monkeypatch.setattr(make, "package_module", lambda wanted: Fake)


def test_rows_that_training_has_are_left_out_and_others_come(package: None) -> None:
    made = make.take_rows(TaskSpec(SUM, 3, 5), chat=False, known=["0 + 5?", "2 + 5?"])
    assert [row["prompt"] for row in made.rows] == ["1 + 5?", "3 + 5?", "4 + 5?"] and made.left_out == 2
    with pytest.raises(InnerError, match="all 6 rows that the task makes are among the training prompts"):
        make.take_rows(TaskSpec(SUM, 3, 5), chat=True, known=[f"{n} + 5?" for n in range(6)])


def test_a_rows_columns_say_who_scores_it(package: None) -> None:
    rows = [
        row for seed in (1, 2) for row in make.take_rows(TaskSpec(SUM, 2, seed), chat=True, known=()).rows
    ]  # fmt: skip
    assert [TaskSpec.from_json(row["task"]) for row in rows][::2] == [
        TaskSpec(SUM, 2, 1, version="1.2"), TaskSpec(SUM, 2, 2, version="1.2"),
    ]  # fmt: skip
    columns = {name: [row[name] for row in rows] for name in ("task", "entry", "answer")}
    replies = [[{"role": "assistant", "content": text}] for text in ("0", "0", "0", "1")]
    assert score.score_replies(completions=replies, prompts=[], **columns) == [1.0, 0.0, 1.0, 1.0]


def test_rows_of_another_version_are_not_scored(package: None) -> None:
    text = json.dumps({"task": SUM, "size": 1, "seed": 0, "options": {}, "version": "1.1"})
    with pytest.raises(InnerError, match=r"by reasoning-gym 1.1, and this machine has 1.2.*install reasoning-gym==1.1"):
        score.score_replies(["x"], [text], ["0"])


def test_small_words() -> None:
    assert is_task(SUM) and not is_task("hub:a/b") and not is_task(["verifiers:a"]) and not is_task("reasoning-gym")
    assert reply_text([{"role": "tool", "content": "a"}, {"role": "assistant", "content": None}]) == ""
    assert question_of([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]) == question_of("q")
    assert as_literal({1: (2, "a")}) == "{1: (2, 'a')}"
    with pytest.raises(InnerError, match="have values that are no literals"):
        as_literal({"a": object()})
