"""Read the header of a start model in a .gguf file, or load the model. Loading dequantises the weights. After that the
model is like any other model.



    read_gguf_header(path)    architecture, and the shape and type of each tensor
    check_gguf_file(path)     also checks that transformers can read the file
    load_gguf(path, dtype)    transformers, gguf ──▶ weights as numbers, tokenizer, chat template ──▶ a fresh model

The package gguf needs seconds for a header of 50,000 tokens, so we keep the newest header. transformers cannot save a
model that it read from a .gguf file, so we copy the weights into a fresh model. The file's rounding stays: training
from a Q4 file begins at its 4-bit values, stored as floats.

Not promised: big-endian files, or version 1; the weights before quantisation; an export in the GGUF format.  Only
`load_gguf` imports torch.
"""

from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inner.errors import InnerError
from inner.printable import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EXACT = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class GgufHeader:
    """A header.   shapes: tensor name -> shape.   quantised: the quantised types among the tensors' types."""

    architecture: str
    shapes: dict[str, tuple[int, ...]]
    quantised: list[str]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header.   Raises InnerError for a file that is missing or is not a GGUF file."""
    if not path.is_file():
        raise InnerError(
            f"model = '{path}': there is no such file here ({path.absolute()}). Correct inner.model; `make smollm2` "
            "fetches a small one."
        )
    if find_spec("gguf") is None:
        raise InnerError(
            f"model = '{path}' is read with the package gguf, which is not installed. Next: pip install "
            "'serverless-diloco[gguf]'"
        )
    return _read_header(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _read_header(path: Path, changed: int) -> GgufHeader:
    from gguf import GGUFReader

    try:
        found = GGUFReader(path)
        architecture = found.fields["general.architecture"].contents()
        kinds = {tensor.tensor_type.name for tensor in found.tensors}
        shapes = {tensor.name: tuple(map(int, tensor.shape)) for tensor in found.tensors}
    except Exception as error:  # the fault's place in the file decides whether the reader or numpy raises
        raise InnerError(
            f"model = '{path}' is not a GGUF file that can be read ({error!r:.200}). Download it again, or give a "
            "folder or a Hub id as inner.model."
        ) from error
    return GgufHeader(str(architecture), shapes, sorted(kinds.difference(EXACT)))


def check_gguf_file(path: Path) -> GgufHeader:
    """Read the header.   Raises InnerError if it shows that transformers cannot read the file."""
    found = read_gguf_header(path)
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    # Keys of the mapping are architectures, some in two spellings; these two keys are not architectures.
    known = {name.replace("_", "") for name in GGUF_CONFIG_MAPPING} - {"general", "tokenizer"}
    if found.architecture.replace("-", "").replace("_", "") not in known:
        raise InnerError(
            f"model = '{path}' is of the architecture {found.architecture!r}, which transformers cannot read from a "
            f"GGUF file. It reads {', '.join(sorted(known))}. Give the model's folder, or its name on the Hub, as "
            "inner.model."
        )
    return found


# -------------------------------------------------------------------- the weights


def load_gguf(model: str, dtype: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load model and tokenizer.   Raises InnerError if transformers cannot read the file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(model)
    check_gguf_file(path)
    folder = str(path.parent)
    name = path.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
        with redirect_stderr(StringIO()):  # transformers' progress bar would fill the log's last lines
            read = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=name, dtype=getattr(torch, dtype), local_files_only=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InnerError(
            f"model = '{model}' could not be read: {first_line(error)}. Give a folder that save_pretrained "
            "wrote, or the model's name on the Hub, as inner.model."
        ) from error
    return _without_quantisation(read), tokenizer


def _without_quantisation(read: Any) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    config._name_or_path = ""
    fresh = AutoModelForCausalLM.from_config(config, dtype=read.dtype)
    fresh.load_state_dict(read.state_dict())
    fresh.generation_config = read.generation_config
    return fresh
