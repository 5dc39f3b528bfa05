"""Codecs against slow references written from their formulas: round trips, bytes, bits, refusals."""

import hashlib
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rendezvous import codecs
from rendezvous.codecs import DENSE, NAMES, get_codec
from rendezvous.codecs.choose import choose_codec, nominal_ratio, sync_seconds
from rendezvous.codecs.codec import Codec
from rendezvous.codecs.gate import _encode_gaps, _from_gaps
from rendezvous.codecs.pieces import Outbox, load_kernels
from rendezvous.errors import BadDelta, Corrupt

ROOT = Path(__file__).parents[2]
FIXED = ("fp32", "bf16", "int8", "int4", "topk")
LENGTHS = (0, 1, 2, 63, 511, 513, 1024, 1025, 4095, 4097, 8192, 10_000, (1 << 19) + 5)
FLT_MAX = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).tiny)

few = settings(
    max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
vectors = st.tuples(
    st.integers(0, 9000),  # length
    st.integers(0, 2**32 - 1),  # seed
    st.sampled_from([0.0, 1e-42, 1e-37, 1e-6, 1.0, 1e30, 1e38]),  # size
    st.sampled_from([0.0, 0.5, 0.999]),  # share of zeros
)


def normal(n: int, seed: int = 0, scale: float = 1.0, zeros: float = 0.0) -> np.ndarray:
    r = np.random.default_rng(seed)
    x = np.clip(r.standard_normal(n), -3.3, 3.3) * scale
    return np.where(r.random(n) < zeros, 0, x).astype(np.float32)


def encoded(c: Codec, x: np.ndarray, residual: np.ndarray | None = None, theta: np.ndarray | None = None) -> bytes:
    out = np.full(c.max_body_size(x.size), 0xAA, np.uint8)  # dirty, to find bytes that the codec did not write
    theta = np.zeros_like(x) if theta is None else theta
    return out[: c.encode(x, out, residual, theta)].tobytes()


def decoded(c: Codec, body: bytes, n: int) -> np.ndarray:
    out = np.full(n, np.nan, np.float32)
    c.decode(body, out)
    return out


def there_and_back(name: str, x: np.ndarray) -> np.ndarray:
    return decoded(get_codec(name), encoded(get_codec(name), x), x.size)


# ---------------------------------------------------------------- what each codec means


def bf16_of(x: np.ndarray) -> np.ndarray:
    """To nearest even, on the bits."""
    bits = x.view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    kept = np.where((kept & 0x7FFF) >= 0x7F80, (kept & 0x8000) | 0x7F7F, kept)  # no infinities
    return (kept << 16).astype(np.uint32).view(np.float32)


@few
@given(vectors)
def test_fp32_is_the_vector(drawn) -> None:
    x = normal(*drawn)
    assert encoded(get_codec("fp32"), x) == x.tobytes()
    assert there_and_back("fp32", x).tobytes() == x.tobytes()


@few
@given(vectors)
def test_bf16_is_the_upper_half(drawn) -> None:
    x = normal(*drawn)
    assert there_and_back("bf16", x).tobytes() == bf16_of(x).tobytes()


@pytest.mark.parametrize(("name", "block", "levels"), [("int8", 1024, 127), ("int4", 512, 7)])
@few
@given(drawn=vectors)
def test_blocks_are_parsed_by_hand_and_err_by_half_a_step(name: str, block: int, levels: int, drawn) -> None:
    x = normal(*drawn)
    body, back = encoded(get_codec(name), x), there_and_back(name, x)
    row = len(body) // max(1, -(-x.size // block))
    for i in range(0, x.size, block):
        v, r = x[i : i + block], body[i // block * row : (i // block + 1) * row]
        scale = np.frombuffer(r[:4], np.float32)[0]
        assert scale == max(np.float32(np.abs(v).max()) / np.float32(levels), np.float32(TINY))
        codes = np.frombuffer(r[4:], np.int8).astype(np.int64)
        if name == "int4":
            low = (codes + 8) % 16 - 8
            codes = np.concatenate([low, (codes - low) // 16])
        assert np.abs(codes).max() <= levels and not codes[v.size :].any()
        assert back[i : i + block].tobytes() == (scale * codes[: v.size].astype(np.float32)).tobytes()
        error = np.abs(v.astype(np.float64) - back[i : i + block])
        assert error.max() <= float(scale) / 2 * (1 + 2**-14)


def topk_by_hand(x: np.ndarray) -> tuple[bytes, np.ndarray]:
    """The body without its levels, and the decoded vector with the levels in float64."""
    padded = np.zeros(-(-x.size // 8192) * 8192)
    padded[: x.size] = x
    packed, back = b"", np.zeros_like(padded)
    for at in range(0, padded.size, 8192):
        chosen = list[list[int]]()
        for column in range(128):
            places = range(at + column, at + 8192, 128)
            chosen.append(sorted(sorted(places, key=lambda i: (abs(padded[i]), i))[-3:]))
        sizes = [abs(padded[i]) for places in chosen for i in places]
        cut = 0 if min(sizes) == 0 else sum(sizes) / 384
        low, high = [s for s in sizes if s <= cut], [s for s in sizes if s > cut]
        level = [sum(low) / max(1, len(low)), sum(high) / max(1, len(high))]
        for nth in range(3):
            for places in chosen:
                i, v = places[nth], padded[places[nth]]
                packed += bytes([(i - at) // 128 | int(v < 0) << 6 | int(abs(v) > cut) << 7])
                back[i] = np.sign(v) * level[int(abs(v) > cut)]
    return packed, back[: x.size]


@pytest.mark.parametrize(
    ("n", "zeros"), [(8192, 0.0), (16_384, 0.999), (10_000, 0.0), (100, 0.0), (8200, 0.0), (9000, 1.0)]
)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_topk_is_the_3_largest_of_64_in_two_bits(n: int, zeros: float, scale: float) -> None:
    x = normal(n, n, scale, zeros)
    body, (packed, back) = encoded(get_codec("topk"), x), topk_by_hand(x)
    got = decoded(get_codec("topk"), body, n)
    np.testing.assert_allclose(got, back, rtol=2**-8)
    assert np.array_equal(got != 0, back != 0)
    if zeros == 0 and n >= 8192 and n % 8192 == 0:  # elsewhere zeros tie
        assert b"".join(body[i + 4 : i + 388] for i in range(0, len(body), 388)) == packed


@few
@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_topk_with_ties_keeps_magnitudes_not_places(seed: int, distinct: int) -> None:
    x = np.random.default_rng(seed).integers(-distinct, distinct + 1, 8192).astype(np.float32)
    got = there_and_back("topk", x)
    for chunk in (slice(column, 8192, 128) for column in range(128)):
        kept = np.sort(np.abs(x[chunk][got[chunk] != 0]))
        largest = np.sort(np.abs(x[chunk]))[-3:]
        np.testing.assert_array_equal(kept, largest[largest > 0])
        assert np.array_equal(np.sign(got[chunk]), np.sign(x[chunk]) * (got[chunk] != 0))


@pytest.mark.slow
def test_topk_gives_back_what_its_residual_forgot() -> None:
    """A steady x arrives whole if each element is sent within eight rounds, and is not amplified if sent in each."""
    c, n, rounds = get_codec("topk"), 8192, 240
    for per_column in (3, 12, 21):
        x = np.where(np.arange(n) // 128 < per_column, normal(n, 3) + 5, 0).astype(np.float32)
        e, age, out = np.zeros(n, np.float32), np.zeros(n, np.uint8), np.zeros(c.max_body_size(n), np.uint8)
        total, most = np.zeros(n), 0.0
        for _ in range(rounds):
            sum(c.encode_each(x, out, [(0, n)], e, age))
            back = decoded(c, out.tobytes(), n)
            total, most = total + back, max(most, float(np.abs(back).max()))
        assert float(total @ x) / rounds == pytest.approx(float(x @ x), rel=0.08)  # two bits forget a little
        assert most < 1.3 * per_column / 3 * float(x.max()) and age.max() <= 8


def test_topk_counts_rounds_only_where_it_is_asked_to() -> None:
    c, x = get_codec("topk"), normal(8192)
    out, age = np.zeros(c.max_body_size(8192), np.uint8), np.zeros(8192, np.uint8)
    sum(c.encode_each(x, out, [(0, 8192)], np.zeros_like(x), age))
    assert np.array_equal(age == 0, decoded(c, out.tobytes(), 8192) != 0) and age.max() == 1
    assert out.tobytes() == encoded(c, x, np.zeros_like(x)), "in the first round there is nothing to give back"
    with pytest.raises(ValueError, match="ages must be 8192 uint8"):
        sum(c.encode_each(x, out, [(0, 8192)], np.zeros_like(x), age[:-1]))


@few
@given(st.lists(st.integers(0, 100_000), unique=True))
def test_gaps_are_coded_like_a_loop_would(places: list[int]) -> None:
    index, expected, before = np.array(sorted(places), np.int64), [], -1
    for i in index.tolist():
        skipped, before = i - before - 1, i
        expected += [255] * (skipped // 255) + [skipped % 255]
    assert _encode_gaps(index).tolist() == expected
    assert _from_gaps(_encode_gaps(index)).tolist() == index.tolist()


@pytest.mark.parametrize("scale", [0.0, 1e-5, 1e-3, 1e-2, 1.0])
@pytest.mark.parametrize("n", [1, 300, 70_000, (1 << 18) + 3, 600_000])
def test_gate_sends_what_changes_the_bf16_model(n: int, scale: float) -> None:
    theta, x = normal(n, 1), normal(n, 2, scale)
    shown = bf16_of(theta) != bf16_of(theta - x)
    residual = np.zeros(n, np.float32)
    body = encoded(get_codec("bf16-gate"), x, residual, theta)
    got = decoded(get_codec("bf16-gate"), body, n)
    np.testing.assert_array_equal(got, np.where(shown, x, 0))
    np.testing.assert_array_equal(residual, np.where(shown, 0, x))
    assert np.array_equal(bf16_of(theta - got), bf16_of(theta - x))
    blocks = -(-n // (1 << 18))
    assert len(body) <= 4 * shown.sum() + min(n / 8 + 4, 1.02 * shown.sum() + n / 255 + 4) + 12 * blocks


# ---------------------------------------------------------------- what all of them share


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_any_length_goes_there_and_back(name: str, n: int) -> None:
    x = normal(n, 3)
    body = encoded(get_codec(name), x)
    assert len(body) <= get_codec(name).max_body_size(n) and (
        not get_codec(name).exact or len(body) == get_codec(name).max_body_size(n)
    )
    assert np.isfinite(decoded(get_codec(name), body, n)).all()


@pytest.mark.parametrize("name", FIXED)
def test_bytes_are_nominal(name: str) -> None:
    n = 10_000_000
    assert get_codec(name).max_body_size(n) == pytest.approx(4 * n / nominal_ratio(name), rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros_and_extremes_stay_finite(name: str) -> None:
    assert not there_and_back(name, np.zeros(9000, np.float32)).any()
    x = np.resize(np.float32([FLT_MAX, -FLT_MAX, 1e30, -1e-45, 1e-40, TINY, 0, -0.0]), 9000)
    back = there_and_back(name, x)
    assert np.isfinite(back).all()
    if name != "topk":  # which may say that the largest are equal
        np.testing.assert_allclose(back[:2], x[:2], rtol=2**-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 5000, 8999])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_is_refused(name: str, at: int, bad: float) -> None:
    x = normal(9000)
    x[at] = bad
    with pytest.raises(BadDelta, match=r"1 of .* are not finite"):
        encoded(get_codec(name), x)


@pytest.mark.parametrize("name", NAMES)
def test_residual_accounts_for_all_that_was_not_sent(name: str) -> None:
    """Σ decoded + e_T = Σ x, in float64; for topk with its decay, e_T = Σ 0.95^(T−t)·(x_t − decoded_t)."""
    n, steps, decay = 20_000, 30, 0.95 if name == "topk" else 1.0
    theta, e = normal(n, 99), np.zeros(n, np.float32)
    balance = np.zeros(n)
    for t in range(steps):
        x = normal(n, t, 1e-3)
        before = e.copy()
        got = decoded(get_codec(name), encoded(get_codec(name), x, e, theta), n)
        s = x + np.float32(decay) * before
        np.testing.assert_allclose(e, s.astype(np.float64) - got, atol=1e-9)
        balance = decay * balance + x - got
    np.testing.assert_allclose(e, balance, atol=2e-8)
    if name != "fp32":
        assert np.any(e)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "topk"])
def test_residual_stays_bounded(name: str) -> None:
    e, x = np.zeros(8192, np.float32), normal(8192, 5)
    norms = []
    for _ in range(150):
        encoded(get_codec(name), x, e)
        norms.append(np.linalg.norm(e) / np.linalg.norm(x))
    assert norms[-1] <= 1.5 * norms[75] and norms[-1] < {"bf16": 0.01, "int8": 0.02, "int4": 0.3, "topk": 40}[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("first", [True, False])
def test_accumulate_is_multiply_then_add(name: str, first: bool) -> None:
    n, w = 20_001, np.float32(1 / 3)
    body, total = encoded(get_codec(name), normal(n, 6)), normal(n + 200, 7)
    term = w * decoded(get_codec(name), body, n)
    expected = total.copy()
    expected[100:-100] = term if first else expected[100:-100] + term
    get_codec(name).accumulate(body, 1 / 3, total[100:-100], first)
    assert total.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", FIXED)
def test_ranges_are_bytes_of_the_whole(name: str) -> None:
    n, c = 70_000, get_codec(name)
    body, whole = encoded(c, normal(n, 8)), there_and_back(name, normal(n, 8))
    for start, stop in [(0, 8192), (8192, 24_576), (65_536, n), (0, n), (8192, 8192)]:
        a, b = c.byte_range(start, stop)
        assert decoded(c, body[a:b], stop - start).tobytes() == whole[start:stop].tobytes()
        total = np.zeros(n, np.float32)
        c.accumulate(body[a:b], 1.0, total[start:stop], True)
        assert total[start:stop].tobytes() == whole[start:stop].tobytes() and not total[:start].any()
    if c.align > 1:
        with pytest.raises(ValueError, match="multiples of"):
            c.byte_range(1, n)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", FIXED)
def test_ranges_one_after_the_other_are_the_whole(name: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr("rendezvous.codecs.pieces.load_kernels", lambda name, kind: None)
    n, c = 70_000, get_codec(name)
    x, whole_e, e = normal(n, 8), normal(n, 9), normal(n, 9)
    x[:8192] = 0  # a square of 0 is no end
    out, squares = np.zeros(c.max_body_size(n), np.uint8), list[float]()
    ranges = [(0, 8192), (8192, 65_536), (65_536, n)]
    for (start, stop), square in zip(ranges, c.encode_each(x, out, ranges, e), strict=True):
        a, b = c.byte_range(start, stop)
        assert decoded(c, out[a:b].tobytes(), stop - start)[: c.align].any(), "its bytes are there"
        squares.append(square)
    assert out.tobytes() == encoded(c, x, whole_e) and e.tobytes() == whole_e.tobytes()
    assert squares == pytest.approx([float((x[a:b].astype(float) ** 2).sum()) for a, b in ranges], rel=1e-5)
    x[9000] = np.inf
    told = c.encode_each(x, out, ranges, e)
    assert next(told) == 0
    with pytest.raises(BadDelta, match="1 of"):
        next(told)


@pytest.mark.parametrize("name", NAMES)
def test_numpy_and_torch_give_the_same_body(name: str) -> None:
    x, c = normal(9000, 9), get_codec(name)
    e, out = torch.zeros(9000), torch.zeros(c.max_body_size(9000), dtype=torch.uint8)
    used = c.encode(torch.from_numpy(x), out, e, torch.zeros(9000))
    residual = np.zeros(9000, np.float32)
    assert bytes(out[:used].tolist()) == encoded(c, x, residual)
    assert e.numpy().tobytes() == residual.tobytes()
    back = torch.empty(9000)
    c.decode(out[:used], back)
    assert back.numpy().tobytes() == there_and_back(name, x).tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_bodies_may_lie_anywhere_in_a_buffer(name: str) -> None:
    x, c = normal(9000, 9), get_codec(name)
    body = encoded(c, x)
    held = bytearray(3) + body
    assert decoded(c, memoryview(held)[3:], 9000).tobytes() == decoded(c, body, 9000).tobytes()
    shifted = torch.zeros(c.max_body_size(9000) + 3, dtype=torch.uint8)
    assert c.encode(x, shifted[3:], None, np.zeros_like(x)) == len(body)
    assert bytes(shifted[3 : 3 + len(body)].tolist()) == body


@pytest.mark.parametrize("name", FIXED)
def test_rows_through_a_device_buffer_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of x on CUDA, except for the device: several pieces, each packed beside its place."""
    x, e, straight_e = normal(300_000, 1), np.zeros(300_000, np.float32), np.zeros(300_000, np.float32)
    straight = encoded(get_codec(name), x, straight_e)

    class Far(Outbox):
        def __init__(self, out: torch.Tensor, most: int, device: torch.device) -> None:
            super().__init__(out, most, device)
            self._near = torch.empty(most, out.shape[1], dtype=torch.uint8)

    monkeypatch.setattr("rendezvous.codecs.pieces.Outbox", Far)
    monkeypatch.setattr("rendezvous.codecs.pieces.load_kernels", lambda name, kind: None)
    monkeypatch.setattr("rendezvous.codecs.pieces._CPU_PIECE", 1 << 16)
    assert encoded(get_codec(name), x, e) == straight
    assert e.tobytes() == straight_e.tobytes()
    assert decoded(get_codec(name), straight, x.size).any()


@pytest.mark.slow
def test_encoding_needs_memory_for_pieces_only() -> None:
    program = (
        "import sys, resource, numpy as np; from rendezvous.codecs import get_codec\n"
        "c, n = get_codec(sys.argv[1]), 1 << 24\n"
        "x, e, out = np.full(n, 1, 'f'), np.full(n, 0.001, 'f'), np.full(c.max_body_size(n), 1, 'B')\n"
        "c.encode(x[:1 << 19], out, e[:1 << 19], x[:1 << 19])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "c.encode(x, out, e, x)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)\n"
    )
    for name in ("int8", "topk"):
        assert float(run_python(program, name)) < 16, "MiB, for a vector of 64"


# ---------------------------------------------------------------- bits

BITS = """
import hashlib, os, sys
import numpy as np, torch
from rendezvous.codecs import NAMES, get_codec, pieces

torch.set_num_threads(1)
if 'one pass' not in sys.argv[2:]:
    pieces.load_kernels = lambda name, kind: None
r = np.random.default_rng(0)
x = (r.standard_normal(600_000) * 10.0 ** r.integers(-42, 30, 600_000)).astype('f')
for name in NAMES:
    c, theta, e, total, kept = get_codec(name), np.zeros_like(x), np.zeros_like(x), x[::-1].copy(), sys.argv[1] + name
    out, bodies = np.zeros(c.max_body_size(x.size), np.uint8), hashlib.sha256()
    for step in range(3):
        body = out[: c.encode(x[::-1].copy() if step % 2 else x, out, e, theta)]
        bodies.update(body.tobytes())
    if not os.path.exists(kept):
        body.tofile(kept)
    body, back = np.fromfile(kept, np.uint8), np.empty_like(x)
    c.decode(body, back)
    c.accumulate(body, 0.1, total, False)
    c.accumulate(body, 0.7, total, False)
    print(name, hashlib.sha256(back.tobytes() + total.tobytes()).hexdigest(), bodies.hexdigest() * (name != 'topk'))
"""


def run_python(program: str, *arguments: str, capability: str | None = None) -> str:
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    if capability is not None:
        env["ATEN_CPU_CAPABILITY"] = capability
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_every_cpu_decodes_to_the_same_bits(tmp_path: Path) -> None:
    """The same bodies, decoded and accumulated with other vector units and by the kernels of one pass; bodies are the
    same too, except topk's, whose levels are means."""
    levels = ["default", "avx2", "avx512"]
    has = torch.backends.cpu.get_cpu_capability().lower()
    levels = levels[: levels.index(has) + 1] if has in levels else levels[:1]
    default, *others = [run_python(BITS, f"{tmp_path}/", capability=c) for c in levels]
    others.append(run_python(BITS, f"{tmp_path}/", "one pass"))
    assert len(default.splitlines()) == len(NAMES)
    assert others == [default] * len(levels)


def worked(name: str, x: torch.Tensor, device: str) -> list[bytes]:
    """Everything a codec makes of x on that device: three bodies, the residual, a sum, what decodes."""
    c, third = get_codec(name), x / 3  # on the CPU: CUDA divides by a number as a product with its reciprocal
    x, e = x.to(device), third.to(device)
    out, total, back = torch.zeros(c.max_body_size(x.numel()), dtype=torch.uint8), x.flip(0), torch.empty_like(x)
    made: list[bytes] = []
    for residual in (e, e, None):
        c.encode(x, out, residual)
        made.append(out.numpy().tobytes())
        c.accumulate(out, 0.3, total, False)
    c.decode(out, back)
    stored = torch.empty_like(x)
    c.accumulate(out, -0.7, stored, True)
    return made + [t.cpu().numpy().tobytes() for t in (e + 0.0, total, back, stored)]  # −0 + 0 = 0: any zero will do


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.parametrize("size", [1.0, 1e-41, 1e38])
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_one_pass_makes_the_bits_of_many(name: str, kind: str, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if load_kernels(name, kind) is None:
        pytest.skip("there are no such kernels here")
    for n in (1, 511, 513, 1024, 9000, 100_000):
        x = torch.from_numpy(normal(n, n, size, 0.1)).clamp_(-1e38, 1e38)
        found = worked(name, x, kind)
        with monkeypatch.context() as patch:
            patch.setattr("rendezvous.codecs.pieces.load_kernels", lambda name, kind: None)
            assert found == worked(name, x, "cpu"), n


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_one_pass_refuses_what_many_refuse(name: str, kind: str) -> None:
    c, kernels = get_codec(name), load_kernels(name, kind)
    if kernels is None:
        pytest.skip("there are no such kernels here")
    n = 3 * c.align * 64 - 5
    for bad in (np.nan, np.inf, -np.inf):
        x = torch.ones(n, device=kind)
        x[n // 2] = bad
        for e in (None, torch.zeros_like(x)):
            with pytest.raises(BadDelta, match=f"1 of {n} elements"):
                c.encode(x, torch.zeros(c.max_body_size(n), dtype=torch.uint8), e)
    rows = torch.zeros(c.max_body_size(n), dtype=torch.uint8)
    c.encode(torch.ones(n), rows)
    total = torch.zeros(n, device=kind)
    assert kernels.add(name, rows.view(-1, c.row_bytes).to(kind), 1.0, total, True)
    for at, wrong in ((c.row_bytes, b"\0\0\xc0\xff\x80\xff"), (c.max_body_size(n) - 1, b"\x11"))[
        : 2 if c.align > 1 else 1
    ]:
        broken = rows.clone()
        broken[at : at + len(wrong)] = torch.tensor(list(wrong), dtype=torch.uint8)
        assert not kernels.add(name, broken.view(-1, c.row_bytes).to(kind), 1.0, total, True)
        with pytest.raises(Corrupt, match=f"{name} body has"):
            c.decode(broken, total)


@needs_cuda
@pytest.mark.parametrize("where", ["pageable", "pinned", "device"])
@pytest.mark.parametrize("name", FIXED)
def test_cuda_writes_and_reads_what_a_cpu_reads(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces, into any kind of memory."""
    monkeypatch.setattr("rendezvous.codecs.pieces._CUDA_PIECE", 1 << 16)
    x, c = torch.from_numpy(normal(300_000, 1)), get_codec(name)
    out = torch.zeros(c.max_body_size(x.numel()), dtype=torch.uint8, pin_memory=where == "pinned")
    out = out.cuda() if where == "device" else out
    e = torch.zeros(x.numel(), device="cuda")
    c.encode(x.cuda(), out, e)
    near, far = torch.zeros_like(e), torch.zeros_like(x)
    c.decode(out, near)
    c.decode(out.cpu(), far)
    assert near.cpu().numpy().tobytes() == far.numpy().tobytes()
    np.testing.assert_allclose((far + e.cpu()).numpy(), x.numpy(), rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", NAMES)
def test_a_body_of_another_length_is_refused(name: str) -> None:
    c, n = get_codec(name), 9000
    body = encoded(c, normal(n))
    for wrong in (body[:-1], body + b"\0", body[: len(body) // 2], b""):
        with pytest.raises(Corrupt, match=name):
            decoded(c, wrong, n)
    with pytest.raises(Corrupt):
        decoded(c, body, n + 20_000)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0, 0.0, 3e38])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_impossible_scales_are_refused(name: str, bad: float) -> None:
    body = bytearray(encoded(get_codec(name), normal(9000)))
    body[:4] = struct.pack("<f", bad)
    with pytest.raises(Corrupt, match=f"{name} body has scales"):
        decoded(get_codec(name), bytes(body), 9000)


def test_a_code_below_the_lowest_cannot_become_infinite() -> None:
    body = bytearray(encoded(get_codec("int8"), np.full(1024, FLT_MAX, np.float32)))
    body[4] = 0x80
    with pytest.raises(Corrupt, match="not finite"):
        decoded(get_codec("int8"), bytes(body), 1024)


@pytest.mark.parametrize(("name", "infinity"), [("fp32", b"\0\0\x80\x7f"), ("bf16", b"\x80\xff")])
def test_values_that_are_not_finite_are_refused(name: str, infinity: bytes) -> None:
    body = bytearray(encoded(get_codec(name), normal(9000)))
    body[100 : 100 + len(infinity)] = infinity
    with pytest.raises(Corrupt, match="not finite"):
        decoded(get_codec(name), bytes(body), 9000)


def test_topk_refuses_what_it_never_writes() -> None:
    body = encoded(get_codec("topk"), normal(8192))
    twice = body[:4] + body[4:132] + body[4:132] + body[260:]
    with pytest.raises(Corrupt, match="do not ascend"):
        decoded(get_codec("topk"), twice, 8192)
    for level in (b"\x80\x7f", b"\xc0\x7f", b"\x80\xbf"):  # ∞, NaN, −1
        with pytest.raises(Corrupt, match="levels"):
            decoded(get_codec("topk"), body[:2] + level + body[4:], 8192)
    with pytest.raises(Corrupt, match="after its last element"):
        decoded(get_codec("topk"), body, 5000)


def test_gate_refuses_what_it_never_writes() -> None:
    c, n, x = get_codec("bf16-gate"), 9000, np.where(np.arange(9000) % 100 == 0, 1, 0).astype(np.float32)
    body = encoded(c, x)
    count, where = struct.unpack("<II", body[:8])
    assert (count, where) == (90, 90)
    at = 8 + 4 * count
    broken = {
        "count": struct.pack("<II", n + 1, where) + body[8:],
        "where": struct.pack("<II", count, 2000) + body[8:],
        "one more": struct.pack("<II", count + 1, where) + body[8:],
        "beyond": body[:at] + b"\xfe" * 90 + body[at + 90 :],
        "open gap": body[: at + 89] + b"\xff" + body[at + 90 :],
        "nan": body[:8] + struct.pack("<f", np.nan) + body[12:],
        "short": body[:5],
    }
    for what, wrong in broken.items():
        with pytest.raises(Corrupt, match="bf16-gate body"):
            decoded(c, wrong, n)
            pytest.fail(what)


@few
@given(st.sampled_from(["int8", "int4", "topk", "bf16-gate"]), st.integers(0, 2**32 - 1), st.integers(1, 20))
def test_flipped_bytes_are_refused_or_finite(name: str, seed: int, flips: int) -> None:
    r, c = np.random.default_rng(seed), get_codec(name)
    body = np.frombuffer(encoded(c, normal(9000, seed, zeros=0.9)), np.uint8).copy()
    body[r.integers(0, body.size, flips)] = r.integers(0, 256, flips)
    try:
        back = decoded(c, body.tobytes(), 9000)
    except Corrupt:
        return
    assert np.isfinite(back).all()


def test_wrong_calls_say_what_is_wrong() -> None:
    c, x = get_codec("int8"), normal(2000)
    out = np.zeros(c.max_body_size(2000), np.uint8)
    with pytest.raises(ValueError, match="needs 2056 bytes"):
        c.encode(x, out[:-1])
    for wrong in (x.astype(np.float64), x.reshape(2, -1), np.repeat(x, 2)[::2], torch.zeros(10, dtype=torch.bfloat16)):
        with pytest.raises(BadDelta, match="flat, contiguous fp32"):
            c.encode(wrong, out)
    with pytest.raises(BadDelta, match="residual must have 2000 elements"):
        c.encode(x, out, np.zeros(1999, np.float32))
    with pytest.raises(ValueError, match="give theta"):
        get_codec("bf16-gate").encode(x, np.zeros(9000, np.uint8))
    with pytest.raises(ValueError, match="only be read whole"):
        get_codec("bf16-gate").byte_range(0, 1)
    with pytest.raises(ValueError, match="no codec 'zip'"):
        get_codec("zip")


# ---------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    ("parameters", "replicas", "mbit", "compute_s", "name"),
    [
        (10**6, 4, 1000, 60, "fp32"),
        (5 * 10**8, 1, 10, 1, "fp32"),
        (5 * 10**8, 4, 5000, 300, "fp32"),
        (5 * 10**8, 4, 1000, 300, "bf16"),
        (15 * 10**8, 8, 1000, 600, "int8"),
        (7 * 10**9, 8, 1000, 1800, "int4"),
        (7 * 10**9, 8, 200, 3600, "topk"),
        (7 * 10**9, 8, 1, 60, "topk"),
    ],
)
def test_auto_loses_no_more_than_it_must(
    parameters: int, replicas: int, mbit: int, compute_s: float, name: str
) -> None:
    got, why = choose_codec(parameters, replicas, mbit * 125e3, mbit * 125e3, compute_s)
    assert got == name, why
    assert name in why or replicas == 1


def test_auto_says_why() -> None:
    assert choose_codec(15 * 10**8, 8, 125e6, 125e6, 600)[1].startswith("int8 syncs in ")
    assert "bf16 would take" in choose_codec(15 * 10**8, 8, 125e6, 125e6, 600)[1]
    assert "Raise sync_every" in choose_codec(7 * 10**9, 8, 125e3, 125e3, 60)[1]
    with pytest.raises(ValueError, match="positive numbers"):
        choose_codec(10, 2, 0, 1, 1)


def test_sync_time_is_the_formula() -> None:
    size, n = 4e9 / 2, 4  # bf16, 10⁹ parameters
    assert sync_seconds("bf16", 10**9, n, 1e8, 1e8) == pytest.approx((size * 1.25 + 1.5 * size) / 1e8, rel=0.05)
    assert sync_seconds("fp32", 10**9, 2, 1e8, 1e9) == pytest.approx(4e9 / 1e8 + 4e9 / 1e9, rel=0.05)


def test_names_and_choice_are_free_of_torch() -> None:
    used = "import rendezvous.codecs.choose as c; c.choose_codec(9, 2, 1, 1, 1); c.nominal_ratio('int8'); import sys"
    run_python(f"{used}; assert 'torch' not in sys.modules")


def test_bodies_do_not_depend_on_the_day() -> None:
    """Formats are part of a run's mathematics: these change only with the wire version."""
    x = ((np.arange(20_000) * 2654435761 % 2**32) / 2**31 - 1).astype(np.float32)
    found = {name: hashlib.sha256(encoded(get_codec(name), x)).hexdigest()[:12] for name in NAMES if name != "topk"}
    assert found == {
        "fp32": "bda3215d4cee",
        "bf16": "de2654440d8e",
        "int8": "1c704b5890cc",
        "int4": "9bc263e1de43",
        "bf16-gate": "3291c66bb315",
    }


def test_each_table_has_each_codec() -> None:
    """Before: no test missed a new codec in the tables of the package, of formats.md and of choose.md."""
    docs = Path(__file__).parents[2] / "docs"
    formats = re.findall(
        r"^\| ([\w-]+) \| \d+ \| .* \| yes \| (yes|direct only) \|$", (docs / "formats.md").read_text(), re.M
    )
    assert dict(formats) == {name: "yes" if name in DENSE else "direct only" for name in NAMES}
    for text, names in ((codecs.__doc__, NAMES), ((docs / "choose.md").read_text(), set(NAMES) - {"bf16-gate"})):
        assert [name for name in names if not re.search(rf"^(    |\| .*`){name}\b", text or "", re.M)] == []
