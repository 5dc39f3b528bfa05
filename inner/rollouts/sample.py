"""Keeps a small, uniform random sample of the student's rollouts, to record them as traces.

    trainer ── every rollout ──▶ RolloutSample ── take(n) ──▶ n of them ──▶ rollout_states (rollout_states.py)
                                 reservoir of MOST: all rollouts since the last take are equally likely

    {"messages": [system, user, assistant, tool, assistant], "first": 2,      messages[first:] are the rollout's own
     "reward": 0.0, "environment": null, "unsure": {"2": 1.39}}

    unsure[i]   entropy −Σ p log p over the actions of those rollouts of the group that have the same messages[:i]

The sample has its own random state, so training does not depend on it.

Secrets in this process's environment variables are masked (inner/masking.py).

Not promised: that a prompt or a tool's output has no other secret. Every reader of the run can read its rollouts.
"""

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log
from typing import Any, TypedDict

from inner.masking import secret_masker
from inner.replay.actions import Message, action_key, action_text

MOST = 64  # rollouts kept between two takes
MOST_BYTES = 256 * 1024  # size of one take, as JSON


class SampledRollout(TypedDict):
    """One rollout, in the form of the module's head."""

    messages: list[Message]
    first: int
    reward: float | None
    environment: str | None
    unsure: dict[str, float]


class RolloutSample:
    """Gets every batch of rollouts, and keeps references to at most MOST of them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._kept: list[tuple[RolloutBatch, int]] = []
        self._seen = 0

    def add_batch(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        rewards: Sequence[float],
        environments: Sequence[str | None] | None = None,
    ) -> None:
        """Add one generation; rollouts of a group have equal prompts. Only references are kept, without copies."""
        batch = RolloutBatch(prompts, completions, rewards, environments)
        for i in range(len(prompts)):
            self._seen += 1
            at = self._random.randrange(self._seen)
            if len(self._kept) < MOST:
                self._kept.insert(at, (batch, i))
            elif at < MOST:
                self._kept[at] = (batch, i)

    def take(self, n: int, secrets: Iterable[str] = ()) -> list[SampledRollout]:
        """Take at most n of the rollouts since the last take, within MOST_BYTES; skip a rollout that does not fit."""
        kept = self._kept
        self._kept = []
        self._seen = 0
        taken: list[SampledRollout] = []
        bytes_left = MOST_BYTES
        hidden = secret_masker(secrets)
        for batch, i in kept[: max(0, n)]:
            line = hidden(json.dumps(batch.rollout_at(i), default=str))
            if (size := len(line.encode())) <= bytes_left:
                bytes_left -= size
                taken.append(json.loads(line))
        return taken


@dataclass(frozen=True)
class RolloutBatch:
    prompts: Sequence[Any]
    completions: Sequence[Any]
    rewards: Sequence[float]
    environments: Sequence[str | None] | None

    def rollout_at(self, i: int) -> SampledRollout:
        prompt = _as_messages(self.prompts[i], "user")
        completion = _as_messages(self.completions[i], "assistant")
        group = [c for p, c in zip(self.prompts, self.completions, strict=True) if p == self.prompts[i]]
        siblings = [_as_messages(c, "assistant") for c in group]
        return {
            "messages": prompt + completion,
            "first": len(prompt),
            "reward": float(self.rewards[i]) if isfinite(self.rewards[i]) else None,
            "environment": self.environments[i] if self.environments else None,
            "unsure": turn_entropies(completion, siblings, len(prompt)),
        }


def turn_entropies(own: Sequence[Message], siblings: Sequence[Sequence[Message]], first: int) -> dict[str, float]:
    """Return index of the turn -> entropy of the group's actions at that turn, in nats, for turns after the prompt."""
    found: dict[str, float] = {}
    for i, turn in enumerate(own):
        if turn.get("role") == "assistant":
            context = [_message_key(turn) for turn in own[:i]]
            there = [s for s in siblings if len(s) > i and s[i].get("role") == "assistant"]
            there = [s for s in there if [_message_key(turn) for turn in s[:i]] == context]
            counts = Counter(action_key(action_text(s[i])) for s in there)
            total = sum(counts.values())
            found[str(first + i)] = round(-sum(c / total * log(c / total) for c in counts.values()) + 0.0, 4)
    return found


def _as_messages(turns: Any, role: str) -> list[Message]:
    """Return a prompt or a completion as messages; a text becomes one message."""
    return [{"role": role, "content": turns}] if isinstance(turns, str) else [_without_nones(turn) for turn in turns]


def _without_nones(message: Mapping[str, Any]) -> Message:
    """Remove the keys that a dataset fills with None."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _message_key(message: Message) -> str:
    return action_key(action_text(message)) if message.get("role") == "assistant" else str(message.get("content"))
