"""Hostile endpoints: after any response, a request ends in time, in bounded memory, as a Reading, and in the books."""

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inner import InnerError, Replay, ReplayStopped, Teacher, extract_dpo_pairs, save_pairs
from inner.replay.actions import action_key, action_message
from inner.replay.ask import LONGEST_WAIT_S, RequestClock
from inner.replay.exchange import body_limit, unpack_body
from inner.replay.ledger import Ledger, LedgerError, LedgerHeld, open_free_ledger
from inner.replay.pairs import load_pairs
from inner.replay.teachers import NANO, read_response, request_body, retry_after, worst_cost_nano
from inner.replay.untrusted import DEEPEST, is_deeper, load_json, printable_start, unfit_text
from tests.inner.test_replay_teachers import ROOT, ask, states, teacher
from tests.support.examples import examples
from tests.support.hostile_server import HostileServer, Script, response
from tests.support.teacher_server import Reply, TeacherServer, refuses, says

T = Teacher("m", 1.0, 2.0, base_url="http://127.0.0.1:9/v1", key_env=None, max_tokens=100)
WORST = worst_cost_nano(T, request_body(T, states(1)[0]))
GOOD = json.dumps(says("ls", cost=1e-6).body).encode()


def hostile_teacher(server: HostileServer) -> Teacher:
    return replace(T, base_url=server.url)


def ask_hostile(script: Callable[[int], Script], **more: Any) -> tuple[Replay, HostileServer]:
    with HostileServer(script) as server:
        return ask(states(1), [hostile_teacher(server)], **{"tries": 1, "timeout_s": 20.0} | more), server


# A real socket with a hostile server at its other end


def test_a_drip_of_single_bytes_ends_at_the_deadline_of_the_whole_call() -> None:
    """Before: a timeout between two reads never passed, and the call lasted as long as the server liked."""
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n"
    replay, server = ask_hostile(lambda n: [head, *([b" ", 0.05] * 9999)], timeout_s=2.0)
    (action,) = replay
    assert server.sent < len(head) + 9999, "it waited for all of it"
    assert "no whole answer" in action.get("error", "") and "2 s" in action.get("error", "")
    assert replay.spent_usd * NANO == WORST


@pytest.mark.slow
def test_a_head_that_never_ends_does_neither() -> None:
    replay, _ = ask_hostile(lambda n: [b"HTTP/1.1 200 OK\r\n", *([b"x: y\r\n", 0.05] * 1000)], timeout_s=2.0)
    assert replay.spent_usd * NANO == WORST and replay.counts["failed"] == 1


def test_of_an_answer_of_150_mib_only_the_first_is_read() -> None:
    """Before: all of it, eleven times over: 1.7 GiB."""
    block = b" " * 2**20
    size = 150 * 2**20
    tracemalloc.start()
    try:
        replay, server = ask_hostile(lambda n: [response(b"", length=size), *([block] * 150)])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    (action,) = replay
    assert f"an answer of more than {body_limit(T)} bytes" in action.get("error", "")
    assert peak < 16 * 2**20, f"{peak / 2**20:.0f} MiB"
    assert server.sent < 40 * 2**20, "the rest was never taken off the socket"


def test_a_gzip_bomb_is_unpacked_up_to_the_limit() -> None:
    bomb = gzip.compress(b" " * (examples(256) * 2**20), 9)
    assert len(bomb) < body_limit(T), "it must come through packed"
    tracemalloc.start()
    try:
        replay, _ = ask_hostile(lambda n: [response(bomb, content_encoding="gzip")])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    (action,) = replay
    assert "a packed answer of more than" in action.get("error", "") and peak < 16 * 2**20


SCRIPTS: list[tuple[str, Script, str, int]] = [
    # name, what is sent, a part of `error`, nano-dollars
    ("truncated", [response(GOOD, length=len(GOOD) + 10)], "broke", WORST),
    ("too short a length", [response(GOOD, length=20)], "not JSON", WORST),
    ("no answer at all", [], "broke", WORST),
    ("not HTTP", [b"SSH-2.0-OpenSSH_9.6\r\n"], "broke", WORST),
    ("half a head", [b"HTTP/1.1 200 OK\r\ncontent-le"], "broke", WORST),
    ("a length of words", [b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n{}"], "broke", WORST),
    ("bad chunks", [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"], "broke", WORST),
    ("no gzip", [response(b"{}", content_encoding="gzip")], "no gzip", WORST),
    ("unknown packing", [response(b"{}", content_encoding="br, gzip")], "the request asks for identity", WORST),
    ("charset zlib", [response(b"x", content_type="text/plain; charset=zlib")], "not JSON", WORST),
    ("not UTF-8", [response(GOOD.replace(b"ls", b"l\xff"))], "not JSON", WORST),
    ("200 with an error", [response(b'{"error": {"code": 503, "message": "busy"}}')], "503 busy", WORST),
    ("error code ²", [response('{"error": {"code": "²"}}'.encode())], "500", WORST),
    ("no content", [b"HTTP/1.1 204 No Content\r\n\r\n"], "204", WORST),
    ("unknown 5xx", [response(b"", "599 What")], "599", WORST),
    ("too long a refusal", [response(b"no" * 2**20, "400 Bad")], "400 nono", 0),
    ("packed refusal", [response(gzip.compress(b'{"error": "no"}'), "400 Bad", content_encoding="gzip")], "400 no", 0),
    ("nested", [response(b'{"a":' * 5000 + b"1" + b"}" * 5000)], "JSON of more than 64 levels", WORST),
    ("not so nested", [response(b'{"a":' * 90 + b"1" + b"}" * 90)], "JSON of more than 64 levels", WORST),
]  # fmt: skip


@pytest.mark.parametrize(("script", "says_what", "cost"), [s[1:] for s in SCRIPTS], ids=[s[0] for s in SCRIPTS])
def test_what_a_hostile_server_sends_is_a_failure_in_words_and_in_the_books(
    script: Script, says_what: str, cost: int, tmp_path: Path
) -> None:
    replay, _ = ask_hostile(lambda n: script, ledger=tmp_path / "l")
    (action,) = replay
    assert action["action"] == "" and says_what in action.get("error", ""), action
    book = Ledger(tmp_path / "l")
    assert book.spent_nano == cost == round(replay.spent_usd * NANO)
    assert "unforeseen" not in action.get("error", "")


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary", "308 Permanent"])
def test_a_redirect_is_not_followed(status: str) -> None:
    """It would carry the key, and the prompt, to another host."""
    with HostileServer(lambda n: [response(GOOD)]) as other:
        redirect = response(b"", status, location=other.url + "/chat/completions")
        with pytest.raises(ReplayStopped, match=status[:3]):
            ask_hostile(lambda n: [redirect])
        assert other.requests == 0


def test_an_answer_that_came_packed_though_nobody_asked_is_read() -> None:
    for packed, name in ((gzip.compress(GOOD), "gzip"), (zlib.compress(GOOD), "deflate")):
        replay, _ = ask_hostile(lambda n, p=packed, e=name: [response(p, content_encoding=e)])
        assert [a["action"] for a in replay] == ["ls"]
    assert unpack_body(b"x", "identity", 1) == b"x"


def test_after_a_hostile_answer_the_next_one_counts() -> None:
    """The connection of the first is not used again, and its bytes do not stand before the second answer."""
    bad = response(GOOD, length=20)
    replay, server = ask_hostile(lambda n: [response(GOOD) if n else bad], tries=2)
    assert [a["action"] for a in replay] == ["ls"] and server.requests == 2


# Foreign numbers and texts


HUGE_INT = 10**400
USAGES: list[tuple[Any, int | None]] = [
    ({"cost": 1e300}, None),
    ({"cost": HUGE_INT}, None),
    ({"cost": "0.01"}, None),
    ({"cost": [1]}, None),
    ({"cost": 1e300, "prompt_tokens": 1, "completion_tokens": 1}, None),
    ({"cost": None, "prompt_tokens": 1, "completion_tokens": 1}, 3000),
    ({"prompt_tokens": 1e300, "completion_tokens": 1}, None),
    ({"prompt_tokens": 1, "completion_tokens": HUGE_INT}, None),
    ({"cost": 1e-6, "is_byok": True, "cost_details": "free"}, None),
    ({"cost": 1e-6, "is_byok": True, "cost_details": {"upstream_inference_cost": "1"}}, None),
    ({"cost": 1e-6, "is_byok": True, "cost_details": {"upstream_inference_cost": 1e-6}}, 2000),
    ("none", None),
]


@pytest.mark.parametrize(("usage", "cost"), USAGES)
def test_a_cost_that_cannot_be_is_the_worst_case(usage: Any, cost: int | None) -> None:
    body = says("ls").body | {"usage": usage}
    reading = read_response(T, 200, {}, json.dumps(body), 0.0)
    assert (reading.verdict, reading.cost_nano) == ("answer", cost)
    with TeacherServer(lambda b, n: Reply(body)) as server:
        replay = ask(states(1), [teacher(server)])
    assert replay.spent_usd * NANO == pytest.approx(WORST if cost is None else cost)


UNFIT: list[tuple[str, dict[str, Any], str]] = [
    ("ls \ud800", {}, "lone surrogate (U+D800)"),
    ("ls \x00", {}, "control character (U+0000)"),
    ("ls \x1b[31m", {}, "control character (U+001B)"),
    ("l" * 6401, {}, "an action of 6401 characters for at most 100 tokens"),
    ("", {"tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\udc00"}'}}]}, "lone surrogate"),
    ("", {"tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"a": "x" * 7000})}}]}, "characters"),
    ("", {"tool_calls": [{"function": {"name": "", "arguments": "{}"}}]}, "a tool call without a name"),
    ("", {"tool_calls": [{"function": {"name": {"a": 1}}}]}, "a tool call without a name"),
    ("", {"tool_calls": "ls"}, "no choices"),
    ("x", {"content": {"a": 1}}, "the content is not text"),
    ("x", {"content": [{"text": 1}]}, "the content is not text"),
]


@pytest.mark.parametrize(("text", "message", "says_what"), UNFIT)
def test_text_that_nobody_should_learn_is_refused_in_words(text: str, message: dict[str, Any], says_what: str) -> None:
    reading = read_response(T, 200, {}, json.dumps(says(text, cost=1e-6, **message).body), 0.0)
    assert reading.action == "" and says_what in reading.why and reading.cost_nano == 1000


def test_a_lone_surrogate_is_paid_for_once_and_never_asked_for_again(tmp_path: Path) -> None:
    """Before: UnicodeEncodeError between the answer and the books, at every resume, each of which paid again."""
    with TeacherServer(lambda body, n: says("ls \ud800", cost=1e-5)) as server:
        replays = [ask(states(1), [teacher(server)], ledger=tmp_path / "l") for _ in range(3)]
    assert len(server.bodies) == 1 and {r.spent_usd for r in replays} == {1e-5}
    assert "lone surrogate" in next(iter(replays[2])).get("error", "")


def test_a_lone_surrogate_in_the_trace_is_asked_about_all_the_same(tmp_path: Path) -> None:
    asked = states(1)
    asked[0]["state_messages"][0]["content"] = "x\ud800"
    asked[0]["student_action"] = "y\udc00"
    with TeacherServer(lambda body, n: says("ls", cost=1e-5)) as server:
        replay = ask(asked, [teacher(server, "a"), teacher(server, "b")])
    pairs = extract_dpo_pairs(asked, replay)
    save_pairs(pairs, tmp_path / "p.jsonl")
    with pytest.raises(InnerError, match="a lone surrogate, which no tokenizer takes"), pytest.warns(UserWarning):
        load_pairs(tmp_path / "p.jsonl")


def test_an_answer_that_was_cut_off_has_no_vote() -> None:
    reply = says("ls; rm -r", cost=1e-6)
    reply.body["choices"][0]["finish_reason"] = "length"
    reading = read_response(T, 200, {}, json.dumps(reply.body), 0.0)
    assert (reading.verdict, reading.action) == ("failed", "") and "max_tokens" in reading.why


def test_a_state_that_makes_no_request_is_named_before_the_first_cent() -> None:
    with TeacherServer(lambda body, n: says("x")) as server:
        for calls in ([{"name": "ls"}], "ls", [{"function": {"name": "f", "arguments": float("nan")}}]):
            asked = states(2)
            asked[1]["state_messages"].append({"role": "assistant", "tool_calls": calls})
            if calls != "ls" and "function" in calls[0]:
                asked[1]["tools"] = [{"x": float("nan")}]
            with pytest.raises(InnerError, match="state 's1' cannot be written as a request"):
                ask(asked, [teacher(server)])
    assert server.bodies == []


def test_a_key_that_no_header_can_carry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "sk-é")
    with pytest.raises(InnerError, match="TEACHER_KEY holds a key with characters that no HTTP header can carry"):
        replace(T, key_env="TEACHER_KEY").headers()


def test_a_key_that_the_endpoint_repeats_is_not_written_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEACHER_KEY", "sk-secret")
    with (
        TeacherServer(lambda body, n: refuses(401, "no such key: sk-secret")) as server,
        pytest.raises(ReplayStopped, match=r"no such key: \*\*\*"),
    ):
        ask(states(1), [teacher(server, key_env="TEACHER_KEY")], ledger=tmp_path / "l")
    assert "sk-secret" not in (tmp_path / "l").read_text()


# Retry-After


class Waits:
    """A clock that does not wait; `slept` is how long a real one would have."""

    def __init__(self) -> None:
        self.at = self.slept = 0.0

    async def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.at += seconds
        await asyncio.sleep(0)

    @property
    def clock(self) -> RequestClock:
        return RequestClock(lambda: self.at, self.sleep)


def test_a_teacher_that_asks_for_a_day_is_left_out_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """Before: every other call to that teacher waited for that day."""

    def behave(body: dict[str, Any], n: int) -> Reply:
        return refuses(429, "quota", Retry_After="86400") if body["model"] == "a" else says("ls", cost=1e-6)

    waits = Waits()
    with TeacherServer(behave) as server:
        replay = ask(states(20), [teacher(server, "a"), teacher(server, "b")], concurrency=4, clock=waits.clock)
    assert waits.slept == 0
    assert sum(body["model"] == "a" for body in server.bodies) == 1
    assert [a["action"] for a in replay if a["teacher"] == "b"] == ["ls"] * 20
    assert {a.get("error") for a in replay if a["teacher"] == "a"} <= {
        "429 quota",
        "429 quota (asks to wait 86400 s)",
    }
    assert replay.spent_usd == pytest.approx(20e-6) and caplog.text.count("asks to wait 86400 s") == 1


def test_a_teacher_that_was_left_out_is_asked_again_by_the_next_call(tmp_path: Path) -> None:
    replies = [refuses(429, Retry_After="86400")]
    with TeacherServer(lambda body, n: replies[n] if n < len(replies) else says("ls", cost=1e-6)) as server:
        first, second = (ask(states(3), [teacher(server)], ledger=tmp_path / "l") for _ in range(2))
    assert [a["action"] for a in first] == [""] * 3 and [a["action"] for a in second] == ["ls"] * 3


def test_a_wait_within_the_limit_is_waited_and_a_shorter_one_does_not_end_it() -> None:
    after = {0: "100", 1: "1"}
    waits = Waits()
    with TeacherServer(
        lambda b, n: refuses(429, Retry_After=after[n]) if n in after else says("x", cost=0.0)
    ) as server:
        replay = ask(states(2), [teacher(server)], clock=waits.clock, concurrency=2)
    assert len(replay) == 2 and waits.at >= 100 and float(after[0]) <= LONGEST_WAIT_S


@pytest.mark.parametrize(
    "value",
    ["1e999", "-inf", "Thu, 01 Jan 99999999999 00:00:10 GMT", "\x00", "²", "1,5", "Mon, 0 0 0 0:0:0", "GMT", " "],
)
def test_a_retry_after_that_cannot_be_read_is_none(value: str) -> None:
    assert retry_after({"retry-after": value}, 0.0) is None


# Any response at all

HEADERS = st.dictionaries(
    st.sampled_from(["retry-after", "content-type", "content-encoding", "x", "location"]),
    st.one_of(
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40),
        st.floats().map(str),
        st.integers().map(str),
        st.datetimes().map(lambda d: d.strftime("%a, %d %b %Y %H:%M:%S GMT")),
        st.sampled_from(["gzip", "deflate", "br", "identity", "86400", "0"]),
    ),
    max_size=3,
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["²", "\ud800", "\x00", "<|im_end|>", 1e300, HUGE_INT, -1, "0.01", "error", "length", 429, 402, 403]
    ),
)
FORM = ["choices", "message", "content", "tool_calls", "function", "name", "arguments", "finish_reason", "model"]
MONEY = ["usage", "cost", "is_byok", "cost_details", "upstream_inference_cost", "prompt_tokens", "completion_tokens"]
NAMES = st.sampled_from([*FORM, *MONEY, "error", "code"])
ANYTHING = st.recursive(
    SCALARS, lambda part: st.lists(part, max_size=3) | st.dictionaries(NAMES, part, max_size=4), max_leaves=12
)
CALLS = st.lists(
    st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": SCALARS, "arguments": ANYTHING})}), max_size=2
)


@st.composite
def completions(draw: st.DrawFn) -> dict[str, Any]:
    """A good answer with some of its parts replaced by anything."""
    doc: dict[str, Any] = says(
        "ls", cost=draw(st.sampled_from([0.0, 1e-6, 1e-4, 1.0, 1e300])), tool_calls=draw(CALLS)
    ).body
    choice = doc["choices"][0]
    for holder in (doc, choice, choice["message"], doc["usage"]):
        holder.update(draw(st.dictionaries(NAMES, ANYTHING, max_size=2)))
    return doc


def to_json(value: Any) -> bytes:
    return json.dumps(value).encode()


BODIES = st.one_of(
    st.binary(max_size=200),
    completions().map(to_json),
    ANYTHING.map(to_json),
    completions().map(to_json).map(gzip.compress),
    st.integers(1, 3000).map(lambda n: b"[" * n + b"]" * n),
    st.sampled_from([GOOD, b"", b"<html>", b"null", b"\xef\xbb\xbf" + GOOD, GOOD[:-1]]),
)
STATUSES = st.sampled_from(
    [200] * 12 + [201, 204, 206, 301, 400, 401, 402, 403, 404, 408, 409, 429, 500, 503, 599, 999]
)


@settings(max_examples=examples(300), deadline=None)
@given(STATUSES, HEADERS, BODIES)
def test_any_response_whatever_is_a_reading(status: int, headers: dict[str, str], body: bytes) -> None:
    reading = read_response(T, status, headers, body, 0.0)
    assert reading.verdict in ("answer", "again", "failed", "stop")
    assert reading.cost_nano is None or 0 <= reading.cost_nano <= 3e6 * NANO
    assert reading.after_s is None or reading.after_s >= 0
    assert bool(reading.action) == (reading.verdict == "answer") and reading.why.isprintable()
    if reading.action:
        reading.action.encode()
        assert unfit_text(reading.action) is None
        assert action_key(reading.action) and not is_deeper(action_message(reading.action), 2 * DEEPEST)


class Wire(httpx.AsyncBaseTransport):
    """Responses or a transport's exceptions, as from a socket but without one."""

    def __init__(self, outcomes: list[Any]) -> None:
        self.outcomes, self.requests = outcomes, 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        outcome = self.outcomes[self.requests % len(self.outcomes)]
        self.requests += 1
        if isinstance(outcome, type):
            raise outcome("hostile")
        status, headers, body = outcome
        return httpx.Response(status, headers=headers, stream=_Parts(body))


class _Parts(httpx.AsyncByteStream):
    def __init__(self, body: bytes) -> None:
        self.body = body

    async def __aiter__(self) -> Any:
        for at in range(0, len(self.body), 50):
            yield self.body[at : at + 50]


BROKEN = [httpx.ConnectError, httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError, httpx.PoolTimeout]
ERRORS = st.sampled_from([*BROKEN, httpx.DecodingError, ValueError, RecursionError, KeyError, OSError])


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(STATUSES, HEADERS, BODIES) | ERRORS, min_size=1, max_size=6), st.integers(0, 6))
def test_the_books_hold_whatever_the_endpoint_sends(tmp_path: Path, outcomes: list[Any], fitting_calls: int) -> None:
    """Nothing but ReplayStopped comes out. Spent never goes down and, overcharges aside, stays under the ceiling."""
    ledger = tmp_path / "l"
    ledger.unlink(missing_ok=True)
    ceiling = (fitting_calls * WORST + WORST // 2) / NANO
    before = 0
    for life in range(3):
        wire, waits = Wire(outcomes[life:] + outcomes[:life]), Waits()
        try:
            replay = ask(
                *(states(4), [T, replace(T, model="n")], ceiling),
                **{"ledger": ledger, "tries": 2, "concurrency": 3, "transport": wire, "clock": waits.clock},
            )
        except ReplayStopped as stopped:
            replay = stopped.replay
        book = Ledger(ledger)
        book.close()
        assert before <= book.spent_nano == round(replay.spent_usd * NANO)
        assert spent_as_agreed(ledger) <= ceiling * NANO
        assert waits.slept < 8 * 2 * LONGEST_WAIT_S
        assert all(bool(action["action"]) != ("error" in action) for action in replay)
        extract_dpo_pairs(states(4), replay, 1)
        before = book.spent_nano


def spent_as_agreed(ledger: Path) -> int:
    """Nano-dollars, with each charge above its worst case counted as the worst case: more was never agreed to."""
    lines = [json.loads(line) for line in ledger.read_bytes().splitlines()]
    reserves = {line["sent"]: line["reserve_nano"] for line in lines if "sent" in line}
    costs = {line["back"]: line["cost_nano"] for line in lines if "back" in line}
    return sum(min(costs.get(number, reserve), reserve) for number, reserve in reserves.items())


# The ledger and SIGKILL

KILLED_AT = """
import asyncio, os, signal, sys
from inner import replay_trace
from inner.replay import ask, ledger
from tests.inner.test_replay_exchange import killed_teacher
from tests.inner.test_replay_teachers import states

point, written = sys.argv[3], ledger.Ledger._write

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def write(self, line):
    if point == "before back" and "back" in line:
        kill()
    if point == "torn back" and "back" in line:
        self._file.write(b'{"back": 1, "call"')
        kill()
    written(self, line)
    if point == "after " + next(iter(line)):
        kill()

ledger.Ledger._write = write
asyncio.run(replay_trace(states(2), [killed_teacher(sys.argv[1])], 1.0, ledger=sys.argv[2], progress=False))
"""


def killed_teacher(url: str) -> Teacher:
    return replace(T, base_url=url)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("point", "asked", "counted"),
    [
        ("after sent", 2, WORST + 2000),  # unknown whether it left: it counts, and is asked
        ("before back", 3, WORST + 2000),  # paid and lost: it counts in full, and is asked again
        ("torn back", 3, WORST + 2000),
        ("after back", 2, 2000),  # in the books: never asked again
    ],
)
def test_a_kill_between_call_and_booking_forgets_no_money_and_pays_nothing_twice_that_is_booked(
    point: str, asked: int, counted: int, tmp_path: Path
) -> None:
    with TeacherServer(lambda body, n: says("ls", cost=1e-6)) as server:
        command = [sys.executable, "-c", KILLED_AT, server.url, str(tmp_path / "l"), point]
        assert subprocess.run(command, cwd=ROOT, timeout=180).returncode == -signal.SIGKILL
        replay = ask(states(2), [killed_teacher(server.url)], ledger=tmp_path / "l")
        again = ask(states(2), [killed_teacher(server.url)], ledger=tmp_path / "l")
    assert [a["action"] for a in replay] == ["ls", "ls"] == [a["action"] for a in again]
    assert len(server.bodies) == asked
    assert round(replay.spent_usd * NANO) == counted == round(again.spent_usd * NANO)
    assert server.charged * NANO <= counted


def test_a_full_disk_stops_the_replay_in_words_and_leaves_a_whole_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: an ExceptionGroup, and half a line in the middle of the file."""
    real = os.fsync
    calls = [0]

    def full(fd: int) -> None:
        calls[0] += 1
        if calls[0] >= 4:
            raise OSError(28, "No space left on device")
        real(fd)

    with TeacherServer(lambda body, n: says("ls", cost=1e-6)) as server:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(
            ReplayStopped, match=r"cannot be written to .*No space left.*Make room on its disk"
        ) as stopped:
            ask(states(6), [teacher(server)], ledger=tmp_path / "l", concurrency=2)
        monkeypatch.setattr(os, "fsync", real)
        paid = server.charged
        assert stopped.value.replay.spent_usd >= paid - 1e-12
        assert Ledger(tmp_path / "l").spent_nano >= round(paid * NANO)
        assert len(ask(states(6), [teacher(server)], ledger=tmp_path / "l")) == 6


@pytest.mark.parametrize(
    "line",
    [
        '{"back": 1, "call": "c", "cost_nano": -5, "answer": null}',
        '{"back": 1, "call": "c", "cost_nano": "5", "answer": null}',
        '{"back": 1, "call": "c", "cost_nano": 5, "answer": {"text": "x"}}',
        '{"back": true, "call": "c", "cost_nano": 5, "answer": null}',
        '{"sent": 1, "call": "c", "reserve_nano": 1.5}',
        "[" * 3000,
    ],
)
def test_a_ledger_line_that_would_make_the_books_wrong_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "l").write_text(line + "\n")
    with pytest.raises(LedgerError, match="line 1 is not a ledger line"):
        Ledger(tmp_path / "l")


def test_two_ledgers_in_one_file_forget_nothing(tmp_path: Path) -> None:
    sent = '{"sent": 1, "call": "c", "state_id": "s", "teacher": "m", "reserve_nano": 7}\n'
    (tmp_path / "l").write_text(sent + sent)
    assert Ledger(tmp_path / "l").spent_nano == 14


def test_an_open_ledger_knows_what_it_spent(tmp_path: Path) -> None:
    with TeacherServer(lambda body, n: says("ls", cost=1e-6)) as server:
        book = Ledger(tmp_path / "l")
        for n in (1, 2, 3):
            replay = ask(states(n), [teacher(server)], ledger=book)
            assert book.spent_nano == n * 1000 == round(replay.spent_usd * NANO)
        book.close()


def test_each_process_finds_a_ledger_of_its_own(tmp_path: Path) -> None:
    books = [open_free_ledger(tmp_path / "h.jsonl") for _ in range(3)]
    assert [book.path.name for book in books if book.path] == ["h.jsonl", "h.1.jsonl", "h.2.jsonl"]
    books[1].close()
    with pytest.raises(LedgerHeld):
        Ledger(tmp_path / "h.jsonl")
    again = open_free_ledger(tmp_path / "h.jsonl")
    assert again.path == tmp_path / "h.1.jsonl", "the first that is free"


# JSON and text


@given(st.integers(0, 2000))
def test_json_is_read_to_a_depth_and_no_further(depth: int) -> None:
    text = "[" * depth + "1" + "]" * depth
    if depth <= DEEPEST:
        assert not is_deeper(load_json(text), DEEPEST)
        return
    with pytest.raises(ValueError, match="more than 64 levels"):
        load_json(text)


def test_shown_is_one_short_line() -> None:
    assert printable_start("a\n\x1b[2J\ud800 b" + "x" * 1000, 12) == "a \ufffd[2J\ufffd bxxx"
