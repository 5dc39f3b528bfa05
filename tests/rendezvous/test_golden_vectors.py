"""The formats, three times: the product, docs/formats.md as support/independent_reader.py read it, and bytes in a file.

tests/data/golden_vectors.json ══ the product makes the same     (tests/support/golden_vectors.py)
            │                  ══ the independent reader says the same
            └─ runs made here: θ of every step, bit for bit
"""

import ast
import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diloco.outer.optimizer import Nesterov, OuterState
from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import Rules
from rendezvous.codecs import DENSE, NAMES
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.records.records import Listed, Record
from rendezvous.store import Store
from rendezvous.stores.files import FileStore
from rendezvous.stores.run_key import under_key
from rendezvous.weights.patch import bf16_bits, changes_between, encode, whole
from tests.rendezvous.test_engine import TIMING
from tests.support import independent_reader as reader
from tests.support.fakes import ManualClock
from tests.support.golden_vectors import PATH, SECTIONS, made, one_of_each, vector

GOLDEN: dict[str, Any] = json.loads(PATH.read_bytes())
CODECS = [section.partition(" ")[2] for section in GOLDEN if section.startswith("codec ")]


def test_the_reader_imports_nothing_of_the_project() -> None:
    tree, named = ast.parse(Path(reader.__file__).read_text()), set[str]()
    for node in ast.walk(tree):
        assert not isinstance(node, ast.ImportFrom) or node.level == 0
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        named |= {name.partition(".")[0] for name in names}
        assert not (isinstance(node, ast.Name) and node.id in ("__import__", "importlib", "exec", "eval"))
    standard = {
        "hashlib",
        "hmac",
        "itertools",
        "json",
        "struct",
        "statistics",
        "dataclasses",
        "pathlib",
        "typing",
        "zlib",
    }
    assert named == standard | {"numpy", "xxhash"}


@pytest.mark.parametrize("section", SECTIONS)
def test_the_product_makes_the_golden_bytes(section: str) -> None:
    assert made(section) == GOLDEN[section]


def test_nothing_in_the_file_is_unchecked() -> None:
    assert set(GOLDEN) == set(SECTIONS) and PATH.stat().st_size < 60_000


def test_the_page_names_every_field_of_every_record_and_the_file_has_one_of_each() -> None:
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    each = {record.kind: record for record in one_of_each().values()}
    everything = {kind.kind for kind in subclasses(Record) if kind.__module__.startswith(("rendezvous.", "diloco."))}
    assert set(each) == everything
    for record in each.values():
        about = page[page.index(f"{record.kind}: `") :].partition("\n### ")[0].partition("\n## ")[0]
        assert not [name for name in vars(record) if f"`{name}`" not in about], f"{record.kind} on the page"
    for name in Listed.__dataclass_fields__:
        assert f"`{name}`" in page[page.index("### commit") : page.index("### mean")]


def subclasses(kind: type[Record]) -> set[type[Record]]:
    return {kind for sub in kind.__subclasses__() for kind in (sub, *subclasses(sub))}


# ---------------------------------------------------------------------- the file, read independently


@pytest.mark.parametrize("codec", CODECS)
def test_the_reader_has_every_body_and_residual(codec: str) -> None:
    golden = GOLDEN[f"codec {codec}"]
    n = golden["pieces"][-1][1]
    kept, theta = reader.Residual.zeros(n), vector([[0, n, 0]], [], 77)
    for round_ in golden["rounds"]:
        x, body = vector(golden["pieces"], round_["edges"], round_["seed"]), base64.b64decode(round_["body"])
        assert round_["x"] == reader.digest(x.tobytes())
        assert round_["digest"] == reader.digest(body) and round_["sha256"] == reader.digest(body, "sha256")
        if codec == "topk":
            _check_largest(x, kept, body)
        else:
            assert reader.encode(codec, x if codec == "fp32" else kept.e + x, theta) == body
        kept = kept.after(codec, x, body)
        for name, array in (("residual", kept.e), ("age", kept.age)):
            assert round_["after"].get(name) in (None, reader.digest(array.tobytes())), f"{name} after this round"
    assert codec == "fp32" or "residual" in golden["rounds"][-1]["after"]


def _check_largest(x: np.ndarray, kept: reader.Residual, body: bytes) -> None:
    """Check that in each 64 no unsent value is larger than a sent one, and that each sent value has the right sign."""
    s = reader.GAINS[np.minimum(kept.age + 1, 8)] * (kept.e * np.float32(0.5) + x)
    sent = reader.decode("topk", body, x.size)
    whole, out = (np.pad(v, (0, -x.size % 8192)).reshape(-1, 64, 128) for v in (s, sent))
    assert ((out != 0).sum(axis=1) <= 3).all() and (np.sign(out) == np.sign(whole))[out != 0].all()
    least = np.where(out != 0, np.abs(whole), np.inf).min(axis=1)
    left = np.where(out == 0, np.abs(whole), 0).max(axis=1)
    full = (out != 0).sum(axis=1) == 3
    assert full.any() and (left <= least * (1 + 2.0**-17))[full].all()


def test_the_reader_has_the_weights_for_engines() -> None:
    old, new = (vector([[0, 3000, -4]], [], seed) for seed in (1, 1))
    new[[0, 1, 255, 256, 511, 767, 2000, 2999]] += np.float32(1.0)
    before, after = bf16_bits(old), bf16_bits(new)
    assert after.tobytes() == (reader.encode("bf16", new))
    found = np.zeros(3000, np.uint16)
    for at in (0, 1500):
        reader.apply_patch(found, encode(whole(before[at : at + 1500], at)))
    assert np.array_equal(found, before)
    for at in (0, 1500):
        reader.apply_patch(found, encode(changes_between(before[at : at + 1500], after[at : at + 1500], at)))
    assert np.array_equal(found, after) and int((before != after).sum()) == 8


def test_the_reader_cuts_the_same_grid_and_parts() -> None:
    for case in GOLDEN["grids"]:
        shards = reader.grid(case["elements"], case["align"], case["least"])
        assert (shards[0][1], len(shards)) == (case["shard"], case["shards"])
        assert np.diff(reader.cuts(len(shards), case["owners"])).tolist() == case["parts"]


def test_the_reader_writes_the_same_records_and_tags() -> None:
    secret = GOLDEN["secret"].encode()
    for key, golden in GOLDEN["records"].items():
        body = golden["bytes"].encode()
        assert reader.canonical(json.loads(body)) == body and golden["sha256"] == reader.digest(body, "sha256")
        assert reader.unsealed(golden["sealed"].encode(), secret, golden["run"], key) == body
    log = GOLDEN["log"]
    seal = reader.tag(secret, "5ea1", log["key"], log["bytes"].encode())
    assert log["sealed"] == log["bytes"] + '{"seal":"' + seal + '"}\n'


def test_the_reader_takes_the_same_outer_steps() -> None:
    golden = GOLDEN["outer steps"]
    state = [[vector([[0, n, 0]], [], 100 + n), np.zeros(n, np.float32)] for n in golden["sizes"]]
    for (fragment, seed), base in zip(golden["steps"], golden["bases"], strict=False):
        n = golden["sizes"][fragment]
        assert reader.base_of(state) == base
        mean = np.full(n, -0.0, np.float32) if seed < 0 else vector([[0, n, -5]], [], seed)
        theta, momentum = state[fragment]
        reader.nesterov(theta, momentum, mean, golden["lr"], golden["momentum"])
    assert reader.base_of(state) == golden["bases"][-1] == golden["bases"][-2]
    for f, (theta, momentum) in enumerate(state):
        assert base64.b64decode(golden["end"][f"theta.{f}"]) == theta.tobytes()
        assert base64.b64decode(golden["end"][f"momentum.{f}"]) == momentum.tobytes()


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_the_reader_has_the_same_means(codec: str) -> None:
    golden = GOLDEN[f"mean {codec}"]
    n, bodies = golden["elements"], []
    shards = reader.grid(n, reader.ROWS[codec][0], golden["least"])
    for seed, announced in zip(golden["seeds"], golden["digests"], strict=True):
        body = reader.encode(codec, vector([[0, n, golden["exponent"]]], golden["edges"], seed))
        each = [reader.digest(body[reader.span(codec, a, b)]) for a, b in shards]
        assert reader.is_named("".join(each).encode(), announced)
        bodies.append(body)
    weights = [float(np.float32(w)) for w in golden["weights"]]
    mean = reader.mean_of(codec, bodies, weights, n, shards)
    assert reader.digest(mean.tobytes()) == golden["mean"]["direct"]
    at = reader.cuts(len(shards), 2)
    for first, last in pairwise(at):
        piece = mean[shards[first][0] : shards[last - 1][1]]
        piece[:] = reader.decode(codec, reader.encode(codec, piece), piece.size)
    assert reader.digest(mean.tobytes()) == golden["mean"]["sharded"]


# ---------------------------------------------------------------------- runs

SIZES = (9000, 5001)


class Seat:
    """A replica without an inner loop: its pseudogradients are made up.   thetas: by step, as the product has it."""

    def __init__(self, store: Store, slot: str, clock: ManualClock, rules: Rules) -> None:
        thetas = [torch.from_numpy(vector([[0, n, 0]], [], n)) for n in SIZES]
        self.state = OuterState(thetas, [Nesterov(nn.Parameter(t), lr=0.7, momentum=0.9) for t in thetas])
        self.rv, self.thetas = Rendezvous(store, clock, slot, rules, TIMING), dict[int, list[bytes]]()
        self.rv.claim()
        self.rv.join(self.state)
        self.keep()

    def keep(self) -> None:
        self.thetas[self.rv.step] = [theta.numpy().tobytes() for theta in self.state.thetas]

    def offer(self, seed: int, h: int, exponent: int = -7) -> None:
        self.rv.members.tick()
        theta = self.state.thetas[self.rv.fragment].numpy()
        edges = [[i, bits] for i, bits in ((0, "80000000"), (1, "00000001"), (2, "00000000"))]
        self.rv.offer(vector([[0, theta.size, exponent]], edges, seed), h, theta=theta)

    def step(self) -> None:
        commit, fragment = self.rv.settle(), self.rv.fragment
        mean = np.empty(self.state.size(fragment), np.float32)
        self.rv.mean(commit, mean)
        self.state.apply(fragment, mean)
        self.rv.advance(commit)
        self.keep()


def ran(store: Store, rules: Rules) -> list[Seat]:
    """Three replicas, eight steps; one misses step 2 and offers it late; one is far too long in step 5."""
    clock = ManualClock()
    write_control(store, clock, replicas=3, min_replicas=2, steps=8)
    seats = [Seat(store, f"r0{i}", clock, rules) for i in range(3)]
    for t in range(8):
        late = seats[2:] if t == 2 else []
        for i, seat in enumerate(seats):
            if seat not in late:
                seat.offer(10 * t + i, 4 - i, exponent=0 if (t, i) == (5, 1) else -7)
        for seat in seats:
            if seat in late:
                seat.offer(10 * t + 9, 2)
            seat.step()
    return seats


KEY = b"a key that nobody guesses"


@pytest.mark.parametrize(
    ("codec", "sharded", "secret"),
    [  # a codec does not know of the key: by default one codec has it
        pytest.param(name, sharded, secret, marks=pytest.mark.slow if secret and name != NAMES[0] else ())
        for names, sharded in ((NAMES, False), (DENSE, True))
        for name in names
        for secret in (b"", KEY)
    ],
)
def test_the_reader_has_theta_of_every_step_bit_for_bit(
    tmp_path: Path, codec: str, sharded: bool, secret: bytes
) -> None:
    rules = Rules(
        fragments=2, sync_every=4, codec=codec, norm_gate=10.0, snapshot_every=3,
        shard_from=1 if sharded else 1 << 30, shard_elements=1024,
    )  # fmt: skip
    seats = ran(under_key(FileStore(tmp_path), ManualClock(), secret or None), rules)
    settings = {"lr": 0.7, "momentum": 0.9, **vars(rules)}
    found = reader.replay(tmp_path, settings, secret)
    assert len(found.commits) == 8 and (bool(found.sharded) == sharded)
    for seat in seats:
        assert set(seat.thetas) == set(range(9))
        for t, theta in seat.thetas.items():
            assert [x.tobytes() for x in found.thetas[t]] == theta, (
                f"{seat.rv.members.slot} has another θ before step {t}"
            )
    assert len({tuple(map(np.ndarray.tobytes, thetas)) for thetas in found.thetas}) == 9, "every step moved something"
    carried = [o for c in found.commits for o in c["offers"] if o["step"] < c["t"]]
    gated = [o for c in found.commits for o in c["offers"] if o["factor"] < 1]
    assert len(carried) == 1 and gated, "a late offer and a gated one are in it"
