"""C kernels for the codecs on a CPU: one pass over memory per piece, without the GIL.

    cpu.c ── cc, 1 s, once per user ──▶ ~/.cache/serverless-diloco/<digest>.so ──▶ three trials against torch
                                                                                    not the same bits: not used

Each torch call is a pass over memory, and encoding with a residual takes ten passes.  Here every element is read once
and written once.  The import raises ImportError if there is no compiler, or if the compiled kernels compute other bits
than torch; then torch's operations do the same arithmetic.

Not promised: more than one thread.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from rendezvous.codecs.rows import Bf16, Fp32, Int4, Int8, RowFormat, largest_scale, pad_to_rows

_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_LARGEST_SCALE = {"int8": largest_scale(127), "int4": largest_scale(7), "bf16": 0.0}
_ALIGN = {"int8": 1024, "int4": 512, "bf16": 1}


def encode(name: str, x: Tensor, e: Tensor | None, rows: Tensor) -> float | None:
    """Set rows ← pack(x + e), e ← (x + e) − unpack(rows).   Return ‖x‖², None if a value is not finite."""
    return next(encode_each(name, x, e, rows, [(0, x.numel())]))


def encode_each(
    name: str, x: Tensor, e: Tensor | None, rows: Tensor, ranges: Sequence[tuple[int, int]]
) -> Iterator[float | None]:
    """Encode range after range as `encode` does, and yield its result for each.

    Pass addresses to C.  Slicing a tensor would take as long as encoding 30,000 elements, because the caches are
    cold between shards.
    """
    run = _ENCODE[name]
    most = _LARGEST_SCALE[name]
    square = ctypes.c_double()
    align = _ALIGN[name]
    width = rows.shape[1]
    result = ctypes.byref(square)
    from_ = _address(x)
    left = 0 if e is None else _address(e)
    to = _address(rows, torch.uint8)
    for a, b in ranges:
        square.value = 0.0
        bad = run(from_ + 4 * a, left and left + 4 * a, to + a // align * width, b - a, most, result)
        yield None if bad else square.value


def add(name: str, rows: Tensor, w: float, target: Tensor, first: bool) -> bool:
    """Add fl(w·unpack(rows)) to target, or store it there if `first`.

    Return False if no encoder wrote these rows; `target` then has undefined values.
    """
    from_, to = _address(rows, torch.uint8), _address(target)
    return not _ADD[name](from_, w, to, first, target.numel(), _LARGEST_SCALE[name])


def _address(t: Tensor, dtype: torch.dtype = torch.float32) -> int:
    """Return where t's memory begins.   Raise TypeError for memory that C would not read as `dtype`."""
    if t.dtype != dtype or t.device.type != "cpu" or not t.is_contiguous():
        raise TypeError(f"a C kernel takes contiguous {dtype} on the CPU, got {t.dtype} on {t.device}, {t.stride()}")
    return t.data_ptr()


def weighted_mean(
    name: str,
    bodies: Sequence[np.ndarray],
    weights: Sequence[float],
    weight: float,
    out: np.ndarray,
    rows: np.ndarray | None = None,
) -> bool:
    """Set out ← (fl(w₀·x₀) + fl(w₁·x₁) + …) / weight, every operation rounded to fp32.

    bodies: encoded vectors of `out.size` elements.   rows: if given, the packed mean; `out` is then unpack(rows).
    Return False if a value is not finite or if no encoder wrote a body; `out` then has undefined values.
    """
    addresses = (_POINTER * len(bodies))(*(body.ctypes.data for body in bodies))
    count = len(bodies)
    packed = None if rows is None else rows.ctypes.data
    rest = (_REAL * count)(*weights), count, weight, out.ctypes.data, out.size, _LARGEST_SCALE.get(name, 0.0), packed
    return not _MEAN[name](addresses, *rest)


def _load_library() -> ctypes.CDLL:
    """Return the compiled kernels from this user's cache; compile them first if they are missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "serverless-diloco"
    digest = xxhash.xxh3_128_hexdigest(_SOURCE.read_bytes() + repr((_FLAGS, platform.uname()[0::4])).encode())
    path = cache / f"{digest}.so"
    try:
        if not path.exists():
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            _compile_kernels(path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        told = (getattr(error, "stderr", None) or b"").decode(errors="replace").splitlines()[-1:]
        raise ImportError(f"the C kernels were not compiled: {' '.join([str(error), *told])}") from error


def _compile_kernels(path: Path) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise ImportError("there is no C compiler")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "kernels.so"
        subprocess.run([compiler, *_FLAGS, "-o", made, _SOURCE], check=True, capture_output=True, timeout=60)
        made.replace(path)


_LIBRARY = _load_library()
MEANS = ("fp32", *_LARGEST_SCALE)
_POINTER = ctypes.c_void_p
_COUNT = ctypes.c_long
_REAL = ctypes.c_float
_FLAG = ctypes.c_int
_ENCODE = {name: getattr(_LIBRARY, f"encode_{name}") for name in _LARGEST_SCALE}
_ADD = {name: getattr(_LIBRARY, f"add_{name}") for name in _LARGEST_SCALE}
_MEAN = {name: getattr(_LIBRARY, f"mean_{name}") for name in MEANS}
for _f in _MEAN.values():
    _f.argtypes = (_POINTER, _POINTER, _COUNT, _REAL, _POINTER, _COUNT, _REAL, _POINTER)
for _f in _ENCODE.values():
    _f.argtypes = (_POINTER, _POINTER, _POINTER, _COUNT, _REAL, _POINTER)
for _f in _ADD.values():
    _f.argtypes = (_POINTER, _REAL, _POINTER, _FLAG, _COUNT, _REAL)


_FORMATS: dict[str, RowFormat] = {"fp32": Fp32(), "bf16": Bf16(), "int8": Int8(), "int4": Int4()}


def _rows_match_torch(name: str, size: float) -> bool:
    """Whether the kernels' rows, residual and sum have the same bits as torch's operations give."""
    c = _FORMATS[name]
    x = ((torch.arange(4096, dtype=torch.int64, device="cpu") * 2654435761 % 2**32).float() / 2**31 - 1) * size
    rows = torch.zeros(c.max_body_size(4096), dtype=torch.uint8, device="cpu").view(-1, c.row_bytes)
    e = x / 3
    total = x / 7
    rows_ = rows.clone()
    e_ = e.clone()
    total_ = total.clone()
    t = torch.empty_like(x)
    square = encode(name, x, e, rows)
    exactly = float((x.double() ** 2).sum())
    fine = square is not None and (size != 1 or abs(square - exactly) <= 1e-5 * exactly)
    fine = fine and add(name, rows, 0.3, total, False)
    c.pack_and_subtract(e_.add_(x).view(-1, c.align), rows_, t.view(-1, c.align))
    c.unpack_rows(rows_, t.view(-1, c.align))
    total_.add_(t.mul_(0.3))
    pairs = ((rows, rows_), (e, e_), (total, total_))
    return fine and all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def _mean_matches_torch(name: str, weight: float) -> bool:
    """Whether the kernel's mean has the same bits as the sum of one body after the other, divided by `weight`."""
    x = np.linspace(-3, 5, 3000, dtype=np.float32)
    c = _FORMATS[name]
    bodies = [_pack_by_torch(c, v) for v in (x, x[::-1].copy(), x * x)]
    weights = (0.3, 1.0, 0.7)
    total = np.empty_like(x)
    out = np.empty_like(x)
    for body, w in zip(bodies, weights, strict=True):
        t = _unpack_by_torch(c, body, x.size) * np.float32(w)
        total = t if body is bodies[0] else total + t
    total /= np.float32(weight)
    fine = weighted_mean(name, bodies, weights, weight, out) and out.tobytes() == total.tobytes()
    if name == "fp32":
        return fine
    rows, packed = np.zeros_like(bodies[0]), _pack_by_torch(c, total)
    fine = fine and weighted_mean(name, bodies, weights, weight, out, rows)
    return fine and (out.tobytes(), rows.tobytes()) == (_unpack_by_torch(c, packed, x.size).tobytes(), packed.tobytes())


def _pack_by_torch(c: RowFormat, x: np.ndarray) -> np.ndarray:
    """Encode fp32 x.   Return its body, uint8."""
    body = torch.zeros(c.max_body_size(x.size), dtype=torch.uint8, device="cpu")
    c.pack_rows(pad_to_rows(torch.from_numpy(x), c.align), body.view(-1, c.row_bytes))  # pyright: ignore[reportUnknownMemberType]
    return body.numpy()


def _unpack_by_torch(c: RowFormat, body: np.ndarray, n: int) -> np.ndarray:
    """Decode a body of n elements.   Return them in fp32."""
    rows = torch.from_numpy(body).view(-1, c.row_bytes)  # pyright: ignore[reportUnknownMemberType]
    out = torch.empty(len(rows), c.align, dtype=torch.float32, device="cpu")
    c.unpack_rows(rows, out)
    return out.view(-1)[:n].numpy()


def _all_trials_pass() -> bool:
    rows = all(_rows_match_torch(name, size) for name in _LARGEST_SCALE for size in (1.0, 1e-41, 1e38))
    return rows and all(_mean_matches_torch(name, weight) for name in _MEAN for weight in (2.0, 2.0000002))


if not _all_trials_pass():
    raise ImportError("the compiled kernels do not compute what torch computes")
