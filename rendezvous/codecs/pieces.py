"""Common parts of the codecs: loops over pieces of a vector that fit into the cache.

    encode       for each piece:   s = x + decay·e    rows = pack(s)     e ← s − unpack(rows)
    accumulate   for each piece:   t = unpack(rows)   t ← fl(w·t)        total ← fl(total + t)      (w = 1: not scaled)

    CUDA   x ─▶ rows on the device ─▶ pinned memory ─▶ out        the next piece is packed while one is copied

Products and sums are separate torch calls, so no CPU fuses them, and all replicas get the same bits.  A piece is small
enough for the cache, and so large that the overhead of a torch call is small; on CUDA pieces are larger.

Not promised: speed beside a busy Python thread, because each torch call releases the GIL.  Encode on the training
thread or in a helper process.
"""

import warnings
from collections import deque
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from rendezvous.codecs.codec import Array, Body, Kernels, Ranges
from rendezvous.codecs.rows import SCRATCH, RowFormat, not_finite_error, pad_to_rows, scratch_tensor
from rendezvous.errors import BadDelta, Corrupt

_CPU_PIECE, _CUDA_PIECE = SCRATCH, 1 << 24  # elements; multiples of every codec's align


@cache
def load_kernels(name: str, device_type: str) -> Kernels | None:
    """Return the codec's kernels for a type of device ("cpu", "cuda"); None if there are none.

    Without kernels the codecs call torch, operation by operation, and get the same bits.
    """
    try:
        if device_type == "cpu" and name in ("bf16", "int8", "int4"):
            from rendezvous.codecs.kernels import cpu

            return cpu
        if device_type == "cuda" and name in ("int8", "int4"):
            from rendezvous.codecs.kernels import cuda

            return cuda
    except ImportError:  # no C compiler; no Triton, which comes with torch for CUDA on Linux
        pass
    return None


class RowCodec:
    """A codec for a format in rows.   ages: whether it needs the rounds that each element has waited."""

    exact = True
    ages = False
    decay = 1.0  # factor of the residual at each encoding

    def __init__(self, rows: RowFormat) -> None:
        self._rows = rows
        self.name, self.align, self.row_bytes = rows.name, rows.align, rows.row_bytes

    def max_body_size(self, n: int) -> int:
        return self._rows.max_body_size(n)

    def byte_range(self, start: int, stop: int) -> tuple[int, int]:
        if start % self.align:
            raise ValueError(f"{self.name} must be cut at multiples of {self.align} elements, not at {start}")
        return self.max_body_size(start), self.max_body_size(stop)

    def encode(self, x: Array, out: Array, residual: Array | None = None, theta: Array | None = None) -> int:
        n = x.shape[0]
        sum(self.encode_each(x, out, [(0, n)], residual))
        return self.max_body_size(n)

    def encode_each(
        self, x: Array, out: Array, ranges: Ranges, residual: Array | None = None, age: Array | None = None
    ) -> Iterator[float]:
        v = flat_tensor(x, "the pseudogradient")
        e = None if residual is None else flat_tensor(residual, "the residual", like=v)
        ages = None if age is None else ages_of(age, like=v)
        rows = first_bytes(out, self.max_body_size(v.numel())).view(-1, self.row_bytes)
        if v.device.type == "cpu" and load_kernels(self.name, "cpu") is not None:
            return self._by_address(v, e, rows, ranges)
        return self._piece_by_piece(v, e, ages, rows, ranges)

    def _by_address(self, x: Tensor, e: Tensor | None, rows: Tensor, ranges: Ranges) -> Iterator[float]:
        from rendezvous.codecs.kernels import cpu

        for (a, b), square in zip(ranges, cpu.encode_each(self.name, x, e, rows, ranges), strict=True):
            if square is None:
                raise not_finite_error((x if e is None else e)[a:b])
            yield square

    def _piece_by_piece(
        self, x: Tensor, e: Tensor | None, age: Tensor | None, rows: Tensor, ranges: Ranges
    ) -> Iterator[float]:
        size = max(1, min(x.numel(), piece_size(x.device)))
        outbox = Outbox(rows, -(-size // self.align), x.device)
        for start, stop in ranges:
            square = 0.0
            for a in range(start, stop, size):
                b = min(a + size, stop)
                square += self._encode_piece(
                    x[a:b],
                    None if e is None else e[a:b],
                    None if age is None else age[a:b],
                    outbox.rows_to_write(a // self.align, -(-b // self.align)),
                )
                outbox.send()
            outbox.wait()
            yield square

    def decode(self, body: Body, out: Array) -> None:
        self.accumulate(body, 1.0, out, True)  # fl(1·x) = x

    def accumulate(self, body: Body, weight: float, total: Array, first: bool) -> None:
        target = flat_tensor(total, "the sum")
        w = float(np.float32(weight))
        n = target.numel()
        device = target.device
        all_rows = bytes_of(body)
        if all_rows.numel() != self.max_body_size(n):
            raise Corrupt(
                f"a {self.name} body of {n} elements must have {self.max_body_size(n)} bytes, not {all_rows.numel()}"
            )
        all_rows = all_rows.view(-1, self.row_bytes)
        at_once = device.type == "cpu" and load_kernels(self.name, "cpu")  # a call costs as much as 20,000 elements
        size = max(1, n if at_once else min(n, piece_size(device)))
        for a in range(0, n, size):
            b = min(a + size, n)
            rows = all_rows[a // self.align : -(-b // self.align)].to(device, non_blocking=True)
            self._add_piece(rows, w, target[a:b], first)

    def _encode_piece(self, x: Tensor, e: Tensor | None, age: Tensor | None, rows: Tensor) -> float:
        """Set s = x + decay·e, rows ← pack(s), e ← s − unpack(rows).   Return ‖x‖².   age: for codecs with `ages`."""
        kernels = load_kernels(self.name, x.device.type)
        if kernels is not None:
            square = kernels.encode(self.name, x, e, rows)
            if square is None:
                raise not_finite_error(x if e is None else e)
            return square
        square = float(torch.dot(x, x))
        if e is None:
            self._rows.pack_rows(pad_to_rows(x, self.align), rows)
        else:
            s = add_residual(x, e, self.decay)
            whole = pad_to_rows(s, self.align)
            self._rows.pack_and_subtract(whole, rows, scratch_tensor(whole.numel(), x.device).view(whole.shape))
            if whole.numel() != s.numel():
                s.copy_(whole.view(-1)[: s.numel()])
        return square

    def _add_piece(self, rows: Tensor, w: float, target: Tensor, first: bool) -> None:
        """Add fl(w·unpack(rows)) to target, or store it if `first`: 0 + (−0) would lose the sign."""
        kernels = load_kernels(self.name, target.device.type)
        if kernels is not None and kernels.add(self.name, rows, w, target, first):
            return
        straight = first and target.numel() == len(rows) * self.align
        t = self._unpack_elements(rows, target if straight else None, target.numel())
        if kernels is not None:
            raise Corrupt(f"this {self.name} body has bytes that no encoder writes")
        if w != 1:
            t.mul_(w)
        if straight:
            return
        if first:
            target.copy_(t)
        else:
            target.add_(t)

    def _unpack_elements(self, rows: Tensor, into: Tensor | None, n: int) -> Tensor:
        """Return the n elements in these rows, in the memory `into`; None: in scratch memory."""
        t = scratch_tensor(len(rows) * self.align, rows.device) if into is None else into
        self._rows.unpack_rows(rows, t.view(-1, self.align))
        if t.numel() > n and t[n:].any():
            raise Corrupt(f"this {self.name} body has values after its last element, {n}")
        return t[:n]


class Outbox:
    """Copies of encoded rows from x's device into `out`.   If `out` is on x's device, rows are written in place."""

    def __init__(self, out: Tensor, most: int, device: torch.device) -> None:
        """Begin without copies.   most: number of rows in the largest piece."""
        self._out = out
        self._span = (0, 0)
        self._near = torch.empty(most, out.shape[1], dtype=torch.uint8, device=device) if out.device != device else None
        self._pinned = device.type == "cuda" and out.is_pinned()
        self._on_way: deque[tuple[torch.Event | None, Tensor, Tensor]] = deque()

    def rows_to_write(self, a: int, b: int) -> Tensor:
        """Return the memory into which the caller writes rows [a, b)."""
        self._span = a, b
        return self._out[a:b] if self._near is None else self._near[: b - a]

    def send(self) -> None:
        """Start to copy the rows that were just written.  At most two pieces are copied at a time."""
        if self._near is None:
            return
        a, b = self._span
        near = self._near[: b - a]
        out = self._out[a:b]
        while len(self._on_way) > 1:
            self._finish_oldest()
        cuda = near.device.type == "cuda"
        host = out if self._pinned else torch.empty(out.shape, dtype=torch.uint8, device="cpu", pin_memory=cuda)
        host.copy_(near, non_blocking=True)
        self._on_way.append((torch.cuda.current_stream(near.device).record_event() if cuda else None, host, out))

    def wait(self) -> None:
        while self._on_way:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        sent, host, out = self._on_way.popleft()
        if sent is not None:
            sent.synchronize()
        if not self._pinned:
            out.copy_(host)


def piece_size(device: torch.device) -> int:
    return _CPU_PIECE if device.type == "cpu" else _CUDA_PIECE


def add_residual(x: Tensor, e: Tensor, decay: float) -> Tensor:
    """Set e ← x + decay·e, and return e."""
    return (e if decay == 1 else e.mul_(decay)).add_(x)


def tensor_of(array: np.ndarray) -> Tensor:
    """Return a tensor over the same memory."""
    if array.flags.writeable:
        return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
    with warnings.catch_warnings():  # torch warns of read-only memory, but nothing writes into it here
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def flat_tensor(array: Array, what: str, like: Tensor | None = None) -> Tensor:
    """Return a flat, contiguous fp32 tensor over the same memory.

    Raise BadDelta if the array is no such vector, or if its length or device differs from `like`.
    """
    contiguous = array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_contiguous()
    if array.dtype not in (np.float32, torch.float32) or array.ndim != 1 or not contiguous:
        raise BadDelta(f"{what} must be a flat, contiguous fp32 vector; got {array.dtype}, shape {tuple(array.shape)}")
    x = tensor_of(array) if isinstance(array, np.ndarray) else array.detach()
    if like is not None and (x.numel() != like.numel() or x.device != like.device):
        raise BadDelta(f"{what} must have {like.numel()} elements on {like.device}; got {x.numel()} on {x.device}")
    return x


def ages_of(array: Array, like: Tensor) -> Tensor:
    """Return a flat uint8 tensor over the same memory.   Raise ValueError unless it has `like`'s shape and device."""
    age = tensor_of(array) if isinstance(array, np.ndarray) else array
    if age.dtype != torch.uint8 or age.shape != like.shape or age.device != like.device:
        raise ValueError(f"ages must be {like.numel()} uint8 on {like.device}; got {age.dtype}, {tuple(age.shape)}")
    return age


def bytes_of(body: Body) -> Tensor:
    """Return a flat uint8 tensor over the same memory."""
    if isinstance(body, Tensor) and body.device.type != "cpu":
        return body.view(-1).view(torch.uint8)
    return tensor_of(np.frombuffer(body.numpy() if isinstance(body, Tensor) else body, np.uint8))


def first_bytes(out: Array, need: int) -> Tensor:
    """Return the first `need` bytes of a buffer.   Raise ValueError if it is shorter."""
    buffer = bytes_of(out)
    if buffer.numel() < need:
        raise ValueError(f"encoding needs {need} bytes of buffer, got {buffer.numel()}; ask max_body_size()")
    return buffer[:need]
