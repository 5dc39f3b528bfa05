"""Where the requests of agents wait for the training thread.

    endpoint's threads ── answer(key, request) ──▶ waiting ──▶ next_batch ──▶ training thread: samples
                       ◀── chat completion ─────── reply  ◀──────────────────────┘

A batch begins when all agents that have not ended wait, or after a linger.

Not promised: equal batches in two runs, if agents take different times.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import Any

from inner.errors import InnerError
from inner.extras.agents.conversation import Conversation, Request, TooLong
from inner.extras.agents.endpoint import HUNG_UP, SESSION
from inner.extras.agents.forms import RequestRefused, completion
from inner.rollouts.recording.unpack import message_fault

Clock = Callable[[], float]


@dataclass(eq=False)
class AgentEpisode:
    """One agent at work.   since: when it last got something to do.   outcome: its return value, or its exception.
    refused: the reason why its newest refused request was refused, or ""."""

    number: int
    row: Mapping[str, Any]
    conversation: Conversation
    since: float
    waits: int = 0
    done: bool = False
    outcome: Any = None
    refused: str = ""

    @property
    def answered(self) -> bool:
        """Whether the model has given a reply."""
        return bool(self.conversation.branches)


@dataclass(frozen=True)
class Waiting:
    """A request that waits for its reply.   hung_up: whether its client waits no more."""

    episode: AgentEpisode
    asked: Request
    hung_up: Callable[[], bool]
    reply: "Future[dict[str, Any]]" = field(default_factory=Future)


class Desk:
    """Where agents' requests wait for the training thread.   silence_s: an agent's longest silence; None: no limit."""

    def __init__(self, silence_s: float | None, clock: Clock = time.monotonic) -> None:
        self._silence_s, self._clock = silence_s, clock
        self._changed = Condition()
        self._tokenizer = Lock()  # a tokenizer serves one thread at a time
        self._episodes: dict[str, AgentEpisode] = {}
        self._waiting: list[Waiting] = []
        self._first_at = 0.0

    def open(self, number: int, row: Mapping[str, Any], conversation: Conversation) -> tuple[str, AgentEpisode]:
        """Add an episode; return the key of its address."""
        key, episode = secrets.token_urlsafe(12), AgentEpisode(number, row, conversation, self._clock())
        self._episodes[key] = episode
        return key, episode

    def finish(self, episode: AgentEpisode, outcome: Any) -> None:
        with self._changed:
            if not episode.done:
                episode.done, episode.outcome = True, outcome
            self._changed.notify_all()

    def answer(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the completion of an agent's request; called in the endpoint's threads.   Raises RequestRefused."""
        episode = self._episodes.get(key)
        if episode is None or episode.done:
            raise _gone()
        try:
            with self._tokenizer:
                waiting = Waiting(episode, _read_request(episode.conversation, body), body.get(HUNG_UP, _never))
        except RequestRefused as refusal:
            episode.refused = str(refusal)
            raise
        with self._changed:
            if episode.done:
                raise _gone()
            self._first_at = self._first_at if self._waiting else self._clock()
            self._waiting.append(waiting)
            episode.waits += 1
            self._changed.notify_all()
        return waiting.reply.result()

    def next_batch(self, linger_s: float) -> list[Waiting]:
        """Return the requests to sample next, in the order of their episodes, at most as many as there are episodes: an
        agent may send hundreds at once. [] if all agents have ended."""
        with self._changed:
            while True:
                self._leave_silent()
                self._drop_ended()
                running = [episode for episode in self._episodes.values() if not episode.done]
                at_work = [episode for episode in running if not episode.waits]
                left = self._first_at + linger_s - self._clock()
                if not running or (self._waiting and (not at_work or left <= 0)):
                    in_order = sorted(self._waiting, key=lambda waiting: waiting.episode.number)
                    taken, self._waiting = in_order[: len(self._episodes)], in_order[len(self._episodes) :]
                    return taken
                self._changed.wait(max(left, 0.001) if self._waiting else 1.0)

    def reply(self, waiting: Waiting, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        if waiting.hung_up():  # a reply that the agent never reads is not trained on
            return self._refuse(waiting)
        with self._tokenizer:
            said, ended = waiting.episode.conversation.answer(waiting.asked, ids, logprobs)
        with self._changed:
            waiting.episode.waits -= 1
            waiting.episode.since = self._clock()
        read = len(waiting.asked.before)
        waiting.reply.set_result(completion(said, ended=ended, read=read, written=min(len(ids), waiting.asked.room)))

    def close(self) -> None:
        """End all episodes, and refuse the requests that still wait."""
        with self._changed:
            for episode in self._episodes.values():
                episode.done = True
            self._drop_ended()

    def _drop_ended(self) -> None:
        """Refuse requests of episodes that have ended, and requests whose clients have hung up."""
        before, self._waiting = self._waiting, []
        for waiting in before:
            if waiting.episode.done or waiting.hung_up():
                self._refuse(waiting)
            else:
                self._waiting.append(waiting)

    def _refuse(self, waiting: Waiting) -> None:
        with self._changed:
            waiting.episode.waits -= 1
            waiting.episode.since = self._clock()
        waiting.reply.set_exception(_gone())

    def _leave_silent(self) -> None:
        """End the episodes of agents that have neither asked nor ended for too long."""
        for episode in self._episodes.values():
            silent = self._clock() - episode.since
            if self._silence_s is not None and not episode.done and not episode.waits and silent > self._silence_s:
                episode.done = True
                episode.outcome = TimeoutError(f"the agent did nothing for {self._silence_s:g} s (agent_timeout_s)")


def _never() -> bool:
    return False


def _gone() -> RequestRefused:
    """Return a new error for each request: an error that is raised again would keep the frames of all requests."""
    return RequestRefused("this rollout has ended", 410, "gone")


def _read_request(conversation: Conversation, body: Mapping[str, Any]) -> Request:
    """Return what a request asks for.   Raises RequestRefused for one that this model cannot answer."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, Mapping) for one in messages):
        raise RequestRefused("`messages` must be a list of one or more messages")
    for at, message in enumerate(messages):
        if fault := message_fault({"role": None, **message}):
            raise RequestRefused(f"messages[{at}].{fault}")
    if body.get("n") not in (None, 1):
        raise RequestRefused(f"n = {body['n']}: this model gives one reply to a request. Send n requests")
    if body.get("response_format") not in (None, {}, {"type": "text"}):
        raise RequestRefused(
            "response_format: this model samples freely. Ask for the form in the prompt, and check the reply"
        )
    if body.get("logprobs"):
        raise RequestRefused("logprobs: a reply has none; the replica itself records log-probs. Leave `logprobs` out")
    if body.get("functions"):
        raise RequestRefused("functions: this model takes only tools. Send them as `tools`")
    if (choice := body.get("tool_choice")) not in (None, "auto", "none"):
        raise RequestRefused(
            f"tool_choice = {json.dumps(choice)}: the model itself decides whether it calls a tool. Ask for the call "
            'in the prompt, and send "auto" or "none" (smolagents: OpenAIModel(…, tool_choice="auto"))'
        )
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    stop = body.get("stop")
    try:
        return conversation.ask(
            messages,
            body.get("tools") or None,
            limit=limit if isinstance(limit, int) and limit > 0 else None,
            stop=tuple(str(one) for one in (stop if isinstance(stop, list) else [stop]) if one),
            calls=choice != "none",
            session=str(body.get(SESSION) or ""),
        )
    except TooLong as error:
        raise RequestRefused(str(error), code="context_length_exceeded") from error
    except InnerError as error:
        raise RequestRefused(str(error)) from error
