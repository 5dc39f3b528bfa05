"""Turns, errors, hints and the splice: pure functions on small examples."""

from inner.hints import error_kind, failed_tool, gate, template_hint
from inner.order import prompt_order, window_starts
from inner.spans import Turn, error_text, model_turns, read_turns, splice_hint
from inner.tally import Tally

FAILED = "{'error': 'Tool t0_1 not found.'}"
SCHEMAS = [
    {"function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}},
    {"function": {"name": "halt", "parameters": {"properties": {}}}},
]


def test_model_turns() -> None:
    assert model_turns([1, 1, 0, 0, 1]) == [(0, 2), (4, 5)]
    assert model_turns([0, 1]) == [(1, 2)]
    assert model_turns([]) == []


def test_error_text() -> None:
    assert error_text(FAILED) == "Tool t0_1 not found."
    assert error_text(str({"error": 'it\'s "odd"'})) == 'it\'s "odd"'  # quoted the other way round by repr
    assert error_text("7") is None
    assert error_text("{'error': oops") is None  # only looks like one
    assert error_text([{"type": "image"}]) is None


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


def test_turn_whose_answer_was_cut_away_still_has_its_error() -> None:
    messages = [{"role": "assistant"}, {"role": "tool", "content": FAILED}]
    assert read_turns([1, 1, 0, 0], messages) == [Turn(0, 2, "Tool t0_1 not found.")]


def test_splice_moves_the_opening_behind_the_hint() -> None:
    assert splice_hint([1, 2, 9], [5, 6], [9], [7, 8]) == [1, 2, 5, 6, 9, 7, 8]
    assert splice_hint([1, 2], [5], [9], [7]) == [1, 2, 5, 9, 7]  # the context did not end with the opening


def test_hints_by_kind() -> None:
    assert error_kind("Tool x not found.") == "unknown_tool"
    assert template_hint("Tool x not found.", SCHEMAS) == "The tool x does not exist. Available tools: add, halt."
    wrong = "Env.add() got an unexpected keyword argument 'c'"
    assert template_hint(wrong, SCHEMAS) == "The tool add takes: a (integer), b (integer)."
    assert template_hint("Env.halt() takes 1 positional argument but 2", SCHEMAS) == "The tool halt takes: nothing."
    assert template_hint("boom.", SCHEMAS) == "The last call failed: boom. Do something else."
    assert template_hint("Tool x not found.", []) is None  # nothing to recommend


def test_gate_keeps_only_hints_that_change_the_action() -> None:
    assert failed_tool("Tool t3_1 not found.") == "t3_1"
    assert gate("hint use t3_6", "t3_6", "Tool t3_1 not found.") == "hint use t3_6"
    assert gate("hint use t3_1", "t3_1", "Tool t3_1 not found.") is None
    assert gate("hint use t3_1", "t3_1", "Tool t3_10 not found.") is not None  # a name, not a prefix


def test_prompt_order_is_a_permutation_per_epoch_and_pure() -> None:
    at = prompt_order(7, seed=3)
    line = [at(i) for i in range(21)]
    assert sorted(line[:7]) == sorted(line[7:14]) == list(range(7))
    assert line[:7] != line[7:14]
    fresh = prompt_order(7, seed=3)
    assert [fresh(i) for i in reversed(range(21))] == line[::-1]
    other = prompt_order(7, seed=4)
    assert [other(i) for i in range(21)] != line


def test_window_starts_reach_both_ends() -> None:
    drawn = [int(s) for i in range(200) for s in window_starts(12, 10, 4, seed=0, index=i)]
    assert set(drawn) == {0, 1, 2}
    assert list(window_starts(99, 5, 3, 1, 7)) == list(window_starts(99, 5, 3, 1, 7))
    assert list(window_starts(999, 5, 3, 1, 7)) != list(window_starts(999, 5, 3, 1, 8))


def test_tally_means_counts_and_forgets() -> None:
    tally = Tally()
    for value in (1.0, 3.0, float("nan")):
        tally.note("loss", value)
    tally.count("samples", 8)
    tally.count("samples", 8)
    assert tally.harvest() == {"loss": 2.0, "samples": 16}
    assert tally.harvest() == {"samples": 0}
