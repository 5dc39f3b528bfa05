"""The model of a launched script in its run: its config and tokenizer at the start, its weights on export.

    the first replica to join ─▶ config, generation config, tokenizer         ┐
                                 PEFT: the adapter with its config            ├─▶ model/…, model/manifest.json
                                 with frozen weights or buffers: all weights  ┘
    export ─▶ θ_t under the names that save_pretrained gives it ─▶ a from_pretrained folder

Not promised: a folder that from_pretrained loads, if the model is not a PreTrainedModel: then export writes the
weights alone, and the script must load them itself.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diloco.model.fetch import fetch_model
from diloco.model.publish import upload_folder
from diloco.outer.flat import frozen_digest, layout_of
from diloco.outer.optimizer import OuterState
from diloco.run.config import ConfigError
from diloco.run.record import ModelRecord, Run
from rendezvous import layout
from rendezvous.clock import Clock
from rendezvous.records.records import new_nonce
from rendezvous.store import Store, put_once

ADAPTER_CONFIG, ADAPTER_WEIGHTS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors", "model.safetensors"


def publish_script_model(store: Store, clock: Clock, model: Any, tokenizer: Any) -> None:
    """Put what an export needs beside θ into the bucket, unless another replica has done so."""
    if store.get(layout.MODEL_MANIFEST) is not None:
        return
    with tempfile.TemporaryDirectory() as scratch:
        for part in _parts(model, tokenizer):
            part.save_pretrained(scratch)
        files = upload_folder(store, Path(scratch))
    put_once(
        store, clock, layout.MODEL_MANIFEST, ModelRecord(files, layout_of(model), new_nonce(), clock.wall()).encode()
    )


def _parts(model: Any, tokenizer: Any) -> list[Any]:
    """The objects whose save_pretrained writes the files: the model itself where θ is not all of it."""
    whole = hasattr(model, "peft_config") or (frozen_digest(model) and hasattr(model, "save_pretrained"))
    parts = [model] if whole else [getattr(model, name, None) for name in ("config", "generation_config")]
    return [part for part in (*parts, tokenizer) if hasattr(part, "save_pretrained")]


def write_script_model(run: Run, record: ModelRecord, state: OuterState, to: Path) -> None:
    """Write θ as `save_pretrained` would.   Raises ConfigError for a parameter that its file does not know."""
    to.mkdir(parents=True, exist_ok=True)
    fetch_model(run.store, record, to)
    weights: dict[str, Tensor] = {}
    for path in to.glob("*.safetensors*"):
        weights |= load_file(path) if path.suffix == ".safetensors" else {}
        path.unlink()
    flat, at = torch.cat(state.thetas), 0
    known = set(weights)
    for name, shape, dtype in record.layout:
        size = torch.Size(shape).numel()
        part = flat[at : at + size].view(shape).to(getattr(torch, dtype))
        weights[_saved_name(name, known)], at = part.contiguous(), at + size
    file = ADAPTER_WEIGHTS if (to / ADAPTER_CONFIG).exists() else WEIGHTS
    save_file(weights, to / file, metadata={"format": "pt"})


def _saved_name(name: str, known: set[str]) -> str:
    """Return a parameter's name in the file: PEFT leaves out the adapter's name, and "modules_to_save" before it."""
    if not known or name in known:
        return name
    parts = name.split(".")
    for at in reversed(range(len(parts))):
        before = at - (parts[at - 1] == "modules_to_save")
        if (shorter := ".".join(parts[:before] + parts[at + 1 :])) in known:
            return shorter
    raise ConfigError(f"the start model's files have no weight {name}, so this run's model cannot be written")
