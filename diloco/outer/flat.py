"""A live model as flat fp32 fragments, and checks that these hold everything that training changes.

    model (any dtype)      w₀ │ w₁ │ w₂ ┊ w₃ │ w₄            trainable parameters, tied ones once, in the model's order
                              ▼            ▼
    fragments          [ ─────────── ] [ ─────── ]           one fp32 vector each, on the CPU

    local value of an element = base + (live − round(base))     base = the fp32 vector that was last scattered

base is θ; if α > 0 (outer.fragment_update_alpha), θ mixed with local values.  `round` rounds to the model's dtype.  So
a bf16 model's rounding never enters a pseudogradient. The local values that α kept do enter Δ, as in torchft and in
arXiv 2501.18512.  For an fp32 model, the local value is the live value, read straight from the model.

The outer step averages only these vectors, so replicas would differ in the rest:

    when the loop is made      complex or fp16 parameters · batch statistics · an optimizer that lacks parameters
    when it is entered         frozen.py: weights and buffers that are not averaged are equal in all replicas
    at every sync              parameters frozen, unfrozen or replaced since · buffers that training has changed

Not promised: a model in shards (see ranks/fragment.py); state outside of the module (an optimizer's, a
scheduler's, a data loader's), and buffers that a module does not save.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from diloco.run.config import OuterError

PART = 1 << 24  # elements that are copied at once from a device: 64 MiB
SHOWN = 3  # at most so many names in an error
WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"}  # how wrappers show in parameter names


class FlatFragment(nn.Module):
    """One fp32 vector on the CPU for some trainable parameters of a live model; torchft optimizes it."""

    def __init__(self, live: Sequence[nn.Parameter], flat: Tensor | None = None) -> None:
        super().__init__()
        self.live = list(live)  # a plain list, so that torch does not register them here
        whole = torch.cat([p.detach().reshape(-1).float().cpu() for p in live]) if flat is None else flat
        self.flat = nn.Parameter(whole)
        self.rounds = any(p.dtype != torch.float32 for p in self.live)
        self.merged: Tensor | None = None  # the values last written to the model, if they are not θ
        self._staging: Tensor | None = None

    @torch.no_grad()
    def gather(self, theta: Tensor) -> None:
        """Write flat ← local values."""
        for span, local in self._local_slices(theta):
            self.flat.data[span].copy_(local)

    @torch.no_grad()
    def delta(self, theta: Tensor, out: Tensor) -> Tensor:
        """Write out ← Δ = θ − local values, with the same bits as torchft's Δ after `gather`."""
        for span, local in self._local_slices(theta):
            torch.sub(theta[span], local, out=out[span])
        return out

    def _local_slices(self, theta: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the vector, in order, and their local values. Read each one before the next."""
        base = theta if self.merged is None else self.merged
        at = 0
        for p in self.live:
            span = slice(at, at := at + p.numel())
            for part, live in self._host_parts(p):
                here = slice(span.start + part.start, span.start + part.stop)
                if p.dtype == torch.float32:
                    yield here, live
                else:
                    yield here, base[here] + (live - base[here].to(p.dtype).float())

    def _host_parts(self, p: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of a parameter and their values, fp32 on the host."""
        if p.device.type == "cpu":
            yield slice(0, p.numel()), p.detach().reshape(-1).float()
            return
        if self._staging is None:  # pinned memory; a copy to fresh pageable memory took 20 times as long
            size = min(PART, max(live.numel() for live in self.live))
            self._staging = torch.empty(size, dtype=torch.float32, device="cpu", pin_memory=p.device.type == "cuda")
        yield from staged_parts(p, self._staging)

    @torch.no_grad()
    def scatter(self, merged: bool) -> None:
        """Write model ← flat.   merged: flat is not θ, but θ merged with local values (α > 0)."""
        self.merged = self.flat.data.clone() if merged and self.rounds else None
        for p, values in self.shaped(self.flat.data):
            p.copy_(values)

    def shaped(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with its part of `flat`, in its shape."""
        at = 0
        for p in self.live:
            yield p, flat[at : (at := at + p.numel())].view(p.shape)


def staged_parts(p: Tensor, staging: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of a parameter and their values in `staging`; the next slice overwrites them."""
    flat = p.detach().reshape(-1)
    for begin in range(0, p.numel(), staging.numel()):
        part = flat[begin : begin + staging.numel()].float()
        yield slice(begin, begin + part.numel()), staging[: part.numel()].copy_(part)


def bare_name(model: nn.Module, name: str) -> str:
    """Return the name that a tensor of this model has without DDP, torch.compile and activation checkpointing."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return ".".join(parts[1:] if isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel) else parts)


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return every trainable parameter once (tied weights under their first name), in the model's order."""
    found = [(bare_name(model, n), p) for n, p in model.named_parameters() if p.requires_grad]
    if not found:
        raise OuterError("the model has no trainable parameter to average. Unfreeze some, or add an adapter")
    return found


def layout_of(model: nn.Module) -> list[list[Any]]:
    """Return [name, shape, dtype] of every trainable parameter, in the order of a flat vector's elements."""
    return [[n, list(p.shape), str(p.dtype).removeprefix("torch.")] for n, p in trainable_parameters(model)]


# -------------------------------------------------------------------- checks


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise OuterError for a model or an optimizer whose training state does not fit into flat fp32 vectors."""
    parameters = trainable_parameters(model)
    if complex_ := [n for n, p in parameters if p.is_complex()]:
        raise OuterError(
            f"{_names_of(complex_)} hold complex numbers. An fp32 vector keeps only the real part. Store them "
            "as two real parameters (torch.view_as_real), or freeze them"
        )
    if half := [n for n, p in parameters if p.dtype == torch.float16]:
        raise OuterError(
            f"{_names_of(half)} are trained in float16, in which AdamW's epsilon is 0: its first steps are 0 / 0 and "
            "all weights become NaN. Train float32 weights (autocast may compute in less), or freeze them"
        )
    if statistics := [
        n for n, m in model.named_modules() if isinstance(m, _NormBase) and m.track_running_stats and m.training
    ]:
        raise OuterError(
            f"{_names_of(statistics)} keep running statistics of their batches. These are not parameters, so they are "
            "not averaged, and replicas would differ. Put them into evaluation mode (module.eval()), make them with "
            "track_running_stats=False, or use LayerNorm or GroupNorm"
        )
    if callable(getattr(optimizer, "eval", None)):
        raise OuterError(
            f"{type(optimizer).__name__} has an eval(), as schedule-free optimizers have: its state is a second set of "
            "weights, which an outer step does not move. Use another one, such as AdamW with a learning rate schedule"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := [n for n, p in parameters if id(p) not in held]:
        raise OuterError(
            f"the optimizer does not hold {_names_of(missing)}, which can be trained. One optimizer drives the outer "
            "loop: give it all trainable parameters (in groups of their own, if their settings differ), or freeze the "
            "others"
        )


def scales_of(p: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors beside the 4-bit weights that bitsandbytes keeps outside of the module's buffers."""
    return sorted(p.quant_state.as_dict(packed=True).items())


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that are in the state_dict."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield bare_name(model, f"{prefix}.{name}".lstrip(".")), buffer


@torch.no_grad()
def tensor_bytes(tensor: Tensor) -> bytes:
    tensor = getattr(tensor, "full_tensor", lambda: tensor)()  # gathers shards: all ranks call it
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class ModelGuard:
    """A comparison of a model with its state at the loop's entry, by a walk over the modules, without copies."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trainable = self._parameter_versions()
        self._buffers = {n: (b, b._version, xxhash.xxh3_128_digest(tensor_bytes(b))) for n, b in saved_buffers(model)}

    def check(self) -> None:
        """Raise OuterError if training changed something that no flat vector holds."""
        now = self._parameter_versions()
        if changed := [n for n in {**self._trainable, **now} if self._trainable.get(n) != now.get(n)]:
            raise OuterError(
                f"{_names_of(changed)} were frozen, unfrozen or replaced after make_diloco: each replica would train "
                "other parameters. Do that before make_diloco, or end the loop and make a new one (for a new "
                "run: its layout differs)"
            )
        buffers = dict(saved_buffers(self._model))
        if moved := [n for n in {**self._buffers, **buffers} if self._has_moved(n, buffers.get(n))]:
            raise OuterError(
                f"the buffers {_names_of(moved)} changed during training. Buffers are not averaged, so replicas would "
                "differ. Make them parameters, register them with persistent=False if they are only a cache, or keep "
                "their modules in evaluation mode"
            )

    def _parameter_versions(self) -> dict[str, int]:
        return {n: id(p) for n, p in trainable_parameters(self._model)}

    def _has_moved(self, name: str, buffer: Tensor | None) -> bool:
        """Whether a buffer's values have changed. (DDP writes the same values again before each forward pass.)"""
        tensor, version, digest = self._buffers.get(name, (None, 0, b""))
        if buffer is None or buffer is not tensor:
            return True
        return buffer._version != version and xxhash.xxh3_128_digest(tensor_bytes(buffer)) != digest


def _names_of(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
