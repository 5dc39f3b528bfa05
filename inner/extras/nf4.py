"""Loads a frozen base model in 4 bits by bitsandbytes: NF4 with doubly quantised scales, as in QLoRA (2305.14314).

    y = W x + α/r · B A x        W: 16 levels, a scale for 64 weights, .516 byte each      A, B: fp32, as on any base
    embeddings, norms, head      in inner.dtype

Each replica quantises the same files when it loads them. The run's record has the digest of the 4-bit weights and their
scales: we refuse a replica whose bits differ, or have changed in its session (diloco/model/start_model.py).

Not promised: that two devices quantise to the same bits; 4-bit weights under vLLM or DDP.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from inner.optional import optional

NEEDED = (
    "inner.lora.base = \"nf4\" needs bitsandbytes: pip install 'serverless-diloco[nf4]'. Or leave base out, for a base "
    "in inner.dtype"
)


def load_nf4(source: str | Path, dtype: torch.dtype, **options: Any) -> Any:
    """Load a model as `from_pretrained` does, with all linear layers except the head in NF4.   Raises InnerError."""
    layer = optional("bitsandbytes.nn", NEEDED).Linear4bit
    from transformers import BitsAndBytesConfig

    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    loaded = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, quantization_config=how, **options)
    model: Any = loaded[0] if isinstance(loaded, tuple) else loaded
    model.is_loaded_in_4bit = False  # TRL would round the adapter to bfloat16, and the outer step averages fp32
    for module in model.modules():
        if isinstance(module, layer):  # generation would pack the weights anew, and change their digest
            module.support_avx512bf16_for_cpu = False
    return loaded
