"""Held-out evaluation: shares that cover every prompt once, sums that add up to the exact mean, and lost replicas."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.replica.evaluation import Evaluator
from diloco.run.data_files import check_held_out, refuse_overlap
from diloco.run.sections import EvalConfig, EvalError
from diloco.runlog.evaluation import best_evaluation, evaluation_words, read_evaluations
from diloco.runlog.reader import Report
from diloco.runlog.sessions import SessionSummary
from diloco.runlog.summary import held_out_words
from inner.settings.inner import InnerConfig
from inner.settings.task import EVAL
from rendezvous.agreement.membership import BeatStatus, Wanted

ROWS = [{"prompt": f"question {i}", "value": i % 7 / 7} for i in range(25)]


class Rewards:
    """A scorer whose rewards are known: greedy gives a row's value, a sample the value ± noise of its seed."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def score(self, rows: Sequence[dict[str, Any]], *, greedy: bool, seed: int) -> dict[str, list[float]]:
        if greedy:
            self.asked += [row["prompt"] for row in rows]
            return {"reward": [math.nan if row["value"] == 0 else row["value"] for row in rows]}
        noise = random.Random(seed)
        return {"reward": [row["value"] + noise.uniform(-0.1, 0.1) for row in rows]}


class FakeSession:
    """The parts of a Session that an Evaluator uses.   took_part: slots that the commit before each step lists."""

    def __init__(self, slot: str, slots: list[str], took_part: dict[int, list[str]]) -> None:
        commits = {
            step - 1: SimpleNamespace(fresh_offers=[SimpleNamespace(slot=s) for s in names])
            for step, names in took_part.items()
        }
        self.events: list[dict[str, Any]] = []
        self.clock = SimpleNamespace(now=lambda: 0.0)
        self.watchdog = SimpleNamespace(resume=lambda: None)
        self.rv = SimpleNamespace(
            slot=slot,
            chain=SimpleNamespace(read=commits.get),
            wanted=SimpleNamespace(slot_names=slots, steps=12),
            members=SimpleNamespace(status=BeatStatus()),
        )

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def flush_soon(self) -> None: ...


class Fleet:
    """Evaluators of some replicas of one run."""

    def __init__(self, slots: Sequence[str], took_part: dict[int, list[str]], **settings: Any) -> None:
        self.step = 0
        self.going: set[str] = set()
        self.sessions = {slot: FakeSession(slot, list(slots), took_part) for slot in slots}
        self.rewards = {slot: Rewards() for slot in slots}
        self.config = EvalConfig(prompts="held_out.jsonl", **settings)
        self.evaluators = {slot: self.start(slot) for slot in slots}

    def start(self, slot: str) -> Evaluator:
        session: Any = self.sessions[slot]
        return Evaluator(
            self.config, ROWS, self.rewards[slot], session, batch=4, seed=11,
            stands_at=lambda: self.step, must_go=lambda: slot in self.going,
        )  # fmt: skip

    def come_to(self, step: int, *slots: str) -> None:
        self.step = step
        for slot in slots or tuple(self.evaluators):
            if self.evaluators[slot].is_due():
                self.evaluators[slot].evaluate()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for session in self.sessions.values() for event in session.events]


def test_all_prompts_are_scored_once_and_the_mean_is_exact() -> None:
    fleet = Fleet(["r00", "r01", "r02"], {})
    fleet.come_to(0)
    assert sorted(p for r in fleet.rewards.values() for p in r.asked) == sorted(row["prompt"] for row in ROWS)
    (found,) = read_evaluations(fleet.events)
    known = [row["value"] for row in ROWS if row["value"]]
    greedy = found.scores["greedy"]["reward"]
    assert greedy.mean == pytest.approx(fmean(known), rel=1e-12)
    assert greedy.error == pytest.approx(stdev(known) / math.sqrt(len(known)), rel=1e-9)
    assert (greedy.prompts, found.total) == (len(known), 25)
    assert found.scores["sampled"]["reward"].prompts == 25


def test_samples_of_one_prompt_count_as_one_number() -> None:
    fleet = Fleet(["r00", "r01"], {}, samples=50, greedy=False)
    fleet.come_to(0)
    (found,) = read_evaluations(fleet.events)
    score = found.scores["sampled"]["reward"]
    values = [row["value"] for row in ROWS]
    assert score.mean == pytest.approx(fmean(values), abs=0.01)
    assert score.error == pytest.approx(stdev(values) / 5, rel=0.1)  # not a seventh of it
    assert found.headline[0] == "sampled"


def test_the_commit_says_whose_shares_they_are() -> None:
    fleet = Fleet(["r00", "r01", "r02"], {5: ["r02", "r00"]})
    fleet.come_to(5)
    assert [(e["share"], e["shares"]) for e in fleet.events] == [(0, 2), (1, 2)]
    assert not fleet.sessions["r01"].events  # it was late, and scores nothing
    assert read_evaluations(fleet.events)[0].total == 25


def test_a_replica_lost_in_the_middle_takes_its_share_with_it_and_the_count_says_so() -> None:
    fleet = Fleet(["r00", "r01", "r02"], {5: ["r00", "r01", "r02"]})
    fleet.come_to(5, "r00", "r02")  # r01 was killed
    (found,) = read_evaluations(fleet.events)
    scored = [row for i, row in enumerate(ROWS) if i % 3 != 1]
    score = found.scores["sampled"]["reward"]
    assert score.prompts == len(scored) == 17
    known = sum(row["value"] > 0 for row in scored)
    assert evaluation_words([found]).endswith(f", {known}/25 prompts")


def test_a_replica_that_must_go_says_what_it_has_scored() -> None:
    fleet = Fleet(["r00"], {})
    rewards = fleet.rewards["r00"]
    asked = rewards.score

    def then_leave(rows: Any, *, greedy: bool, seed: int) -> Any:
        if len(rewards.asked) >= 8:
            fleet.going.add("r00")
        return asked(rows, greedy=greedy, seed=seed)

    rewards.score = then_leave  # type: ignore[method-assign]
    fleet.come_to(0)
    (event,) = fleet.events
    assert event["prompts"] == 8 and event["sampled"]["reward"][0] == 8
    assert read_evaluations(fleet.events)[0].scores["sampled"]["reward"].prompts == 8


@pytest.mark.parametrize("leaves", [False, True])
def test_heartbeats_say_that_it_evaluates_until_it_ends_whatever_notes_say(leaves: bool) -> None:
    """Before: a reward's own note overwrote the note by which others saw the evaluation, so the replica looked hung."""
    fleet, seen = Fleet(["r00"], {}), list[bool]()
    status, asked = fleet.sessions["r00"].rv.members.status, fleet.rewards["r00"].score

    def with_a_note(rows: Any, *, greedy: bool, seed: int) -> Any:
        status.note = "waits for its judge"
        seen.append(status.evaluates)
        if leaves:
            fleet.going.add("r00")
        return asked(rows, greedy=greedy, seed=seed)

    fleet.rewards["r00"].score = with_a_note  # type: ignore[method-assign]
    assert not status.evaluates
    fleet.come_to(0)
    assert seen and all(seen) and (status.evaluates, status.note) == (False, "")


def test_it_is_due_at_the_start_every_few_steps_and_at_the_end() -> None:
    fleet = Fleet(["r00"], {step: ["r00"] for step in range(1, 13)}, every=5)
    for step in range(13):
        fleet.come_to(step)
        fleet.come_to(step)  # looked at after every inner step
    assert [event["step"] for event in fleet.events] == [0, 5, 10, 12]


def test_a_session_that_joins_at_a_step_does_not_evaluate_what_it_never_took() -> None:
    fleet = Fleet(["r00", "r01"], {5: ["r00", "r01"]})
    fleet.step = 5
    fleet.evaluators["r01"] = fleet.start("r01")
    fleet.come_to(5)
    assert [event["share"] for event in fleet.events] == [0]


def test_a_share_that_was_scored_twice_counts_once() -> None:
    fleet = Fleet(["r00", "r01"], {})
    fleet.come_to(0)
    once = read_evaluations(fleet.events)
    fleet.evaluators["r01"] = fleet.start("r01")  # killed at step 0, and started again
    fleet.come_to(0)
    assert len(fleet.events) == 3
    assert read_evaluations(fleet.events) == once


def test_the_same_run_samples_the_same() -> None:
    first, second = Fleet(["r00", "r01"], {}), Fleet(["r00", "r01"], {})
    first.come_to(0)
    second.come_to(0)
    assert first.events == second.events


def test_the_best_step_is_the_one_with_the_highest_reward() -> None:
    events = [
        {"event": "evaluated", "step": step, "share": 0, "shares": 1, "prompts": 4, "total": 4,
         "greedy": {"reward": [4, total, total]}}
        for step, total in ((0, 1.0), (5, 3.0), (10, 3.0), (15, 2.0))
    ]  # fmt: skip
    best = best_evaluation(read_evaluations(events))
    assert best is not None and best.step == 5
    assert best_evaluation([]) is None and evaluation_words([]) == ""


def test_a_last_evaluation_that_was_lost_is_told() -> None:
    """A run whose replicas ended before it looked as one whose newest evaluation is that of its end."""
    sums = [4, 1.0, 1.0]
    at = [
        {"event": "evaluated", "step": n, "share": 0, "shares": 1, "prompts": 4, "total": 4, "greedy": {"reward": sums}}
        for n in (0, 6)
    ]
    one = SessionSummary("r00", 1, 1, "here", 0.0, how="killed")
    report = Report("a", "u", {"eval": {"every": 6}}, Wanted(replicas=1, steps=8), [], [one], at, {}, 0, taken=8)
    lost = "@8: not evaluated, its replicas ended before; `diloco eval` does it"
    newest = "@6: greedy 0.250 ± 0.250, 4 prompts"
    assert held_out_words(report) == [newest, lost]
    one.how = "running"
    assert held_out_words(report) == [newest], "it may still come"
    one.how, report.taken = "killed", 7
    assert held_out_words(report) == [newest], "a replacement takes the last step"
    report.events, report.taken = [], 8
    assert held_out_words(replace(report)) == [lost]
    assert held_out_words(replace(report, config={})) == []


def test_an_evaluation_that_was_cut_short_is_not_the_best() -> None:
    """Before: two prompts, both right, were better than 225 at 0.4, and their step was exported."""
    events = [
        {"event": "evaluated", "step": step, "share": 0, "shares": 1, "prompts": prompts, "total": 225,
         "greedy": {"reward": [prompts, right, right]}}
        for step, prompts, right in ((5, 2, 2.0), (10, 225, 90.0), (15, 225, 80.0))
    ]  # fmt: skip
    best = best_evaluation(read_evaluations(events))
    assert best is not None and best.step == 10
    cut = best_evaluation(read_evaluations(events[:1]))
    assert cut is not None and cut.step == 5, "it is all there is"


@pytest.mark.parametrize(
    "fields",
    [
        {"step": -1}, {"step": "5"}, {"share": 3}, {"prompts": 99}, {"greedy": {"reward": [1, 2]}},
        {"greedy": {"reward": [9, 1.0, 1.0]}}, {"greedy": {"reward": [1, "x", 1.0]}}, {"greedy": []}, {"greedy": {}},
        {"greedy": {"reward": [1, math.inf, 1.0]}}, {"shares": 0}, {"total": None},
    ],
)  # fmt: skip
def test_an_event_that_makes_no_sense_is_passed_over(fields: dict[str, Any]) -> None:
    event = {
        "event": "evaluated", "step": 5, "share": 0, "shares": 1, "prompts": 4, "total": 4,
        "greedy": {"reward": [4, 2.0, 2.0]},
    }  # fmt: skip
    assert len(read_evaluations([event])) == 1
    assert read_evaluations([{**event, **fields}]) == []


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"prompts": ""}, "has no prompts"), ({"every": 0}, "eval.every = 0 must be at least 1"),
        ({"samples": 65}, "at least 0 and at most 64"), ({"samples": 0, "greedy": False}, "measures nothing"),
    ],
)  # fmt: skip
def test_settings_that_measure_nothing_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(EvalError, match=words):
        EvalConfig(**{"prompts": "held_out.jsonl", **settings})


def test_held_out_prompts_that_training_has_seen_are_counted_and_refused() -> None:
    chat = [{"role": "user", "content": "2 + 2"}]
    training = [{"prompt": "a"}, {"prompt": chat}, {"prompt": "b"}]
    refuse_overlap(training, [{"prompt": "c"}])
    with pytest.raises(EvalError, match=r"2 of the 3 prompts .* first: \[\{"):
        refuse_overlap(training, [{"prompt": [dict(reversed(chat[0].items()))]}, {"prompt": "c"}, {"prompt": "b"}])


def test_games_may_have_one_prompt_and_rows_that_differ(tmp_path: Path) -> None:
    """What an agent or an environment meets is in other columns. Before, such a held-out set was refused."""
    rows = [{"prompt": [{"role": "user", "content": "Play."}], "seed": seed} for seed in range(4)]
    files = {"prompts": tmp_path / "prompts.jsonl", EVAL: tmp_path / "eval.jsonl"}
    for path, part in zip(files.values(), (rows[:2], rows[2:]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    settings = {"model": "somewhere", "data": {"prompts": "prompts.jsonl"}}
    acts = InnerConfig.from_dict({**settings, "sampling": {"agent": "agent.py:play"}})
    told = check_held_out(EvalConfig(prompts="eval.jsonl"), acts, files)
    assert "2 of the 2 prompts of [eval] are training prompts in rows with other columns" in told
    plain = InnerConfig.from_dict({**settings, "rewards": {"function": "r.py:f"}})
    with pytest.raises(EvalError, match="2 of the 2 prompts"):
        check_held_out(EvalConfig(prompts="eval.jsonl"), plain, files)
    files[EVAL].write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(EvalError, match="1 of the 1 prompts"):
        check_held_out(EvalConfig(prompts="eval.jsonl"), acts, files)


@pytest.mark.parametrize(
    ("prompts", "sampling", "words"),
    [
        ("abcd", {}, ""),
        ("aaab", {}, "warning: of the 4 prompts of [eval], only 2 are different. "),
        ("aaab", {"environment": "env.py:E"}, ""),
    ],
)
def test_copies_among_held_out_prompts_are_told(tmp_path: Path, prompts: str, sampling: dict, words: str) -> None:
    """Each copy counts as a prompt of its own: of 4 rows with 3 copies, √((3² + 1²) / 4) = 1.6 times too sure.
    Beside an environment another column may make another task of the same prompt."""
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "row": i}) + "\n" for i, text in enumerate(prompts)))
    (tmp_path / "train.jsonl").write_text('{"prompt": "e", "row": 0}')
    inner = InnerConfig(model="a/b", data={"prompts": "t.jsonl"}, rewards={"function": "r.py:f"}, sampling=sampling)
    files = {EVAL: path, "prompts": tmp_path / "train.jsonl"}
    told = check_held_out(EvalConfig(prompts=str(path)), inner, files)
    assert told.startswith(words) and bool(told) == bool(words) and ("1.6 times too small" in told) == bool(words)
