"""The last words of a replica whose GPU has no memory left.

    torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB …    in an inner step, say
    torch.AcceleratorError: CUDA error: out of memory                           before there is a context
        └─▶ what was asked for, what is free, what this process and what others hold, what to change

Not promised: words for host memory; the kernel kills a process without asking (executors/platforms/machine/oom.py).
"""

import re

import torch

ADVICE = (
    "Next: halve inner.batch_size and double inner.gradient_accumulation_steps, set inner.gradient_checkpointing = "
    "true, or take a GPU with more memory (docs/choose.md has a table)"
)
TAKEN = "no memory of the GPU is left for this process, another one holds it. Next: end that process (`nvidia-smi`)"
GIB = 2**30


def error_words(error: Exception) -> str:
    """The error as its type and text, or in words of its own where it is about the GPU's memory."""
    plain = f"{type(error).__name__}: {error}"
    if not (isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in plain):
        return plain
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", plain)
    return memory_words(asked.group(1) if asked else "", _memory_here())


def memory_words(asked: str, memory: tuple[int, int, int] | None) -> str:
    """asked: "2.00 GiB", "" if not known.   memory: bytes that are free, there are, and this process holds."""
    if memory is None:
        return f"out of GPU memory: {TAKEN}"
    free, total, own = (number / GIB for number in memory)
    others = max(0.0, total - free - own)
    held = f"{free:.1f} of {total:.1f} GiB are free, {own:.1f} this replica's, {others:.1f} others'"
    wanted = f"{asked} more were asked for; " if asked else ""
    return f"out of GPU memory: {wanted}{held}. {ADVICE}"


def _memory_here() -> tuple[int, int, int] | None:
    """None where the device does not answer: then not even a context has memory."""
    try:
        return (*torch.cuda.mem_get_info(), torch.cuda.memory_reserved())
    except Exception:  # of any kind that a broken context raises
        return None
