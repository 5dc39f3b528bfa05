"""The examples as a reader runs them: quickstart, an adapter and ablation; the replay loop as commands (slow)."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from diloco.run.config import load_config
from tests.support.gguf_files import write_gguf

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def ran(*command: str, cwd: Path = ROOT, code: int = 0) -> str:
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=ENV, capture_output=True, text=True, timeout=500)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def diloco(*words: str, cwd: Path = ROOT) -> str:
    return ran("-m", "executors.cli.main", *words, cwd=cwd)


def test_quickstart() -> None:
    said = ran("examples/qwen_05b_quickstart/run.py", "--model", "tiny", "--hint", "Be brief.")
    steps = [line for line in said.splitlines() if line.startswith("step ")]
    assert len(steps) == 5 and all("finite=True" in line for line in steps)
    assert "sdpo=0.0000" not in steps[0] and "dpo=0.0000" not in steps[0]
    assert "Verdict: PASS" in said


@pytest.mark.slow  # test_quickstart is its quick half; a GGUF file is read in inner/test_gguf.py
def test_quickstart_takes_a_gguf_file(tmp_path: Path) -> None:
    """It said that the file is not valid JSON."""
    write_gguf(tmp_path / "m.gguf")
    said = ran(
        "examples/qwen_05b_quickstart/run.py", "--model", str(tmp_path / "m.gguf"), "--steps", "2", "--lr", "1e-3"
    )
    assert "Verdict: PASS" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nothing", "nothing.gguf"])
def test_quickstart_names_what_helps(tmp_path: Path, name: str) -> None:
    said = ran("examples/qwen_05b_quickstart/run.py", "--model", str(tmp_path / name), code=1)
    assert "could not be loaded" in said and "--model tiny" in said and "Traceback" not in said
    model = re.findall(r"--model (\S+\.gguf)$", said)[-1]
    assert "`make smollm2`" in said and f"SMOLLM2 := $(MODELS)/{Path(model).name}" in (ROOT / "Makefile").read_text()


def load_example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_an_adapter_around_which_make_diloco_stands_is_all_that_travels(tmp_path: Path) -> None:
    example = load_example("adapter_loop")
    run = tmp_path / "run"
    assert example.train(str(run), "r00", replicas=1, steps=6) < 3.5, "log 64 is 4.16"
    base = example.base_model()
    loaded = PeftModel.from_pretrained(base, f"{run}-adapter").eval()
    ids = example.batch("r07", 1)
    with torch.no_grad():
        learned = loaded(input_ids=ids, labels=ids).loss
        with loaded.disable_adapter():
            untrained = loaded(input_ids=ids, labels=ids).loss
    assert learned < untrained - 0.5, "the base is as it was, and the adapter is what has learned"
    adapter = sum(p.numel() for name, p in loaded.named_parameters() if "lora_" in name)
    bodies = [path.stat().st_size for path in (run / "steps").rglob("delta/*") if path.is_file()]
    assert bodies and set(bodies) == {4 * adapter}


@pytest.mark.slow
def test_two_processes_train_one_adapter(tmp_path: Path) -> None:
    said = ran("examples/adapter_loop.py", str(tmp_path / "run"))
    thetas = re.findall("θ ([0-9a-f]{32})", said)
    assert len(thetas) == 2 and len(set(thetas)) == 1 and "the same pseudogradient" not in said, said


@pytest.mark.parametrize("name", ["any_loop", "adapter_loop"])
def test_replicas_of_an_example_see_other_data(name: str) -> None:
    """torch's CPU generator reads the lower 32 bits of a seed: a slot above them changes nothing."""
    batches = [load_example(name).batch(slot, step) for slot in ("r00", "r01") for step in (0, 1)]
    assert len({b.numpy().tobytes() for b in batches}) == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ablation_in_small(tmp_path: Path) -> None:
    words = ["examples/ablation.py", "--to", str(tmp_path), "--steps", "3", "--seeds", "0"]
    said = ran(*words, "--arms", "baseline|full|+sdpo, wrong hints")
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["arm"] for row in rows] == ["baseline", "full", "+sdpo, wrong hints"]
    assert rows[0]["coverage"] == {} and rows[1]["coverage"]["replay_coverage"] == 1.0
    assert rows[1]["coverage"]["sdpo_coverage"] > 0.5 and rows[1]["pairs"] > 150 and rows[1]["right_pairs"] > 0.8
    assert rows[1]["usd"] > 0 == rows[0]["usd"]
    assert rows[0]["rewards"][0] == rows[1]["rewards"][0]  # the same prompts and the same θ₀
    assert (tmp_path / "ablation.png").stat().st_size > 10_000 and "| full |" in said
    ran(*words, "--arms", "baseline")  # nothing to do
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_replay_loop_as_commands(tmp_path: Path) -> None:
    """docs/replay.md, "The loop, closed": two runs, and teachers in between."""
    for name in ("first.toml", "second.toml"):
        (tmp_path / name).write_text((ROOT / "examples" / "replay" / name).read_text())
    diloco("train", "first.toml", "--run", "runs/first", cwd=tmp_path)
    said = diloco("traces", "runs/first", "--to", "traces.jsonl", cwd=tmp_path)
    rollouts = int(re.findall(r"of (\d+) rollouts", said)[0])
    assert 1000 <= rollouts <= 1024  # 4 · 32 of each of two replicas' four outer steps; some may say nothing
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "local_teachers.py"), "--port", "0"],
        stdout=subprocess.PIPE, text=True, env=ENV,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[2].rstrip(";")
        teachers = [word for i in range(3) for word in ("--teacher", f"expert-{i}")]
        script = str(ROOT / "examples" / "teacher_replay.py")
        ran(script, "traces.jsonl", "--failed", "--usd", "1", "--base-url", url, *teachers, cwd=tmp_path)
    finally:
        server.terminate()
        server.wait()
    assert len((tmp_path / "pairs.jsonl").read_text().splitlines()) > 100
    diloco("train", "second.toml", "--run", "runs/second", cwd=tmp_path)
    events = [json.loads(x) for p in (tmp_path / "runs/second/log").glob("r0*/0*[0-9].jsonl") for x in p.open()]
    steps = [event for event in events if event["event"] == "step"]
    assert {event["replay_coverage"] for event in steps} == {1.0}
    assert all(event["sdpo_coverage"] > 0 for event in steps)
    thetas = {(event["step"], event["theta"]) for event in steps if "theta" in event}
    assert len(thetas) == len({step for step, _ in thetas}) >= 3


def test_the_real_models_prompts_are_held_out_and_its_reward_wants_an_end_after_the_sum() -> None:
    import importlib.util

    folder = ROOT / "examples" / "real"
    held_out, prompts = ((folder / name).read_text().splitlines() for name in ("held_out.jsonl", "prompts.jsonl"))
    assert len(set(held_out)) >= 200 and len(set(prompts)) >= 400 and not set(held_out) & set(prompts)
    assert load_config(folder / "run.toml").inner.lora is not None
    spec = importlib.util.spec_from_file_location("real_rewards", folder / "rewards.py")
    assert spec is not None and spec.loader is not None
    rewards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rewards)
    texts = ["7", "7.", "3 + 4 = 7", "17", "", " 7\n", "3 + 4 = 7, as you see", "7 and not 8"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    found = rewards.answer(completions, ["7"] * len(texts))
    assert found == [1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.3, 0.3]
