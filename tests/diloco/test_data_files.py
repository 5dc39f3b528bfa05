"""Prompts from datasets of the Hub and from several files: one file on this machine, pinned, and carried by the run.

The Hub is one on loopback; huggingface_hub and `datasets` are the real ones, in a process of their own where they keep
the address of the Hub from their import on.
"""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from diloco.run.config import ConfigError, RunConfig, load_config
from diloco.run.data_files import gather_data, gather_rows
from inner.data.hub_data import HubDataset, read_dataset
from inner.errors import InnerError
from inner.settings.task import DataSettings
from tests.executors.test_cli import ROOT
from tests.executors.test_preflight import plans
from tests.support.hf_models import HubDatasets

NAME, GATED = "tester/sums", "tester/gated"
SPLITS = (("main", "train", 30), ("main", "test", 10), ("hard", "train", 5), ("none", "train", 0))
CARD = """---
configs:
- config_name: main
  default: true
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: hard
  data_files:
  - {split: train, path: hard/train-*}
- config_name: none
  data_files:
  - {split: train, path: none/train-*}
---
"""
TOML = """
[fleet]
replicas = 2
steps = 4
[inner]
model = "toolworld"
toolworld.warm_start_steps = 1
[inner.rewards]
function = "rewards.py:score"
[inner.data]
columns = {question = "prompt"}
prompts = PROMPTS
"""
SCORE = (
    "def score(completions, answer, **columns):\n    return [float(a in str(c)) for c, a in zip(completions, answer)]\n"
)


def rows(config: str, split: str, count: int) -> list[dict[str, str]]:
    return [{"question": f"{config} {split}: {n} + 1?", "answer": str(n + 1)} for n in range(count)]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sums")
    (folder / "README.md").write_text(CARD)
    schema = pyarrow.schema({"question": pyarrow.string(), "answer": pyarrow.string()})
    for config, split, count in (
        ("main", "train", 30),
        ("main", "test", 10),
        ("hard", "train", 5),
        ("none", "train", 0),
    ):
        (folder / config).mkdir(exist_ok=True)
        table = pyarrow.Table.from_pylist(rows(config, split, count), schema=schema)
        pyarrow.parquet.write_table(table, folder / config / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture
def hub(there: Path) -> Iterator[HubDatasets]:
    with HubDatasets({NAME: there, GATED: there}) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(SCORE)
    return tmp_path


def written(folder: Path, prompts: Any, held_out: Any = None) -> Path:
    text = TOML.replace("PROMPTS", json.dumps(prompts))
    (folder / "run.toml").write_text(text + (f"[eval]\nprompts = {json.dumps(held_out)}\n" if held_out else ""))
    return folder / "run.toml"


def carried(run: Path, setting: str) -> list[dict[str, Any]]:
    key = json.loads((run / "run.json").read_text())["files"][setting]["key"]
    return [json.loads(line) for line in (run / key).read_text().splitlines()]


FOUND = """
import sys
from diloco.run.config import load_config
from diloco.run.data_files import gather_data, gather_rows
from diloco.run.founding import open_run
from rendezvous.clock import SystemClock
open_run(gather_data(load_config(sys.argv[1])), sys.argv[2], SystemClock())
print("torch" in sys.modules)
"""


def found(folder: Path, hub: HubDatasets, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "found.py").write_text(FOUND)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    known = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "found.py", "run.toml", str(folder / "run")],
        env={**clean, **known, "PYTHONPATH": str(ROOT), **environ},
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_run_carries_the_rows_and_names_the_commit(folder: Path, hub: HubDatasets) -> None:
    (folder / "more.jsonl").write_text(json.dumps({"question": "mine", "answer": "8"}) + "\n")
    written(folder, [f"hub:{NAME}/main:train[:20]", f"hub:{NAME}/hard", "more.jsonl"], f"hub:{NAME}")
    told = found(folder, hub)
    assert told.returncode == 0, told.stderr
    commit = hub.commit(NAME)
    record = json.loads((folder / "run" / "run.json").read_text())
    assert record["config"]["inner"]["data"]["prompts"] == [
        f"hub:{NAME}@{commit}/main:train[:20]", f"hub:{NAME}@{commit}/hard:train", "more.jsonl",
    ]  # fmt: skip
    assert record["config"]["eval"]["prompts"] == f"hub:{NAME}@{commit}:test"
    want = [*rows("main", "train", 20), *rows("hard", "train", 5), {"question": "mine", "answer": "8"}]
    assert carried(folder / "run", "prompts") == want
    assert carried(folder / "run", "eval") == rows("main", "test", 10)
    assert told.stdout.strip() == "False"  # torch was not needed

    again = found(folder, hub)  # the same config on the same run: nothing differs
    assert again.returncode == 0, again.stderr
    asked = len(hub.asked)
    written(folder, f"hub:{NAME}@{commit}/hard:train")
    offline = found(folder, hub, HF_HUB_OFFLINE="1")
    assert len(hub.asked) == asked and "prompts file (digest" in offline.stderr, offline.stderr


@pytest.mark.slow
def test_a_dataset_that_changed_is_told_with_the_commit_of_the_run(folder: Path, there: Path, tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(there, tmp_path / "copy")
    written(folder, f"hub:{NAME}/hard:train")
    with HubDatasets({NAME: copy}) as hub:
        first = hub.commit(NAME)
        assert found(folder, hub).returncode == 0
        table = pyarrow.Table.from_pylist(rows("hard", "train", 6))
        pyarrow.parquet.write_table(table, copy / "hard" / "train-00000-of-00001.parquet")
        told = found(folder, hub)
        assert told.returncode == 1 and f"the run has 'hub:{NAME}@{first}/hard:train'" in told.stderr, told.stderr


BAD = {
    "no such dataset": ("hub:tester/nope/main:train", "the Hub knows no such dataset"),
    "no such revision": (f"hub:{NAME}@v9/main:train", "no revision 'v9' of it. Correct"),
    "no such config": (f"hub:{NAME}/mian:train", "BuilderConfig 'mian' not found. Available: ['main', 'hard', 'none']"),
    "a config whose name has the word": (f"hub:{NAME}/aggregated:train", "BuilderConfig 'aggregated' not found."),
    "no such split": (f"hub:{NAME}/main:dev", "Unknown split \"dev\". Should be one of ['train', 'test']"),
    "an empty split": (f"hub:{NAME}/none:train", "is empty. It needs rows"),
    "nothing of a split": (f"hub:{NAME}/main:train[:0]", 'Instruction "train[:0]" corresponds to no data.'),
    "gated": (f"hub:{GATED}/main:train", "is gated: the token of this machine may not read it. Accept its terms at"),
}


def planned(folder: Path, hub: HubDatasets, *argvs: list[str]) -> list[str]:
    """The message of each `diloco plan`, which all refuse."""
    here = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "", "XDG_CACHE_HOME": str(folder / "cache")}
    told, heavy = plans(folder, *argvs, **here)
    assert "torch" not in heavy and "transformers" not in heavy
    assert [(one.code, one.out) for one in told] == [(2, "")] * len(argvs), told
    assert not any("Traceback" in one.err for one in told)
    return [one.err for one in told]


@pytest.mark.slow
def test_a_dataset_that_cannot_be_used_is_refused_by_plan(folder: Path, hub: HubDatasets) -> None:
    hub.gated = {GATED}
    written(folder, "hub:tester/x")
    argvs = [["--set", f"inner.data.prompts={spelling}"] for spelling, _ in BAD.values()]
    for (spelling, words), err in zip(BAD.values(), planned(folder, hub, *argvs), strict=True):
        assert words in err and f"inner.data.prompts = '{spelling.partition('@')[0][:14]}" in err, err


@pytest.mark.slow
def test_a_split_without_the_named_column_and_one_that_overlaps(folder: Path, hub: HubDatasets) -> None:
    written(folder, f"hub:{NAME}/main:train")
    (folder / "own.py").write_text(
        "class Own:\n    def reset(self, **row):\n        pass\n"
    )  # ToolWorld's needs 'kind'
    overlap = ["--set", f"eval.prompts=hub:{NAME}/main:train[25:]", "--set", "inner.sampling.environment=own.py:Own"]
    other = ["--set", 'inner.data.columns={problem = "prompt"}']
    err = planned(folder, hub, overlap, other)
    assert "5 of the 5 prompts of eval.prompts are among the training prompts" in err[0], err
    assert "row 1 has no column 'problem'" in err[1] and "'question', 'answer'" in err[1], err


def test_a_hub_that_does_not_answer(folder: Path, hub: HubDatasets) -> None:
    hub.down = 503
    written(folder, f"hub:{NAME}/main:train")
    (err,) = planned(folder, hub, [])
    assert "the Hub gave no answer" in err and "@COMMIT" in err


# -------------------------------------------------------------------- several files, without the Hub


def test_a_full_disk_leaves_no_half_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, body: bytes) -> int:
        with open(path, "wb") as file:
            file.write(body[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "a.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*Free some space, or set XDG_CACHE_HOME"):
        gather_rows("prompts", ["a.jsonl", "a.jsonl"], folder, DataSettings(), lambda text: None)
    assert not [path for path in (folder / "cache").rglob("*") if path.is_file()]


def test_several_files_are_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "a.jsonl").write_text('{"question": "a", "answer": "\\ud800"}\n')  # half a pair: no UTF-8 has it
    (folder / "b.csv").write_text("question,answer\nb,2\n")
    config = gather_data(load_config(written(folder, ["a.jsonl", "b.csv"])))
    lines = config.user_files()["prompts"].read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"question": "a", "answer": "\ud800"}, {"question": "b", "answer": "2"},
    ]  # fmt: skip
    assert config.inner.data.prompts == ["a.jsonl", "b.csv"]
    assert gather_data(config).user_files() == config.user_files()  # the same rows: the same file


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (["a.jsonl", "c.jsonl"], r"inner.data.prompts: there is no file .*c.jsonl"),
        (["a.jsonl", "b.csv"], r"inner.data.prompts = 'b.csv': column answer, number is not in every source"),
        ([], r"must name files or datasets"),
        (["a.jsonl", 3], r"must name files or datasets"),
        ("hub:gsm8k", r"inner.data.prompts = 'hub:gsm8k' is not a dataset's name. Write hub:OWNER/NAME"),
    ],
)
def test_files_that_do_not_fit_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch, prompts: list[Any], words: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "a.jsonl").write_text('{"question": "a", "answer": "1"}\n')
    (folder / "b.csv").write_text("question,number\nb,2\n")
    with pytest.raises(ConfigError, match=words):
        gather_data(load_config(written(folder, prompts)))


def test_data_that_is_still_to_be_gathered_is_no_file(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"question": "a", "answer": "1"}\n')
    config: RunConfig = load_config(written(folder, ["a.jsonl"]))
    with pytest.raises(ConfigError, match="gather_data"):
        config.user_files()


@pytest.mark.parametrize(
    "spelling",
    ["hub:a/b", "hub:a/b/c", "hub:a/b:d", "hub:a/b@r/c:d[:10]", "hub:a/b@r", "hub:open-r1/DAPO-Math.v1/all-en:train"],
)
def test_a_spelling_is_read_and_written(spelling: str) -> None:
    assert str(HubDataset.parse(spelling, "inner.data.prompts")) == spelling


@pytest.mark.parametrize("spelling", ["hub:a", "hub:", "hub:a/b:", "hub:a/b@", "hub:a/b/c/d", "hub:a b/c"])
def test_a_spelling_that_is_none(spelling: str) -> None:
    with pytest.raises(InnerError, match="is not a dataset's name"):
        HubDataset.parse(spelling, "inner.data.prompts")


def test_a_folder_with_a_datasets_name_is_not_read_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: `datasets` read ./openai/gsm8k, and run.json named a commit of the Hub."""
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InnerError, match="would read instead of the Hub's dataset"):
        list(read_dataset(HubDataset.parse("hub:openai/gsm8k/main:train", "inner.data.prompts"), "inner.data.prompts"))
