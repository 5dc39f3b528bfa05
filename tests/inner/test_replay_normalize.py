"""DJNormalizer: the recipe's passes, what it says without data-juicer, and the real data-juicer where there is one.

DATA_JUICER_PYTHON=/path/to/python    an interpreter that has py-data-juicer, if this one has not
"""

import asyncio
import importlib.util
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from inner import (
    DJNormalizer,
    DPOPair,
    InnerError,
    Teacher,
    openhands_states,
    replay_and_normalize_trace,
    replay_and_normalize_trace_sync,
    swe_agent_states,
    tau_bench_states,
)
from inner.replay.normalize import INSTALL, RECIPES, PairsWarning, load_recipe, normalized_pair, pair_kind, passes_of
from tests.inner.test_replay_pairs import call
from tests.inner.test_replay_teachers import states
from tests.support.pins import pins
from tests.support.teacher_server import TeacherServer, says

GOOD = "read the failing test first, then run it with pytest -x to see the trace"
OTHER = "rewrite the whole file now"
JUICER = os.environ.get("DATA_JUICER_PYTHON") or (sys.executable if importlib.util.find_spec("data_juicer") else None)
real = pytest.mark.skipif(JUICER is None, reason=f"no data-juicer: {INSTALL}, or set DATA_JUICER_PYTHON")


def pair(chosen: str, rejected: str, name: str = "s", **more: Any) -> DPOPair:
    calls = [{"function": {"name": "f", "arguments": {name: [1]}}}]
    common: Any = {"state_id": name, "state_messages": [{"role": "user", "content": name, "tool_calls": calls}]}
    return {**common, "chosen": chosen, "rejected": rejected, "n_teachers_agreeing": 2, **more}


# The recipe


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_recipe_of_ours_ignores_digits(recipe: str) -> None:
    """Before: of six answers that differed in a number, data-juicer kept one."""
    (given,) = [op["document_deduplicator"] for op in load_recipe(recipe) if "document_deduplicator" in op]
    assert given["ignore_non_character"] is False


def test_each_filter_runs_on_both_texts_in_passes_of_their_own() -> None:
    passes = passes_of(load_recipe("default"))
    assert [(key, [next(iter(op)) for op in ops]) for key, ops in passes] == [
        ("chosen", ["text_length_filter", "words_num_filter", "special_characters_filter", "document_deduplicator"]),
        ("rejected", ["text_length_filter", "words_num_filter", "special_characters_filter"]),
    ]
    limits = {name: arguments for op in passes[1][1] for name, arguments in op.items()}
    assert limits["text_length_filter"] == {"min_len": 8, "max_len": 32000}
    assert limits["words_num_filter"] == {"lang": "en", "tokenization": False, "min_num": 2, "max_num": 4096}
    assert limits["special_characters_filter"]["max_ratio"] == 0.5


def test_a_text_key_of_the_recipe_is_kept() -> None:
    process = [{"text_length_filter": {"text_key": "rejected"}}, {"document_deduplicator": {"text_key": "pair"}}]
    assert passes_of(process) == [("rejected", [process[0]]), ("pair", [process[1]])]


@pytest.mark.parametrize(
    ("text", "says_what"),
    [
        ("process: [", "has no `process` list"),
        ("ops: []", "has no `process` list"),
        ("process: []", "`process` is \\[\\]"),
        ("process: [words_num_filter]", "Put one `- operator: {arguments}` per line"),
        (
            "process: [{words_num_filter: {text_key: text}}]",
            "text_key 'text'. Use one of: chosen, rejected, pair",
        ),
    ],
)
def test_a_bad_recipe_is_refused_at_construction(text: str, says_what: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(InnerError, match=says_what):
        DJNormalizer(tmp_path / "r.yaml")


def test_an_unknown_recipe_shows_the_built_in_ones() -> None:
    with pytest.raises(InnerError, match=r"no such file\. Built in: auto, default, calls"):
        DJNormalizer("defualt")


# Kinds, and what is said when nothing is left


CALLS = [pair(call("t3", a=i), call("t4", a=i), f"s{i}") for i in range(30)]
FENCED = pair("Look:\n```\nls\n```", "Look:\n```\ncat a\n```", "f", action_form="fenced")


def test_the_kind_of_a_pair() -> None:
    assert pair_kind(CALLS[0]) == pair_kind(pair(GOOD, call("t3"))) == pair_kind(FENCED) == "calls"
    assert pair_kind(pair(GOOD, OTHER)) == pair_kind(pair("```\nls\n```", OTHER)) == "prose"


FAKE = """
import json, sys
kept = [
    {"rows": [r for r in part["rows"] if len(part["passes"][0][1]) < 4],
     "dropped": {"words_num_filter of chosen": [r["i"] for r in part["rows"] if len(part["passes"][0][1]) >= 4]}}
    for part in json.load(open(sys.argv[-2]))
]
json.dump(kept, open(sys.argv[-1], "w"))
"""


@pytest.fixture
def prose_drops_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Python that stands for data-juicer: what goes to the prose recipe is dropped, what goes to `calls` stays."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{FAKE}")
    python.chmod(0o755)
    return str(python)


def test_each_pair_goes_to_the_recipe_of_its_kind(prose_drops_all: str) -> None:
    mixed = [pair(GOOD, OTHER, "p"), *CALLS, FENCED]
    normalizer = DJNormalizer(python=prose_drops_all)
    assert [p["state_id"] for p in normalizer.normalize(mixed)] == [p["state_id"] for p in mixed[1:]]
    assert normalizer.counts == {"kept": 31, "dropped": 1}
    assert normalizer.dropped["words_num_filter of chosen"] == 1
    assert normalizer.left_out == {"words_num_filter of chosen": ["p"]}


def test_a_recipe_that_keeps_nothing_says_so_aloud_with_counts_and_the_next_step(prose_drops_all: str) -> None:
    """Before: one line of log.info, and an empty list."""
    with pytest.warns(PairsWarning) as caught:
        assert DJNormalizer("default", python=prose_drops_all).normalize(CALLS) == []
    assert str(caught[0].message) == (
        "data-juicer kept 0 of 30 pairs: words_num_filter of chosen dropped 30.\n  next: 30 of them are tool calls or "
        "commands, and this recipe is for prose: use recipe='auto'."
    )
    with pytest.warns(PairsWarning, match=r"kept 0 of 11 pairs: .*\n.*copy a recipe.yaml"):
        DJNormalizer(python=prose_drops_all).normalize([pair(GOOD, OTHER, f"s{i}") for i in range(11)])


def test_no_pairs_at_all_is_no_news(prose_drops_all: str, recwarn: pytest.WarningsRecorder) -> None:
    assert DJNormalizer(python=prose_drops_all).normalize([]) == [] and not recwarn.list


def test_a_python_may_be_a_path_from_the_folder_that_you_are_in(
    prose_drops_all: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: data-juicer's process runs in a folder of its own, and found no `.venv/replaysim/bin/python` there."""
    python = Path(prose_drops_all)
    monkeypatch.chdir(python.parent.parent)
    assert DJNormalizer(python=f"{python.parent.name}/{python.name}").normalize(CALLS) == DJNormalizer(
        python=python
    ).normalize(CALLS)
    assert DJNormalizer(python="python3").python == "python3"  # a name is looked up on the PATH


# Both shapes


def test_both_shapes_and_everything_else_survive() -> None:
    given = pair(call("ls", path="."), OTHER, tools=[{"type": "function"}], weight=0.5)
    both = normalized_pair(given)
    assert {key: both[key] for key in given} == given
    (chosen,) = both["chosen_messages"]
    assert chosen["tool_calls"][0]["function"] == {"name": "ls", "arguments": {"path": "."}}
    assert both["rejected_messages"] == [{"role": "assistant", "content": OTHER}]


# Without data-juicer


def test_without_data_juicer_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InnerError, match=r"pip install 'serverless-diloco\[replaysim\]'"):
        DJNormalizer().normalize([pair(GOOD, OTHER)])


@pytest.mark.skipif(importlib.util.find_spec("data_juicer") is not None, reason="this Python has it")
def test_another_python_without_data_juicer_is_named(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    with pytest.raises(InnerError, match=r"python has no data-juicer: pip install 'serverless-diloco\[replaysim\]'"):
        DJNormalizer(python=tmp_path / "python").normalize([pair(GOOD, OTHER)])


def test_nothing_is_spent_before_data_juicer_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with TeacherServer(lambda body, n: says(GOOD, cost=1e-6)) as server:
        teachers = [Teacher(m, 1.0, 1.0, base_url=server.url, key_env=None) for m in "ab"]
        with pytest.raises(InnerError, match="replaysim"):
            asyncio.run(replay_and_normalize_trace(states(1), teachers, 1.0))
    assert server.bodies == []


# With it


@real
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_real_data_juicer_looks_at_both_texts() -> None:
    pairs = [
        pair(GOOD, OTHER, "s0"),
        pair("ok", OTHER, "s1"),  # chosen too short
        pair("%%%%$$$$ ####@@@@ !!!!", OTHER, "s2"),  # special characters
        pair(GOOD.upper(), "another rejected action here", "s3"),  # the same chosen again
        pair("check the schema before adding the migration", "x", "s4"),  # rejected too short
        pair("run the linter and then the tests", "averyveryverylongword", "s5"),  # rejected is one word
        pair("look at the traceback once more please", "$$$$$$$$ %%%%%%%%", "s6"),  # rejected is garbage
        pair("write a test that fails before the fix", OTHER, "s7"),
    ]
    normalizer = DJNormalizer(python=JUICER)
    kept = normalizer.normalize(pairs)
    assert kept == [normalized_pair(pairs[0]), normalized_pair(pairs[7])], [p["state_id"] for p in kept]
    assert normalizer.counts == {"kept": 2, "dropped": 6}
    assert +normalizer.dropped == {
        "text_length_filter of chosen": 1,
        "words_num_filter of chosen": 1,
        "document_deduplicator of chosen": 1,
        "text_length_filter of rejected": 1,
        "words_num_filter of rejected": 2,
    }


@real
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("texts", "kept"), [(6, 6), (24, 24), (0, 1)])
def test_answers_that_differ_in_a_digit_are_kept_and_what_goes_is_named(texts: int, kept: int) -> None:
    """Before: 6 became 1, and 24 became 15 or 1.   0: three times one text, in other capitals."""
    say = [f"step {i % 3}: take {i // 3} apples" for i in range(texts)] or [GOOD, GOOD.upper(), GOOD.title()]
    normalizer = DJNormalizer(python=JUICER)
    assert len(normalizer.normalize([pair(text, OTHER, f"s{i}") for i, text in enumerate(say)])) == kept
    named = {label: names for label, names in normalizer.left_out.items() if names}
    assert named == ({} if texts else {"document_deduplicator of chosen": ["s1", "s2"]})


TRACES = Path(__file__).parents[1] / "data" / "traces"
READERS = {
    "swe_agent_text.traj": swe_agent_states, "swe_agent_calls.traj": swe_agent_states,
    "openhands.jsonl": openhands_states, "tau_bench.jsonl": tau_bench_states,
}  # fmt: skip


@real
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pairs_of_real_traces_go_through_the_real_operators() -> None:
    """Of each trace, the next turn as `chosen`.  All pairs are kept, and of those that come twice the first."""
    pairs = list[DPOPair]()
    for name, read in READERS.items():
        found = read(TRACES / name)
        for now, after in pairwise(found):
            one = pair(after["student_action"], now["student_action"], f"{name} {now['state_id']}")
            form = {"action_form": now["action_form"]} if "action_form" in now else {}
            pairs.append({**one, "state_messages": now["state_messages"], **form})  # pyright: ignore
    again: list[DPOPair] = [{**one, "state_id": f"{one['state_id']} again"} for one in pairs]
    normalizer = DJNormalizer(python=JUICER)
    kept = normalizer.normalize([*pairs, *again])
    assert [one["state_id"] for one in kept] == [one["state_id"] for one in pairs] and len(pairs) == 17
    dropped = [name for label, names in normalizer.left_out.items() for name in names if label.startswith("document_")]
    assert sorted(dropped) == sorted(one["state_id"] for one in again)


@real
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_calls_that_differ_in_one_digit_are_kept_by_the_calls_recipe() -> None:
    pairs = [pair(call("t3", a=i), call("t4", a=i), f"s{i % 3}") for i in (1, 2, 3)] + [pair("x", call("t4"), "s9")]
    pairs.append(pairs[0])
    kept = DJNormalizer("calls", python=JUICER).normalize(pairs)
    assert [p["state_id"] for p in kept] == ["s1", "s2", "s0"]


@real
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_one_call_in_twenty_states_the_rules_for_prose_keep_one_pair_and_those_by_kind_all() -> None:
    """By what digits it has, not: 20 calls with other numbers are 20 pairs by both."""
    one = [pair(call("ls"), call("think", n=i), f"s{i}") for i in range(20)]
    with pytest.warns(PairsWarning, match=r"(?s)kept 1 of 20 pairs: document_deduplicator .*use recipe='auto'"):
        DJNormalizer("default", python=JUICER).normalize(one)
    numbers = [pair(call("get_user_details", user_id=f"u_{i}"), call("think"), f"n{i}") for i in range(20)]
    assert len(DJNormalizer("default", python=JUICER).normalize(numbers)) == 20
    assert DJNormalizer(python=JUICER).normalize([*one, *numbers, pair(GOOD, OTHER, "prose")]) == [
        *map(normalized_pair, [*one, *numbers]),
        normalized_pair(pair(GOOD, OTHER, "prose")),
    ]


@real
def test_the_constraints_take_what_data_juicer_requires() -> None:
    """Before: dill 0.4.1 and multiprocess 0.70.19 were pinned, and data-juicer takes 0.3.8 and 0.70.16 alone."""
    from packaging.requirements import Requirement

    ask = "import importlib.metadata as m; print(chr(10).join(m.requires('py-data-juicer')))"
    wants = subprocess.run([str(JUICER), "-c", ask], capture_output=True, text=True, check=True).stdout.splitlines()
    pinned = pins("3.11")
    checked = 0
    for requirement in (Requirement(line) for line in wants if "extra ==" not in line):
        if pin := pinned.get(requirement.name):
            assert requirement.specifier.contains(pin), f"{requirement} is pinned to {pin}"
            checked += 1
    assert checked > 5


@real
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_from_states_to_normalized_pairs_in_one_call(tmp_path: Path) -> None:
    asked = states(2)
    for state in asked:
        state["student_action"] = OTHER
    replies = {"state 0": GOOD, "state 1": OTHER}
    with TeacherServer(lambda body, n: says(replies[body["messages"][-1]["content"]], cost=1e-6)) as server:
        teachers = [Teacher(m, 1.0, 1.0, base_url=server.url, key_env=None) for m in "ab"]
        actions, pairs = replay_and_normalize_trace_sync(
            asked, teachers, 1.0, normalizer=DJNormalizer(python=JUICER), ledger=tmp_path / "l"
        )
    assert len(actions) == 4 and [p["state_id"] for p in pairs] == ["s0"]
    assert pairs[0]["chosen_messages"] == [{"role": "assistant", "content": GOOD}]


@real
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_recipe_that_data_juicer_refuses_is_shown(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("process: [{text_length_filter: {min_len: short}}]")
    with pytest.raises(InnerError, match="data-juicer failed on the pairs"):
        DJNormalizer(tmp_path / "r.yaml", python=JUICER).normalize([pair(GOOD, OTHER)])
