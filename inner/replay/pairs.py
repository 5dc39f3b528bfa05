"""Make the student's preference pairs from the teachers' actions.

    support(X) = Σ weights of the teachers that did X         two spellings of one call are one X, and so are
                                                              two texts with the same command (`key`, commands.py)
    pair (chosen = X, rejected = the student's Y)   iff   support(X) ≥ agreement_threshold
                                                      and support(X) > support of every other action
                                                      and X ≠ Y

    weight of the pair (p_X = support(X) / support of all answers, n answers)
        "count"      1
        "weighted"   p_X
        "variance"   1 − V / V_max,   V = 1 − Σ_X p_X²,  V_max = 1 − 1/n        0 if all differ, 1 if all agree

A teacher has no vote if it failed, or if its answer was cut off or empty. `chosen` is the text of the first teacher
that did X.

Late rewards (reward_pairs): if rollouts of one bundle were in the same state, the value of an action is the mean late
reward of the rollouts that took it; chosen has the highest value, rejected the lowest.

TRL's preference format is read, too; `tools` and `weight` stay:

    {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}                     texts: the prompt is a user's message
    {"prompt": [user], "chosen": [assistant], "rejected": [assistant]}       messages
    {"chosen": [user, assistant], "rejected": [user, assistant]}             the prompt is the common beginning

Not promised: sides that differ in more than one turn; that `chosen` is better than `rejected`. `chosen` is the action
that most teachers chose, or that had higher late rewards, perhaps by luck.
"""

import json
import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NotRequired, TypedDict, cast

from inner.replay.actions import Message, action_key, action_text
from inner.replay.commands import Key, key_of
from inner.replay.states import TraceState, TraceWarning, checked_messages, read_lines, save_lines
from inner.replay.teachers import TeacherAction
from inner.replay.untrusted import load_json, lone_surrogate, unfit_text
from inner.settings.inner import InnerError

log = logging.getLogger(__name__)

Shape = Literal["count", "weighted", "variance"]
SIDES = ("chosen", "rejected")
NAMES = ("state_id", "id", "prompt_id")
FORMS = 'state_messages, chosen and rejected, or {"prompt": "…", "chosen": "…", "rejected": "…"}'


class DPOPair(TypedDict):
    state_id: str
    state_messages: list[Message]
    chosen: str  # the action that enough teachers chose
    rejected: str  # the student's action
    n_teachers_agreeing: int  # 1 for a pair from late rewards: the judge
    weight: NotRequired[float]
    tools: NotRequired[list[dict[str, Any]]]
    action_form: NotRequired[str]


@dataclass(frozen=True)
class Vote:
    """One action, and the teachers that chose it."""

    key: str
    action: str
    teachers: tuple[str, ...]
    support: float


def extract_dpo_pairs(
    states: Sequence[TraceState],
    teacher_actions: Iterable[TeacherAction],
    agreement_threshold: float = 2,
    *,
    shape: Shape = "count",
    teacher_weights: Mapping[str, float] | None = None,
    key: str | Key | None = None,
) -> list[DPOPair]:
    """Return a pair for each state in which the teachers agree with each other and disagree with the student.

    key: the part of a turn that is compared, a name or a function (commands.py); None: each state's `action_form`
    decides"""
    if shape not in ("count", "weighted", "variance"):
        raise InnerError(f"shape is {shape!r}: choose count, weighted or variance.")
    judged = _votes_by_state(states, teacher_actions, agreement_threshold, teacher_weights, key)
    outcomes = [pair_outcome(state, votes, agreement_threshold, key) for state, votes in judged]
    pairs = [_make_pair(*one, shape) for one, outcome in zip(judged, outcomes, strict=True) if outcome == "pair"]
    if not pairs and key is None:
        _warn_why_none(judged, outcomes)
    return pairs


def reward_pairs(states: Iterable[TraceState], name: str) -> list[DPOPair]:
    """Return a pair for each state in which actions of one bundle's rollouts had different late rewards `name`."""
    groups = dict[tuple[str, str], list[TraceState]]()
    for state in states:
        if name in state.get("late_rewards", {}):
            bundle = state["state_id"].rpartition(":")[0].rpartition(".")[0]
            groups.setdefault((bundle, json.dumps(state["state_messages"], sort_keys=True)), []).append(state)
    return [pair for group in groups.values() if (pair := _best_and_worst(group, name)) is not None]


def _best_and_worst(group: Sequence[TraceState], name: str) -> DPOPair | None:
    taken = dict[str, list[TraceState]]()
    for state in group:
        taken.setdefault(key_of(None, state.get("action_form"))(state["student_action"]), []).append(state)
    values = {key: fmean(state.get("late_rewards", {})[name] for state in states) for key, states in taken.items()}
    best, worst = max(values, key=lambda key: values[key]), min(values, key=lambda key: values[key])
    if values[best] == values[worst]:
        return None
    chosen = Vote(best, taken[best][0]["student_action"], (name,), values[best])
    try:
        return checked_pair(_make_pair(taken[worst][0], [chosen], "count"))
    except ValueError:
        return None  # the best action's text is unfit for training


def pair_outcomes(
    states: Sequence[TraceState],
    teacher_actions: Iterable[TeacherAction],
    agreement_threshold: float = 2,
    *,
    teacher_weights: Mapping[str, float] | None = None,
    key: str | Key | None = None,
) -> Counter[str]:
    """Count the states by outcome: a pair, or the reason for no pair. Report the counts with every set of pairs."""
    judged = _votes_by_state(states, teacher_actions, agreement_threshold, teacher_weights, key)
    return Counter(pair_outcome(state, votes, agreement_threshold, key) for state, votes in judged)


def pair_outcome(
    state: TraceState, votes: Sequence[Vote], agreement_threshold: float, key: str | Key | None = None
) -> str:
    """Return pair | no_answer | no_student_action | tie | below_threshold | agrees_with_student."""
    if not votes:
        return "no_answer"
    students = key_of(key, state.get("action_form"))(state["student_action"])
    if not students:
        return "no_student_action"
    if len(votes) > 1 and votes[0].support == votes[1].support:
        return "tie"
    if votes[0].support < agreement_threshold:
        return "below_threshold"
    same = votes[0].key == students or action_key(votes[0].action) == action_key(state["student_action"])
    return "agrees_with_student" if same else "pair"


def count_votes(
    actions: Iterable[TeacherAction], weights: Mapping[str, float] | None = None, key: Key = action_key
) -> list[Vote]:
    """Return the votes: most support first, then in order of the answers. Each teacher's last answer counts."""
    last = {a["teacher"]: a["action"] for a in actions if key(a["action"])}
    groups: dict[str, list[str]] = {}
    for teacher, action in last.items():
        groups.setdefault(key(action), []).append(teacher)
    votes = [
        Vote(found, last[who[0]], tuple(who), sum(1.0 if weights is None else weights[t] for t in who))
        for found, who in groups.items()
    ]
    return sorted(votes, key=lambda vote: -vote.support)


def load_pairs(path: str | Path) -> list[DPOPair]:
    """Load pairs (of `save_pairs`, or of TRL's preference format). A line that is not a pair is left out, and a
    TraceWarning names it."""
    return read_lines(path, lambda row, number: [checked_pair(row)])


def training_pairs(path: str | Path) -> list[DPOPair]:
    """Load a file's pairs for training.   Raises InnerError, with the line's number, for a line that is not a pair."""

    def read(row: Any, number: int) -> list[DPOPair]:
        try:
            return [checked_pair(row)]
        except ValueError as error:
            raise InnerError(f"pairs: {path}, line {number}: {error}. Correct the line, or take it out.") from error

    with warnings.catch_warnings():
        warnings.simplefilter("error", TraceWarning)  # a line that is not JSON
        try:
            pairs = read_lines(path, read)
        except TraceWarning as warning:
            seen = str(warning).removesuffix(" It is left out.")
            raise InnerError(f"pairs: {seen} Correct it, or take it out.") from None
    if not pairs:
        raise InnerError(f"pairs: {path} is empty. Look at the yield (`pair_outcomes`) of the replay that wrote it.")
    return pairs


def save_pairs(pairs: Iterable[Mapping[str, Any]], path: str | Path) -> None:
    save_lines(pairs, path)


def checked_pair(row: Any) -> DPOPair:
    """Return the row, ours or in TRL's preference format, as a pair.   Raises ValueError, which names the fault."""
    if not isinstance(row, dict):
        raise ValueError(f"a pair must be an object, this is a {type(row).__name__}")
    row = as_pair(row)
    checked_messages(row.get("state_messages"))
    for key in ("state_id", "chosen", "rejected"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise ValueError(f"{key} is {row.get(key)!r:.60}: it must be a text that is not empty")
    if unfit := unfit_text(row["chosen"]):
        raise ValueError(f"chosen has {unfit}")
    if lone_surrogate(json.dumps([row["rejected"], row["state_messages"]], ensure_ascii=False)):
        raise ValueError("rejected or the messages have a lone surrogate, which no tokenizer takes")
    if action_key(row["chosen"]) == action_key(row["rejected"]):
        raise ValueError("chosen and rejected are the same action")
    return cast(DPOPair, row)


# -------------------------------------------------------------------- TRL's preference format


def as_pair(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row in the form that `save_pairs` writes.   Raises ValueError if it has neither form."""
    if "state_messages" in row:
        return {**row}
    if missing := [side for side in SIDES if side not in row]:
        raise ValueError(f"no {missing[0]!r}; a pair has {FORMS}. This row has {', '.join(map(repr, row)):.200}")
    sides = [_messages(row[side], "assistant") for side in SIDES]
    before = (side[:-1] for side in sides)  # the last message is the turn
    common = [one for one, _ in takewhile(lambda both: both[0] == both[1], zip(*before, strict=False))]
    prompt = _prompt(row.get("prompt"), common)
    if not prompt:
        raise ValueError(f"no prompt; a pair has {FORMS}")
    turns = [_only_turn(name, side[len(common) :]) for name, side in zip(SIDES, sides, strict=True)]
    name = next((str(row[key]) for key in NAMES if row.get(key)), f"{str(prompt[-1].get('content'))!r:.40}")
    kept = {key: row[key] for key in ("tools", "weight") if row.get(key) is not None}
    if isinstance(kept.get("tools"), str):
        kept["tools"] = load_json(kept["tools"])
    pair = {"state_id": name, "state_messages": prompt, "n_teachers_agreeing": 1, **kept}
    return pair | dict(zip(SIDES, turns, strict=True))


def _prompt(prompt: Any, common: list[Message]) -> list[Message]:
    """Return the messages before the turn: those of the column `prompt`, then the common beginning of both sides.

    If a dataset has both (UltraFeedback has), the common beginning already contains the prompt."""
    if common and not isinstance(prompt, list):
        return common
    before = _messages(prompt, "user") if prompt else []
    return common if common and common[: len(before)] == before else before + common


def _messages(value: Any, role: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    found = [value] if isinstance(value, dict) else value
    if not isinstance(found, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in found):
        raise ValueError(f"{value!r:.60} is neither a text nor messages with a role and a content")
    return found


def _only_turn(name: str, rest: list[Message]) -> str:
    if len(rest) != 1 or rest[0]["role"] != "assistant":
        roles = ", ".join(str(message["role"]) for message in rest) or "none"
        raise ValueError(f"{name} must have one message of the assistant after the prompt; it has: {roles}")
    return action_text(rest[0])


# -------------------------------------------------------------------- votes


def _votes_by_state(
    states: Sequence[TraceState],
    teacher_actions: Iterable[TeacherAction],
    threshold: float,
    weights: Mapping[str, float] | None,
    key: str | Key | None,
) -> list[tuple[TraceState, list[Vote]]]:
    by_state: dict[str, list[TeacherAction]] = {state["state_id"]: [] for state in states}
    if len(by_state) < len(states):
        raise InnerError("two states have the same state_id: each needs its own name.")
    for action in teacher_actions:
        if action["state_id"] not in by_state:
            raise InnerError(
                f"a teacher answered in state {action['state_id']!r}, which is not among the {len(states)} states. "
                "Pass the states of this replay."
            )
        by_state[action["state_id"]].append(action)
    _check_threshold(threshold, {a["teacher"] for rows in by_state.values() for a in rows}, weights)
    keys = [key_of(key, state.get("action_form")) for state in states]
    return [
        (state, count_votes(by_state[state["state_id"]], weights, one)) for state, one in zip(states, keys, strict=True)
    ]


def _warn_why_none(judged: Sequence[tuple[TraceState, list[Vote]]], outcomes: Sequence[str]) -> None:
    """Warn if most texts differ: teachers that write the same command after different thoughts seem to disagree."""
    prose = [
        state
        for (state, votes), outcome in zip(judged, outcomes, strict=True)
        if outcome in ("tie", "below_threshold") and not any(vote.key.startswith("[[") for vote in votes)
    ]
    if 2 * len(prose) > len(judged):
        log.warning(
            "no pairs: in %d of %d states the teachers' texts all differ. Texts are compared whole. If these turns are "
            "thoughts and a command, say how the command is written: key='fenced', 'command_tag', 'function_tag', "
            "'react', or a function from a turn's text to its command.",
            *(len(prose), len(judged)),
        )


def _check_threshold(threshold: float, teachers: set[str], weights: Mapping[str, float] | None) -> None:
    if weights is not None:
        unknown = sorted(teachers - set(weights))
        if unknown:
            raise InnerError(
                f"teacher_weights has no weight for {unknown[0]!r}. Add it: it has {', '.join(weights) or 'none'}."
            )
        bad = [f"{t} = {w}" for t, w in weights.items() if not (isfinite(w) and w >= 0)]
        if bad:
            raise InnerError(f"teacher_weights: {bad[0]} is not a weight; give 0 or more.")
    most = len(teachers) if weights is None else sum(weights[t] for t in teachers)
    if not threshold > 0 or (teachers and threshold > most):
        raise InnerError(
            f"agreement_threshold is {threshold}, and {len(teachers)} teachers have {most:g} votes together: "
            f"give more than 0 and at most {most:g}."
        )


def _make_pair(state: TraceState, votes: Sequence[Vote], shape: Shape) -> DPOPair:
    pair: DPOPair = {
        "state_id": state["state_id"],
        "state_messages": state["state_messages"],
        "chosen": votes[0].action,
        "rejected": state["student_action"],
        "n_teachers_agreeing": len(votes[0].teachers),
    }
    if shape != "count":
        pair["weight"] = pair_weight(votes, shape)
    if tools := state.get("tools"):
        pair["tools"] = tools
    if form := state.get("action_form"):
        pair["action_form"] = form
    return pair


def pair_weight(votes: Sequence[Vote], shape: Shape) -> float:
    total = sum(vote.support for vote in votes)
    shares = [vote.support / total for vote in votes]
    if shape == "weighted":
        return shares[0]
    answers = sum(len(vote.teachers) for vote in votes)
    if shape == "count" or answers == 1:
        return 1.0
    return 1.0 - (1.0 - sum(p * p for p in shares)) / (1.0 - 1.0 / answers)
