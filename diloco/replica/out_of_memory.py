"""The error message of a replica whose GPU has no memory left.

    torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB …    for example in an inner step
    torch.AcceleratorError: CUDA error: out of memory                           before there is a CUDA context
        └─▶ the sizes that were requested, are free, and are used by this process and others; what to change

Not promised: host memory; there the kernel kills the process without an error (executors/platforms/machine/oom.py).
"""

import re
import traceback

import torch

ADVICE = (
    "Next: halve inner.batch_size and double inner.gradient_accumulation_steps, set inner.gradient_checkpointing = "
    "true, or take a GPU with more memory (docs/choose.md has a table)"
)
SAMPLING = (
    "Generation needed the memory: all completions of a batch are made at once. Next: set a smaller "
    "inner.grpo.steps_per_generation (1: batch_size completions at once) or inner.sampling.max_completion_length, "
    "or take a GPU with more memory"
)
TAKEN = "another process holds the GPU's memory, and none is left for this one. Next: end that process (`nvidia-smi`)"
GIB = 2**30


def error_words(error: Exception) -> str:
    """Return the error's type and text, or our own message if GPU memory is full."""
    plain = f"{type(error).__name__}: {error}"
    if not (isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in plain):
        return plain
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", plain)
    frames = traceback.extract_tb(error.__traceback__)
    advice = SAMPLING if any(frame.name == "generate" for frame in frames) else ADVICE
    return memory_words(asked.group(1) if asked else "", _memory_here(), advice)


def memory_words(asked: str, memory: tuple[int, int, int] | None, advice: str = ADVICE) -> str:
    """Return the message.   asked: "2.00 GiB", "" if unknown.   memory: bytes (free, total, of this process)."""
    if memory is None:
        return f"out of GPU memory: {TAKEN}"
    free, total, own = (number / GIB for number in memory)
    others = max(0.0, total - free - own)
    held = f"{free:.1f} of {total:.1f} GiB are free, {own:.1f} this replica's, {others:.1f} others'"
    wanted = f"{asked} more were asked for; " if asked else ""
    return f"out of GPU memory: {wanted}{held}. {advice}"


def _memory_here() -> tuple[int, int, int] | None:
    """Return bytes (free, total, own); None if CUDA fails because even a context does not fit."""
    try:
        return (*torch.cuda.mem_get_info(), torch.cuda.memory_reserved())
    except Exception:  # a broken context raises errors of many kinds
        return None
