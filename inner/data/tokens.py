"""Open a file of token ids, before the start and in a replica.

    .npy    numpy's own: one line of integers
    .bin    raw uint16, without a header

Not promised: that the ids are a model's; the replica, which has the model, asks that.  No torch.
"""

from pathlib import Path

import numpy as np

from inner.errors import InnerError

IDS = (".npy", ".bin")


def open_ids(path: Path, spelling: str) -> np.ndarray:
    """Map the file's ids, without reading them.   Raises InnerError if it is no such file."""
    try:
        return np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.memmap(path, dtype=np.uint16, mode="r")
    except (EOFError, OSError, ValueError) as error:
        raise InnerError(
            f"inner.data.text = {spelling!r} is not a file of token ids: {error}. Save a .npy with numpy.save, or a "
            ".bin as raw uint16, two bytes per token."
        ) from error
