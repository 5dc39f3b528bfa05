"""Turns, errors, hints and the splice: pure functions on small examples."""

from typing import Any

import pytest

from inner import InnerError
from inner.channels.spans import HintSplicer, Turn, model_turns, read_turns, splice_hint
from inner.data.order import Share, prompt_order, window_starts
from inner.replay.states import error_record
from inner.train.metric_means import MetricMeans

FAILED = "{'error': 'Tool t0_1 not found.'}"


def test_model_turns() -> None:
    assert model_turns([1, 1, 0, 0, 1]) == [(0, 2), (4, 5)]
    assert model_turns([0, 1]) == [(1, 2)]
    assert model_turns([]) == []


def error_text(content: object) -> str | None:
    record = error_record(content)
    return None if record is None else str(record["error"])


def test_error_text() -> None:
    assert error_text(FAILED) == "Tool t0_1 not found."
    assert error_text(str({"error": 'it\'s "odd"'})) == 'it\'s "odd"'  # quoted the other way round by repr
    assert error_text("7") is None
    assert error_text("{'error': oops") is None  # only looks like one
    assert error_text('{"error": "no such id"}') == "no such id"  # JSON
    assert error_text('{"error": null, "result": 3}') is None
    assert error_text("Error: user not found") == "Error: user not found"  # a tool that reports instead of raising
    assert error_text("Error rate: 3 %") is None
    assert error_text([{"type": "image"}]) is None
    for most in ("-" * 99_999 + "1}", "0x" + "f" * 5000 + "}"):  # beyond what Python parses, and what it prints
        assert error_text("{'error': " + most) is None
    assert error_text('{"error": ' + "[" * 99_999) is None


def test_turns_get_the_error_of_their_own_call() -> None:
    messages = [
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "8"},
        {"role": "tool", "content": FAILED},
        {"role": "assistant", "content": "7"},
    ]
    mask = [1, 1, 0, 1, 1, 1, 0, 0, 1]
    error = "Tool t0_1 not found."
    assert read_turns(mask, messages) == [Turn(0, 2), Turn(3, 6, error), Turn(8, 9)]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_failed_turn_carries_what_a_hint_needs() -> None:
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call("ls")]},
        {"role": "tool", "name": "ls", "content": "a b"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call("late"), call("cat", path="a"), call("cat", path="b")],
        },
        {"role": "tool", "name": "cat", "content": "text"},
        {"role": "tool", "name": "cat", "content": str({"error": "Gone.", "error_kind": "refused"})},
        {"role": "tool", "name": "late", "content": FAILED},  # an async tool: its result comes last
    ]
    fine, failed = read_turns([1, 0, 1], messages)
    assert fine == Turn(0, 1) and not fine.seen
    assert failed == Turn(2, 3, "Gone.") and failed.seen["error_kind"] == "refused"
    assert '"name": "cat"' in failed.seen["student_action"]
    assert failed.seen["state_messages"] == messages[:2]
    (late,) = read_turns([1], [messages[2], messages[5]])
    assert '"name": "late"' in late.seen["student_action"]
    unsupported = {"role": "assistant", "tool_calls": [{"type": "custom", "name": "x"}]}
    (turn,) = read_turns([1], [unsupported, {"role": "tool", "name": "x", "content": FAILED}])
    assert turn.error and turn.seen["student_action"] == ""


def test_turn_whose_answer_was_cut_away_still_has_its_error() -> None:
    messages = [{"role": "assistant"}, {"role": "tool", "content": FAILED}]
    assert read_turns([1, 1, 0, 0], messages) == [Turn(0, 2, "Tool t0_1 not found.")]


def test_splice_moves_the_opening_behind_the_hint() -> None:
    assert splice_hint([1, 2, 9], [5, 6], [9], [7, 8]) == [1, 2, 5, 6, 9, 7, 8]
    assert splice_hint([1, 2], [5], [9], [7]) == [1, 2, 5, 9, 7]  # the context did not end with the opening


def test_a_splicer_reads_the_template_or_says_why_it_cannot() -> None:
    marks = {"user": 1, "system": 2, "assistant": 3}

    def render(messages: list[dict[str, Any]], opened: bool) -> list[int]:
        if any(m["role"] == "system" for m in messages[1:]):
            raise ValueError("system must come first")  # many templates do
        return [i for m in messages for i in (marks[m["role"]], len(m["content"]), 9)] + [3] * opened

    splice = HintSplicer(render)
    assert (splice.opening, splice.role) == ([3], "user")
    assert splice([1, 1, 9, 3], "use b", [7, 8, 9]) == [1, 1, 9, 1, 5, 9, 3, 7, 8, 9]
    told = list[str]()
    write = HintSplicer(lambda messages, opened: told.append(messages[-1]["content"]) or render(messages, opened))
    write.hint_ids("half \ud800")
    assert "half ?" in told  # no tokenizer takes half a character
    with pytest.raises(InnerError, match=r"takes no hint between a message and the assistant's turn[.]"):
        HintSplicer(lambda messages, opened: [len(messages), *render(messages[:1], opened)])
    with pytest.raises(InnerError, match=r"takes no hint .* \(KeyError: 'tools'\)[.] Use another"):
        HintSplicer(lambda messages, opened: {}["tools"])


def test_a_hint_is_spliced_under_templates_that_open_no_turn_and_let_roles_alternate() -> None:
    """Before: refused. Mistral's, Gemma's, Phi-3's and Command R's are like this, 34 of 193 real templates."""
    marks = {"user": [1], "assistant": [2]}

    def mistral(messages: list[dict[str, Any]], opened: bool) -> list[int]:
        if [m["role"] for m in messages] != ["user", "assistant", "user"][: len(messages)]:
            raise ValueError("roles must alternate")
        return [0] + [i for m in messages for i in (*marks[m["role"]], len(m["content"]), 9)]

    splice = HintSplicer(mistral)
    assert (splice.opening, splice.role) == ([], "user")
    assert splice([0, 1, 1, 9], "use b", [7, 8, 9]) == [0, 1, 1, 9, 1, 5, 9, 7, 8, 9]

    def phi(messages: list[dict[str, Any]], opened: bool) -> list[int]:  # a closed chat ends with 5
        return [i for m in messages for i in (len(m["role"]), len(m["content"]))] + ([2] if opened else [5])

    assert HintSplicer(phi)([4, 1, 2], "use b", [7]) == [4, 1, 6, 5, 2, 7]


def test_a_hint_stands_before_the_part_of_the_opening_that_the_context_has() -> None:
    assert splice_hint([1, 2, 3, 4], [9], [3, 4, 5], [7]) == [1, 2, 9, 3, 4, 7]
    assert splice_hint([1, 2, 3, 4, 5], [9], [3, 4, 5], [7]) == [1, 2, 9, 3, 4, 5, 7]
    assert splice_hint([1, 2], [9], [3, 4, 5], [7]) == [1, 2, 9, 3, 4, 5, 7]


def test_prompt_order_is_a_permutation_per_epoch_and_pure() -> None:
    at = prompt_order(7, Share(3))
    line = [at(i) for i in range(21)]
    assert sorted(line[:7]) == sorted(line[7:14]) == list(range(7))
    assert line[:7] != line[7:14]
    fresh = prompt_order(7, Share(3))
    assert [fresh(i) for i in reversed(range(21))] == line[::-1]
    other = prompt_order(7, Share(4))
    assert [other(i) for i in range(21)] != line


@pytest.mark.parametrize("rows", [7, 9, 2, 1])
def test_replicas_read_every_row_of_an_epoch_between_them_and_none_twice(rows: int) -> None:
    shares = [Share(seed=3, index=i, of=3) for i in range(3)]
    size = shares[0].size(rows)
    for epoch in range(4):
        read = [prompt_order(rows, share)(epoch * size + i) for i in range(size) for share in shares]
        assert set(read) == set(range(rows))
        assert len(read) - rows < 3  # filled up from the front
        assert sorted(read[:rows]) == list(range(rows))


def test_a_share_is_another_one_in_every_epoch() -> None:
    at = prompt_order(300, Share(seed=3, index=1, of=3))
    epochs = [{at(100 * epoch + i) for i in range(100)} for epoch in range(8)]
    assert len(set.union(*epochs)) > 280  # 300 · (1 - (2/3)⁸) = 288 expected


def test_window_starts_reach_both_ends() -> None:
    drawn = [int(s) for i in range(200) for s in window_starts(12, 10, 4, seed=0, index=i)]
    assert set(drawn) == {0, 1, 2}
    assert list(window_starts(99, 5, 3, 1, 7)) == list(window_starts(99, 5, 3, 1, 7))
    assert list(window_starts(999, 5, 3, 1, 7)) != list(window_starts(999, 5, 3, 1, 8))


def test_tally_means_counts_and_forgets() -> None:
    means = MetricMeans()
    for value in (1.0, 3.0, float("nan")):
        means.note("loss", value)
    means.count("samples", 8)
    means.count("samples", 8)
    assert means.pop_metrics() == {"loss": 2.0, "samples": 16}
    assert means.pop_metrics() == {"samples": 0}
