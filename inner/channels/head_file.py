"""Reads the file of a process reward's head: safetensors, whose metadata name the format and the width.

    metadata {"form": "process head 1", "width": D}

Not promised: that the head was trained on this model; only D is compared.
"""

from pathlib import Path

from inner.errors import InnerError

HEAD_FORM = "process head 1"


def read_head_width(path: Path) -> int:
    """Return D, the width of the hidden states that a head reads, from its file's header.

    Raises InnerError if the file does not hold a head.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "numpy") as file:
            metadata = file.metadata() or {}
        if metadata.get("form") != HEAD_FORM:
            raise ValueError(f"its metadata are {metadata}")
        return int(metadata["width"])
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise InnerError(
            f"{path} is not a process head: {error}. Write it with `train_process_head(…)[0].save(path)`."
        ) from error
