"""A loopback TCP server that answers each request with bytes of ours, at a pace of ours, and hangs up.

with HostileServer(lambda n: [b"HTTP/1.1 200 OK\\r\\n\\r\\n{", 0.1, b"}"]) as server:    bytes, seconds to wait, bytes
    Teacher("m", 1.0, 2.0, base_url=server.url, key_env=None)
server.requests   how many came;  server.sent   bytes that went out before the other side hung up
"""

import socket
import threading
from collections.abc import Callable, Iterable
from typing import Self

Script = Iterable[bytes | float]


def response(body: bytes, status: str = "200 OK", length: int | None = None, **headers: str) -> bytes:
    """A whole response. length: what content-length says, if not the truth."""
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body) if length is None else length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class HostileServer:
    def __init__(self, script: Callable[[int], Script]) -> None:
        self.script = script
        self.requests, self.sent = 0, 0
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"
        self.lock = threading.Lock()
        self.closing = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.listener.close()

    def _accept(self) -> None:
        while not self.closing.is_set():
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                self._read(connection)
                with self.lock:
                    n, self.requests = self.requests, self.requests + 1
                for step in self.script(n):
                    if isinstance(step, float):
                        if self.closing.wait(step):
                            return
                        continue
                    connection.sendall(step)
                    with self.lock:
                        self.sent += len(step)
            except OSError:
                return

    def _read(self, connection: socket.socket) -> None:
        """One request: the head, and as much body as it says."""
        seen = b""
        while b"\r\n\r\n" not in seen:
            seen += connection.recv(65536) or _hung_up()
        head, _, body = seen.partition(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
        while len(body) < length:
            body += connection.recv(65536) or _hung_up()


def _hung_up() -> bytes:
    raise ConnectionResetError
