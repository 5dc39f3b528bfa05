"""Open a file of token ids, for checks before the start and in a replica.

    .npy    numpy's own: a one-dimensional array of integers
    .bin    raw uint16, without a header

Not promised: that the ids belong to the model's vocabulary; the replica, which has the model, checks that.  No torch.
"""

from pathlib import Path

import numpy as np

from inner.errors import InnerError

IDS = (".npy", ".bin")


def open_ids(path: Path, spelling: str) -> np.ndarray:
    """Map the file's ids into memory, without reading them.   Raises InnerError if it is not a file of token ids."""
    try:
        return np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.memmap(path, dtype=np.uint16, mode="r")
    except (EOFError, OSError, ValueError) as error:
        raise InnerError(
            f"inner.data.text = {spelling!r} is not a file of token ids: {error}. Save a .npy with numpy.save, or a "
            ".bin as raw uint16, two bytes per token."
        ) from error
