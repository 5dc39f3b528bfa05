"""Check that the flat vectors hold everything that training changes.  The outer step averages only these vectors, so
replicas would differ in the rest.

    when the loop is made      complex or fp16 parameters · batch statistics · an optimizer that lacks parameters
    when it is entered         frozen_digest: weights and buffers that are not averaged are equal in all replicas
    at every sync              parameters frozen, unfrozen or replaced since · buffers that training has changed

Not promised: state outside of the module (an optimizer's, a scheduler's, a data loader's), and buffers that a module
does not save.
"""

from collections.abc import Iterator

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from diloco.outer.flat import trainable_parameters
from diloco.run.config import OuterError

SHOWN = 3  # most names in an error


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise OuterError for a model or an optimizer whose training state does not fit into flat fp32 vectors."""
    parameters = trainable_parameters(model)
    if complex_ := [n for n, p in parameters if p.is_complex()]:
        raise OuterError(
            f"{_names_of(complex_)} hold complex numbers, of which an fp32 vector keeps the real part only. Store them "
            "as two real parameters (torch.view_as_real), or freeze them"
        )
    if half := [n for n, p in parameters if p.dtype == torch.float16]:
        raise OuterError(
            f"{_names_of(half)} are trained in float16, in which AdamW's epsilon is 0: its first steps are 0 / 0 and "
            "all weights become NaN. Train float32 weights (autocast may compute in less), or freeze them"
        )
    if statistics := [n for n, m in model.named_modules() if _moves_statistics(m)]:
        raise OuterError(
            f"{_names_of(statistics)} keep running statistics of their batches, which are not parameters: nothing "
            "averages them, so replicas would differ. Put them into evaluation mode (module.eval()), make them with "
            "track_running_stats=False, or use LayerNorm or GroupNorm"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := [n for n, p in parameters if id(p) not in held]:
        raise OuterError(
            f"the optimizer does not hold {_names_of(missing)}, which can be trained. One optimizer drives the outer "
            "loop: give it all trainable parameters (in groups of their own, if their settings differ), or freeze the "
            "others"
        )


def _moves_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.track_running_stats and module.training


def frozen_digest(model: nn.Module) -> str:
    """Return xxh3-128 over names and bytes of frozen parameters and saved buffers; "" if there are none.

    No outer step averages these."""
    h = xxhash.xxh3_128()
    found = False
    frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
    for name, tensor in [*frozen, *saved_buffers(model)]:
        found = True
        h.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        h.update(_tensor_bytes(tensor))
    return h.hexdigest() if found else ""


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that are in the state_dict."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


@torch.no_grad()
def _tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class ModelGuard:
    """A comparison of a model with its state at the loop's entry.  It walks over the modules and copies nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trainable = self._parameter_versions()
        self._buffers = self._buffer_versions()

    def check(self) -> None:
        """Raise OuterError if training changed something that no flat vector holds."""
        now = self._parameter_versions()
        if changed := [n for n in {**self._trainable, **now} if self._trainable.get(n) != now.get(n)]:
            raise OuterError(
                f"{_names_of(changed)} were frozen, unfrozen or replaced after make_diloco: each replica would train "
                "others. Do that before make_diloco, or end the loop and make a new one (for a new run, as its layout "
                "differs)"
            )
        versions = self._buffer_versions()
        if moved := [n for n in {**self._buffers, **versions} if self._buffers.get(n) != versions.get(n)]:
            raise OuterError(
                f"the buffers {_names_of(moved)} changed during training, and nothing averages buffers: replicas would "
                "differ. Make them parameters, register them with persistent=False if they are only a cache, or keep "
                "their modules in evaluation mode"
            )

    def _parameter_versions(self) -> dict[str, int]:
        return {n: id(p) for n, p in trainable_parameters(self._model)}

    def _buffer_versions(self) -> dict[str, tuple[int, int]]:
        """Return name -> (id of the tensor, number of writes in place) for each saved buffer."""
        return {n: (id(b), b._version) for n, b in saved_buffers(self._model)}


def _names_of(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
