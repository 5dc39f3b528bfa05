"""Tokenizers for any chat template: one token per byte, and one for each mark that the template writes."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
MARKS = re.compile(r"<[|｜/]?[^<>\s'\"{}%()]{2,60}?[|｜]?>|\[/?[A-Z_]{3,30}\]")


@lru_cache(maxsize=2)
def tokenizer_of(template: str, eos: str = "<eos>") -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    marks = [AddedToken(mark, special="think" not in mark) for mark in sorted(set(MARKS.findall(template)))]
    core.add_tokens(marks)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer
