"""Rollouts that a script writes, in the chat templates of real models: TRL's trainer, tool loop and parser are real.

    folder = scripted_folder(path, "qwen3")    a tokenizer with one token per byte and the template's end of a turn,
                                               and a tiny random model
    with scripted(): …                         every trainer of this process "generates" what the script says

    the k-th question    k % 4 = 0   a call that fails, then more text than fits        truncated, has a lesson
                                 1   a call that fails, then an answer                  has a lesson
                                 2   a call that works, then an answer
                                 3   more text than fits                                truncated

Not promised: text that a model would write.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import add_response_schema
from trl.trainer.grpo_trainer import GRPOTrainer

from inner.channels.turn_ids import context_and_actions
from inner.replay.actions import action_text
from inner.worlds.toolworld import tiny_llama

ENDS = {  # the last two: with another text, so TRL does not know them; Granite's have marks of their own
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "qwen3 of another text": "<|im_end|>",
    "qwen2_5 with other marks": "<|end|>",
}
LENGTH = 240  # tokens of a completion at most
POSITIONS = 2048

ENVIRONMENT = '''
class World:
    def reset(self, **row): pass
    def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: first
            b: second
        """
        return a + b
'''
REWARD = "def reward(completions, k, **columns):\n    return [float(i % 3) for i in range(len(completions))]\n"


def real_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token per byte, and the end of a turn as one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in (ENDS[template], "<pad>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=ENDS[template], pad_token="<pad>", padding_side="left",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    name, changed, _ = template.partition(" ")
    text = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    if not changed:
        tokenizer.chat_template = text
        return add_response_schema(tokenizer)
    tokenizer.chat_template = text.replace("<|im_end|>", ENDS[template]) + "{# ours #}"
    return tokenizer


def scripted_folder(folder: Path, template: str) -> Path:
    tokenizer = real_tokenizer(template)
    tiny_llama(tokenizer, POSITIONS, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scripted_task(folder: Path, template: str) -> dict[str, Any]:
    """The files of a run's task in `folder`, and its settings of [inner]."""
    (folder / "world.py").write_text(ENVIRONMENT)
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions(32)))
    return {
        "loop": "grpo",
        "data": {"text": None, "prompts": "prompts.jsonl"},
        "model": str(scripted_folder(folder / "model", template)),
        "rewards": {"function": "reward.py:reward"},
        "sampling": {"environment": "world.py:World", "num_generations": 2, "max_completion_length": LENGTH},
        "batch_size": 8,
    }


def questions(n: int) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"question {k}"}], "k": k} for k in range(n)]


@contextmanager
def scripted() -> Iterator[None]:
    def says(
        self: Any, prompt_ids: list[list[int]], images: Any, fields: Any, num_generations: int, **kwargs: Any
    ) -> tuple[list[list[int]], None]:
        after_a_call = num_generations == 1  # TRL's tool loop asks for one continuation of each rollout
        return [_next_turn(self._tokenizer, ids, after_a_call)[:LENGTH] for ids in prompt_ids], None

    with patch.object(GRPOTrainer, "_generate_single_turn", says):
        yield


def _next_turn(tokenizer: Any, prompt_ids: list[int], after_a_call: bool) -> list[int]:
    case = int(re.findall(r"question (\d+)", tokenizer.decode(prompt_ids))[0]) % 4
    if after_a_call:
        return _text(tokenizer, "x" * 400 if case == 0 else "done")
    if case == 3:
        return _text(tokenizer, "y" * 400)
    return call_ids(tokenizer, "sum" if case < 2 else "add")


def _text(tokenizer: Any, text: str) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def call_ids(tokenizer: Any, name: str) -> list[int]:
    """A call as the chat template writes it, up to the end of the turn."""

    def render(messages: list[Any], opened: bool, tools: Any = None) -> list[int]:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=opened)

    call = {"function": {"name": name, "arguments": {"a": 1, "b": 2}}}
    _, (ids,) = context_and_actions(
        {"state_messages": questions(1)[0]["prompt"]}, [action_text({"tool_calls": [call]})], render, tokenizer
    )
    return ids[: ids.index(tokenizer.eos_token_id) + 1]
