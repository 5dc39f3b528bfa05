"""`diloco watch RUN --web`: a run's page on a port of this machine.

    GET /                  the page: one file, its scripts and styles in it
    GET /data/head.json    name, sessions, events …        GET /data/{n}.json    outer steps
        └─ from PageLooks' files: one reader sends requests to the bucket, for any number of browsers

The server answers only GET, and only if the Host header names this machine, so that the page of another site cannot
read the run through a name that it points here (DNS rebinding).  The page's address has a token, also on loopback,
which all users of a shared machine can reach; a cookie stores it in the browser.  The server never writes to the run.

    a connection ──▶ no complete request in HEADERS_S, or no token:  closed
                 ──▶ more than MOST connections:  close the oldest without the token, else the oldest

Not promised: secrecy on a network without TLS: put a tunnel or a proxy in front of the server.  A user of this machine
who opens many connections can only make the page slow.
"""

import hmac
import ipaddress
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.run.config import ConfigError
from diloco.views.page.data import FORMAT, json_bytes, version_of
from diloco.views.page.freeze import content_policy, live_page
from executors.preflight.run_url import UsageError

PORT = 8642
MOST = 64  # connections at a time; a browser opens six
HEADERS_S = 10.0  # time for a complete request to arrive
HEADERS = {
    "Content-Security-Policy": f"{content_policy()}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class Door:
    """The rules by which requests are accepted.   hosts: names that a Host header may have."""

    port: int
    token: str
    hosts: frozenset[str] = frozenset({"localhost"})

    @property
    def cookie(self) -> str:
        """The cookie's name, which has the port, because a browser sends cookies to all ports of a host."""
        return f"diloco-{self.port}"

    def refusal(self, method: str, host: str, token: str) -> tuple[int, str] | None:
        """Return HTTP status and reason for a refused request; None for an accepted one."""
        if method != "GET":
            return 405, f"this page answers GET only, not {method[:20]!r}"
        if not self._is_here(host):
            name = repr(host[:80])
            return 421, f"this machine is not called {name} here; use the address that `diloco watch --web` printed"
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return 403, "the address lacks its token; use the one that `diloco watch --web` printed, with ?token=…"
        return None

    def _is_here(self, host: str) -> bool:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
        name = name.strip("[]").lower()
        return name in self.hosts or _is_address(name)


def _is_address(name: str) -> bool:
    """Whether the host is an IP address.  A site's name could point here by DNS rebinding; an address cannot."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def make_door(bind: str, port: int) -> Door:
    token = secrets.token_urlsafe(24)
    if bind == "localhost" or (_is_address(bind) and ipaddress.ip_address(bind).is_loopback):
        return Door(port, token)
    names = {"localhost", bind.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
    return Door(port, token, frozenset(names))


def page_address(bind: str, door: Door) -> str:
    """Return the complete URL, for a browser."""
    name = socket.gethostname() if bind in ("0.0.0.0", "::") else bind
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{door.port}/?token={door.token}"


def bound_socket(bind: str, port: int | None) -> socket.socket:
    """Return a listening socket.   port: None means PORT, or a free port if PORT is in use.   Raises UsageError."""
    try:
        return _listen(bind, PORT if port is None else port)
    except OSError as error:
        if port is None:
            return _listen(bind, 0)
        raise UsageError(
            f"--port {port} on {bind} cannot be used: {error.strerror or error}. Another viewer may listen there; "
            "--port 0 takes a free one"
        ) from None


def _listen(bind: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"--bind {bind}: {error.strerror or error}. Use an address of this machine") from None
    made = socket.socket(family, kind)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(64)
    except OSError:
        made.close()
        raise
    return made


# -------------------------------------------------------------------- answers


@dataclass
class PageApp:
    """The ASGI application.   files(): the newest files by name; {} before the first look.   stale(): error, or ""."""

    door: Door
    name: str
    files: Callable[[], Mapping[str, bytes]]
    stale: Callable[[], str] = lambda: ""
    _page: bytes = field(default=b"", init=False)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import Response

        if scope["type"] != "http":
            return
        request = Request(scope)
        shown = request.query_params.get("token", "")
        token = shown or request.cookies.get(self.door.cookie, "")
        refused = self.door.refusal(request.method, request.headers.get("host", ""), token)
        status, body = refused or self._answer(request.url.path)
        kind = "text/html" if status == 200 and request.url.path == "/" else "application/json"
        kind = "text/plain" if status != 200 else kind
        headers = {**HEADERS, "Allow": "GET"} if status == 405 else dict(HEADERS)
        if refused:
            headers["Connection"] = "close"
        elif shown:
            kept = f"{self.door.cookie}={shown}; HttpOnly; SameSite=Strict; Path=/"
            headers["Set-Cookie"] = kept
        content = body.encode() if isinstance(body, str) else body
        if status == 200:
            headers["ETag"] = f'"{version_of(content)}"'
            if request.headers.get("if-none-match") == headers["ETag"]:
                status, content = 304, b""
        await Response(content, status, headers, kind)(scope, receive, send)

    def _answer(self, path: str) -> tuple[int, str | bytes]:
        if path == "/":
            self._page = self._page or live_page(self.name)
            return 200, self._page
        files = self.files()
        if path.startswith("/data/") and (body := files.get(path.removeprefix("/data/"))) is not None:
            return 200, body
        if path == "/data/head.json":
            return 200, json_bytes({"format": FORMAT, "waiting": self.stale() or "The run is being read."})
        return 404, "there is nothing here"


# -------------------------------------------------------------------- serving


def check_web() -> None:
    """Raise ConfigError if a package is missing."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise ConfigError(
            "`diloco watch --web` serves with starlette and uvicorn, which are not installed: "
            "pip install 'serverless-diloco[web]' (without them: diloco report RUN writes the page as a file)"
        ) from None


def bounded_protocol() -> Any:
    """Return uvicorn's protocol class with this module's limits on connections.

    `cycle` is set once a request has arrived.  A refused request ends its connection, so a connection with a `cycle`
    has shown the token."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    held = list[Any]()  # the oldest first

    class Bounded(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(held) >= MOST:
                min(held, key=lambda one: one.cycle is not None).end()
            held.append(self)
            self._late = self.loop.call_later(HEADERS_S, lambda: self.cycle is None and self.end())

        def connection_lost(self, exc: Exception | None) -> None:
            self._let_go()
            super().connection_lost(exc)

        def end(self) -> None:
            self._let_go()
            self.transport.abort()

        def _let_go(self) -> None:
            self._late.cancel()
            if self in held:
                held.remove(self)

    return Bounded


class PageServer:
    """An HTTP server that runs in a thread until `stop`."""

    def __init__(self, app: PageApp, listening: socket.socket) -> None:
        import uvicorn

        config = uvicorn.Config(
            app, log_level="error", access_log=False, server_header=False, lifespan="off", timeout_graceful_shutdown=1,
            http=bounded_protocol(), ws="none",
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._socket = listening

    def start(self) -> None:
        """Serve in a thread, so that the command keeps its signal handlers."""
        run = self._server.run
        self._thread = threading.Thread(target=run, kwargs={"sockets": [self._socket]}, daemon=True, name="page")
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
