"""ToolWorld: the task itself, TRL's own error turn, and a folder that plain transformers can load."""

import atexit
import pickle
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.chat_template_utils import get_json_schema

from inner.settings.inner import InnerConfig, Seeds
from inner.train.build import build_inner, publish_model
from inner.usercode.userfiles import tool_names
from inner.worlds.tiny import tiny_tokenizer
from inner.worlds.toolworld import ToolWorld, final_answer
from tests.support.tables import merge_tables

torch.set_num_threads(1)

SMALL: dict[str, Any] = {"toolworld": {"kinds": 2, "names": 4, "warm_start_steps": 250}, "batch_size": 16}
WORLD = ToolWorld(kinds=2, names=4)


@cache
def small_folder() -> Path:
    """A warm-started small world, published once per test process."""
    folder = tempfile.TemporaryDirectory(prefix="test-inner-")
    atexit.register(folder.cleanup)
    publish_model(InnerConfig(**SMALL), Path(folder.name))
    return Path(folder.name)


def say(content: str, name: str | None = None, **arguments: int) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}] if name else []
    return {"role": "assistant", "content": content, "tool_calls": calls}


def test_the_task() -> None:
    row = WORLD.rows(1, seed=5)[0]
    environment = WORLD.environment()()
    environment.reset(**row)
    tool = getattr(environment, WORLD.right_name(row["kind"]))
    assert tool(row["a"], row["b"]) == row["answer"] == ((row["kind"] + 1) * row["a"] + row["b"]) % 20
    other = getattr(environment, WORLD.right_name(1 - row["kind"]))
    assert other(row["a"], row["b"]) == -1  # the right name of another kind is no way around
    assert tool_names(type(environment)) == sorted(WORLD.right_name(kind) for kind in range(2))


def test_tools_have_schemas() -> None:
    environment = WORLD.environment()()
    schema = get_json_schema(getattr(environment, WORLD.right_name(0)))["function"]
    assert schema["parameters"]["required"] == ["a", "b"]
    assert schema["parameters"]["properties"]["a"]["type"] == "integer"


def test_reward_is_for_the_final_answer_only() -> None:
    right, wrong, tool_last = [say("7 <end>")], [say("17")], [say("7"), {"role": "tool", "content": "7"}]
    assert WORLD.reward([right, wrong, tool_last], answer=[7, 7, 7]) == [1.0, 0.0, 0.0]
    assert final_answer([{"role": "assistant", "content": None}]) == ""


def test_hint_names_the_right_tool_and_is_gated() -> None:
    row, right = {"kind": 1}, WORLD.right_name(1)
    wrong = next(WORLD.name(1, s) for s in range(4) if WORLD.name(1, s) != right)
    assert WORLD.hint(row, f"Tool {wrong} not found.") == f"hint use {right}"
    assert WORLD.hint(row, f"Tool {right} not found.") is None
    assert WORLD.hint(row, "division by zero") is None


def test_the_right_name_is_no_secret_of_the_process() -> None:
    assert [ToolWorld().right_name(kind) for kind in range(6)] == ["t0_28", "t1_27", "t2_30", "t3_9", "t4_1", "t5_4"]
    assert pickle.loads(pickle.dumps(WORLD)) == WORLD


def test_warm_start_knows_the_names_but_not_which(tmp_path: Path) -> None:
    """p(right | no hint) is chance, p(hinted | hint) is high, for right and wrong names alike."""
    tokenizer = AutoTokenizer.from_pretrained(small_folder())
    model = AutoModelForCausalLM.from_pretrained(small_folder())

    def probability(prompt: list[dict[str, str]], name: str) -> float:
        ids = tokenizer.apply_chat_template(prompt, tokenize=True, add_generation_prompt=True, return_dict=False)
        ids = [*ids, tokenizer.convert_tokens_to_ids("<call>")]
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, -1].softmax(-1)[tokenizer.convert_tokens_to_ids(name)].item()

    rows = WORLD.rows(30, seed=3)
    plain = [probability(row["prompt"], WORLD.right_name(row["kind"])) for row in rows]
    names = [WORLD.name(row["kind"], i % 4) for i, row in enumerate(rows)]
    hinted = [
        probability([*row["prompt"], {"role": "system", "content": f"hint use {name}"}], name)
        for row, name in zip(rows, names, strict=True)
    ]
    assert 0.1 < sum(plain) / 30 < 0.45
    assert sum(hinted) / 30 > 0.8


def test_the_folder_loads_with_plain_transformers_and_generates() -> None:
    """Same ids, same templates, and a reply that the response parser reads: with AutoTokenizer, not with our class."""
    ours, loaded = WORLD.tokenizer(), AutoTokenizer.from_pretrained(small_folder())
    text = f"<call> {WORLD.right_name(0)} a 4 b 15 </call> <end> {{'error': 'Tool t0_1 not found.'}} op1"
    assert loaded(text)["input_ids"] == ours(text)["input_ids"] and ours.unk_token_id not in ours(text)["input_ids"]
    assert loaded.chat_template == ours.chat_template and loaded.response_template == ours.response_template
    assert (loaded.padding_side, loaded.eos_token, loaded.pad_token) == ("left", "<end>", "<pad>")
    model = AutoModelForCausalLM.from_pretrained(small_folder())
    row = WORLD.rows(1, seed=5)[0]
    prompt = loaded.apply_chat_template(
        row["prompt"], tokenize=True, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
    assert out[-1] == loaded.eos_token_id
    reply = loaded.parse_response(out[prompt["input_ids"].size(1) :], prefix=prompt["input_ids"][0])
    call = reply["tool_calls"][0]["function"]
    assert call["name"].startswith(f"t{row['kind']}_")
    assert call["arguments"] == {"a": row["a"], "b": row["b"]}


def test_tiny_tokenizer_is_bytes() -> None:
    text = "Zürich, 3°\n"
    tokenizer = tiny_tokenizer()
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_publish_writes_the_same_bytes_twice(tmp_path: Path) -> None:
    config = InnerConfig(**merge_tables(SMALL, {"toolworld": {"warm_start_steps": 3}}))
    for name in ("a", "b"):
        publish_model(config, tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert "model.safetensors" in files and "tokenizer.json" in files
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_publish_leaves_the_random_state_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    WORLD.model(seed=7)
    assert torch.equal(torch.rand(3), expected)


def test_dialogues_use_every_name() -> None:
    rng = random.Random(0)
    called = {
        m["tool_calls"][0]["function"]["name"]
        for _ in range(200)
        for m in WORLD.dialogue(rng)[1:3]
        if "tool_calls" in m
    }
    assert called == {WORLD.name(kind, s) for kind in range(2) for s in range(4)}


def test_a_wrong_name_gets_trls_own_error_turn() -> None:
    """Through TRL's real tool loop: the unknown name becomes an error turn, the right one a result, in ids and text."""
    from inner.channels.spans import read_turns

    loop: Any = build_inner(InnerConfig(**SMALL, sdpo={"weight": 0.1}), small_folder(), {}, Seeds(data=0, noise=0))
    seen: list[Any] = []
    original = loop.trainer._tool_call_loop

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(original(*args, **kwargs))
        return seen[-1]

    loop.trainer._tool_call_loop = spy
    loop.train(lambda: True)
    masks, dialogues, completion_ids = seen[0][:3]
    right = {WORLD.right_name(kind) for kind in range(2)}
    errors = answers = 0
    for mask, messages, ids in zip(masks, dialogues, completion_ids, strict=True):
        calls = messages[0].get("tool_calls") or []
        if len(calls) != 1 or len(messages) < 2:
            continue
        name = calls[0]["function"]["name"]
        turn = read_turns(mask, messages)[0]
        assert f"<call> {name}" in loop.trainer.processing_class.decode(ids[turn.start : turn.end])
        if name in right:
            assert turn.error is None
            answers += 1
        else:
            assert turn.error == f"Tool {name} not found."
            errors += 1
    assert errors > 0 and answers > 0
