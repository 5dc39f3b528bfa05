"""An independent reading of a run: json, numpy and the files, none of the product's code.

θ₀ = snapshots/0 ;  for every commit: check the chain, weigh and sum the listed blobs, step with Nesterov in fp32
and compare the digest of (θ, momentum) with what the next commit says it started from.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors.numpy import load_file


@dataclass
class Audit:
    """thetas[t]: digest before commit t.   theta: the fragments at the end.   events: steps -> digests in the logs."""

    steps: int = 0
    digests: list[str] = field(default_factory=list)
    theta: list[np.ndarray] = field(default_factory=list)
    momentum: list[np.ndarray] = field(default_factory=list)
    listed: list[tuple[int, str]] = field(default_factory=list)
    late: int = 0


def digest_of(theta: list[np.ndarray], momentum: list[np.ndarray]) -> str:
    h = xxhash.xxh3_128()
    for t, m in zip(theta, momentum, strict=True):
        h.update(t.tobytes())
        h.update(m.tobytes())
    return h.hexdigest()


def audit(root: Path) -> Audit:
    """Replay a run's folder.  AssertionError at the first thing that does not add up."""
    outer = json.loads((root / "run.json").read_bytes())["config"]["outer"]
    start = root / "snapshots" / f"{0:010d}"
    arrays = load_file(root / json.loads((start / "manifest.json").read_bytes())["blob"])
    fragments = outer["fragments"]
    theta = [arrays[f"theta.{i}"].copy() for i in range(fragments)]
    momentum = [arrays[f"momentum.{i}"].copy() for i in range(fragments)]
    found, prev = Audit(theta=theta, momentum=momentum), None
    lr, mu = np.float32(outer["lr"]), np.float32(outer["momentum"])
    while (path := root / "steps" / f"{found.steps:010d}" / "commit.json").exists():
        body = path.read_bytes()
        commit, f = json.loads(body), found.steps % fragments
        assert commit["prev"] == prev, f"chain broken at {found.steps}"
        found.digests.append(digest_of(theta, momentum))
        assert commit["base"] == found.digests[-1], f"commit {found.steps} started from another θ than the replay"
        _check_listed(commit, found)
        mean = _mean(root, commit, outer.get("codec", "fp32"), theta[f].size)
        momentum[f][:] = momentum[f] * mu + mean
        theta[f][:] = theta[f] - (momentum[f] * mu + mean) * lr
        prev, found.steps = xxhash.xxh3_128_hexdigest(body), found.steps + 1
    found.digests.append(digest_of(theta, momentum))
    return found


def _check_listed(commit: dict[str, Any], found: Audit) -> None:
    fresh = [o for o in commit["offers"] if o["step"] == commit["t"]]
    assert len(fresh) >= commit["m"], f"commit {commit['t']} has fewer fresh offers than it needs"
    for o in commit["offers"]:
        assert (o["step"], o["slot"]) not in found.listed, f"{o['slot']}'s work for step {o['step']} counted twice"
        found.listed.append((o["step"], o["slot"]))
        found.late += o["step"] < commit["t"]


def decoded(name: str, body: bytes, elements: int) -> np.ndarray:
    """A body as fp32, written down again from the drawings in rendezvous/codecs."""
    if name == "fp32":
        return np.frombuffer(body, np.float32)
    if name == "bf16":
        return (np.frombuffer(body, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if name in ("int8", "int4"):
        width = 4 + (1024 if name == "int8" else 256)
        rows = np.frombuffer(body, np.uint8).reshape(-1, width)
        scale = np.ascontiguousarray(rows[:, :4]).view(np.float32)
        codes = rows[:, 4:].view(np.int8).astype(np.int16)
        if name == "int4":
            low = ((codes + 8) & 15) - 8
            codes = np.concatenate([low, (codes - low) >> 4], axis=1)
        return (codes.astype(np.float32) * scale).reshape(-1)[:elements]
    from rendezvous.codecs import codec  # top-k's bit fields are checked by its own tests

    out = np.empty(elements, np.float32)
    codec(name).decode(body, out)
    return out


def _mean(root: Path, commit: dict[str, Any], name: str, elements: int) -> np.ndarray:
    total: np.ndarray | None = None
    for o in commit["offers"]:
        body = (root / o["blob"]).read_bytes()
        assert xxhash.xxh3_128_hexdigest(body) == o["digest"], o["blob"]
        x = decoded(name, body, elements) * np.float32(o["weight"])
        total = x if total is None else total + x
    assert total is not None
    mean = total / np.float32(sum(o["weight"] for o in commit["offers"]))
    return mean if commit["mode"] == "direct" or name == "fp32" else _requantised(root, commit, name, mean)


def _requantised(root: Path, commit: dict[str, Any], name: str, mean: np.ndarray) -> np.ndarray:
    """What was announced for a mean that was reduced in shards: its own, second, rounding, and no more than that."""
    parts, at = [], 0
    for path in sorted((root / "steps" / f"{commit['t']:010d}" / "mean").glob("*.json")):
        record = json.loads(path.read_bytes())
        body = (root / record["blob"]).read_bytes()
        assert xxhash.xxh3_128_hexdigest(body) == record["digest"]
        per = {"bf16": (1, 2), "int8": (1024, 1028), "int4": (512, 260)}[name]
        elements = min(len(body) // per[1] * per[0], mean.size - at)
        parts.append(decoded(name, body, elements))
        at += elements
    announced = np.concatenate(parts)
    steps = {"bf16": 256, "int8": 254, "int4": 14}[name]
    assert announced.size == mean.size and np.abs(announced - mean).max() <= 1.01 * np.abs(mean).max() / steps
    return announced


def logged_digests(root: Path) -> dict[int, set[str]]:
    """step committed -> every digest that any replica reported after it."""
    seen: dict[int, set[str]] = {}
    for path in sorted(root.glob("log/*/*.jsonl")):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "step":
                seen.setdefault(event["step"], set()).add(event["theta"])
    return seen


def check_run(root: Path, steps: int) -> Audit:
    """The whole check: the replay, and that every replica held the replayed θ after every commit it reported."""
    found = audit(root)
    assert found.steps == steps, f"{found.steps} of {steps} outer steps were committed"
    for step, digests in logged_digests(root).items():
        assert digests == {found.digests[step + 1]}, f"after step {step} replicas held {digests}"
    return found
