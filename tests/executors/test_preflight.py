"""Every mistake that can be seen on the laptop is refused by `diloco plan`, as a user types it, on all five platforms.

    one table: a mistake, what the message must name        ×        local · modal · hf-jobs · slurm · sky

Everything runs in a process of its own: exit code 2, nothing on stdout, one message, no traceback, within 10 seconds.
"""

import importlib.util
import json
import os
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from diloco.run.config import RunConfig
from diloco.run.sizing import _shapes_of_folder
from executors.platforms.places import Place
from executors.preflight import place_faults, platform_options
from inner import InnerConfig, InnerError
from inner.models.known import cached_snapshot, known_model, refuse_hub_adapter
from inner.usercode.rehearse import missing_package, rehearse
from inner.worlds.toolworld import tiny_llama
from tests.executors import test_pair_templates as pair_templates
from tests.executors.test_cli import ROOT
from tests.support.hf_server import HFServer
from tests.support.modal_server import ModalPlatform

WITHIN_S = 10.0
FAR = ("modal", "hf-jobs", "sky")
ALL = ("local", "modal", "hf-jobs", "slurm", "sky")
NOTHING = "nothing was started"
CONFIG = """
name = "mine"
[fleet]
replicas = 2
steps = 4
[outer]
sync_every = 6
[inner]
model = "toolworld"
rewards.function = "reward.py:score"
data.prompts = "prompts.jsonl"
"""
REWARD = """
def score(completions, answer, **columns):
    return [float(len(str(c)) == len(a)) for c, a in zip(completions, answer)]
"""
PROMPT = {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4", "kind": 0}  # ToolWorld's tools read kind
PAIR = {
    "state_id": "s1",
    "state_messages": [{"role": "user", "content": "look"}],
    "chosen": "ls",
    "rejected": "rm -r /",
    "n_teachers_agreeing": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return a_task(tmp_path)


def a_task(folder: Path) -> Path:
    """A config that is right, and its files."""
    (folder / "run.toml").write_text(CONFIG)
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text(json.dumps(PROMPT) + "\n" + json.dumps(PROMPT) + "\n")
    (folder / "pairs.jsonl").write_text(json.dumps(PAIR) + "\n")
    return folder


UNREACHED = 75  # all is right with it, and something gives no answer


def where(executor: str, folder: Path) -> list[str]:
    """The options that a careful user types to run there."""
    secrets = ["--secret", "AWS_ACCESS_KEY_ID", "--secret", "AWS_SECRET_ACCESS_KEY"]
    return {
        "local": ["--run", str(folder / "run"), "--executor", "local"],
        "slurm": ["--run", str(folder / "run"), "--executor", "slurm", "--option", "cluster=local"],
        "modal": ["--run", "s3://bucket/run", "--executor", "modal", "--gpu", "H100", "--secret", "aws"],
        "hf-jobs": ["--run", "s3://bucket/run", "--executor", "hf-jobs", "--gpu", "a10g-small", *secrets],
        "sky": ["--run", "s3://bucket/run", "--executor", "sky", "--gpu", "H100:1", *secrets],
    }[executor]


DRIVER = """
import io, json, os, sys, time
from contextlib import redirect_stderr, redirect_stdout
from executors.cli.main import main
told = []
for argv, environ in json.loads(sys.argv[1]):
    began, out, err = time.monotonic(), io.StringIO(), io.StringIO()
    os.environ.update(environ)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as left:
            code = left.code
    for name in environ:
        del os.environ[name]
    told.append([code, out.getvalue(), err.getvalue(), time.monotonic() - began])
heavy = sorted({"torch", "trl", "transformers", "datasets", "modal"} & set(sys.modules))
print(json.dumps({"told": told, "heavy": heavy}))
"""


@dataclass(frozen=True)
class Told:
    code: int
    out: str
    err: str
    took: float


Asked = tuple[list[str], dict[str, str]]  # a command, and its variables


def plans(folder: Path, *argvs: list[str], **environ: str) -> tuple[list[Told], list[str]]:
    """`diloco plan run.toml …`, one after the other in one process.  -> as `say_all`."""
    return say_all(folder, [(["plan", str(folder / "run.toml"), *argv], {}) for argv in argvs], **environ)


def say_all(folder: Path, asked: list[Asked], **environ: str) -> tuple[list[Told], list[str]]:
    """Commands with their variables, one after the other in one process, as a user has it: no keys, no network beyond
    loopback.  -> what each said, and the heavy modules that were imported for it.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "HF_", "DILOCO_"))}
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    env = {**kept, **offline, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'data' / 'stubs'}", **environ}
    command = [sys.executable, "-c", DRIVER, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return [Told(*row) for row in answer["told"]], answer["heavy"]


def plan(folder: Path, *argv: str, **environ: str) -> Told:
    (told,), heavy = plans(folder, list(argv), **environ)
    assert set(heavy) <= ({"modal"} if "MODAL_SERVER_URL" in environ else set())
    return told


@pytest.fixture
def account() -> Iterator[dict[str, str]]:
    """Variables that lead to a Modal on loopback, with the secret that `where` names: a plan asks for it."""
    import modal

    with ModalPlatform() as there:
        modal.Secret.objects.create("aws", {"A": "b"})
        yield there.environ


def refused(told: Told, folder: Path, within: float = WITHIN_S) -> str:
    """The one message of a command that was refused."""
    assert told.code == 2 and told.out == "" and "Traceback" not in told.err, told
    assert told.err.startswith("diloco plan: ") and told.took < within, told
    assert not (folder / "run").exists()
    return told.err


# -------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Mistake:
    """files: name -> content.   inner: lines of [inner] (a key that stands there is replaced).   argv: typed behind.

    says: what the message must have in it: the file or option, the line or key, what was seen, what to do.
    """

    name: str
    says: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()
    inner: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    on: tuple[str, ...] = ALL


def lines(*rows: object) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


UNTEMPLATED = tuple(
    (f"models/mine/{name}", "{}") for name in ("config.json", "tokenizer_config.json", "pytorch_model.bin")
)
REPLAY = ("replay.weight = 0.1", 'replay.pairs = "pairs.jsonl"')
MISTAKES = (
    Mistake("a config that is empty", ("run.toml is empty", "diloco demo"), (("run.toml", ""),)),
    Mistake("a setting that is none", ("run.toml", "inner.modle", "did you mean inner.model?"), inner=('modle = "x"',)),
    Mistake("no TOML", ("run.toml cannot be read as TOML", "line 2"), (("run.toml", '\nname = "x\n'),)),
    Mistake(
        "a reward that Python cannot compile",
        ("run.toml: inner.rewards.function = 'reward.py:score'", "reward.py, line 2: def score(:", "SyntaxError"),
        (("reward.py", "import os\ndef score(:\n"),),
    ),
    Mistake(
        "a typo that shows when the file is read",
        ("run.toml", "function = 'reward.py:score' could not be imported", "reward.py, line 2: LIMIT = lenn([1])",
         "NameError: name 'lenn' is not defined", "correct the line"),
        (("reward.py", "import os\nLIMIT = lenn([1])\n" + REWARD),),
    ),
    Mistake(
        "a typo that shows when the reward is called",
        ("run.toml", "reward reward.py:score failed on 2 completions", "reward.py, line 2: return [flaot(1)",
         "NameError: name 'flaot' is not defined", "correct the line"),
        (("reward.py", "def score(completions, **columns):\n    return [flaot(1) for c in completions]\n"),),
    ),
    Mistake(
        "a reward that is not in the file",
        ("'reward.py:score'", "defines no 'score'", "grade", "inner.rewards.function"),
        (("reward.py", "def grade(completions, **columns):\n    return [0.0 for c in completions]\n"),),
    ),
    Mistake(
        "a reward that returns one number for two", ("reward.py:score returned 1 values for 2 completions",),
        (("reward.py", "def score(completions, **columns):\n    return [0.0]\n"),),
    ),
    Mistake(
        "a reward that returns NaN", ("reward.py:score returned nan for completion 0", "Return a finite number"),
        (("reward.py", "def score(completions, **columns):\n    return [float('nan') for c in completions]\n"),),
    ),
    Mistake(
        "a reward that wants a column that no prompt has", ("run.toml", "reward.py:score", "solution", "line"),
        (("reward.py", "def score(completions, solution, **columns):\n    return [0.0 for c in completions]\n"),),
    ),
    Mistake(
        "a reward that ends the process", ("reward.py:score", "SystemExit"),
        (("reward.py", "import sys\nsys.exit(3)\n" + REWARD),),
    ),
    Mistake(
        "a reward that imports what is not here",
        ("reward.py, line 1: import no_such_package_xyz", "no_such_package_xyz is not installed", "pip install"),
        (("reward.py", "import no_such_package_xyz\n" + REWARD),),
    ),
    Mistake(
        "a prompt that is not a JSON",
        ("run.toml", "data.prompts = 'prompts.jsonl', line 2 is not JSON", "one JSON object"),
        (("prompts.jsonl", lines(PROMPT, '{"prompt": ')),),
    ),
    Mistake(
        "a line without a prompt", ("inner.data.prompts = 'prompts.jsonl', line 3 has no `prompt`", 'Write {"prompt"'),
        (("prompts.jsonl", lines(PROMPT, PROMPT, {"promt": "x"})),),
    ),
    Mistake(
        "a text among messages",
        ("inner.data.prompts = 'prompts.jsonl', line 2: the prompt is a text", "Write all in one form"),
        (("prompts.jsonl", lines(PROMPT, {"prompt": "x"})),),
    ),
    Mistake("prompts that are empty", ("inner.data.prompts = 'prompts.jsonl' is empty",), (("prompts.jsonl", ""),)),
    Mistake(
        "a file that is not there",
        ("run.toml: inner.data.prompts: there is no file",), inner=('data.prompts = "p.jsonl"',)
    ),
    Mistake(
        "a pair that is none", ("pairs.jsonl, line 2", "rejected", "Correct the line, or take it out"),
        (("pairs.jsonl", lines(PAIR, {**PAIR, "rejected": ""})),), REPLAY,
    ),
    Mistake(
        "a model that is not a folder and no name", ("run.toml: inner.model = './models/mine'", "no such folder here"),
        inner=('model = "./models/mine"',),
    ),
    Mistake(
        "a model without config.json", ("has no config.json", "save_pretrained"),
        (("models/mine/readme", "x"),), ('model = "{folder}/models/mine"',), on=("local", "slurm"),
    ),
    Mistake(
        "chats for a model without chat template",
        ("run.toml: inner.data.prompts = 'prompts.jsonl' are chats", "no chat template",
         "Write each prompt as one text"),
        UNTEMPLATED, ('model = "{folder}/models/mine"',), on=("local", "slurm"),
    ),
    Mistake(
        "a system prompt for a model without chat template",
        ("run.toml: inner.data.prompts = 'prompts.jsonl' become chats by inner.data.system", "Leave inner.data.system"),
        (*UNTEMPLATED, ("prompts.jsonl", lines({**PROMPT, "prompt": "2 + 2?"}))),
        ('model = "{folder}/models/mine"', 'data.system = "Be brief."'), on=("local", "slurm"),
    ),
    Mistake(
        "a model on this machine and replicas elsewhere", ("inner.model", "is a folder of this machine", "hf upload"),
        (("models/mine/config.json", "{}"),), ('model = "{folder}/models/mine"',), on=FAR,
    ),
    Mistake(
        "kinds with eight GPUs and with one", ("H100:8 has 8", "Give each number a place"),
        argv=("--gpu=H100:8",), on=("modal", "sky"),
    ),
    Mistake(
        "kinds with four GPUs and with one", ("a10g-largex4 has 4", "a10g-small has 1", "Give each number a place"),
        argv=("--gpu=a10g-largex4",), on=("hf-jobs",),
    ),
    Mistake(
        "vLLM where it is not",
        ("run.toml: inner.vllm: vLLM is not installed here", "vllm==0.31.0", "transformers==5.17.0", "constraints-"),
        inner=("vllm = {}",), on=("local", "slurm")
    ),
    Mistake(
        "8-bit AdamW where bitsandbytes is not",
        ('inner.optimizer = "adamw8bit", and bitsandbytes', "bitsandbytes`, or set inner.optimizer"),
        inner=('optimizer = "adamw8bit"',)
    ),
    Mistake(
        "a run key that replicas do not get", ("DILOCO_RUN_KEY", "--secret DILOCO_RUN_KEY"),
        environ=(("DILOCO_RUN_KEY", "0123456789abcdef"),), on=("hf-jobs", "sky"),
    ),
    Mistake(
        "temporary keys without their token", ("AWS_SESSION_TOKEN", "--secret AWS_SESSION_TOKEN"),
        environ=(("AWS_SESSION_TOKEN", "x"),), on=("hf-jobs", "sky"),
    ),
    Mistake(
        "an image that is none", ("--option image=my image", "registry"), argv=("--option=image=my image",),
        on=("modal", "hf-jobs"),
    ),
    Mistake(
        "an option that Slurm has not", ("--option partitoin", "did you mean partition?"),
        argv=("--option=partitoin=gpu",), on=("slurm",),
    ),
    Mistake(
        "an option that SkyPilot has not", ("--option use_spott", "did you mean use_spot?"),
        argv=("--option=use_spott=true",), on=("sky",),
    ),
    Mistake(
        "a cloud that SkyPilot has not", ("SkyPilot does not take", "infra=moon", "sky show-gpus"),
        argv=("--option=infra=moon",), on=("sky",),
    ),
    Mistake(
        "an option that the place has not", ("takes no option regoin",), argv=("--option=regoin=us",),
        on=("local", "modal", "hf-jobs"),
    ),
)  # fmt: skip


def made(mistake: Mistake, folder: Path) -> None:
    for name, content in mistake.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    if mistake.inner:
        keys = {line.partition(" = ")[0] for line in mistake.inner}
        kept = [row for row in CONFIG.splitlines() if row.partition(" = ")[0] not in keys - {"name"}]
        added = [line.replace("{folder}", str(folder)) for line in mistake.inner]
        (folder / "run.toml").write_text("\n".join([*kept, *added, ""]))


SLOW = {  # each plan of them runs the reward in a process of its own; the others that do are enough for every day
    "a reward that wants a column that no prompt has", "a reward that ends the process",
    "a reward that imports what is not here", "a reward that returns NaN",
    "a typo that shows when the reward is called",
}  # fmt: skip
TRIED = ("local", "hf-jobs")  # where the rewards that every day has are tried; all five: "…elsewhere", slow
MARKED = [pytest.param(m, id=m.name, marks=pytest.mark.slow if m.name in SLOW else ()) for m in MISTAKES]


def is_tried(mistake: Mistake) -> bool:
    """Whether a plan finds it by a process that runs the reward."""
    return any(name == "reward.py" for name, _ in mistake.files) and "SyntaxError" not in mistake.says


def places_of(mistake: Mistake) -> tuple[str, ...]:
    return TRIED if is_tried(mistake) and mistake.name not in SLOW else mistake.on


def asked(mistake: Mistake, folder: Path, places: tuple[str, ...]) -> list[Asked]:
    made(mistake, a_task(folder))
    plan = ["plan", str(folder / "run.toml")]
    return [([*plan, *where(executor, folder), *mistake.argv], dict(mistake.environ)) for executor in places]


Answers = dict[str, tuple[Path, list[Told]]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What plan says to the mistakes of every day, all from one process: most of one is its start."""
    mistakes = [mistake for mistake in MISTAKES if mistake.name not in SLOW]
    folders = {mistake.name: tmp_path_factory.mktemp("mistake") for mistake in mistakes}
    rows = [asked(mistake, folders[mistake.name], places_of(mistake)) for mistake in mistakes]
    told, heavy = say_all(tmp_path_factory.mktemp("home"), [one for row in rows for one in row])
    assert heavy == []
    left = iter(told)
    return {m.name: (folders[m.name], [next(left) for _ in row]) for m, row in zip(mistakes, rows, strict=True)}


def assert_refused(mistake: Mistake, folder: Path, told: list[Told]) -> None:
    for answer in told:
        err = refused(answer, folder)
        assert not [word for word in mistake.says if word not in err], err


@pytest.mark.parametrize("mistake", MARKED)
def test_a_mistake_is_refused_on_every_platform_without_torch(
    request: pytest.FixtureRequest, tmp_path: Path, mistake: Mistake
) -> None:
    if mistake.name not in SLOW:
        assert_refused(mistake, *request.getfixturevalue("answers")[mistake.name])
        return
    told, heavy = say_all(tmp_path, asked(mistake, tmp_path, mistake.on))
    assert_refused(mistake, tmp_path, told)
    assert heavy == []


@pytest.mark.slow  # the test above tries these on TRIED, and one SyntaxError on all
@pytest.mark.parametrize("mistake", [m for m in MISTAKES if is_tried(m) and m.name not in SLOW], ids=lambda m: m.name)
def test_a_reward_that_is_tried_is_refused_elsewhere_too(tmp_path: Path, mistake: Mistake) -> None:
    places = tuple(place for place in mistake.on if place not in TRIED)
    assert_refused(mistake, tmp_path, say_all(tmp_path, asked(mistake, tmp_path, places))[0])


def test_keys_that_nobody_named(folder: Path) -> None:
    argvs = [["--run", "s3://bucket/run", "--executor", executor] for executor in FAR]
    for told in plans(folder, *argvs)[0]:
        err = refused(told, folder)
        assert "AWS_ACCESS_KEY_ID" in err and "AWS_SECRET_ACCESS_KEY" in err and "--secret" in err


def test_what_is_right_is_planned(folder: Path, account: dict[str, str]) -> None:
    for told in plans(folder, where("local", folder), where("slurm", folder), where("modal", folder), **account)[0]:
        assert told.code == (0 if "s3://" not in told.out else 2), told  # there are no keys for the bucket here
        assert told.out.strip().endswith(NOTHING) and "memory per replica" in told.out
    assert not (folder / "run").exists()


TEMPLATES = ("DeepSeek", "Gemma, system", "Cohere")


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_pair_that_the_models_template_cannot_write_is_refused_on_every_platform(folder: Path, name: str) -> None:
    """The model is one of the Hub, in this machine's cache; the fast half is tests/executors/test_pair_templates.py."""
    template, messages, why = pair_templates.TEMPLATES[name]
    cache = folder / "hf" / "hub" / "models--me--mine"
    snapshot = cache / "snapshots" / "abc"
    pair_templates.tokenizer(template).save_pretrained(snapshot)
    tiny_llama(pair_templates.tokenizer(template), 512, seed=0).config.save_pretrained(snapshot)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    (folder / "pairs.jsonl").write_text(lines(PAIR, {**PAIR, "state_id": "p7", "state_messages": messages}))
    made(Mistake("", (), inner=('model = "me/mine"', *REPLAY)), folder)
    told, heavy = plans(folder, *[where(executor, folder) for executor in ALL])
    for answer in told:
        err = refused(answer, folder, within=60.0)
        assert "pair p7: this model's chat template cannot write it" in err and why in err, err
        assert "inner.replay.skip_unfit = true" in err
    assert heavy == []


def test_a_partition_that_sinfo_does_not_list_is_refused_by_plan(folder: Path) -> None:
    (folder / "bin").mkdir()
    for name, does in (("sinfo", "echo gpu; echo cpu"), ("sbatch", "exit 1")):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / "bin" / name).chmod(0o755)
    argv = ["--run", str(folder / "run"), "--executor", "slurm", "--option", "partition=gpus"]
    told = plan(folder, *argv, PATH=f"{folder / 'bin'}:{os.environ['PATH']}")
    assert "this cluster has no partition 'gpus'; did you mean gpu?" in refused(told, folder)


@pytest.mark.slow
def test_a_gpu_that_the_platform_has_not_is_refused_by_plan(folder: Path) -> None:
    modal, sky = (
        [*where(executor, folder), "--gpu", gpu] for executor, gpu in (("modal", "H9000"), ("sky", "H9000:1"))
    )
    told, _ = plans(folder, modal, sky)
    assert "Modal has no GPU called 'H9000'. It has T4" in refused(told[0], folder)
    assert "SkyPilot does not take --gpu H9000:1" in refused(told[1], folder)
    with HFServer() as server:
        flavor = [word.replace("a10g-small", "h9000") for word in where("hf-jobs", folder)]
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "HF_TOKEN": server.token}
        told = plan(folder, *flavor, HF_ENDPOINT=server.endpoint, HF_HUB_OFFLINE="0", **keys)
    assert "no hardware is called h9000; there are" in refused(told, folder)


@pytest.mark.slow
def test_a_price_needs_no_bucket(folder: Path, account: dict[str, str]) -> None:
    """Before: --run was required, and a bucket without keys was the answer."""
    told, without = plans(folder, ["--executor", "modal", "--gpu", "H100"], where("modal", folder), **account)[0]
    for answer in (told, without):
        assert "per hour in all" in answer.out, answer
    assert told.code == 0 and without.code == 2, "`train` would refuse the bucket without keys, too"
    assert "it could not be started: cannot read s3://bucket/run" in without.err
    assert "no --run was given" in told.out and "not checked: cannot read s3://bucket/run" in without.out


def test_a_plan_with_a_file_in_place_of_the_run_s_folder_is_a_mistake(folder: Path) -> None:
    """Before: 75, "it cannot be reached from here", as if the same command could work later."""
    (folder / "note.txt").write_text("")
    told = plan(folder, "--run", str(folder / "note.txt"))
    assert told.code == 2 and "could not be started: cannot read" in told.err and "a file where a folder" in told.err


@pytest.mark.slow
def test_a_plan_with_a_model_that_cannot_be_reached_is_none(folder: Path, account: dict[str, str]) -> None:
    """Before: exit code 0, which says that it could be started."""
    made(Mistake("", (), inner=('model = "me/absent"',)), folder)
    told = plan(folder, *where("local", folder))
    assert told.code == UNREACHED and "me/absent is on the Hub: offline (HF_HUB_OFFLINE)" in told.out
    assert "it could not be started now: me/absent cannot be reached from here" in told.err
    far = plan(folder, "--executor", "modal", "--gpu", "H100", **account)
    assert far.code == 0, "the start model is published from there"


@pytest.mark.slow
def test_a_plan_with_a_token_that_the_hub_does_not_know_is_none(folder: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "HF_HUB_OFFLINE": "0"}
    with HFServer() as server:
        told = plan(folder, *where("hf-jobs", folder), HF_ENDPOINT=server.endpoint, HF_TOKEN="hf_old", **keys)
        good = plan(folder, *where("hf-jobs", folder), HF_ENDPOINT=server.endpoint, HF_TOKEN=server.token, **keys)
    assert "hf auth login" in refused(told, folder)
    assert "cannot be reached from here" in good.err and "per hour in all" in good.out


def test_a_wrong_verdict_can_be_overruled(folder: Path) -> None:
    (folder / "reward.py").write_text("import no_such_package_xyz\n" + REWARD)
    assert plan(folder, *where("local", folder), "--no-preflight").code == 0


def test_a_plan_for_an_account_that_is_not_there_is_none(folder: Path) -> None:
    """Before: exit code 0 and a price, though nothing could be started."""
    told = plan(folder, *where("modal", folder), MODAL_SERVER_URL="http://127.0.0.1:9", MODAL_CONFIG_PATH="/nowhere")
    assert "Modal does not know who you are" in refused(told, folder)


@pytest.mark.slow
def test_a_package_that_the_image_brings_is_no_mistake(folder: Path, account: dict[str, str]) -> None:
    (folder / "reward.py").write_text("import no_such_package_xyz\n" + REWARD)
    told = plan(folder, *where("modal", folder), "--option", "image=docker.io/me/mine:1", **account)
    assert (
        told.code == 2 and "not checked: reward.py:score, since no_such_package_xyz is not installed here" in told.out
    )
    assert "not checked: the image docker.io/me/mine:1" in told.out


def test_a_package_may_have_modules_of_another_name() -> None:
    """Before: `--pip scikit-learn` was refused for a reward that imports sklearn: "pip install sklearn"."""
    named = Place("modal", options={"pip": ["no-such-package-xyz==1.0"]})
    assert "not checked: reward.py" in place_faults.about_missing("sklearn_xyz", "reward.py:score", "no", [named])
    for here in (Place("modal"), Place("modal", options={"pip": ["torch"]}), Place("local")):
        with pytest.raises(InnerError, match="sklearn_xyz is not installed"):
            place_faults.about_missing("sklearn_xyz", "reward.py:score", "no", [here])


SANDBOXED = """
from inner.extras.deletion.world import FeatureDeletion
"""


@pytest.fixture
def deletion(folder: Path) -> Path:
    """A config whose environment runs programs in bubblewrap, and a PATH that has none."""
    lines = [line for line in CONFIG.splitlines() if not line.startswith("rewards")]
    (folder / "run.toml").write_text("\n".join(lines) + '\nsampling.environment = "environment.py:FeatureDeletion"\n')
    (folder / "environment.py").write_text(SANDBOXED)
    (folder / "bin").mkdir()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["local", *FAR])
def test_a_place_without_the_sandbox_that_an_environment_needs(
    deletion: Path, executor: str, account: dict[str, str]
) -> None:
    """Whether the laptop itself has bubblewrap matters to replicas on the laptop alone."""
    environ = {"PATH": str(deletion / "bin"), "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    told, image = plan(deletion, *where(executor, deletion), **environ), ["--option", "image=me/x:1"]
    if executor == "local":
        assert "`bwrap` is not on the PATH. `apt-get install bubblewrap`" in refused(told, deletion)
        return
    said = refused(told, deletion)
    assert "environment.py:FeatureDeletion runs programs in bubblewrap, and replicas on" in said and executor in said
    brings = ["--option", "setup=sudo apt-get install -y bubblewrap"] if executor == "sky" else image
    assert brings[1].partition("=")[0] in said
    with HFServer() as server:
        environ |= {"HF_TOKEN": server.token, "HF_ENDPOINT": server.endpoint, "HF_HUB_OFFLINE": "0"}
        environ |= account if executor == "modal" else {}
        told = plan(deletion, *where(executor, deletion), *brings, "--allow-unknown-price", **environ)
    assert told.code == UNREACHED and f"not checked: that {executor} lets replicas make user namespaces" in told.out


def test_a_laptop_with_the_sandbox_says_so_of_places_without() -> None:
    with pytest.raises(InnerError, match="replicas on modal would have none"):
        place_faults.about_sandbox("environment.py:E", "", [Place("local"), Place("modal")])
    assert place_faults.about_sandbox("environment.py:E", "", [Place("local"), Place("slurm")]) == []
    with pytest.raises(InnerError, match="no namespaces"):
        place_faults.about_sandbox(
            "environment.py:E", "no namespaces", [Place("modal", options={"image": "x"}), Place("slurm")]
        )


def test_a_reward_that_takes_long_is_not_waited_for(folder: Path) -> None:
    (folder / "reward.py").write_text("import time\ntime.sleep(600)\n" + REWARD)
    config = InnerConfig(rewards={"function": "reward.py:score"}, data={"prompts": "prompts.jsonl"})
    files = {"reward": folder / "reward.py", "prompts": folder / "prompts.jsonl"}
    assert rehearse(config, files, time_s=2.0).late


def test_a_crash_in_c_is_told_as_the_rewards(folder: Path) -> None:
    (folder / "reward.py").write_text("import os\ndef score(completions, **columns):\n    os.abort()\n")
    files = {"reward": folder / "reward.py", "prompts": folder / "prompts.jsonl"}
    found = rehearse(
        InnerConfig(rewards={"function": "reward.py:score"}, data={"prompts": "prompts.jsonl"}),
        files,
        time_s=60.0,
    )
    assert "reward.py:score: the code ended its process with exit code -6" in found.refused


def test_a_missing_package_is_told_from_a_missing_file_of_a_package_that_is_here() -> None:
    try:
        import json.no_such_part  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as error:
        assert missing_package(error) == ""
    try:
        import no_such_package_xyz  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as error:
        outer = InnerError("could not be imported")
        outer.__cause__ = error
        assert missing_package(outer) == "no_such_package_xyz"


# -------------------------------------------------------------------- the model


def safetensors(path: Path, cut: int = 0) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    body = struct.pack("<Q", len(header)) + header + b"\0" * 16
    path.write_bytes(body[: len(body) - cut])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "tokenizer_config.json").write_text("{}")
    safetensors(made / "pytorch_model.bin")
    return made


def known(model: object, ask=None, **settings: object) -> str:
    """The note or refusal for it; "" if all is well."""
    files = {"rewards": {"function": "reward.py:score"}, "data": {"prompts": "prompts.jsonl"}}
    try:
        return known_model(InnerConfig(model=str(model), **files, **settings), ask).note  # type: ignore[arg-type]
    except InnerError as error:
        return f"refused: {error}"


def test_a_model_that_is_whole(model: Path) -> None:
    assert known(model) == ""


def test_a_model_that_is_cut_off(model: Path) -> None:
    safetensors(model / "model.safetensors", cut=5)
    assert "model.safetensors is cut off, or no safetensors file" in known(model)


def test_a_model_that_is_a_pointer(model: Path) -> None:
    (model / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n")
    assert "Git LFS pointer" in known(model) and "git lfs pull" in known(model)


def test_a_model_without_one_of_its_shards(model: Path) -> None:
    index = {"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks model-2.safetensors, which its index names" in known(model)
    (model / "model.safetensors.index.json").unlink()
    (model / "pytorch_model.bin").rename(model / "pytorch_model-1.bin")
    assert "has no weights" in known(model), "shards without an index are not read"
    (model / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"w": "pytorch_model-1.bin"}}))
    assert known(model) == ""


def test_a_cache_that_has_an_index_and_not_yet_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: an interrupted download was refused, though the Hub's client goes on with it."""
    cache = tmp_path / "hub" / "models--me--mine"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    (folder := cache / "snapshots" / "abc").mkdir(parents=True)
    (folder / "config.json").write_text('{"tie_word_embeddings": false, "architectures": ["LlamaModel"]}')
    index = {"weight_map": {"w": "a.safetensors", "lm_head.weight": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    safetensors(folder / "a.safetensors")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert known("me/mine", ask=lambda *_: pytest.fail("the Hub was asked")) == ""


def test_files_that_from_pretrained_does_not_read_do_not_matter(model: Path) -> None:
    safetensors(model / "model.safetensors")
    safetensors(model / "consolidated.safetensors", cut=5)
    (model / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert known(model) == "" and _shapes_of_folder(model) == {"w": [4]}


@pytest.mark.parametrize("said", ["return_dict = false", "output_attentions = true"])
def test_outputs_that_transformers_cannot_generate_with_are_refused_before_the_start(model: Path, said: str) -> None:
    """Before: `plan` accepted them, and the replicas, or the start model's publication, ended three times."""
    name, _, value = said.partition(" = ")
    (model / "config.json").write_text(json.dumps({name: json.loads(value)}))
    assert f"has {said} in its config.json" in known(model)
    kept = {"return_dict": True, "output_attentions": True, "_attn_implementation": "eager"}
    (model / "config.json").write_text(json.dumps(kept))
    assert "in its config.json" not in known(model)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4", "hqq", None])
def test_a_quantised_model_is_refused_before_the_start(model: Path, method: str | None) -> None:
    """Before: replicas started on rented machines, and then the start model could not be published. GPTQ's, AWQ's and
    bitsandbytes' real folders were seen to end in a traceback."""
    (model / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method, "bits": 4}}))
    assert f"is quantised: its config.json has quantization_config {method or ''}".rstrip() in known(model)
    assert 'inner.lora.base = "nf4"' in known(model, lora={"r": 4}), "an adapter needs the same base"
    (model / "config.json").write_text(json.dumps({"quantization_config": None}))
    assert known(model) == ""


def test_a_bin_file_that_is_cut_off(model: Path) -> None:
    with zipfile.ZipFile(model / "pytorch_model.bin", "w") as made:
        made.writestr("data.pkl", b"x" * 99)
    assert known(model) == ""
    whole = (model / "pytorch_model.bin").read_bytes()
    (model / "pytorch_model.bin").write_bytes(whole[:60])
    assert "pytorch_model.bin is cut off" in known(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_pointer_instead_of_a_text(model: Path, name: str) -> None:
    (model / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n")
    assert f"{name} is a Git LFS pointer" in known(model)


def test_an_encoder_with_a_masked_head_is_refused(model: Path) -> None:
    """Before: BERT was trained as if it wrote text, though each position reads the tokens after it."""
    (model / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}')
    assert "has a head that writes no text (config.json names BertForMaskedLM)" in known(model)


def test_a_model_with_an_adapter_beside_it(model: Path) -> None:
    """Before: from_pretrained put the frozen adapter around the model, and the run carried the adapter alone, or a
    replica ended with "optimizer got an empty parameter list"."""
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere/base"}')
    assert "has an adapter (adapter_config.json), of /elsewhere/base. Merge it" in known(model)
    assert "move the files adapter_* away" in known(model)
    with pytest.raises(InnerError, match="merge_and_unload"):
        refuse_hub_adapter("me/mine", ["config.json", "adapter_config.json"])


def test_a_model_without_a_tokenizer(model: Path) -> None:
    (model / "tokenizer_config.json").unlink()
    assert "has no tokenizer" in known(model) and "save_pretrained" in known(model)


def test_a_folder_with_an_adapter_alone(model: Path) -> None:
    (model / "config.json").rename(model / "adapter_config.json")
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "me/base"}')
    assert "has an adapter (adapter_config.json), of me/base. Merge it" in known(
        model
    ) and "merge_and_unload()" in known(model)


def test_a_file_of_a_model(model: Path) -> None:
    assert f"is a file. Name the folder that has it: {str(model)!r}" in known(model / "config.json")


def test_a_cached_model_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub" / "models--me--mine"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    (cache / "snapshots" / "abc").mkdir(parents=True)
    (cache / "snapshots" / "abc" / "config.json").write_text("{}")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert cached_snapshot("me/mine", None) == cache / "snapshots" / "abc" == cached_snapshot("me/mine", "abc")
    assert cached_snapshot("me/other", None) is None
    assert known("me/mine", ask=lambda *_: pytest.fail("the Hub was asked")) == ""


def test_a_model_that_nobody_can_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert known("me/mine-xyz").endswith("is on the Hub: offline (HF_HUB_OFFLINE)")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")

    def unreachable(*_: object) -> None:
        raise OSError("Name or service not known")

    assert "is on the Hub: offline (Name or service not known)" in known("me/mine-xyz", unreachable)


@pytest.mark.slow
def test_a_network_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    never = threading.Event()
    began = time.monotonic()
    assert "no answer within 4 s" in known("me/mine-xyz", lambda *_: never.wait(600) and None)
    assert time.monotonic() - began < 120, "it hangs for ten minutes"
    never.set()


class Hub(BaseHTTPRequestHandler):
    """The Hub's answers for a model that it does not know, one without that revision, and one that is gated."""

    def do_GET(self) -> None:
        kinds = {"unknown": "RepoNotFound", "old": "RevisionNotFound", "gated": "GatedRepo"}
        code = next((kind for name, kind in kinds.items() if f"/{name}" in self.path), "")
        self.send_response(403 if code == "GatedRepo" else 404 if code else 200)
        if code:
            self.send_header("X-Error-Code", code)
        body = b"{}" if code else json.dumps({"id": "me/good", "_id": "1"}).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("me/unknown", "refused: model = 'me/unknown': the Hub knows no such model"),
        ("me/old", "refused: model = 'me/old' has no revision 'v9' on the Hub"),
        ("me/gated", "refused: model = 'me/gated' is gated"),
        ("me/good", ""),
    ],
)
def test_what_the_hub_says_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: str, name: str, said: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    found = known(name, revision="v9")
    assert found.startswith(said) and bool(found) == bool(said), found


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        (('model = "me/unknown"',), "inner.model = 'me/unknown': the Hub knows no such model"),
        pytest.param(
            ('model = "me/old"', 'revision = "v9"'),
            "inner.model = 'me/old' has no revision 'v9' on the Hub",
            marks=pytest.mark.slow,
        ),
        pytest.param(('model = "me/gated"',), "inner.model = 'me/gated' is gated", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_refused_on_every_platform(
    folder: Path, hub: str, inner: tuple[str, ...], said: str
) -> None:
    made(Mistake("", (), inner=inner), folder)
    told, heavy = plans(folder, *[where(e, folder) for e in ALL], HF_ENDPOINT=hub, HF_HUB_OFFLINE="0")
    assert all(said in refused(answer, folder) for answer in told) and len(told) == 5 and heavy == []


# -------------------------------------------------------------------- places


@pytest.mark.parametrize(
    ("options", "fine"), [({}, False), ({"pip": ["bitsandbytes"]}, True), ({"image": "me/x"}, True)]
)
def test_an_image_gets_what_8_bit_adamw_needs(options: dict[str, Any], fine: bool) -> None:
    config = RunConfig.from_dict({"inner": {"optimizer": "adamw8bit"}})
    said = place_faults.few_bits(config, Place(executor="modal", options=options))
    assert (said == "") is fine and (fine or "will not be in the image on modal. Add `--pip bitsandbytes`" in said)
    assert place_faults.few_bits(RunConfig(), Place(executor="modal")) == ""


def test_liger_kernels_that_replicas_would_lack(folder: Path) -> None:
    config = RunConfig.from_dict({"inner": {"trl": {"use_liger_kernel": True}}})
    assert "the image on modal. Add `--pip liger-kernel`" in place_faults.liger_missing(config, Place(executor="modal"))
    assert place_faults.liger_missing(config, Place(executor="modal", options={"pip": ["liger-kernel==0.6"]})) == ""
    assert place_faults.liger_missing(RunConfig(), Place()) == ""
    if importlib.util.find_spec("liger_kernel") is None:
        with (folder / "run.toml").open("a") as file:
            file.write("\n[inner.trl]\nuse_liger_kernel = true\n")
        assert "inner.trl.use_liger_kernel = true, and liger-kernel is not installed here" in plan(folder).err


@pytest.mark.parametrize("url", ["runs/x", "s3://b/r", "hf://buckets/a/b", ""])
def test_this_machine_without_settings_has_no_fault_that_is_looked_for_elsewhere(url: str, folder: Path) -> None:
    """`preflight` does not load these checks for it."""
    places = [Place(count=2), Place()]
    environ = {"DILOCO_RUN_KEY": "x", "AWS_SESSION_TOKEN": "x", "AWS_ENDPOINT_URL": "x"}
    own = {"data": {"prompts": "prompts.jsonl"}, "rewards": {"function": "reward.py:score"}}
    models = [{"model": name, **own} for name in ("me/model", "/a/folder", "a.gguf")]
    for config in (RunConfig.from_dict({"inner": inner}, folder) for inner in (*models, {"model": "toolworld"})):
        assert list(place_faults.place_faults(config, url, places, environ)) == []
        assert list(place_faults.notes_about(config, url, places, environ)) == []


def test_replicas_that_would_inherit_a_launchers_number_of_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size, executor, told in (("2", "local", True), ("1", "local", False), ("", "local", False), ("2", "modal", 0)):
        found = place_faults.launcher_fault(Place(executor=executor), {"WORLD_SIZE": size})
        assert found.startswith("WORLD_SIZE = 2 is set here, as a launcher does") is bool(told)
    told = plan(folder, WORLD_SIZE="2")
    assert told.code == 2 and "WORLD_SIZE = 2 is set here" in told.err


def test_a_partition_that_the_cluster_has_not() -> None:
    there = lambda: frozenset({"gpu", "cpu"})  # noqa: E731
    assert platform_options.slurm_fault({"partition": "gpu,cpu"}, there) == ""
    assert "no partition 'gpus'; did you mean gpu?" in platform_options.slurm_fault({"partition": "gpus"}, there)
    assert platform_options.slurm_fault({"partition": "gpus"}, lambda: None) == ""  # Slurm does not answer
    assert platform_options.slurm_fault({"partition": "x", "cluster": "local"}, there) == ""


def test_an_option_that_only_we_set() -> None:
    assert "Use --timeout" in platform_options.slurm_fault({"time": 5}, lambda: None)


def test_modal_secrets_are_named_as_not_looked_into() -> None:
    config = RunConfig()
    place = Place("modal", secrets=("aws",))
    notes = list(place_faults.notes_about(config, "s3://b/r", [place], {"DILOCO_RUN_KEY": "x"}))
    assert any("Modal secret aws holds AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, DILOCO_RUN_KEY" in n for n in notes)
    assert place_faults.keys_missing("s3://b/r", place, {}) == ""
    assert place_faults.keys_missing("gs://b/r", Place("hf-jobs"), {}) == ""
    assert place_faults.keys_missing("runs/x", Place("slurm"), {"DILOCO_RUN_KEY": "x"}) == ""  # inherits it


@pytest.mark.slow
def test_a_list_of_rewards_is_tried_function_by_function(folder: Path) -> None:
    config = CONFIG.replace('rewards.function = "reward.py:score"\n', "")
    lines = '[inner.rewards.functions]\n"reward.py:score" = 1.0\n"other.py:brief" = 0.2\n'
    (folder / "run.toml").write_text(config + lines)
    missing = plan(folder, *where("local", folder))
    assert missing.code and "inner.rewards.functions: there is no file" in missing.err and "other.py" in missing.err
    (folder / "other.py").write_text("def brief(completions, **columns):\n    return [1.0]\n")
    wrong = plan(folder, *where("local", folder))
    assert wrong.code and "reward other.py:brief returned 1 values for 2 completions" in wrong.err
    (folder / "other.py").write_text("def brief(completions, **columns):\n    return [None] * len(completions)\n")
    assert plan(folder, *where("local", folder)).code == 0
