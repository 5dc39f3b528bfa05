"""An OpenEnv server as an environment that TRL can take: one session per rollout, public methods are tools.

    Calc = openenv_environment("http://127.0.0.1:8000")          an MCP server: its own tools, as it describes them
    class Calc(OpenEnv):                                         any other server: a method per tool
        _url = "http://127.0.0.1:8000"
        def add(self, a: int, b: int) -> str:
            ...                                              types and a docstring with Args, as TRL wants them
            return self._call("add", a=a, b=b)

    reset(**row) ──▶ {"type": "reset"} ─┐                            ┌─▶ text, behind the last user message
    add(a=1, b=2) ─▶ {"type": "step"} ──┴─ one WebSocket, /ws ───────┼─▶ the tool's answer
                                                                     └─▶ {'error': …, 'error_kind': …} if it failed
    metadata (of the observation)   error_kind, hint_template_key ──▶ the hint, as they are (spans.py, hints.py)
    _sites                          every call that failed: t, tool, error, and these two
    _messages_before(t)             what had been seen before step t, for a teacher: from the server's `State.history`
                                    where it keeps one (rfc-openenv-state-replay.md), else from what was said

The reward is the sum of the steps' rewards; None where the session was lost. Needs no `openenv` here, only
`websockets`: OpenEnv 0.10 wants older pandas and pillow than TRL's neighbours do.

Not promised: a session that survives its connection; more than one environment server per class; images.
"""

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from inner.errors import InnerError
from inner.replay.actions import Message

URL_ENV = "OPENENV_URL"
# OpenEnv's names for what went wrong (mcp_types.ToolErrorType) -> ours; others stay as they are. Its execution_error
# says nothing: a wrong type is one, so the hint reads the text.
KINDS = {"tool_not_found": "unknown_tool", "invalid_args": "bad_arguments"}
_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
_TEXTS = ("text", "message", "result", "output", "content")  # where an observation keeps its words


class OpenEnv:
    """One session. Everything but tools, reset and get_reward starts with _: TRL takes public methods for tools."""

    _url: str | None = None
    _timeout_s: float = 60.0

    def __init__(self) -> None:
        self._socket: Any = None
        self._begin_episode()

    def reset(self, **row: Any) -> str | None:
        """A new episode. The row's columns are offered to the server's reset, which takes what it knows."""
        self._begin_episode()
        given = {name: value for name, value in row.items() if name != "prompt" and _is_json(value)}
        try:
            reply = self._send_request("reset", given)
        except (OSError, EOFError) as first:  # the server has been started anew, or lets idle sessions go
            reply = self._retry_request("reset", given, first)
        text = self._record_observation(None, reply)
        return f"\n{text}" if text else None

    def get_reward(self) -> float | None:
        """Of the episode so far."""
        return None if self._lost or not self._rewards else float(sum(self._rewards))

    # methods that a subclass may override

    def _action(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The server's action for a tool call."""
        return {"type": "call_tool", "tool_name": tool, "arguments": dict(arguments)}

    def _read_action(self, action: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """`_action`, read back."""
        return action["tool_name"], dict(action.get("arguments") or {})

    def _text(self, observation: Mapping[str, Any]) -> str:
        """The text of an observation, as the model reads it."""
        return observation_text(observation)

    # one call

    def _call(self, tool: str, **arguments: Any) -> Any:
        """The tool's answer; for a failure {"error", "error_kind", "hint_template_key"}."""
        if self._lost:
            return "the environment is gone"
        action = self._action(tool, arguments)
        try:
            reply = self._send_request("step", action)
        except (OSError, EOFError):
            self._lost = True
            self._close()
            return "the environment is gone"
        self._record_observation(action, reply)
        failure = failure_of(reply)
        if failure is None:
            return self._observed_steps[-1][1]
        self._sites.append({"t": len(self._observed_steps) - 1, "tool": tool, **failure})
        return failure["error"] if failure["error_kind"] == "transport_error" else failure  # not the student's fault

    def _record_observation(self, action: Mapping[str, Any] | None, reply: Mapping[str, Any]) -> str:
        text = self._text(reply.get("observation") or {})
        failure = failure_of(reply)
        self._observed_steps.append((action, text if failure is None else str(failure)))
        if isinstance(reply.get("reward"), int | float):
            self._rewards.append(reply["reward"])
        return text

    # replay

    def _messages_before(self, t: int) -> list[Message]:
        """The messages behind the prompt, up to the observation of step t - 1. t = 1 is before the first call."""
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
        """[(action, text)] as the server remembers it; None where it keeps no history."""
        try:
            history = self._send_request("state", None).get("history")
        except (OSError, EOFError):
            self._close()
            return None
        return [(e.get("action"), self._remembered_text(e)) for e in history] if isinstance(history, list) else None

    def _remembered_text(self, entry: Mapping[str, Any]) -> str:
        reply = {"observation": entry["observation"], "metadata": entry["observation"].get("metadata")}
        failure = failure_of(reply)
        return self._text(entry["observation"]) if failure is None else str(failure)

    # the wire

    def _begin_episode(self) -> None:
        self._observed_steps: list[tuple[Mapping[str, Any] | None, str]] = []  # (action, text); the first is reset's
        self._sites: list[dict[str, Any]] = []
        self._rewards: list[float] = []
        self._lost = False

    def _send_request(self, kind: str, data: Mapping[str, Any] | None) -> dict[str, Any]:
        """One request and its answer. OSError or EOFError: the connection is of no more use."""
        self._socket = self._socket or _open_socket(self._url, self._timeout_s)
        return _exchange_message(self._socket, kind, data, self._timeout_s)

    def _retry_request(self, kind: str, data: Mapping[str, Any], first: Exception) -> dict[str, Any]:
        self._close()
        try:
            return self._send_request(kind, data)
        except (OSError, EOFError) as error:
            raise InnerError(
                f"the environment at {_server_url(self._url)} does not answer: {error or type(error).__name__} "
                f"(before: {first or type(first).__name__}). Start it, or set {URL_ENV}; it needs a "
                "session per rollout (max_concurrent_envs)."
            ) from error

    def _close(self) -> None:
        if self._socket is not None:
            with suppress(Exception):
                self._socket.close()
        self._socket = None

    def __del__(self) -> None:
        with suppress(Exception):
            self._close()


def openenv_environment(url: str | None = None, name: str = "OpenEnvironment") -> type[OpenEnv]:
    """A class with a method for each tool of the MCP server at `url` (default: what OPENENV_URL says)."""
    probe = type(name, (OpenEnv,), {"_url": url})()
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
            "inner.worlds.openenv.OpenEnv with a method per tool."
        )
    methods = {tool["name"]: tool_method(tool) for tool in tools}
    return type(name, (OpenEnv,), {"_url": url, "__doc__": f"The tools of {_server_url(url)}.", **methods})


def tool_method(tool: Mapping[str, Any]) -> Any:
    """A method that calls the tool, with the types and the docstring that its JSON schema says."""
    schema = tool.get("input_schema") or tool.get("inputSchema") or {}
    required = set(schema.get("required") or ())
    properties = schema.get("properties") or {}
    types = {name: _TYPES.get(spec.get("type"), str) for name, spec in properties.items()}

    def method(self, **arguments: Any) -> Any:
        return self._call(tool["name"], **arguments)

    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=types[name],
            default=inspect.Parameter.empty if name in required else spec.get("default"),
        )
        for name, spec in properties.items()
    ]
    parameters.sort(key=lambda p: p.default is not inspect.Parameter.empty)
    described = [f"    {n}: {s.get('description') or s.get('title') or n}" for n, s in properties.items()]
    method.__name__ = method.__qualname__ = tool["name"]
    method.__doc__ = "\n".join([tool.get("description") or tool["name"], *(["", "Args:", *described] if types else [])])
    method.__annotations__ = types
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = inspect.Signature([itself, *parameters])  # pyright: ignore[reportFunctionMemberAccess]
    return method


def failure_of(reply: Mapping[str, Any]) -> dict[str, Any] | None:
    """{"error", "error_kind", "hint_template_key"} of a server's answer; None if nothing failed.

    It failed if its metadata have an error_kind, if an MCP tool says so, or if the server refused the action."""
    observation = reply.get("observation") or {}
    metadata = reply.get("metadata") or observation.get("metadata") or {}
    error = observation.get("error")
    result = observation.get("result")
    broken = isinstance(result, Mapping) and (result.get("is_error") or result.get("isError"))
    kind = metadata.get("error_kind") or (error.get("error_type") if isinstance(error, Mapping) else None)
    if not kind and not broken and "refused" not in reply:
        return None
    text = reply.get("refused") or (error.get("message") if isinstance(error, Mapping) else error)
    text = text or metadata.get("error") or observation_text(observation) or str(kind)
    kind = kind or ("bad_arguments" if "refused" in reply else "execution_error")
    failure = {"error": str(text), "error_kind": KINDS.get(kind, kind)}
    hinted = metadata.get("hint_template_key")
    return {**failure, "hint_template_key": hinted} if hinted else failure


def observation_text(observation: Mapping[str, Any]) -> str:
    """The words of an observation: an MCP tool's result, a field that is called like words, else all of it as JSON."""
    result = observation.get("result")
    if isinstance(result, Mapping):
        parts = [part["text"] for part in result.get("content") or () if isinstance(part.get("text"), str)]
        return "\n".join(parts) if parts else str(result.get("data", ""))
    for name in _TEXTS:
        if isinstance(observation.get(name), str | int | float):
            return str(observation[name])
    rest = {name: value for name, value in observation.items() if name not in ("metadata", "done", "reward") and value}
    return json.dumps(rest, ensure_ascii=False) if rest else ""


def _exchange_message(socket: Any, kind: str, data: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    from websockets.exceptions import WebSocketException

    message = {"type": kind} if data is None else {"type": kind, "data": data}
    try:
        socket.send(json.dumps(message))
        answer = json.loads(socket.recv(timeout=timeout_s))
    except WebSocketException as error:
        raise EOFError(str(error)) from error
    reply = answer.get("data") or {}
    return reply if answer.get("type") != "error" else _read_refusal(reply)


def _read_refusal(reply: Mapping[str, Any]) -> dict[str, Any]:
    """An error answer of the server as a reply: a wrong action, or a broken tool. EOFError if there is no session."""
    code = reply.get("code")
    text = str(reply.get("message") or "no reason given")
    if code == "CAPACITY_REACHED":
        raise EOFError(f"{text} (CAPACITY_REACHED)")
    if details := reply.get("errors"):
        text = "; ".join(f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg')}" for e in details)
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
        return connect(address, open_timeout=timeout_s, max_size=None, proxy=None).__enter__()
    except WebSocketException as error:
        raise EOFError(str(error)) from error


def _server_url(url: str | None) -> str:
    found = url or os.environ.get(URL_ENV)
    if not found:
        raise InnerError(f"where is the OpenEnv server? Give its URL, or set {URL_ENV}=http://host:port.")
    if not found.startswith(("http://", "https://")):
        raise InnerError(f"{found!r} is no URL of an OpenEnv server: it starts with http:// or https://.")
    return found.rstrip("/")


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _is_json(v) for k, v in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float | bool)
