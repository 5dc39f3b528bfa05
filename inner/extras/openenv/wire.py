"""Speak OpenEnv's wire format: one WebSocket, /ws, per session; a message, an answer.

    {"type": "reset" | "step" | "state" | "mcp", "data": {…}}  ──▶
                                                               ◀──  {"type": …, "data": {"observation", "reward", …}}
    OSError, EOFError     the connection cannot be used any more; next_step(error) says what to do

Not promised: servers without /ws.  One that has only /reset and /step over HTTP has one episode for all its clients.
"""

import json
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from inner.errors import InnerError
from inner.network import network_words
from inner.replay.untrusted import load_json

URL_ENV = "OPENENV_URL"
_NO_SESSION = ("FACTORY_ERROR", "SESSION_ERROR")  # the server hangs up after these errors
MOST_MESSAGE = 16 << 20  # bytes, unpacked: half a megabyte can unpack to 500 megabytes


class ServerFull(EOFError):
    """The server has as many sessions as it allows.   sessions: how many; 0: unknown."""

    def __init__(self, text: str, sessions: int) -> None:
        super().__init__(text)
        self.sessions = sessions


class NoWebSocket(EOFError):
    """The server answers, but opens no WebSocket."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def exchange_message(socket: Any, kind: str, data: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    from websockets.exceptions import WebSocketException

    message = {"type": kind} if data is None else {"type": kind, "data": data}
    try:
        with suppress(WebSocketException):  # if the server has hung up, we read the reason below
            socket.send(json.dumps(message))
        answer = load_json(socket.recv(timeout=timeout_s))
        if "data" not in checked_object(answer, ""):
            raise ValueError(f"not an OpenEnv server's answer: it has no data, but is {str(answer)[:200]!r}")
        reply = checked_object(answer["data"], "data")
        observation = checked_object(reply.get("observation"), "observation")
        for owner in (reply, observation):
            checked_object(owner.get("metadata"), "metadata")
    except (WebSocketException, ValueError) as error:
        raise EOFError(str(error)) from error
    return reply if answer.get("type") != "error" else _read_refusal(reply)


def checked_object(value: Any, name: str) -> dict[str, Any]:
    """Return the object; {} for a missing one that has a name.   Raises ValueError for other values."""
    if isinstance(value, dict) or (name and value is None):
        return value or {}
    raise ValueError(f"not an OpenEnv server's answer: {name or 'it'} is not an object, but {str(value)[:80]!r}")


def _read_refusal(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server's error as a reply: a wrong action or a broken tool. EOFError if it ends the session."""
    code = reply.get("code")
    text = str(reply.get("message") or "no reason given")
    if code == "CAPACITY_REACHED":
        sessions = reply.get("max_sessions")
        raise ServerFull(f"{text} ({code})", sessions if isinstance(sessions, int) else 0)
    if code in _NO_SESSION:
        raise EOFError(f"{text} ({code})")
    details = reply.get("errors")
    if isinstance(details, list) and all(isinstance(e, Mapping) for e in details) and details:
        text = "; ".join(f"{'.'.join(map(str, e.get('loc') or ()))}: {e.get('msg')}" for e in details)
    kind = "bad_arguments" if code == "VALIDATION_ERROR" else "exception"
    return {"refused": text, "observation": {}, "metadata": {"error_kind": kind}}


def open_socket(url: str, headers: Mapping[str, str] | None, timeout_s: float) -> Any:
    try:
        from websockets.sync.client import connect
    except ModuleNotFoundError as missing:
        raise ImportError("OpenEnv needs websockets: pip install 'serverless-diloco[openenv]'") from missing
    from websockets.exceptions import InvalidStatus, InvalidURI, WebSocketException

    try:
        return connect(
            f"ws{url.removeprefix('http')}/ws",
            open_timeout=timeout_s,
            max_size=MOST_MESSAGE,
            proxy=True if goes_by_proxy(url) else None,
            additional_headers=headers,
        ).__enter__()
    except InvalidStatus as error:
        status = error.response.status_code
        raise NoWebSocket(f"HTTP {status} at /ws, where an OpenEnv server opens a session", status) from error
    except InvalidURI as error:
        raise NoWebSocket(f"it redirects to {error.uri}", 307) from error
    except WebSocketException as error:
        raise EOFError(network_words(error)) from error


def read_schema(url: str, headers: Mapping[str, str] | None, timeout_s: float) -> dict[str, Any]:
    """Return the JSON schema of the server's action; {} if the server has none.   Raises OSError."""
    request = urllib.request.Request(f"{url}/schema")
    for name, value in (headers or {}).items():
        request.add_unredirected_header(name, value)  # no other host gets them
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(None if goes_by_proxy(url) else {}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return checked_object(checked_object(load_json(answer.read(MOST_MESSAGE)), "").get("action"), "action")
    except (urllib.error.HTTPError, ValueError):
        return {}


def next_step(error: Exception, url: str) -> str:
    """Return what the user can do about an error of a connection."""
    if isinstance(error, ServerFull):
        return (
            "It needs a session per rollout of every replica: raise max_concurrent_envs of its create_app, or start "
            f"copies of it, and give all their URLs (in {URL_ENV} with spaces between them)."
        )
    if isinstance(error, NoWebSocket) and 400 <= error.status < 500:
        without = " (without /web)" * url.endswith("/web")
        return (
            f"Check the address{without}; a private server needs `headers`. If it is right, serve the environment with "
            "create_app of openenv-core >= 0.2: over HTTP alone, all rollouts would share one episode."
        )
    if isinstance(error, NoWebSocket) and error.status < 400:
        return "Give the address to which it redirects, without /ws."
    if isinstance(error, ssl.SSLCertVerificationError):
        return "Name its authority's certificates in SSL_CERT_FILE."
    return f"Start it, or set {URL_ENV}."


def lost_words(error: Exception) -> str:
    """Return why a call lost its session, what its rollout is worth, and what the server's author can do."""
    text = f"{error or type(error).__name__}. Its rollout counts as the worst of its group at most."
    if "Unable to serialize unknown type" not in text:
        return text
    return (
        f"{text} A validator of the action's class refused the action, and openenv cannot send the ValueError: raise "
        "pydantic_core.PydanticCustomError there, then the model reads why."
    )


def server_urls(given: str | Sequence[str] | None) -> list[str]:
    """Return the servers' URLs.   given: None for the URLs in OPENENV_URL; a text may have several, with spaces."""
    found = given or os.environ.get(URL_ENV) or ""
    urls = found.split() if isinstance(found, str) else list(found)
    if not urls:
        raise InnerError(f"no URL of an OpenEnv server was given. Pass `url`, or set {URL_ENV}=http://host:port.")
    return [_server_url(url) for url in urls]


def _server_url(given: str) -> str:
    url = re.sub(r"^ws(?=s?://)", "http", given.rstrip("/").removesuffix("/ws"))  # openenv's own clients take ws://
    if not url.startswith(("http://", "https://")):
        raise InnerError(f"{given!r} is not a URL of an OpenEnv server: it must start with http:// or https://.")
    if space := re.match(r"https://huggingface\.co/spaces/([^/]+/[^/]+)", url):
        host = re.sub("[^a-z0-9]", "-", space[1].lower())
        raise InnerError(f"{given!r} is the page of a Space. Its server is https://{host}.hf.space.")
    return url


def goes_by_proxy(url: str) -> bool:
    """Return whether the environment's proxy serves the URL: http:// is this machine or a cluster's network."""
    return url.startswith("https://")
