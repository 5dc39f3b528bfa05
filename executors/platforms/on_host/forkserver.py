"""A process that imports the heavy modules once, and then forks replicas.

    parent ══ socket ══ server ──fork──▶ r00         a replica starts in milliseconds instead of seconds
              (JSON lines)     ├─fork──▶ r01
                               └─fork──▶ r02

    {"entrypoint": …}  ─▶        ◀─ {"forked": pid, "started": ticks}          one answer per request, in order
                                 ◀─ {"exited": pid, "started": ticks, "code": -9}

We do not use multiprocessing's fork server: it waits for its children when the parent exits, holds the parent's stdout
open, and imports the parent's main module again.  This server has its own session and runs until its parent and its
last child have ended, so that every exit code is written.

When the parent dies, this server drops unread requests: the next launcher starts the missing processes.

Not promised: support for modules that start a thread or open a device when they are imported: neither a thread nor a
device survives a fork.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, NoReturn

from diloco.process.processes import describe_exit, start_ticks
from executors.platforms import entrypoint
from executors.platforms.machine import oom
from executors.platforms.platform import launches_wait

START = "from executors.platforms.on_host.forkserver import serve; serve()"


class ForkServer:
    """The parent's side.  The server starts to import at once; `fork` waits until the imports are done."""

    def __init__(self, preload: Sequence[str], env: Mapping[str, str]) -> None:
        self.exits: dict[tuple[int, int], int] = {}  # by pid and start, since a later process may have the same pid
        self._kills = oom.Kills()
        self._death = ""  # why the server died; asked once, because each counted kill explains only one process
        with launches_wait("the fork server's log"):
            self._log: IO[str] = tempfile.TemporaryFile("w+", prefix="forkserver-")  # noqa: SIM115 - lives as we do
        self._buffer = b""
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", START],  # -P: import no module from the current folder
                stdin=theirs.fileno(),
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
            )
        self._send({"preload": list(preload), "path": sys.path})

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, requests: Sequence[Mapping[str, Any]], timeout_s: float = 300.0) -> list[tuple[int, int] | OSError]:
        """Fork a process per request; return (pid, start time) for each request, in order, or the error."""
        found: list[tuple[int, int] | OSError] = []
        try:
            for request in requests:
                self._send(request)
            until = time.monotonic() + timeout_s
            while len(found) < len(requests):
                if time.monotonic() > until:
                    raise self._gone_error(f"did not answer within {timeout_s:.0f} s")
                for told in self._read_messages(wait_s=0.5):
                    why = told.get("failed")
                    found.append(OSError(f"cannot fork: {why}") if why else (told["forked"], told["started"]))
        except OSError as error:
            found += [error] * (len(requests) - len(found))
        return found

    def listen(self) -> None:
        """Read the exit codes that have arrived, without waiting."""
        with suppress(OSError):
            self._read_messages(wait_s=0.0)

    def close(self) -> None:
        self._socket.close()
        self._log.close()
        self._process.returncode = self._process.poll() or 0  # the server may run on, without a warning by Popen

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            raise self._gone_error(self._how_it_died()) from None

    def _read_messages(self, wait_s: float) -> list[dict[str, Any]]:
        """Return the complete answers to requests, and store the exit codes."""
        while select.select([self._socket], [], [], wait_s)[0]:
            data = b""
            with suppress(OSError):
                data = self._socket.recv(1 << 16)
            if not data:
                raise self._gone_error(self._how_it_died())
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            messages = [json.loads(line) for line in lines]
            self.exits |= {(m["exited"], m["started"]): m["code"] for m in messages if "exited" in m}
            if answers := [m for m in messages if "exited" not in m]:
                return answers
        return []

    def _how_it_died(self) -> str:
        with suppress(subprocess.TimeoutExpired):  # the server's socket closes a moment before it ends
            code = self._process.wait(1.0)
            self._death = self._death or f": {self._kills.explain(code) or describe_exit(code, ours=False)}"
        return f"has died{self._death}"

    def _gone_error(self, what: str) -> OSError:
        self._log.seek(0)
        last = self._log.read().strip().splitlines()[-5:]
        return OSError(f"the fork server {what}" + "".join(f"\n    {line}" for line in last))


class _Server:
    """The server's side.  One thread reads one socket, and one pipe into which SIGCHLD's handler writes."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._buffer = b""
        self._wake, self._wakeup = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._children: dict[int, tuple[str, int]] = {}
        self._linked = True

    def serve(self) -> None:
        """Serve until the parent and the last child have ended."""
        while self._linked or self._children:
            sources: list[Any] = [self._wake, self._link] if self._linked else [self._wake]
            ready = select.select(sources, [], [])[0]
            if self._wake in ready:
                os.read(self._wake, 1 << 12)
                self._reap_children()
            if self._link in ready:
                self._read_requests()

    def _read_requests(self) -> None:
        try:
            data = self._link.recv(1 << 16)
        except OSError:
            data = b""
        self._linked = bool(data)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if self._parent_gone():  # the next launcher starts the missing processes
                return
            self._handle_message(json.loads(line))

    def _parent_gone(self) -> bool:
        """Whether the parent has closed its side of the socket; its last requests may still be unread."""
        closed = select.poll()
        closed.register(self._link, select.POLLHUP)
        return bool(closed.poll(0))

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "preload" in message:
            sys.path[:] = message["path"]
            preload(message["preload"])
            return
        try:
            pid = os.fork()
        except OSError as error:
            self._send_answer({"failed": str(error)})
            return
        if pid == 0:
            self._become_replica(message)
        self._children[pid] = (message["files"], start_ticks(pid) or 0)
        self._send_answer({"forked": pid, "started": self._children[pid][1]})

    def _become_replica(self, request: dict[str, Any]) -> NoReturn:
        """Run the replica in the child; never return to the server's loop."""
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for sig in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(sig, signal.SIG_DFL if sig != signal.SIGINT else signal.default_int_handler)
            self._link.close()
            os.close(self._wake)
            os.close(self._wakeup)
            code = entrypoint.run_process(request)
        finally:
            os._exit(code)

    def _reap_children(self) -> None:
        for pid in list(self._children):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            files, started = self._children.pop(pid)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # also ends processes that the child started: they share its group
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with suppress(OSError):  # the folder is gone, or the disk is full: the parent still gets the answer below
                entrypoint.write_end(files, pid, started, code)
            self._send_answer({"exited": pid, "started": started, "code": code})

    def _send_answer(self, message: dict[str, Any]) -> None:
        with suppress(OSError):
            self._link.sendall(json.dumps(message).encode() + b"\n")


def preload(names: Sequence[str]) -> None:
    """Import the modules that can be imported; the replica itself reports a missing module."""
    gc.disable()  # imported objects stay, so searching them for garbage would waste a seventh of the time
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
    gc.enable()
    gc.freeze()  # so that a child's garbage collection does not copy shared memory pages
    if threading.active_count() > 1:
        running = [t.name for t in threading.enumerate()]
        print(
            f"imports of {', '.join(names)} started threads ({running}), so a forked child may hang. Leave the module "
            "out that starts them: --option preload=MODULE,MODULE",
            file=sys.stderr,
        )


def serve() -> None:
    """Run the server process, whose standard input is the socket."""
    with socket.socket(fileno=os.dup(0)) as link:
        _Server(link).serve()
