"""An OpenEnv server as an environment for TRL: one session per rollout; public methods are the tools.

    Calc = openenv_environment("http://127.0.0.1:8000")     the MCP tools that the server describes; without MCP, a tool
                                                            per kind of action, mostly one: `step`
    class Calc(OpenEnv):                                    tools of your own: types and a docstring with Args, as TRL
        _url = "http://127.0.0.1:8000"                      requires
        def add(self, a: int, b: int) -> str:
            ...
            return self._call("add", a=a, b=b)

    reset(**row) ──▶ {"type": "reset"} ─┐                            ┌─▶ text, after the last user message
    add(a=1, b=2) ─▶ {"type": "step"} ──┴─ one WebSocket, /ws ───────┼─▶ the tool's answer
                                                                     └─▶ ToolFailed: TRL shows the model
                                                                         {'error': …, 'error_kind': …}
    metadata (of the observation)   error_kind, hint_template_key ──▶ the hint, unchanged (spans.py, hints.py)
    _sites                          every failed call: t, tool, error, and these two
    _messages_before(t)             the messages before step t, for a teacher: from the server's `State.history` if it
                                    has one (rfc-openenv-state-replay.md), else from the answers seen here

    reward      _reward_is = "sum"     each observation has the reward of its step (OpenEnv's own meaning), or 0 or
                                       None until the end (a delayed reward): the rewards are added
                             "last"    each observation has the total so far: the last observation counts
                                       The reset's own reward does not count: no action earned it
                None                   the session was lost, or the episode ended and the server gave no reward
                0.0                    the episode has not ended, and there was no reward so far
                AtMostWorst            a call lost the session, but a new session works at once: the call caused it.
                                       The reward so far counts, but not above the group's worst (decision 065)
    done        ends the episode: later calls are not sent, and do not change the reward

If a server restarts or is full, the next reset waits up to `_patience_s` seconds. This module needs `websockets`, not
`openenv`: OpenEnv 0.10 requires older pandas and pillow than packages used with TRL.

Not promised: to blame a call that stops the whole server; a session that survives its connection; images; servers
without /ws, which have one episode for all.
"""

import gc
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import count
from threading import Lock
from typing import Any, Literal
from weakref import WeakSet

from inner.errors import InnerError
from inner.extras.openenv.action_tools import action_tools, calls_tools
from inner.extras.openenv.mcp_tools import tool_methods
from inner.extras.openenv.observations import failure_of, observation_text
from inner.extras.openenv.wire import (
    ServerFull,
    exchange_message,
    lost_words,
    next_step,
    open_socket,
    read_schema,
    server_urls,
)
from inner.network import network_words
from inner.replay.actions import Message
from inner.usercode.attempts import LARGEST, AtMostWorst

_SERVERS = count()  # deals sessions to the servers in turn
_TOLD: set[str] = set()  # lines that the log has already
MOST_TOLD = 20
_BEGUN: set[str] = set()  # servers that have begun an episode in this process
_OPEN: "WeakSet[OpenEnv]" = WeakSet()  # sessions of this process, maybe in several threads
_OPENING = Lock()
_CLOSED = "environment is closed"  # the server ended an idle session; the connection is still open
GONE, OVER = "the environment is gone", "the episode is over"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0  # seconds between two attempts to reach a server
AT_ONCE_S = 10.0  # seconds for each answer of a new session after a lost session


class ToolFailed(Exception):
    """A tool's failure.   record: {"error", "error_kind", "hint_template_key"}

    TRL counts a tool as failed only if it raises, and shows the model `str({"error": str(exception)})`. So the text has
    a repr that appends the other keys."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        super().__init__(record["error"])
        self.record = dict(record)

    def __str__(self) -> str:
        return _ErrorText(self.record)


class _ErrorText(str):
    """The text of a record's error. Its repr is the part of the record's repr behind "'error': "."""

    _rest: list[str]

    def __new__(cls, record: Mapping[str, Any]) -> "_ErrorText":
        text = super().__new__(cls, record["error"])
        text._rest = [f"{key!r}: {value!r}" for key, value in record.items() if key != "error"]
        return text

    def __repr__(self) -> str:
        return ", ".join([super().__repr__(), *self._rest])


class OpenEnv:
    """One session. All names but tools, reset and get_reward begin with _: TRL uses public methods as tools."""

    _url: str | Sequence[str] | None = None  # several: copies of one server, for servers with few sessions
    _headers: Mapping[str, str] | None = None  # of each connection, such as {"Authorization": "Bearer …"}
    _timeout_s: float = 60.0  # seconds to wait for one answer
    _patience_s: float = 60.0  # longest wait of a reset for a server that restarts or is full
    _reward_is: Literal["sum", "last"] = "sum"
    _tools: Collection[str] = ()  # the server's tools, if known
    _sleep: Callable[[float], None] = staticmethod(time.sleep)

    def __init__(self) -> None:
        self._socket: Any = None
        self._server, self._busy = next(_SERVERS), False
        self._begin_episode()

    def reset(self, **row: Any) -> str | None:
        """Begin an episode. Send the row's columns to the server's reset, which takes the columns that it knows."""
        self._begin_episode()
        given = {name: value for name, value in row.items() if name != "prompt" and _is_json(value)}
        reply = self._begin_patiently(given)
        if "refused" in reply:
            raise InnerError(
                f"the environment at {self._address()} could not begin an episode: {reply['refused']}. Its "
                f"`reset` was given the row's columns {sorted(given)}. Correct it there, or rename the column."
            )
        text = self._record_observation(None, reply)
        if self._done:
            said = (
                f"the environment at {self._address()} ended the episode at its `reset`, which was given the row's "
                f"columns {sorted(given)}, and said: {text[:2000] or 'nothing'}. Correct it there."
            )
            if self._address() not in _BEGUN:
                raise InnerError(said)
            _tell_once(f"{said} Its rollout has no reward.")  # the fault of this row: other episodes have begun
        _BEGUN.add(self._address())
        return f"\n{text}" if text else None

    def get_reward(self) -> float | None:
        """Return the episode's reward so far; None if the session was lost, or the episode ended without a reward."""
        if (self._lost and not self._broke) or (self._done and not self._rewards):
            return None
        so_far = float(self._rewards[-1] if self._reward_is == "last" and self._rewards else sum(self._rewards))
        return AtMostWorst(so_far) if self._broke else so_far

    # methods that a subclass may override

    def _action(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server's action for a tool call."""
        return {"type": "call_tool", "tool_name": tool, "arguments": dict(arguments)}

    def _read_action(self, action: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return (tool, arguments) of an action: the inverse of `_action`."""
        return action["tool_name"], dict(action.get("arguments") or {})

    def _text(self, observation: Mapping[str, Any]) -> str:
        """Return an observation's text, as the model reads it."""
        return observation_text(observation)

    # one call

    def _call(self, tool: str, /, **arguments: Any) -> Any:
        """Return the tool's answer. Raises ToolFailed, which TRL shows to the model."""
        if self._lost or self._done:
            return GONE if self._lost else OVER
        action, sites = self._action(tool, arguments), self._sites
        was_open = self._socket is not None and self._socket.state.name == "OPEN"
        try:
            reply = self._send_request("step", action)
        except (OSError, EOFError) as error:
            if self._sites is sites:  # else this call outlived inner.sampling.tool_timeout_s and its episode
                self._lose_session()
                self._broke = was_open and self._answers_at_once()
                if self._broke:
                    _tell_once(f"a call of {tool} at {self._address()} ended its session: {lost_words(error)}")
            return GONE
        if self._sites is not sites:
            return GONE
        failure = failure_of(reply, self._tools)
        if failure and _CLOSED in failure["error"]:
            return self._lose_session()
        text = self._record_observation(action, reply)
        if failure is None:
            return text
        self._sites.append({"t": len(self._observed_steps) - 1, "tool": tool, **failure})
        if failure["error_kind"] == "transport_error":  # the student did not cause this error
            return failure["error"]
        raise ToolFailed(failure)

    def _lose_session(self) -> str:
        self._lost = True
        self._close()
        return GONE

    def _answers_at_once(self) -> bool:
        """Whether the server answers a new session (kept for the next reset), or reports that it is full."""
        within = min(self._timeout_s, AT_ONCE_S)
        try:
            self._open(within)
            for kind, data in (("reset", {}), ("state", None)):
                exchange_message(self._socket, kind, data, within)
        except (OSError, EOFError) as error:
            self._close()
            return isinstance(error, ServerFull)
        return True

    def _record_observation(self, action: Mapping[str, Any] | None, reply: Mapping[str, Any]) -> str:
        text = self._text(reply.get("observation") or {})
        failure = failure_of(reply, self._tools)
        self._observed_steps.append((action, text if failure is None else str(failure)))
        reward = reply.get("reward")
        if action is not None and isinstance(reward, int | float) and -LARGEST <= reward <= LARGEST:
            self._rewards.append(reward)
        self._done = bool(reply.get("done"))
        return text

    # replay

    def _messages_before(self, t: int) -> list[Message]:
        """Return the messages after the prompt up to step t - 1's observation; t = 1: before the first call."""
        history = self._server_history()
        seen = self._observed_steps if history is None else history
        if not 0 < t <= len(seen):
            raise InnerError(f"this episode has {len(seen) - 1} steps; there is nothing before step {t}.")
        messages: list[Message] = []
        for action, text in seen[:t]:
            if action is None:
                messages += [{"role": "user", "content": text}] if text else []
            else:
                name, arguments = self._read_action(action)
                call = {"type": "function", "function": {"name": name, "arguments": arguments}}
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
                messages.append({"role": "tool", "name": name, "content": text})
        return messages

    def _server_history(self) -> list[tuple[Mapping[str, Any] | None, str]] | None:
        """Return [(action, text)] from the server's history; None if it lacks a part of this episode."""
        if self._lost or self._socket is None:  # a new session's history lacks this episode
            return None
        try:
            history = self._send_request("state", None).get("history")
        except (OSError, EOFError):
            self._lose_session()
            return None
        if not isinstance(history, list) or len(history) != len(self._observed_steps):
            return None
        if not all(isinstance(e, Mapping) and isinstance(e.get("observation"), Mapping) for e in history):
            return None
        return [(e.get("action"), self._remembered_text(e)) for e in history]

    def _remembered_text(self, entry: Mapping[str, Any]) -> str:
        reply = {"observation": entry["observation"], "metadata": entry["observation"].get("metadata")}
        failure = failure_of(reply, self._tools)
        return self._text(entry["observation"]) if failure is None else str(failure)

    # the wire

    def _begin_episode(self) -> None:
        self._observed_steps: list[tuple[Mapping[str, Any] | None, str]] = []  # (action, text); the first is reset's
        self._sites: list[dict[str, Any]] = []
        self._rewards: list[float] = []
        self._lost = self._done = self._broke = False

    def _send_request(self, kind: str, data: Mapping[str, Any] | None) -> dict[str, Any]:
        """Send a request, return its answer. OSError or EOFError: the connection cannot be used any more."""
        self._busy = True
        try:
            if self._socket is None:
                self._open(self._timeout_s)
            return exchange_message(self._socket, kind, data, self._timeout_s)
        finally:
            self._busy = False

    def _open(self, timeout_s: float) -> None:
        self._socket = open_socket(self._address(), self._headers, timeout_s)
        with _OPENING:
            _OPEN.add(self)

    def _address(self) -> str:
        urls = server_urls(self._url)
        return urls[self._server % len(urls)]

    def _begin_patiently(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Repeat the request for a `reset` while the server restarts, is full, or has ended an idle session."""
        pause, waited, tries, full = 0.0, 0.0, 0, 0
        servers = len(server_urls(self._url))
        while True:
            try:
                return self._send_request("reset", data)
            except (OSError, EOFError) as error:
                self._close()
                address = self._address()
                held = isinstance(error, ServerFull) and 0 < error.sessions <= _idle_sessions(address)
                tries, full = tries + 1, full + 1 if held else 0
                if full == 1:
                    gc.collect()  # sessions of a former trainer
                waited += self._timeout_s if isinstance(error, TimeoutError) else 0.0
                trouble = _unreachable(address, error, waited)
                if waited >= self._patience_s or full > servers:
                    raise InnerError(trouble) from error
                if pause == FIRST_PAUSE_S and tries % servers == 0:  # the first failure may be an old connection
                    print(f"{trouble} Waiting up to {self._patience_s:g} s.", file=sys.stderr, flush=True)
            self._server += 1
            if tries % servers:
                continue
            self._sleep(pause)
            waited += pause
            pause = min(max(2 * pause, FIRST_PAUSE_S), LONGEST_PAUSE_S)

    def _close(self) -> None:
        if self._socket is not None:
            with suppress(Exception):
                self._socket.close()
        self._socket = None

    def __del__(self) -> None:
        if not sys.is_finalizing():  # else close() waits forever for the socket's threads, which are gone
            self._close()


class _Acting(OpenEnv):
    """A session of a server without MCP tools: a tool call is an action."""

    _fixed: Mapping[str, Mapping[str, Any]] = {}  # tool -> the fields of its action that the model does not give

    def _action(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._fixed[tool], **arguments}

    def _read_action(self, action: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        fits = [t for t, fixed in self._fixed.items() if all(action.get(k) == value for k, value in fixed.items())]
        tool = max(fits or self._fixed, key=lambda one: len(self._fixed[one]))
        aside = ("metadata", *self._fixed[tool])
        return tool, {name: value for name, value in action.items() if name not in aside}


def _tell_once(text: str) -> None:
    if text not in _TOLD and len(_TOLD) < MOST_TOLD:
        _TOLD.add(text)
        print(text, file=sys.stderr, flush=True)


def _idle_sessions(address: str) -> int:
    """Return the number of this process's idle sessions at the address; a full server never ends these sessions."""
    with _OPENING:
        others = list(_OPEN)
    return sum(one._socket is not None and not one._busy and one._address() == address for one in others)


def _unreachable(address: str, error: Exception, waited: float) -> str:
    long = f" for {waited:.0f} s" if waited else ""
    return (
        f"the environment at {address} gives no session{long}: {error or type(error).__name__}. "
        f"{next_step(error, address)}"
    )


def openenv_environment(
    url: str | Sequence[str] | None = None,
    name: str = "OpenEnvironment",
    *,
    reward_is: Literal["sum", "last"] = "sum",
    timeout_s: float = OpenEnv._timeout_s,
    headers: Mapping[str, str] | None = None,
) -> type[OpenEnv]:
    """Return a class with a method per MCP tool of the server at `url` (default: the value of OPENENV_URL).

    A server without MCP tools gets a method per kind of action, mostly one: `step`.
    url         several: copies of one server, each with a part of the sessions
    reward_is   "sum": a step's own reward; "last": the total so far.   timeout_s: limit for one answer
    headers     of each connection, such as {"Authorization": "Bearer …"}"""
    if reward_is not in ("sum", "last"):
        raise InnerError(f'reward_is = {reward_is!r} must be "sum" (of the steps) or "last" (each is a total so far).')
    settings = {"_url": url, "_reward_is": reward_is, "_timeout_s": timeout_s, "_headers": headers}
    probe = type(name, (OpenEnv,), settings)()
    where = probe._address()
    try:
        tools, base = _find_tools(probe)
    except (OSError, EOFError) as error:
        step = next_step(error, where)
        raise InnerError(f"no OpenEnv server answers at {where}: {network_words(error)}. {step}") from error
    finally:
        probe._close()
    try:
        methods = tool_methods(tools, taken=dir(OpenEnv))
        settings["_tools"] = frozenset(tool["name"] for tool in tools)
    except (TypeError, AttributeError, LookupError, ValueError, RecursionError) as error:
        raise InnerError(
            f"the server at {where} lists tools that are not MCP tools ({error!r:.200}). "
            "Correct the list on the server."
        ) from error
    if base is _Acting:
        settings["_fixed"] = {tool["name"]: tool["fixed"] for tool in tools}
    made: Any = type(name, (base,), {**settings, "__doc__": f"The tools of {where}.", **methods})
    return made


def _find_tools(probe: OpenEnv) -> tuple[list[Any], type[OpenEnv]]:
    """Return the server's tools, and the class of their session. OSError or EOFError: the server does not answer."""
    listed = (probe._send_request("step", {"type": "list_tools"}).get("observation") or {}).get("tools")
    if listed:
        return listed, OpenEnv
    action = read_schema(probe._address(), probe._headers, probe._timeout_s)
    if calls_tools(action):  # an MCP server with a class of its own for calls
        told = probe._send_request("mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}).get("result")
        if listed := isinstance(told, Mapping) and told.get("tools"):
            return listed, OpenEnv
    if action:
        return action_tools(action), _Acting
    raise InnerError(
        f"the server at {probe._address()} lists no tools, so it is not an MCP environment, and has no schema "
        "of its action at /schema. Write a subclass of inner.extras.openenv.client.OpenEnv with a method per action."
    )


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _is_json(v) for k, v in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float | bool)
