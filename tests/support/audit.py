"""An independent reading of a run: json, numpy and the files, none of the product's code.

θ₀ = snapshots/0 ;  for every commit: check the chain, weigh and sum the listed blobs, step with Nesterov in fp32
and compare the digest of (θ, momentum, the memory of "auto") with the base that the next commit names.
"""

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors.numpy import load_file

from tests.support.independent_reader import decode as decoded


@dataclass
class Audit:
    """thetas[t]: digest before commit t.   theta: the fragments at the end.   events: steps -> digests in the logs."""

    steps: int = 0
    digests: list[str] = field(default_factory=list)
    theta: list[np.ndarray] = field(default_factory=list)
    momentum: list[np.ndarray] = field(default_factory=list)
    listed: list[tuple[int, str]] = field(default_factory=list)
    late: int = 0
    lrs: list[float] = field(default_factory=list)  # the outer lr of each step that was taken
    empty: list[int] = field(default_factory=list)  # steps whose mean was zero
    gated: list[tuple[int, str]] = field(default_factory=list)
    unchecked: list[int] = field(default_factory=list)  # steps whose mean was taken as announced


@dataclass
class Auto:
    """The memory of lr = "auto" for one fragment: some of the last mean, ρ̂ and the number of values in it."""

    some: np.ndarray
    rho: float = 1.0
    count: float = 1.0

    def lr(self, mean: np.ndarray, mu: float) -> float:
        every = mean.size // 65536 + (mean.size // 65536 + 1) % 2
        now = mean[::every].astype(np.float64)
        before, length = self.some.astype(np.float64), _total(now * now)
        if length > 0:
            if (other := _total(before * before)) > 0:
                rho = min(1.0, max(0.0, _total(now * before) / (math.sqrt(length) * math.sqrt(other))))
                self.count = min(self.count + 1.0, 8.0)
                self.rho = self.rho + (rho - self.rho) / self.count
            self.some = mean[::every].copy()
        return float(np.float32(1.0 / (1.0 + mu / (1.0 - mu * self.rho))))

    def arrays(self) -> list[np.ndarray]:
        return [self.some, np.array([self.rho, self.count])]


def _no_mean(elements: int) -> np.ndarray:
    """The sample of a mean of so many elements, before there is one."""
    every = elements // 65536 + (elements // 65536 + 1) % 2
    return np.zeros(len(range(0, elements, every)), np.float32)


def _total(products: np.ndarray) -> float:
    """Σ in 2^14 lanes, from the front; then exactly."""
    lanes = np.zeros(1 << 14)
    for row in np.pad(products, (0, -products.size % lanes.size)).reshape(-1, lanes.size):
        lanes = lanes + row
    return math.fsum(lanes.tolist())


def digest_of(theta: list[np.ndarray], momentum: list[np.ndarray], autos: list[Auto]) -> str:
    """The digest of the fragments' digests, each of which is of its arrays' digests."""
    each, xxh3 = list[str](), xxhash.xxh3_128_hexdigest
    for i, (t, m) in enumerate(zip(theta, momentum, strict=True)):
        arrays = [t, m, *(autos[i].arrays() if autos else [])]
        each.append(xxh3("".join(xxh3(a.tobytes()) for a in arrays).encode()))
    return xxh3("".join(each).encode())


def is_named(body: bytes, announced: str) -> bool:
    """Are these the bytes of this digest, "kind:hex"?"""
    kinds = {"xxh3-128": xxhash.xxh3_128, "sha256": hashlib.sha256}
    kind, _, digits = announced.partition(":")
    return kinds[kind](body).hexdigest() == digits


def audit(root: Path, model: Path | None = None) -> Audit:
    """Replay a run's folder.  AssertionError at the first thing that does not add up.

    model: model.safetensors of a run whose start model is on the Hub; it has one fragment then.
    Where pseudogradients were collected, the announced mean is taken as it is; where means were, the replay begins at
    the first snapshot from which all can be told.  Steps that were not computed again are in `unchecked`.
    """
    record = json.loads((root / "run.json").read_bytes())
    outer, forked = record["config"]["outer"], bool(record.get("parent", {}).get("url"))
    fragments, start = outer["fragments"], _start(root)
    arrays = _first(root, model) if start == 0 else load_file(next((root / f"snapshots/{start:010d}").glob("*.saf*")))
    theta = [arrays[f"theta.{i}"].copy() for i in range(fragments)]
    momentum = [arrays.get(f"momentum.{i}", np.zeros_like(t)).copy() for i, t in enumerate(theta)]
    assert start or forked or not any(name.startswith("momentum") for name in arrays), (
        "snapshot 0 has zeros written down"
    )
    assert start == 0 or outer["lr"] != "auto", "what auto has learned is not read here"
    found, prev, mu = Audit(theta=theta, momentum=momentum), None, np.float32(outer["momentum"])
    autos = [Auto(_no_mean(t.size)) for t in theta] if outer["lr"] == "auto" else []
    while (path := root / "steps" / f"{found.steps:010d}" / "commit.json").exists():
        body = path.read_bytes()
        commit, f = json.loads(body), found.steps % fragments
        assert commit["prev"] == prev, f"chain broken at {found.steps}"
        if found.steps < start:
            found.digests.append(commit["base"])
            _check_listed(commit, found)
            _check_weights(commit, outer, found)
            found.unchecked.append(found.steps)
            prev, found.steps = f"sha256:{hashlib.sha256(body).hexdigest()}", found.steps + 1
            continue
        found.digests.append(digest_of(theta, momentum, autos))
        assert commit["base"] == found.digests[-1], f"commit {found.steps} started from another θ than the replay"
        _check_listed(commit, found)
        _check_weights(commit, outer, found)
        if all((root / o["blob"]).exists() for o in commit["offers"]):
            mean = _mean(root, commit, outer.get("codec", "fp32"), theta[f].size)
        else:
            found.unchecked.append(found.steps)
            mean = _announced(root, commit, outer.get("codec", "fp32"), theta[f].size)
        if not np.count_nonzero(mean):
            found.empty.append(found.steps)  # no round: nothing moves, nothing is learned
        else:
            found.lrs.append(autos[f].lr(mean, outer["momentum"]) if autos else outer["lr"])
            momentum[f][:] = momentum[f] * mu + mean
            theta[f][:] = theta[f] - (momentum[f] * mu + mean) * np.float32(found.lrs[-1])
        prev, found.steps = f"sha256:{hashlib.sha256(body).hexdigest()}", found.steps + 1
    found.digests.append(digest_of(theta, momentum, autos))
    return found


def _start(root: Path) -> int:
    """The first step with a snapshot from which on every step has its bodies or its mean."""
    steps = sorted(int(p.parent.name) for p in root.glob("steps/*/commit.json"))
    lost = [t for t in steps if not _has_bodies(root, t) and not list(root.glob(f"steps/{t:010d}/mean/*.bin"))]
    first = max(lost, default=-1) + 1
    return min(t for p in root.glob("snapshots/*/manifest.json") if (t := int(p.parent.name)) >= first)


def _has_bodies(root: Path, t: int) -> bool:
    commit = json.loads((root / f"steps/{t:010d}/commit.json").read_bytes())
    return all((root / o["blob"]).exists() for o in commit.get("offers", []))


def _first(root: Path, model: Path | None) -> dict[str, np.ndarray]:
    """θ₀: what snapshot 0 has, or the start model's weights in the order of the manifest."""
    blob = json.loads((root / "snapshots" / f"{0:010d}" / "manifest.json").read_bytes())["blob"]
    if blob:
        return load_file(root / blob)
    assert model is not None, "the start model is on the Hub, and nobody says where it can be read"
    manifest, weights = json.loads((root / "model" / "manifest.json").read_bytes()), load_file(model)
    for name, stored in manifest["files"].items():
        assert is_named((model.parent / name).read_bytes(), stored["digest"]), name
    flat = [weights[name].astype(np.float32).reshape(-1) for name, _, _ in manifest["layout"]]
    return {"theta.0": np.concatenate(flat)}


def _check_listed(commit: dict[str, Any], found: Audit) -> None:
    fresh = [o for o in commit["offers"] if o["step"] == commit["t"]]
    assert len(fresh) >= commit["m"], f"commit {commit['t']} has fewer fresh offers than it needs"
    for o in commit["offers"]:
        assert (o["step"], o["slot"]) not in found.listed, f"{o['slot']}'s work for step {o['step']} counted twice"
        found.listed.append((o["step"], o["slot"]))
        found.late += o["step"] < commit["t"]


def _check_weights(commit: dict[str, Any], outer: dict[str, Any], found: Audit) -> None:
    """w = share · γ^age · factor, from the offers' own words."""
    offers, limit = commit["offers"], outer["norm_gate"]
    long = sorted(o["norm"] for o in offers if o["norm"] > 0)
    per_step = sorted(o["norm"] / o["h"] for o in offers if o["norm"] > 0)
    scales = sorted(o["scale"] for o in offers if o["norm"] > 0)
    samples = [o["samples"] for o in offers]
    for o in offers:
        share = o["h"] / outer["sync_every"]
        if outer["weighting"] == "uniform":
            share = 1.0
        elif outer["weighting"] == "samples" and min(samples) > 0:
            share = o["samples"] / max(samples)
        factor = 1.0
        if limit and len(long) >= 3:
            usual = max(float(np.median(long)), float(np.median(per_step)) * o["h"])
            if o["norm"] > limit * max(usual, 0.01 * float(np.median(scales))):
                factor = float(np.float32(usual / o["norm"]))
                found.gated.append((o["step"], o["slot"]))
        for _ in range((commit["t"] - o["step"]) // outer["fragments"]):
            share *= outer["age_discount"]
        assert o["factor"] == factor and o["weight"] == float(np.float32(share * factor)), (commit["t"], o)


def _mean(root: Path, commit: dict[str, Any], name: str, elements: int) -> np.ndarray:
    total: np.ndarray | None = None
    for o in commit["offers"]:
        body = (root / o["blob"]).read_bytes()
        _check_body(body, o, name)
        x = decoded(name, body, elements) * np.float32(o["weight"])
        total = x if total is None else total + x
    assert total is not None
    mean = total / np.float32(sum(o["weight"] for o in commit["offers"]))
    return mean if commit["mode"] == "direct" or name == "fp32" else _requantised(root, commit, name, mean)


def _check_body(body: bytes, o: dict[str, Any], name: str) -> None:
    """A body in shards has the digest of their digests; a shard is a 64th, at least 2^16 elements (tests: 2^12)."""
    whole = "".join(o["shards"]).encode() if o["shards"] else body
    assert is_named(whole, o["digest"]) and len(body) == o["size"], o["blob"]
    if o["shards"] and name == "fp32":
        sizes = [4 * max(least, -(-len(body) // 256)) for least in (1 << 16, 1 << 12)]
        cuts = [[body[at : at + size] for at in range(0, len(body), size)] for size in sizes]
        fitting = [pieces for pieces in cuts if len(pieces) == len(o["shards"])]
        assert any(all(map(is_named, pieces, o["shards"])) for pieces in fitting), o["blob"]


def _requantised(root: Path, commit: dict[str, Any], name: str, mean: np.ndarray) -> np.ndarray:
    """The announced bytes of a mean that was reduced in shards: its own, second, rounding, and no more than that."""
    announced = _announced(root, commit, name, mean.size)
    steps = {"bf16": 256, "int8": 254, "int4": 14}[name]
    assert announced.size == mean.size and np.abs(announced - mean).max() <= 1.01 * np.abs(mean).max() / steps
    return announced


def _announced(root: Path, commit: dict[str, Any], name: str, size: int) -> np.ndarray:
    """The mean that was written down; of a direct step in fp32, of a sharded one in the codec of the bodies."""
    parts, at = list[np.ndarray](), 0
    for path in sorted((root / "steps" / f"{commit['t']:010d}" / "mean").glob("*.json")):
        record = json.loads(path.read_bytes())
        body = (root / record["blob"]).read_bytes()
        assert is_named(body, record["digest"])
        if commit["mode"] == "direct" or name == "fp32":
            parts.append(np.frombuffer(body, "<f4"))
        else:
            per = {"bf16": (1, 2), "int8": (1024, 1028), "int4": (512, 260)}[name]
            parts.append(decoded(name, body, min(len(body) // per[1] * per[0], size - at)))
        at += parts[-1].size
    assert at == size, f"step {commit['t']}: neither its pseudogradients nor its mean can be read any more"
    return np.concatenate(parts)


def logged_digests(root: Path) -> dict[int, set[str]]:
    """step committed -> every digest that any replica reported after it."""
    seen: dict[int, set[str]] = {}
    for path in sorted(root.glob("log/*/*.jsonl")):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event.get("event") == "step":
                seen.setdefault(event["step"], set()).add(event["theta"])
    return seen


def check_run(root: Path, steps: int, model: Path | None = None) -> Audit:
    """The whole check: the replay, and that every replica held the replayed θ after every commit it reported."""
    found = audit(root, model)
    assert found.steps == steps, f"{found.steps} of {steps} outer steps were committed"
    for step, digests in logged_digests(root).items():
        assert digests == {found.digests[step + 1]}, f"after step {step} replicas held {digests}"
    return found
