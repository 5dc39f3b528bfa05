"""The task of channels.py: a help desk whose tool accepts one secret word for each kind of request.

    <user> Cancel order 47.
    <assistant> call desk action=scrap order=47         one of 24 words, all equally likely at first
    <tool> {'error': "Unknown action 'scrap'."}         <assistant> giveup             reward 0
    <assistant> call desk action=trace order=47         the right word
    <tool> ticket 83                                    <assistant> ticket 83          reward 1

The start model is SmolLM2-135M-Instruct with a chat template that has tools, and supervised steps that teach three
things: how a call is written, to repeat the ticket, and to follow "Use the action trace." They teach no right word.

Not promised: requests whose words show the right action.
"""

import random
from pathlib import Path
from typing import Any

import torch

from inner import ToolWorld
from inner.channels.hints import filter_hint

KINDS = ("cancel", "refund", "find", "send")
WORDS = (
    "void", "scrap", "drop", "repeal", "abort", "repay", "credit", "restore", "reverse", "return", "trace", "track",
    "spot", "locate", "seek", "search", "ship", "mail", "post", "dispatch", "deliver", "forward", "close", "settle",
)  # fmt: skip
RIGHT = dict(zip(KINDS, random.Random("desk").sample(WORDS, len(KINDS)), strict=True))
TRAINED = ("{Kind} order {n}.", "Please {kind} order {n}.", "Order {n}: {kind} it.")
HELD_OUT = (
    "Can you {kind} order {n}?",
    "We must {kind} order {n} today.",
)  # in no trained prompt or warm start
TOOLS = "Tools: desk(action, order)"
TEMPLATE = (
    "{%- if tools -%}<|im_start|>system\nTools:{%- for t in tools %} {{ t.function.name }}"
    "({{ t.function.parameters.properties | join(', ') }}){%- endfor -%}<|im_end|>\n{% endif -%}"
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' -%}{%- generation -%}"
    "{%- for c in m.tool_calls or [] -%}call {{ c.function.name }}"
    "{%- for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{%- endfor -%}{%- endfor -%}"
    "{{ m.content or '' }}<|im_end|>{%- endgeneration -%}{%- else -%}{{ m.content }}<|im_end|>{%- endif %}\n"
    "{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)
CALL = {
    "open_pattern": r"\s*call (?P<name>\w+)", "close_pattern": r"(?=<\|im_end\|>)", "content": "xml-inline",
    "content_args": {"tag_pattern": r" (?P<key>action|order)=(?P<value>\w+)"},
    "transform": [{"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}],
}  # fmt: skip
RESPONSE = {
    "defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n",
    "fields": {"tool_calls": CALL, "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}  # fmt: skip


def ticket(order: int) -> str:
    return f"ticket {(order * 37 + 11) % 90 + 10}"


def rows(count: int, seed: int, phrases: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return equally many rows of each kind: prompt, kind, order."""
    rng = random.Random(seed)
    drawn = [(KINDS[n % len(KINDS)], rng.randrange(10, 100), rng.choice(phrases)) for n in range(count)]
    return [
        {"prompt": [{"role": "user", "content": asked(phrase, kind, order)}], "kind": kind, "order": order}
        for kind, order, phrase in drawn
    ]


def asked(phrase: str, kind: str, order: int) -> str:
    return phrase.format(kind=kind, Kind=kind.capitalize(), n=order)


def hint(row: Any, error: str) -> str | None:
    """Return the sentence that names the right action, after an action that the desk does not know."""
    right = RIGHT[row["kind"]]
    return filter_hint(f"Use the action {right}." if "Unknown action" in error else None, right, error)


class Desk:
    """TRL's environment: one tool, and a reward of 1 once the right word and order were given."""

    def reset(self, kind: str, order: int, **_: Any) -> None:
        self._kind, self._order, self._done = kind, order, False

    def desk(self, action: str, order: str) -> str:
        """Do something with an order.

        Args:
            action: what to do
            order: number of the order
        """
        if action != RIGHT[self._kind]:
            raise ValueError(f"Unknown action '{action}'.")
        if order != str(self._order):
            raise ValueError(f"No order {order}.")
        self._done = True
        return ticket(self._order)

    def get_reward(self) -> float:
        return float(self._done)


class Dialogues(ToolWorld):
    """The warm start: all words are equally likely, and hints are followed."""

    def dialogue(self, rng: random.Random) -> list[dict[str, Any]]:
        kind, order = rng.choice(KINDS), rng.randrange(10, 100)
        word, fails = rng.choice(WORDS), rng.random() < 0.6
        told = f"""{{'error': "Unknown action '{word}'."}}""" if fails else f"ticket {rng.randrange(10, 100)}"
        hinted = [{"role": "system", "content": f"Use the action {word}."}] if rng.random() < 0.5 else []
        call = {"type": "function", "function": {"name": "desk", "arguments": {"action": word, "order": str(order)}}}
        return [
            {"role": "system", "content": TOOLS},
            {"role": "user", "content": asked(rng.choice(TRAINED), kind, order)}, *hinted,
            {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": told},
            {"role": "assistant", "content": "giveup" if fails else told},
        ]  # fmt: skip


def write_start(gguf: Path, to: Path, steps: int) -> None:
    """Make the start model: SmolLM2 with the desk's template, after supervised steps (ten minutes of two cores)."""
    from inner.models.gguf import load_gguf

    model, tokenizer = load_gguf(str(gguf), "float32")
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE  # type: ignore[attr-defined]
    torch.manual_seed(0)
    loss = Dialogues().warm_start(model, tokenizer, steps, lr=2e-4)  # type: ignore[arg-type]
    print(f"warm start: {loss:.3f} nats", flush=True)
    model.eval().save_pretrained(to)
    tokenizer.save_pretrained(to)
