"""A safetensors file of zeros with a model's layout: a header, and a hole of the arrays' size.

    u64: length of the header │ header: JSON │ hole: zeros that take no disk space

Not promised: holes on every file system; if there are none, the zeros are written.
"""

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

_NAMES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2), "float64": ("F64", 8)}


def write_zeros(path: Path, layout: Sequence[Sequence[Any]]) -> None:
    """Write a .safetensors file of zeros.   layout: [name, shape, dtype] of each array (diloco/outer/flat.py)."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape, dtype in layout:
        kind, width = _NAMES[dtype]
        end = at + width * prod(shape)
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + at)
