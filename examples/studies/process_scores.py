"""ToolWorld's teachers as process rewards, and a noisy reward: the user's code of the study's runs.

    inner.process.function = "process_scores.py:weighted"       also plurality, variance
    "process_scores.py:noisy"                                   a reward that is wrong for 1 rollout in 4

    asked to compute      each of three teachers calls the right tool with probability .7, one mistake that all share
                          with .15, else any name
    told what a tool said repeats it; after an error, calls again

An answer is a function of teacher and question, as in examples/local_teachers.py, which serves them over HTTP.

Not promised: that real teachers are like this.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from inner import ConsensusScore, ToolWorld, TraceState
from inner.replay.actions import action_text

WORLD = ToolWorld(names=16)
TEACHERS = ("first", "second", "third")
ACCURACY, SHARED, WRONG = 0.7, 0.15, 0.25


def answers(states: Sequence[TraceState]) -> list[Any]:
    """Return every teacher's action in every state."""
    return [
        {"state_id": state["state_id"], "teacher": teacher, "action": act(teacher, state["state_messages"])}
        for state in states
        for teacher in TEACHERS
    ]


def act(teacher: str, messages: Sequence[Any]) -> str:
    last = messages[-1]
    if last["role"] == "tool" and not str(last["content"]).startswith("{'error'"):
        return str(last["content"])
    kind, a, b = next(str(message["content"]) for message in messages if message["role"] == "user").split()
    name = pick_name(teacher, int(kind.removeprefix("op")), Random(f"{teacher}:{kind} {a} {b}"))
    return action_text({"tool_calls": [{"function": {"name": name, "arguments": {"a": int(a), "b": int(b)}}}]})


def pick_name(teacher: str, kind: int, chance: Random) -> str:
    drawn = chance.random()
    if drawn < ACCURACY:
        return WORLD.right_name(kind)
    if drawn < ACCURACY + SHARED:
        wrong = [n for n in range(WORLD.names) if WORLD.name(kind, n) != WORLD.right_name(kind)]
        return WORLD.name(kind, Random(4321 + kind).choice(wrong))
    return WORLD.name(kind, chance.randrange(WORLD.names))


plurality = ConsensusScore(answers, "plurality")
weighted = ConsensusScore(answers, "weighted")
variance = ConsensusScore(answers, "variance")


def right(completions: Sequence[Any], answer: Sequence[int], **columns: Any) -> list[float]:
    return WORLD.reward(list(completions), list(answer))


def noisy(completions: Sequence[Any], answer: Sequence[int], **columns: Any) -> list[float]:
    """Return ToolWorld's reward, inverted for a random quarter of all rollouts."""
    chance = Random(repr([turns[0] for turns in completions]) + repr(columns.get("a")))
    values = WORLD.reward(list(completions), list(answer))
    return [1.0 - value if chance.random() < WRONG else value for value in values]
