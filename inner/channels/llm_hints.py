"""Lets a model write hints. `LLMHints` is a Hint like any other. It uses the replay's client and cost ceiling.

    hint = LLMHints(Teacher("qwen/qwen3-32b", 0.1, 0.3), max_total_usd=1.0, ledger="hints.jsonl")
    hint(row, error) -> text or None        for the environment's file, for the trainer's `hint`, for TraceStates

    the turn that failed ─▶ one request ─▶ {"hint": …, "tool": …, "arguments": …} ─▶ filter ─▶ hint
    tools, last messages     (free if on   what the model would do instead           None, if this is the failed
    action, error            disk already)                                           action

    `otherwise` (default: the templates) writes the hint if there is no usable answer: the ceiling is reached, the
    endpoint is down or silent, the answer is not the requested JSON or contains a chat template's tokens, the disk is
    full, or anything else fails

`prepare` asks about many turns at once. The trainer calls `prepare` once per batch of rollouts, and waits at most
`wait_s`. After one failed batch, LLMHints skips the next batch; after further failures, it skips 3, 7, … up to 63
batches. So an endpoint that is down costs little time, and LLMHints notices when the endpoint works again.

    hints.jsonl     the file of the first process on this machine; the process locks the file until it ends
    hints.1.jsonl   the file of the second, and so on: replicas share no ledger; each may spend the whole max_total_usd

We never pay again for an answer in the ledger. All sessions with one ledger together stay under the ceiling. A replica
that starts again takes the first free file, with the answers in it.

Not promised: equal hints on all replicas (a hint only has to help its own rollout), or one ceiling for all replicas (N
replicas may spend N times max_total_usd). The endpoint gets a rollout's last messages: choose one that may see these.
"""

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inner.channels.hints import Hint, same_action, shorten_middle, templates
from inner.replay.actions import action_text, plain_text
from inner.replay.states import TraceState
from inner.replay.teachers import Teacher
from inner.replay.untrusted import load_json, template_token, unfit_text

if TYPE_CHECKING:
    from inner.replay.ledger import Ledger

log = logging.getLogger(__name__)

MOST_SKIPPED = 63  # the limit of batches in a row for which no hints are requested
LAST_MESSAGES = 6  # how many messages before the turn the hint model sees
WRITER = (
    "An agent is about to take a step that will fail. Write a hint of at most two sentences that makes it take a "
    "better step now. Speak of the step as one still to come, and name what to do instead.\n"
    'Answer with one JSON object: {"hint": "…", "tool": "what to call instead, or null", "arguments": {…} or null}. '
    "If there is no better step, the hint is null."
)
_OBJECT = re.compile(r"\{.*\}", re.DOTALL)


@dataclass(eq=False)
class LLMHints:
    """A Hint. `otherwise` is the Hint for turns without a usable answer of the model.

    max_total_usd  limit of all sessions with this ledger    timeout_s, wait_s  limits for an answer, and for a batch"""

    teacher: Teacher
    max_total_usd: float
    ledger: str | Path
    otherwise: Hint = templates
    concurrency: int = 16
    timeout_s: float = 30.0
    wait_s: float = 60.0

    def __post_init__(self) -> None:
        self.teacher.headers()  # raises now if the API key is missing
        self._answers: dict[str, str] = {}  # request -> answer; "": the model gave no hint; do not ask again
        self._open_ledger: Ledger | None = None  # None until the first request
        self._failures = 0  # failed batches in a row
        self._to_skip = 0

    def __call__(self, row: Mapping[str, Any], error: str, /) -> str | None:
        written = self._written_hint(row, error)
        if written is None:
            return self.otherwise(row, error)
        hint, instead = written
        same = instead is not None and same_action(instead, row.get("student_action") or "")
        return None if not hint or same else shorten_middle(hint)

    def prepare(self, failed: Iterable[tuple[Mapping[str, Any], str]]) -> None:
        """Ask about all new (row, error) pairs at once."""
        states: dict[str, TraceState] = {}
        for row, error in failed:
            with contextlib.suppress(*_UNREADABLE):  # __call__ warns about such turns
                state = hint_request(row, error)
                states[state["state_id"]] = state
        if new := [state for name, state in states.items() if name not in self._answers]:
            self._ask_model(new)

    def close(self) -> None:
        """Release the ledger for another process."""
        if self._open_ledger is not None:
            self._open_ledger.close()
            self._open_ledger = None

    def _written_hint(self, row: Mapping[str, Any], error: str) -> tuple[str | None, str | None] | None:
        try:
            state = hint_request(row, error)
        except _UNREADABLE as why:
            log.warning(
                "no hint from %s; a template is used: the turn cannot be written as JSON (%r)", self.teacher.model, why
            )
            return None
        if state["state_id"] not in self._answers:
            self._ask_model([state])
        return read_hint(self._answers[state["state_id"]])

    def _ask_model(self, states: Sequence[TraceState]) -> None:
        """Store an answer for every state; "" if the model gave no hint. Never raises."""
        self._answers |= {state["state_id"]: "" for state in states}
        if self._to_skip:
            self._to_skip -= 1
            return
        try:
            with ThreadPoolExecutor(1) as thread:  # asyncio.run fails in a notebook's thread
                actions = thread.submit(asyncio.run, self._replay_in_time(states)).result()
        except Exception as error:
            actions = self._skip_after_failure(error)
        else:
            self._failures = 0
        self._answers |= {action["state_id"]: action["action"] for action in actions}

    def _skip_after_failure(self, error: Exception) -> Iterable[Any]:
        """Skip the next batches; return the answers that arrived before the error."""
        self._failures += 1
        self._to_skip = min(MOST_SKIPPED, 2**self._failures - 1)
        why = f"nothing for {self.wait_s:g} s" if isinstance(error, TimeoutError) else str(error) or repr(error)
        log.warning(
            "no more hints from %s for now; templates are used (the next %d batches are skipped): %s",
            *(self.teacher.model, self._to_skip, why),
        )
        return getattr(error, "replay", ())

    async def _replay_in_time(self, states: Sequence[TraceState]) -> Any:
        from inner.replay.ask import replay_trace
        from inner.replay.ledger import open_free_ledger

        if self._open_ledger is None:
            self._open_ledger = open_free_ledger(self.ledger)
        options: dict[str, Any] = {"concurrency": self.concurrency, "tries": 2, "timeout_s": self.timeout_s}
        async with asyncio.timeout(self.wait_s):
            return await replay_trace(
                states, [self.teacher], self.max_total_usd, ledger=self._open_ledger, progress=False, **options
            )


_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)


def hint_request(row: Mapping[str, Any], error: str) -> TraceState:
    """Return the failed turn as a state to ask a teacher about. Equal turns give the same request."""
    before = row.get("state_messages") or row.get("prompt") or []
    last = before[-LAST_MESSAGES:] if isinstance(before, list) else [{"role": "user", "content": before}]
    action = row.get("student_action") or ""
    facts = [
        "Tools: " + json.dumps(row.get("tools") or [], ensure_ascii=False),
        *(f"{m['role']}: {shorten_middle(action_text(m) or plain_text(m.get('content')), 2000)}" for m in last),
        f"The step: {shorten_middle(action, 2000) or 'unknown'}",
        f"It will fail with: {shorten_middle(error, 2000)}",
    ]
    messages = [{"role": "system", "content": WRITER}, {"role": "user", "content": "\n\n".join(facts)}]
    name = sha256(json.dumps(messages).encode()).hexdigest()
    return {"state_id": f"hint:{name[:32]}", "state_messages": messages, "student_action": action}


def read_hint(answer: str) -> tuple[str | None, str | None] | None:
    """Return (the hint, a better action as text) from the model's answer; None if the answer has another form or its
    text could end its own message in the chat."""
    found = _OBJECT.search(answer)
    try:
        written = load_json(found[0]) if found else None
    except ValueError:
        return None
    if not isinstance(written, dict) or not isinstance(written.get("hint", 0), str | None):
        return None
    if unfit_text(written["hint"] or "") or template_token(written["hint"] or ""):  # might end the message
        return None
    tool = written.get("tool")
    arguments = written.get("arguments")
    if not (isinstance(tool, str) and isinstance(arguments, dict)):
        return written.get("hint"), None
    return written.get("hint"), action_text({"tool_calls": [{"function": {"name": tool, "arguments": arguments}}]})
