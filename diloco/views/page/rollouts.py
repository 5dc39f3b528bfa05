"""Read a few rollouts of a run's first and of its newest outer steps, with their rewards and hints.

    log/{slot}-{generation}/{n}.rollouts.jsonl       n has no gaps, so no LIST is needed
      n = 0 of the first sessions ──▶ early           the newest n of the newest sessions, found by probing ──▶ late

    {"step": 40, "slot": "r01", "reward": 1.0, "turns": [{"role": "user", "text": "…"}, …]}

A hint is before the turn that failed, where the self-teacher reads it.  A run does not store its hints. So this file
makes the hint from the error by the templates (inner/channels/hints.py).

Not promised: the hints of a run with its own hint function, or with a model that writes them.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from diloco.process.journal import rollout_head, rollout_line
from diloco.runlog.look import Rounds
from diloco.runlog.reader import Report
from diloco.runlog.sessions import SessionSummary
from inner.channels.hints import templates
from inner.rollouts.rollout_states import rollout_states
from inner.rollouts.sample import SampledRollout
from rendezvous import layout
from rendezvous.store import Readable
from rendezvous.stores.ahead import Ahead

SESSIONS = 2  # the number of first and of newest sessions whose rollouts are read
MOST = 3  # rollouts of one session
LONGEST = 6000  # at most so many characters of one turn
REACH = 6  # steps of the search for the newest number at the first look; later looks request only the next number


class RolloutEnds:
    """The first and the newest rollouts (early, late) at the last `read`.   `read` reads only what may have changed."""

    def __init__(self, store: Readable) -> None:
        self._store = store
        self._counts: dict[tuple[str, int], int] = {}
        self.early: list[dict[str, Any]] = []
        self.late: list[dict[str, Any]] = []

    def read(self, report: Report) -> None:
        ahead = Ahead(self._store)
        if not self.early:
            first = sorted(report.sessions, key=lambda s: (s.claimed, s.slot))[:SESSIONS]
            ahead.ask(layout.rollouts_key(s.slot, s.generation, 0) for s in first)
            self.early = [sample for s in first for sample in self._samples(ahead, s, 0)]
        newest = sorted((s for s in report.sessions if s.commits), key=lambda s: (-s.commits[-1][0], s.slot))[:SESSIONS]
        before = dict(self._counts)
        self._count(ahead, newest)
        if any(self._counts[s.slot, s.generation] != before.get((s.slot, s.generation)) for s in newest):
            numbers = [self._counts[s.slot, s.generation] - 1 for s in newest]
            found = [x for s, n in zip(newest, numbers, strict=True) for x in self._samples(ahead, s, n)]
            self.late = found if found != self.early else []

    def _count(self, ahead: Ahead, sessions: Sequence[SessionSummary]) -> None:
        rounds = Rounds(ahead)
        for s in sessions:
            owner = s.slot, s.generation
            low = self._counts.get(owner, 0)
            note = partial(self._counts.__setitem__, owner)
            rounds.count(partial(layout.rollouts_key, *owner), low, 1 if low else REACH, note)
        rounds.run()

    def _samples(self, ahead: Ahead, session: SessionSummary, n: int) -> list[dict[str, Any]]:
        body = ahead.get(layout.rollouts_key(session.slot, session.generation, n)) if n >= 0 else None
        return read_rollouts(body or b"", session.slot)[:MOST]


def read_rollouts(body: bytes, slot: str) -> list[dict[str, Any]]:
    """Return the rollouts of one object; skip other lines."""
    head, *lines = body.decode(errors="replace").splitlines() or [""]
    try:
        step, tools = rollout_head(head)
    except (ValueError, RecursionError):
        return []
    return [sample for line in lines if (sample := _sample(line, step, slot, tools)) is not None]


def _sample(line: str, step: int, slot: str, tools: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        rollout = rollout_line(line)
        hints = _hints({"environment": None, "unsure": {}, **rollout}, tools)
        turns = list[dict[str, str]]()
        for i, message in enumerate(rollout["messages"]):
            if i in hints:
                turns.append({"role": "hint", "text": hints[i]})
            turns.append({"role": str(message.get("role", "")), "text": _text(message)})
        reward = rollout.get("reward")
        number = float(reward) if isinstance(reward, int | float) and abs(reward) < 1e300 else None
        return {"step": step, "slot": slot, "reward": number, "turns": turns}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _hints(rollout: dict[str, Any], tools: Mapping[str, Any]) -> dict[int, str]:
    """Return index of a failed turn -> its hint."""
    found = dict[int, str]()
    for state in rollout_states(cast("SampledRollout", rollout), "", tools):
        error = state.get("error")
        if error and (hint := templates(state, error)):
            found[len(state["state_messages"])] = hint
    return found


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    if calls := message.get("tool_calls"):
        text = f"{text}\n{json.dumps(calls, ensure_ascii=False)}".strip()
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
