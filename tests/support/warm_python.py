"""Pythons that have imported the heavy modules: one process imports them once, and each Python is a fork of it.

    controller ──▶ the warm process: imports, then waits                     warm = WarmPython(folder, modules)
    any process ──▶ client -c CODE ══ socket ══▶ the warm process ──fork──▶ CODE      [warm.path, "-c", code]
                    waits, and exits with CODE's exit code

CODE gets the client's environment, folder and file descriptors, and a `__main__` like that of any other -c.
If the warm process cannot answer, the client becomes an ordinary Python.

Not promised: options before -c; the client's limits, session and process group.   Linux only.
"""

import os
import signal
import socket
import sys
from contextlib import suppress

WARM = "DILOCO_TEST_PYTHON"  # the variable with the path of such a Python, where there is one
FLEET = [  # what replicas of tests/support/fleet.py need
    "torch", "transformers", "diloco.replica.replica", "diloco.outer.managers.manager", "diloco.outer.loop",
    "diloco.model.export", "inner.train.build", "inner.train.supervised", "inner.usercode.check", "inner.train.grpo",
    "tests.support.victim", "tests.support.warm",
]  # fmt: skip
START = "from tests.support.warm_python import serve; exec(serve({fd}, {modules!r}))"
MOST_FDS = 250


class WarmPython:
    """The warm process.   path: an executable file in `folder`, a Python of that kind."""

    def __init__(self, folder: str, modules: list[str]) -> None:
        import shlex
        import subprocess

        address = os.path.join(folder, "warm-python")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)  # clients wait there until all is imported
            start = START.format(fd=listener.fileno(), modules=modules)
            self._process = subprocess.Popen(
                [sys.executable, "-c", start], stdin=subprocess.PIPE, pass_fds=[listener.fileno()]
            )
        self.path = os.path.join(folder, "python")
        client = shlex.join([sys.executable, "-I", "-S", __file__, address])
        with open(self.path, "w", opener=lambda path, flags: os.open(path, flags, 0o700)) as file:
            file.write(f'#!/bin/sh\nexec {client} "$@"\n')

    def close(self) -> None:
        """Let it end with its last child."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# -------------------------------------------------------------------- the warm process


def serve(listener_fd: int, modules: list[str]) -> str:
    """Import the modules, then fork a child for each client.   Return the child's code, in the child."""
    import gc
    import select
    import threading
    from importlib import import_module

    gc.disable()
    for name in modules:
        with suppress(ImportError):
            import_module(name)
    gc.freeze()
    if plugin := sys.modules.get("anyio"):  # pytest would warn that it comes too late to rewrite its asserts
        plugin.__doc__ = "PYTEST_DONT_REWRITE"
    if threading.active_count() > 1:  # pyarrow's allocator has one of its own, and starts it again in a fork
        sys.exit("an import has started a thread, which no fork survives: Pythons will be ordinary ones")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the children hear a Ctrl-C of their own
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    clients: dict[int, socket.socket] = {}  # by the child's pid
    listener: socket.socket | None = socket.socket(fileno=listener_fd)
    while listener or clients:
        ready = select.select([woken, *([listener, 0] if listener else ()), *clients.values()], [], [])[0]
        if woken in ready:
            os.read(woken, 1 << 12)
        for pid, client in list(clients.items()):
            if client in ready:  # the client was killed
                os.kill(pid, signal.SIGKILL)
            if (ended := os.waitpid(pid, os.WNOHANG))[0] or client in ready:
                _say(client, str(os.waitstatus_to_exitcode(ended[1] if ended[0] else os.waitpid(pid, 0)[1])))
                clients.pop(pid).close()
        if listener and listener in ready:
            client = listener.accept()[0]
            _, fds, _, _ = socket.recv_fds(client, 1, MOST_FDS)
            if not fds:
                client.close()
            elif pid := os.fork():
                for fd in fds:
                    os.close(fd)
                clients[pid] = client
                _say(client, "forked\n")
            else:
                signal.set_wakeup_fd(-1)
                for each in (listener, client, *clients.values()):
                    each.close()
                os.close(woken)
                os.close(waker)
                return _become(fds)
        if listener and 0 in ready:  # WarmPython was closed, or its process has ended
            listener.close()
            listener = None
    os._exit(0)


def _become(fds: list[int]) -> str:
    """Take over what the client was.   fds: of a file with the request, then those that it names."""
    import fcntl
    import gc
    import json

    with os.fdopen(fds[0]) as file:
        file.seek(0)
        request = json.load(file)
    wanted: list[int] = request["fds"]
    above = max(*wanted, *fds) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds[1:]]
    os.closerange(0, 3)
    for fd in fds[1:]:
        os.close(fd)
    for fd, number in zip(moved, wanted, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv[:] = ["-c"]
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own is seeded at each fork
    gc.enable()
    return request["code"]


def _say(client: socket.socket, word: str) -> None:
    with suppress(OSError):
        client.sendall(word.encode())


# -------------------------------------------------------------------- the client


def ask(address: str, options: list[str]) -> int:
    """Let the warm process fork the code after -c.   Return its exit code; become an ordinary Python if it cannot."""
    import json

    fds = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)]
    request = os.memfd_create("request")
    code = options[options.index("-c") + 1]
    asked = {"code": code, "fds": fds, "folder": os.getcwd(), "environ": dict(os.environ)}
    os.pwrite(request, json.dumps(asked).encode(), 0)
    answer = b""
    with socket.socket(socket.AF_UNIX) as server:
        with suppress(OSError):
            server.connect(address)
            socket.send_fds(server, [b"."], [request, *fds])
            answer = server.recv(7)
        if not answer:
            os.execv(sys.executable, [sys.executable, *options])
        for fd in fds:
            os.close(fd)  # a pipe that CODE has ends with CODE
        ended = int(server.recv(16) or 1)
    return ended if ended >= 0 else 128 - ended


def _is_open(fd: int) -> bool:
    with suppress(OSError):
        os.fstat(fd)
        return True
    return False


if __name__ == "__main__":
    sys.exit(ask(sys.argv[1], sys.argv[2:]))
