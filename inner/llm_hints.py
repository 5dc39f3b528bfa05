"""Hints that a model writes: the same call as any other hint, through the client and the cost ceiling of the replay.

    hint = LLMHints(Teacher("qwen/qwen3-32b", 0.1, 0.3), max_total_usd=1.0, ledger="hints.jsonl")
    hint(row, error) -> text or None        in the environment's file, as the trainer's `hint`, on TraceStates

    the turn that failed ─▶ one request ─▶ {"hint": …, "tool": …, "arguments": …} ─▶ gate ─▶ hint
    tools, last messages     (on disk              what the model would do instead     nothing, if that is what failed
    action, error             already? free)

    no answer (ceiling reached, endpoint down, not the JSON that was asked for)       ─▶ `otherwise`: the templates

`prepare` asks for many turns at once; the trainer calls it once per batch of rollouts. What is in the ledger is never
paid for again, and what all runs with it spend stays under the ceiling. One process per ledger: give every replica its
own.

Not promised: the same hints on every replica; they only have to help their own rollouts. What the endpoint sees are the
last messages of the rollout, so do not send it what it must not see.
"""

import asyncio
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

from inner.hints import Hint, same_action, shortened, templates
from inner.replay.actions import action_text, plain_text
from inner.replay.states import TraceState
from inner.replay.teachers import Teacher

log = logging.getLogger(__name__)

TOLD = 6  # messages before the turn that the writer sees
WRITER = (
    "An agent is about to take a step that will fail. Write a hint of at most two sentences that makes it take a "
    "better step now. Speak of the step as one still to come, and name what to do instead.\n"
    'Answer with one JSON object: {"hint": "…", "tool": "what to call instead, or null", "arguments": {…} or null}. '
    "If there is no better step, the hint is null."
)
_OBJECT = re.compile(r"\{.*\}", re.DOTALL)


class LLMHints:
    """A Hint. `otherwise` says what to tell where the model gave no answer; max_total_usd is for the ledger's life."""

    def __init__(
        self,
        teacher: Teacher,
        max_total_usd: float,
        ledger: str | Path,
        otherwise: Hint = templates,
        concurrency: int = 16,
        timeout_s: float = 30.0,
    ) -> None:
        teacher.headers()  # a missing key is found now
        self.teacher, self.max_total_usd, self.ledger = teacher, max_total_usd, ledger
        self.otherwise, self.concurrency, self.timeout_s = otherwise, concurrency, timeout_s
        self._answers: dict[str, str] = {}  # "" where there was none: asked once per process

    def __call__(self, row: Mapping[str, Any], error: str, /) -> str | None:
        state = hint_request(row, error)
        if state["state_id"] not in self._answers:
            self._ask([state])
        written = read_hint(self._answers[state["state_id"]])
        if written is None:
            return self.otherwise(row, error)
        hint, instead = written
        same = instead is not None and same_action(instead, row.get("student_action") or "")
        return None if not hint or same else shortened(hint)

    def prepare(self, failed: Iterable[tuple[Mapping[str, Any], str]]) -> None:
        """Asks for all (row, error) that were not asked for before, at once."""
        states = {state["state_id"]: state for row, error in failed for state in [hint_request(row, error)]}
        if new := [state for name, state in states.items() if name not in self._answers]:
            self._ask(new)

    def _ask(self, states: Sequence[TraceState]) -> None:
        from inner.replay.ask import ReplayStopped

        self._answers |= {state["state_id"]: "" for state in states}
        try:
            with ThreadPoolExecutor(1) as thread:  # a notebook's own thread already has an event loop
                actions = thread.submit(self._replay, states).result()
        except ReplayStopped as stopped:
            log.warning("no more hints from %s, the templates go on: %s", self.teacher.model, stopped)
            actions = stopped.replay
        self._answers |= {action["state_id"]: action["action"] for action in actions}

    def _replay(self, states: Sequence[TraceState]) -> Any:
        from inner.replay.ask import replay_trace

        options: dict[str, Any] = {"concurrency": self.concurrency, "tries": 2, "timeout_s": self.timeout_s}
        return asyncio.run(
            replay_trace(states, [self.teacher], self.max_total_usd, ledger=self.ledger, progress=False, **options)
        )


def hint_request(row: Mapping[str, Any], error: str) -> TraceState:
    """The turn that failed, as a state to ask a teacher in. Equal turns are one request."""
    before = row.get("state_messages") or row.get("prompt") or []
    last = before[-TOLD:] if isinstance(before, list) else [{"role": "user", "content": before}]
    action = row.get("student_action") or ""
    told = [
        "Tools: " + json.dumps(row.get("tools") or [], ensure_ascii=False),
        *(f"{m['role']}: {shortened(action_text(m) or plain_text(m.get('content')), 2000)}" for m in last),
        f"The step: {shortened(action, 2000) or 'unknown'}",
        f"It will fail with: {shortened(error, 2000)}",
    ]
    messages = [{"role": "system", "content": WRITER}, {"role": "user", "content": "\n\n".join(told)}]
    name = sha256(json.dumps(messages).encode()).hexdigest()
    return {"state_id": f"hint:{name[:32]}", "state_messages": messages, "student_action": action}


def read_hint(answer: str) -> tuple[str | None, str | None] | None:
    """(the hint, what to do instead as an action's text) of the writer's answer; None: not what was asked for."""
    found = _OBJECT.search(answer)
    try:
        written = json.loads(found[0]) if found else None
    except ValueError:
        return None
    if not isinstance(written, dict) or not isinstance(written.get("hint", 0), str | None):
        return None
    tool, arguments = written.get("tool"), written.get("arguments")
    if not (isinstance(tool, str) and isinstance(arguments, dict)):
        return written.get("hint"), None
    return written.get("hint"), action_text({"tool_calls": [{"function": {"name": tool, "arguments": arguments}}]})
