"""Refuse a start model whose files lack weights, which Transformers would draw at random.

    missing  −  parameters of the head (get_output_embeddings)  =  lost      none: a base model, with a new head

Not promised: that a head which was drawn is worth anything before training.
"""

from collections.abc import Iterable
from typing import Any

from inner.errors import InnerError

WRAPPED = ("_orig_mod.", "module.")  # what torch.compile and DDP put before a weight's name


def refuse_drawn(source: str, model: Any, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raise InnerError if weights other than the head's are in no file.

    missing, unexpected: names that the files lack, or that the model does not have."""
    lost = sorted(set(missing) - _head_names(model))
    if not lost:
        return
    wrapped = [name for name in sorted(unexpected) if name.startswith(WRAPPED) or f".{WRAPPED[0]}" in name]
    mend = (
        f"They have {wrapped[0]} instead: save the model inside torch.compile or DDP again, with save_pretrained."
        if wrapped
        else "Set inner.model to a complete checkpoint, or save it again, whole, with save_pretrained."
    )
    raise InnerError(
        f"the files of the model {source} lack {len(lost)} of its weights ({', '.join(lost[:2])}, …), so they "
        f"would be drawn at random. {mend}"
    )


def _head_names(model: Any) -> set[str]:
    head = model.get_output_embeddings()
    places = [place for place, module in model.named_modules() if module is head]
    return {f"{place}.{name}" for place in places for name, _ in head.named_parameters()}
