"""Agents that speak Anthropic's Messages or OpenAI's Responses: the same ids as with chat completions, and refusals.

The SDKs of both vendors read the replies and streams in the last test, if they are installed (make test-tasks).
"""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from inner.extras.agents.endpoint import Endpoint
from inner.extras.agents.forms import RequestRefused, completion
from tests.inner.test_agents import TURNS, agent_loop, no_hurry, says, take, written  # noqa: F401
from tests.support.scripted import call_ids, real_tokenizer

SEND = """
import json, urllib.request

def ask(model, route, **body):
    body = json.dumps({"model": model.name, **body}).encode()
    request = urllib.request.Request(model.base_url + route, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
"""
MESSAGES = (
    SEND
    + """
TOOLS = [{"name": "add", "description": "Add.", "input_schema": SCHEMA}]

def solve(row, model):
    messages = list(row["prompt"])
    said = ask(model, "/messages", messages=messages, tools=TOOLS, max_tokens=300)
    call = said["content"][-1]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": str(sum(call["input"].values()))}
    messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": [result]}]
    said = ask(model, "/messages", messages=messages, tools=TOOLS, max_tokens=300)
    messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": "sure?"}]
    return float(len(ask(model, "/messages", messages=messages, tools=TOOLS, max_tokens=300)["content"][0]["text"]))
"""
)
RESPONSES = (
    SEND
    + """
TOOLS = [{"type": "function", "name": "add", "description": "Add.", "parameters": SCHEMA}]

def solve(row, model):
    items = list(row["prompt"])
    said = ask(model, "/responses", input=items, tools=TOOLS)
    call = said["output"][-1]
    result = str(sum(json.loads(call["arguments"]).values()))
    items += [*said["output"], {"type": "function_call_output", "call_id": call["call_id"], "output": result}]
    said = ask(model, "/responses", input=items, tools=TOOLS)
    items += [*said["output"], {"role": "user", "content": [{"type": "input_text", "text": "sure?"}]}]
    return float(len(ask(model, "/responses", input=items, tools=TOOLS)["output"][0]["content"][0]["text"]))
"""
)


@pytest.mark.parametrize("code", [MESSAGES, RESPONSES], ids=["messages", "responses"])
def test_each_form_trains_on_the_ids_of_chat_completions(
    code: str,
    tmp_path: Path,
    says: Callable[..., Any],  # noqa: F811
    no_hurry: None,  # noqa: F811
) -> None:
    tokenizer = real_tokenizer("qwen3")
    end = [tokenizer.eos_token_id]
    calls, answer, sure = call_ids(tokenizer, "add"), tokenizer("3")["input_ids"], tokenizer("yes")["input_ids"]

    def script(before: str) -> list[int]:
        return sure + end if "sure?" in before else answer + end if "<tool_response>" in before else calls

    says(script)
    rollouts = []
    for name, own in (("chat", TURNS), ("form", code)):
        (tmp_path / name).mkdir()
        (batch,) = take(agent_loop(tmp_path / name, own))
        rollouts.append([written(batch, row) for row in range(4)])
    assert rollouts[0] == rollouts[1] and sum(rollouts[0][0][1]) == len([*calls, *answer, *end, *sure, *end])


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}


@pytest.fixture
def asked() -> list[Any]:
    return []


@pytest.fixture
def endpoint(asked: list[Any]) -> Iterator[Endpoint]:
    """Call a tool, and answer with its result; the last message may ask for a refusal or a cut reply."""

    def answer(key: str, body: Any) -> dict[str, Any]:
        asked.append(body)
        last = body["messages"][-1] if body["messages"] else {"content": ""}
        if last["content"] == "refuse":
            raise RequestRefused("too long", code="context_length_exceeded")
        if last["content"] == "cut":
            return completion({"role": "assistant", "content": "It"}, ended="length", read=3, written=1)
        if last.get("role") == "tool":
            said = {"role": "assistant", "content": f"It is {last['content']}."}
            return completion(said, ended="stop", read=9, written=4)
        said = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        return completion(said, ended="tool_calls", read=3, written=2)

    served = Endpoint(answer)
    yield served
    served.close()


def send(endpoint: Endpoint, route: str, **body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(endpoint.url("KEY") + route, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_messages_become_chat_completions(endpoint: Endpoint, asked: list[Any]) -> None:
    parts = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "12"}]},
        {"type": "text", "text": "sure?"},
    ]
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    use = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 7}}
    send(
        endpoint, "/v1/messages", system=[{"type": "text", "text": "Be brief.", "cache_control": {}}], max_tokens=9,
        messages=[
            {"role": "user", "content": "7 + 5?"}, {"role": "assistant", "content": [thought, use]},
            {"role": "user", "content": parts},
        ],
        stop_sequences=["x"], tool_choice={"type": "none"}, tools=[{"name": "add", "input_schema": {"type": "object"}}],
    )  # fmt: skip
    (body,) = asked
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "7 + 5?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
        {"role": "user", "content": "sure?"},
    ]
    assert body["tools"] == [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    assert (body["max_tokens"], body["stop"], body["tool_choice"]) == (9, ["x"], "none")


@pytest.mark.parametrize(("result", "told"), [("no file", "Error: no file"), ("Error: no file", "Error: no file")])
def test_a_result_that_is_marked_as_an_error_reads_as_one(
    endpoint: Endpoint, asked: list[Any], result: str, told: str
) -> None:
    """Before: the mark was dropped, so a failed call got no hint and the model did not read that it had failed."""
    use = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 7}}
    part = {"type": "tool_result", "tool_use_id": "c1", "content": result, "is_error": True}
    history = [*USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [part]}]
    send(endpoint, "/messages", messages=history)
    assert asked[0]["messages"][-1]["content"] == told


def test_a_system_message_behind_a_users_is_a_part_of_it(endpoint: Endpoint, asked: list[Any]) -> None:
    """As the Claude Agent SDK sends it; many chat templates take a system message only at the beginning."""
    note = {"role": "system", "content": "You have tools."}
    send(endpoint, "/messages", system="Be brief.", messages=[*USER, note, {"role": "assistant", "content": "!"}, note])
    assert asked[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "?\n\nYou have tools."},
        {"role": "assistant", "content": "!"},
        {"role": "user", "content": "You have tools."},
    ]


def test_replies_have_the_forms_own_words_for_a_cut_and_a_call(endpoint: Endpoint) -> None:
    cut = [{"role": "user", "content": "cut"}]
    _, said = send(endpoint, "/messages", messages=cut)
    assert said["stop_reason"] == "max_tokens" and said["usage"] == {"input_tokens": 3, "output_tokens": 1}
    _, said = send(endpoint, "/messages", messages=[{"role": "user", "content": "?"}])
    assert said["content"] == [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 7}}]
    assert said["stop_reason"] == "tool_use"
    _, said = send(endpoint, "/responses", input="cut")
    assert said["status"] == "incomplete" and said["incomplete_details"] == {"reason": "max_output_tokens"}
    _, said = send(endpoint, "/responses", input="?", instructions="Be brief.")
    assert said["status"] == "completed" and [item["type"] for item in said["output"]] == ["function_call"]


IMAGE = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
USER = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        ("/messages", {"messages": IMAGE}, "messages[0] has a part of the type 'image'"),
        ("/messages", {"messages": "?"}, "`messages` must be a list of objects"),
        ("/messages", {"messages": USER, "tools": [{"type": "bash_20250124"}]}, "'bash_20250124' runs at Anthropic"),
        ("/messages", {"messages": USER, "tool_choice": "any"}, "`tool_choice` must be an object"),
        ("/messages", {"messages": [{"role": "user", "content": "refuse"}]}, "prompt is too long: too long"),
        ("/responses", {"input": "?", "previous_response_id": "r"}, "this server keeps no responses"),
        ("/responses", {"input": "?", "tools": [{"type": "web_search"}]}, "'web_search' runs at OpenAI"),
        ("/responses", {"input": [{"type": "item_reference", "id": "m"}]}, "input[0] has the type 'item_reference'"),
        ("/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "the type 'input_image'"),
        ("/responses", {"input": "refuse"}, "context_length_exceeded"),
    ],
)
def test_what_the_model_cannot_heed_is_refused_by_name(
    endpoint: Endpoint, route: str, body: dict[str, Any], words: str
) -> None:
    status, said = send(endpoint, route, **body)
    assert status == 400 and words in json.dumps(said) and ("type" in said) == (route == "/messages")


@pytest.mark.skipif(not find_spec("anthropic"), reason="make test-tasks runs it")
def test_anthropics_sdk_reads_replies_and_streams(endpoint: Endpoint) -> None:
    import anthropic  # pyright: ignore[reportMissingImports]

    tools: Any = [{"name": "add", "description": "Add.", "input_schema": {"type": "object"}}]
    for base in (endpoint.url("KEY"), endpoint.url("KEY").removesuffix("/v1")):
        client = anthropic.Anthropic(base_url=base, api_key="x", max_retries=0)
        messages: list[Any] = [*USER]
        with client.messages.stream(model="policy", max_tokens=9, messages=messages, tools=tools) as stream:
            said = stream.get_final_message()
        (use,) = said.content
        assert (said.stop_reason, use.name, use.input) == ("tool_use", "add", {"a": 7})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "12"}
        messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(model="policy", max_tokens=9, messages=messages).content[0].text == "It is 12."
        with client.messages.stream(model="policy", max_tokens=9, messages=messages) as stream:
            assert "".join(stream.text_stream) == "It is 12."
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            client.messages.create(model="policy", max_tokens=9, messages=[{"role": "user", "content": "refuse"}])


@pytest.mark.skipif(not find_spec("openai"), reason="make test-tasks runs it")
def test_openais_sdk_reads_responses_and_their_streams(endpoint: Endpoint) -> None:
    import openai  # pyright: ignore[reportMissingImports]

    client = openai.OpenAI(base_url=endpoint.url("KEY"), api_key="x", max_retries=0)
    tools: Any = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
    with client.responses.stream(model="policy", input="?", tools=tools) as stream:
        said = stream.get_final_response()
    (call,) = said.output
    assert (call.name, call.arguments, said.usage.total_tokens) == ("add", '{"a": 7}', 5)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
    history: Any = [{"role": "user", "content": "?"}, call, result]
    assert client.responses.create(model="policy", input=history).output_text == "It is 12."
    with client.responses.stream(model="policy", input=history) as stream:
        told = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert told == ["It is 12."] and stream.get_final_response().output_text == "It is 12."
