"""[eval] in a run: real replicas, one killed in the middle of its share; export --best and eval; what plan refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from diloco.run.config import RunConfig
from diloco.runlog.evaluation import evaluation_words
from diloco.runlog.reader import read_report
from diloco.runlog.summary import summary
from executors.cli.main import main
from rendezvous.stores.open import open_store
from tests.inner.test_toolworld import SMALL, WORLD
from tests.support.audit import check_run
from tests.support.fleet import Fleet

REWARD = """
import os, signal

def score(completions, answer, held_out, **columns):
    if held_out[0] and os.environ.get("DIES_IN_EVALUATION"):
        open(os.environ["DIES_IN_EVALUATION"], "a").write("x")
        if len(open(os.environ["DIES_IN_EVALUATION"]).read()) == 6:  # θ₀, θ₂, θ₃: greedy, then sampled
            os.kill(os.getpid(), signal.SIGKILL)
    return [float(c[-1]["content"].split()[:1] == [str(a)]) for c, a in zip(completions, answer)]
"""
INNER = {
    **SMALL, "loop": "grpo", "model": "toolworld",
    "data": {"prompts": "prompts.jsonl", "text": None, "context_length": 64},
    "rewards": {"function": "rewards.py:score", "retries": 0}, "batch_size": 16,
}  # fmt: skip


def write_files(folder: Path, held_out: int = 48) -> None:
    (folder / "rewards.py").write_text(REWARD)
    rows = list({json.dumps(row["prompt"]): row for row in WORLD.rows(200, seed=3)}.values())
    for name, some, flag in (("prompts", rows[held_out:], False), ("held_out", rows[:held_out], True)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({**row, "held_out": flag}) + "\n" for row in some))


@pytest.mark.slow
def test_a_replica_evaluates_where_it_began_and_where_it_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path, held_out=16)
    fleet = Fleet(
        tmp_path, inner=INNER, outer={"sync_every": 1}, fleet={"replicas": 1, "steps": 1, "min_replicas": 1},
        eval={"prompts": "held_out.jsonl", "samples": 0},
    )  # fmt: skip
    fleet.start("r00")
    assert fleet.wait() == {"r00": [0]}, fleet.logs()
    found = read_report(open_store(fleet.url)).evaluations
    assert [(e.step, e.scores["greedy"]["reward"].prompts, list(e.scores)) for e in found] == [
        (0, 16, ["greedy"]), (1, 16, ["greedy"]),
    ]  # fmt: skip

    assert main(["blame", fleet.url, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["metric"] == "reward on the run's held-out prompts" and [one["name"] for one in told["without"]] == [
        "r00"
    ]
    assert [told["at_from"], told["at_to"]] == [e.scores["greedy"]["reward"].mean for e in found]
    assert told["without"][0]["value"] == told["at_from"]  # without its only replica the run stands where it began

    others = tmp_path / "others.jsonl"
    others.write_text(json.dumps({"prompt": [{"role": "user", "content": "op1 2 3"}], "kind": 1, "a": 2, "b": 3}))
    assert main(["eval", fleet.url, "--prompts", str(others)]) == 2
    told = capsys.readouterr().err
    assert "missing 2 required positional arguments" in told and "columns a, b, kind, prompt" in told
    others.write_text("{")
    assert main(["eval", fleet.url, "--prompts", str(others)]) == 2
    assert f"eval.prompts = '{others}', line 1 is not JSON" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_replica_is_killed_while_it_evaluates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path)
    fleet = Fleet(
        tmp_path, inner=INNER, outer={"sync_every": 2}, fleet={"steps": 3, "min_replicas": 3},
        eval={"prompts": "held_out.jsonl", "every": 2},
    )  # fmt: skip
    fleet.start("r00")
    fleet.start("r01")
    fleet.start("r02", DIES_IN_EVALUATION=str(tmp_path / "asked"))
    codes = fleet.wait()
    assert codes["r00"] == codes["r01"] == [0] and codes["r02"] == [-9], fleet.logs()
    check_run(tmp_path / "run", 3)

    report = read_report(open_store(fleet.url))
    found = {evaluation.step: evaluation for evaluation in report.evaluations}
    assert list(found) == [0, 2, 3]
    scored = {step: found[step].scores["sampled"]["reward"].prompts for step in found}
    assert scored == {0: 48, 2: 48, 3: 32}  # a third of θ₃'s prompts went with it
    assert evaluation_words(report.evaluations).endswith(", 32/48 prompts")
    assert evaluation_words(report.evaluations) in summary(report)

    best = max(found.values(), key=lambda e: (e.headline[1].mean, -e.step)).step
    assert main(["export", fleet.url, "--best", "--to", str(tmp_path / "best")]) == 0
    assert f"best: step {best}, held out greedy" in capsys.readouterr().err
    assert main(["eval", fleet.url, "--step", "2", "--json"]) == 0
    offline = json.loads(capsys.readouterr().out)
    assert offline["greedy"]["reward"]["mean"] == pytest.approx(found[2].scores["greedy"]["reward"].mean, abs=1e-9)
    assert offline["greedy"]["reward"]["prompts"] == 48


def config(folder: Path, **changes: Any) -> RunConfig:
    from tests.support import fleet

    return fleet.config(folder, inner=INNER, eval={"prompts": "held_out.jsonl", **changes})


def run_toml(folder: Path, *lines: str) -> str:
    (folder / "run.toml").write_text("\n".join(lines))
    return str(folder / "run.toml")


PLAIN = (
    "[outer]", "sync_every = 2", "[inner]", 'model = "toolworld"', "batch_size = 16", "[inner.data]",
    'prompts = "prompts.jsonl"', "[inner.rewards]", 'function = "rewards.py:score"',
)  # fmt: skip


@pytest.mark.parametrize(
    "break_it, words",
    [
        ("overlap", "2 of the 48 prompts of eval.prompts are among the training prompts"),
        ("column", "has no column answer"),
        ("line", "eval.prompts = 'held_out.jsonl', line 3 is not JSON"),
        ("file", "eval.prompts: there is no file"),
        ("empty", "eval.prompts = 'held_out.jsonl' is empty"),
        ("key", "unknown setting eval.sample; did you mean eval.samples?"),
    ],
)
def test_plan_refuses_held_out_prompts_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], break_it: str, words: str
) -> None:
    write_files(tmp_path)
    held_out = tmp_path / "held_out.jsonl"
    lines = held_out.read_text().splitlines()
    if break_it == "overlap":
        lines[1:3] = (tmp_path / "prompts.jsonl").read_text().splitlines()[:2]
    elif break_it == "column":
        lines = [json.dumps({k: v for k, v in json.loads(line).items() if k != "answer"}) for line in lines]
    elif break_it == "line":
        lines[2] = "{"
    held_out.write_text("" if break_it == "empty" else "\n".join(lines))
    if break_it == "file":
        held_out.unlink()
    key = "sample = 3" if break_it == "key" else "every = 2"
    toml = run_toml(tmp_path, *PLAIN, "[eval]", 'prompts = "held_out.jsonl"', key)
    assert main(["plan", toml]) == 2
    assert words in capsys.readouterr().err


def test_two_settings_of_eval_are_two_runs_and_none_is_no_mathematics(tmp_path: Path) -> None:
    write_files(tmp_path)
    every_five = config(tmp_path).mathematics()
    assert every_five["eval"] == {"every": 5, "samples": 1, "greedy": True}
    assert config(tmp_path, every=2).mathematics() != every_five
    from tests.support import fleet

    assert "eval" not in fleet.config(tmp_path, inner=INNER).mathematics()


def test_a_supervised_run_has_nothing_to_evaluate(tmp_path: Path) -> None:
    from tests.support import fleet

    write_files(tmp_path)
    with pytest.raises(ValueError, match=r"\[eval\] asks for rewards"):
        fleet.config(tmp_path, eval={"prompts": "held_out.jsonl"})
