"""`make real`: a pretrained model, LoRA, three replicas on this machine; one is killed, one leaves with notice.

    diloco train run.toml ── outer step 2: SIGKILL r01 ── outer step 4: SIGTERM r02 ── all outer steps
    diloco export, report ── evaluate.py before and after ── the table, and what must hold

The same command continues an unfinished run. This script runs the commands that a reader would type, and sends the two
signals.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import torch

from diloco.runlog.reader import read_report
from diloco.runlog.summary import checks
from rendezvous.stores.open import open_store

HERE = Path(__file__).parent
CONFIG = HERE / "run.toml"
SIGNALS = (("r01", 2, signal.SIGKILL), ("r02", 4, signal.SIGTERM))  # slot, first outer step for it, signal


def diloco(*words: str) -> list[str]:
    return [sys.executable, "-m", "executors.cli.main", *words]


def changes(seed: int, alone: bool) -> list[str]:
    """Return the changes of run.toml.   alone: one replica takes as many samples as the whole fleet."""
    found = [f"seed={seed}"]
    if torch.cpu.get_capabilities().get("amx_bf16"):
        found.append("inner.autocast=bfloat16")
    if alone:
        fleet = tomllib.loads(CONFIG.read_text())["fleet"]
        found += ["fleet.replicas=1", f"fleet.steps={fleet['replicas'] * fleet['steps']}"]
    return found


def train(run: str, seed: int, alone: bool) -> int:
    """Run run.toml, with the two signals unless `alone`; return the exit code."""
    settings = [word for change in changes(seed, alone) for word in ("--set", change)]
    process = subprocess.Popen(diloco("train", str(CONFIG), "--run", run, *settings))
    due = [] if alone else list(SIGNALS)
    while process.poll() is None:
        time.sleep(0.5)
        if due and send(*due[0], run=run):
            due.pop(0)
    return process.returncode


def send(slot: str, step: int, number: signal.Signals, run: str) -> bool:
    """Send the signal if the replica is in the inner steps of outer step `step` or a later one."""
    if not (Path(run) / "run.json").is_file():
        return False
    beat = read_report(open_store(run)).beats.get(slot)
    if beat is None or beat.phase != "train" or beat.step < step or beat.inner < 1:
        return False
    print(f"{number.name} to {slot} (process {beat.pid}) in outer step {beat.step}", flush=True)
    try:
        os.kill(beat.pid, number)
    except ProcessLookupError:  # gone since
        return False
    return True


def evaluate(run: Path) -> dict[str, Any]:
    """Return the held-out rewards, before and after, of exports beside the run."""
    found, beside = dict[str, Any](), run.with_name(f"{run.name}-exports")
    exports = {"base": ["--step", "0", "--merge"], "adapter": [], "merged": ["--merge"]}
    for name, options in exports.items():
        subprocess.run(diloco("export", str(run), "--to", str(beside / name), *options), check=True)
    for name, folders in (("before", ["base"]), ("after", ["base", "adapter"])):
        words = [sys.executable, str(HERE / "evaluate.py"), *(str(beside / folder) for folder in folders)]
        found[name] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return found


def table(found: dict[str, Any]) -> str:
    rows = ["held out            reward            right   right, and stopped   prompts"]
    for kind in ("sampled", "greedy"):
        for name, values in found.items():
            v = values[kind]
            reward = f"{v['reward']:.3f} ± {v['se']:.3f}"
            shares = f"{v['right']:6.2f}   {v['stopped']:18.2f}"
            rows.append(f"{kind:8s} {name:7s}    {reward}   {shares}   {v['prompts']:7d}")
    return "\n".join(rows)


def gains(found: dict[str, Any]) -> dict[str, float]:
    """after − before, in standard errors of the difference."""
    return {
        kind: (found["after"][kind]["reward"] - found["before"][kind]["reward"])
        / (found["after"][kind]["se"] ** 2 + found["before"][kind]["se"] ** 2) ** 0.5
        for kind in ("sampled", "greedy")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--run", default="runs/real")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="one replica, three times as many outer steps, no signals")
    args = parser.parse_args()
    began = time.monotonic()
    if code := train(args.run, args.seed, args.alone):
        return code
    trained = time.monotonic()
    found = evaluate(Path(args.run))
    subprocess.run(diloco("report", args.run), check=True)
    report = read_report(open_store(args.run))
    print("\n" + table(found))
    print("gain in standard errors:", {kind: round(gain, 1) for kind, gain in gains(found).items()})
    print(f"replicas ended: {', '.join(sorted({session.how for session in report.sessions}))}")
    print(f"trained for {trained - began:.0f} s, in all {time.monotonic() - began:.0f} s")
    for check in checks(report):
        print(f"  {'ok ' if check.ok else 'NO '} {check.text}")
    (Path(args.run) / "held_out.json").write_text(json.dumps(found, indent=1))
    return 0 if all(check.ok for check in checks(report)) else 1


if __name__ == "__main__":
    sys.exit(main())
