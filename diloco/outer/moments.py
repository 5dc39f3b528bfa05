"""Pass small AdamW moments to a slot's next session, if the session before leaves with notice.

    r01-1   m, v, step of each trained parameter ─▶ beside its codec's residual ─▶ exit
    r01-2                                          residual ─▶ its own AdamW, before its first inner step

m and v are fp32 vectors in flat order, which also hold bfloat16 moments; step has one number per parameter.  An
adapter's moments are a few megabytes. Moments above MOST_BYTES, as most whole models have, are not passed on.

Not promised: moments of optimizers other than torch's Adam and AdamW, of a killed replica, or of several ranks.
A session with moments has no warm-up of its own (inner/models/optim.py).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from diloco.outer.flat import trainable_parameters
from rendezvous.records.digests import digest_of
from rendezvous.records.wire import as_bytes

if TYPE_CHECKING:
    from diloco.outer.loop import OuterLoop
    from diloco.process.session import Session

MOST_BYTES = 256 << 20  # more than the moments of an adapter of 30 M parameters
STEP, MEAN, SQUARE = KINDS = ("step", "exp_avg", "exp_avg_sq")


@torch.no_grad()
def read_moments(model: nn.Module, optimizer: Optimizer) -> dict[str, np.ndarray]:
    """Return Adam's moments; {} for no moments yet, too large ones, several ranks or another optimizer."""
    parameters = [p for _, p in trainable_parameters(model)]
    if not isinstance(optimizer, Adam | AdamW) or _ranks() > 1 or 8 * sum(p.numel() for p in parameters) > MOST_BYTES:
        return {}
    states = [optimizer.state.get(p, {}) for p in parameters]
    if any(set(state) != set(KINDS) for state in states):
        return {}
    return {
        kind: torch.cat([state[kind].detach().reshape(-1).float().cpu() for state in states]).numpy() for kind in KINDS
    }


@torch.no_grad()
def write_moments(model: nn.Module, optimizer: Optimizer, found: Mapping[str, np.ndarray]) -> str:
    """Set the optimizer's moments. Return "", or why the moments do not fit; then nothing is changed."""
    parameters = [p for _, p in trainable_parameters(model)]
    if not isinstance(optimizer, Adam | AdamW):
        return f"they are AdamW's, and this optimizer is {type(optimizer).__name__}"
    if _ranks() > 1:
        return f"only rank 0 of this replica's {_ranks()} could take them"
    if why := _find_fault(found, [p.numel() for p in parameters]):
        return why
    at = 0
    for i, p in enumerate(parameters):
        span = slice(at, at := at + p.numel())
        moments = {kind: torch.from_numpy(found[kind][span].copy()).view(p.shape).to(p) for kind in (MEAN, SQUARE)}
        step = torch.tensor(float(found[STEP][i]), dtype=torch.float32, device=_step_device(optimizer, p))
        optimizer.state[p] = {STEP: step, **moments}
    return ""


def _step_device(optimizer: Optimizer, p: torch.Tensor) -> torch.device | str:
    """Return the device of AdamW's step counts: the parameter's for a fused or capturable AdamW, else the CPU."""
    group = next(group for group in optimizer.param_groups if any(p is one for one in group["params"]))
    return p.device if group.get("fused") or group.get("capturable") else "cpu"


def pack_moments(session: "Session", loop: "OuterLoop") -> dict[str, np.ndarray]:
    """Return the loop's moments, and log their digest."""
    moments = read_moments(loop.model, loop.optimizer)
    if moments:
        session.emit("moments_left", digest=moments_digest(moments))
    return moments


def unpack_moments(session: "Session", loop: "OuterLoop") -> None:
    """Load the moments that the slot's previous session left."""
    if why := write_moments(loop.model, loop.optimizer, session.rv.inherited):
        session.emit("bad_moments", text=f"moments of the session before: {why}; the optimizer starts fresh")
    else:
        taken = read_moments(loop.model, loop.optimizer)
        session.emit("moments_taken", digest=moments_digest(taken), bytes=sum(a.nbytes for a in taken.values()))


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _find_fault(found: Mapping[str, np.ndarray], sizes: list[int]) -> str:
    due = {STEP: (len(sizes),), MEAN: (sum(sizes),), SQUARE: (sum(sizes),)}
    shapes = {kind: array.shape for kind, array in found.items()}
    if shapes != due:
        return f"they have the shapes {shapes}, and this model's have {due}"
    if any(a.dtype != np.float32 or not np.isfinite(a).all() for a in found.values()):
        return "they are not finite fp32 numbers"
    if (found[SQUARE] < 0).any() or (found[STEP] < 1).any():
        return "a mean of squares is below 0, or a number of steps below 1"
    return ""


def moments_digest(moments: Mapping[str, np.ndarray]) -> str:
    return digest_of(as_bytes(moments[kind]) for kind in KINDS)
