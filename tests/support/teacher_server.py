"""A real HTTP server that speaks like an OpenAI-compatible endpoint, and misbehaves on request.

with TeacherServer(behave) as server:          behave(body, n) -> Reply, for the n-th request (from 0)
    Teacher("m", 1.0, 2.0, base_url=server.url, key_env=None)
server.bodies     every request body, in order of arrival
server.charged    what the endpoint really charged, which its answers may misstate
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass
class Reply:
    body: Any = None  # an object is sent as JSON, text as it is; None drops the connection
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    charge: float = 0.0  # in truth
    after_s: float = 0.0


def says(text: str, cost: Any = None, charge: float | None = None, **message: Any) -> Reply:
    """A good answer; `cost` is what usage.cost says, `charge` what is charged."""
    usage = {"prompt_tokens": 10, "completion_tokens": 2} | ({} if cost is None else {"cost": cost})
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text, **message}}
    honest = cost if isinstance(cost, float) else 0.0
    return Reply({"model": "served", "choices": [choice], "usage": usage}, charge=honest if charge is None else charge)


def refuses(code: int, message: str = "no", status: int | None = None, **headers: str) -> Reply:
    error = {"error": {"code": code, "message": message}}
    return Reply(
        error, status=code if status is None else status, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


class TeacherServer:
    def __init__(self, behave: Callable[[dict[str, Any], int], Reply]) -> None:
        self.behave = behave
        self.bodies: list[dict[str, Any]] = []
        self.authorization: set[str | None] = set()
        self.charged, self.in_the_air, self.most_in_the_air = 0.0, 0, 0
        self.lock = threading.Lock()
        self.http = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def asked(self) -> list[str]:
        """The last message's text of every request."""
        return [body["messages"][-1]["content"] for body in self.bodies]

    def take(self, body: dict[str, Any], authorization: str | None) -> Reply:
        with self.lock:
            self.in_the_air += 1
            self.most_in_the_air = max(self.most_in_the_air, self.in_the_air)
            self.bodies.append(body)
            self.authorization.add(authorization)
            reply = self.behave(body, len(self.bodies) - 1)
            self.charged += reply.charge
        time.sleep(reply.after_s)
        with self.lock:
            self.in_the_air -= 1
        return reply


class _Server(ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is not news."""


def _handler(server: TeacherServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            reply = server.take(body, self.headers.get("authorization"))
            if reply.body is None:
                self.close_connection = True
                self.connection.close()
                return
            raw = (reply.body if isinstance(reply.body, str) else json.dumps(reply.body)).encode()
            self.send_response(reply.status)
            for name, value in {"content-length": str(len(raw)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(raw)

    return Handler
