"""A tiny Llama in a .gguf file, for tests: 256 bytes and two merges, one layer of width 32, Q8_0 or F32.

Two, since transformers 5.17 cannot read a list of one.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from inner.worlds.tiny import _byte_symbols

WIDTH, MLP, HEADS = 32, 64, 2
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def write_gguf(path: Path, architecture: str = "llama", kind: Kind = Kind.Q8_0) -> dict[str, np.ndarray]:
    """-> the weights before they were quantised, by their names in the file."""
    symbols = _byte_symbols()
    merged = [(symbols[ord("a")], symbols[ord("b")]), (symbols[ord("c")], symbols[ord("d")])]
    tokens = [*symbols, *(first + second for first, second in merged), "<end>"]
    writer: Any = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges([" ".join(pair) for pair in merged])
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(TEMPLATE)
    weights = _weights(len(tokens))
    for name, values in weights.items():
        if values.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _weights(tokens: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    square = ["attn_q", "attn_k", "attn_v", "attn_output"]
    shapes = {"token_embd": (tokens, WIDTH), **{f"blk.0.{name}": (WIDTH, WIDTH) for name in square}}
    shapes |= {"blk.0.ffn_gate": (MLP, WIDTH), "blk.0.ffn_up": (MLP, WIDTH), "blk.0.ffn_down": (WIDTH, MLP)}
    found = {f"{name}.weight": draw.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    norms = ["blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"]
    return found | {f"{name}.weight": np.ones(WIDTH, np.float32) for name in norms}


def requantise(source: Path, to: Path, kind: Kind) -> None:
    """Write a .gguf file again with its matrices in another precision, from their dequantised values."""
    reader: Any = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer: Any = gguf.GGUFWriter(str(to), architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            element = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        exact = values.ndim == 1 or kind == Kind.F32
        body = values if exact else gguf.quants.quantize(values, kind)
        writer.add_tensor(tensor.name, body, raw_dtype=Kind.F32 if exact else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
