"""The model of a launched script in its run: its config and tokenizer at the start, its weights on export.

    the first replica to join ─▶ config, generation config, tokenizer         ┐
                                 PEFT: the adapter with its config            ├─▶ model/…, model/manifest.json
                                 with frozen weights or buffers: all weights  ┘
                                 of a model in shards, all ranks gather these, and rank 0 writes
    export ─▶ θ_t under the names that save_pretrained gives it ─▶ a from_pretrained folder

Not promised: a folder that from_pretrained loads, if the model is not a PreTrainedModel: then export writes the
weights alone, and the script must load them itself.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diloco.model.fetch import fetch_model
from diloco.model.publish import upload_folder
from diloco.outer.flat import layout_of, saved_buffers
from diloco.outer.optimizer import OuterState
from diloco.process.session import Session
from diloco.run.config import ConfigError
from diloco.run.record import ModelRecord, Run
from rendezvous import layout
from rendezvous.records.records import new_nonce
from rendezvous.store import put_once

ADAPTER_CONFIG, ADAPTER_WEIGHTS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors", "model.safetensors"


def publish_script_model(
    session: Session | None, model: Any, tokenizer: Any, tell: Callable[[Any], Any] = lambda message: message
) -> None:
    """Put what an export needs beside θ into the bucket, unless another replica has done so. Every rank calls this.

    session: None except on rank 0.   tell: returns rank 0's message."""
    store = None if session is None else session.rv.store
    if not tell(store is not None and store.get(layout.MODEL_MANIFEST) is None):
        return
    is_whole = _is_whole(model)
    state = _gathered_state(model, keep=session is not None) if is_whole else {}
    if session is not None:
        _upload(session, model, tokenizer, is_whole, state)
    tell(None)  # the other ranks wait for the upload here, and not in a collective of the training


def _upload(session: Session, model: Any, tokenizer: Any, is_whole: bool, state: dict[str, Any]) -> None:
    """Write the files and then the manifest.   state: gathered from shards; {} without shards."""
    store, clock = session.rv.store, session.clock
    names = ("config", "generation_config")
    parts: list[Any] = [model] if is_whole else [getattr(model, name, None) for name in names]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        for part in (*parts, tokenizer):
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(scratch, **({"state_dict": state} if part is model and state else {}))
        _warn_of_no_export(session, model, Path(scratch))
        files = upload_folder(store, Path(scratch))
    put_once(
        store, clock, layout.MODEL_MANIFEST, ModelRecord(files, layout_of(model), new_nonce(), clock.wall()).encode()
    )


def _warn_of_no_export(session: Session, model: Any, saved: Path) -> None:
    known = {name for path in saved.glob("*.safetensors") for name in load_file(path)}
    params = layout_of(model)
    try:
        _ = [_saved_name(name, known, len(params)) for name, *_ in params]
    except ConfigError as error:
        session.emit("warning", text=f"`diloco export` cannot write this run: {error}")


def _is_whole(model: Any) -> bool:
    """Whether the model itself writes the files, because θ does not have all its weights."""
    if hasattr(model, "peft_config"):
        return True
    frozen = any(not p.requires_grad for p in model.parameters()) or any(True for _ in saved_buffers(model))
    return frozen and hasattr(model, "save_pretrained")


@torch.no_grad()
def _gathered_state(model: Any, keep: bool) -> dict[str, Any]:
    """Return the state_dict of a model in shards: each tensor whole, tied tensors once; {} for a model without shards.

    keep: True on rank 0. Gathering is a collective, so all ranks call this."""
    held = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    if not any(hasattr(value, "full_tensor") for value in held.values()):
        return {}
    whole: dict[int, Any] = {}
    for value in held.values():
        if id(value) not in whole:
            gathered = getattr(value, "full_tensor", lambda value=value: value)()
            whole[id(value)] = gathered.detach().cpu() if keep else None
    return {name: whole[id(value)] for name, value in held.items()}


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
        weights[_saved_name(name, known, len(record.layout))], at = part.contiguous(), at + size
    file = ADAPTER_WEIGHTS if (to / ADAPTER_CONFIG).exists() else WEIGHTS
    save_file(weights, to / file, metadata={"format": "pt"})


def _saved_name(name: str, known: set[str], trained: int) -> str:
    """Return a parameter's name in the file: PEFT leaves out the adapter's name, and "modules_to_save" before it.

    DoRA's magnitudes, lora_magnitude_vector.default.weight, lose both last words. Prompt tuning and prefix tuning save
    their only parameter as "prompt_embeddings"; with an encoder behind it, PEFT saves the encoder's output there.
    trained: number of parameters."""
    if not known or name in known:
        return name
    if known == {"prompt_embeddings"} and trained == 1:
        return "prompt_embeddings"
    parts = name.split(".")
    if parts[-3:-2] == ["lora_magnitude_vector"] and (shorter := ".".join(parts[:-2])) in known:
        return shorter
    for at in reversed(range(len(parts))):
        before = at - (parts[at - 1] == "modules_to_save")
        if (shorter := ".".join(parts[:before] + parts[at + 1 :])) in known:
            return shorter
    raise ConfigError(
        f"the start model's files have no weight {name}, which this run trains, so its model cannot be written. Let "
        "the script save it itself"
    )
