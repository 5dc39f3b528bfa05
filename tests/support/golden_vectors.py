"""Writes tests/data/golden_vectors.json: bytes and digests that every implementation of docs/formats.md must reproduce.

    python -m tests.support.golden_vectors only after a deliberate change of a format (then records.WIRE changes, too)

All is made by the product.  tests/rendezvous/test_golden_vectors.py makes it again and compares;
tests/support/independent_reader.py reads it.

Inputs can be made in any language:   x_i = fl32( ((2654435761·i + seed) mod 2^32) / 2^31 − 1 ) · 2^exponent

in fp64 up to the one rounding to fp32, piece by piece with an exponent each; then `edges` [index, fp32 bits as 8
hexadecimal digits, big end first] are put in.  Bytes are base64; vectors are little-endian fp32.

Not promised: topk's bytes where magnitudes are equal, or where another order of a sum rounds a level differently.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from diloco.outer.optimizer import Nesterov, OuterState
from diloco.run.record import ModelRecord, RunRecord, Superseded
from rendezvous.clock import SystemClock
from rendezvous.means.reduce import Reducer, Rules
from rendezvous.records import records
from rendezvous.records.digests import SHA256, digest
from rendezvous.records.judgements import LateReward, RolloutVerdict
from rendezvous.records.rollouts import Rollouts
from rendezvous.records.wire import Encoder, as_bytes, codec_alignment, shard_grid
from rendezvous.stores.memory import MemoryStore
from rendezvous.stores.signed import Seal, sign_record
from tests.support.body_digests import body_digests

PATH = Path(__file__).parents[1] / "data" / "golden_vectors.json"
Piece = list[int]  # start, stop, exponent
Edge = list[Any]  # index, bits

ZEROS: list[Edge] = [[0, "00000000"], [1, "80000000"], [2, "00000001"], [3, "807fffff"], [4, "00800000"]]
HUGE = "7f61b1e6"  # 3e38
# codec: pieces, edges of round 0 (later rounds: none)
INPUTS: dict[str, tuple[list[Piece], list[Edge]]] = {
    "fp32": ([[0, 37, 0]], [*ZEROS, [5, "7f7fffff"]]),
    "bf16": ([[0, 20, 0], [20, 30, -140], [30, 37, 100]], [*ZEROS, [5, "7f7f9000"], [6, "3f808000"], [7, "3f818000"]]),
    "int8": ([[0, 1024, -7], [1024, 2048, -135], [2048, 2053, 120]], [*ZEROS, [2050, HUGE]]),
    "int4": ([[0, 512, -7], [512, 1024, -135], [1024, 1029, 120]], [*ZEROS, [1026, HUGE]]),
    "topk": ([[0, 8192, -7], [8192, 8201, 20]], [*ZEROS]),
    "bf16-gate": ([[0, 1001, -9]], [*ZEROS]),
}


def vector(pieces: list[Piece], edges: list[Edge], seed: int) -> np.ndarray:
    n = pieces[-1][1]
    x = (((np.arange(n, dtype=np.uint64) * 2654435761 + seed) % 2**32) / 2**31 - 1).astype(np.float32)
    for start, stop, exponent in pieces:
        x[start:stop] = np.ldexp(x[start:stop], exponent)
    for index, bits in edges:
        x[index] = np.frombuffer(bytes.fromhex(bits)[::-1], np.float32)[0]
    return x


def b64(array: np.ndarray | bytes) -> str:
    return base64.b64encode(bytes(array) if isinstance(array, bytes) else array.tobytes()).decode()


def codec_rounds(name: str) -> dict[str, Any]:
    """Three bodies of one sender, one after the other; the residual begins with zeros."""
    (pieces, edges), encoder, rounds = INPUTS[name], Encoder(name), list[dict[str, Any]]()
    theta = vector([[0, pieces[-1][1], 0]], [], 77)
    for seed in range(3):
        x = vector(pieces, edges if seed == 0 else [], seed)
        body = encoder.encode(0, x, theta if name == "bf16-gate" else None).tobytes()
        kept = {key.partition(".")[0]: digest(as_bytes(array)) for key, array in encoder.unsent_residuals.items()}
        rounds.append({"seed": seed, "edges": edges if seed == 0 else [], "x": digest(as_bytes(x))})
        rounds[-1] |= {"body": b64(body), "digest": digest(body), "sha256": digest(body, SHA256), "after": kept}
    return {"pieces": pieces, "theta_seed": 77 if name == "bf16-gate" else None, "rounds": rounds}


def grids() -> list[dict[str, Any]]:
    cases = [(5, 1, 65536), (65536, 1, 65536), (65537, 1, 65536), (1_000_003, 1024, 65536), (50_000_000, 512, 65536)]
    return [_grid(n, align, least, owners) for n, align, least in cases for owners in (1, 2, 3, 5, 8)]


def _grid(n: int, align: int, least: int, owners: int) -> dict[str, Any]:
    ranges = shard_grid(n, align, least)
    name = {1: "fp32", 512: "int4", 1024: "int8"}[align]
    reducer = Reducer(MemoryStore(), SystemClock(), lambda *_, **__: None, Rules(codec=name, shard_elements=least))
    parts = reducer.parts.split(commit_of([f"r{i:02d}" for i in range(owners)]), n)
    shape = {"elements": n, "align": align, "least": least, "shard": ranges[0][1], "shards": len(ranges)}
    return {**shape, "owners": owners, "parts": [len(part) for part in parts]}


def commit_of(owners: list[str], mode: str = "sharded") -> records.Commit:
    listed = records.Listed(
        7, "r00", 2, "00f1e2d3c4b5a697", "steps/0000000007/delta/r00-2-0011223344556677.bin", 1234,
        "xxh3-128:" + "5" * 32, 3, float(np.float32(0.3)), shards=("xxh3-128:" + "a" * 32, "xxh3-128:" + "b" * 32),
        samples=24.0, norm=0.5, scale=10.0,
    )  # fmt: skip
    return records.Commit(
        7, "sha256:" + "0" * 64, "c" * 32, (listed,), {"r00": 2, "r01": 1}, 1, 1.25, 5, "r00-2", "aa55aa55aa55aa55",
        1.7e9, mode, tuple(owners),
    )  # fmt: skip


def one_of_each() -> dict[str, records.Record]:
    key, sha = "steps/0000000007/delta/r00-2-0011223344556677.bin", "sha256:" + "1" * 64
    return {
        "replicas/r00/000002.json": records.Claim("r00", 2, "0123456789abcdef", 1.5, "höst", 4711),
        "replicas/r00/000003.json": records.Claim("r00", 3, "n0", 2.5, "höst~5f0c3a9d1e27", 4711, 123456),
        "steps/0000000007/offer/r00.0.json": records.Offer(
            7, "r00", 2, "00f1e2d3c4b5a697", "c" * 32, 3, key, 1234, "xxh3-128:" + "5" * 32, 2.0, 1.7e9,
            24.0, 0.5, 10.0, codec="int8", stats={"loss": 1e-07, "reward": 0.1},
        ),
        "steps/0000000007/commit.json": commit_of(["r00", "r01", "r02"]),
        "steps/0000000000/commit.json": Superseded("n7", 8.0),
        "steps/0000000007/mean/0001.json": records.Mean(7, "steps/0000000007/mean/0011223344556677.bin", 8, sha, "n1"),
        "snapshots/0000000008/manifest.json": records.Snapshot(
            8, "c" * 32, sha, "snapshots/0000000008/0011223344556677.safetensors", 99, sha, "n2", False
        ),
        "weights/0000000008/manifest.json": records.Weights(
            8, "c" * 32, "", "xxh3-128:" + "7" * 32, 6, 6,
            (records.WeightsPart("weights/0000000008/0011223344556677-0000.bin", 40, sha),), "n8", 7.5,
            [["w", [2, 3], "float32"]],
        ),
        "rollouts/r00/0000000042/0000.1.bundle": Rollouts(
            "5ea1", "r00", (42, 0), 7, 2, "transformers", 1, 16, 161, "xxh3-128:" + "8" * 32, "n10"
        ),
        "rollouts/r00/0000000042/0000.1.0003.human.reward": LateReward("n10", 3, "human", 0.7, 0.25, 9.5, "n13"),
        "rollouts/r00/0000000042/0000.0.verdict": RolloutVerdict("n11", "a07", 2, 7, 0.649, -0.5, "4 bits", "n12"),
        "leave/r00-2.json": records.Leave("r00", 2, 8, "c" * 32, "done", "n3", 2.5),
        "control/000000.json": records.Control(0, "n4", 3.0, replicas=3, steps=40, min_replicas=2, max_usd=12.5),
        "control/000001.json": records.Control(
            1, "n9", 4.0, until=1804.0, spent=records.Spent(1.5, 0.25, 8.0, at=4.0, until=1804.0, logged=3)
        ),
        "alive/r00.json": records.Beat("r00", 2, 17, "train", 8, 3, 0.25, 4.0, "host", 4711),
        "alive/r01.json": records.Beat(
            "r01", 1, 9, "wait", 8, 6, 0.25, 4.5, "host", 4712, "evaluates", data=24, box_usd=0.5, evaluates=True
        ),
        "seal.json": Seal("5ea1", 5.0),
        "run.json": RunRecord({"outer": {"lr": 0.7}}, {"outer": {"codec": "fp32", "lr": 0.7}}, {}, "n5", 6.0),
        "model/manifest.json": ModelRecord(
            {"config.json": {"key": "model/0011/config.json", "digest": sha}}, [["w", [2, 3], "float32"]], "n6", 7.0
        ),
    }  # fmt: skip


SECRET, RUN = b"a key that nobody guesses", "5ea1"


def record_of(key: str, record: records.Record) -> dict[str, Any]:
    body, run = record.encode(), "" if key == "seal.json" else RUN
    text = sign_record(body, SECRET, run, key).decode()
    return {"bytes": body.decode(), "sha256": digest(body, SHA256), "run": run, "sealed": text}


def log() -> dict[str, str]:
    body, key = b'{"event":"step","step":0}\n{"event":"left"}\n', "log/r00-2/000000.jsonl"
    return {"key": key, "bytes": body.decode(), "sealed": sign_record(body, SECRET, RUN, key).decode()}


def outer_steps(lr: float | str) -> dict[str, Any]:
    """Two fragments, four steps; the last mean is −0 everywhere.   bases: before each step, and after the last."""
    sizes, bases = (5, 3), list[str]()
    thetas = [torch.from_numpy(vector([[0, n, 0]], [], 100 + n)) for n in sizes]
    state = OuterState(thetas, [Nesterov(nn.Parameter(t), lr=lr, momentum=0.9) for t in thetas])
    state.thetas = [o.flat.data for o in state.optimizers]
    steps = [(0, 200), (1, 201), (0, 202), (0, -1)]
    for fragment, seed in steps:
        bases.append(state.digest())
        n = sizes[fragment]
        state.apply(fragment, np.full(n, -0.0, np.float32) if seed < 0 else vector([[0, n, -5]], [], seed))
    arrays = {name: b64(array) for name, array in state.all_arrays().items()}
    return {"lr": lr, "momentum": 0.9, "sizes": sizes, "steps": steps, "bases": [*bases, state.digest()], "end": arrays}


def means(name: str) -> dict[str, Any]:
    """Three bodies of one round with different weights, reduced directly, and by two owners."""
    n, weights = {"int8": 2100, "fp32": 70}[name], [0.3, 1.0, 0.7]
    rules, store = Rules(codec=name, shard_elements=1 if name == "fp32" else 1024), MemoryStore()
    listed, out = list[records.Listed](), dict[str, Any]()
    for i, w in enumerate(weights):
        body = Encoder(name).encode(0, vector([[0, n, -6]], ZEROS, 300 + i)).copy()
        store.put(f"{i}", as_bytes(body))
        whole, shards = body_digests(body, name, shard_grid(n, codec_alignment(name), rules.shard_elements))
        listed.append(
            records.Listed(0, f"r0{i}", 1, "n", f"{i}", body.size, whole, 1, float(np.float32(w)), shards=shards)
        )
    for mode, owners in (("direct", ()), ("sharded", ("r00", "r01"))):
        mean, fields = np.empty(n, np.float32), {"t": 0, "offers": tuple(listed), "mode": mode, "owners": owners}
        Reducer(store, SystemClock(), lambda *_, **__: None, rules).mean(
            records.Commit(**{**vars(commit_of([])), **fields}), mean
        )
        out[mode] = digest(as_bytes(mean))
    return {"elements": n, "seeds": [300, 301, 302], "exponent": -6, "edges": ZEROS, "weights": weights,
            "least": rules.shard_elements, "digests": [o.digest for o in listed], "mean": out}  # fmt: skip


SECTIONS: dict[str, Callable[[], Any]] = {
    **{f"codec {name}": (lambda name=name: codec_rounds(name)) for name in INPUTS},
    "grids": grids,
    "secret": lambda: SECRET.decode(),
    "records": lambda: {key: record_of(key, record) for key, record in one_of_each().items()},
    "log": log,
    "outer steps": lambda: outer_steps(0.7),
    "outer steps, auto": lambda: outer_steps("auto"),
    "mean fp32": lambda: means("fp32"),
    "mean int8": lambda: means("int8"),
}


def made(section: str) -> Any:
    """As it stands in the file."""
    return json.loads(json.dumps(SECTIONS[section]()))


if __name__ == "__main__":
    PATH.write_text(json.dumps({section: made(section) for section in SECTIONS}, indent=1, sort_keys=True) + "\n")
    print(f"{PATH}: {PATH.stat().st_size} bytes")
