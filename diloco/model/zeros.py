"""A start model's folder with zeros as weights: a safetensors file of a header, and a hole of the arrays' size.

    u64: length of the header │ header: JSON │ hole: zeros that take no disk space

The first number of each array is not zero and differs between the arrays: if the head and the embeddings were equal,
Transformers would take the head for tied, though the run's start model has an untied head.

Not promised: holes on every file system; without holes, the zeros are written.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from diloco.model.fetch import fetch_model, is_weights_file
from diloco.run.record import ModelRecord
from rendezvous.store import Store

_NAMES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2), "float64": ("F64", 8)}


def fetch_model_without_weights(store: Store, record: ModelRecord, folder: Path) -> Path:
    """Write θ₀'s folder with zeros as weights, for a replica that loads θ from a snapshot. Return `folder`.

    Raises HubError.   `folder` becomes a normal from_pretrained folder.   The zeros are a hole in a file, which needs
    no transfer and no disk space.
    """
    others = {name: stored for name, stored in record.files.items() if not is_weights_file(name)}
    fetch_model(store, replace(record, files=others), folder)
    write_zeros(folder / "model.safetensors", record.layout)
    return folder


def write_zeros(path: Path, layout: Sequence[Sequence[Any]]) -> None:
    """Write a .safetensors file of zeros.   layout: [name, shape, dtype] of each array (diloco/outer/flat.py)."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, marks = 0, []
    for number, (name, shape, dtype) in enumerate(layout):
        kind, width = _NAMES[dtype]
        marks.append((at + width - 2, (0x400 + number % 0x7000).to_bytes(2, "little")))  # finite in each dtype
        end = at + width * prod(shape)
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for place, mark in marks:
            file.seek(8 + len(header) + place)
            file.write(mark)
        file.truncate(8 + len(header) + at)
