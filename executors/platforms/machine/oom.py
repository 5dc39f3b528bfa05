"""Detects a kill for lack of memory.  Such an end counts as the replica's own fault: its slot gets 3 starts, not 10.

    words    Hugging Face "OOMKilled", Slurm OUT_OF_MEMORY or "oom_kill event",
             Modal KERNEL_OOM_KILL or MEMORY_…_EVICTION, SkyPilot and Kubernetes "OOMKilled (exit code 137)",
             the kernel "Out of memory: Killed process"
    kernel   memory.events (cgroup v2) or memory.oom_control (v1): oom_kill N      N: processes killed so far

If that count rose, a process that ended by SIGKILL was killed for its memory.  The same holds for a process without an
exit code, because its fork server was killed as well.  If the count did not rise, another process sent the kill, which
may be a preemption.

Not promised: a count if the container does not show its cgroup (gVisor); then only the platform's words show a kill.
"""

import re
import signal
from collections.abc import Callable
from pathlib import Path

WORDS = re.compile(r"\boom\b|oom[-_ ]?kill|out[-_ ]of[-_ ]memory|memory_\w*eviction|cannot allocate memory", re.I)
COUNT = re.compile(r"^oom_kill (\d+)$", re.M)
CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def says_out_of_memory(*texts: str) -> bool:
    """Whether a platform says that memory ran out."""
    return any(WORDS.search(text) for text in texts)


def from_outside(exit_code: int | None, *texts: str) -> bool:
    """Whether another process's signal ended this process, and memory was not the reason."""
    return exit_code in (-signal.SIGKILL, -signal.SIGTERM) and not says_out_of_memory(*texts)


def count_kills(root: Path = CGROUPS, own: Path = OWN) -> int | None:
    """Return how many processes of our cgroup the kernel has killed for memory; None if no file shows it."""
    for path in count_files(root, own):
        try:
            found = COUNT.search(path.read_text())
        except OSError:
            continue
        if found:
            return int(found[1])
    return None


def count_files(root: Path, own: Path) -> list[Path]:
    """Return the files that may have the count: in our own cgroup, or in the root that a container sees."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    places = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    v1 = [root / "memory" / path.lstrip("/") for _, names, path in places if "memory" in names.split(",")]
    v2 = [root / path.lstrip("/") for _, names, path in places if not names]
    folders = [(v1, "memory.oom_control", root / "memory"), (v2, "memory.events", root)]
    return [folder / name for places, name, top in folders if places for folder in (*places, top)]


class Kills:
    """The kernel's kills since this object was made; each kill explains the end of one process."""

    def __init__(self, count: Callable[[], int | None] = count_kills) -> None:
        self._count = count
        self._explained = count() or 0

    def explain(self, exit_code: int | None) -> str:
        """Return the reason if a process was killed for its memory, else "".   exit_code: None if unknown."""
        count = self._count() or 0
        if exit_code not in (None, -signal.SIGKILL) or count <= self._explained:
            return ""
        self._explained += 1
        from executors.platforms.machine.oom_words import kill_words

        return kill_words(exit_code, count, count_files(CGROUPS, OWN))
