"""Top-k: the 3 largest magnitudes of every 64, one byte each.   Source: SparseLoCo (arXiv 2508.15706), section 3.

    e ← x + e/2        s = gain(age)·e        e ← e − sent/gain        age ← 0 for the elements that were sent

    8192 elements as a table of 64 × 128: a chunk is a column, so its elements are 128 apart

            ┌ low ┬ high ┬── 128 ──┬── 128 ──┬── 128 ──┐   388 bytes
            │ bf16│ bf16 │ of each column, ascending    │   per 8192 elements
            └─────┴──────┴─────────┴─────────┴─────────┘
    entry = place in the column (6 bits) | negative (1) | high (1)

The kept elements are split at their mean magnitude: `low` and `high` are the mean magnitudes below and above it.  If
fewer than 384 of them are nonzero, `low` is 0, and all nonzero elements have the magnitude `high`.

SparseLoCo keeps 64 of 4096 elements, and multiplies the residual by 0.95 each round.  Here chunks have 64 elements, so
a place takes 6 bits instead of 12, and the same bytes hold almost twice as many entries.

An element that has waited was computed from an old θ.  In our supervised runs, sending it hurt more than dropping it.
So a residual with ages is halved each round.  For a constant x, the gain restores the dropped part when the element is
sent: gain(a) = (a/2)/(1 − 2⁻ᵃ) after a rounds.  The gain is 1 for an element that is sent every round, and at most
gain(8) = 4, because it also amplifies old values and noise.  Measured in docs/benchmarks.md.  A residual without ages
is multiplied by 0.95.

Among equal magnitudes torch chooses which one to keep, and may choose differently on another machine.  Decoding gives
the same values everywhere.

Not promised: good training without a residual and ages; the published runs, and ours, become visibly worse.
"""

import torch
from torch import Tensor

from rendezvous.codecs.pieces import RowCodec
from rendezvous.codecs.rows import RowFormat, all_finite, not_finite_error, pad_to_rows, scratch_tensor
from rendezvous.errors import Corrupt

_CHUNK = 64
_CHUNKS = 128
_KEPT = 3
_FORGETS, _LONGEST = 0.5, 8  # factor per round of a residual with ages; rounds after which the gain is constant
_BF16_MAX = torch.finfo(torch.bfloat16).max


class TopKRows(RowFormat):
    name = "topk"
    align = _CHUNK * _CHUNKS
    row_bytes = 4 + _KEPT * _CHUNKS

    def pack_rows(self, v: Tensor, rows: Tensor) -> None:
        table = v.view(-1, _CHUNK, _CHUNKS)
        place = _largest_places(table)
        kept = table.gather(1, place).flatten(1)
        if not all_finite(kept):  # NaN and infinity count as the largest, so they are always among the kept
            raise not_finite_error(v)
        levels, high = _two_levels(kept.abs())
        rows[:, :4].view(torch.bfloat16).copy_(levels)
        rows[:, 4:] = place.flatten(1) | (kept < 0).long() << 6 | high.long() << 7

    def unpack_rows(self, rows: Tensor, out: Tensor) -> None:
        entry = rows[:, 4:].long()
        place = (entry & (_CHUNK - 1)).view(-1, _KEPT, _CHUNKS)
        if not (place[:, 1:] > place[:, :-1]).all():
            raise Corrupt("this topk body has places that do not ascend")
        low, high = rows[:, :4].view(torch.bfloat16).float().chunk(2, dim=1)
        if not (all_finite(low) and all_finite(high) and (low >= 0).all() and (high >= 0).all()):
            raise Corrupt("this topk body has levels that are negative or not finite")
        magnitude = torch.where((entry >> 7).bool(), high, low)
        value = torch.where((entry >> 6 & 1).bool(), -magnitude, magnitude)
        out.zero_().view(-1, _CHUNK, _CHUNKS).scatter_(1, place, value.view_as(place))


class TopK(RowCodec):
    decay = 0.95
    ages = True

    def __init__(self) -> None:
        super().__init__(TopKRows())

    def _encode_piece(self, x: Tensor, e: Tensor | None, age: Tensor | None, rows: Tensor) -> float:
        if e is None or age is None:
            return super()._encode_piece(x, e, None, rows)
        gain, s = (scratch_tensor(len(x), x.device, name) for name in ("gain", "s"))
        rounds = s.view(torch.int32).copy_(age.add_(1).clamp_(max=_LONGEST))
        torch.index_select(_gain_table(x.device), 0, rounds, out=gain)
        whole = pad_to_rows(torch.mul(e.mul_(_FORGETS).add_(x), gain, out=s), self.align)
        self._rows.pack_rows(whole, rows)
        sent = scratch_tensor(whole.numel(), x.device).view(whole.shape)
        self._rows.unpack_rows(rows, sent)
        sent = sent.view(-1)[: len(x)]
        age.masked_fill_(sent != 0, 0)
        e.sub_(sent.div_(gain))
        return float(torch.dot(x, x))


def _gain_table(device: torch.device) -> Tensor:
    """Return the gains by age a: the sum of a constant x over a rounds / the residual's value after these rounds."""
    a = torch.arange(_LONGEST + 1, dtype=torch.float64, device="cpu").clamp_(min=1)
    return (a * (1 - _FORGETS) / (1 - _FORGETS**a)).float().to(device)


def _largest_places(v: Tensor) -> Tensor:
    """Return the places of each column's largest magnitudes, ascending: (r, 64, 128) -> (r, 3, 128).

    The bits of a magnitude, as an integer, have the same order as the magnitude, with NaN above infinity.  The place
    replaces the 6 lowest bits, so all keys of a column differ.
    """
    key = scratch_tensor(v.numel(), v.device).view(torch.int32).view(v.shape)
    found = list[Tensor]()
    torch.bitwise_and(v.view(torch.int32), 0x7FFFFFFF ^ (_CHUNK - 1), out=key)
    key.bitwise_or_(torch.arange(_CHUNK, dtype=torch.int32, device=v.device).view(1, _CHUNK, 1))
    for _ in range(_KEPT):
        found.append((key.amax(1, keepdim=True) & (_CHUNK - 1)).long())
        key.scatter_(1, found[-1], -1)
    return torch.cat(found, 1).sort(dim=1).values


def _two_levels(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Return `low` and `high`, (r, 384) -> (r, 2), and a mask of the high magnitudes.

    Magnitudes are divided by the largest before they are averaged, so sums cannot overflow.
    """
    most = magnitude.amax(1, keepdim=True)
    share = magnitude / (most + (most == 0))
    cut = share.mean(1, keepdim=True) * (share.amin(1, keepdim=True) > 0)
    high = share > cut
    means = [(share * m).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp_min(1) for m in (~high, high)]
    return (torch.cat(means, 1) * most).clamp_max_(_BF16_MAX), high
