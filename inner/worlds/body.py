"""The architecture of the built-in models: a Llama of about 0.1 M parameters. One seed always gives the same bits.

It is not a Qwen2: if a folder's config says "qwen2", AutoTokenizer ignores the folder's tokenizer and silently uses
Qwen2's (transformers 5.23, MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS).
"""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(tokenizer: Any, positions: int, seed: int) -> LlamaForCausalLM:
    """Return the model with random weights. The caller's random state does not change."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        attention_bias=True,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.05,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
