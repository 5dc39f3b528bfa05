"""Builds a tiny language model in code; its tokens are bytes.

    tokenizer   257 tokens: id = byte, and <end> = 256
    model       2 layers of width 64, about 0.1 M parameters

Not promised: good text.
"""

from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from inner.worlds.toolworld import tiny_llama

if TYPE_CHECKING:
    from inner.settings.inner import InnerConfig

END = "<end>"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    core = Tokenizer(models.BPE(vocab={**vocabulary, END: 256}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def tiny_model(context_length: int, seed: int = 0) -> LlamaForCausalLM:
    return tiny_llama(tiny_tokenizer(), positions=max(128, context_length), seed=seed)


def start_model(config: "InnerConfig") -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Make a run's start model and its tokenizer."""
    return tiny_model(config.data.context_length), tiny_tokenizer()


def _byte_symbols() -> list[str]:
    """Return GPT-2's symbol for each byte: itself if it is printable, else the next free character from 256 on."""
    prints = {*range(33, 127), *range(161, 173), *range(174, 256)}
    free = iter(range(256, 512))
    return [chr(byte) if byte in prints else chr(next(free)) for byte in range(256)]
