"""A replica that dies, or sleeps, at a named store call: the fault points of real processes.

    die = "after:put:/delta/@3"        kill -9 itself right after the put of a key with "/delta/" for the 3rd time
    when: before | after      verb: put | create
"""

import os
import signal
from typing import Any

from rendezvous.stores.files import FileStore


def arm(spec: str) -> None:
    """Make this process kill itself at the call that `spec` names."""
    when, verb, rest = spec.split(":")
    pattern, _, nth = rest.partition("@")
    original, seen = getattr(FileStore, verb), [0]

    def call(self: FileStore, key: str, body: Any) -> None:
        hit = pattern in key
        seen[0] += hit
        if hit and seen[0] == int(nth) and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, key, body)
        if hit and seen[0] == int(nth) and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(FileStore, verb, call)


def replica(url: str, slot: str, log: str, die: str = "", environ: dict[str, str] | None = None) -> None:
    """Entry point of a child process: diloco.replica with its output in a file."""
    os.environ.update(environ or {})
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    if die:
        arm(die)
    import torch

    torch.set_num_threads(1)
    from diloco.replica import main

    os._exit(main([url, "--slot", slot]))


