"""Actions that are the same, and the rules that make pairs: tables of cases."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trl.data_utils import maybe_extract_prompt

from inner import (
    DPOPair,
    InnerError,
    TraceState,
    TraceWarning,
    extract_dpo_pairs,
    load_pairs,
    load_states,
    pair_outcomes,
    save_pairs,
    save_states,
)
from inner.replay.actions import action_key, action_message, action_text
from inner.replay.pairs import training_pairs
from inner.replay.teachers import TeacherAction
from inner.replay.wire import wire_messages
from tests.support.examples import examples

USER = [{"role": "user", "content": "Fix the test."}]


def call(name: str, words: str = "", **arguments: Any) -> str:
    function = {"name": name, "arguments": arguments}
    return action_text({"content": words, "tool_calls": [{"function": function}]})


def state(action: str = "no", state_id: str = "s") -> TraceState:
    return {"state_id": state_id, "state_messages": USER, "student_action": action}


def teacher_actions(*actions: str, state_id: str = "s") -> list[TeacherAction]:
    common: Any = {"cost_usd": 0.0, "estimated": True, "seconds": 0.0, "attempts": 1, "model": None}
    return [{"state_id": state_id, "teacher": f"t{i}", "action": action, **common} for i, action in enumerate(actions)]


# When two actions are the same

SAME = [
    (call("ls", path="."), call("ls", "Let me look around.", path=".")),  # the words around a call are not the action
    (call("f", a=1, b=2), call("f", b=2, a=1)),
    (call("f", a=1), call("f", a=1.0)),
    (call("f", a=1), call("f", a=1, b=None)),
    (call("f", a={"x": [1.0]}), call("f", a={"x": [1]})),
    (call("f"), '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
    (call("f", a="x"), call("f", a=" x ")),
    ("yes", "  yes \n"),
    ("a  b\r\nc", "a b\nc"),
    ("é", "e\u0301"),
]
DIFFERENT = [
    (call("ls", path="."), call("ls", path="/")),
    (call("ls"), call("cat")),
    (call("f", a=1), call("f", a="1")),
    (call("f", a=True), call("f", a=1)),
    (call("f", a=1), call("f", a=1) + "\n" + call("f", a=1)),
    (call("f"), "f"),
    ("yes", "Yes"),
    ("if x:\n  y", "if x:\ny"),
    ("<tool_call>{broken</tool_call>", "<tool_call>{broken }</tool_call> "),
]


@pytest.mark.parametrize(("a", "b"), SAME)
def test_same_action(a: str, b: str) -> None:
    assert action_key(a) == action_key(b)


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_different_action(a: str, b: str) -> None:
    assert action_key(a) != action_key(b)


SCALAR = st.none() | st.booleans() | st.integers() | st.text()
JSON = st.recursive(SCALAR, lambda part: st.lists(part) | st.dictionaries(st.text(), part), max_leaves=6)


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow])
@given(st.text(), st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), JSON)), max_size=3))
def test_an_action_is_read_back_as_it_was_written(words: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    functions = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    text = action_text({"content": words, "tool_calls": functions})
    back = action_message(text)
    assert action_text(back) == text
    if "<tool_call>" not in words:
        assert [c["function"] for c in back.get("tool_calls", [])] == [c["function"] for c in functions]


def test_arguments_that_are_no_json_are_kept_as_text() -> None:
    text = action_text({"content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}]})
    assert action_message(text)["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": '}


def test_each_tool_answer_on_the_wire_names_its_call() -> None:
    calls = [{"function": {"name": n, "arguments": {}}} for n in "ab"]
    answers = [{"role": "tool", "content": text} for text in ("1", "2")]
    wired = wire_messages([*USER, {"role": "assistant", "tool_calls": calls}, *answers])
    ids = [c["id"] for c in wired[1]["tool_calls"]]
    assert len(set(ids)) == 2 and [m["tool_call_id"] for m in wired[2:]] == ids


# The rules

X, X2, Y, Z = call("ls", path="."), call("ls", "I look.", path="."), call("cat", path="a"), call("rm", path="b")
RULES = [
    # student, teachers, threshold -> outcome, chosen, agreeing
    (Y, [X, X2, Z], 2, "pair", X, 2),
    (Y, [X, X, X], 2, "pair", X, 3),
    (Y, [Z, X2, X], 2, "pair", X2, 2),  # the first agreeing teacher's own words
    (Y, [X, Z, Y], 2, "tie", None, 0),  # all different
    (Y, [X, X, Y], 2, "pair", X, 2),
    (Y, [Y, Y, X], 2, "agrees_with_student", None, 0),
    (Y, [Y, Y, Y], 2, "agrees_with_student", None, 0),
    (X2, [X, X, X], 3, "agrees_with_student", None, 0),  # the student said more, and did the same
    (Y, [X, X, Z], 3, "below_threshold", None, 0),
    (Y, [X, X, Z, Z], 2, "tie", None, 0),
    (Y, [X, X, Y, Y], 2, "tie", None, 0),
    (Y, [X, "", ""], 2, "below_threshold", None, 0),  # a teacher that failed has no vote
    (Y, ["", "", ""], 2, "no_answer", None, 0),
    (Y, ["  \n", "  \n"], 2, "no_answer", None, 0),
    ("", [X, X], 2, "no_student_action", None, 0),
    (Y, [X], 1, "pair", X, 1),
    (Y, [X, Z], 1, "tie", None, 0),
    ("(b)", ["(c)", "(c)", "(a)"], 2, "pair", "(c)", 2),
]


@pytest.mark.parametrize(("student", "teachers", "threshold", "outcome", "chosen", "agreeing"), RULES)
def test_the_rules(
    student: str, teachers: list[str], threshold: int, outcome: str, chosen: str | None, agreeing: int
) -> None:
    states, actions = [state(student)], teacher_actions(*teachers)
    assert pair_outcomes(states, actions, threshold) == {outcome: 1}
    expected: list[DPOPair] = []
    if chosen is not None:
        head: Any = {"state_id": "s", "state_messages": USER, "n_teachers_agreeing": agreeing}
        expected = [{**head, "chosen": chosen, "rejected": student}]
    assert extract_dpo_pairs(states, actions, agreement_threshold=threshold) == expected


def test_a_teacher_votes_once() -> None:
    twice = teacher_actions(X) + teacher_actions(X)
    assert pair_outcomes([state(Y)], twice + teacher_actions("", Z), 2) == {"tie": 1}


def test_tools_travel_with_the_pair() -> None:
    tools = [{"type": "function", "function": {"name": "ls"}}]
    (pair,) = extract_dpo_pairs([{**state(Y), "tools": tools}], teacher_actions(X, X))
    assert pair.get("tools") == tools


def test_weighted_consensus() -> None:
    weights = {"t0": 3.0, "t1": 1.0, "t2": 1.0}
    (pair,) = extract_dpo_pairs([state("no")], teacher_actions(X, Z, Z), 2, shape="weighted", teacher_weights=weights)
    assert (pair["chosen"], pair["n_teachers_agreeing"], pair.get("weight")) == (X, 1, pytest.approx(0.6))
    (counted,) = extract_dpo_pairs([state("no")], teacher_actions(X, Z, Z), 2)
    assert counted["chosen"] == Z and "weight" not in counted


@pytest.mark.parametrize(
    ("answers", "weight"),
    [([X, X], 1.0), ([X], 1.0), ([X, X, Z], 1 - (4 / 9) / (2 / 3)), ([X, X, Y, Z], 1 - (1 - 6 / 16) / (3 / 4))],
)
def test_variance_weight(answers: list[str], weight: float) -> None:
    (pair,) = extract_dpo_pairs([state("no")], teacher_actions(*answers), min(2, len(answers)), shape="variance")
    assert pair.get("weight") == pytest.approx(weight)


@pytest.mark.parametrize(
    ("change", "says_what"),
    [
        ({"agreement_threshold": 0}, "agreement_threshold is 0"),
        ({"agreement_threshold": 4}, "3 teachers have 3 votes together"),
        ({"agreement_threshold": float("nan")}, "agreement_threshold is nan"),
        ({"shape": "median"}, "choose count, weighted or variance"),
        ({"teacher_weights": {"t0": 1.0}}, "no weight for 't1'"),
        ({"teacher_weights": {"t0": 1.0, "t1": -1.0, "t2": 1.0}}, "t1 = -1.0 is not a weight"),
    ],
)
def test_bad_rules_are_refused(change: dict[str, Any], says_what: str) -> None:
    with pytest.raises(InnerError, match=says_what):
        extract_dpo_pairs([state()], teacher_actions(X, X, Z), **change)


def test_an_answer_for_another_trace_is_refused() -> None:
    with pytest.raises(InnerError, match="state 'other', which is not among the 1 states"):
        extract_dpo_pairs([state()], teacher_actions(X, X, state_id="other"))


# On disk


def test_states_and_pairs_come_back(tmp_path: Path) -> None:
    states = [state("é\n", "a"), {**state(X, "b"), "reward": 1.0, "error": None, "student_entropy": 0.5}]
    pairs = extract_dpo_pairs(states, teacher_actions(Y, Y, state_id="a") + teacher_actions(Y, Y, state_id="b"))
    save_states(states, tmp_path / "s.jsonl")
    save_pairs(pairs, tmp_path / "p.jsonl")
    assert load_states(tmp_path / "s.jsonl") == states
    assert load_pairs(tmp_path / "p.jsonl") == pairs and len(pairs) == 2


GOOD_PAIR = {"state_id": "s", "state_messages": USER, "chosen": "a b", "rejected": "c d", "n_teachers_agreeing": 2}
BAD = [
    ('{"state_id": "s"', "not JSON"),
    ("[]", "a pair must be an object"),
    (json.dumps(GOOD_PAIR | {"chosen": " "}), "chosen is ' ': it must be a text that is not empty"),
    (json.dumps(GOOD_PAIR | {"chosen": "c  d"}), "chosen and rejected are the same action"),
    (json.dumps(GOOD_PAIR | {"state_messages": []}), "there are no messages"),
    (json.dumps(GOOD_PAIR | {"state_messages": [{"content": "x"}]}), "message 0 has no role"),
]


@pytest.mark.parametrize(("line", "why"), BAD)
def test_a_bad_line_is_named_and_the_rest_is_kept(line: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(f"{json.dumps(GOOD_PAIR)}\n\n{line}\n{json.dumps(GOOD_PAIR)}\n")
    with pytest.warns(TraceWarning, match=rf"p\.jsonl, line 3: {why}"):
        assert load_pairs(file) == [GOOD_PAIR, GOOD_PAIR]


ASK, ONE, TWO = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
)
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, [ASK]),
        ({"prompt": [SYSTEM, ASK], "chosen": [ONE], "rejected": [TWO]}, [SYSTEM, ASK]),
        ({"prompt": [ASK], "chosen": ONE, "rejected": TWO}, [ASK]),
        ({"prompt": [ASK], "chosen": "a", "rejected": "b"}, [ASK]),
        ({"chosen": [SYSTEM, ASK, ONE], "rejected": [SYSTEM, ASK, TWO]}, [SYSTEM, ASK]),
        ({"prompt": "q", "prompt_id": "7", "chosen": [ASK, ONE], "rejected": [ASK, TWO], "score_chosen": 9}, [ASK]),
        ({"prompt": [ASK, ONE, ASK], "chosen": [ONE], "rejected": [TWO]}, [ASK, ONE, ASK]),
        ({"prompt": [ASK], "chosen": [ASK, ONE], "rejected": [ASK, TWO], "tools": '[{"type": "function"}]'}, [ASK]),
    ],
    ids=["texts", "messages", "objects", "mixed", "implicit", "ultrafeedback", "three turns", "both"],
)
def test_preference_data_of_the_field_is_read(row: dict[str, Any], messages: list[Any], tmp_path: Path) -> None:
    """Before: "there are no messages", for each dataset that TRL's DPOTrainer takes."""
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    for read in (load_pairs, training_pairs):
        (pair,) = read(tmp_path / "p.jsonl")
        assert (pair["state_messages"], pair["chosen"], pair["rejected"]) == (messages, "a", "b")
        assert pair["state_id"] == row.get("prompt_id", "'q'")
        assert pair.get("tools") == (json.loads(row["tools"]) if "tools" in row else None)
    if "prompt" not in row:
        assert maybe_extract_prompt(dict(row))["prompt"] == messages


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"chosen": "a", "rejected": "b"}, "no prompt; a pair has state_messages, chosen and rejected, or"),
        ({"question": "q", "answer": "a"}, "no 'chosen'; a pair has .*This row has 'question', 'answer'"),
        ({"prompt": "q", "chosen": [ONE, ASK, ONE], "rejected": [TWO]}, "chosen must have one .* has: assistant, user"),
        ({"prompt": "q", "chosen": [ONE], "rejected": [ASK]}, "rejected must have one message .* it has: user"),
        ({"prompt": "q", "chosen": [ONE], "rejected": []}, "rejected must have one message .* it has: none"),
        ({"prompt": "q", "chosen": ["a"], "rejected": "b"}, "neither a text nor messages"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "the same action"),
    ],
    ids=["no prompt", "other columns", "more turns", "a user", "no turn", "a list", "equal"],
)
def test_other_preference_data_is_refused_with_the_form_that_is_read(
    row: dict[str, Any], why: str, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InnerError, match=rf"p\.jsonl, line 1: .*{why}"):
        training_pairs(tmp_path / "p.jsonl")


def test_nothing_but_bad_lines_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("<html>\n")
    with (
        warnings.catch_warnings(),
        pytest.raises(InnerError, match=r"nothing in it could be used.*\n.*line 1: not JSON"),
    ):
        warnings.simplefilter("ignore")
        load_pairs(tmp_path / "p.jsonl")
    with pytest.raises(InnerError, match="there is no file"):
        load_pairs(tmp_path / "q.jsonl")
