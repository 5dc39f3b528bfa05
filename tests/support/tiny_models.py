"""Twenty architectures, tiny and random, with the chat templates of real models and a tokenizer of one token per byte.

    folder = tiny_model_folder("gemma2")       config, weights, tokenizer, template: what a user names as inner.model

The templates are those that TRL carries (trl/chat_templates), and three that are written here.

Not promised: a tokenizer or weights of the real model.
"""

import atexit
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

PLAIN = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + eos_token }}"
    "{% elif m['role'] == 'system' %}{{ '<|system|>\n' + m['content'] + eos_token }}"
    "{% elif m['role'] == 'assistant' %}{{ '<|assistant|>\n' + m['content'] + eos_token }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
WRITTEN = {"plain": PLAIN, "zephyr": ZEPHYR, "mistral": MISTRAL}
BODY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
GROUPED = {**BODY, "num_key_value_heads": 2, "max_position_embeddings": 4096}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 32}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16}
OLDER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class Tiny:
    """template: "" for a tokenizer without one.   rows: of the embeddings, 0 for as many as there are tokens."""

    template: str
    settings: dict[str, Any] = field(default_factory=dict)
    end: str = "<|im_end|>"
    rows: int = 0
    ends: bool = True


ARCHITECTURES = {
    "llama": Tiny("llama3", GROUPED, "<|eot_id|>"),
    "llama:3.2": Tiny("llama3_2", GROUPED, "<|eot_id|>"),
    "llama:deepseek": Tiny("deepseek_r1_distill", GROUPED),
    "llama:pad": Tiny("llama3", GROUPED, "<|eot_id|>", rows=258),  # the pad token's id is 258
    "llama:cut": Tiny("llama3", GROUPED, "<|eot_id|>", rows=50),
    "llama:endless": Tiny("plain", GROUPED, ends=False),
    "qwen3": Tiny("qwen3", GROUPED),
    "qwen3:nothink": Tiny("qwen3_instruct_2507", GROUPED),
    "qwen3_moe": Tiny("qwen3", {**GROUPED, **EXPERTS}),
    "mixtral": Tiny("mistral", {**GROUPED, **EXPERTS}),
    "mistral": Tiny("mistral", GROUPED),
    "gemma": Tiny("gemma", GROUPED, "<end_of_turn>"),
    "gemma2": Tiny("gemma", GROUPED, "<end_of_turn>"),
    "gemma3_text": Tiny("gemma3", GROUPED, "<end_of_turn>"),
    "phi3": Tiny("phi3", GROUPED, "<|end|>"),
    "cohere": Tiny("cohere", GROUPED, "<|END_OF_TURN_TOKEN|>"),
    "cohere2": Tiny("cohere2", GROUPED, "<|END_OF_TURN_TOKEN|>"),
    "olmo2": Tiny("zephyr", GROUPED),
    "granite": Tiny("plain", GROUPED),
    "smollm3": Tiny("qwen2_5", GROUPED),
    "glm4": Tiny("glm4moe", GROUPED),
    "gpt2": Tiny("plain", {**GPT, "n_positions": 256}),
    "gpt2:base": Tiny("", {**GPT, "n_positions": 256}),
    "opt": Tiny("plain", {**OLDER, "ffn_dim": 32, "word_embed_proj_dim": 32, "max_position_embeddings": 256}),
    "gpt_neox": Tiny("plain", {**BODY, "max_position_embeddings": 256}),
    "bloom": Tiny("plain", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
}


def byte_tokenizer(tiny: Tiny) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in (tiny.end, "<s>", "<pad>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token=tiny.end, pad_token="<pad>", padding_side="left",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    if tiny.template:
        kept = Path(trl.__file__).parent / "chat_templates" / f"{tiny.template}.jinja"
        tokenizer.chat_template = WRITTEN.get(tiny.template) or kept.read_text()
    return tokenizer


@cache
def tiny_model_folder(name: str) -> Path:
    """One per test process."""
    made = tempfile.TemporaryDirectory(prefix=f"tiny-{name.replace(':', '-')}-")
    atexit.register(made.cleanup)
    tiny = ARCHITECTURES[name]
    tokenizer = byte_tokenizer(tiny)
    if not tiny.ends:
        tokenizer.eos_token = tokenizer.pad_token = None
    rows = tiny.rows or len(tokenizer)
    ids: dict[str, Any] = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(
        name.partition(":")[0], vocab_size=rows, **{k: i if i is None or i < rows else None for k, i in ids.items()},
        pad_token_id=None, **tiny.settings,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(made.name)
    tokenizer.save_pretrained(made.name)
    return Path(made.name)
