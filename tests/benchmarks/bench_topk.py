"""Top-k on the supervised loop: the loss it reaches, and the bytes it takes, with and without error feedback.

    python -m tests.benchmarks.bench_topk [SEEDS=3] [STEPS=240] [SYNC_EVERY=5]

    fp32                  the run as it is by default
    topk                  the same settings, codec = "topk"
    topk, no feedback     the same, and what a body loses is forgotten

The three at once, and every outer step with all four replicas of each (min_replicas = 4), so that nothing depends on
how busy the machine is.  Real processes, the tiny model, sums of two numbers below 100; the held-out sums are in
no replica's text.  Runs of one seed begin with the same model and see the same data in the same order.  Held-out loss
in nats per byte at a third, two thirds and the end; mean over seeds ± half of their spread, then the difference from
fp32 of the same seed ± its standard error.  Bytes are those of blobs, counted at the store of replica r00, per outer
step, up and down.  These bodies are small, so fp32 goes direct; from 8 MiB on it is reduced in shards, S + S/N up and
2(N−1)/N·S down, and the factor is against that.

Not promised: the same for another model; top-k has to send everything in turn, so it needs many outer steps.
"""

import json
import os
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from threading import Lock
from typing import Any

import numpy as np
import torch

from diloco.model import export as history
from diloco.model.fetch import fetch_model
from diloco.model.publish import publish_model
from diloco.run.config import RunConfig
from diloco.run.founding import open_run
from diloco.run.record import Run
from diloco.run.sizing import BUILT_IN
from rendezvous import layout
from rendezvous.clock import SystemClock
from tests.support.fleet import context

REPLICAS = 4
ONE_AT_A_TIME = Lock()
FORMS = {"fp32": ("fp32", True), "topk": ("topk", True), "topk, no feedback": ("topk", False)}
_ALL = [(a, b) for a in range(100) for b in range(100)]
random.Random(0).shuffle(_ALL)


def lines(pairs: list[tuple[int, int]]) -> str:
    return "".join(f"{a} plus {b} is {a + b}.\n" for a, b in pairs)


TEXT, HELD_OUT = lines(_ALL[:9000]), lines(_ALL[9000:])


def replica(url: str, slot: str, feedback: bool) -> None:
    """A child process: a replica that counts the bytes of its blobs."""
    from diloco.replica import main
    from rendezvous.engine import rendezvous
    from rendezvous.records.wire import Encoder
    from rendezvous.stores.files import FileStore

    torch.set_num_threads(1)
    log = os.open(f"{url}/{slot}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    if not feedback:
        rendezvous.Encoder = lambda name: Encoder(name, feedback=False)  # type: ignore[assignment, misc]
    moved, put, get_into = {"up": 0, "down": 0}, FileStore.put, FileStore.get_into

    def counted_put(self: FileStore, key: str, body: Any) -> None:
        moved["up"] += memoryview(body).nbytes if key.endswith(".bin") else 0
        put(self, key, body)

    def counted_get(self: FileStore, key: str, out: memoryview, start: int = 0) -> bool:
        moved["down"] += out.nbytes
        return get_into(self, key, out, start)

    FileStore.put, FileStore.get_into = counted_put, counted_get  # type: ignore[method-assign]
    code = main([url, "--slot", slot])
    Path(f"{url}/{slot}.bytes").write_text(json.dumps(moved))
    os._exit(code)


def founded(folder: Path, codec: str, seed: int, steps: int, sync_every: int) -> Run:
    (folder / "text.txt").write_text(TEXT)
    inner = {"loop": "supervised", "model": "tiny", "data": {"text": "text.txt", "context_length": 32}, "batch_size": 4}
    config = {
        "seed": seed,
        "outer": {"sync_every": sync_every, "codec": codec, "snapshot_every": max(1, steps // 12)},
        "inner": inner,
        "fleet": {"replicas": REPLICAS, "steps": steps, "min_replicas": REPLICAS},
    }
    return open_run(RunConfig.from_dict(config, folder), str(folder / "run"), SystemClock())


def held_out_loss(run: Run, step: int) -> float:
    """Nats per byte of θ_step on the held-out sums."""
    from transformers import AutoModelForCausalLM

    record = publish_model(run, SystemClock())
    with tempfile.TemporaryDirectory() as scratch:
        model = AutoModelForCausalLM.from_pretrained(fetch_model(run.store, record, Path(scratch)))
    history.put_into(model, history.state_at(run, record, step)[1])
    ids = torch.from_numpy(np.frombuffer(HELD_OUT.encode(), np.uint8).astype(np.int64))
    ids = ids[: len(ids) // 33 * 33].view(-1, 33)
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits.float()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))


def trained(codec: str, feedback: bool, seed: int, steps: int, sync_every: int) -> tuple[list[float], float, float]:
    """-> held-out losses on the way, bytes up and bytes down per outer step."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as root:
        with ONE_AT_A_TIME:
            run = founded(Path(root), codec, seed, steps, sync_every)
            publish_model(run, SystemClock())
            slots = [layout.slot_name(i) for i in range(REPLICAS)]
            children = [context().Process(target=replica, args=(run.url, slot, feedback)) for slot in slots]
            for child in children:
                child.start()
        for child in children:
            child.join()
        assert all(c.exitcode == 0 for c in children), Path(f"{run.url}/r00.log").read_text()
        moved = json.loads(Path(f"{run.url}/r00.bytes").read_text())
        with ONE_AT_A_TIME:
            losses = [held_out_loss(run, t) for t in (steps // 3, 2 * steps // 3, steps)]
        return losses, moved["up"] / steps, moved["down"] / steps


def main(seeds: int = 3, steps: int = 240, sync_every: int = 5) -> None:
    found: dict[str, list[tuple[list[float], float, float]]] = {name: [] for name in FORMS}
    for seed in range(seeds):
        with ThreadPoolExecutor() as pool:
            runs = {name: pool.submit(trained, *form, seed, steps, sync_every) for name, form in FORMS.items()}
        for name, run in runs.items():
            found[name].append(run.result())
            print(f"seed {seed}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    print(f"N = {REPLICAS}, H = {sync_every}, {steps} outer steps, {seeds} seeds")
    print(f"{'':20}{'loss at ' + str(steps // 3):>18}{2 * steps // 3:>18}{steps:>18}{'up':>11}{'down':>11}{'fewer':>9}")
    body = 4 * BUILT_IN["tiny"]
    for name, runs in found.items():
        up, down = fmean(r[1] for r in runs), fmean(r[2] for r in runs)
        columns = [[r[0][i] for r in runs] for i in range(3)]
        shown = "".join(f"{fmean(c):9.4f} ± {(max(c) - min(c)) / 2:6.4f}" for c in columns)
        fewer = body * (1 + 1 / REPLICAS + 2 * (REPLICAS - 1) / REPLICAS) / (up + down)
        print(f"{name:20}{shown}{up:11,.0f}{down:11,.0f}{fewer:8.1f}×")
    last = {name: [r[0][-1] for r in runs] for name, runs in found.items()}
    for name in list(FORMS)[1:]:
        apart = [a - b for a, b in zip(last[name], last["fp32"], strict=True)]
        print(f"{name} − fp32 at the end: {fmean(apart):+.4f} ± {deviation(apart) / seeds**0.5:.4f}", end="   ")
    print(f"standard deviation between fp32's seeds: {deviation(last['fp32']):.4f}")


def deviation(losses: list[float]) -> float:
    """Standard deviation; infinite for one."""
    return stdev(losses) if len(losses) > 1 else float("inf")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
