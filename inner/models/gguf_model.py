"""Load a start model from a .gguf file. Its weights are dequantised; then it is a model like any other.

    model.gguf ── transformers, gguf ──▶ weights as numbers, tokenizer, chat template ──▶ a fresh model of that config

transformers does not save a model that it has read from a .gguf file, so the weights are copied into a fresh model. The
file's rounding stays: training from a Q4 file begins at its 4-bit values, stored as floats.

Not promised: the weights before quantisation; an export in the GGUF format.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from inner.errors import InnerError
from inner.models.gguf_header import check_gguf_file


def load_gguf(model: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer.   Raises InnerError if transformers cannot read the file."""
    path = Path(model)
    check_gguf_file(path)
    folder = str(path.parent)
    name = path.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
        read = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=getattr(torch, dtype), local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InnerError(
            f"model = '{model}' could not be read: {str(error).splitlines()[0]}. Give a folder that save_pretrained "
            "wrote, or the model's name on the Hub, as inner.model."
        ) from error
    return _without_quantisation(read), tokenizer


def _without_quantisation(read: Any) -> PreTrainedModel:
    config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    config._name_or_path = ""
    fresh = AutoModelForCausalLM.from_config(config, dtype=read.dtype)
    fresh.load_state_dict(read.state_dict())
    fresh.generation_config = read.generation_config
    return fresh
