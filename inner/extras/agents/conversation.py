"""Turn the requests of one agent into the ids of one rollout.

    request 1   system, user                     ─▶ prompt ids          ─▶ sampled ids        mask 1
    request 2   system, user, reply, result      ─▶   … + result's ids  ─▶ + sampled ids      mask 0, then 1
    request 3   system, another user             ─▶ a branch of its own

A request that continues known messages continues their ids; no token is written anew.  Any other request begins a
branch: a second conversation, or a history that the agent has rewritten.  We train on only one branch: the branch with
the most sampled tokens; if several branches have equally many, the newest of these branches.

A rollout ends even if its agent goes on: after BRANCHES times the tokens of one branch, or REQUESTS requests.

Not promised: learning from the other branches; a history that the agent shortens at its end.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inner.errors import InnerError
from inner.extras.agents.chat import Chat, Message, is_same, template_messages
from inner.replay.actions import plain_text

BRANCHES = 16  # all branches of a rollout together may have this many times the tokens of one branch
REQUESTS = 1000
OPENAI = "This model's maximum context length is"  # the words by which clients know that a rollout is too long


class TooLong(InnerError):
    """A request whose ids leave no room for a reply."""


@dataclass(frozen=True)
class Branch:
    """Messages and their ids, after a reply.   ids, mask, logprobs: behind the prompt; mask: 1 if the model sampled.

    logprobs: None if the engine gives none; 0 for ids that were not sampled.   first: number of the prompt's messages.
    session: the run of the agent that asked, if an agent has several runs (endpoint.py).
    replies: places of the model's own messages; an agent may write an assistant's message itself."""

    tools: str
    messages: tuple[Message, ...]
    first: int
    prompt_ids: list[int]
    ids: list[int]
    mask: list[int]
    logprobs: list[float] | None
    session: str = ""
    replies: tuple[int, ...] = ()

    @property
    def sampled(self) -> int:
        return sum(self.mask)

    @property
    def prompt(self) -> list[Message]:
        return [dict(message) for message in self.messages[: self.first]]

    @property
    def completion(self) -> list[Message]:
        """The messages behind the prompt. An assistant's message that the agent wrote counts as a user's."""
        said = enumerate(self.messages)
        return [
            {**message, "role": "user"} if message["role"] == "assistant" and at not in self.replies else dict(message)
            for at, message in said
            if at >= self.first
        ]


@dataclass(frozen=True)
class Request:
    """A request for one reply.   inserted: ids between the branch's last and the reply.   room: tokens of the reply.
    calls: whether the agent takes tool calls; if not, a call in the reply is text."""

    branch: Branch | None
    messages: tuple[Message, ...]
    tools: Any
    inserted: list[int]
    room: int
    stop: tuple[str, ...] = ()
    session: str = ""
    calls: bool = True

    @property
    def before(self) -> list[int]:
        """The ids that the model reads."""
        return self.inserted if self.branch is None else self.branch.prompt_ids + self.branch.ids + self.inserted


class Conversation:
    """The branches of one agent's rollout.   most: ids behind a prompt.   context: ids that the model can read."""

    def __init__(self, chat: Chat, most: int, context: int) -> None:
        self._chat, self._most, self._context = chat, most, context
        self.branches: list[Branch] = []
        self._asked, self._sampled = 0, 0  # requests, and sampled tokens of all branches

    def ask(
        self,
        sent: Sequence[Any],
        tools: Any,
        *,
        limit: int | None = None,
        stop: tuple[str, ...] = (),
        session: str = "",
        calls: bool = True,
    ) -> Request:
        """Return the ids of a request.   limit: the agent's own limit of a reply's tokens.   Raises InnerError."""
        self._asked += 1
        if self._asked > REQUESTS or self._sampled >= BRANCHES * self._most:
            raise TooLong(
                f"{OPENAI} {self._context} tokens. This rollout has had {self._asked - 1:,} replies with "
                f"{self._sampled:,} tokens, and may have at most {REQUESTS:,} replies and {BRANCHES} × "
                f"inner.sampling.max_completion_length = {self._most} tokens"
            )
        messages = tuple(template_messages(sent))
        branch = self._continued(messages, _key(tools), session)
        if branch is None:
            inserted, used = self._chat.opened(messages, tools), 0
        else:
            inserted = self._joined(branch.ids[-1], self._chat.behind(messages[len(branch.messages) :]))
            used = len(branch.ids) + len(inserted)
        before = len(inserted) if branch is None else len(branch.prompt_ids) + used
        room = min(self._most - used, self._context - before)
        if room < 1:
            raise TooLong(
                f"{OPENAI} {self._context} tokens, of which {self._most} may be behind the prompt "
                f"(inner.sampling.max_completion_length). This rollout has {before}, of which {used} are behind it"
            )
        room = min(room, limit or room)
        return Request(branch, messages, tools, inserted=inserted, room=room, stop=stop, session=session, calls=calls)

    def answer(self, asked: Request, ids: Sequence[int], logprobs: Sequence[float] | None) -> tuple[Message, str]:
        """Record the sampled ids. Return the reply and why it ended: "stop", "length" or "tool_calls"."""
        kept, text = self._cut(asked, ids)
        self._sampled += len(kept)
        reply = self._chat.reply(kept, asked.before, asked.tools if asked.calls else None)
        known = template_messages([reply])[0]  # with the stop, which the agent may add again
        if text is not None:
            reply["content"] = text
        self._record(asked, kept, None if logprobs is None else list(logprobs[: len(kept)]), known)
        ended = "stop" if text is not None or kept[-1] in self._chat.ends else "length"
        return reply, "tool_calls" if reply.get("tool_calls") else ended

    def rollout(self) -> Branch | None:
        """Return the branch to train on; None if the agent has never got a reply."""
        return max(reversed(self.branches), key=lambda branch: branch.sampled, default=None)

    def _joined(self, last: int, behind: list[int]) -> list[int]:
        """Return the ids to insert behind a reply's last id, so that the turn has exactly one end.

        Some templates open the next turn with the end (GLM's `<|user|>`, Gemma 4's `<|tool_response>`)."""
        begins = bool(behind) and behind[0] in self._chat.ends
        if last in self._chat.ends:
            return behind[1:] if begins and behind[0] == last else behind
        return behind if begins else [int(self._chat.tokenizer.eos_token_id), *behind]

    def _continued(self, messages: tuple[Message, ...], tools: str, session: str) -> Branch | None:
        """Return the longest branch whose messages these continue."""
        own = [branch for branch in self.branches if (branch.tools, branch.session) == (tools, session)]
        fits = [branch for branch in own if _continues(messages, branch.messages)]
        rank = lambda branch: (len(branch.messages), _is_exact(messages, branch.messages))  # noqa: E731
        return max(reversed(fits), key=rank, default=None)

    def _cut(self, asked: Request, ids: Sequence[int]) -> tuple[list[int], str | None]:
        """Return the ids up to the limit or to the first stop, and the text before the stop; None without a stop."""
        kept = list(ids[: asked.room])
        text = self._chat.text(kept) if asked.stop else ""
        found = [text.index(stop) for stop in asked.stop if stop in text]
        if not found:
            return kept, None
        least, most = 1, len(kept)  # the fewest ids whose text has the stop
        while least < most:
            middle = (least + most) // 2
            has_stop = any(stop in self._chat.text(kept[:middle]) for stop in asked.stop)
            least, most = (least, middle) if has_stop else (middle + 1, most)
        return kept[:least], text[: min(found)]

    def _record(self, asked: Request, ids: list[int], logprobs: list[float] | None, reply: Message) -> None:
        old, gap = asked.branch, [] if asked.branch is None else asked.inserted
        known, before = ((), None) if old is None else (old.messages, old.logprobs)
        messages = (*known, *asked.messages[len(known) :], reply)
        new = Branch(
            tools=_key(asked.tools),
            messages=messages,
            first=len(asked.messages) if old is None else old.first,
            prompt_ids=asked.inserted if old is None else old.prompt_ids,
            ids=([] if old is None else old.ids) + gap + ids,
            mask=([] if old is None else old.mask) + [0] * len(gap) + [1] * len(ids),
            logprobs=None if logprobs is None else (before or []) + [0.0] * len(gap) + logprobs,
            session=asked.session,
            replies=(*(() if old is None else old.replies), len(messages) - 1),
        )
        self.branches = [branch for branch in self.branches if branch is not old] + [new]


def _continues(messages: tuple[Message, ...], known: tuple[Message, ...]) -> bool:
    return len(messages) > len(known) and all(map(is_same, messages, known))


def _is_exact(messages: tuple[Message, ...], known: tuple[Message, ...]) -> bool:
    """Whether the known texts came back whole, and not only a part of one."""
    texts = zip(messages, known, strict=False)
    return all(plain_text(sent["content"]).strip() == plain_text(own["content"]).strip() for sent, own in texts)


def _key(tools: Any) -> str:
    return json.dumps(tools or [], sort_keys=True, default=str)
