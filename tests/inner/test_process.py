"""Process rewards: the advantages against a plain reference, TRL's losses with (B, T), the shapes, and the head."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from diloco.run.config import ConfigError, RunConfig
from inner.channels.consensus import ConsensusScore, recorded_answers, turn_score
from inner.channels.lessons import Rollout
from inner.channels.process_head import HeadScore, ProcessHead, head_examples, train_process_head
from inner.channels.process_reward import (
    ProcessReward,
    ScoredSpan,
    process_advantages,
    score_steps,
    standardise,
    turn_states,
)
from inner.channels.spans import Turn
from inner.replay.pairs import count_votes
from inner.replay.teachers import TeacherAction
from inner.rollouts.dynamic import informative_groups
from inner.settings.inner import InnerConfig, InnerError
from inner.settings.objectives import PO_OBJECTIVES
from inner.train.grpo import _silence_libraries
from inner.usercode.check import check_data, check_inner
from inner.usercode.forgiving import ForgivingProcess
from tests.inner.test_toolworld import WORLD, small_folder
from tests.inner.test_trainer import make, measure, rollouts

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")


def never(rolled: Sequence[Rollout]) -> Any:
    raise AssertionError("nobody asked for scores here")


def rollout(*turns: tuple[int, int], reward: float = 0.0, **more: Any) -> Rollout:
    end = max((end for _, end in turns), default=0)
    return Rollout(
        more.pop("row", {"prompt": "q"}),
        [1],
        list(range(end)),
        (1,) * end,
        [Turn(a, b) for a, b in turns],
        reward,
        **more,
    )


# -------------------------------------------------------------------- the advantages


def plain_reference(
    advantages: list[float], steps: list[ScoredSpan], width: int, credit: str, scale: str, w: float
) -> Any:
    """The formula of inner/channels/process_reward.py read out loud, for groups of two rollouts."""
    out = [[a] * width for a in advantages]
    for row in range(len(advantages)):
        for t in range(width):
            for step in steps:
                counts = step.row == row and (step.start <= t < step.end if credit == "turn" else step.end > t)
                if not counts:
                    continue
                peers = [s for s in steps if s.row // 2 == row // 2 and s.turn == step.turn]
                if len({s.row for s in peers}) < 2:
                    continue
                mean = sum(s.score for s in peers) / len(peers)
                of = {"group": peers, "batch": steps, "none": None}[scale]
                spread = 1.0
                if of is not None:
                    middle = sum(s.score for s in of) / len(of)
                    spread = math.sqrt(sum((s.score - middle) ** 2 for s in of) / (len(of) - 1)) + 1e-4
                out[row][t] += w * (step.score - mean) / spread
    return torch.tensor(out)


@pytest.mark.parametrize("credit", ["turn", "rest"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_the_formula(credit: str, scale: str) -> None:
    rng = random.Random(3)
    for _ in range(20):
        steps = []
        for row in range(6):
            at = 0
            for turn in range(rng.randrange(4)):
                start = at + rng.randrange(2)
                at = start + rng.randrange(1, 4)
                if rng.random() < 0.8:  # else no score is known
                    steps.append(ScoredSpan(row, turn, start, at, rng.choice([0.0, 0.5, 1.0, 3.0])))
        if len(steps) < 2:
            continue
        given = [rng.uniform(-1, 1) for _ in range(6)]
        process = ProcessReward(never, weight=0.7, credit=credit)
        found = process_advantages(torch.tensor(given), steps, group=2, width=16, process=process, scale=scale)
        torch.testing.assert_close(found, plain_reference(given, steps, 16, credit, scale, 0.7), atol=1e-5, rtol=1e-5)


def test_no_turn_is_worth_more_for_its_place_or_their_number() -> None:
    """DeepSeekMath's mean over all steps pays a rollout for each further step that usually goes well."""
    rng = random.Random(0)
    steps = [
        ScoredSpan(row, k, k, k + 1, float(rng.random() < (0.2, 0.9, 0.9)[k]))
        for row in range(8)
        for k in range(1 + row % 3)
    ]
    gains = standardise(steps, 8, "none")
    for k in range(3):
        assert abs(sum(g for step, g in zip(steps, gains, strict=True) if step.turn == k)) < 1e-9
    alone = standardise([ScoredSpan(0, 0, 0, 1, 5.0), ScoredSpan(1, 1, 0, 1, 2.0)], 2, "group")
    assert alone == [0.0, 0.0]  # each turn stands alone in its place: nothing to compare it with


def test_scores_by_token() -> None:
    process = ProcessReward(lambda rolled: [[[1.0, 0.0, 2.0]], [torch.tensor([0.0, 0.0, 0.0])]])  # type: ignore[misc]
    steps = score_steps(process, [rollout((0, 3)), rollout((1, 4))])
    assert [(s.row, s.start, s.end, s.score) for s in steps[:3]] == [(0, 0, 1, 1.0), (0, 1, 2, 0.0), (0, 2, 3, 2.0)]
    found = process_advantages(torch.zeros(2), steps, group=2, width=4, process=process, scale="none")
    assert torch.allclose(found, torch.tensor([[0.5, -0.5, 1.5, 0.0], [0.0, -0.5, -0.5, -0.5]]))


@pytest.mark.parametrize(
    "answer, said",
    [
        (lambda r: [], "answered 0 entries for 2 rollouts"),
        (lambda r: 1.0, "answered a float for 2 rollouts"),
        (lambda r: [[1.0], [1.0, 2.0]], "answered 2 entries for a rollout of 1 turns"),
        (lambda r: [[1.0], 2.0], "answered a float for a rollout of 1 turns"),
        (lambda r: [[math.nan], [1.0]], "gave nan as a score"),
        (lambda r: [[[1.0, 2.0]], [1.0]], "gave 2 numbers for a turn of 3 tokens"),
    ],
)
def test_an_answer_that_cannot_be_read_is_refused(answer: Any, said: str) -> None:
    with pytest.raises(InnerError, match=said):
        score_steps(ProcessReward(answer), [rollout((0, 3)), rollout((0, 3))])


def test_a_rollout_without_a_reward_has_no_scores() -> None:
    asked: list[int] = []

    def score(rolled: Sequence[Rollout]) -> list[list[float]]:
        asked.append(len(rolled))
        return [[1.0] for _ in rolled]

    steps = score_steps(ProcessReward(score), [rollout((0, 3), reward=math.nan), rollout((0, 3))])
    assert asked == [1] and [step.row for step in steps] == [1]


class Told:
    """A host that remembers."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def emit(self, kind: str, text: str, **data: Any) -> None:
        self.events.append((kind, text, data))


def test_an_error_costs_one_batch_and_is_told_once_a_minute() -> None:
    now, told, fails = [0.0], Told(), [False]

    def score(rolled: Sequence[Rollout]) -> Any:
        if fails[0]:
            raise KeyError("answer") if now[0] < 60.0 else SystemExit(2)
        return [[1.0] for _ in rolled]

    calls = ForgivingProcess(ProcessReward(score), told, lambda: now[0])  # type: ignore[arg-type]
    assert len(calls([rollout((0, 3))])) == 1
    fails[0] = True
    for now[0] in (0.0, 30.0, 61.0, 62.0):
        assert calls([rollout((0, 3))]) == []
    assert [data["failures"] for _, _, data in told.events] == [1, 2]
    assert told.events[0][0] == "process_failed" and "score failed: KeyError: 'answer'" in told.events[0][1]
    assert "score failed: SystemExit: 2" in told.events[1][1]


def test_a_process_reward_that_never_worked_ends_the_session() -> None:
    calls = ForgivingProcess(ProcessReward(lambda rolled: []), Told(), lambda: 0.0)  # type: ignore[arg-type]
    assert calls([rollout((0, 3))]) == calls([rollout((0, 3))]) == []
    with pytest.raises(InnerError, match="the first 3 batches of this session"):
        calls([rollout((0, 3))])


# -------------------------------------------------------------------- in TRL's loss


def calls_right(rolled: Sequence[Rollout]) -> list[list[float]]:
    """1 for a turn that calls the one tool of its kind that exists."""
    return [
        [float(WORLD.right_name(r.row["kind"]) in state["student_action"]) for state in turn_states(r)] for r in rolled
    ]


TAKES_TURNS = [name for name in PO_OBJECTIVES if name != "gmpo"]


@pytest.mark.parametrize("objective", TAKES_TURNS)
def test_advantages_that_are_equal_over_time_are_trls_loss(objective: str) -> None:
    """(B, T) goes through each loss in the menu as (B,): bit for bit, but where one ratio of a whole sequence meets T
    advantages, whose sum has another order."""
    trainer = make(config={"grpo": {"objective": objective}})
    batch = rollouts(trainer)
    batch["advantages"] += 0.3
    loss, gradient = measure(trainer.model, lambda: trainer._compute_loss(trainer.model, batch))
    wide = {**batch, "advantages": batch["advantages"][:, None].expand(-1, batch["completion_ids"].size(1)).clone()}
    again, other = measure(trainer.model, lambda: trainer._compute_loss(trainer.model, wide))
    assert gradient.abs().sum() > 0
    if trainer.importance_sampling_level == "token" and trainer.loss_type != "vespo":
        assert torch.equal(loss, again) and torch.equal(gradient, other)
    torch.testing.assert_close(loss, again, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-7)


def test_the_losses_that_take_no_turns_are_refused() -> None:
    with pytest.raises(InnerError, match="has one advantage per rollout"):
        make(config={"grpo": {"objective": "gmpo"}}, process=ProcessReward(never))
    with pytest.raises(InnerError, match=r'inner.grpo.objective = "gmpo" has one advantage per rollout'):
        InnerConfig(grpo={"objective": "gmpo"}, process={"function": "p.py:f"}).check()  # type: ignore[arg-type]


def test_equal_scores_change_nothing_and_others_only_their_tokens() -> None:
    plain = rollouts(make())
    level = rollouts(make(process=ProcessReward(lambda rolled: [[0.5] * len(r.turns) for r in rolled])))
    assert torch.equal(level["completion_ids"], plain["completion_ids"])
    assert torch.equal(level["advantages"], plain["advantages"][:, None].expand_as(level["completion_ids"]))
    seen: list[Rollout] = []

    def score(rolled: Sequence[Rollout]) -> Any:
        seen.extend(rolled)
        return [[1.0 - (i % 2), *[None] * (len(r.turns) - 1)] for i, r in enumerate(rolled)]

    trainer = make(process=ProcessReward(score))
    found = rollouts(trainer)["advantages"] - plain["advantages"][:, None]
    for i, r in enumerate(seen):
        first = found[i, r.turns[0].start : r.turns[0].end]
        assert (first > 0).all() if i % 2 == 0 else (first < 0).all()
        assert not found[i, r.turns[0].end :].any()
        state = turn_states(r)[0]
        assert len(state["state_messages"]) == 1
        assert state.get("tools") == trainer.tool_schemas()[""], "without them a teacher cannot call"


@pytest.mark.slow
def test_it_teaches_where_the_reward_says_nothing() -> None:
    """All rewards are 0, so every step of the policy comes from the scores."""
    shares = []
    trainer = make(
        steps=24,
        reward=lambda completions, **columns: [0.0] * len(completions),
        process=ProcessReward(lambda rolled: shares.append(calls_right(rolled)) or shares[-1]),
        config={"lr": 3e-3},
    )
    with _silence_libraries():
        trainer.train()
    right = [sum(scores[0] for scores in batch) / len(batch) for batch in shares]
    assert sum(right[-4:]) / 4 > sum(right[:4]) / 4 + 0.15, right
    assert trainer.state.global_step == 24


def test_dynamic_sampling_sees_groups_that_differ_by_turns_alone() -> None:
    advantages = torch.zeros(6, 3)
    advantages[3, 1] = 0.5
    assert informative_groups({"advantages": advantages}, 2) == [1]
    assert informative_groups({"advantages": advantages[:, 1]}, 2) == [1]


def test_dynamic_sampling_with_turns_of_different_widths() -> None:
    trainer = make(config={"grpo": {"objective": "dapo"}}, process=ProcessReward(calls_right, credit="rest"))
    assert trainer.dynamic_sampling
    batch = rollouts(trainer)
    assert batch["advantages"].shape == batch["completion_ids"].shape
    assert torch.isfinite(trainer._compute_loss(trainer.model, batch))


# -------------------------------------------------------------------- the shapes


def votes(*actions: str) -> list[Any]:
    return count_votes([answer(str(i), action) for i, action in enumerate(actions)])


def answer(teacher: str, action: str, state: str = "s") -> TeacherAction:
    return {"state_id": state, "teacher": teacher, "action": action, "error": None, "cost_usd": 0.0}  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    "actions, student, plurality, weighted, variance",
    [
        ("aaa", "a", 1.0, 1.0, 1.0),
        ("aaa", "b", 0.0, 0.0, 0.0),
        ("aab", "a", 1.0, 2 / 3, 2 / 3 * (1 - (1 - 5 / 9) / (2 / 3))),
        ("aab", "b", 0.0, 1 / 3, 1 / 3 * (1 - (1 - 5 / 9) / (2 / 3))),
        ("aabb", "a", None, 0.5, 0.5 * (1 - 0.5 / 0.75)),
        ("abc", "a", None, 1 / 3, 0.0),
        ("aaa", "", 0.0, 0.0, 0.0),
        ("", "a", None, None, None),
    ],
)
def test_the_shapes(actions: str, student: str, plurality: Any, weighted: Any, variance: Any) -> None:
    for shape, expected in (("plurality", plurality), ("weighted", weighted), ("variance", variance)):
        found = turn_score(votes(*actions), student, shape)  # type: ignore[arg-type]
        assert found == (None if expected is None else pytest.approx(expected)), shape


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(InnerError, match="choose plurality, weighted, variance"):
        ConsensusScore(lambda states: [], "majority")  # type: ignore[arg-type]


def spoken(*texts: str) -> list[dict[str, str]]:
    roles = ("assistant", "tool")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def test_each_state_is_asked_about_once_and_strangers_score_nothing() -> None:
    asked: list[str] = []

    def answers(states: Sequence[Any]) -> list[TeacherAction]:
        asked.extend(state["state_messages"][-1]["content"] for state in states)
        known = [state for state in states if state["state_messages"][-1]["content"] == "q"]
        return [answer(teacher, "go", state["state_id"]) for state in known for teacher in "xyz"]

    rolled = [
        rollout((0, 2), (3, 4), completion=spoken("go", "42", "done")),
        rollout((0, 2), completion=spoken("stay")),
    ]
    assert ConsensusScore(answers, "plurality")(rolled) == [[1.0, None], [0.0]]
    assert sorted(asked) == ["42", "q"]


def test_recorded_answers_are_found_by_the_messages() -> None:
    call = {"function": {"name": "ls", "arguments": '{"path": "."}'}}
    states = [{"state_id": "t0", "state_messages": [{"role": "user", "content": "q"}], "student_action": "x"}]
    states += [{"state_id": "t1", "student_action": "y", "state_messages": [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "a.py"}]}]  # fmt: skip
    recorded = recorded_answers(states, [answer("x", "go", "t0"), answer("x", "done", "t1")])  # type: ignore[arg-type]
    live = [{"type": "function", "function": {"name": "ls", "arguments": {"path": "."}}}]
    messages = [{"role": "assistant", "content": "", "tool_calls": live}, *spoken("a.py", "done")[1:]]
    messages = [messages[0], {"role": "tool", "content": "a.py"}, {"role": "assistant", "content": "done"}]
    scores = ConsensusScore(recorded, "weighted")([rollout((0, 2), (3, 4), completion=messages)])
    assert scores == [[0.0, 1.0]]
    with pytest.raises(InnerError, match="not among the 2 states"):
        recorded_answers(states, [answer("x", "go", "t9")])  # type: ignore[arg-type]


# -------------------------------------------------------------------- the head


def traces(count: int, seed: int) -> tuple[list[Any], list[TeacherAction]]:
    """States of ToolWorld with three teachers, two of them right."""
    rng = random.Random(seed)
    states, actions = [], []
    for i, row in enumerate(WORLD.rows(count, seed)):
        kind = row["kind"]
        wrong = rng.choice([n for n in range(WORLD.names) if WORLD.name(kind, n) != WORLD.right_name(kind)])
        states.append({"state_id": str(i), "state_messages": row["prompt"], "student_action": call(row, wrong)})
        right = int(WORLD.right_name(kind).rpartition("_")[2])
        actions += [answer(t, call(row, name), str(i)) for t, name in (("x", right), ("y", right), ("z", wrong))]
    return states, actions


def call(row: Any, name: int) -> str:
    arguments = f'{{"a": {row["a"]}, "b": {row["b"]}}}'
    return f'<tool_call>\n{{"name": "{WORLD.name(row["kind"], name)}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def student() -> tuple[Any, Any]:
    folder = small_folder()
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def head(student: tuple[Any, Any]) -> ProcessHead:
    return train_process_head(*student, *traces(300, seed=1))[0]


def test_the_head_learns_what_teachers_do(student: tuple[Any, Any], head: ProcessHead) -> None:
    """On states that it has not seen: the right call above a wrong one, in 98 of 100 pairs."""
    model, tokenizer = student
    states, actions = traces(60, seed=2)
    examples = head_examples(tokenizer, states, actions)
    rolled = [
        Rollout({"prompt": "q"}, e.row[: e.start], e.row[e.start :], (), [Turn(0, len(e.row) - e.start)], 0.0)
        for e in examples
    ]
    scores = [turns[0] for turns in HeadScore(head, model)(rolled)]
    right = [s for s, e in zip(scores, examples, strict=True) if e.label > 0.5]
    wrong = [s for s, e in zip(scores, examples, strict=True) if e.label < 0.5]
    above = [float(r) > float(w) for r in right for w in wrong]  # type: ignore[arg-type]
    assert len(right) == 60 and sum(above) / len(above) > 0.98


def test_training_a_head_twice_gives_the_same_bits_and_leaves_the_random_state(student: tuple[Any, Any]) -> None:
    before = torch.get_rng_state()
    first, second = (train_process_head(*student, *traces(40, seed=3), steps=20)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(before, torch.get_rng_state())


def test_a_head_on_disk(tmp_path: Path, head: ProcessHead) -> None:
    head.save(tmp_path / "head.safetensors")
    again = ProcessHead.load(tmp_path / "head.safetensors")
    features = torch.randn(5, 2 * head.width, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head(features), again(features))
    (tmp_path / "odd.safetensors").write_bytes(b"no")
    with pytest.raises(InnerError, match="is not a process head"):
        ProcessHead.load(tmp_path / "odd.safetensors")
    with pytest.raises(InnerError, match=r"is not a process head.*pytorch_model|is not a process head"):
        ProcessHead.load(Path(small_folder()) / "model.safetensors")
    with pytest.raises(InnerError, match="nothing to train a head on"):
        train_process_head(AutoModelForCausalLM.from_pretrained(small_folder()), None, [], [])
    with pytest.raises(InnerError, match="states of 7 numbers"):
        HeadScore(ProcessHead(7), AutoModelForCausalLM.from_pretrained(small_folder()))


def test_in_a_run_the_head_reads_the_tokens_it_was_trained_on_and_the_start_model(head: ProcessHead) -> None:
    """Rendered from messages in training, sampled ids in a run: the same rows; and the policy's steps move no score."""
    trainer = make(process=ProcessReward(head))
    seen: list[Rollout] = []
    score = trainer._process.score
    trainer._score_steps = lambda rolled: seen.extend(rolled) or score_steps(trainer._process, rolled)
    rollouts(trainer)
    before = score(seen)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.1)
    assert score(seen) == before
    tokenizer = trainer.processing_class
    for r in seen:
        state = turn_states(r)[0]
        if "tool_call" not in state["student_action"]:
            continue
        [example] = head_examples(tokenizer, [state], [answer("x", state["student_action"], state["state_id"])])
        turn = r.turns[0]
        assert example.row == r.prompt + r.ids[: turn.end] and example.start == len(r.prompt) + turn.start


# -------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "table, said",
    [
        ({}, "needs one of the two, function or head; found None and None"),
        ({"function": "p.py:f", "head": "h.safetensors"}, "found 'p.py:f' and 'h.saf"),
        ({"function": "p.py:f", "credit": "all"}, "inner.process.credit"),
        ({"function": "p.py:f", "weight": 0.0}, "inner.process.weight"),
    ],
)
def test_settings_that_cannot_be(table: dict[str, Any], said: str) -> None:
    with pytest.raises(InnerError, match=said):
        InnerConfig(process=table)  # type: ignore[arg-type]


def test_a_head_needs_the_start_model_all_along() -> None:
    assert InnerConfig(process={"head": "h.safetensors"}).compares_with_start  # type: ignore[arg-type]
    assert not InnerConfig(process={"function": "p.py:f"}).compares_with_start  # type: ignore[arg-type]


# -------------------------------------------------------------------- on the laptop

GOOD = "def score(rollouts):\n    return [[0.0] * len(r.turns) for r in rollouts]\n"
SHORT = "def score(rollouts):\n    return []\n"
RAISES = "def score(rollouts):\n    return [[1 / len(r.ids)] for r in rollouts]\n"


@pytest.mark.parametrize(
    "code, said",
    [(GOOD, ""), (SHORT, "answered 0 entries for 2 rollouts"), (RAISES, "process.py, line 2: return .*ZeroDivision")],
)
def test_the_function_is_tried_before_anything_is_rented(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "process.py").write_text(code)
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "a", "answer": 1, "kind": 0}\n{"prompt": "b", "answer": 2, "kind": 0}\n'
    )
    config = InnerConfig(process={"function": "process.py:score"}, data={"prompts": "prompts.jsonl"})  # type: ignore[arg-type]
    files = {name: tmp_path / f"{name}.{end}" for name, end in (("process", "py"), ("prompts", "jsonl"))}
    if not said:
        check_inner(config, files)
        return
    with pytest.raises(InnerError, match=f"(?s){said}"):
        check_inner(config, files)


def test_a_head_that_is_none_is_refused_without_torch(tmp_path: Path) -> None:
    (tmp_path / "head.safetensors").write_text("def f(): pass")
    config = InnerConfig(process={"head": "head.safetensors"})  # type: ignore[arg-type]
    with pytest.raises(InnerError, match="is not a process head"):
        check_data(config, {"process_head": tmp_path / "head.safetensors"})


def test_a_run_counts_the_function_by_its_bytes_and_name(tmp_path: Path) -> None:
    (tmp_path / "process.py").write_text(GOOD)
    raw = {"inner": {"process": {"function": "process.py:score"}}}
    config = RunConfig.from_dict(raw, tmp_path)
    assert config.mathematics()["entry_points"]["process"] == "score"
    assert config.mathematics()["inner"]["process"] == {"weight": 1.0, "credit": "turn"}
    assert config.user_files()["process"] == tmp_path / "process.py"
    with pytest.raises(ConfigError, match="there is no file"):
        RunConfig.from_dict({"inner": {"process": {"head": "none.safetensors"}}}, tmp_path)
