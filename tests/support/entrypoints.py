"""The functions that the replicas of the executors' tests run: small, each leaves the story of its run in files.

    folder/marks   "start 4711 r00.1", "left 4711 r00.1", …   one line each, from every replica
    folder/go      all replicas may end

Containers of the test servers are processes of this machine, so that they reach the same folder.
"""

import importlib
import os
import signal
import sys
import time
from pathlib import Path

PATIENCE_S = 100.0  # no process outlives its test by more


def main(folder: str = "", base: int = 0, last_first: int = 0) -> dict[str, int]:
    """The guide's form calls a module's `main`.   last_first: so many ranks, which end in reverse order."""
    rank = int(os.environ["REPLICA_RANK"])
    if last_first:
        _wait(Path(folder) / f"done.{rank + 1}", needed=rank + 1 < last_first)
        (Path(folder) / f"done.{rank}").touch()
    return {"rank": rank, "value": base + rank}


def renamed() -> str:
    return os.environ["MY_RANK"]


def fails_on_odd_ranks() -> int:
    rank = int(os.environ["REPLICA_RANK"])
    if rank % 2:
        raise RuntimeError(f"rank {rank} cannot")
    return rank


def returns(folder: str, who: str, value: object = None) -> dict[str, object]:
    mark(folder, "start", who)
    return {"value": value, "env": os.environ.get("CONTRACT", "")}


def environment(folder: str, who: str) -> dict[str, str]:
    mark(folder, "start", who)
    return dict(os.environ)


def crashes(folder: str, who: str) -> None:
    mark(folder, "start", who)
    print("line 0\nline 1", flush=True)
    raise ValueError("this is how it ends")


def exits(folder: str, who: str, code: int) -> None:
    mark(folder, "start", who)
    sys.exit(code)


def waits(folder: str, who: str) -> str:
    """Wait until all replicas may end."""
    print("here I am", flush=True)
    mark(folder, "start", who)
    _wait(Path(folder) / "go")
    return "went"


def polite(folder: str, who: str) -> str:
    """Leaves with 4 when asked to."""

    def leave(*_: object) -> None:
        mark(folder, "left", who)
        sys.exit(4)

    signal.signal(signal.SIGTERM, leave)
    return waits(folder, who)


def stubborn(folder: str, who: str) -> str:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return waits(folder, who)


def speaks(folder: str, who: str, lines: int, pause_at: int) -> None:
    """`lines` numbered lines; before line `pause_at` it waits to be let go."""
    mark(folder, "start", who)
    for i in range(lines):
        if i == pause_at:
            _wait(Path(folder) / "go")
        print(f"line {i}", flush=True)


def mark(folder: str, word: str, who: str) -> None:
    with open(Path(folder) / "marks", "a") as f:
        f.write(f"{word} {os.getpid()} {who}\n")


def marks(folder: Path, word: str, who: str) -> list[int]:
    """The processes that said so, in order."""
    try:
        lines = [line.split() for line in (folder / "marks").read_text().splitlines()]
    except FileNotFoundError:
        return []
    return [int(pid) for said, pid, name in lines if (said, name) == (word, who)]


def _wait(path: Path, needed: bool = True) -> None:
    until = time.monotonic() + PATIENCE_S
    while needed and not path.exists() and time.monotonic() < until:
        time.sleep(0.02)


def where(folder: str, who: str) -> dict[str, dict[str, str]]:
    """Which files it runs."""
    return {"from": {name: str(importlib.import_module(name).__file__) for name in ("diloco", "executors", "tests")}}


def replica(argv: list[str]) -> int:
    """In the place of a replica, for a supervisor: works on, and leaves when it is asked to."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
    time.sleep(120)
    return 0
