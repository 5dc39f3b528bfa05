"""The work that TRL's tool loop does twice is done once, and nothing else changes."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import response_templates

from inner.settings.inner import InnerConfig, Seeds
from inner.train.build import build_inner
from inner.worlds.toolworld import ToolWorld
from tests.benchmarks.bench_tools import as_shipped, run
from tests.inner.test_toolworld import SMALL, small_folder
from tests.support.tables import merge_tables

torch.set_num_threads(1)


def loop_of(**settings: Any) -> Any:
    config = InnerConfig(**merge_tables(SMALL, {"batch_size": 16}, settings))
    return build_inner(config, small_folder(), {}, Seeds(data=0, noise=0))


def train_one_step(loop: Any) -> None:
    loop.train(lambda: True)


def test_whole_runs_are_those_of_trl_bit_for_bit() -> None:
    with as_shipped():
        _, rewards, there = run(small_folder(), 16, 3, **SMALL)
    _, same, here = run(small_folder(), 16, 3, **SMALL)
    assert rewards == same and len(set(rewards)) > 1
    assert torch.equal(there, here)


def test_what_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"prompts": 0, "templates": 0}
    render, compile_ = PreTrainedTokenizerBase.apply_chat_template, response_templates._build_field

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts["prompts"] += "tools" in kwargs and kwargs.get("add_generation_prompt", False)
        return render(self, *args, **kwargs)

    def compiled(*args: Any) -> Any:
        counts["templates"] += 1
        return compile_(*args)

    loop = loop_of()
    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", counted)
    monkeypatch.setattr(response_templates, "_build_field", compiled)
    train_one_step(loop)
    assert counts == {"prompts": 2, "templates": 2}  # two groups of eight; two fields of one template
    assert isinstance(loop.trainer._tokenizer.response_template, dict)  # as it was, so that it can be saved


def test_environments_with_their_own_schemas_are_kept_apart() -> None:
    """Equal prompts for two environments are two prompts."""
    trainer = loop_of().trainer
    tools = trainer._env_tools[None]
    trainer._env_tools = {"one": tools[:1], "both": tools}
    asked = [{"role": "user", "content": "op0 1 2"}]
    seen: list[list[str]] = []
    trainer.processing_class.chat_template = (
        "{% for t in tools %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    trainer.chat_template = trainer.processing_class.chat_template
    trainer._batch_environments = ["one", "both", "one", "both"]
    ids, images, fields = trainer._tokenize_prompts([asked] * 4)
    seen = [trainer.processing_class.convert_ids_to_tokens(row) for row in ids]
    assert seen[0] == seen[2] != seen[1] == seen[3] and len(seen[1]) == len(seen[0]) + 1
    assert images is None and not fields
    assert trainer._batch_environments == ["one", "both", "one", "both"]
    ids[0].append(0)
    assert ids[2] != ids[0]  # rows are lists of their own


def test_a_window_on_every_generation() -> None:
    loop = loop_of()
    seen: list[Any] = []
    loop.trainer.on_rollouts = lambda *generation: seen.append(generation)
    train_one_step(loop)
    ((prompts, completions, rewards, environments),) = seen
    assert len(prompts) == len(completions) == len(rewards) == 16 and environments is None
    world = ToolWorld(kinds=2, names=4)
    assert sum(rewards) / 16 == pytest.approx(loop.pop_metrics()["reward"])
    assert all(turns[0]["role"] == "assistant" for turns in completions)
    assert {t["function"]["name"] for t in loop.trainer.tool_schemas()[""]} == {world.right_name(k) for k in range(2)}
