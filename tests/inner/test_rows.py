"""Rows reach rewards, environments, prompts and [eval] as the file has them, with any JSON values.

    file ──▶ reward(columns) · environment.reset(row) · the prompt's ids       in training, in [eval], in pre-flight

The prompt's ids are compared with those of transformers' own chat template.
"""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from inner import InnerConfig, InnerError, Seeds
from inner.data.prompts import load_prompts
from inner.data.rendering import prompt_ids
from inner.settings.task import DataSettings
from inner.train.build import build_inner
from inner.train.grpo import Rows
from inner.usercode.check import check_inner
from inner.usercode.userfiles import load_module
from tests.support.examples import examples
from tests.support.scripted import real_tokenizer, scripted_folder
from tests.support.tables import merge_tables

torch.set_num_threads(1)

CODE = '''
SEEN, RESET = [], []
class World:
    def reset(self, **row):
        self.row = row
        RESET.append(row)
    def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: first
            b: second
        """
        return a + b
def score(completions, prompts, environments=None, **columns):
    rest = {k: v for k, v in columns.items() if k not in ("completion_ids", "trainer_state", "log_extra", "log_metric")}
    for i, prompt in enumerate(prompts):
        SEEN.append({"prompt": prompt, **{k: v[i] for k, v in rest.items()}})
        if environments is not None:
            assert environments[i].row == SEEN[-1]
    for value in [v for of in rest.values() for v in of] + prompts:
        if isinstance(value, list):
            value.append("spoiled")  # a reward that writes into its arguments spoils no other row
    return [float(i % 2) for i in range(len(prompts))]
'''
ODD = st.sampled_from(["\ud800", "\x00", "\u2028", "é\u0301", "{{ m }}", "<|im_end|>", "x" * 5000, "٣", ""])
TEXTS = ODD | st.text(max_size=20)
NUMBERS = st.integers() | st.sampled_from([2**70, -(2**70), 7, 7.0, 3.5, 1e308, -0.0]) | st.floats(allow_nan=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXTS, below, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["answer", "completion", "tools", "images ", "environment", "my column", "kwargs", "", "_x", "é"]
)
SAID = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12).filter(str.strip)
PARTS = st.lists(SAID.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=3)
CALLS = st.dictionaries(st.sampled_from(["city", "a", "b"]), st.integers(0, 9) | SAID, max_size=2)


PART_ROME = [{"type": "text", "text": "Ro"}, {"type": "text", "text": "me"}]


def asked(content: Any, **arguments: Any) -> list[dict[str, Any]]:
    """A dialogue with a call; two of them with different arguments have none in common."""
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    tool = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "name": "add", "content": "1"}]
    return [{"role": "user", "content": content}, *tool, {"role": "user", "content": "And now?"}]


@st.composite
def prompts(draw: Any) -> list[dict[str, Any]]:
    messages = asked(draw(SAID | PARTS), **draw(CALLS))
    return messages if draw(st.booleans()) else messages[:1]


@st.composite
def files(draw: Any) -> list[dict[str, Any]]:
    names = draw(st.lists(NAMES, unique=True, max_size=3))
    chats = prompts() if draw(st.booleans()) else SAID
    row = st.fixed_dictionaries({"prompt": chats, **dict.fromkeys(names, VALUES)})
    return draw(st.lists(row, min_size=2, max_size=4))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scripted_folder(tmp_path_factory.mktemp("rows"), "qwen3")


def config_of(model: Path, **more: Any) -> InnerConfig:
    settings_: dict[str, Any] = {
        "model": str(model),
        "data": {"prompts": "rows.jsonl"},
        "rewards": {"function": "code.py:score"},
        "sampling": {"num_generations": 2, "max_completion_length": 1},
        "batch_size": 16,
    }
    return InnerConfig.from_dict(merge_tables(settings_, more))


def joined(prompt: Any) -> Any:
    """By hand, for transformers."""
    if isinstance(prompt, str):
        return prompt
    return [
        {**m, "content": "".join(p["text"] for p in m["content"])} if isinstance(m.get("content"), list) else m
        for m in prompt
    ]


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all through: 7 is not 7.0, and -0.0 not 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other and (not isinstance(one, float) or math.copysign(1, one) == math.copysign(1, other))


def without_spoil(seen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a reward wrote into its own arguments goes; what an environment was reset with has none of that."""
    spoiled = lambda v: isinstance(v, list) and v[-1:] == ["spoiled"]  # noqa: E731
    return [{k: v[:-1] if spoiled(v) else v for k, v in row.items()} for row in seen]


def check_seen(seen: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    for found in seen:
        assert any(same(dict(sorted(found.items())), dict(sorted(row.items()))) for row in rows), found


FEW = {"suppress_health_check": list(HealthCheck), "deadline": None, "derandomize": True}
UNSHRUNK = (Phase.explicit, Phase.generate)  # an example takes half a second


@settings(max_examples=examples(4), phases=UNSHRUNK, **FEW)
@given(rows=files())
@example(rows=[{"prompt": "a", "answer": 7, "completion": "y"}, {"prompt": "b", "answer": 3.5, "completion": [2**70]}])
@example(rows=[{"prompt": asked("Rome", city="Rome"), "x": 7}, {"prompt": asked(PART_ROME, a=1), "x": "Paris"}])
def test_all_see_what_the_file_has(model: Path, tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    see_rows(model, tmp_path_factory.mktemp("task"), rows)


@pytest.mark.slow
@settings(max_examples=60, phases=UNSHRUNK, **FEW)
@given(rows=files())
def test_all_see_what_the_file_has_many(model: Path, tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    see_rows(model, tmp_path_factory.mktemp("task"), rows)


def see_rows(model: Path, task: Path, rows: list[Any]) -> None:
    chats = not isinstance(rows[0]["prompt"], str)
    (task / "code.py").write_text(CODE)
    (task / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given_ = {"prompts": task / "rows.jsonl", "reward": task / "code.py"}
    world = {"sampling": {"environment": "code.py:World"}} if chats else {}
    given_ |= {"environment": task / "code.py"} if chats else {}
    config = config_of(model, **world)
    modules = [load_module("reward", "code.py:score", given_)]
    modules += [load_module("environment", "code.py:World", given_)] if chats else []

    check_inner(config, given_)
    seen = take(modules)
    assert len(seen) == (0 if chats else 2)  # an environment's state cannot be faked
    check_seen(seen, rows)

    loop: Any = build_inner(config, model, given_, Seeds(data=0, noise=0))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tools = loop.trainer.tool_schemas().get("") if chats else None
    rendered = [ids_of(tokenizer, row["prompt"], tools, loop.trainer.chat_template) for row in rows]
    generated = spy(loop.trainer)
    loop.train(lambda: True)
    check_seen(seen := take(modules), rows)
    assert len(seen) == (32 if chats else 16) and all(ids in rendered for ids in generated)
    assert {json.dumps(ids) for ids in generated} == {json.dumps(ids) for ids in rendered}

    generated.clear()
    mine = load_prompts("rows.jsonl", given_, config.data)
    kept = copy.deepcopy(mine)
    for _ in range(2):
        loop.score(mine, greedy=True, seed=0)
        assert generated == rendered
        check_seen(take(modules), rows)
        generated.clear()
    assert mine == kept


def take(modules: list[Any]) -> list[dict[str, Any]]:
    """The rows that the reward saw, and those that environments were reset with."""
    found = without_spoil(modules[0].SEEN) + without_spoil([r for m in modules[1:] for r in m.RESET])
    for module in modules:
        module.SEEN.clear()
        module.RESET.clear()
    return found


def ids_of(tokenizer: Any, prompt: Any, tools: Any, template: str | None) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(
        joined(prompt), tools=tools, chat_template=template, add_generation_prompt=True, return_dict=False
    )


def spy(trainer: Any) -> list[list[int]]:
    """The ids of the prompts that are generated from; two completions of the same prompt are one."""
    generated: list[list[int]] = []
    original = trainer._generate_single_turn

    def generate(prompts_: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        generated.extend(list(ids) for ids in prompts_)
        return original(prompts_, *args, **kwargs)

    trainer._generate_single_turn = generate
    return generated


def test_each_access_is_a_copy() -> None:
    rows = Rows([{"prompt": [{"role": "user"}]}])
    rows[0]["prompt"].append("spoiled")
    assert rows[0] == {"prompt": [{"role": "user"}]}


# -------------------------------------------------------------------- texts and parts


@pytest.mark.parametrize("template", ["qwen3", "llama3_1"])
def test_parts_of_text_are_one_text(template: str) -> None:
    tokenizer = real_tokenizer(template)
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "3 + 4?"}]
    asked = prompt_ids(tokenizer, [{"role": "user", "content": parts}])
    assert asked == prompt_ids(tokenizer, [{"role": "user", "content": "What is 3 + 4?"}])
    assert "What is 3 + 4?" in tokenizer.decode(asked)


class Beginning:
    """A tokenizer that puts its BOS, a byte that the text may have already, in front of every text."""

    bos_token_id = ord("!")

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [self.bos_token_id, *text.encode()]}


def test_a_text_that_a_template_wrote_has_one_bos() -> None:
    assert prompt_ids(Beginning(), "!ab") == prompt_ids(Beginning(), "ab") == [*b"!ab"]


MESSAGE = {"role": "user", "content": "2 + 2?"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [{"prompt": "x"}, {"prompt": [MESSAGE]}],
            r"line 2: the prompt is messages, and in the first row it is a text",
        ),
        ([{"prompt": [{"from": "human", "value": "x"}]}], r"message 1 of the prompt has no `role`: .*human"),
        ([{"prompt": ["x"]}], r"message 1 of the prompt has no `role`"),
        ([{"prompt": [{"role": "user", "content": {"text": "x"}}]}], r"message 1 .* has an object for its content"),
        ([{"prompt": [MESSAGE | {"content": [{"type": "image"}]}]}], r"a part of the kind 'image'.*text alone"),
        ([{"prompt": [MESSAGE | {"content": [7]}]}], r"a part of the kind 'int'"),
        (
            [{"prompt": [MESSAGE], "image": None}],
            r"column 'image' would be shown to the model, .*\{image = \"picture\"\}",
        ),
        ([{"prompt": [MESSAGE], "images": ["a.png"]}], r"column 'images' would be shown"),
        (
            [{"prompt": "x", "completions": "y"}],
            r"column 'completions' has a name .*\{completions = \"my_completions\"\}",
        ),
        ([{"prompt": "x", "log_metric": 1}], r"column 'log_metric'"),
    ],
)
def test_rows_that_no_replica_could_read(tmp_path: Path, rows: list[Any], words: str) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InnerError, match=words):
        load_prompts("a.jsonl", {"prompts": tmp_path / "a.jsonl"}, DataSettings())


def test_images_that_no_row_has_are_no_fault(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "x", "images": []}) + "\n")
    assert load_prompts("a.jsonl", {"prompts": tmp_path / "a.jsonl"}, DataSettings())
