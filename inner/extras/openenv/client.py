"""An OpenEnv server as an environment for TRL: one session per rollout; public methods are the tools.

    Calc = openenv_environment("http://127.0.0.1:8000")          an MCP server: the tools that it describes
    class Calc(OpenEnv):                                         any other server: a method per tool
        _url = "http://127.0.0.1:8000"
        def add(self, a: int, b: int) -> str:
            ...                                              types and a docstring with Args, as TRL requires
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
                None                   the session was lost, or the episode ended and the server gave no reward
                0.0                    the episode has not ended, and there was no reward so far
                AtMostWorst            a call lost the session, but a new session works at once: the call caused it.
                                       The reward so far counts, but not above the group's worst (decision 065)
    done        ends the episode: later calls are not sent, and do not change the reward

If a server restarts or is full, the next reset waits up to `_patience_s` seconds. This module needs `websockets`, not
`openenv`: OpenEnv 0.10 requires older pandas and pillow than packages used with TRL.

Not promised: to blame a call that stops the whole server; a session that survives its connection; more than one
environment server per class; images.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from inner.errors import InnerError
from inner.extras.openenv.mcp_tools import tool_methods
from inner.replay.actions import Message
from inner.replay.untrusted import load_json
from inner.usercode.attempts import LARGEST, AtMostWorst

URL_ENV = "OPENENV_URL"
# OpenEnv's names of errors (mcp_types.ToolErrorType) -> our names; other names stay. execution_error is too general (a
# wrong type also gives it), so the hint reads the error's text.
KINDS = {"tool_not_found": "unknown_tool", "invalid_args": "bad_arguments"}
# fastmcp's text for arguments that do not fit; OpenEnv 0.10 reports them as execution_error or invalid_args
_MISFIT = re.compile(r"\d+ validation errors? for call\[")
_NO_SESSION = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")  # the server hangs up after these errors
_CLOSED = "environment is closed"  # the server ended an idle session; the connection is still open
GONE, OVER = "the environment is gone", "the episode is over"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0  # seconds between two attempts to reach a server
AT_ONCE_S = 10.0  # seconds for each answer of a new session after a lost one
MOST_MESSAGE = 16 << 20  # bytes, unpacked: half a megabyte can unpack to 500 megabytes
_TEXTS = ("text", "message", "result", "output", "content")  # fields whose value alone is an observation's text
_ASIDE = ("metadata", "done", "reward", "tool_name")  # fields that the model does not read
_EMPTY: tuple[Any, ...] = (None, "", [], {})  # not 0 and False, which say something


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
    """The error's text, whose repr is the rest of the record's repr after "'error': "."""

    _rest: list[str]

    def __new__(cls, record: Mapping[str, Any]) -> "_ErrorText":
        text = super().__new__(cls, record["error"])
        text._rest = [f"{key!r}: {value!r}" for key, value in record.items() if key != "error"]
        return text

    def __repr__(self) -> str:
        return ", ".join([super().__repr__(), *self._rest])


class OpenEnv:
    """One session. All names but tools, reset and get_reward begin with _: TRL uses public methods as tools."""

    _url: str | None = None
    _timeout_s: float = 60.0  # seconds to wait for one answer
    _patience_s: float = 60.0  # longest wait of a reset for a server that restarts or is full
    _reward_is: Literal["sum", "last"] = "sum"
    _tools: Collection[str] = ()  # the server's tools, if known
    _sleep: Callable[[float], None] = staticmethod(time.sleep)

    def __init__(self) -> None:
        self._socket: Any = None
        self._begin_episode()

    def reset(self, **row: Any) -> str | None:
        """Begin an episode. Send the row's columns to the server's reset, which takes the columns that it knows."""
        self._begin_episode()
        given = {name: value for name, value in row.items() if name != "prompt" and _is_json(value)}
        reply = self._send_patiently("reset", given)
        if "refused" in reply:
            raise InnerError(
                f"the environment at {_server_url(self._url)} could not begin an episode: {reply['refused']}. Its "
                f"`reset` was given the row's columns {sorted(given)}. Correct it there, or rename the column."
            )
        text = self._record_observation(None, reply)
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
        except (OSError, EOFError):
            if self._sites is sites:  # else this call outlived inner.sampling.tool_timeout_s and its episode
                self._lose_session()
                self._broke = was_open and self._answers_at_once()
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
            self._socket = _open_socket(self._url, within)
            for kind, data in (("reset", {}), ("state", None)):
                _exchange_message(self._socket, kind, data, within)
        except (OSError, EOFError) as error:
            self._close()
            return "CAPACITY_REACHED" in str(error)
        return True

    def _record_observation(self, action: Mapping[str, Any] | None, reply: Mapping[str, Any]) -> str:
        text = self._text(reply.get("observation") or {})
        failure = failure_of(reply, self._tools)
        self._observed_steps.append((action, text if failure is None else str(failure)))
        reward = reply.get("reward")
        if isinstance(reward, int | float) and -LARGEST <= reward <= LARGEST:
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
        self._socket = self._socket or _open_socket(self._url, self._timeout_s)
        return _exchange_message(self._socket, kind, data, self._timeout_s)

    def _send_patiently(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Repeat `_send_request` while the server restarts, is full, or has ended an idle session."""
        pause, waited = 0.0, 0.0
        while True:
            try:
                return self._send_request(kind, data)
            except (OSError, EOFError) as error:
                self._close()
                waited += self._timeout_s if isinstance(error, TimeoutError) else 0.0
                trouble = self._unreachable(error, waited)
                if waited >= self._patience_s:
                    raise InnerError(trouble) from error
                if pause == FIRST_PAUSE_S:  # the second failure: the first may have been an old connection
                    print(f"{trouble} Waiting up to {self._patience_s:g} s.", file=sys.stderr, flush=True)
            self._sleep(pause)
            waited += pause
            pause = min(max(2 * pause, FIRST_PAUSE_S), LONGEST_PAUSE_S)

    def _unreachable(self, error: Exception, waited: float) -> str:
        long = f" for {waited:.0f} s" if waited else ""
        return (
            f"the environment at {_server_url(self._url)} gives no session{long}: {error or type(error).__name__}. "
            f"Start it, or set {URL_ENV}; it needs a session per rollout of every replica (max_concurrent_envs)."
        )

    def _close(self) -> None:
        if self._socket is not None:
            with suppress(Exception):
                self._socket.close()
        self._socket = None

    def __del__(self) -> None:
        if not sys.is_finalizing():  # else close() waits forever for the socket's threads, which are gone
            self._close()


def openenv_environment(
    url: str | None = None,
    name: str = "OpenEnvironment",
    *,
    reward_is: Literal["sum", "last"] = "sum",
    timeout_s: float = OpenEnv._timeout_s,
) -> type[OpenEnv]:
    """Return a class with a method per tool of the MCP server at `url` (default: the value of OPENENV_URL).

    reward_is   "sum": a step's own reward; "last": the total so far.   timeout_s: limit for one answer"""
    if reward_is not in ("sum", "last"):
        raise InnerError(f'reward_is = {reward_is!r} must be "sum" (each step\'s own) or "last" (the total so far).')
    settings = {"_url": url, "_reward_is": reward_is, "_timeout_s": timeout_s}
    probe = type(name, (OpenEnv,), settings)()
    try:
        tools = (probe._send_request("step", {"type": "list_tools"}).get("observation") or {}).get("tools")
    except (OSError, EOFError) as error:
        raise InnerError(
            f"no OpenEnv server answers at {_server_url(url)}: {error}. Start it, or set {URL_ENV}."
        ) from error
    finally:
        probe._close()
    if not tools:
        raise InnerError(
            f"the server at {_server_url(url)} lists no tools, so it is not an MCP environment. Write a class on "
            "inner.extras.openenv.client.OpenEnv with a method per tool."
        )
    try:
        methods = tool_methods(tools, taken=dir(OpenEnv))
        settings["_tools"] = frozenset(tool["name"] for tool in tools)
    except (TypeError, AttributeError, LookupError, ValueError, RecursionError) as error:
        raise InnerError(
            f"the server at {_server_url(url)} lists tools that are not MCP tools ({error!r:.200}). "
            "Correct the list on the server."
        ) from error
    return type(name, (OpenEnv,), {**settings, "__doc__": f"The tools of {_server_url(url)}.", **methods})


def failure_of(reply: Mapping[str, Any], tools: Collection[str] = ()) -> dict[str, Any] | None:
    """Return {"error", "error_kind", "hint_template_key"} of a server's answer; None if nothing failed.

    A call failed if its metadata have an error_kind, if an MCP tool reports an error, or if the server refused it.
    tools: names of the server's tools.  A failure of one of these is never reported as an unknown tool."""
    observation = reply.get("observation") or {}
    metadata = reply.get("metadata") or observation.get("metadata") or {}
    error = observation.get("error")
    result = observation.get("result")
    broken = isinstance(result, Mapping) and (result.get("is_error") or result.get("isError"))
    kind = metadata.get("error_kind") or (error.get("error_type") if isinstance(error, Mapping) else None)
    if not kind and not broken and "refused" not in reply:
        return None
    text = reply.get("refused") or (error.get("message") if isinstance(error, Mapping) else error)
    text = str(text or metadata.get("error") or observation_text(observation) or kind)
    kind = str(kind or ("bad_arguments" if "refused" in reply else "execution_error"))
    if kind == "tool_not_found" and observation.get("tool_name") in tools:
        kind = "execution_error"  # OpenEnv 0.10 calls any text with "not found" tool_not_found
    if kind == "execution_error" and _MISFIT.match(text):
        kind = "invalid_args"
    failure = {"error": text, "error_kind": KINDS.get(kind, kind)}
    hinted = metadata.get("hint_template_key")
    return {**failure, "hint_template_key": hinted} if hinted else failure


def observation_text(observation: Mapping[str, Any]) -> str:
    """Return an observation's text: an MCP tool's result, else all of it as JSON, or only the text of a lone field."""
    result = observation.get("result")
    if isinstance(result, Mapping) and ("content" in result or "data" in result):
        content = result["content"] if isinstance(result.get("content"), list) else []
        parts = [p["text"] for p in content if isinstance(p, Mapping) and isinstance(p.get("text"), str)]
        return "\n".join(parts) if parts else str(result.get("data", ""))
    told = {name: value for name, value in observation.items() if name not in _ASIDE and value not in _EMPTY}
    name, value = next(iter(told.items()), ("", None))
    if len(told) == 1 and name in _TEXTS and isinstance(value, str | int | float):
        return str(value)
    return json.dumps(told, ensure_ascii=False) if told else ""


def _exchange_message(socket: Any, kind: str, data: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    from websockets.exceptions import WebSocketException

    message = {"type": kind} if data is None else {"type": kind, "data": data}
    try:
        with suppress(WebSocketException):  # if the server has hung up, we read the reason below
            socket.send(json.dumps(message))
        answer = load_json(socket.recv(timeout=timeout_s))
        reply = _checked_object(_checked_object(answer, "").get("data"), "data")
        observation = _checked_object(reply.get("observation"), "observation")
        for owner in (reply, observation):
            _checked_object(owner.get("metadata"), "metadata")
    except (WebSocketException, ValueError) as error:
        raise EOFError(str(error)) from error
    return reply if answer.get("type") != "error" else _read_refusal(reply)


def _checked_object(value: Any, name: str) -> dict[str, Any]:
    """Return the object; {} for a missing one that has a name.   Raises ValueError for other values."""
    if isinstance(value, dict) or (name and value is None):
        return value or {}
    raise ValueError(f"not an OpenEnv server's answer: {name or 'it'} is not an object, but {str(value)[:80]!r}")


def _read_refusal(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server's error as a reply: a wrong action or a broken tool. EOFError if it ends the session."""
    code = reply.get("code")
    text = str(reply.get("message") or "no reason given")
    if code in _NO_SESSION:
        raise EOFError(f"{text} ({code})")
    details = reply.get("errors")
    if isinstance(details, list) and all(isinstance(e, Mapping) for e in details) and details:
        text = "; ".join(f"{'.'.join(map(str, e.get('loc') or ()))}: {e.get('msg')}" for e in details)
    kind = "bad_arguments" if code == "VALIDATION_ERROR" else "exception"
    return {"refused": text, "observation": {}, "metadata": {"error_kind": kind}}


def _open_socket(url: str | None, timeout_s: float) -> Any:
    try:
        from websockets.sync.client import connect
    except ModuleNotFoundError as missing:
        raise ImportError("OpenEnv needs websockets: pip install 'serverless-diloco[openenv]'") from missing
    from websockets.exceptions import WebSocketException

    try:
        address = f"ws{_server_url(url).removeprefix('http')}/ws"
        return connect(address, open_timeout=timeout_s, max_size=MOST_MESSAGE, proxy=None).__enter__()
    except WebSocketException as error:
        raise EOFError(str(error)) from error


def _server_url(url: str | None) -> str:
    found = url or os.environ.get(URL_ENV)
    if not found:
        raise InnerError(f"no URL of an OpenEnv server was given. Pass `url`, or set {URL_ENV}=http://host:port.")
    if not found.startswith(("http://", "https://")):
        raise InnerError(f"{found!r} is not a URL of an OpenEnv server: it must start with http:// or https://.")
    return found.rstrip("/")


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _is_json(v) for k, v in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float | bool)
