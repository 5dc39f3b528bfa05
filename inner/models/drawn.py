"""Refuse a start model whose files lack weights, which Transformers would draw at random.

    missing  −  parameters of the head (get_output_embeddings)  =  lost      none: a base model, with a new head
                                                                             (a warning); a classifier: refused
    a weight of another shape than config.json says                          refused
    a weight that is NaN or infinite                                         refused

Not promised: that a head with random weights is useful before training.
"""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from pickle import PickleError
from traceback import extract_tb
from typing import Any

from inner.errors import InnerError
from inner.models.heads import DRAWN, refuse_other_head
from inner.printable import first_line

WRAPPED = ("_orig_mod.", "module.")  # what torch.compile and DDP put before a weight's name


def refuse_drawn(
    source: str, model: Any, missing: Iterable[str], unexpected: Iterable[str], *, shapes: Iterable[Any] = ()
) -> None:
    """Raise InnerError if the files lack weights other than the head's, or if the model's head is not for text. Warn if
    the head is drawn at random.

    missing: names of weights that the files lack.   unexpected: names in the files that the model lacks.
    shapes: (name, shape in the files, shape by config.json) of each weight with two shapes."""
    for name, there, here in sorted(shapes, key=str):
        raise InnerError(
            f"the model {source}: {name} has the shape {[*there]} in its files, and {[*here]} by its config.json. The "
            "files and config.json are of different models, or the embeddings were resized and config.json was not. "
            "Save the model again, with save_pretrained."
        )
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
        "completion would be noise. Take an earlier checkpoint, or the model that this model was made from."
    )


def unreadable(source: str, error: Exception) -> str:
    """Return why a model cannot be loaded, and the next thing to do.   error: of transformers or another library."""
    kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
    said = f"{kind}{first_line(error)}".rstrip(".")
    if "custom code" in str(error):
        return (
            f"the model {source} needs Python code out of its own files (auto_map in config.json or "
            "tokenizer_config.json). A run executes no such code. Set inner.model to a model that transformers reads "
            "without it."
        )
    if isinstance(error, PickleError):
        said = "a .bin file has more than weights in it, and reading the rest could run code. Save it as .safetensors"
    if any("/generation/" in frame.filename for frame in extract_tb(error.__traceback__)):
        advice = "Correct or delete generation_config.json: a run reads only the ids of special tokens there"
    elif Path(source.removeprefix("in ")).exists():
        advice = "Download or save it again, or correct inner.model"
    else:
        advice = "Check inner.model and inner.revision; for a private model, check the Hub token, too"
    return f"the model {source} could not be loaded: {said}. {advice}."


def _head_names(model: Any) -> set[str]:
    head = model.get_output_embeddings()
    places = [place for place, module in model.named_modules() if module is head]
    return {f"{place}.{name}" for place in places for name, _ in head.named_parameters()}
