"""Teacher replay against a real server: the ceiling, the retries, the ledger, and what stops it."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inner import DEFAULT_TEACHERS, InnerError, Replay, ReplayStopped, Teacher, TraceState, replay_trace
from inner.replay.ask import is_settled, tiers_of
from inner.replay.ledger import Ledger
from inner.replay.teachers import NANO, OPENROUTER, read_response, request_body, retry_after, worst_cost_nano
from tests.support.teacher_server import Reply, TeacherServer, refuses, says

ROOT = Path(__file__).parents[2]
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}


def states(n: int, **more: Any) -> list[TraceState]:
    return [
        {
            "state_id": f"s{i}",
            "state_messages": [{"role": "user", "content": f"state {i}"}],
            "student_action": "no",
            **more,
        }
        for i in range(n)
    ]  # type: ignore[misc]


def teacher(server: TeacherServer, model: str = "m", **more: Any) -> Teacher:
    return Teacher(
        model,
        **{"prompt_usd": 1.0, "completion_usd": 2.0, "base_url": server.url, "key_env": None, "max_tokens": 100} | more,
    )


def ask(asked: list[TraceState], teachers: list[Teacher], usd: float = 1.0, **more: Any) -> Replay:
    return asyncio.run(replay_trace(asked, teachers, usd, **{"progress": False} | more))


# The ceiling


def test_the_ceiling_holds_under_200_concurrent_requests_with_adversarial_prices(tmp_path: Path) -> None:
    """Every price an endpoint may charge within its own terms, said or unsaid, with failures that are charged too."""
    dice = random.Random(0)
    worst = 0.0

    def behave(body: dict[str, Any], n: int) -> Reply:
        nonlocal worst
        worst = worst or worst_cost_nano(teacher(server), body) / NANO
        price = dice.choice([0.0, 1e-9, worst / 3, worst])
        hidden = says("x", charge=price)
        hidden.body["usage"] = dice.choice(
            [None, {}, {"cost": float("nan")}, {"cost": -1.0}, {"cost": "free"}, {"cost": True}]
        )
        bad = [Reply(None), Reply("{"), refuses(500), refuses(502, status=200)]
        replies = [says("x", cost=price)] * 4 + [hidden, refuses(503)] + [replace(reply, charge=worst) for reply in bad]
        return replace(dice.choice(replies), after_s=0.1)

    with TeacherServer(behave) as server:
        ceiling = 150 * worst_cost_nano(teacher(server), request_body(teacher(server), states(1)[0])) / NANO
        replay = ask(states(300), [teacher(server)], ceiling, concurrency=200, tries=2, ledger=tmp_path / "l")
    assert server.most_in_the_air > 20
    assert 0 < server.charged <= replay.spent_usd + 1e-9
    assert replay.spent_usd <= ceiling
    assert replay.spent_usd > 0.9 * ceiling, "the ceiling must be used up, or it was never tested"
    assert replay.counts["at_ceiling"] > 0
    assert len(replay) == replay.counts["asked"] + replay.counts["failed"]


@pytest.mark.parametrize("factor", [1.01, 10.0, 1000.0])
def test_an_endpoint_that_charges_more_than_its_prices_is_asked_once(factor: float) -> None:
    with (
        TeacherServer(lambda body, n: says("x", cost=factor * worst_cost_nano(teacher(server), body) / NANO)) as server,
        pytest.raises(ReplayStopped, match=r"charged \$.*costs at most.*correct the teacher's prices") as stopped,
    ):
        ask(states(200), [teacher(server)], 100.0, concurrency=200)
    assert len(server.bodies) == 1
    assert [a["action"] for a in stopped.value.replay] == ["x"], "what was paid for is kept"


def test_an_endpoint_that_turns_dishonest_has_few_requests_in_hand() -> None:
    def behave(body: dict[str, Any], n: int) -> Reply:
        fair = worst_cost_nano(teacher(server), body) / NANO
        return says("x", cost=fair / 10 if n < 8 else fair * 50)

    with TeacherServer(behave) as server, pytest.raises(ReplayStopped, match="correct the teacher's prices"):
        ask(states(200), [teacher(server)], 100.0, concurrency=200)
    assert 9 <= len(server.bodies) <= 8 + 9


def test_a_request_that_does_not_fit_is_never_sent() -> None:
    with TeacherServer(lambda body, n: says("x", cost=0.0)) as server:
        replay = ask(states(3), [teacher(server)], 1e-6)
    assert (server.bodies, len(replay), replay.counts["at_ceiling"]) == ([], 0, 3)


def test_an_answer_gives_back_what_was_held() -> None:
    """Room for one worst case at a time, and 20 cheap answers fit one after the other."""
    with TeacherServer(lambda body, n: says("x", cost=1e-7)) as server:
        one = worst_cost_nano(teacher(server), request_body(teacher(server), states(1)[0])) / NANO
        replay = ask(states(20), [teacher(server)], one * 1.5, concurrency=20)
    assert len(replay) == 20 and server.most_in_the_air == 1


def test_the_worst_case_has_a_token_for_every_byte() -> None:
    text = "żółć 🙂 \u0000 x" * 40
    body = request_body(teacher_at(1.0, 0.0), {**states(1)[0], "state_messages": [{"role": "user", "content": text}]})
    assert worst_cost_nano(teacher_at(1.0, 0.0), body) >= (len(text.encode()) + 1024) * 1000
    with_tools = body | {"tools": [TOOL]}
    extra = worst_cost_nano(teacher_at(1.0, 0.0), with_tools) - worst_cost_nano(teacher_at(1.0, 0.0), body)
    assert extra >= (len(json.dumps(TOOL)) - len("null")) * 1000
    assert worst_cost_nano(teacher_at(0.0, 2.0), body) == 2 * 2048 * 1000


def teacher_at(prompt_usd: float, completion_usd: float) -> Teacher:
    return Teacher("m", prompt_usd, completion_usd, key_env=None)


# One call


def test_cost_latency_model_and_attempts_are_in_each_action() -> None:
    with TeacherServer(lambda body, n: replace(says("x", cost=0.00012), after_s=0.05)) as server:
        (action,) = ask(states(1), [teacher(server)])
    assert action["cost_usd"] == pytest.approx(0.00012) and not action["estimated"]
    assert action["seconds"] >= 0.05 and action["attempts"] == 1 and action["model"] == "served"


def test_without_a_stated_cost_the_tokens_are_priced() -> None:
    with TeacherServer(lambda body, n: says("x")) as server:
        (action,) = ask(states(1), [teacher(server)])
    assert action["estimated"] and action["cost_usd"] == pytest.approx((10 * 1 + 2 * 2) / 1e6)


def test_with_a_key_of_your_own_the_provider_is_counted_too() -> None:
    reply = says("x", cost=0.00001)
    reply.body["usage"] |= {"is_byok": True, "cost_details": {"upstream_inference_cost": 0.0001}}
    with TeacherServer(lambda body, n: reply) as server:
        assert ask(states(1), [teacher(server)]).spent_usd == pytest.approx(0.00011)


@pytest.mark.slow
def test_retry_after_holds_for_the_whole_teacher() -> None:
    arrivals: list[float] = []

    def behave(body: dict[str, Any], n: int) -> Reply:
        arrivals.append(time.monotonic())
        return refuses(429, Retry_After="0.8") if n == 1 else replace(says("x", cost=1e-6), after_s=0.25)

    with TeacherServer(behave) as server:
        replay = ask(states(6), [teacher(server)], concurrency=2)
    assert len(replay) == 6 and len(arrivals) == 7
    assert arrivals[3] - arrivals[1] >= 0.8, "the other call, answered after 0.25 s, does not go on asking"
    assert replay.spent_usd == pytest.approx(6e-6), "a 429 is free"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("Thu, 01 Jan 1970 00:00:10 GMT", 10.0), ("soon", None), ("nan", None)],
)
def test_both_forms_of_retry_after(value: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": value}, now=0.0) == seconds


OK = says("x", cost=1e-6).body
TABLE = [
    # status, body, headers -> verdict, nano-dollars (None: the worst case)
    (200, OK, {}, "answer", 1000),
    (200, {**OK, "usage": None}, {}, "answer", None),
    (200, {"error": {"code": 502, "message": "upstream"}}, {}, "again", None),
    (200, {"error": {"code": 429, "message": "slow"}, "usage": {"cost": 0}}, {}, "again", 0),
    (200, {"error": {"code": "weird"}}, {}, "again", None),
    (200, {"error": "overloaded"}, {}, "again", None),
    (200, {"error": {"code": 402, "message": "no credits"}}, {}, "stop", None),
    (200, {"error": {"code": 400, "message": "too long"}}, {}, "failed", None),
    (200, {"choices": []}, {}, "again", None),
    (200, {"choices": [{"message": {"content": None}}]}, {}, "failed", None),
    (200, {"choices": [{"finish_reason": "error", "message": {"content": "par"}}]}, {}, "again", None),
    (200, [], {}, "again", None),
    (200, "{", {}, "again", None),
    (200, "<!doctype html><html>", {}, "stop", None),
    (404, "<html>not here</html>", {}, "stop", 0),
    (502, "<html>bad gateway</html>", {}, "again", None),
    (503, {}, {"retry-after": "1"}, "again", 0),
    (402, {"error": {"message": "credits"}}, {}, "stop", 0),
    (402, {"error": {"message": "in flight"}}, {"retry-after": "1"}, "again", 0),
    (401, {"error": {"message": "key"}}, {}, "stop", 0),
    (403, {"error": {"message": "input was flagged"}}, {}, "failed", 0),
    (400, {"error": {"message": "context"}}, {}, "failed", 0),
    (408, {}, {}, "again", None),
    (301, "", {}, "stop", 0),
]


@pytest.mark.parametrize(("status", "body", "headers", "verdict", "cost"), TABLE)
def test_how_a_response_reads(status: int, body: Any, headers: dict[str, str], verdict: str, cost: int | None) -> None:
    text = body if isinstance(body, str) else json.dumps(body)
    reading = read_response(DEFAULT_TEACHERS[0], status, headers, text, now=0.0)
    assert (reading.verdict, reading.cost_nano) == (verdict, cost), reading


def test_tool_calls_go_out_and_come_back() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}
    seen = {"role": "assistant", "tool_calls": [{"function": {"name": "cat", "arguments": {"path": "a"}}}]}
    asked = states(1, tools=[TOOL])
    asked[0]["state_messages"] += [seen, {"role": "tool", "content": "text", "reward": 1}]
    with TeacherServer(lambda body, n: says("", cost=0.0, tool_calls=[call])) as server:
        (action,) = ask(asked, [teacher(server)])
    assert action["action"] == '<tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call>'
    sent = server.bodies[0]
    assert sent["tools"] == [TOOL] and "provider" not in sent
    assert sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"path": "a"}'
    assert sent["messages"][2] == {
        "role": "tool",
        "content": "text",
        "tool_call_id": sent["messages"][1]["tool_calls"][0]["id"],
    }


def test_openrouter_is_told_our_prices() -> None:
    body = request_body(DEFAULT_TEACHERS[1], states(1)[0])
    assert body["provider"] == {"max_price": {"prompt": 1.25, "completion": 10.0}}
    assert [t.base_url for t in DEFAULT_TEACHERS] == [OPENROUTER] * 3


# What stops a replay


@pytest.mark.parametrize(
    ("reply", "says_what"),
    [
        (refuses(402, "insufficient credits"), "402 insufficient credits"),
        (refuses(401, "no such key"), "401 no such key"),
        (refuses(404, "no such model"), "404 no such model"),
        (Reply("<html>log in</html>"), "HTML instead of JSON.*Does base_url end in /v1"),
    ],
)
def test_what_cannot_work_stops_after_one_request(reply: Reply, says_what: str) -> None:
    with TeacherServer(lambda body, n: reply) as server, pytest.raises(ReplayStopped, match=says_what):
        ask(states(200), [teacher(server)], 100.0, concurrency=200)
    assert len(server.bodies) == 1


def test_credits_that_run_out_keep_what_was_paid_and_resume(tmp_path: Path) -> None:
    credits = [5]

    def behave(body: dict[str, Any], n: int) -> Reply:
        credits[0] -= 1
        return says("x", cost=1e-6) if credits[0] >= 0 else refuses(402, "top up")

    with TeacherServer(behave) as server:
        with pytest.raises(ReplayStopped, match=r"402 top up.*\n.*5 actions.*continues from there") as stopped:
            ask(states(12), [teacher(server)], ledger=tmp_path / "l", concurrency=2)
        assert len(stopped.value.replay) == 5
        credits[0], before = 100, len(server.bodies)
        replay = ask(states(12), [teacher(server)], ledger=tmp_path / "l")
    assert len(replay) == 12 and replay.counts["from_ledger"] == 5 and len(server.bodies) - before == 7
    assert replay.spent_usd == pytest.approx(12e-6)


def test_an_endpoint_that_is_down_is_named() -> None:
    with TeacherServer(lambda body, n: says("x")) as server:
        gone = teacher(server)
    with pytest.raises(ReplayStopped, match=r"no connection to http://127.*tried 2 times: is the endpoint up"):
        ask(states(50), [gone], tries=2)


def test_a_missing_key_is_named_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(InnerError, match=r"OPENROUTER_API_KEY is not set. Run `export"):
        ask(states(1), list(DEFAULT_TEACHERS))


def test_the_key_is_sent_and_written_nowhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "sk-secret")
    with (
        caplog.at_level(0),
        TeacherServer(lambda body, n: refuses(401, "wrong key") if n else says("x", cost=1e-6)) as server,
        pytest.raises(ReplayStopped) as stopped,
    ):
        ask(states(2), [teacher(server, key_env="TEACHER_KEY")], ledger=tmp_path / "l")
    assert server.authorization == {"Bearer sk-secret"}
    assert "sk-secret" not in (tmp_path / "l").read_text() + str(stopped.value) + caplog.text


@pytest.mark.parametrize(
    ("change", "says_what"),
    [
        ({"usd": float("nan")}, "max_total_usd is nan"),
        ({"usd": -1.0}, "max_total_usd is -1"),
        ({"teachers": []}, "there are no teachers"),
        ({"twice": True}, "state_id 's0' is there 2 times"),
        ({"concurrency": 0}, "must be 1 or more"),
        ({"min_student_entropy": 0.5}, "1 of 1 states do not say how unsure"),
    ],
)
def test_bad_input_costs_nothing(change: dict[str, Any], says_what: str) -> None:
    asked = states(1) * (2 if change.pop("twice", False) else 1)
    with TeacherServer(lambda body, n: says("x")) as server, pytest.raises(InnerError, match=says_what):
        ask(asked, change.pop("teachers", [teacher(server)]), **change)
    assert server.bodies == []


def test_a_price_below_zero_is_refused() -> None:
    with pytest.raises(InnerError, match="USD per million tokens, 0 or more"):
        Teacher("m", prompt_usd=-1.0, completion_usd=0.0)


# The ledger

CHILD = """
import asyncio, sys
from inner import Teacher, replay_trace
from tests.inner.test_replay_teachers import states
t = [Teacher(m, 1.0, 2.0, base_url=sys.argv[1], key_env=None, max_tokens=100) for m in ("a", "b")]
asyncio.run(replay_trace(states(40), t, 1.0, ledger=sys.argv[2], concurrency=4, progress=False))
"""


def test_a_killed_replay_resumes_without_paying_twice(tmp_path: Path) -> None:
    import threading

    enough = threading.Event()

    def behave(body: dict[str, Any], n: int) -> Reply:
        if n == 30:
            enough.set()
        return replace(says(f"{body['model']} {n}", cost=1e-5), after_s=0.03)

    ledger = tmp_path / "ledger.jsonl"
    with TeacherServer(behave) as server:
        child = subprocess.Popen([sys.executable, "-c", CHILD, server.url, str(ledger)], cwd=ROOT)
        try:
            assert enough.wait(60)
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
        lines = [json.loads(line) for line in ledger.read_bytes().splitlines() if line.endswith(b"}")]
        paid = {line["call"] for line in lines if "back" in line}
        lost = {line["call"] for line in lines if "sent" in line} - paid
        assert len(paid) >= 20 and len(lost) <= 4
        before = len(server.bodies)
        teachers = [teacher(server, "a"), teacher(server, "b")]
        replay = ask(states(40), teachers, ledger=ledger, concurrency=4)
        assert len(server.bodies) - before == 80 - len(paid), "what is on disk is not asked again"
        again = ask(states(40), teachers, ledger=ledger)
        assert len(server.bodies) - before == 80 - len(paid)
    assert list(again) == list(replay) and len(replay) == 80
    assert again.counts["from_ledger"] == 80
    assert server.charged <= replay.spent_usd + 1e-9, "what was lost in the air is counted as spent"
    assert again.spent_usd == replay.spent_usd


def test_the_ceiling_is_over_all_lives_of_a_ledger(tmp_path: Path) -> None:
    with TeacherServer(lambda body, n: says("x", cost=1e-4)) as server:
        one = worst_cost_nano(teacher(server), request_body(teacher(server), states(1)[0])) / NANO
        first = ask(states(5), [teacher(server)], 5e-4 + one, ledger=tmp_path / "l")
        second = ask(states(100), [teacher(server)], 5e-4 + one, ledger=tmp_path / "l")
    assert len(first) == 5 and second.spent_usd <= 5e-4 + one and server.charged <= 5e-4 + one


def test_a_torn_last_line_is_cut_off_and_counted_as_spent(tmp_path: Path) -> None:
    with TeacherServer(lambda body, n: says("x", cost=1e-4)) as server:
        ask(states(2), [teacher(server)], ledger=tmp_path / "l", concurrency=1)
        whole = (tmp_path / "l").read_bytes()
        (tmp_path / "l").write_bytes(whole[:-9])
        replay = ask(states(2), [teacher(server)], ledger=tmp_path / "l")
        assert list(ask(states(2), [teacher(server)], ledger=tmp_path / "l")) == list(replay)
    assert len(server.bodies) == 3 and len(replay) == 2
    assert replay.spent_usd > 3e-4, "the answer that was lost is counted at its worst case"


def test_a_damaged_ledger_is_named(tmp_path: Path) -> None:
    (tmp_path / "l").write_text('{"sent": 1, "call": "c", "reserve_nano": 1}\nnonsense\n')
    with pytest.raises(InnerError, match=r"l, line 2 is not a ledger line: b'nonsense'"):
        Ledger(tmp_path / "l")


def test_two_replays_cannot_share_a_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    with pytest.raises(InnerError, match="another replay is writing"):
        Ledger(tmp_path / "l")
    ledger.close()
    Ledger(tmp_path / "l").close()


def test_an_empty_answer_that_was_paid_is_not_bought_again(tmp_path: Path) -> None:
    with TeacherServer(lambda body, n: says("", cost=1e-5)) as server:
        for _ in range(2):
            (action,) = ask(states(1), [teacher(server)], ledger=tmp_path / "l")
    assert len(server.bodies) == 1 and action["action"] == "" and "empty answer" in action.get("error", "")


def test_states_with_the_same_messages_are_one_call() -> None:
    asked = [{**states(1)[0], "state_id": name} for name in ("p", "q")]
    with TeacherServer(lambda body, n: says("x", cost=1e-5)) as server:
        replay = ask(asked, [teacher(server)])  # type: ignore[arg-type]
    assert len(server.bodies) == 1 and [a["state_id"] for a in replay] == ["p", "q"]


# Whom to ask


def test_only_unsure_states_are_asked() -> None:
    asked = states(4)
    for state, entropy in zip(asked, (0.1, 0.9, 0.5, 0.49), strict=True):
        state["student_entropy"] = entropy
    with TeacherServer(lambda body, n: says("x", cost=1e-6)) as server:
        replay = ask(asked, [teacher(server)], min_student_entropy=0.5)
    assert [a["state_id"] for a in replay] == ["s1", "s2"] and replay.counts["not_unsure"] == 2


def test_the_next_tier_is_asked_only_where_the_first_disagrees() -> None:
    cheap = {"state 0": "no", "state 1": "yes", "state 2": ""}
    with TeacherServer(
        lambda body, n: says(cheap[body["messages"][-1]["content"]] if body["model"] == "cheap" else "yes", cost=1e-6)
    ) as server:
        teachers = [teacher(server, "dear", tier=1), teacher(server, "cheap")]
        replay = ask(states(3), teachers)
    asked = [(a["state_id"], a["teacher"]) for a in replay]
    assert asked == [("s0", "cheap"), ("s1", "cheap"), ("s1", "dear"), ("s2", "cheap"), ("s2", "dear")]


@pytest.mark.parametrize(
    ("answers", "done"),
    [
        (["no"], True),
        (["no", "no"], True),
        (["yes"], False),
        (["yes", "yes"], True),
        (["yes", "no"], False),
        (["no", ""], False),
        ([], False),
    ],
)
def test_when_a_tier_settles_a_state(answers: list[str], done: bool) -> None:
    rows: Any = [{"teacher": str(i), "action": a} for i, a in enumerate(answers)]
    assert is_settled(states(1)[0], rows, 2) is done


def test_tiers_are_in_order() -> None:
    a, b = (replace(DEFAULT_TEACHERS[0], model=m, tier=t) for m, t in (("a", 5), ("b", 1)))
    assert tiers_of([a, b]) == [[b], [a]]


def test_the_bar_shows_dollars(capsys: pytest.CaptureFixture[str]) -> None:
    with TeacherServer(lambda body, n: says("x", cost=0.25)) as server:
        ask(states(2), [teacher(server, prompt_usd=1000.0)], 10.0, progress=True)
    assert "$0.50 of $10.00" in capsys.readouterr().err
