"""Compares the parts of a model that no outer step averages: frozen weights, their 4-bit scales, saved buffers.

    a session begins    digest = "base" of the manifest (an adapter) or of run.json (a script)?    no: WrongRun
    it ends             the same digest?                                                          no: Diverged

Not promised: buffers that a module does not save.
"""

import xxhash
from torch import nn

from diloco.outer.flat import bare_name, saved_buffers, scales_of, tensor_bytes
from rendezvous.errors import Diverged, WrongRun


def frozen_digest(model: nn.Module) -> str:
    """Return xxh3-128 over frozen parameters and saved buffers, which no outer step averages; "" without any."""
    h = xxhash.xxh3_128()
    frozen = [(bare_name(model, n), p) for n, p in model.named_parameters() if not p.requires_grad]
    scales = [(f"{n}.{k}", v) for n, p in frozen if hasattr(p, "quant_state") for k, v in scales_of(p)]
    fixed = [*frozen, *scales, *saved_buffers(model)]
    for name, tensor in fixed:
        h.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        h.update(tensor_bytes(tensor))
    return h.hexdigest() if fixed else ""


def refuse_other_base(announced: str, model: nn.Module) -> None:
    """Raise WrongRun if the adapter's base is not the run's base.   announced: "" if the whole model is trained."""
    if announced and (found := frozen_digest(model)) != announced:
        raise WrongRun(
            f"the base model of this replica's adapter has other bits than the run's: digest {found}, the run has "
            f"{announced}. An adapter means nothing on another base. Its files were the same, so this machine reads or "
            "rounds them in another way. Use the releases of torch and transformers that the run was started with"
        )


def refuse_changed_base(announced: str, model: nn.Module) -> None:
    """Raise Diverged if the base has changed since the session began."""
    if announced and (found := frozen_digest(model)) != announced:
        raise Diverged(
            f"the base model was changed in this session, though only the adapter is trained: digest "
            f"{found}, {announced} when it began. Something writes to frozen weights: a merge of the adapter, or the "
            "user's own code"
        )
