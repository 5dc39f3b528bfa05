"""A LoRA adapter around a model: made once per run, loaded by every replica, turned off where the base is meant.

    new_adapter(model, settings)             where the run is founded: A is drawn from a fixed seed, B is zero
    save_adapter(model, folder)              adapter_config.json, adapter_model.safetensors: a folder as PEFT writes it
    load_adapter(model, folder, settings)    every session: the same bits, trainable; with freeze_a B alone
    adapter_off(model)                       the base model, for the length of a `with`: the reference of KL and DPO

The adapter lies in the folder `adapter` of a start model's folder.  It is fp32 on a base of any dtype.

Not promised: several adapters on one model.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from inner.errors import InnerError
from inner.settings.lora import LoraSettings

ADAPTER = "adapter"  # the folder's name
SEED = 0  # of A: the run's first values are published, and no replica draws its own


def new_adapter(model: Any, settings: LoraSettings, base_name: str = "", commit: str | None = None) -> Any:
    """base_name, commit: of a base that is on the Hub.   Raises InnerError where the targets match no layer."""
    from peft import LoraConfig, get_peft_model

    _refuse_unmatched(model, settings)
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=settings.dropout,
        target_modules=settings.targets,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), _without_old_name_warning():
        torch.manual_seed(SEED)
        try:
            adapted: Any = get_peft_model(model, config)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise InnerError(f"[inner.lora] does not fit this model: {str(error).splitlines()[0]}") from error
    adapted.peft_config["default"].base_model_name_or_path = base_name
    adapted.peft_config["default"].revision = commit
    return _freeze(adapted, settings)


def save_adapter(model: Any, folder: Path) -> None:
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's card, whose blanks are not filled in


def load_adapter(model: Any, folder: Path, settings: LoraSettings) -> Any:
    from peft import PeftModel

    with _without_old_name_warning():
        return _freeze(PeftModel.from_pretrained(model, str(folder), is_trainable=True), settings)


def adapter_off(model: Any) -> AbstractContextManager[Any]:
    return model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext()


def drop_reference_copy(model: Any) -> None:
    """TRL copies the adapter of a model that comes with one, as the reference of its KL term: the base is ours."""
    if "ref" in getattr(model, "peft_config", {}):
        model.delete_adapter("ref")


@contextmanager
def _without_old_name_warning() -> Iterator[None]:
    """PEFT asks each model for is_gradient_checkpointing, which transformers 5.23 has under another name, too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def _freeze(model: Any, settings: LoraSettings) -> Any:
    for name, parameter in model.named_parameters():
        if settings.freeze_a and ".lora_A." in name:
            parameter.requires_grad_(False)
    return model


def _refuse_unmatched(model: Any, settings: LoraSettings) -> None:
    """PEFT refuses targets of which none matches; a name that matches nothing beside others would pass unseen."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    layers = [(n, module) for n, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")]
    linear = [name for name, module in layers if module is not head]
    heads = [name for name, module in layers if module is head]
    if of_head := [t for t in settings.names if any(n == t or n.endswith(f".{t}") for n in heads)]:
        raise InnerError(
            f"lora.targets = {settings.targets!r}: {of_head[0]} is the head, whose weights the log-probabilities are "
            "computed from directly, so an adapter on it would never be trained. Take it out of inner.lora.targets."
        )
    unmatched = [t for t in settings.names if not any(name == t or name.endswith(f".{t}") for name in linear)]
    if unmatched or not linear:
        found = sorted({name.rpartition(".")[2] for name in linear})
        raise InnerError(
            f"lora.targets = {settings.targets!r}: no linear layer of this model is called "
            f"{', '.join(unmatched) or 'anything'}. It has {', '.join(found) or 'none'}. Correct inner.lora.targets."
        )
