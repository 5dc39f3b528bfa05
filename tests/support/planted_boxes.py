"""Boxes in this process that die, hang at their start and lose create replies as planned.

A box understands three commands: "turn" does nothing, "break" kills the box, "answer X" keeps X as the answer.
`bash /tests/test.sh` writes the answer as the reward.  Every fault is a function of the seed, the owner's place and the
number of its create, so a schedule repeats whatever the threads do.

    LocalBoxes(wrap=namespaces)    real processes and real paths without bubblewrap, for this machine's tests
    write_bwrap(folder)            the same as a program `bwrap`, for a whole run
"""

import random
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from inner.extras.boxes.box import BoxGone, BoxOwner, BoxRecipe, ProviderFailed, Ran
from inner.extras.boxes.episode import CLEAR

SCRIPT = """set -e
PATH="$PATH:/usr/sbin:/sbin"
mount -t tmpfs tmpfs "$0"
for d in usr bin sbin lib lib64 dev proc etc; do
  [ -e /$d ] || continue
  mkdir -p "$0/$d"; mount --rbind /$d "$0/$d"
done
for p in "$1"/*; do mkdir -p "$0/${p##*/}"; mount --bind "$p" "$0/${p##*/}"; done
folder="$2"; new="$0"; shift 2
exec chroot "$new" sh -c 'cd "$0" && exec "$@"' "$folder" "$@"
"""


def namespaces(root: Path, user: str, folder: str = "/") -> list[str]:
    """Return words that show a process the box's folders at their own paths."""
    (root.parent / "mnt").mkdir(exist_ok=True)
    words = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", SCRIPT]
    return [*words, str(root.parent / "mnt"), str(root), folder]


BWRAP = """#!{python}
import ctypes, os, sys
sys.path.insert(0, {root!r})
from tests.support.planted_boxes import namespaces
from pathlib import Path
end = sys.argv.index("--")
root = Path(sys.argv[sys.argv.index("--bind") + 1]).parent
words = namespaces(root, "user", sys.argv[sys.argv.index("--chdir") + 1]) + sys.argv[end + 1 :]
ctypes.CDLL(None).prctl(1, 9)  # as --die-with-parent does
os.execvp(words[0], words)
"""


def write_bwrap(folder: Path) -> Path:
    """Write a program `bwrap` that reads what boxes ask of it; return its folder, for the PATH."""
    folder.mkdir()
    (folder / "bwrap").write_text(BWRAP.format(python=sys.executable, root=str(Path(__file__).parents[2])))
    (folder / "bwrap").chmod(0o755)
    return folder


@cache
def namespaces_work() -> bool:
    try:
        return subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).returncode == 0
    except OSError:
        return False


class VirtualClock:
    """Seconds that pass only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class PlantedBoxes:
    """A provider.   deaths: share of boxes that die at some call.   hung, lost: shares of creates."""

    price_per_hour = 0.01

    def __init__(
        self,
        clock: VirtualClock,
        *,
        seed: int = 0,
        deaths: float = 0,
        hung: float = 0,
        lost: float = 0,
        turns: int = 20,
    ) -> None:
        self.clock, self.seed, self.turns = clock, seed, turns
        self.deaths, self.hung, self.lost = deaths, hung, lost
        self.alive: dict[int, PlantedBox] = {}
        self.made: list[PlantedBox] = []
        self.creates: dict[str, int] = {}

    def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> "PlantedBox":
        n = self.creates[owner.place] = self.creates.get(owner.place, 0) + 1
        chance = random.Random(f"{self.seed} {owner.place} {n}")
        if chance.random() < self.hung:
            self.clock.sleep(min(60.0, timeout_s))
            raise ProviderFailed("the start hung for 60 s")
        dies_at = chance.randrange(self.turns) if chance.random() < self.deaths else None
        box = PlantedBox(self, owner, dies_at)
        if chance.random() < self.lost:
            raise ProviderFailed("the reply of the create was lost")
        return box

    def find(self, labels: Mapping[str, str]) -> list["PlantedBox"]:
        return [box for box in self.alive.values() if labels.items() <= box.owner.labels.items()]


class PlantedBox:
    def __init__(self, provider: PlantedBoxes, owner: BoxOwner, dies_at: int | None) -> None:
        self.provider, self.owner, self.dies_at = provider, owner, dies_at
        self.calls, self.answer, self.died = 0, "0", ""
        self.number = len(provider.made)
        provider.made.append(self)
        provider.alive[self.number] = self

    def exec(self, command: str, *, user: str, timeout_s: float) -> Ran:
        if command.startswith("mkdir -p /app") or command == CLEAR:
            return Ran(0, "")
        if command.startswith("[ -f /logs/verifier/"):
            return Ran(0, self.answer)
        if self.calls == self.dies_at:
            self._die("provider")
        if command == "break":
            self._die("policy")
        if self.died:
            raise BoxGone(f"the box died: {self.died}")
        self.calls += 1
        if command.startswith("answer "):
            self.answer = command.removeprefix("answer ")
        return Ran(0, "ok")

    def read(self, path: str) -> bytes:
        return self.answer.encode()

    def write(self, path: str, data: bytes) -> None: ...

    def stop(self) -> None:
        self.provider.alive.pop(self.number, None)

    def _die(self, why: str) -> None:
        self.died = self.died or why
        self.stop()
