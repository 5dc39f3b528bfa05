"""Inner steps that record their rollouts, beside the same that do not; and what a bundle costs in bytes.

    python -m tests.benchmarks.bench_recorded               5 pairs of 20 steps of ToolWorld, batch 64, 1 minute
    python -m tests.benchmarks.bench_recorded --gguf FILE   SmolLM2 on arithmetic, 2 pairs of 3 steps, 10 minutes

    one pair: with and without, in changing order    ratio = seconds with / without, of the median step after the first
    floor: one PUT of 4 bytes per token, 5 with tools, and 16 kB; one GET in the first step (a run without actors)

The folder is this machine's disk.  Both runs of a pair end with the same bits in every parameter, or this fails.
"""

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from diloco.replica.rollouts import BucketPlaces
from inner import InnerConfig, Seeds, build_inner, publish_model
from inner.rollouts.recording.recorded import record_rollouts
from rendezvous.clock import SystemClock
from rendezvous.records.rollouts import read_record
from rendezvous.stores.files import FileStore

REWARD = "def reward(completions, **_):\n    return [float(len(str(c)) % 7) for c in completions]\n"


def run(config: InnerConfig, folder: Path, files: dict[str, Path], steps: int, to: Path | None) -> tuple[float, Any]:
    """Seconds of the median step after the first, and the parameters."""
    loop: Any = build_inner(config, folder, files, Seeds(data=0, noise=0))
    if to is not None:
        told = lambda event, **fields: print(event, fields)  # noqa: E731
        record_rollouts(
            loop.trainer,
            BucketPlaces(FileStore(to), SystemClock(), told, run="n", slot="r00", by=1, engine="here", staleness=-1),
        )
    at: list[float] = []

    def stop() -> bool:
        at.append(time.perf_counter())
        return len(at) > steps

    loop.train(stop)
    seconds = median(after - before for before, after in pairwise(at))
    return seconds, torch.cat([p.detach().flatten() for p in loop.model.parameters()])


def bytes_per_token(folder: Path) -> tuple[float, float]:
    """Mean bytes of a bundle, and of its tokens beyond the random states."""
    bodies = [path.read_bytes() for path in folder.glob("rollouts/*/*/*")]
    tokens = sum(read_record(body)[0].tokens for body in bodies)
    return sum(map(len, bodies)) / len(bodies), sum(len(body) - 16_000 for body in bodies) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", default="")
    parser.add_argument("--pairs", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        config, files, steps, pairs = InnerConfig(batch_size=64), {}, 20, given.pairs or 5
        if given.gguf:
            (here / "reward.py").write_text(REWARD)
            (here / "rows.jsonl").write_text('{"prompt": "12 + 7 ="}\n{"prompt": "3 * 4 ="}\n')
            config = InnerConfig(
                model=given.gguf, batch_size=8, rewards={"function": "reward.py:reward"},
                data={"prompts": "rows.jsonl"}, sampling={"max_completion_length": 64},
            )  # fmt: skip
            files, steps, pairs = {"reward": here / "reward.py", "prompts": here / "rows.jsonl"}, 3, given.pairs or 2
        publish_model(config, here / "model")
        ratios = []
        for pair in range(pairs):
            kept = here / f"run{pair}"
            kept.mkdir()
            turns = (None, kept) if pair % 2 else (kept, None)  # the second run of a pair is slower or faster by itself
            done = {to: run(config, here / "model", files, steps, to) for to in turns}
            (without, there), (recorded, same) = done[None], done[kept]
            if not torch.equal(there, same):
                raise SystemExit("recording changed the weights")
            ratios.append(recorded / without)
            whole, each = bytes_per_token(kept)
            print(
                f"without {without:.3f} s, with {recorded:.3f} s per step: {ratios[-1]:.3f} ×; "
                f"a bundle {whole / 1000:.0f} kB, {each:.1f} bytes per token",
                flush=True,
            )
    print(f"{median(ratios):.3f} × (median of {pairs} pairs), parameters equal bit for bit")


if __name__ == "__main__":
    main()
