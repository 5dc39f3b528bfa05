"""θ₀ of a run: the source of its weights, and checks that every replica has the same bits.

    built in code, a folder or a .gguf ─▶ model/{nonce}/… in the bucket, in the run's dtype          files by SHA-256
    a model of the Hub                 ─▶ only its name and commit in model/manifest.json            files by SHA-256
                                          every replica reads the files from its own HF cache or from the Hub
    [inner.lora]                       ─▶ also model/{nonce}/adapter/…; θ₀ is only the adapter, and each session
                                          compares the digest of the base at its begin and its end

    model ─▶ trainable parameters in flat order, as fp32 ─▶ digest      in the manifest; compared before training
                                                         ─▶ snapshot 0  the same, and zeros for the rest

The digest is of the trained parameters after the replica has read, rounded and gathered them. So a release that rounds
differently is found before it trains.

Not promised: that the Hub keeps a commit. If your run must not depend on the Hub, use a folder as inner.model.
"""

from pathlib import Path

import numpy as np
from torch import nn

from diloco.outer.flat import FlatFragment, trainable_parameters
from diloco.outer.optimizer import Nesterov, OuterState
from diloco.run.config import OuterConfig, cut_fragments
from inner.settings.task import LoraSettings
from rendezvous.errors import WrongRun
from rendezvous.records.digests import digest_of, is_digest
from rendezvous.records.wire import as_bytes


def theta_digest(model: nn.Module, kind: str) -> str:
    """Compute the digest of all trainable parameters as fp32, in flat order."""
    flats = (p.detach().reshape(-1).float().cpu().numpy() for _, p in trainable_parameters(model))
    return digest_of((as_bytes(flat) for flat in flats), kind)


def has_more_than_trained(model: nn.Module) -> bool:
    """Whether the model has weights outside the outer state: frozen weights, or buffers in its files."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return not all(p.requires_grad for p in parameters.values()) or bool(model.state_dict().keys() - parameters.keys())


def refuse_other_bits(announced: str, model: nn.Module) -> None:
    """Raise WrongRun if this θ₀ is not the run's θ₀.   announced: "" in a run of an older release."""
    if not announced:
        return
    kind = announced.partition(":")[0]
    found = theta_digest(model, kind) if is_digest(announced, kind) else "of no known kind"
    if found != announced:
        raise WrongRun(
            f"this replica's start model has other bits than the run's: digest {found}, the run has {announced}. Its "
            "files were the same, so this machine reads or rounds them in another way. Use the releases of torch and "
            "transformers that the run was started with"
        )


def first_arrays(
    folder: Path, dtype: str, outer: OuterConfig, lora: "LoraSettings | None" = None
) -> dict[str, np.ndarray]:
    """Return the outer state before the first outer step, from the start model's folder."""
    from inner.train.build import load_start  # it imports transformers

    model, _ = load_start(folder, dtype, lora)
    params = [p for _, p in trainable_parameters(model)]
    flats = [FlatFragment(params[s]).flat for s in cut_fragments([p.numel() for p in params], outer.fragments)]
    optimizers = [Nesterov(flat, lr=outer.lr, momentum=outer.momentum) for flat in flats]
    return OuterState([flat.data for flat in flats], optimizers).all_arrays()
