"""Words for a kill for lack of memory (oom.py), with the cgroup's own numbers.

Not promised: the numbers of one process; they are the cgroup's.
"""

from collections.abc import Iterable
from pathlib import Path

TEXT = "killed by SIGKILL: out of memory (the kernel ended it at the memory limit; raise that, or use less per step)"
UNSEEN = "killed, and its fork server with it: out of memory (the kernel ended them; use less memory per step)"
AMOUNTS = {  # file with the count of kills -> files beside it with the peak memory and the limit
    "memory.events": ("memory.peak", "memory.max"),
    "memory.oom_control": ("memory.max_usage_in_bytes", "memory.limit_in_bytes"),
}


def kill_words(exit_code: int | None, count: int, files: Iterable[Path]) -> str:
    """Return the reason of a kill.   exit_code: None if the fork server died, too.   count: kills here so far.

    files: those that may have the count."""
    numbers = [f"{count} processes killed for it here so far", memory_words(files)]
    return "; ".join([UNSEEN if exit_code is None else TEXT, *filter(None, numbers)])


def memory_words(files: Iterable[Path]) -> str:
    """Return the known numbers of our cgroup: "3.9 GiB used at most, of 4.0 GiB"."""
    for path in files:
        most, limit = (_gibibytes(path.parent / name) for name in AMOUNTS[path.name])
        if most or limit:
            return ", of ".join(filter(None, [most and f"{most} used at most", limit]))
    return ""


def _gibibytes(path: Path) -> str:
    try:
        number = int(path.read_text())
    except (OSError, ValueError):  # "max": no limit; v1 gives a huge number instead
        return ""
    return f"{number / 2**30:.2g} GiB" if number < 1 << 50 else ""
