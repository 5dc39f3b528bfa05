"""Score a student's action by the teachers' answers in the same state.

    p_X = support(X) / support of all answers          X: an action, Y: the student's action    (pairs.py has support)

    "plurality"   1 if Y is the action with most support, else 0; None if two actions share the most support
    "weighted"    p_Y
    "variance"    p_Y · (1 − V / V_max)                V, V_max as in pairs.py; 0 if all teachers differ

If no teacher answered, the score is None.   If the student took no action, the score is 0.

    ConsensusScore(answers)(rollouts)     a process reward: inner.process.function, or ComposerReplicationTrainer's
        answers(states) -> TeacherActions     live: replay_trace;  on disk: `recorded_answers`

Not promised: recorded answers for the states of a changed policy; turns in unknown states are scored None.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Literal

from inner.channels.lessons import Rollout
from inner.channels.process_reward import turn_states
from inner.errors import InnerError
from inner.replay.actions import Message
from inner.replay.commands import Key, key_of
from inner.replay.pairs import Vote, count_votes, pair_weight
from inner.replay.states import TraceState
from inner.replay.teachers import TeacherAction
from inner.replay.wire import wire_messages

TurnShape = Literal["plurality", "weighted", "variance"]
SHAPES = ("plurality", "weighted", "variance")
Answers = Callable[[Sequence[TraceState]], Iterable[TeacherAction]]


class ConsensusScore:
    """A process reward: rollouts -> a score per turn.   Raises InnerError for an unknown shape."""

    def __init__(
        self,
        answers: Answers,
        shape: TurnShape = "weighted",
        *,
        teacher_weights: Mapping[str, float] | None = None,
        key: str | Key | None = None,
    ) -> None:
        if shape not in SHAPES:
            raise InnerError(f"shape is {shape!r}: choose {', '.join(SHAPES)}, or train a ProcessHead.")
        self._answers = answers
        self._shape: TurnShape = shape
        self._weights = teacher_weights
        self._key = key
        self.__name__ = f"consensus_{shape}"

    def __call__(self, rollouts: Sequence[Rollout]) -> list[list[float | None]]:
        """Score the turns. Teachers get one question per distinct state."""
        states = [turn_states(rollout) for rollout in rollouts]
        asked = {state_digest(s["state_messages"]): s for turns in states for s in turns}
        questions: list[TraceState] = [{**state, "state_id": digest} for digest, state in asked.items()]
        by_state: dict[str, list[TeacherAction]] = defaultdict(list)
        for action in self._answers(questions):
            by_state[action["state_id"]].append(action)
        return [[self._score(s, by_state[state_digest(s["state_messages"])]) for s in turns] for turns in states]

    def _score(self, state: TraceState, actions: Sequence[TeacherAction]) -> float | None:
        key = key_of(self._key, state.get("action_form"))
        return turn_score(count_votes(actions, self._weights, key), key(state["student_action"]), self._shape)


def turn_score(votes: Sequence[Vote], student: str, shape: TurnShape) -> float | None:
    """Score one turn.   votes: most support first.   student: the key of the student's action, "" for no action."""
    total = sum(vote.support for vote in votes)
    if not total:
        return None
    share = sum(vote.support for vote in votes if vote.key == student) / total
    if shape == "weighted":
        return share
    if shape == "variance":
        return share * pair_weight(votes, "variance")
    if len(votes) > 1 and votes[0].support == votes[1].support:
        return None
    return float(votes[0].key == student)


def recorded_answers(states: Sequence[TraceState], actions: Iterable[TeacherAction]) -> Answers:
    """Return a function that looks up answers of a finished replay, by a state's exact messages."""
    digest_of = {state["state_id"]: state_digest(state["state_messages"]) for state in states}
    known: dict[str, list[TeacherAction]] = defaultdict(list)
    for action in actions:
        if action["state_id"] not in digest_of:
            raise InnerError(
                f"a teacher answered in state {action['state_id']!r}, which is not among the {len(states)} states. "
                "Pass the states of this replay."
            )
        known[digest_of[action["state_id"]]].append(action)

    def answers(asked: Sequence[TraceState]) -> list[TeacherAction]:
        return [
            {**action, "state_id": state["state_id"]}
            for state in asked
            for action in known.get(state_digest(state["state_messages"]), ())
        ]

    return answers


def state_digest(messages: Sequence[Message]) -> str:
    """Return a digest of a state. Two spellings of messages that mean the same to an endpoint have one digest."""
    wired: list[Any] = wire_messages(messages)
    return sha256(json.dumps(wired, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
