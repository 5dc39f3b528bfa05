"""What only a GPU shows: its gradients are a CPU's, its fleet survives a kill, and full memory ends a life with words.

`make test-gpu` runs these beside the CUDA cases of the codecs and of the outer step.  Elsewhere they are skipped.

Not promised: anything about several GPUs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.runlog.reader import read_report
from diloco.runlog.summary import actor_words
from inner.train.trainer import LESSONS
from rendezvous.records.judgements import RolloutVerdict
from rendezvous.records.records import decode_or_none
from rendezvous.stores.open import open_store
from tests.inner.test_channels import world_pairs
from tests.inner.test_toolworld import small_folder
from tests.inner.test_trainer import make, measure, rollouts
from tests.support.audit import check_run

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]
IMPORTS = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
CHANNELS: dict[str, Any] = {"alpha_sdpo": 0.5, "sdpo_teacher": "frozen", "beta_replay": 0.3}


def composed(batch: dict[str, Any] | None, autocast: str) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """The batch, the composed loss and its gradient, all on the host.   batch: None makes one."""
    trainer = make(pairs=world_pairs(), config={"autocast": autocast}, **CHANNELS)
    made = rollouts(trainer)
    given = on(batch or made, trainer.accelerator.device)
    loss, gradient = measure(trainer.model, lambda: trainer._compute_loss(trainer.model, given))
    return on(given, "cpu"), loss.cpu(), gradient.cpu()


def on(batch: dict[str, Any], device: Any) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def write_reference(path: str) -> None:
    """In a process without a GPU."""
    batch = torch.load(path, weights_only=False)
    torch.save(composed(batch, "off")[1:], path)


def test_the_composed_loss_has_a_cpus_gradient(tmp_path: Path) -> None:
    """GRPO, distillation and replay on one batch: in float32 equal, in bfloat16 in the same direction."""
    batch, loss, gradient = composed(None, "off")
    assert sum(map(bool, batch[LESSONS])) > 2
    _, loss16, gradient16 = composed(batch, "bfloat16")
    path = str(tmp_path / "batch.pt")
    torch.save(batch, path)
    there = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": IMPORTS}
    code = f"from tests.gpu.test_gpu import write_reference; write_reference({path!r})"
    subprocess.run([sys.executable, "-c", code], env=there, check=True, timeout=120)
    expected, reference = torch.load(path)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient, reference, rtol=1e-3, atol=1e-5)
    assert not torch.equal(gradient16, gradient) and torch.cosine_similarity(gradient16, gradient, dim=0) > 0.999
    torch.testing.assert_close(loss16, loss, rtol=0.02, atol=2e-3)


def test_the_demo_on_the_gpu(tmp_path: Path) -> None:
    done = diloco(tmp_path, "demo", "--run", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    check_run(tmp_path / "run", 12)


ACTORS = """name = "acted"
[fleet]
replicas = 1
min_replicas = 1
steps = 10
record_rollouts = true
broadcast_weights = true
check_rollouts = 1.0
staleness = 1
[outer]
sync_every = 6
[inner]
model = "toolworld"
batch_size = 32
lr = 1e-3
"""


def test_actors_sample_on_the_gpu_and_an_audit_takes_each_inner_step_again(tmp_path: Path) -> None:
    """Each bundle of theirs is checked with the weights that it names; products in bfloat16 give no doubt."""
    (tmp_path / "run.toml").write_text(ACTORS)
    done = diloco(tmp_path, "train", "run.toml", "--run", "run", "--actors", "2", "--no-preflight", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    check_run(tmp_path / "run", 10)
    report = read_report(open_store(str(tmp_path / "run")))
    checked = [read_verdict(path) for path in (tmp_path / "run" / "rollouts").glob("*/*/*.verdict")]
    assert checked and not report.of_kind("rollouts_doubted"), actor_words(report)
    assert max(verdict.disagreement for verdict in checked) < 0.01
    audit = diloco(tmp_path, "verify", "run", "--inner")
    print(audit.stdout, actor_words(report), sorted(verdict.disagreement for verdict in checked)[-3:])
    assert audit.returncode == 0 and " 0 differ" in audit.stdout, audit.stdout + audit.stderr


def read_verdict(path: Path) -> RolloutVerdict:
    verdict = decode_or_none(RolloutVerdict, path.read_bytes())
    assert verdict is not None
    return verdict


# the first life takes all memory before its second inner step; the second life leaves it
GREEDY = """
import pathlib, torch
FLAG, HELD, CALLS = pathlib.Path("{flag}"), [], []

def score(completions, **_):
    CALLS.extend([1] * (len(completions) == 8))  # pre-flight calls it with fewer
    if len(CALLS) == 2 and not FLAG.exists():
        FLAG.write_text("")
        for size in (2**32, 2**30, 2**27, 2**24, 2**21, 2**16, 512):
            try:
                while True:
                    HELD.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                pass
    return [float(len(set(text))) for text in completions]
"""


def test_full_memory_in_the_middle_of_a_step_ends_a_life_with_words(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY.replace("{flag}", str(tmp_path / "taken")))
    prompts = [json.dumps({"prompt": f"say {i}"}) for i in range(16)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    (tmp_path / "run.toml").write_text(
        'name = "greedy"\n[fleet]\nreplicas = 1\nmin_replicas = 1\nsteps = 3\n[outer]\nsync_every = 2\n'
        f'[inner]\nmodel = "{small_folder()}"\nbatch_size = 8\n[inner.data]\nprompts = "prompts.jsonl"\n'
        '[inner.rewards]\nfunction = "greedy.py:score"\n'
        "[inner.sampling]\nnum_generations = 4\nmax_completion_length = 8\n"
    )
    done = diloco(tmp_path, "train", "run.toml", "--run", "run")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "out of GPU memory: " in said and "Next: halve inner.batch_size" in said
    assert "attempt=2" in said
    check_run(tmp_path / "run", 3)


def diloco(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "executors.cli.main", *words],
        cwd=folder, capture_output=True, text=True, timeout=150,
        env={**os.environ, "PYTHONPATH": IMPORTS},
    )  # fmt: skip
