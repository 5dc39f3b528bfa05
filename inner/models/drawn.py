"""Refuse a start model whose files lack weights, which Transformers would draw at random.

    missing  −  parameters of the head (get_output_embeddings)  =  lost      none: a base model, with a new head
                                                                             (a warning); a classifier: refused
    a weight that is NaN or infinite                                         refused

Not promised: that a head with random weights is useful before training.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from inner.errors import InnerError
from inner.models.heads import DRAWN, refuse_other_head

WRAPPED = ("_orig_mod.", "module.")  # what torch.compile and DDP put before a weight's name


def refuse_drawn(source: str, model: Any, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raise InnerError if the files lack weights other than the head's, or if the model's head is not for text. Warn if
    the head is drawn at random.

    missing: names of weights that the files lack.   unexpected: names in the files that the model lacks."""
    missing, unexpected = set(missing), set(unexpected)
    head = missing & _head_names(model)
    refuse_other_head(model.config.architectures or [], unexpected if head else (), source)
    lost = sorted(missing - head)
    if not lost:
        if head:
            warnings.warn(DRAWN.format(source), stacklevel=2)
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


def refuse_not_finite(source: str, names: Sequence[str]) -> None:
    """Raise InnerError for a start model with weights that are NaN or infinite.   names: the names of such weights."""
    raise InnerError(
        f"the model {source} has NaN or infinite weights in {len(names)} of its tensors ({names[0]}), so every "
        "completion would be noise. Take an earlier checkpoint, or the model that it was made from."
    )


def _head_names(model: Any) -> set[str]:
    head = model.get_output_embeddings()
    places = [place for place, module in model.named_modules() if module is head]
    return {f"{place}.{name}" for place in places for name, _ in head.named_parameters()}
