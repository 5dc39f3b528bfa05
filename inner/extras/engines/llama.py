"""Samples with llama.cpp in the actor's process: a quantised base on a CPU, with each outer step's adapter.

    base.gguf (Q8_0) ── once ──▶ llama.cpp ◀── set ── adapter.gguf ◀── the run's A and B, each step
                                     │ logits
                                     ▼
                      log-softmax(logits / T) ──▶ a draw, and its log-prob

The log-probs are those of the quantised weights, which sampled.  Q8_0 is as close to fp32 as bf16 is; with 4 bits, a
replica's check rejects the rollouts (docs/weights.md).

    blk.0.attn_q.weight.lora_a  (r, in)     blk.0.attn_q.weight.lora_b  (out, r)     scale = alpha / r

In .gguf files of Llama models, rows of q and k have another order than in transformers, so we permute rows of their B.

Not promised: several sequences in one forward; other architectures than ARCHITECTURES; another base: the file must be
the run's start model (made by llama.cpp's convert_hf_to_gguf.py --outtype q8_0).
"""

import ctypes
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inner.errors import InnerError
from inner.extras.engines.sampling import DrawSettings, Sampled, adapter_tensors
from inner.optional import optional

ARCHITECTURES = {"llama": ("attn_q", "attn_k"), "qwen2": (), "qwen3": ()}  # -> tensors whose rows are permuted
CONTEXT = 4096  # tokens of a prompt and its completion
ERROR = 4  # llama.cpp's level of errors
ABSENT = (
    "--engine llama_cpp needs the package llama-cpp-python, which cannot be imported here ({}). `pip "
    "install llama-cpp-python==0.3.36` builds it (a C++ compiler, some minutes)"
)


class LlamaEngine:
    """llama.cpp with a base in `path`.   config: PEFT's config of the adapter.   folder: gets the adapter's file."""

    name, together = "llama_cpp", 1

    def __init__(self, path: Path, config: Any, *, folder: Path, context: int = CONTEXT) -> None:
        self._cpp = optional("llama_cpp", ABSENT)
        self._said, _ = _errors_of(self._cpp)
        try:
            self._llama = self._cpp.Llama(str(path), n_ctx=context, n_threads=torch.get_num_threads(), verbose=False)
        except (ValueError, OSError) as error:
            raise InnerError(
                f"llama.cpp cannot load {path}: {error} ({self._said[0]}). Give the run's start model as .gguf"
            ) from error
        self._sizes = _Sizes(self._llama.metadata, path)
        self._alpha = float(config.lora_alpha)
        self._file = folder / "adapter.gguf"
        self._context = context
        self._adapter: Any = None

    def load(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Write the adapter as a .gguf file, and let llama.cpp use it in place of the previous adapter."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_adapter(self._file, adapter_tensors(parameters), self._sizes, self._alpha)
        adapter = self._cpp.llama_adapter_lora_init(self._llama.model, str(self._file).encode())
        if not adapter:
            raise InnerError(
                f"llama.cpp cannot put the run's adapter on {self._sizes.path} ({self._said[0]}). Is it the run's "
                f"start model? It has {self._sizes.blocks} layers of the kind {self._sizes.architecture}"
            )
        pointers = (self._cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
        self._cpp.llama_set_adapters_lora(self._llama.ctx, pointers, 1, (ctypes.c_float * 1)(1.0))
        if self._adapter:
            self._cpp.llama_adapter_lora_free(self._adapter)
        self._adapter = adapter

    def sample(self, prompt: Sequence[int], n: int, settings: DrawSettings) -> Sampled:
        if len(prompt) >= self._context:
            raise InnerError(f"a prompt has {len(prompt)} tokens, and llama.cpp has room for {self._context}")
        random = torch.Generator().manual_seed(settings.seed)
        self._llama.reset()
        self._llama.eval(prompt)
        first = self._log_probs(settings.temperature)
        found = [self._complete(len(prompt), first, settings, random) for _ in range(n)]
        return [ids for ids, _ in found], [logprobs for _, logprobs in found]

    def _complete(
        self, at: int, logps_V: Tensor, settings: DrawSettings, random: torch.Generator
    ) -> tuple[list[int], list[float]]:
        """Return one completion of the prompt.   at: the prompt's tokens, the first entries of the KV cache."""
        ids, logprobs = list[int](), list[float]()
        self._llama.n_tokens = at
        while True:
            token = int(torch.multinomial(logps_V.exp(), 1, generator=random))
            ids.append(token)
            logprobs.append(float(logps_V[token]))
            if token in settings.ends or len(ids) >= settings.most or at + len(ids) >= self._context:
                return ids, logprobs
            self._llama.eval([token])
            logps_V = self._log_probs(settings.temperature)

    def _log_probs(self, temperature: float) -> Tensor:
        """Return log π of every possible next token: (V,), fp64."""
        logits = np.ctypeslib.as_array(self._cpp.llama_get_logits(self._llama.ctx), shape=(self._llama.n_vocab(),))
        return (torch.from_numpy(logits).double() / temperature).log_softmax(-1)


@cache
def _errors_of(cpp: Any) -> tuple[list[str], Any]:
    """Return a list with llama.cpp's newest error, and the callback that writes it.

    llama.cpp has one callback for all engines of the process, and calls it while it frees any of them, so it stays.
    """
    said = [""]

    def note(level: int, text: bytes, _: Any) -> None:
        if level == ERROR:  # llama.cpp logs 200 other lines for each adapter
            said[0] = text.decode(errors="replace").strip()

    callback = cpp.llama_log_callback(note)
    cpp.llama_log_set(callback, ctypes.c_void_p(0))
    return said, callback


class _Sizes:
    """The sizes of a model, from its .gguf file."""

    def __init__(self, metadata: dict[str, str], path: Path) -> None:
        self.path = path
        self.architecture = kind = metadata["general.architecture"]
        if kind not in ARCHITECTURES:
            raise InnerError(
                f"{path} has a model of the kind {kind}. The engine llama_cpp reads adapters only for the kinds "
                f"{', '.join(ARCHITECTURES)}. Leave --engine out"
            )
        self.blocks = int(metadata[f"{kind}.block_count"])
        heads = int(metadata[f"{kind}.attention.head_count"])
        self.heads = {"attn_q": heads, "attn_k": int(metadata.get(f"{kind}.attention.head_count_kv", heads))}


def write_adapter(path: Path, tensors: dict[str, Tensor], sizes: _Sizes, alpha: float) -> None:
    """Write an adapter as a .gguf file.   tensors: PEFT's name -> tensor.   Raise InnerError for an unknown layer."""
    import gguf

    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == sizes.architecture)
    names = gguf.get_tensor_name_map(arch, sizes.blocks)
    writer = gguf.GGUFWriter(str(path), sizes.architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for name, tensor in tensors.items():
        layer, _, part = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        known = names.get_name(layer)
        if known is None or part not in ("A", "B"):
            raise InnerError(
                f"llama.cpp has no name for {name}. Leave --engine out, or take that layer out of inner.lora.targets"
            )
        rows = tensor.numpy()
        kind = known.rpartition(".")[2]
        if part == "B" and kind in ARCHITECTURES[sizes.architecture]:
            rows = permuted(rows, sizes.heads[kind])
        writer.add_tensor(f"{known}.weight.lora_{part.lower()}", rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of q or k in llama.cpp's order: each head's halves interleaved."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))
