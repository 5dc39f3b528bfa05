"""`plan` and training agree: what plan accepts takes two inner steps and an evaluation, and what it refuses takes none.

    a cell     architecture and template × rows × columns × reward × adapter × channels, drawn with a seed
    plan       executors.preflight.preflight, its two children's work done in this process
    training   as a replica does it: the start model published, read, the loop built, two inner steps, [eval]'s rows

Not promised: all of the product; that a model of real size fits.
"""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers.utils import logging as transformers_logging

from diloco.run.config import RunConfig
from diloco.run.data_files import gather_data
from diloco.run.sections import EvalConfig
from executors.platforms.places import Place
from executors.preflight import checks
from executors.preflight.run_url import UsageError
from inner import InnerConfig, Seeds
from inner.data.prompts import load_prompts
from inner.errors import InnerError
from inner.train.build import build_inner, publish_model
from inner.train.dry_run import DryRun, check_start
from inner.usercode.rehearse import copy_files, run_checks, try_answers
from tests.support.tables import merge_tables
from tests.support.tiny_models import ARCHITECTURES, tiny_model_folder

torch.set_num_threads(1)
transformers_logging.disable_progress_bar()

# what plan refuses although a replica would take steps: it would learn from a prompt without the question
TEACHES_NOTHING = ("is left out of",)

ASKED = {"role": "user", "content": "2 + 2?"}
TOLD = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
OTHER_CALL = {"type": "function", "function": {"name": "add", "arguments": {"city": "Rome"}}}


PARTS = [{"type": "text", "text": "2 + 2?"}, {"type": "text", "text": " Say it."}]
SAID = {"role": "tool", "name": "add", "content": "1"}


def called(call: Any) -> list[Any]:
    return [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "1"},
        ASKED,
    ]


PROMPTS: dict[str, list[Any]] = {
    "chats": [[ASKED], [{"role": "user", "content": "3 + 3?"}]],
    "texts": ["2 + 2?", "<s>[INST] 3 + 3? [/INST]"],
    "parts": [
        [{"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]}],
        [ASKED],
    ],
    "system": [[TOLD, ASKED], [TOLD, ASKED]],
    "turns": [[ASKED, {"role": "assistant", "content": "4"}, ASKED], [ASKED]],
    "calls": [called(CALL), called(OTHER_CALL)],
    "no content": [
        [ASKED, {"role": "assistant", "tool_calls": [CALL]}, SAID],
        [ASKED],
    ],
    "last is the assistant's": [[ASKED, {"role": "assistant", "content": "It is"}], [ASKED]],
    "two users": [[ASKED, ASKED], [ASKED]],
    "long": [[{"role": "user", "content": "x" * 300}], [ASKED]],
    "odd": [[{"role": "user", "content": "é\u0301 <|im_end|> {{ m }} \x00"}], [ASKED]],
    "half a pair": [[{"role": "user", "content": "a \ud800"}], [ASKED]],
    "a number": [[{"role": "user", "content": 7}], [ASKED]],
    "nothing": [[{"role": "user", "content": ""}], [ASKED]],
    "an object": [[{"role": "user", "content": {"text": "2 + 2?"}}], [ASKED]],
    "image": [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}], [ASKED]],
    "from": [[{"from": "human", "value": "2 + 2?"}], [ASKED]],
    "developer": [[{"role": "developer", "content": "Be brief."}, ASKED], [ASKED]],
    "human": [[{"role": "human", "content": "2 + 2?"}], [ASKED]],
    "mixed": ["2 + 2?", [ASKED]],
    "blank": [" ", " "],
}
COLUMNS: dict[str, list[dict[str, Any]]] = {
    "texts": [{"answer": "4"}, {"answer": "6"}],
    "types": [{"answer": 7}, {"answer": "Paris"}],
    "large": [{"answer": 2**70}, {"answer": [{"a": None}, 1.5]}],
    "completion": [{"answer": "4", "completion": "4"}, {"answer": "6", "completion": [ASKED]}],
    "image": [{"answer": "4", "image": None}, {"answer": "6", "image": "a.png"}],
    "images": [{"answer": "4", "images": []}, {"answer": "6", "images": []}],
    "some images": [{"answer": "4", "images": []}, {"answer": "6", "images": ["a.png"]}],
    "taken": [{"answer": "4", "completions": "4"}, {"answer": "6", "completions": "6"}],
    "self": [{"answer": "4", "self": 1}, {"answer": "6", "self": 2}],
    "odd": [{"answer": "4", "my column": 1, "": 2, "环境": 3}, {"answer": "6", "my column": 1, "": 2, "环境": 3}],
    "environment": [
        {"answer": "4", "environment": "a", "tools": [1]},
        {"answer": "6", "environment": "b", "tools": []},
    ],
}
SCORE = "    return [float(i % 2) for i, _ in enumerate(completions)]\n"
REWARDS = {
    "plain": f"def score(completions, **columns):\n{SCORE}",
    "a column": f"def score(completions, answer, **columns):\n    assert len(answer) == len(completions)\n{SCORE}",
    "async": f"async def score(completions, prompts, **columns):\n{SCORE}",
    "completion": f"def score(completions, completion, **columns):\n{SCORE}",
    "no columns": f"def score(completions):\n{SCORE}",
    "misspelt": f"def score(completions, answr, **columns):\n{SCORE}",
    "sibling": f"from helper import ONE\ndef score(completions, **columns):\n    assert ONE == 1\n{SCORE}",
    "no such": "import no_such_package_of_mine\n" + f"def score(completions, **columns):\n{SCORE}",
    "a file": f"ONE = open('helper.py').read()\ndef score(completions, **columns):\n{SCORE}",
    "numpy": f"import numpy\ndef score(completions, **columns):\n{SCORE.replace('float', 'numpy.float32')}",
    "short": "def score(completions, **columns):\n    return [1.0] * 3\n",
    "none": "def score(completions, **columns):\n    return [None for _ in completions]\n",
    "logs": f"def score(completions, log_metric, trainer_state, **columns):\n    log_metric('n', 1.0)\n{SCORE}",
}
WORLD = '''
class World:
    def reset(self, **row):
        self.row = row
    def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: first
            b: second
        """
        return a + b
'''
ENVIRONMENTS = {
    "rows": WORLD,
    "no tools": "class World:\n    def reset(self, **row):\n        pass\n",
    "an argument": WORLD.replace("**row", "answer"),
    "says": WORLD.replace("self.row = row", "return ' Think.'"),
    "no tools, says": "class World:\n    def reset(self, **row):\n        return ' Think.'\n",
}
LORA: dict[str, dict[str, Any]] = {
    "all": {"lora": {"r": 2}},
    "names": {"lora": {"r": 2, "targets": ["q_proj", "v_proj"]}},
    "experts": {"lora": {"r": 2, "dropout": 0.1}},
    "head": {"lora": {"r": 2, "targets": ["q_proj", "lm_head"]}},
    "none such": {"lora": {"r": 2, "targets": ["query"]}},
    "frozen": {"lora": {"r": 2, "freeze_a": True, "targets": ["c_attn"]}},
}
CHANNELS: dict[str, dict[str, Any]] = {
    "rollout": {"sdpo": {"weight": 0.1, "context": "rollout"}},
    "hint": {"sdpo": {"weight": 0.1}},
    "replay": {"replay": {"weight": 0.1, "pairs": "pairs.jsonl"}},
    "simpo": {"replay": {"weight": 0.1, "pairs": "pairs.jsonl", "variant": "simpo"}},
    "kl": {"trl": {"beta": 0.04}},
    "overlong": {"grpo": {"soft_overlong_tokens": 2}},
    "dynamic": {"grpo": {"dynamic_sampling": 1}},
    "weights": {"trl": {"reward_weights": [1.0, 0.5]}},
    "one weight": {"trl": {"reward_weights": [0.5]}},
    "switch": {"trl": {"chat_template_kwargs": {"enable_thinking": False}}},
    "truncated": {"trl": {"mask_truncated_completions": True}},
    "fp32 head": {"trl": {"cast_lm_head_to_fp32": True}},
    "system": {"data": {"system": "Be brief."}},
    "muon": {"optimizer": "muon"},
}
PAIR = {"state_id": "s1", "state_messages": [ASKED], "chosen": "ls", "rejected": "rm -r /", "n_teachers_agreeing": 2}


@dataclass(frozen=True)
class Cell:
    model: str
    prompts: str = "chats"
    columns: str = "texts"
    reward: str = "plain"
    environment: str = ""
    lora: str = ""
    channel: str = ""


def drawn_cells(number: int, seed: int) -> list[Cell]:
    """Each has one odd thing, or two."""
    rng = random.Random(seed)
    menus: dict[str, Any] = {
        "prompts": PROMPTS,
        "columns": COLUMNS,
        "reward": REWARDS,
        "environment": ENVIRONMENTS,
        "lora": LORA,
        "channel": CHANNELS,
    }
    whole = [(name, choice) for name, menu in menus.items() for choice in menu]
    cells = list[Cell]()
    while len(cells) < number:
        for one in rng.sample(whole, len(whole)):
            odd = dict([one, *rng.sample(whole, rng.randrange(2))])
            cells.append(replace(Cell(rng.choice(list(ARCHITECTURES))), **odd))
    return cells[:number]


def write_task(cell: Cell, folder: Path) -> RunConfig:
    rows = zip(PROMPTS[cell.prompts], COLUMNS[cell.columns], strict=True)
    lines = [json.dumps({"prompt": prompt, **columns}) + "\n" for prompt, columns in rows]
    others = [line.replace("2 + 2?", "5 + 5?").replace("3 + 3?", "6 + 6?") for line in lines]
    known = [json.loads(line)["prompt"] for line in lines]
    held_out = [line for line in others if json.loads(line)["prompt"] not in known]
    (folder / "rows.jsonl").write_text("".join(lines))
    (folder / "held_out.jsonl").write_text("".join(held_out))
    (folder / "pairs.jsonl").write_text(json.dumps(PAIR) + "\n")
    (folder / "code.py").write_text(REWARDS[cell.reward])
    (folder / "helper.py").write_text("ONE = 1\n")
    settings: dict[str, Any] = {
        "model": str(tiny_model_folder(cell.model)),
        "data": {"prompts": "rows.jsonl"},
        "rewards": {"function": "code.py:score", "retries": 0},
        "sampling": {"num_generations": 2, "max_completion_length": 4},
        "batch_size": 4,
    }
    if cell.environment:
        (folder / "world.py").write_text(ENVIRONMENTS[cell.environment])
        settings["sampling"]["environment"] = "world.py:World"
    inner = InnerConfig.from_dict(merge_tables(settings, LORA.get(cell.lora, {}), CHANNELS.get(cell.channel, {})))
    evaluation = EvalConfig(prompts="held_out.jsonl", every=1) if held_out else None
    return gather_data(RunConfig(name="x", inner=inner, eval=evaluation, folder=folder))


# -------------------------------------------------------------------- plan


def plan_says(config: RunConfig, scratch: Path) -> str:
    """ "" or the refusal."""

    def rehearse(inner: InnerConfig, files: Any, *, steps: int) -> Any:
        copies = {k: Path(v) for k, v in copy_files(files, scratch).items()}
        found = run_checks(inner, copies)
        return found if found.refused else try_answers(found, inner, copies)

    def dry_run(inner: InnerConfig, files: Any, folder: Path, held_out: Any = None) -> DryRun:
        copies = {k: Path(v) for k, v in copy_files(files, scratch).items()}
        try:
            return DryRun(note=check_start(inner, copies, folder, held_out))
        except InnerError as error:
            return DryRun(refused=str(error))

    scratch.mkdir()
    with patch("inner.usercode.rehearse.rehearse", rehearse), patch("inner.train.dry_run.dry_run", dry_run):
        try:
            checks.preflight(config, "run.toml", "", [Place("local")])
        except UsageError as error:
            return str(error)
    return ""


# -------------------------------------------------------------------- training


def training_says(config: RunConfig, scratch: Path) -> str:
    """ "" or how a replica ended before it had taken two inner steps and evaluated."""
    scratch.mkdir()
    files = {k: Path(v) for k, v in copy_files(config.user_files(), scratch).items()}
    steps = []
    try:
        publish_model(config.inner, scratch / "start")
        loop: Any = build_inner(config.inner, scratch / "start", files, Seeds(data=0, noise=0))
        loop.optimizer.register_step_post_hook(lambda *_: steps.append(1))
        loop.train(lambda: len(steps) == 2)
        if config.eval is not None:
            rows = load_prompts(config.eval.source, files, config.inner.data, kind="eval")
            loop.score(rows, greedy=True, seed=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def both_say(cell: Cell, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The words of plan and training: alike if the settings contradict each other, so that nothing can be launched."""
    empty = folder / "empty"
    empty.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.chdir(empty)  # a replica's current folder has none of the user's files
    try:
        config = write_task(cell, folder)
    except InnerError as error:
        return str(error), str(error)
    return plan_says(config, folder / "plan"), training_says(config, folder / "training")


def agree(plan: str, training: str) -> bool:
    return bool(plan) == bool(training) or any(words in plan for words in TEACHES_NOTHING)


# a cell, and what plan says of it; "" for yes
NAMED: list[tuple[Cell, str]] = [
    (Cell("gemma2", channel="system"), "takes no system message. Leave inner.data.system out"),
    (Cell("gemma", prompts="system"), "takes no system message. Take the system message out"),
    (Cell("llama:pad"), ""),
    (Cell("llama:cut"), "the model's embeddings end at 49"),
    (Cell("llama:endless"), "its tokenizer has no eos_token"),
    (Cell("gpt2", prompts="long"), "more than the 256 positions"),
    (Cell("opt", prompts="long"), "more than the 256 positions"),
    (Cell("gpt_neox", prompts="long"), ""),
    (Cell("qwen3", columns="image"), "column 'image' would be shown to the model"),
    (Cell("qwen3", columns="images"), ""),
    (Cell("qwen3", columns="completion", reward="completion"), ""),
    (Cell("qwen3", reward="completion"), "it asks for one 'completion', and is called once with all completions"),
    (Cell("llama", lora="head"), "lm_head is the head"),
    (Cell("llama", lora="none such"), "It has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj. Correct"),
    (Cell("qwen3_moe", lora="experts"), "example inner.lora.targets; the model's linear layers are k_proj, o_proj,"),
    (Cell("phi3", channel="rollout"), ""),
    (Cell("qwen3", channel="weights"), "has 2 weights, and the run has 1 reward function"),
    (Cell("qwen3", reward="none"), "returns None for every completion"),
    (Cell("qwen3", reward="sibling"), ""),
    (Cell("qwen3", reward="a file"), "No such file or directory: 'helper.py'"),
    (Cell("qwen3", columns="types"), ""),
    (Cell("qwen3", prompts="parts"), ""),
    (Cell("olmo2", prompts="developer"), ""),
    (Cell("olmo2", prompts="human"), "'2 + 2?' is left out of"),
    (Cell("qwen3", prompts="mixed"), "line 2: the prompt is messages, and in the first row it is a text"),
    (Cell("qwen3", environment="an argument"), "reset cannot be called with a row"),
    (
        Cell("qwen3", environment="rows", reward="misspelt"),
        "it asks for 'answr', and the prompts have no column of that name",
    ),
    (Cell("qwen3", environment="rows", prompts="texts"), "tools are called in chats"),
    (Cell("qwen3", environment="no tools", prompts="texts"), ""),
    (Cell("qwen3", environment="no tools, says", prompts="texts"), "`reset` returns is added to a chat"),
    (Cell("qwen3", environment="no tools, says"), ""),
    (Cell("qwen3", reward="numpy"), ""),
]


@pytest.mark.quick(20)
@pytest.mark.parametrize(("cell", "words"), NAMED)
def test_plan_says_it_and_training_agrees(
    cell: Cell, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, training = both_say(cell, tmp_path / "cell", monkeypatch)
    assert words in plan and bool(words) == bool(plan)
    assert agree(plan, training), training


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_plan_and_training_agree(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = drawn_cells(75, seed=100 + seed)
    said = [(cell, *both_say(cell, tmp_path / str(number), monkeypatch)) for number, cell in enumerate(cells)]
    assert [each for each in said if not agree(*each[1:])] == []
    assert 20 < sum(not plan for _, plan, _ in said) < 70  # some of both kinds
