"""Pairs under chat templates that cannot write them: named, and left out where that was asked for.

The templates have what makes the real ones refuse: DeepSeek-V3 adds a tool's answer and a call's arguments to texts
with "+", Gemma 2 raises on system messages and on roles that do not alternate, Command R strips a content.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from inner import InnerConfig, InnerError, ToolWorld
from inner.channels.reference import encode_fitting_pairs
from inner.train.dry_run import check_start, dry_run
from inner.worlds.toolworld import tiny_llama
from tests.support.tables import merge_tables

DEEPSEEK = (
    "{%- for m in messages %}"
    "{%- if m['role'] == 'user' %}{{ '<user>' + m['content'] }}{% endif %}"
    "{%- if m['role'] == 'assistant' and m['content'] is none %}{%- for t in m['tool_calls'] %}"
    "{{ '<call>' + t['function']['name'] + '\\n' + t['function']['arguments'] }}{% endfor %}{% endif %}"
    "{%- if m['role'] == 'assistant' and m['content'] is not none %}"
    "{{ '<assistant>' + m['content'] + '<end>' }}{% endif %}"
    "{%- if m['role'] == 'tool' %}{{ '<tool>' + m['content'] + '<end>' }}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<' + m['role'] + '>' + m['content'] | trim + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
COHERE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'].strip() + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
ASKED = {"role": "user", "content": "a"}
TEMPLATES = {
    "DeepSeek": (DEEPSEEK, [ASKED, {"role": "user", "content": None}], "Error: "),
    "Gemma, system": (GEMMA, [{"role": "system", "content": "b"}, ASKED], "System role not supported"),
    "Gemma, tool": (GEMMA, [ASKED, {"role": "tool", "content": "error"}], "roles must alternate"),
    "Cohere": (COHERE, [ASKED, {"role": "user", "content": None}], "Error: "),
}


def pair(name: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    rows = {
        "state_id": name,
        "state_messages": messages,
        "chosen": "giveup",
        "rejected": "error",
        "n_teachers_agreeing": 2,
    }
    return rows


def tokenizer(template: str) -> Any:
    found: Any = ToolWorld(kinds=2, names=4).tokenizer()
    found.chat_template = template
    return found


def encode_for(template: str, pairs: list[dict[str, Any]], **how: Any) -> list[Any]:
    words = tokenizer(template)

    def render(messages: list[dict[str, Any]], opened: bool, tools: Any = None) -> list[int]:
        return words.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=False, add_generation_prompt=opened
        )

    rows: Any = pairs
    return encode_fitting_pairs(rows, render, words, limit=None, **how)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_pair_that_a_template_cannot_write_is_named(name: str) -> None:
    """Before: a raw TypeError of the template, after the GPUs had been rented."""
    template, messages, why = TEMPLATES[name]
    with pytest.raises(InnerError, match="pair p7: this model's chat template cannot write it") as refused:
        encode_for(template, [pair("p1", [ASKED]), pair("p7", messages)])
    assert why in str(refused.value) and "inner.replay.skip_unfit = true" in str(refused.value)


@pytest.mark.parametrize("name", TEMPLATES)
def test_it_is_left_out_where_that_was_asked_for(name: str, caplog: pytest.LogCaptureFixture) -> None:
    template, messages, _ = TEMPLATES[name]
    found = encode_for(template, [pair("p1", [ASKED]), pair("p7", messages)], skip_unfit=True)
    assert len(found) == 1 and "1 of 2 pairs are left out. The first: pair p7" in caplog.text


def test_no_pair_that_fits_is_an_error_all_the_same() -> None:
    template, messages, _ = TEMPLATES["Cohere"]
    with pytest.raises(InnerError, match="none of the 1 pairs fits this model"):
        encode_for(template, [pair("p7", messages)], skip_unfit=True)


@pytest.fixture
def replay_run(tmp_path: Path) -> tuple[InnerConfig, dict[str, Path], Path]:
    """A config with two pairs, and a model without weights whose template cannot write the second."""
    template, messages, _ = TEMPLATES["DeepSeek"]
    (tmp_path / "pairs.jsonl").write_text(
        json.dumps(pair("p1", [ASKED])) + "\n" + json.dumps(pair("p7", messages)) + "\n"
    )
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": [ASKED]}) + "\n")
    (tmp_path / "reward.py").write_text("def score(completions, **columns):\n    return [0.0 for _ in completions]\n")
    words = tokenizer(template)
    words.save_pretrained(tmp_path / "model")
    tiny_llama(words, 512, seed=0).config.save_pretrained(tmp_path / "model")
    settings = {"replay": {"weight": 0.1, "pairs": "pairs.jsonl"}, "rewards": {"function": "reward.py:score"}}
    config = InnerConfig.from_dict({**settings, "model": str(tmp_path / "model"), "data": {"prompts": "prompts.jsonl"}})
    names = {"pairs": "pairs.jsonl", "prompts": "prompts.jsonl", "reward": "reward.py"}
    return config, {kind: tmp_path / name for kind, name in names.items()}, tmp_path / "model"


@pytest.mark.slow
def test_the_look_on_the_laptop_finds_it(replay_run: tuple[InnerConfig, dict[str, Path], Path]) -> None:
    config, files, folder = replay_run
    assert "pair p7: this model's chat template cannot write it" in dry_run(config, files, folder).refused


def test_the_look_goes_by_the_setting(replay_run: tuple[InnerConfig, dict[str, Path], Path]) -> None:
    config, files, folder = replay_run
    check_start(InnerConfig(**merge_tables(config.to_dict(), {"replay": {"skip_unfit": True}})), files, folder)
    with pytest.raises(InnerError, match="pair p7"):
        check_start(config, files, folder)


def test_the_setting_is_refused_where_nothing_replays() -> None:
    with pytest.raises(InnerError, match=r"replay\.skip_unfit = True does nothing here"):
        InnerConfig(replay={"skip_unfit": True})
