"""`diloco init FOLDER`: makes a project that runs without changes, as a start for your own.

    FOLDER/run.toml           every line explained       rewards.py          the value of an answer
           prompts.jsonl      training                   test_rewards.py     python test_rewards.py
           held_out.jsonl     [eval]; never trained on

    --task sums      additions, which a small instruct model solves only sometimes
    --task yours     eight questions and a reward that looks for the answer: replace them by yours

The folder must be new; no existing file is overwritten.

Not promised: that the model learns the task; `[eval]` shows whether it does.
"""

import json
import random
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from executors.preflight.run_url import UsageError, foreign_files

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SUMS, HELD_OUT = 400, 100  # numbers of prompts
LARGEST = 30  # the largest summand

RUN = """\
# {name}: made by `diloco init`. docs/configuration.md has every setting; `--set inner.lr=2e-6` changes one.
#   diloco plan run.toml --run runs/first        what it would do and cost; starts nothing
#   diloco train run.toml --run runs/first       starts the run, or continues where it was
#   diloco status runs/first                     from another terminal; also logs, report
name = "{name}"

[fleet]
replicas = 3                 # processes on this machine; with --executor modal or hf-jobs, rented GPUs
steps = 20                   # outer steps: how often replicas meet

[outer]
sync_every = 4               # H: optimizer steps between two meetings

[inner]
model = "{model}"            # on the Hub, a folder, or a .gguf file
batch_size = 16              # completions per forward and backward pass
lr = 3e-4                    # of the adapter; about 1e-6 where the whole model is trained

[inner.lora]                 # train an adapter and leave the model as it is; without this table all weights are trained
r = 8
alpha = 16.0

[inner.data]
prompts = "prompts.jsonl"    # one JSON object per line: `prompt`, and the columns that the reward asks for

[inner.rewards]
function = "rewards.py:score"

[inner.sampling]
num_generations = 8          # completions per prompt; a reward counts against the mean of its group
max_completion_length = {length}   # tokens

[eval]
prompts = "held_out.jsonl"   # the reward on these, by all replicas together: `diloco status` and the report show it
every = 5                    # outer steps; the start and the end are evaluated, too
"""

REWARDS = '''\
"""The worth of an answer.  Called with a batch: every argument is a list, one entry per completion.

completions: [{{"role": "assistant", "content": …}}] each   answer: the column of the prompts   **columns: the others
Return one number per completion, or None for "cannot say".  `python test_rewards.py` tries it without a model.
"""

import re


def score(completions, answer, **columns):
    return [worth(completion[-1]["content"], expected) for completion, expected in zip(completions, answer)]


def worth(text, expected):
    """{worth}"""
{body}
'''

TEST = '''\
"""python test_rewards.py      (or pytest)"""

from rewards import score


def said(text):
    return [{{"role": "assistant", "content": text}}]


def test_the_right_answer_is_worth_more_than_a_wrong_one():
    right, long, wrong = score([said("{right}"), said("{long}"), said("{wrong}")], answer=["{right}"] * 3)
    assert right == 1.0 and right > long > wrong == 0.0


if __name__ == "__main__":
    test_the_right_answer_is_worth_more_than_a_wrong_one()
    print("ok")
'''


@dataclass(frozen=True)
class StarterTask:
    """A task.   rows: (question, answer); the last `held_out` are held out.   length: token limit of an answer."""

    rows: list[tuple[str, str]]
    held_out: int
    length: int
    worth: str
    body: str
    right: str
    long: str
    wrong: str


def init(folder: Path, *, model: str, task: str) -> list[str]:
    """Write the project; return the names of its files.   Raise UsageError for a built-in model or a used folder."""
    if model in ("toolworld", "tiny"):
        raise UsageError(f"{model} is built in and has a task of its own. `diloco demo` runs toolworld; name a model")
    if Path(model).exists():  # relative to the folder of the command; paths in run.toml start at its own folder
        model = str(Path(model).resolve())
    files = project_files(folder.resolve().name, model, TASKS[task]())
    standing = sorted(name for name in files if (folder / name).exists())
    if standing:
        raise UsageError(f"{folder} has {', '.join(standing)} already, and init overwrites no file. Name a new folder")
    if found := foreign_files(folder, ()):
        raise UsageError(
            f"{folder} holds {found}, and a new project needs an empty folder. Name another one: "
            f"diloco init {shlex.quote(str(folder / 'first'))}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        try:
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:  # half a project would refuse the same command later
            for made in files:
                (folder / made).unlink(missing_ok=True)
            error.filename = error.filename or str(folder / name)
            raise
    return sorted(files)


def project_files(name: str, model: str, task: StarterTask) -> dict[str, str]:
    """Return the text of every file, by name."""
    split = len(task.rows) - task.held_out
    return {
        "run.toml": RUN.format(name=_in_toml(name), model=_in_toml(model), length=task.length),
        "rewards.py": REWARDS.format(worth=task.worth, body=task.body),
        "test_rewards.py": TEST.format(right=task.right, long=task.long, wrong=task.wrong),
        "prompts.jsonl": _lines(task.rows[:split]),
        "held_out.jsonl": _lines(task.rows[split:]),
    }


def _in_toml(text: str) -> str:
    """Return the text, escaped for TOML quotes.  TOML refuses escapes of surrogates, and an unescaped DEL."""
    return json.dumps(text, ensure_ascii=False)[1:-1].replace("\x7f", "\\u007f")


def _lines(rows: Iterable[tuple[str, str]]) -> str:
    prompts = ({"prompt": [{"role": "user", "content": question}], "answer": answer} for question, answer in rows)
    return "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts)


def _sums() -> StarterTask:
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1)]
    random.Random(0).shuffle(pairs)
    rows = [(f"What is {a} + {b}? Reply with the number only.", str(a + b)) for a, b in pairs[: SUMS + HELD_OUT]]
    body = (
        "    text = text.strip()\n"
        '    if expected not in re.findall(r"\\d+", text):\n'
        "        return 0.0\n"
        "    return 0.3 + 0.7 * len(expected) / len(text)"
    )
    worth = "0 without the number. At least 0.3 with it, and 1 if the text is the number alone."
    said = {"right": "37", "long": "The sum is 37", "wrong": "9 + 28 = 36"}
    return StarterTask(rows, HELD_OUT, length=12, worth=worth, body=body, **said)


def _yours() -> StarterTask:
    rows = [
        ("What is the capital of France?", "Paris"), ("What is the capital of Italy?", "Rome"),
        ("What is the capital of Spain?", "Madrid"), ("What is the capital of Austria?", "Vienna"),
        ("What is the capital of Norway?", "Oslo"), ("What is the capital of Japan?", "Tokyo"),
        ("What is the capital of Egypt?", "Cairo"), ("What is the capital of Peru?", "Lima"),
    ]  # fmt: skip
    body = (
        '    if not re.search(rf"\\b{re.escape(expected)}\\b", text):\n'
        "        return 0.0\n"
        "    return 1.0 if text.strip() == expected else 0.5"
    )
    worth = "0 without the answer, 0.5 with it somewhere, 1 for the answer alone."
    said = {"right": "Paris", "long": "It is Paris, of course", "wrong": "It is Rome"}
    return StarterTask(rows, 2, length=24, worth=worth, body=body, **said)


TASKS = {"sums": _sums, "yours": _yours}
