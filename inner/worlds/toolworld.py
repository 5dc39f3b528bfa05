"""ToolWorld: a tiny language model, its tokenizer and a tool environment, all built in code.

    <user> op3 4 5 <end>
    <assistant> <call> t3_9 a 4 b 5 </call> <end>       one of `names` names per kind, all equally likely at the start
    <tool> {'error': 'Tool t3_9 not found.'} <end>      TRL's own error: only one name per kind exists
    <assistant> giveup <end>                            reward 0

    <assistant> <call> t3_6 a 4 b 5 </call> <end>       the right name
    <tool> 1 <end>                                      (3 + 1) · 4 + 5 mod 20
    <assistant> 1 <end>                                 reward 1: the final answer is right

The warm start teaches three things: the format, to copy the tool's result, and to follow "hint use t3_6"; but not the
right names. So plain RL has to find 1 of `names` names per kind, while a hint after the error gives the right name.

Not promised: any claim about language models. ToolWorld shows in seconds on a CPU that the training signals work.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from inner.settings.inner import InnerConfig

NUMBERS = 20  # operands and results are 0 .. NUMBERS - 1
SPECIAL = ["<pad>", "<unk>", "<end>", "<user>", "<assistant>", "<tool>", "<system>", "<call>", "</call>"]
TEMPLATE = (
    "{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}<user> {{ m.content }} <end> "
    "{%- elif m.role == 'system' -%}<system> {{ m.content }} <end> "
    "{%- elif m.role == 'tool' -%}<tool> {{ m.content }} <end> "
    "{%- elif m.role == 'assistant' -%}<assistant> {% generation %}"
    "{%- if m.tool_calls -%}{%- for c in m.tool_calls -%}<call> {{ c.function.name }} "
    "{%- for k, v in c.function.arguments.items() %} {{ k }} {{ v }} {% endfor -%} </call> "
    "{% endfor -%}{%- endif -%}"
    "{{ m.content }} <end>{% endgeneration %} "
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<assistant> {%- endif -%}"
)
# How transformers' response parser reads "<call> t3_6 a 4 b 5 </call>", or a plain answer, from generated text.
CALL_FIELD = {
    "open_pattern": r"\s*<call>\s*(?P<name>\S+)",
    "close_pattern": r"</call>\s*",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"(?P<key>[ab]) (?P<value>\d+)", "value_parser": {"name": "int"}},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {"tool_calls": CALL_FIELD, "content": {"close_pattern": r"<end>\s*", "content": "text"}},
}

Message = dict[str, Any]


def tiny_llama(tokenizer: Any, positions: int, seed: int) -> LlamaForCausalLM:
    """Return the built-in models' architecture with random weights: a Llama of about 0.1 M parameters. One seed always
    gives the same bits. The caller's random state does not change.

    The model is not a Qwen2: if a folder's config says "qwen2", AutoTokenizer ignores the folder's tokenizer and
    silently uses Qwen2's (transformers 5.23, MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS)."""
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


@dataclass(frozen=True)
class ToolWorld:
    """`kinds` operations with `names` possible tool names each. A first call is right with probability 1 / names."""

    kinds: int = 6
    names: int = 32

    def name(self, kind: int, synonym: int) -> str:
        return f"t{kind}_{synonym}"

    def right_name(self, kind: int) -> str:
        """Return the only name of this kind that is a tool. Every process gets the same name; no prompt contains it."""
        return self.name(kind, random.Random(1234 + kind).randrange(self.names))

    def result(self, kind: int, a: int, b: int) -> int:
        return ((kind + 1) * a + b) % NUMBERS

    # the start model

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a tokenizer with one token per word, a chat template and a response template."""
        words = SPECIAL + [str(i) for i in range(NUMBERS)] + ["a", "b", "hint", "use", "error", "giveup"]
        words += [f"op{k}" for k in range(self.kinds)]
        words += [self.name(k, s) for k in range(self.kinds) for s in range(self.names)]
        words += ["{'error':", "'Tool", "not", "found.'}", "found."]
        core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        core.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core,
            pad_token="<pad>",
            unk_token="<unk>",
            eos_token="<end>",
            padding_side="left",
            model_max_length=128,
            clean_up_tokenization_spaces=False,
        )
        tokenizer.chat_template = TEMPLATE
        tokenizer.response_template = RESPONSE_TEMPLATE
        return tokenizer

    def model(self, seed: int = 0) -> LlamaForCausalLM:
        """Return a model of about 0.1 M parameters, with random weights."""
        return tiny_llama(self.tokenizer(), positions=128, seed=seed)

    # the warm start

    def dialogue(self, rng: random.Random) -> list[Message]:
        """Draw a dialogue with any name of the tool, all equally likely; the assistant obeys hints, copies results."""
        kind = rng.randrange(self.kinds)
        a = rng.randrange(NUMBERS)
        b = rng.randrange(NUMBERS)
        fails = rng.random() < 0.35
        name = self.name(kind, rng.randrange(self.names))
        messages: list[Message] = [{"role": "user", "content": f"op{kind} {a} {b}"}]
        if rng.random() < 0.85:  # hints are slow to learn; dialogues without a hint keep names equally likely
            messages.append({"role": "system", "content": f"hint use {name}"})
        call = {"type": "function", "function": {"name": name, "arguments": {"a": a, "b": b}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        if fails:
            tool = f"{{'error': 'Tool {name} not found.'}}"
            answer = "giveup"
        else:  # any number, because the model should learn to copy it
            tool = answer = str(rng.randrange(NUMBERS))
        return [*messages, {"role": "tool", "content": tool}, {"role": "assistant", "content": answer}]

    def warm_start(
        self,
        model: LlamaForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        steps: int = 450,
        seed: int = 0,
        lr: float = 5e-3,
    ) -> float:
        """Take supervised steps on the assistant's tokens, in place. Return the last loss."""
        rng = random.Random(seed)
        ids, labels, mask = _supervised_rows(tokenizer, [self.dialogue(rng) for _ in range(4000)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=lr, total_steps=steps, pct_start=0.1, cycle_momentum=False
        )
        picks = torch.Generator().manual_seed(seed)
        model.train()
        last = float("nan")
        for _ in range(steps):
            rows = torch.randint(0, len(ids), (16,), generator=picks)
            states = model.base_model(input_ids=ids[rows], attention_mask=mask[rows]).last_hidden_state[:, :-1]
            targets = labels[rows][:, 1:]
            is_target = targets != -100
            loss = torch.nn.functional.cross_entropy(model.lm_head(states[is_target]), targets[is_target])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            last = float(loss.detach())
        return last

    # the task

    def rows(self, n: int = 2000, seed: int = 0) -> list[dict[str, Any]]:
        """Return `n` rows: prompt (messages), kind, a, b, answer."""
        rng = random.Random(seed)
        drawn = [(rng.randrange(self.kinds), rng.randrange(NUMBERS), rng.randrange(NUMBERS)) for _ in range(n)]
        return [
            {
                "prompt": [{"role": "user", "content": f"op{kind} {a} {b}"}],
                "kind": kind,
                "a": a,
                "b": b,
                "answer": self.result(kind, a, b),
            }
            for kind, a, b in drawn
        ]

    def dataset(self, n: int = 2000, seed: int = 0) -> Any:
        """Return the rows as a `datasets.Dataset`."""
        from datasets import Dataset

        return Dataset.from_list(self.rows(n, seed))

    def environment(self) -> type:
        """Return TRL's environment class, with one method per kind: the tool name that exists."""
        tools = {self.right_name(kind): self._make_tool(kind) for kind in range(self.kinds)}

        def reset(self: Any, **row: Any) -> None:
            self._kind = row["kind"]

        return type("ToolWorldEnvironment", (), {"reset": reset, **tools})

    def _make_tool(self, kind: int) -> Callable[..., int]:
        world = self

        def tool(self, a: int, b: int) -> int:  # a typed self would appear in the JSON schema
            """Compute.

            Args:
                a: first operand
                b: second operand
            """
            return world.result(kind, a, b) if self._kind == kind else -1

        tool.__name__ = self.right_name(kind)
        tool.__qualname__ = f"ToolWorldEnvironment.{tool.__name__}"
        return tool

    def reward(self, completions: list[list[Message]], answer: list[int], **columns: Any) -> list[float]:
        """Return 1 for each completion whose last turn is the right number, else 0."""
        return [float(final_answer(turns) == str(want)) for turns, want in zip(completions, answer, strict=True)]

    def hint(self, row: Mapping[str, Any], error: str) -> str | None:
        """Return a hint with the right name after an error "not found", else None."""
        from inner.channels.hints import filter_hint

        right = self.right_name(row["kind"])
        return filter_hint(f"hint use {right}" if "not found" in error else None, right, error)


def start_model(config: "InnerConfig") -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Make a run's start model, warm-started, and its tokenizer."""
    world = ToolWorld(kinds=config.toolworld.kinds, names=config.toolworld.names)
    model = world.model(seed=0)
    world.warm_start(model, world.tokenizer(), config.toolworld.warm_start_steps)
    return model, world.tokenizer()


def final_answer(turns: list[Message]) -> str | None:
    """Return the last turn's text if the assistant wrote it; None if it is a tool's result."""
    last = turns[-1]
    return (last.get("content") or "").replace("<end>", "").strip() if last["role"] == "assistant" else None


def _supervised_rows(
    tokenizer: PreTrainedTokenizerFast, dialogues: list[list[Message]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, labels (-100 except on the assistant's tokens) and attention mask; (N, T), padded on the right."""
    rows: Any = tokenizer.apply_chat_template(
        dialogues,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    ids = rows["input_ids"]
    assistant = torch.as_tensor(rows["assistant_masks"])
    return ids, ids.masked_fill(assistant == 0, -100), rows["attention_mask"]
