"""Let agents make the rollouts of a generation. Each agent owns its loop, and calls the model through an endpoint.

    row, model ──▶ agent (a thread, or a task) ── chat completion ──▶ endpoint ──▶ desk      waits for its reply
                     └ returns its reward                                           │
    training thread:  all agents wait, or the linger is over ◀──────────────────────┘
                      └ one batch of the waiting requests ──▶ TRL's `_generate_single_turn` ──▶ replies

The ids that the model sampled are trained on, not a text that is tokenised again (conversation.py).

Linger: while other agents are at work, the waiting agents wait as long as the last batch took to sample. So a slow tool
of one agent costs the other agents at most twice their time.

An agent that raises an exception has broken its judge, so inner.rewards.broken sets its reward; after a connection
error, a silence of `agent_timeout_s`, or without any call of the model, its rollout has no reward.

Not promised: that an agent's hanging thread ends (it goes on, but its address answers no requests); equal batches
in two runs, if agents take different times.
"""

import asyncio
import atexit
import copy
import inspect
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from inner.connections import is_connection_error
from inner.extras.agents.chat import Chat
from inner.extras.agents.conversation import Branch, Conversation
from inner.extras.agents.desk import AgentEpisode, Clock, Desk, Waiting
from inner.extras.agents.endpoint import Endpoint
from inner.extras.agents.forms import NAME
from inner.rollouts.call_forms import set_call_form

LINGER_S = 0.05  # shortest time for which a waiting request waits for agents at work
EMIT_EVERY_S = 60.0
END_S = 5.0  # seconds for agents' tasks that are cancelled at the process's end
BLOCKED_S = 0.2  # an event loop that runs nothing for so long is blocked
UNBLOCK = "Await an async client (AsyncOpenAI), or write `def` in place of `async def`: then each agent has a thread."
COLUMN = "agent_reward"  # the column in which rewards find what the agent returned
_LOOP = Lock()


@dataclass(frozen=True)
class Model:
    """The model as an agent gets it: pass these fields to any OpenAI client.   name: the model's name in requests."""

    base_url: str
    api_key: str = "unused"
    name: str = NAME


@dataclass(frozen=True)
class Failed:
    """Takes the place of a reward if the agent raised.  The event `reward_failed` then says: "returned nothing: …"."""

    why: str

    def __repr__(self) -> str:
        return f"nothing: {self.why}"


def agent_reward(completions: Sequence[Any], **columns: Any) -> list[Any]:
    """Return what the agents returned; a Failed for those that raised."""
    return list(columns[COLUMN])


class AgentRollouts:
    """The rollouts of a trainer, made by an agent.   file: of the agent.   silence_s: as in Desk.
    is_reward: whether the agent's return value is the reward.   rows: those of the current generation."""

    def __init__(
        self,
        agent: Callable[..., Any],
        trainer: Any,
        *,
        file: Path,
        silence_s: float | None,
        is_reward: bool,
        clock: Clock = time.monotonic,
    ) -> None:
        self._agent, self._trainer, self._file = agent, trainer, file
        self._silence_s, self._is_reward, self._clock = silence_s, is_reward, clock
        self.rows: Sequence[Mapping[str, Any]] = ()
        self.prompts: Sequence[Any] = ()  # messages in front of the last rollouts, as the agents wrote them
        self.tools: list[Any] = []  # schemas of the last rollouts' tools
        self.outcomes: list[Any] = []
        self._completions: Sequence[Any] = ()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told_at, self._warned = -EMIT_EVERY_S, False
        if not getattr(trainer._tokenizer, "response_template", None):
            set_call_form(trainer._tokenizer, for_trl=False)

    def generate(self, generate: Callable[[list[Any]], tuple[Any, ...]], prompts: list[Any]) -> tuple[Any, ...]:
        """Return what TRL's `_generate` returns, for rollouts that agents make; the completions have all messages."""
        trainer, tokenizer = self._trainer, self._trainer._tokenizer
        made = self._replayed(trainer.replayed) if trainer.replayed is not None else self._made(prompts)
        rollouts = lambda prompts, trainer: made  # noqa: E731
        with (
            _set(tokenizer, response_template=None),  # TRL reads no calls, which the agents have made
            _set(trainer, rollout_func=rollouts, _last_loaded_step=trainer.state.global_step),  # and loads no weights
        ):
            ids, own, mask, texts, *rest = generate(prompts)
        said = [
            messages if isinstance(prompt, list) else text
            for messages, text, prompt in zip(self._completions, texts, prompts, strict=True)
        ]
        return ids, own, mask, said, *rest

    def _made(self, prompts: list[Any]) -> dict[str, Any]:
        """Run the agents. Return TRL's fields of their rollouts."""
        episodes = self._run_agents()
        branches = [
            episode.conversation.rollout() or self._nothing(prompt)
            for episode, prompt in zip(episodes, prompts, strict=True)
        ]
        self.prompts, self._completions = [b.prompt for b in branches], [b.completion for b in branches]
        self.tools = json.loads(next((b.tools for b in branches if b.tools), "[]"))
        self.outcomes = [self._outcome(episode) for episode in episodes]
        self._report(episodes)
        has_logprobs = self._trainer.use_vllm or any(episode.answered for episode in episodes)
        logprobs = [branch.logprobs for branch in branches] if has_logprobs else [None]
        return {
            "prompt_ids": [branch.prompt_ids for branch in branches],
            "completion_ids": [branch.ids for branch in branches],
            "env_mask": [branch.mask for branch in branches],
            "logprobs": None if None in logprobs else logprobs,
            COLUMN: self.outcomes,
        }

    def _replayed(self, bundle: Any) -> dict[str, Any]:
        """Return TRL's fields of recorded rollouts."""
        self.prompts, self._completions = bundle.opened or bundle.prompts, bundle.completions
        self.outcomes = [None] * len(bundle.ids)  # the recorded rewards are used
        fields = {"prompt_ids": bundle.prompt_ids, "completion_ids": bundle.ids, "env_mask": bundle.mask}
        return {
            **{name: [*map(list, rows)] for name, rows in fields.items()},
            "logprobs": bundle.logprobs,
            COLUMN: self.outcomes,
        }

    def _nothing(self, prompt: Any) -> Branch:
        """Return a rollout without a sampled token, for an agent that has never got a reply."""
        end, said = self._trainer._tokenizer.eos_token_id, {"role": "assistant", "content": ""}
        ids = self._trainer._prompt_ids(prompt)
        return Branch("", (said,), 0, prompt_ids=ids, ids=[end], mask=[0], logprobs=[0.0], replies=(0,))

    def _run_agents(self) -> list[AgentEpisode]:
        """Run an agent for each row, and sample for them until all have ended."""
        if callable(prepare := getattr(self._agent, "prepare", None)):
            prepare(self.rows)  # in this thread
        desk = Desk(self._silence_s, self._clock)
        endpoint = Endpoint(desk.answer)
        try:
            episodes = [self._start(desk, endpoint, number, row) for number, row in enumerate(self.rows)]
            linger_s = LINGER_S
            while batch := desk.next_batch(linger_s):
                self._warn_of_blocking(len(batch), len(episodes))
                began = self._clock()
                for waiting, ids, logprobs in self._sample(batch):
                    desk.reply(waiting, ids, logprobs)
                linger_s = max(LINGER_S, self._clock() - began)
            return episodes
        finally:
            desk.close()
            endpoint.close()

    def _sample(self, batch: Sequence[Waiting]) -> Iterator[tuple[Waiting, list[int], list[float] | None]]:
        with _at_most(self._trainer, max(waiting.asked.room for waiting in batch)):
            before = [waiting.asked.before for waiting in batch]
            ids, logprobs = self._trainer._generate_single_turn(before, None, {}, num_generations=1)
        yield from zip(batch, ids, logprobs or [None] * len(ids), strict=True)

    def _start(self, desk: Desk, endpoint: Endpoint, number: int, row: Mapping[str, Any]) -> AgentEpisode:
        trainer = self._trainer
        chat = Chat(trainer._tokenizer, trainer.eos_token_ids, **trainer._template_options())
        key, episode = desk.open(number, row, Conversation(chat, trainer.max_completion_length, _context_of(trainer)))
        model, own_row = Model(endpoint.url(key)), copy.deepcopy(dict(row))
        Thread(target=self._run_agent, args=(desk, episode, own_row, model), daemon=True).start()
        return episode

    def _run_agent(self, desk: Desk, episode: AgentEpisode, row: dict[str, Any], model: Model) -> None:
        try:
            found = self._agent(row, model)
            is_async = inspect.iscoroutine(found)
            outcome = asyncio.run_coroutine_threadsafe(found, self._own_loop()).result() if is_async else found
        except BaseException as error:  # also sys.exit(), and a library's own kinds, such as a Rust panic
            outcome = error
        desk.finish(episode, outcome)

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """Return the one event loop of async agents, so that they can share clients."""
        with _LOOP:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                Thread(target=self._loop.run_forever, daemon=True).start()
                atexit.register(_end_tasks, self._loop)
            return self._loop

    def _warn_of_blocking(self, waiting: int, episodes: int) -> None:
        """Warn once if an async agent blocks the event loop of all, so that they call the model one after the other."""
        if self._loop is None or self._warned or waiting == episodes:
            return
        ran = Event()
        self._loop.call_soon_threadsafe(ran.set)
        if not ran.wait(BLOCKED_S):
            self._warned = True
            text = "an async agent blocks its event loop, so that the agents run one after the other. "
            self._trainer._reward_calls.host.emit("warning", f"{text}{UNBLOCK}")

    def _outcome(self, episode: AgentEpisode) -> Any:
        """Return the reward of an episode; None if it is unknown; a Failed if the agent raised."""
        outcome = episode.outcome
        if not isinstance(outcome, BaseException):
            trained = episode.conversation.rollout()
            by_session = trained is not None and isinstance(outcome, Mapping)
            return None if trained is None else outcome.get(trained.session) if by_session else outcome
        lost = isinstance(outcome, TimeoutError) or is_connection_error(outcome) or not self._is_reward
        return None if lost else Failed(self._words(episode))

    def _words(self, episode: AgentEpisode) -> str:
        """Return an episode's exception, its line, and the replica's refusal where the exception does not tell it."""
        error = episode.outcome
        own = "" if self._file.parent == Path(__file__).parent else str(self._file)  # "": the agent is not the user's
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
        at = f" ({self._file.name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
        told = not episode.refused or episode.refused[:40] in str(error)
        refused = "" if told else f"; the replica had refused a request of it: {episode.refused}"
        return f"the agent raised {type(error).__name__}: {str(error)[:300]}{at}{refused}"

    def _report(self, episodes: Sequence[AgentEpisode]) -> None:
        """Emit a warning, at most once a minute, about rollouts whose result is lost."""
        found = zip(episodes, self.outcomes, strict=True)
        lost = [e for e, value in found if value is None and (isinstance(e.outcome, BaseException) or not e.answered)]
        if not lost or self._clock() - self._told_at < EMIT_EVERY_S:
            return
        self._told_at = self._clock()
        raised = next((e for e in lost if isinstance(e.outcome, BaseException)), None)
        refused = next((e.refused for e in lost if e.refused), "")
        asked = f"the replica had refused its request: {refused}" if refused else "has not called the model"
        why = self._words(raised) if raised else f"the agent returned, and {asked}"
        text = f"{len(lost)} of {len(episodes)} rollouts of the agent have no result: {why}"
        self._trainer._reward_calls.host.emit("warning", text)


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks of agents that are left at the process's end, so that they can close what they hold."""

    async def cancel() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=END_S) if tasks else None

    with suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(cancel(), loop).result(2 * END_S)


def _context_of(trainer: Any) -> int:
    """Return how many ids the model, or its engine, can read."""
    if trainer.use_vllm:
        return trainer.vllm_generation.llm.llm_engine.model_config.max_model_len
    return getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None) or 2**31


def _at_most(trainer: Any, tokens: int) -> AbstractContextManager[None]:
    """Sample at most so many tokens inside a `with`."""
    if trainer.use_vllm:
        return _set(trainer.vllm_generation, max_completion_length=tokens)
    return _set(trainer.generation_config, max_new_tokens=tokens)


@contextmanager
def _set(owner: Any, **values: Any) -> Iterator[None]:
    """Give an object other attributes inside a `with`."""
    before = {name: getattr(owner, name) for name in values if hasattr(owner, name)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            delattr(owner, name)
        vars(owner).update(before)
