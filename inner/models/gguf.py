"""Read the header of a start model in a .gguf file, or load the model. Loading dequantises the weights. After that the
model is like any other model.

    "GGUF" │ version │ tensors │ keys │ key value key value … │ name shape type offset, of each tensor │ the data

    read_gguf_header(path)    architecture, and the shape and type of each tensor
    check_gguf_file(path)     also checks that transformers can read the file
    load_gguf(path, dtype)    transformers, gguf ──▶ weights as numbers, tokenizer, chat template ──▶ a fresh model

For a file with 50,000 tokens we read the header in a tenth of a second; the package gguf would take seconds, so we use
it only for the weights. transformers cannot save a model that it read from a .gguf file, so we copy the weights into a
fresh model. The file's rounding stays: training from a Q4 file begins at its 4-bit values, stored as floats.

Not promised: big-endian files, or version 1; the weights before quantisation; an export in the GGUF format.  Only
`load_gguf` imports torch.
"""

import struct
from collections import Counter
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from inner.errors import InnerError
from inner.printable import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAGIC = b"GGUF"
MOST = 1 << 24  # at most so many tensors, keys, array entries or text bytes in a valid header
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
DEEPEST = 4  # at most so many levels of nested arrays; no known model has nested arrays
_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K",
          12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 30: "BF16"}  # fmt: skip
EXACT = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class GgufHeader:
    """A header.   shapes: tensor name -> shape.   kinds: type -> number of tensors of this type."""

    architecture: str
    shapes: dict[str, tuple[int, ...]]
    kinds: dict[str, int]

    @property
    def quantised(self) -> list[str]:
        """The quantised types among the tensors' types."""
        return sorted(kind for kind in self.kinds if kind not in EXACT)


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header.   Raises InnerError for a file that is missing or is not a GGUF file."""
    try:
        with path.open("rb") as file:
            return _parse_header(file)
    except FileNotFoundError:
        raise InnerError(
            f"model = '{path}': there is no such file here ({path.absolute()}). Correct inner.model; `make smollm2` "
            "fetches a small one."
        ) from None
    except (OSError, ValueError, struct.error) as error:
        raise InnerError(
            f"model = '{path}' is not a GGUF file that can be read ({error}). Download it again, or give a folder or a "
            "Hub id as inner.model."
        ) from error


def check_gguf_file(path: Path) -> GgufHeader:
    """Read the header.   Raises InnerError if it shows that transformers cannot read the file."""
    found = read_gguf_header(path)
    if find_spec("gguf") is None:
        raise InnerError(
            f"model = '{path}' is read with the package gguf, which is not installed. Next: pip install "
            "'serverless-diloco[gguf]'"
        )
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


def _parse_header(file: BinaryIO) -> GgufHeader:
    if (magic := file.read(4)) != MAGIC:
        raise ValueError(f"it begins with {magic!r}, not with {MAGIC!r}")
    version, tensors, keys = (_number(file, kind) for kind in "IQQ")
    if version not in (2, 3) or max(tensors, keys) > MOST:
        raise ValueError(f"it says version {version}, {tensors} tensors and {keys} keys")
    values = dict[str, Any]()
    for _ in range(keys):
        key = _string(file)
        values[key] = _value(file, _number(file, "I"))
    shapes = dict[str, tuple[int, ...]]()
    kinds = Counter[str]()
    for _ in range(tensors):
        name = _string(file)
        shapes[name] = tuple(_number(file, "Q") for _ in range(_number(file, "I")))
        kind = _number(file, "I")
        kinds[_TYPES.get(kind, f"type {kind}")] += 1
        _number(file, "Q")  # skip the offset of its data
    return GgufHeader(str(values.get("general.architecture", "")), shapes, dict(kinds))


def _number(file: BinaryIO, kind: str) -> Any:
    size = struct.calcsize(f"<{kind}")
    return struct.unpack(f"<{kind}", file.read(size))[0]


def _string(file: BinaryIO) -> str:
    length = _number(file, "Q")
    if length > MOST:
        raise ValueError(f"a name or text of {length} bytes")
    body = file.read(length)
    if len(body) < length:
        raise ValueError("it is cut off")
    return body.decode("utf-8", errors="replace")


def _value(file: BinaryIO, kind: int, depth: int = 0) -> Any:
    """Return the value of a key. Skip an array, and return None for it."""
    if kind in _NUMBERS:
        return _number(file, _NUMBERS[kind])
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY or depth == DEEPEST:
        raise ValueError(f"arrays in arrays, {depth} deep" if kind == _ARRAY else f"a value of type {kind}")
    of = _number(file, "I")
    length = _number(file, "Q")
    if length > MOST:
        raise ValueError(f"an array of {length} entries")
    if of in _NUMBERS:
        file.seek(length * struct.calcsize(f"<{_NUMBERS[of]}"), 1)
    else:
        for _ in range(length):
            _value(file, of, depth + 1)
    return None


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
