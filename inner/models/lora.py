"""A LoRA adapter around a model: made once per run, loaded by every replica, turned off to get the base model.

    new_adapter(model, settings)             when the run is created: A is drawn from a fixed seed, B is zero
    save_adapter(model, folder)              adapter_config.json, adapter_model.safetensors, in PEFT's format
    load_adapter(model, folder, settings)    in every session: the same bits, trainable; with freeze_a only B
    adapter_off(model)                       the base model during a `with`: the reference of KL and DPO

The adapter is in the subfolder `adapter` of the start model's folder. The adapter is fp32 for a base model of any
dtype, also for a base in 4 bits (inner/extras/nf4.py).

Not promised: several adapters on one model.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inner.errors import InnerError
from inner.printable import first_line
from inner.settings.task import LoraSettings

ADAPTER = "adapter"  # name of the subfolder
KINDS = ("Linear", "Conv1D", "Linear4bit")  # kinds of layers that can have an adapter
SEED = 0  # seed of A's first values; all replicas load the saved values


def new_adapter(model: Any, settings: LoraSettings, base_name: str = "", commit: str | None = None) -> Any:
    """Add a new adapter.   base_name, commit: those of a base on the Hub.   Raises InnerError if no layer matches."""
    from peft import LoraConfig, get_peft_model

    layers = _layers_matched(model, settings)
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=settings.dropout,
        target_modules=settings.targets,
        exclude_modules=_routers(model) or None,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), _without_old_name_warning():
        torch.manual_seed(SEED)
        try:
            adapted: Any = get_peft_model(model, config)
        except (ValueError, TypeError, NotImplementedError) as error:
            first = first_line(error).rstrip(".")
            raise InnerError(
                f"[inner.lora] does not fit this model: {first}. Correct that table, for example inner.lora.targets; "
                f"the model's linear layers are {layers}"
            ) from error
    adapted.peft_config["default"].base_model_name_or_path = base_name
    adapted.peft_config["default"].revision = commit
    return _freeze(adapted, settings)


def adapter_size(folder: Path, settings: LoraSettings) -> int:
    """Count an adapter's trained parameters by its layers in the model of this folder, without the model's weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        model = new_adapter(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)), settings)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def save_adapter(model: Any, folder: Path) -> None:
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card


def load_adapter(model: Any, folder: Path, settings: LoraSettings) -> Any:
    from peft import PeftModel

    with _without_old_name_warning():
        return _freeze(PeftModel.from_pretrained(model, str(folder), is_trainable=True), settings)


def adapter_off(model: Any) -> AbstractContextManager[Any]:
    return model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext()


def drop_reference_copy(model: Any) -> None:
    """Delete the adapter copy that TRL makes as the KL reference. In a run the reference is the base model."""
    if "ref" in getattr(model, "peft_config", {}):
        model.delete_adapter("ref")


@contextmanager
def _without_old_name_warning() -> Iterator[None]:
    """Suppress a warning: PEFT reads is_gradient_checkpointing, which transformers 5.23 has renamed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def _freeze(model: Any, settings: LoraSettings) -> Any:
    for name, parameter in model.named_parameters():
        if settings.freeze_a and ".lora_A." in name:
            parameter.requires_grad_(False)
    return model


def _routers(model: Any) -> list[str]:
    """Return the names of routers of experts that PEFT takes for linear layers (Llama 4, Phi-MoE).

    A router's output is a tuple, so an adapter around it raises an error in the first forward pass."""
    linear = [(name, type(m).__name__) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    return [name for name, kind in linear if kind.endswith("Router")]


def _layers_matched(model: Any, settings: LoraSettings) -> str:
    """Return the names of the model's linear layers, without its head.

    Raises InnerError for a target that matches no layer. PEFT only raises if all targets match none.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    layers = [(name, module) for name, module in model.named_modules() if type(module).__name__ in KINDS]
    linear = [name for name, module in layers if module is not head]
    heads = [name for name, module in layers if module is head]
    if of_head := [t for t in settings.names if any(n == t or n.endswith(f".{t}") for n in heads)]:
        raise InnerError(
            f"lora.targets = {settings.targets!r}: {of_head[0]} is the head. The loss reads the head's weights "
            "directly, so an adapter on them would never be trained. Take it out of inner.lora.targets."
        )
    unmatched = [t for t in settings.names if not any(name == t or name.endswith(f".{t}") for name in linear)]
    found = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
    if unmatched or not linear:
        raise InnerError(
            f"lora.targets = {settings.targets!r}: no linear layer of this model is called "
            f"{', '.join(unmatched) or 'anything'}. It has {found or 'none'}. Correct inner.lora.targets."
        )
    return found
