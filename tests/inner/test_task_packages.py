"""The real reasoning-gym and verifiers: rows, scores, refusals, and a run of two replicas that learns from a task.

    make test-tasks            an environment of its own, with .venv's packages behind it

Each test runs where its package is installed.
"""

import ast
import importlib.util
import json
import math
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from diloco.runlog.reader import read_report
from inner import InnerError
from inner.tasks import make
from inner.tasks.make import make_rows
from inner.tasks.score import score_replies
from inner.tasks.spec import TaskSpec
from rendezvous.stores.files import FileStore
from tests.support.audit import check_run

ROOT = Path(__file__).parents[2]
TASKSETS = ROOT / "tests" / "data" / "tasksets"
SMOLLM2 = ROOT / ".venv" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SPELLING = "verifiers:spelling-tasks"
gym = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="make test-tasks runs it")
verifiers = pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="make test-tasks runs it")


def rows_of(task: str, size: int = 5, seed: int = 0, *, chat: bool = True, **options: Any) -> list[dict[str, Any]]:
    return make_rows("inner.data.task", TaskSpec(task, size, seed, options), chat=chat).rows


def scores(rows: list[dict[str, Any]], replies: list[str]) -> list[float]:
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    return score_replies(completions=[[{"role": "assistant", "content": text}] for text in replies], **columns)


# ---------------------------------------------------------------------- reasoning-gym


@gym
def test_rows_are_the_packages_own_and_seeds_do_not_overlap() -> None:
    import reasoning_gym

    rows = rows_of("reasoning-gym:chain_sum", 30, 2, max_terms=3)
    own = reasoning_gym.create_dataset("chain_sum", seed=2_000_000, size=30, max_terms=3)
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": own[i]["question"]}] for i in range(30)]
    assert [ast.literal_eval(row["entry"]) for row in rows] == [own[i] for i in range(30)]
    assert rows == rows_of("reasoning-gym:chain_sum", 30, 2, max_terms=3)
    # the package's own next seed has the same rows, but for one
    asked = [
        reasoning_gym.create_dataset("chain_sum", seed=s, size=30)[i]["question"] for s in (0, 1) for i in range(30)
    ]
    assert len(set(asked[:30]) & set(asked[30:])) == 29
    other = {json.dumps(row["prompt"]) for row in rows_of("reasoning-gym:chain_sum", 30, 3, max_terms=3)}
    assert len(other & {json.dumps(row["prompt"]) for row in rows}) < 5


@gym
@pytest.mark.parametrize("name", ["isomorphic_strings", "polynomial_multiplication", "ransom_note"])
def test_datasets_that_walk_through_sets_are_the_same_in_every_process(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for hashes in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", hashes)
        found.append(rows_of(f"reasoning-gym:{name}", 4))
    assert found[0] == found[1]


@gym
@pytest.mark.timeout(900)
def test_every_datasets_scores_are_the_packages_own() -> None:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    from inner.tasks import gym as ours

    odd = {"composite": "its options are objects", "knight_swap": "seconds per row"}
    checked = 0
    for name in sorted(set(DATASETS) - set(odd)):
        spec = TaskSpec(f"reasoning-gym:{name}", 2, 1)
        rows = list(islice(ours.make_rows(spec), 2))
        own = reasoning_gym.create_dataset(name, seed=1_000_000, size=2)
        score = ours.open_scorer(spec)
        for row in rows:
            entry = ast.literal_eval(row["entry"])
            right = row["answer"] or "none"
            for reply in (right, f"So <answer>{right}</answer>", f"{right} x", "garbled", ""):
                answer = right if "<answer>" in reply else reply
                try:
                    expected = float(own.score_answer(answer.strip(), entry))
                except Exception:
                    expected = 0.0
                assert math.isclose(score([reply], [row["entry"]])[0], expected), (name, reply)
                checked += 1
    assert checked == 104 * 10


@gym
def test_a_composite_has_the_rows_and_scores_of_the_package() -> None:
    from reasoning_gym import create_dataset
    from reasoning_gym.composite import DatasetSpec

    parts = [{"name": "chain_sum", "weight": 2.0, "config": {"max_terms": 2}}, "gcd"]
    rows = rows_of("reasoning-gym:composite", 8, 1, datasets=parts)
    specs = [DatasetSpec("chain_sum", 2.0, {"max_terms": 2}), DatasetSpec("gcd", 1.0, {})]
    own = create_dataset("composite", seed=1_000_000, size=8, datasets=specs)
    assert [ast.literal_eval(row["entry"]) for row in rows] == [own[i] for i in range(8)]
    assert {ast.literal_eval(row["entry"])["metadata"]["source_dataset"] for row in rows} == {"chain_sum", "gcd"}
    assert scores(rows, [row["answer"] for row in rows]) == [1.0] * 8


@gym
def test_right_wrong_and_garbled_replies() -> None:
    rows = rows_of("reasoning-gym:chain_sum", 4) + rows_of("reasoning-gym:prime_factorization", 1)
    right = [row["answer"] for row in rows]
    assert scores(rows, right) == [1.0] * 5
    assert scores(rows, [f"I think: <answer> {text} </answer>" for text in right]) == [1.0] * 5
    assert scores(rows, ["twelve"] * 5) == [0.0] * 5, "prime_factorization raises at that"
    assert scores(rows, [""] * 5) == [0.0, 0.0, 0.0, 0.0, 0.01], "and gives a hundredth for nothing"


@gym
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("chain_sums", {}, "has no dataset 'chain_sums'; did you mean reasoning-gym:chain_sum?"),
        ("qqq", {}, "has no dataset 'qqq'; choose one of its 106: https://"),
        ("chain_sum", {"max_term": 2}, "chain_sum has no option 'max_term'; did you mean max_terms?"),
        ("chain_sum", {"seed": 2}, "task_options.seed is set by the run. Write task_seed beside the task"),
        ("chain_sum", {"min_terms": 4, "max_terms": 2}, "refuses these options: .*max_terms must be >= min_terms"),
        ("chain_sum", {"max_terms": "two"}, "refuses these options: TypeError"),
        ("composite", {}, "Must specify at least one dataset"),
        ("composite", {"datasets": ["gdc"]}, "has no dataset 'gdc'; did you mean reasoning-gym:gcd?"),
        ("composite", {"datasets": [{"name": "gcd", "config": {"n": 2}}]}, "gcd has no option 'n'; choose one of"),
        ("composite", {"datasets": [{"name": "gcd", "weight": 0}]}, "refuses these .*Weight must be positive"),
    ],
)
def test_what_the_package_refuses(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InnerError, match=words):
        make_rows("inner.data.task", TaskSpec(f"reasoning-gym:{name}", 5, 0, options), chat=True)


# ---------------------------------------------------------------------- verifiers


@pytest.fixture
def tasksets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's taskset packages, for this process and those that it starts."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{TASKSETS}:{ROOT}")
    for folder in (TASKSETS, tmp_path):  # a child process has this process's sys.path
        monkeypatch.syspath_prepend(str(folder))
    return tmp_path


@verifiers
def test_a_tasksets_rewards_are_weighted_and_summed(tasksets: Path) -> None:
    rows = rows_of(SPELLING, 20, system="Only the word.")
    assert len(rows) == 20 and [m["role"] for m in rows[0]["prompt"]] == ["system", "user"]
    words = [json.loads(row["entry"])["word"] for row in rows]
    assert scores(rows, [w[::-1] for w in words]) == [1.25] * 20
    assert scores(rows, ["x" * len(w) for w in words]) == [0.25] * 20
    assert scores(rows, ["?"] * 20) == [0.0] * 20
    assert {r["prompt"][1]["content"] for r in rows_of(SPELLING, 8, 1, system="s")} != {
        r["prompt"][1]["content"] for r in rows_of(SPELLING, 8, 2, system="s")
    }


@verifiers
def test_the_scores_are_those_of_a_trace_that_the_package_made(tasksets: Path) -> None:
    """`vf-replay` scores saved traces with Task.score; here it scores one that its own graph committed."""
    import asyncio

    import verifiers.v1 as vf
    from spelling_tasks import SpellingTaskset
    from verifiers.v1.state import state_cls

    taskset = SpellingTaskset(vf.taskset_config_type("spelling-tasks")(id="spelling-tasks"))
    rows = {json.loads(row["entry"])["idx"]: row for row in rows_of(SPELLING, 20)}
    for task, reply in zip(taskset, ["dewolb", "deswolb", "garbled", ""], strict=False):
        info = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=vf.AgentConfig())
        said = vf.MessageNode(message=vf.AssistantMessage(content=reply), sampled=True)
        trace: Any = vf.Trace(task=info, agent=agent, state=state_cls(type(task))(), nodes=[said])
        asyncio.run(task.score(trace))
        assert scores([rows[task.data.idx]], [reply]) == [trace.reward]


TASKSET = """
import verifiers.v1 as vf
__all__ = ["NeedyTaskset"]
class NeedyTask(vf.Task[vf.TaskData]):
    {body}
class NeedyTaskset(vf.Taskset[NeedyTask, vf.TasksetConfig]):
    def load(self):
        return [NeedyTask(vf.TaskData(prompt={prompt}{data}), self.config.task)]
"""
REWARD = "@vf.reward()\n    async def good(self, trace: vf.Trace) -> float:\n        return 1.0\n    "


@verifiers
@pytest.mark.parametrize(
    ("body", "data", "words"),
    [
        (REWARD + "NEEDS_CONTAINER = True", "", r"task 0 \(NeedyTask\) needs a container. Choose a taskset"),
        (REWARD + "scoring_deferred = True", "", r"task 0 \(NeedyTask\) defers its scoring"),
        (REWARD, ", name='fix', image='debian'", r"task fix \(NeedyTask\) needs a container of the image debian"),
        (REWARD, ", skills=['/x']", r"task 0 \(NeedyTask\) has skills"),
        ("pass", "", "has no reward"),
    ],
)
def test_tasks_that_need_a_container_are_refused_by_name(tasksets: Path, body: str, data: str, words: str) -> None:
    (tasksets / "needy.py").write_text(TASKSET.format(body=body, prompt="'Do it.'", data=data))
    with pytest.raises(InnerError, match=f"inner.data.task = 'verifiers:needy': taskset needy: .*{words}"):
        rows_of("verifiers:needy")


@verifiers
@pytest.mark.parametrize(
    ("body", "data"),
    [
        (REWARD, ", artifacts=[{'source': '/logs/x'}]"),
        (REWARD + "async def setup(self, trace, runtime): ...", ""),
        (REWARD.replace("trace: vf.Trace", "trace, runtime"), ""),
        (REWARD + "@classmethod\n    def toolsets(cls, config): return [object()]", ""),
        (REWARD + "@vf.stop\n    async def enough(self, trace: vf.Trace) -> bool: ...", ""),
    ],
)
def test_tasks_that_need_more_than_a_reply_are_for_an_agent(tasksets: Path, body: str, data: str) -> None:
    (tasksets / "needy.py").write_text(TASKSET.format(body=body, prompt="'Do it.'", data=data))
    assert make_rows("inner.data.task", TaskSpec("verifiers:needy", 9, 0), chat=True).acts


LAXLY = """
import math
from typing import Any
import verifiers.v1 as vf
__all__ = ["LaxTaskset"]
class LaxData(vf.TaskData):
    info: dict[str, Any] = {{}}
    pair: tuple[int, int] = (1, 2)
    top: float = 1.0
class LaxTask(vf.Task{declared}):
    @vf.reward()
    async def good(self, trace: vf.Trace) -> float:
        return float(self.data.info["pair"] == (1, 2))
class LaxTaskset(vf.Taskset[LaxTask, vf.TasksetConfig]):
    def load(self):
        return [LaxTask(LaxData(prompt="a", {data}), self.config.task)]
"""


@verifiers
@pytest.mark.parametrize(
    ("declared", "data", "words"),
    [
        ("[LaxData]", "info={'pair': (1, 2)}", r"changed: info = \{'pair': \(1, 2\)\} is \{'pair': \[1, 2\]\}\. Give"),
        ("[LaxData]", "info={'m': {1: 2}}", r"changed: info = \{'m': \{1: 2\}\} is \{'m': \{'1': 2\}\}\. Give"),
        ("[LaxData]", "top=math.inf", r"changed: top: Input should be a valid number\. Give that field of LaxData"),
        ("", "info={}", r"the class LaxTask declares TaskData, so a reward .*: class LaxTask\(vf.Task\[LaxData\]\)\."),
    ],
)
def test_data_that_the_scorer_would_read_as_other_data_are_refused(
    tasksets: Path, declared: str, data: str, words: str
) -> None:
    """`vf-eval` scores the task itself: 1 for the first; a scorer of the stored row would give it 0."""
    (tasksets / "laxly.py").write_text(LAXLY.format(declared=declared, data=data))
    with pytest.raises(InnerError, match=words):
        rows_of("verifiers:laxly")


ENDLESS = TASKSET.replace("def load", "INFINITE = True\n    def load").replace(
    "        return [", "        while True:\n            yield from ["
)


@verifiers
def test_an_infinite_taskset_that_repeats_its_tasks_leaves_nothing_to_hold_out(
    tasksets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inner.tasks import tasksets as module

    (tasksets / "endless.py").write_text(ENDLESS.format(body=REWARD, prompt="'Do it.'", data=""))
    monkeypatch.setattr(module, "MOST", 50)
    spec = TaskSpec("verifiers:endless", 3, 0)
    assert len(make.take_rows(spec, chat=True, known=[]).rows) == 3
    with pytest.raises(InnerError, match="all 50 rows that the task makes are among the training prompts"):
        make.take_rows(spec, chat=True, known=["Do it."])


@verifiers
def test_options_may_name_files_beside_the_config_only_for_the_rows(
    tasksets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows carry the system prompt. A judge reads its prompt where the replica runs."""
    (tasksets / "brief.txt").write_text("Be brief.")
    spec = TaskSpec(SPELLING, 3, 0, {"system_prompt": "brief.txt"})
    rows = make_rows("inner.data.task", spec, chat=True, folder=tasksets).rows
    assert rows[0]["prompt"][0] == {"role": "system", "content": "Be brief."}
    assert scores(rows, ["?"] * 3) == [0.0] * 3, "in another folder, as on a replica"
    judged = TaskSpec(SPELLING, 3, 0, {"task": {"judges": [{"id": "reference", "prompt": "brief.txt"}]}})
    (tasksets / "graders.py").write_text("async def length(task, trace):\n    return 1.0")
    plugged = TaskSpec(SPELLING, 3, 0, {"task": {"rewards": {"length": {"fn": "graders.py:length"}}}})
    for asked, name in ((judged, "brief\\.txt"), (plugged, ".*graders\\.py")):  # the rows had loaded graders.py before
        with pytest.raises(InnerError, match=rf"No such file .*'{name}' \(replicas do not run in this folder: give"):
            make_rows("inner.data.task", asked, chat=True, folder=tasksets)


@verifiers
def test_other_tasksets_that_cannot_be_used(tasksets: Path) -> None:
    (tasksets / "silent.py").write_text(TASKSET.format(body=REWARD, prompt="None", data=""))
    (tasksets / "unfit.py").write_text("__all__ = []")
    (tasksets / "older.py").write_text("import verifiers as vf\ndef load_environment(**kwargs): ...")
    for name, options, words in (
        ("silent", {}, "the prompt of task 0 is not text"),
        ("unfit", {}, "cannot use 'unfit' as a taskset"),
        ("older", {}, r"'MyTaskset'\]`\)\. .* with `load_environment` needs verifiers before 0\.3"),
        ("nothere", {}, "taskset package 'nothere' cannot be imported"),
        ("harbor", {}, "taskset harbor .*"),
        ("spelling-tasks", {"fist": 3}, "has no option 'fist'; did you mean first?"),
        ("spelling-tasks", {"first": "a"}, "refuses these options: first: Input should be a valid integer"),
        ("spelling-tasks", {"first": 99}, "it makes no rows"),
    ):
        with pytest.raises(InnerError, match=words):
            rows_of(f"verifiers:{name}", **options)
    with pytest.raises(InnerError, match=r"its prompts have 2 messages, the first: 'Be brief\.'"):
        rows_of(SPELLING, chat=False, system="Be brief.")


# ---------------------------------------------------------------------- a run

TOML = """
[outer]
sync_every = 2
[fleet]
replicas = 2
min_replicas = 2
steps = 2
[inner]
model = "{model}"
batch_size = 4
lora = {{r = 4}}
[inner.data]
task = "{task}"
task_size = 12
[inner.sampling]
num_generations = 4
max_completion_length = 6
[eval]
task = "{task}"
task_size = 6
every = 2
samples = 0
"""


@gym
@verifiers
@pytest.mark.skipif(not SMOLLM2.exists(), reason="make smollm2 fetches the model")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("task", ["reasoning-gym:chain_sum", SPELLING])
def test_two_replicas_learn_from_a_task(tasksets: Path, task: str) -> None:
    (tasksets / "run.toml").write_text(TOML.format(model=SMOLLM2, task=task))
    run = tasksets / "run"

    def diloco(*argv: str) -> str:
        command = [sys.executable, "-m", "executors.cli.main", *argv]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tasksets, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    said = diloco("check", "run.toml", "--completion", "7")
    assert "12 prompts" in said and f"{task} answered" in said
    assert "nothing was started" in diloco("plan", "run.toml", "--run", str(run))
    assert "eval.task: makes 6 rows" in diloco("train", "run.toml", "--run", str(run))
    check_run(run, 2)
    found = read_report(FileStore(str(run))).evaluations
    assert [(e.step, e.scores["greedy"]["reward"].prompts) for e in found] == [(0, 6), (2, 6)]
    record = json.loads((run / "run.json").read_text())
    assert record["config"]["inner"]["data"]["task"] == task
    prompts, held_out = ([json.loads(line)["prompt"] for line in (run / record["files"][kind]["key"]).open()]
                         for kind in ("prompts", "eval"))  # fmt: skip
    assert len(prompts) == 12 and not [p for p in held_out if p in prompts]
