"""From rollouts to states: the sample, what of it is written down, and `diloco traces`.  The whole loop at the end."""

import asyncio
import json
from collections import Counter
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.model.traces import freeze, run_states
from diloco.process.journal import Journal
from diloco.run.config import ConfigError, FleetConfig, RunConfig, load_config
from diloco.run.founding import open_run
from diloco.runlog.reader import read_report
from diloco.views.page.rollouts import read_rollouts
from diloco.views.samples import session_samples
from examples.local_teachers import serving, tool_name, wrong_name
from executors.cli.main import main
from inner import Teacher, TraceWarning, extract_dpo_pairs, load_states, replay_trace, save_pairs
from inner.masking import secrets_here
from inner.rollouts.rollout_states import rollout_states
from inner.rollouts.sample import MOST, MOST_BYTES, RolloutSample
from inner.settings.inner import InnerConfig, Seeds
from inner.train.build import build_inner
from rendezvous import layout
from rendezvous.stores.memory import MemoryStore
from tests.inner.test_toolworld import SMALL, WORLD, small_folder
from tests.support.fakes import ManualClock
from tests.support.tables import merge_tables

torch.set_num_threads(1)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "x", "content": content}


def say(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


# the sample


@pytest.mark.slow
def test_every_rollout_since_the_last_take_is_as_likely_as_any_other() -> None:
    seen: Counter[str] = Counter()
    for seed in range(300):
        sample = RolloutSample(seed)
        for batch in range(5):
            texts = [f"{batch}.{i}" for i in range(40)]
            sample.add_batch([user("q")] * 40, [[say(text)] for text in texts], [0.0] * 40)
        taken = sample.take(8)
        assert len(taken) == 8
        seen.update(rollout["messages"][1]["content"] for rollout in taken)
        assert sample.take(8) == []
    per_batch = Counter({str(b): sum(n for text, n in seen.items() if text[0] == str(b)) for b in range(5)})
    assert all(abs(n - 480) < 5 * 480**0.5 for n in per_batch.values()), per_batch
    assert max(seen.values()) < 40  # 12 expected


def test_what_is_too_large_is_left_out_whole() -> None:
    sample = RolloutSample(0)
    sample.add_batch([user("q")] * 3, [[say("a")], [say("b" * MOST_BYTES)], [say("c")]], [1.0, 1.0, float("nan")])
    taken = sample.take(MOST)
    assert sorted(r["messages"][1]["content"] for r in taken) == ["a", "c"]
    assert {r["messages"][1]["content"]: r["reward"] for r in taken} == {"a": 1.0, "c": None}
    assert json.loads(json.dumps(taken, allow_nan=False)) == taken


def test_secrets_are_not_written_down() -> None:
    environ = {"AN_API_KEY": 'sk-"abc"defg', "MY_TOKEN": "tiny", "HOME": "/home/somebody", "A_SECRET": "s3cr3t-x"}
    sample = RolloutSample(0)
    sample.add_batch([user("q")], [[say('the key is sk-"abc"defg, tiny, /home/somebody, s3cr3t-x')]], [0.0])
    (rollout,) = sample.take(1, secrets_here(environ))
    assert rollout["messages"][1]["content"] == "the key is ***, tiny, /home/somebody, ***"


def test_how_unsure_the_group_was() -> None:
    right, other, broken = call("f", a=1), call("f", a=2.0), tool("{'error': 'no'}")
    completions = [
        [right, tool("1"), say("1")],
        [call("f", a=1.0), tool("1"), say("2")],
        [other, tool("2"), say("2")],
        [other, broken, say("no")],
    ]
    sample = RolloutSample(0)
    sample.add_batch([user("q")] * 4 + [user("r")], [*completions, [right]], [0.0] * 5)
    by_last = {r["messages"][-1].get("content"): r["unsure"] for r in sample.take(5)}
    assert by_last["1"] == {"1": pytest.approx(log(2), abs=1e-4), "3": pytest.approx(log(2), abs=1e-4)}
    assert by_last["no"] == {"1": pytest.approx(log(2), abs=1e-4), "3": 0.0}  # no other rollout stood there
    assert by_last[""] == {"1": 0.0}  # another prompt


# states


def rollout(*turns: dict[str, Any], reward: float = 0.0, **more: Any) -> Any:
    return {"messages": [*user("q"), *turns], "first": 1, "reward": reward, "environment": None, "unsure": {}} | more


def test_a_state_for_every_turn_with_its_error() -> None:
    failed = tool("{'error': 'no such file', 'error_kind': 'exception', 'hint_template_key': 'ls'}")
    states = rollout_states(
        rollout(call("f", a=1), failed, call("g"), tool("7"), say("7"), reward=1.0, unsure={"1": 0.5}),
        "r00-1/4/0.0",
        {"": [{"type": "function", "function": {"name": "f"}}]},
    )
    assert [s["state_id"] for s in states] == ["r00-1/4/0.0:1", "r00-1/4/0.0:3", "r00-1/4/0.0:5"]
    assert [len(s["state_messages"]) for s in states] == [1, 3, 5]
    assert [s.get("error") for s in states] == ["no such file", None, None]
    assert states[0]["error_kind"] == "exception" and states[0]["hint_template_key"] == "ls"
    assert states[0]["student_entropy"] == 0.5 and "student_entropy" not in states[1]
    assert states[2]["student_action"] == "7" and states[2]["reward"] == 1.0
    assert states[0]["tools"][0]["function"]["name"] == "f"


def test_texts_are_rollouts_too() -> None:
    sample = RolloutSample(0)
    sample.add_batch(["What is 2+2?"], ["4"], [1.0])
    (state,) = rollout_states(sample.take(1)[0], "x")
    assert state["state_messages"] == user("What is 2+2?") and state["student_action"] == "4"


# the log


def logged(store: Any, slot: str, *steps: int) -> None:
    journal = Journal(store, ManualClock(), slot, 1)
    for step in steps:
        journal.emit("step", step=step)
        journal.add_sample(step, {"rollouts": [rollout(say(f"{slot} {step}"))], "tools": {"": [{"name": "f"}]}})
        journal.add_sample(step, {})
        journal.flush()


def test_rollouts_lie_in_the_log_and_are_no_events(tmp_path: Path) -> None:
    store = MemoryStore()
    logged(store, "r01", 0, 1)
    logged(store, "r00", 1)
    assert [event["step"] for event in read_report(store).events] == [1, 0, 1]
    made = freeze(store, tmp_path / "sub" / "traces.jsonl")
    assert made == {"states": 3, "rollouts": 3, "errors": 0}
    states = load_states(tmp_path / "sub" / "traces.jsonl")
    assert [s["student_action"] for s in states] == ["r00 1", "r01 0", "r01 1"]
    assert states[1]["state_id"] == "r01-1/0/0.0:1" and states[0]["tools"] == [{"name": "f"}]


def test_a_damaged_line_is_named_and_the_others_are_kept() -> None:
    store = MemoryStore()
    logged(store, "r00", 0)
    key = layout.rollouts_key("r00", 1, 0)
    store.put(key, (store.get(key) or b"") + b'{"messages": 3}\n\xff\n')
    with pytest.warns(TraceWarning, match=r"000000\.rollouts\.jsonl, line 3"):
        assert len(list(run_states(store))) == 1


def test_a_run_without_rollouts_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="log_rollouts"):
        freeze(MemoryStore(), tmp_path / "t.jsonl")
    assert FleetConfig().log_rollouts == 4
    with pytest.raises(ConfigError, match="log_rollouts"):
        RunConfig.from_dict({"fleet": {"log_rollouts": 65}})
    more, none = (RunConfig.from_dict({"fleet": {"log_rollouts": n}}) for n in (9, 0))
    assert more.mathematics() == none.mathematics()


# in the trainer


def trained(n: int, files: Any = None, takes: bool = False, **settings: Any) -> Any:
    config = InnerConfig(**merge_tables(SMALL, {"batch_size": 8}, settings))
    loop: Any = build_inner(config, small_folder(), files or {}, Seeds(data=0, noise=0))
    samples, numbers = [], []

    def stop() -> bool:
        samples.append(loop.sample(8) if takes else {})
        numbers.append(loop.pop_metrics())
        return len(samples) == n

    loop.train(stop)
    return loop, samples, numbers


@pytest.mark.slow
def test_watching_changes_nothing() -> None:
    (watched, samples, _), (alone, _, _) = trained(3, takes=True), trained(3)
    assert [len(s["rollouts"]) for s in samples] == [8, 8, 8]
    assert all(torch.equal(a, b) for a, b in zip(watched.model.parameters(), alone.model.parameters(), strict=True))
    for sampled in samples:
        assert {t["function"]["name"] for t in sampled["tools"][""]} == {WORLD.right_name(0), WORLD.right_name(1)}


@pytest.mark.slow
def test_rollouts_to_replay_to_pairs_to_training(tmp_path: Path) -> None:
    """The closed loop, through a real endpoint on this machine."""
    _, samples, numbers = trained(4, takes=True)
    states = [
        state
        for t, sampled in enumerate(samples)
        for i, one in enumerate(sampled["rollouts"])
        for state in rollout_states(one, f"r00-1/{t}/{i}", sampled["tools"])
    ]
    rewards = [n["reward"] for n in numbers]
    assert sum(s["reward"] for s in {s["state_id"].partition(":")[0]: s for s in states}.values()) == 8 * sum(rewards)
    failed = [state for state in states if state.get("error")]
    assert failed and all("not found" in str(state.get("error")) for state in failed)
    with serving(WORLD, accuracy=1.0) as url:
        teachers = [Teacher(f"expert-{i}", 1.0, 1.0, base_url=url, key_env=None, max_tokens=64) for i in range(2)]
        answers = asyncio.run(replay_trace(failed, teachers, 1.0, ledger=tmp_path / "ledger", progress=False))
    pairs = extract_dpo_pairs(failed, answers, 2)
    assert len(pairs) == len(failed)
    for pair in pairs:
        kind = int(pair["state_messages"][0]["content"][2])  # "op1 4 5"
        assert f'"{WORLD.right_name(kind)}"' in pair["chosen"] and f'"{WORLD.right_name(kind)}"' not in pair["rejected"]
    save_pairs(pairs, tmp_path / "pairs.jsonl")
    _, _, learned = trained(4, {"pairs": tmp_path / "pairs.jsonl"}, replay={"pairs": "pairs.jsonl", "weight": 0.3})
    assert all(n["replay_coverage"] == 1.0 for n in learned)
    assert learned[-1]["loss/trace_replay_dpo"] < learned[0]["loss/trace_replay_dpo"]


def test_the_teachers_are_wrong_together_or_alone() -> None:
    said = [[tool_name(WORLD, f"expert-{t}", f"0 {n} 1", 0, 0.5) for t in range(2)] for n in range(400)]
    right = sum(a == WORLD.right_name(0) for pair in said for a in pair) / 800
    assert 0.5 < right < 0.65  # half by knowledge, some by luck
    assert any(a == b == wrong_name(WORLD, 0) for a, b in said)
    assert said == [[tool_name(WORLD, f"expert-{t}", f"0 {n} 1", 0, 0.5) for t in range(2)] for n in range(400)]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    url, to = str(tmp_path / "run"), tmp_path / "traces.jsonl"
    run = open_run(load_config(Path(__file__).parents[2] / "diloco" / "demo.toml"), url, ManualClock())
    assert main(["traces", url, "--to", str(to)]) == 2
    assert "log_rollouts" in capsys.readouterr().err
    logged(run.store, "r00", 0, 1)
    assert main(["traces", url, "--to", str(to)]) == 0
    assert "2 states of 2 rollouts" in capsys.readouterr().out
    assert main(["traces", url, "--to", str(to), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rollouts"] == 2
    assert len(load_states(to)) == 2


def test_characters_that_end_a_line_elsewhere_stay_inside_their_text() -> None:
    """Before: U+2028 and U+0085 tore a rollout in two, and it was left out of traces, the page and trackers."""
    store = MemoryStore()
    journal = Journal(store, ManualClock(), "r00", 1)
    said = "a\u2028b\x85c\u2029d"
    journal.emit("step", step=0)
    journal.add_sample(0, {"rollouts": [rollout(say(said)), rollout(say("next"))], "tools": {"": [{"name": said}]}})
    journal.flush()
    assert [state["student_action"] for state in run_states(store)] == [said, "next"]
    body = store.get(layout.rollouts_key("r00", 1, 0)) or b""
    assert [turns["turns"][-1]["text"] for turns in read_rollouts(body, "r00")] == [said, "next"]
    assert len(session_samples(store, "r00", 1, 9)) == 2


def test_another_file_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path / "run")
    run = open_run(load_config(Path(__file__).parents[2] / "diloco" / "demo.toml"), url, ManualClock())
    logged(run.store, "r00", 0, 1)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "mine"}')
    for words, told in (
        (["--to", str(tmp_path / "prompts.jsonl")], "is another file, and would be overwritten"),
        (["--to", str(tmp_path / "x.jsonl"), "--pairs", str(tmp_path / "x.jsonl")], "Name two files"),
        (["--to", str(tmp_path / "x.jsonl"), "--by", "human"], "Add --pairs FILE"),
        (["--to", str(tmp_path)], "is a folder"),
    ):
        assert main(["traces", url, *words]) == 2
        assert told in capsys.readouterr().err
    assert (tmp_path / "prompts.jsonl").read_text() == '{"prompt": "mine"}' and not (tmp_path / "x.jsonl").exists()
