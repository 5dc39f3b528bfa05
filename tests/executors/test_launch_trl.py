"""TRL's own shipped scripts plus one line each, as three replicas: one is killed, one leaves, all end with equal θ."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from diloco.process import exitcodes
from diloco.runlog.reader import read_report
from diloco.runlog.summary import checks
from rendezvous.stores.open import open_store
from tests.executors.test_launch import diloco, pid_after_step
from tests.support.tiny_models import tiny_model_folder

LINE = 'callbacks=[__import__("diloco").DiLoCoCallback(sync_every=4)],'
COMMON = (
    "--max_steps 48 --learning_rate 1e-3 --per_device_train_batch_size 4 --logging_steps 1 --use_cpu true "
    "--bf16 false --report_to none --save_strategy no --disable_tqdm true --output_dir out"
)
ROWS = [{"prompt": f"{i} plus {i + 1} is", "completion": f" {2 * i + 1}."} for i in range(96)]
KINDS = {
    "sft": (ROWS, ""),
    "dpo": ([{"prompt": r["prompt"], "chosen": r["completion"], "rejected": " no"} for r in ROWS], ""),
    "grpo": (
        [{"prompt": row["prompt"]} for row in ROWS],
        "--reward_funcs rewards.vowels --num_generations 4 --max_completion_length 6",
    ),
}
REWARDS = "def vowels(completions, **_):\n    return [sum(c in 'aeiou' for c in text) / 6 for text in completions]\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_shipped_script_with_one_line_loses_no_outer_step(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = resources.files("trl.scripts").joinpath(f"{kind}.py").read_text()
    text = re.sub(r"(    trainer = \w+Trainer\(\n)", rf"\1        {LINE}\n", source)
    assert text.count(LINE) == 1
    Path("train.py").write_text(text)
    Path("rewards.py").write_text(REWARDS)
    rows, options = KINDS[kind]
    Path("data").mkdir()
    Path("data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"--model_name_or_path {tiny_model_folder('llama')} --dataset_name data {options} {COMMON}".split()
    command = [sys.executable, "-m", "executors.cli", "launch", "--replicas", "3", "--file", "data", "train.py", *words]
    launched = subprocess.Popen(command)
    url = f"file://{tmp_path}/runs/train"
    os.kill(pid_after_step(url, "r01", step=2), signal.SIGKILL)
    assert diloco("drain", url, "r02").returncode == exitcodes.DONE
    assert launched.wait(600) == exitcodes.DONE
    report = read_report(open_store(url))
    assert report.done and report.head == 12 and all(check.ok for check in checks(report)), checks(report)
    assert {(x.name, x.end) for x in report.sessions} >= {("r02-1", "left"), ("r00-1", "done"), ("r01-2", "done")}
