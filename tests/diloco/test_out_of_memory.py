"""A replica whose GPU is full ends with words that say what was asked for, what is free, and what to change."""

import pytest
import torch

from diloco.replica import out_of_memory
from diloco.replica.out_of_memory import GIB, error_words, memory_words

TORCH = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB …"
CONTEXT = (  # as torch 2.11 said it on an H200 whose memory another process held
    "CUDA error: out of memory Search for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/… for more "
    "information. CUDA kernel errors might be asynchronously reported at some other API call …"
)


def test_the_gpu_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "_memory_here", lambda: (int(1.2 * GIB), int(139.8 * GIB), 100 * GIB))
    said = error_words(torch.OutOfMemoryError(TORCH))
    assert said.startswith(
        "out of GPU memory: 2.00 GiB more were asked for; "
        "1.2 of 139.8 GiB are free, 100.0 this replica's, 38.6 others'. Next: "
    )
    assert "inner.batch_size" in said and "gradient_checkpointing" in said


def test_generation_that_asked_for_too_much_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: half the batch and twice the accumulation, which is the same generation."""
    monkeypatch.setattr(out_of_memory, "_memory_here", lambda: (0, 16 * GIB, 16 * GIB))

    def generate() -> None:
        raise torch.OutOfMemoryError(TORCH)

    try:
        generate()
    except torch.OutOfMemoryError as error:
        said = error_words(error)
    assert "steps_per_generation" in said and "double" not in said


def test_another_process_holds_the_gpu() -> None:
    said = error_words(RuntimeError(CONTEXT))
    assert said == f"out of GPU memory: {out_of_memory.TAKEN}" and "nvidia-smi" in said


def test_an_error_that_does_not_say_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "_memory_here", lambda: (0, 16 * GIB, 16 * GIB))
    assert "asked for" not in error_words(torch.OutOfMemoryError("CUDA out of memory."))
    assert memory_words("", (GIB, 2 * GIB, 3 * GIB)).count("0.0 others'") == 1  # a moment later


def test_another_error_keeps_its_words() -> None:
    assert error_words(ValueError("no")) == "ValueError: no"
    assert error_words(RuntimeError("CUDA error: an illegal memory access")).startswith("RuntimeError: CUDA error")
