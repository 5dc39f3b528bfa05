"""Serve the model to agents on this machine's loopback, one address for each rollout.

    POST /KEY/v1/chat/completions   {"messages": […], "tools": […], "stream": false, …}  ──▶ answer(KEY, body)
    POST /KEY/v1/responses, /KEY/v1/messages        other forms of the same (forms.py)
    GET  /KEY/v1/models             the one model

A thread for each connection: it waits until the training thread has sampled the reply.  A streamed reply comes in one
piece.  Errors have the form of the route, so that its clients raise their usual exceptions.

Not promised: other routes (completions, embeddings, count_tokens); speed of single tokens; callers on other machines.
"""

import json
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, cast

from inner.extras.agents.forms import CHAT, NAME, Form, RequestRefused, openai_error
from inner.extras.agents.messages_form import MESSAGES
from inner.extras.agents.responses_form import RESPONSES

LARGEST = 64 * 2**20  # bytes of a request
ROUTES = {"v1/chat/completions": CHAT, "v1/responses": RESPONSES, "v1/messages": MESSAGES}
SESSION = "X-Session-ID"  # names the run of an agent that asks: a header, and a key beside the request's own

HUNG_UP = "hung up"  # a key beside the request's own: for a function that tells whether the client has disconnected

Answer = Callable[[str, Mapping[str, Any]], dict[str, Any]]  # (key, request) -> a completion.   Raises RequestRefused


class Endpoint:
    """A server on a free port of 127.0.0.1 until `close`."""

    def __init__(self, answer: Answer) -> None:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.answer = answer
        Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    def url(self, key: str) -> str:
        """Return the base URL for an OpenAI client of the rollout with this key."""
        return f"http://127.0.0.1:{self._server.server_port}/{key}/v1"

    def close(self) -> None:
        """End the server, and the connections that clients keep open: each has a thread."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._server.connections):
            with suppress(OSError):  # the client has just closed it
                connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024  # agents of a whole batch connect at the same time
    answer: Answer

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connections = set[Any]()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a client that hangs up is the agent's affair."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.partition("?")[0].endswith("/v1/models"):
            self._send({"object": "list", "data": [{"id": NAME, "object": "model", "created": 0, "owned_by": "run"}]})
        else:
            self._send(openai_error(_no_route(self.path)), 404)

    def do_POST(self) -> None:
        key, _, rest = self.path.partition("?")[0].lstrip("/").partition("/")
        form = ROUTES.get(rest.removeprefix("v1/") if rest.startswith("v1/v1/") else rest)  # anthropic adds a v1
        try:
            body = self._body()
            if form is None:
                raise _no_route(self.path)
            reply = form.write(self._answer(key, form.read(body)), body)
        except RequestRefused as refusal:
            self._send((form or CHAT).fail(refusal), refusal.status)
        except Exception as error:  # a fault of this project: the agent gets its text, and the replica lives on
            fault = RequestRefused(f"{type(error).__name__}: {error}", 500, "server_error")
            self._send((form or CHAT).fail(fault), fault.status)
        else:
            self._send_reply(form, reply, streams=bool(body.get("stream")))

    def _answer(self, key: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        more = {SESSION: self.headers.get(SESSION, ""), HUNG_UP: self._has_hung_up}
        return cast(_Server, self.server).answer(key, {**asked, **more})

    def _has_hung_up(self) -> bool:
        """Whether the client has closed the connection, for example after a time limit of its own."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _body(self) -> Mapping[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > LARGEST:
            self.close_connection = True  # the rest of the request is not read
            raise RequestRefused(f"Content-Length: {length!r} is not a number of at most {LARGEST:,} bytes", 413)
        try:
            body = json.loads(self.rfile.read(int(length)))
        except ValueError as error:
            raise RequestRefused(f"the request is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise RequestRefused("the request is not a JSON object")
        return body

    def _send_reply(self, form: Form, reply: dict[str, Any], *, streams: bool) -> None:
        if streams:
            self._write(form.stream(reply).encode(), "text/event-stream")
        else:
            self._send(reply)

    def _send(self, value: Any, status: int = 200) -> None:
        self._write(json.dumps(value).encode(), "application/json", status)

    def _write(self, body: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a replica's output is its log."""


def _no_route(path: str) -> RequestRefused:
    shown = "/" + path.partition("?")[0].lstrip("/").partition("/")[2]
    text = f"this server has no {shown}. Let the client use one of POST /{', POST /'.join(ROUTES)}"
    return RequestRefused(text, 404, "not_found")
