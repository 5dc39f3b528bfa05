"""Agents that call the model themselves: the ids that are trained on, their batches, their failures."""

import copy
import http.client
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from inner import InnerConfig, InnerError, Seeds, build_inner
from inner.extras.agents.chat import Chat, template_messages
from inner.extras.agents.conversation import Conversation, TooLong
from inner.extras.agents.desk import Desk
from inner.extras.agents.endpoint import HUNG_UP, Endpoint
from inner.extras.agents.forms import RequestRefused, completion
from inner.rollouts.call_forms import ASKED, TOOLS, set_call_form
from inner.rollouts.recording.acting import Sampler
from inner.rollouts.recording.recorded import BundlePlace, record_rollouts
from inner.rollouts.recording.unpack import unpack
from inner.rollouts.rollout_states import bundle_rollouts
from tests.inner.test_recorded import Kept
from tests.support.chat_templates import tokenizer_of
from tests.support.scripted import call_ids, questions, real_tokenizer, scripted_folder

ASK = """
import json, urllib.request

def ask(model, messages, **more):
    body = json.dumps({"model": model.name, "messages": messages, **more}).encode()
    request = urllib.request.Request(model.base_url + "/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]
"""
ONCE = (
    ASK
    + """
def solve(row, model):
    ask(model, row["prompt"])
    return float(row["k"] % 3)
"""
)
TURNS = (
    ASK
    + """
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}]

def solve(row, model):
    messages = list(row["prompt"])
    said = ask(model, messages, tools=TOOLS)
    call = said["tool_calls"][0]
    numbers = json.loads(call["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": str(sum(numbers.values()))}
    messages += [said, result]
    said = ask(model, messages, tools=TOOLS)
    messages += [said, {"role": "user", "content": "sure?"}]
    return float(len(ask(model, messages, tools=TOOLS)["content"]))
"""
)


def agent_loop(folder: Path, code: str, template: str = "qwen3", rows: Any = None, **settings: Any) -> Any:
    """Return a loop whose rollouts an agent makes; two groups of two.   rows: default eight questions."""
    (folder / "agent.py").write_text(code)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or questions(8)))
    model = folder / "model"
    if not model.exists():
        scripted_folder(model, template)
    sampling = {"agent": "agent.py:solve", "num_generations": 2, "max_completion_length": 400}
    config = InnerConfig.from_dict(
        {
            "model": str(model), "data": {"prompts": "prompts.jsonl"}, "batch_size": 4, "dtype": "float32",
            "lr": 1e-2, "sampling": sampling | settings.pop("sampling", {}), **settings,
        }
    )  # fmt: skip
    config.check()
    files = {kind: folder / str(name).partition(":")[0] for kind, name in config.named_files.items()}
    return build_inner(config, model, files, Seeds(data=0, noise=0))


@pytest.fixture
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each batch wait for all agents: on a busy machine one begins late."""
    monkeypatch.setattr("inner.extras.agents.rollouts.LINGER_S", 60.0)


def take(loop: Any, steps: int = 1) -> list[dict[str, Any]]:
    """Take inner steps. Return the batches of the trainer's generations."""
    batches, made = [], loop.trainer._generate_and_score_completions
    loop.trainer._generate_and_score_completions = lambda inputs: batches.append(made(inputs)) or batches[-1]
    done = iter(range(1, steps + 1))
    loop.train(lambda: next(done) == steps)
    return batches


def written(batch: dict[str, Any], row: int) -> tuple[list[int], list[int]]:
    """Return a rollout's ids, and which of them the model sampled."""
    real = batch["completion_mask"][row].bool()
    mask = batch.get("tool_mask", batch["completion_mask"])
    return batch["completion_ids"][row][real].tolist(), mask[row][real].tolist()


@pytest.fixture
def says() -> Iterator[Callable[[Callable[[str], list[int]]], Any]]:
    """Make every trainer sample what a function of the text before it says."""
    active = []

    def start(script: Callable[[str], list[int]]) -> list[int]:
        sizes = list[int]()

        def turn(self: Any, prompt_ids: Sequence[list[int]], *args: Any, **kwargs: Any) -> Any:
            sizes.append(len(prompt_ids))
            return [script(self._tokenizer.decode(ids)) for ids in prompt_ids], None

        active.append(patch.object(GRPOTrainer, "_generate_single_turn", turn))
        active[-1].start()
        return sizes

    yield start
    for one in active:
        one.stop()


# ---------------------------------------------------------------- ids


def test_one_call_of_the_model_gives_the_bits_of_a_run_without_an_agent(tmp_path: Path, no_hurry: None) -> None:
    (tmp_path / "reward.py").write_text("def score(completions, k, **_):\n    return [float(one % 3) for one in k]\n")
    loop = agent_loop(tmp_path, ONCE, sampling={"max_completion_length": 24})
    first = take(loop, 2)
    plain = {"rewards": {"function": "reward.py:score"}, "sampling": {"agent": None, "max_completion_length": 24}}
    other = agent_loop(tmp_path, ONCE, **plain)
    second = take(other, 2)
    assert all(torch.equal(a["completion_ids"], b["completion_ids"]) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(loop.model.parameters(), other.model.parameters(), strict=True))


def test_a_trainer_sends_no_telemetry(tmp_path: Path, answers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread looks up a host while accelerate changes the environment: a replica ended with SIGSEGV."""
    began = list[bool]()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils._telemetry._start_telemetry_thread", lambda: began.append(True))
    agent_loop(tmp_path, ONCE)
    assert began == []


def test_a_rollout_of_three_turns_has_the_sampled_ids_and_no_others(tmp_path: Path, says: Any, no_hurry: None) -> None:
    tokenizer = real_tokenizer("qwen3")
    end = [tokenizer.eos_token_id]
    calls, answer, sure = (
        call_ids(tokenizer, "add"),
        [*tokenizer("3")["input_ids"], *end],
        tokenizer("yes")["input_ids"],
    )

    def script(before: str) -> list[int]:
        return sure + end if "sure?" in before else answer if "<tool_response>" in before else calls

    sizes = says(script)
    (batch,) = take(agent_loop(tmp_path, TURNS))
    assert sizes == [4, 4, 4], "one batch of all rollouts a turn"
    ids, mask = written(batch, 0)
    sampled = [token for token, own in zip(ids, mask, strict=True) if own]
    assert sampled == [*calls, *answer, *sure, *end]
    assert tokenizer.decode(ids) == (
        tokenizer.decode(calls) + "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n3<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
    )


def test_rewards_get_all_messages_and_what_the_agent_returned(tmp_path: Path, says: Any) -> None:
    code = "seen = []\ndef score(completions, agent_reward, **_):\n    seen.append((completions, agent_reward))\n"
    (tmp_path / "reward.py").write_text(code + "    return [float(value) for value in agent_reward]\n")
    tokenizer = real_tokenizer("qwen3")
    says(lambda before: [*tokenizer("hello")["input_ids"], tokenizer.eos_token_id])
    loop = agent_loop(tmp_path, ONCE, rewards={"function": "reward.py:score"})
    take(loop)
    own = str(tmp_path / "reward.py")
    (seen,) = [m.seen for m in list(sys.modules.values()) if getattr(m, "__file__", "") == own]
    messages, rewards = seen[-1]
    assert messages[0] == [{"role": "assistant", "content": "hello"}] and len(rewards) == 4


TALK = [{"role": "user", "content": "7 + 5?"}]


def conversation(template: str = "qwen3", most: int = 200) -> tuple[Conversation, Any]:
    tokenizer = real_tokenizer(template)
    return Conversation(Chat(tokenizer, [tokenizer.eos_token_id]), most, context=2048), tokenizer


def said(talk: Conversation, tokenizer: Any, messages: list[Any], text: str, end: bool = True, **more: Any) -> Any:
    """Answer one request with a text."""
    ids = [*tokenizer(text)["input_ids"], *([tokenizer.eos_token_id] if end else [])]
    return talk.answer(talk.ask(messages, None, **more), ids, None)


@pytest.mark.parametrize("template", ["qwen3", "llama3_1"])
def test_a_thought_that_the_agent_leaves_out_stays_in_the_ids(template: str) -> None:
    talk, tokenizer = conversation(template)
    reply, _ = said(talk, tokenizer, TALK, "<think>12</think> It is 12.")
    short = {"role": "assistant", "content": reply["content"].partition("</think>")[2]}
    asked = talk.ask([*TALK, short, {"role": "user", "content": "sure?"}], None)
    assert "<think>12</think> It is 12." in tokenizer.decode(asked.before)
    assert asked.branch is talk.branches[0]


def test_a_reply_without_an_end_gets_one_that_is_not_trained_on() -> None:
    talk, tokenizer = conversation()
    reply, ended = said(talk, tokenizer, TALK, "It is", end=False)
    assert ended == "length"
    said(talk, tokenizer, [*TALK, reply, {"role": "user", "content": "go on"}], "12")
    branch = talk.rollout()
    assert branch is not None and tokenizer.decode(branch.ids).startswith("It is<|im_end|>\n<|im_start|>user\ngo on")
    assert branch.mask[:6] == [1] * 5 + [0]


def test_a_rewritten_history_begins_a_branch_and_the_longest_is_trained_on() -> None:
    talk, tokenizer = conversation()
    reply, _ = said(talk, tokenizer, TALK, "a long answer")
    said(talk, tokenizer, [{"role": "user", "content": "a summary of it"}], "short")
    assert len(talk.branches) == 2
    branch = talk.rollout()
    assert branch is not None and branch.completion == [{"role": "assistant", "content": "a long answer"}]
    said(talk, tokenizer, [*TALK, reply, {"role": "user", "content": "sure?"}], "yes")
    assert len(talk.branches) == 2, "the first branch goes on"


def test_two_replies_to_the_same_messages_are_two_branches() -> None:
    talk, tokenizer = conversation()
    reply, _ = said(talk, tokenizer, TALK, "12")
    more = [*TALK, reply, {"role": "user", "content": "sure?"}]
    asked = [talk.ask(more, None) for _ in range(2)]
    for one, text in zip(asked, ("yes, I am", "no"), strict=True):
        talk.answer(one, [*tokenizer(text)["input_ids"], tokenizer.eos_token_id], None)
    assert [len(branch.messages) for branch in talk.branches] == [4, 4]
    branch = talk.rollout()
    assert branch is not None and branch.completion[-1]["content"] == "yes, I am"


def test_log_probs_stand_beside_the_sampled_ids() -> None:
    talk, tokenizer = conversation()
    reply, _ = talk.answer(talk.ask(TALK, None), [*tokenizer("12")["input_ids"], tokenizer.eos_token_id], [-1.0] * 3)
    asked = talk.ask([*TALK, reply, {"role": "user", "content": "sure?"}], None)
    talk.answer(asked, [tokenizer.eos_token_id], [-2.0])
    branch = talk.rollout()
    assert branch is not None and branch.logprobs == [-1.0] * 3 + [0.0] * len(asked.inserted) + [-2.0]


def test_a_stop_ends_the_reply_at_the_first_token_that_completes_it() -> None:
    talk, tokenizer = conversation()
    reply, ended = said(talk, tokenizer, TALK, "Thought: 12\nObservation: none", stop=("Observation:",))
    assert (reply["content"], ended) == ("Thought: 12\n", "stop")
    branch = talk.rollout()
    assert branch is not None and tokenizer.decode(branch.ids) == "Thought: 12\nObservation:"
    for text in ("Thought: 12", "Thought: 12\nObservation:"):  # the agent adds the stop again, or does not
        asked = talk.ask([*TALK, {"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}], None)
        assert asked.branch is branch


def test_a_call_is_text_where_the_agent_takes_no_calls() -> None:
    """OpenAI's `tool_choice` "none": the ids are those of a request with tools, and the reply has no call."""
    talk, tokenizer = conversation()
    written = call_ids(tokenizer, "add")
    for calls, ended in ((True, "tool_calls"), (False, "stop")):
        reply, why = talk.answer(talk.ask(TALK, TOOLS, calls=calls), written, None)
        assert why == ended and ("tool_calls" in reply) == calls
        asked = talk.ask([*TALK, reply, {"role": "user", "content": "sure?"}], TOOLS)
        assert asked.branch is talk.branches[-1] and asked.branch.ids == written
    assert talk.branches[0].prompt_ids == talk.branches[1].prompt_ids


def test_a_request_that_leaves_no_room_is_refused() -> None:
    talk, tokenizer = conversation(most=20)
    reply, ended = said(talk, tokenizer, TALK, "twelve" * 5)
    assert ended == "length" and sum(talk.branches[0].mask) == 20
    with pytest.raises(
        TooLong, match="This model's maximum context length is 2048 tokens, of which 20 may be behind the prompt"
    ):
        talk.ask([*TALK, reply, {"role": "user", "content": "sure?"}], None)


def test_an_agent_that_never_ends_is_refused_at_last() -> None:
    """Each of its requests begins anew, so that no branch is ever full."""
    talk, tokenizer = conversation(most=20)
    with pytest.raises(TooLong, match=r"This rollout has had 16 replies with 320 tokens, and may have at most"):
        for _ in range(99):
            said(talk, tokenizer, TALK, "x" * 20, end=False)
    other, _ = conversation(most=10**6)
    with pytest.raises(TooLong, match="1,000 replies"):
        for _ in range(1001):
            said(other, tokenizer, TALK, "x")


def test_the_agents_own_limit_of_tokens_holds() -> None:
    talk, tokenizer = conversation()
    reply, ended = said(talk, tokenizer, TALK, "twelve", limit=3)
    assert (reply["content"], ended) == ("twe", "length")


def test_an_agent_under_mistrals_form_gets_the_models_own_id_and_sends_it_back() -> None:
    template = (Path(__file__).parents[1] / "data" / "call_forms" / "mistral.jinja").read_text().removesuffix("\n")
    tokenizer = copy.copy(tokenizer_of(template, "</s>"))
    set_call_form(tokenizer, for_trl=False)
    talk = Conversation(Chat(tokenizer, [tokenizer.eos_token_id]), 400, context=2048)
    called = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo", "days": 3}, "id": "a1B2c3D4e"}]'
    asked = talk.ask(ASKED, TOOLS)
    reply, ended = talk.answer(asked, [*tokenizer(called)["input_ids"], tokenizer.eos_token_id], None)
    assert ended == "tool_calls" and reply["tool_calls"][0]["id"] == "a1B2c3D4e"
    result = {"role": "tool", "tool_call_id": "a1B2c3D4e", "content": "sunny"}
    again = talk.ask([*ASKED, reply, result], TOOLS)
    assert again.branch is talk.branches[0]
    told = '[TOOL_RESULTS] {"content": sunny, "call_id": "a1B2c3D4e"}[/TOOL_RESULTS]'
    assert tokenizer.decode(again.before) == f"{tokenizer.decode(asked.before)}{called}</s>{told}"


def test_openais_other_roles_and_missing_names_are_read() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    sent = [
        {"role": "developer", "content": "Be brief."}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]  # fmt: skip
    system, _, result = template_messages(sent)
    assert system["role"] == "system" and result["name"] == "add"


def test_a_template_that_leaves_out_results_is_refused() -> None:
    tokenizer = real_tokenizer("qwen3")
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    chat = Chat(tokenizer, [tokenizer.eos_token_id])
    with pytest.raises(InnerError, match="leaves out messages of the role tool"):
        chat.behind([{"role": "tool", "name": "add", "content": "3"}])
    assert tokenizer.decode(chat.behind([{"role": "user", "content": "sure?"}])) == "<user>sure?<|im_end|><assistant>"


# ---------------------------------------------------------------- the endpoint


@pytest.fixture
def served() -> Iterator[Callable[..., Any]]:
    asked = list[Any]()

    def answer(key: str, body: Any) -> dict[str, Any]:
        asked.append((key, body))
        if body.get("fails"):
            raise RequestRefused("too long", code="context_length_exceeded")
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        message = {"role": "assistant", "content": "12", "tool_calls": [call]}
        return completion(message, ended="tool_calls", read=3, written=2)

    endpoint = Endpoint(answer)

    def send(route: str, body: bytes | None = None) -> tuple[int, str]:
        request = urllib.request.Request(endpoint.url("KEY") + route, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    yield send
    endpoint.close()


def test_a_completion_has_openais_form(served: Any) -> None:
    status, text = served("/chat/completions", b'{"messages": []}')
    found = json.loads(text)
    assert status == 200 and found["choices"][0]["finish_reason"] == "tool_calls"
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    another = json.loads(served("/chat/completions", b'{"messages": []}')[1])
    assert found["id"] != another["id"], "some clients take replies of one id for one reply"


def test_a_streamed_reply_comes_as_events(served: Any) -> None:
    _, text = served("/chat/completions", b'{"stream": true}')
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    first, last = map(json.loads, events[:2])
    assert events[2] == "[DONE]" and first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert last["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("route", "body", "status", "words"),
    [
        ("/chat/completions", b"{", 400, "the request is not JSON"),
        ("/chat/completions", b"[]", 400, "not a JSON object"),
        ("/chat/completions", b'{"fails": true}', 400, "context_length_exceeded"),
        ("/embeddings", b"{}", 404, "use one of POST /v1/chat/completions, POST /v1/responses, POST /v1/messages"),
        ("/files", None, 404, "this server has no /v1/files"),
    ],
)
def test_errors_have_openais_form(served: Any, route: str, body: bytes, status: int, words: str) -> None:
    found, text = served(route, body)
    assert found == status and words in text and set(json.loads(text)) == {"error"}


def test_a_connection_that_a_client_keeps_ends_with_the_endpoint() -> None:
    """Each has a thread, and there is an endpoint for each generation."""
    endpoint = Endpoint(lambda key, body: completion({"role": "assistant"}, ended="stop", read=1, written=1))
    before = threading.active_count()
    address = endpoint.url("KEY").split("/")[2]
    kept = http.client.HTTPConnection(address, timeout=30)
    kept.request("POST", "/KEY/v1/chat/completions", "{}", {"Content-Length": "2"})
    assert kept.getresponse().read() and threading.active_count() == before + 1
    endpoint.close()
    assert kept.sock is not None and kept.sock.recv(1) == b""
    wait_for(lambda: threading.active_count() < before)


def test_the_models_are_listed(served: Any) -> None:
    assert json.loads(served("/models")[1])["data"][0]["id"] == "policy"


# ---------------------------------------------------------------- agents that fail


def rewards_of(loop: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    take(loop)
    return loop.trainer._rewards_by_function[:, 0].tolist()


@pytest.fixture
def answers(says: Any) -> None:
    tokenizer = real_tokenizer("qwen3")
    says(lambda before: [*tokenizer("12")["input_ids"], tokenizer.eos_token_id])


BEFORE = (
    ASK
    + """
count = 0
def solve(row, model):
    global count
    number, count = count, count + 1
    ask(model, row["prompt"])
"""
)


def fails(tmp_path: Path, line: str, **settings: Any) -> tuple[list[float], list[str]]:
    """Return the rewards if the first agent runs a line, and the events. The others return 1, 2, 3."""
    code = f"{BEFORE}    if number == 0:\n        {line}\n    return float(number)\n"
    told = list[str]()
    loop = agent_loop(tmp_path, code, **settings)
    loop._reward_calls.host.emit = lambda event, text, **_: told.append(f"{event}: {text}")
    take(loop)
    return sorted(loop.trainer._rewards_by_function[:, 0].tolist(), key=str), told


def test_an_agent_that_raises_gets_its_groups_worst_reward(tmp_path: Path, answers: None) -> None:
    rewards, told = fails(tmp_path, 'row["missing"]')
    assert len(rewards) == 4 and all(value >= 1 for value in rewards), "the worst of 1, 2 and 3 stands twice"
    assert len(told) == 1 and "reward_failed: agent_reward: returned nothing: the agent raised KeyError" in told[0]
    assert "agent.py, line" in told[0] and 'row["missing"]' in told[0]


@pytest.mark.parametrize(
    "line", ['raise ConnectionError("no route")', 'raise RuntimeError("my judge is away") from ConnectionError()']
)
def test_an_agent_whose_service_is_away_has_no_reward(tmp_path: Path, answers: None, line: str) -> None:
    rewards, told = fails(tmp_path, line)
    assert sum(value != value for value in rewards) == 1
    assert len(told) == 1 and "1 of 4 rollouts of the agent have no result: the agent raised" in told[0]
    assert line.split('"')[1] in told[0]


def test_an_error_without_the_refusals_words_is_told_with_them(tmp_path: Path, answers: None) -> None:
    """urllib's error has the status alone, so that the user would not learn what the request lacks."""
    _, told = fails(tmp_path, 'ask(model, row["prompt"], n=2)')
    assert "HTTP Error 400: Bad Request (agent.py, line " in told[0]
    assert "the replica had refused a request of it: n = 2: this model gives one reply to a request" in told[0]


def test_an_agent_that_exits_does_not_end_the_replica(tmp_path: Path, answers: None) -> None:
    rewards, told = fails(tmp_path, "raise SystemExit(3)")
    assert len(rewards) == 4 and "the agent raised SystemExit: 3" in told[0]


def test_an_agent_that_hangs_costs_its_rollout_alone(tmp_path: Path, answers: None) -> None:
    began = time.monotonic()
    rewards, told = fails(tmp_path, "import time; time.sleep(600)", sampling={"agent_timeout_s": 1.0})
    assert sum(value != value for value in rewards) == 1 and time.monotonic() - began < 60
    assert "the agent did nothing for 1 s (agent_timeout_s)" in told[0]


def test_an_agent_that_catches_the_refusal_of_its_request_has_no_reward_and_the_refusal_is_told(
    tmp_path: Path, answers: None
) -> None:
    code = "\n    try: ask(model, row['prompt'], n=2)\n    except Exception: return 0.0\n"
    loop = agent_loop(tmp_path, f"{ASK}\ndef solve(row, model):{code}")
    told = list[str]()
    loop._reward_calls.host.emit = lambda event, text, **_: told.append(text)
    with suppress(InnerError):
        take(loop)
    assert "the replica had refused its request: n = 2: this model gives one reply" in told[0]


def test_an_agent_that_never_calls_the_model_has_no_reward(tmp_path: Path, answers: None) -> None:
    code = BEFORE.replace('    ask(model, row["prompt"])\n', '    number and ask(model, row["prompt"])\n')
    loop = agent_loop(tmp_path, f"{code}    return 1.0 + number\n")
    told = list[str]()
    loop._reward_calls.host.emit = lambda event, text, **_: told.append(text)
    (batch,) = take(loop)
    assert loop.trainer._rewards_by_function.isnan().sum() == 1
    assert "the agent returned, and has not called the model" in told[0]
    assert all(torch.isfinite(parameter).all() for parameter in loop.model.parameters())
    assert min(sum(written(batch, row)[1]) for row in range(4)) == 0


def test_async_agents_share_one_event_loop(tmp_path: Path, answers: None) -> None:
    code = (
        ASK
        + """
import asyncio
loops = set()
async def solve(row, model):
    loops.add(asyncio.get_running_loop())
    await asyncio.to_thread(ask, model, row["prompt"])
    return float(len(loops))
"""
    )
    loop = agent_loop(tmp_path, code)
    take(loop, 2)
    assert loop.trainer._rewards_by_function[:, 0].tolist() == [1.0] * 4


def test_an_async_agent_that_blocks_its_event_loop_is_told_so(tmp_path: Path, answers: None) -> None:
    loop = agent_loop(tmp_path, ONCE.replace("def solve", "async def solve"))
    told = list[str]()
    loop._reward_calls.host.emit = lambda event, text, **_: told.append(text)
    take(loop, 2)
    assert len(told) == 1 and "Await an async client (AsyncOpenAI), or write `def`" in told[0]


# ---------------------------------------------------------------- batches


def wait_for(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not found():
        assert time.monotonic() < end
        time.sleep(0.002)


def ask_in_thread(desk: Desk, key: str, replies: list[Any], **more: Any) -> None:
    def run() -> None:
        try:
            replies.append(desk.answer(key, {"messages": TALK, **more}))
        except RequestRefused as error:
            replies.append(error)

    threading.Thread(target=run, daemon=True).start()


def open_desk(count: int, clock: Callable[[], float]) -> tuple[Desk, list[Any]]:
    desk = Desk(10.0, clock)
    return desk, [desk.open(number, {}, conversation()[0]) for number in range(count)]


def test_a_batch_begins_when_all_agents_wait() -> None:
    now, replies = [0.0], list[Any]()
    desk, episodes = open_desk(2, lambda: now[0])
    for key, _ in reversed(episodes):
        ask_in_thread(desk, key, replies)
    batch = desk.next_batch(linger_s=1e9)
    assert [waiting.episode.number for waiting in batch] == [0, 1], "in the order of the rows"
    for waiting in batch:
        desk.reply(waiting, [5, 6], None)
    wait_for(lambda: len(replies) == 2)
    for _, episode in episodes:
        desk.finish(episode, 1.0)
    assert desk.next_batch(1.0) == []


def test_an_agent_that_asks_much_at_once_gets_its_replies_in_parts() -> None:
    """A batch has at most as many requests as a generation has rollouts."""
    now, replies = [0.0], list[Any]()
    desk, ((first, episode), (second, _)) = open_desk(2, lambda: now[0])
    for _ in range(4):
        ask_in_thread(desk, first, replies)
    wait_for(lambda: len(desk._waiting) == 4)
    ask_in_thread(desk, second, replies)
    sizes = []
    while len(replies) < 5:
        batch = desk.next_batch(linger_s=0.0)
        sizes.append(len(batch))
        for waiting in batch:
            desk.reply(waiting, [5], None)
        wait_for(lambda: len(replies) == sum(sizes))
    assert max(sizes) == 2 and episode.waits == 0


def test_a_slow_agent_delays_the_others_by_the_linger_alone() -> None:
    now, replies = [0.0], list[Any]()
    desk, ((first, _), (_, slow)) = open_desk(2, lambda: now[0])
    ask_in_thread(desk, first, replies)
    wait_for(lambda: len(desk._waiting) == 1)
    now[0] = 3.0
    (waiting,) = desk.next_batch(linger_s=2.0)
    assert waiting.episode.number == 0 and not slow.done


@pytest.mark.parametrize("sampled", [False, True])
def test_a_reply_whose_client_has_hung_up_is_not_trained_on(sampled: bool) -> None:
    """Such as after its time limit. Before: the longest branch could be one that the agent never saw."""
    now, replies, gone = [0.0], list[Any](), [False]
    desk, ((key, episode),) = open_desk(1, lambda: now[0])
    ask_in_thread(desk, key, replies, **{HUNG_UP: lambda: gone[0]})
    wait_for(lambda: len(desk._waiting) == 1)
    taken = desk.next_batch(0.0) if sampled else []
    gone[0] = True
    for waiting in taken:
        desk.reply(waiting, [5] * 99, None)
    ask_in_thread(desk, key, replies)
    wait_for(lambda: len(desk._waiting) == (1 if sampled else 2))
    (again,) = desk.next_batch(0.0)
    desk.reply(again, [5], None)
    wait_for(lambda: len(replies) == 2)
    assert [branch.sampled for branch in episode.conversation.branches] == [1] and episode.waits == 0


def test_a_client_that_hangs_up_is_noticed() -> None:
    asked, found = threading.Event(), list[Any]()

    def answer(key: str, body: Any) -> Any:
        found.extend([body[HUNG_UP], body[HUNG_UP]()])
        asked.set()
        return completion({"role": "assistant"}, ended="stop", read=1, written=1)

    endpoint = Endpoint(answer)
    client = http.client.HTTPConnection(endpoint.url("KEY").split("/")[2], timeout=60)
    client.request("POST", "/KEY/v1/chat/completions", "{}")
    assert client.getresponse().read() and asked.wait(60) and found[1] is False and found[0]() is False
    client.close()
    wait_for(found[0])
    endpoint.close()


def test_a_silent_agent_is_left_and_its_later_requests_are_refused() -> None:
    now, replies = [0.0], list[Any]()
    desk, ((key, episode),) = open_desk(1, lambda: now[0])
    now[0] = 11.0
    assert desk.next_batch(1.0) == [] and isinstance(episode.outcome, TimeoutError)
    ask_in_thread(desk, key, replies)
    wait_for(lambda: bool(replies))
    assert replies[0].status == 410


def test_requests_of_an_ended_generation_are_refused() -> None:
    now, replies = [0.0], list[Any]()
    desk, ((first, _), _) = open_desk(2, lambda: now[0])
    ask_in_thread(desk, first, replies)
    wait_for(lambda: len(desk._waiting) == 1)
    desk.close()
    wait_for(lambda: bool(replies))
    assert replies[0].status == 410


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "must be a list"),
        ({"messages": TALK, "n": 2}, "n = 2: this model gives one reply"),
        ({"messages": TALK, "response_format": {"type": "json_object"}}, "this model samples freely"),
        ({"messages": TALK, "response_format": "json"}, "this model samples freely"),
        ({"messages": TALK, "logprobs": True}, "logprobs: a reply has none"),
        ({"messages": TALK, "functions": [TOOLS[0]["function"]]}, "Send them as `tools`"),
        ({"messages": TALK, "tools": TOOLS, "tool_choice": "required"}, 'tool_choice = "required": the model itself'),
        ({"messages": TALK, "tool_choice": {"type": "function", "function": {"name": "add"}}}, "the model itself"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "the model reads text alone"),
        ({"messages": [{"content": "7 + 5?"}]}, r"messages\[0\]\.role must be a text"),
        ({"messages": [*TALK, {"role": "user", "content": {"text": "x"}}]}, r"messages\[1\]\.content must be a text"),
        ({"messages": TALK, "tools": [], "response_format": {"type": "text"}, "stop": [""], "logprobs": False}, ""),
    ],
)
def test_requests_that_the_model_cannot_answer_are_refused_by_name(body: Any, words: str) -> None:
    desk, ((key, _),) = open_desk(1, lambda: 0.0)
    if not words:
        replies = list[Any]()
        threading.Thread(target=lambda: replies.append(desk.answer(key, body)), daemon=True).start()
        (waiting,) = desk.next_batch(0.0)
        desk.reply(waiting, [5], None)
        wait_for(lambda: bool(replies))
        return
    with pytest.raises(RequestRefused, match=words):
        desk.answer(key, body)


@pytest.mark.parametrize(
    "calls", [5, "add", {"name": "add"}, [5], [[]], [{"id": "c"}], [{"function": "add"}], [{"function": {"name": 5}}]]
)
def test_calls_in_another_form_are_refused_by_their_field(calls: Any) -> None:
    """Before: an internal error (500), and for some a bundle of rollouts that no replica could read again."""
    desk, ((key, _),) = open_desk(1, lambda: 0.0)
    with pytest.raises(RequestRefused, match=r"messages\[1\]\.tool_calls must be a list of") as refused:
        desk.answer(key, {"messages": [*TALK, {"role": "assistant", "content": None, "tool_calls": calls}]})
    assert refused.value.status == 400


# ---------------------------------------------------------------- recorded rollouts, actors

SHORT = (
    ASK
    + """
def solve(row, model):
    messages = [{"role": "system", "content": "Be brief."}, *row["prompt"]]
    said = ask(model, messages, max_tokens=4)
    if row["k"] % 2:
        said = ask(model, [*messages, said, {"role": "user", "content": "sure?"}], max_tokens=4)
    return float(len(said["content"]) % 3) + row["k"]
"""
)


def parameters_of(loop: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])


def test_recorded_rollouts_of_agents_give_the_same_bits(tmp_path: Path, no_hurry: None) -> None:
    kept = Kept()
    plain = agent_loop(tmp_path, SHORT)
    take(plain, 2)
    recorded = agent_loop(tmp_path, SHORT)
    record_rollouts(recorded.trainer, kept)
    take(recorded, 2)
    again = agent_loop(tmp_path, SHORT)
    record_rollouts(again.trainer, kept)
    again.trainer.agents._agent = None  # no agent runs
    heard: list[Any] = []
    again.trainer.on_rollouts = lambda prompts, *_: heard.extend(prompts)
    take(again, 2)
    assert len(kept.bodies) == len(kept.found) == 2 and not kept.refused
    assert torch.equal(parameters_of(plain), parameters_of(recorded))
    assert torch.equal(parameters_of(plain), parameters_of(again))
    told = [rollout["messages"] for body in kept.bodies.values() for rollout in bundle_rollouts(body)]
    for messages in [*told, *heard]:  # before: the row's prompt, without what the agent had put in front of it
        assert [message["role"] for message in messages[:2]] == ["system", "user"]
    assert len(heard) == len(told) == 8


def test_a_replica_trains_on_agents_rollouts_of_an_actor(tmp_path: Path) -> None:
    actor, replica = agent_loop(tmp_path, SHORT), agent_loop(tmp_path, SHORT)
    made = Sampler(actor.trainer).sample(replica.trainer.share, 0)
    kept = Kept()
    record_rollouts(replica.trainer, kept)
    kept.bodies[BundlePlace(0, 0, 0)] = made.pack()
    replica.follow(lambda: 0, lambda: (), lambda: 1)
    replica.trainer.agents._agent = None
    (batch,) = take(replica)
    assert not kept.refused and kept.found == [BundlePlace(0, 0, 0)]
    assert written(batch, 0) == (made.ids[0], made.mask[0]) and "importance_sampling_ratio" in batch
    assert made.logprobs is not None and [*map(len, made.logprobs)] == [*map(len, made.ids)]


def test_a_rollout_without_a_reply_can_be_recorded(tmp_path: Path, answers: None) -> None:
    code = BEFORE.replace('    ask(model, row["prompt"])\n', '    number and ask(model, row["prompt"])\n')
    kept, loop = Kept(), agent_loop(tmp_path, f"{code}    return 1.0 + number\n")
    record_rollouts(loop.trainer, kept)
    take(loop)
    (body,) = kept.bodies.values()
    assert [0] in [list(row) for row in unpack(body).mask or ()]


# ---------------------------------------------------------------- channels beside the policy loss

FAILING = (
    TURNS.replace("str(sum(numbers.values()))", '\'{"error": "no such sum"}\'')
    + """
def hint(row, error):
    return f"HINT {row['k']} {error} {[tool['function']['name'] for tool in row['tools']]}"
"""
)


def failing_turns(says: Any) -> tuple[Any, list[int]]:
    tokenizer = real_tokenizer("qwen3")
    calls, end = call_ids(tokenizer, "add"), tokenizer.eos_token_id
    answer = [*tokenizer("it failed")["input_ids"], end]
    says(lambda before: answer if "<tool_response>" in before else calls)
    return tokenizer, calls


def test_a_hint_is_distilled_at_a_failed_call_of_an_agents_tool(tmp_path: Path, says: Any) -> None:
    tokenizer, calls = failing_turns(says)
    loop = agent_loop(tmp_path, FAILING, sdpo={"weight": 0.05})
    (batch,) = take(loop)
    (lesson,) = batch["sdpo_lessons"][0]
    assert (lesson.start, lesson.end) == (0, len(calls)) and lesson.teacher_ids[-len(calls) :] == calls
    taught = tokenizer.decode(lesson.teacher_ids)
    assert "HINT" in taught and "no such sum" in taught and "['add']" in taught
    assert loop.pop_metrics()["sdpo_coverage"] == 1.0
    assert all(torch.isfinite(parameter).all() for parameter in loop.model.parameters())


def test_turns_of_an_agent_have_process_scores(tmp_path: Path, says: Any) -> None:
    failing_turns(says)
    (tmp_path / "steps.py").write_text(
        "def score(rollouts):\n"
        "    return [[i * (turn.error is None) for turn in one.turns] for i, one in enumerate(rollouts)]\n"
    )
    loop = agent_loop(tmp_path, FAILING, process={"function": "steps.py:score", "weight": 0.5})
    (batch,) = take(loop)
    first = batch["advantages"][0]
    assert batch["advantages"].dim() == 2 and first.unique().numel() > 1
    assert loop.pop_metrics()["process_coverage"] == 1.0


def test_an_assistants_message_that_the_agent_writes_is_no_turn_of_the_model() -> None:
    talk, tokenizer = conversation()
    reply, _ = said(talk, tokenizer, TALK, "12")
    own = [{"role": "assistant", "content": "I checked."}, {"role": "user", "content": "sure?"}]
    said(talk, tokenizer, [*TALK, reply, *own], "yes")
    branch = talk.rollout()
    assert branch is not None
    assert [message["role"] for message in branch.completion] == ["assistant", "user", "user", "assistant"]


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def solve(row):\n    return 1.0\n", "cannot be called with a row and a model"),
        ("solve = 3\n", "not callable"),
        ("def other(row, model): ...\n", "defines no 'solve'"),
    ],
)
def test_an_agent_that_cannot_be_called_is_refused(tmp_path: Path, code: str, words: str) -> None:
    with pytest.raises(InnerError, match=words):
        agent_loop(tmp_path, code)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"sampling": {"environment": "world.py:World"}},
            "inner.sampling.agent = 'agent.py:solve' with inner.sampling",
        ),
        ({"sampling": {"tool_workers": 4}}, "tool_workers"),
        ({"sampling": {"agent": None, "agent_timeout_s": 3.0}}, "inner.sampling.agent is set"),
    ],
)
def test_settings_that_an_agent_contradicts_are_refused(tmp_path: Path, settings: Any, words: str) -> None:
    with pytest.raises(InnerError, match=words):
        agent_loop(tmp_path, ONCE, rewards={"function": "reward.py:score"}, **settings)
