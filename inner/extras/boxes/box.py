"""Defines a box, a sandboxed machine for one episode, and the protocol of its provider.

    provider.start(owner, recipe) ──▶ Box      exec(command, user, timeout_s) ──▶ Ran     read   write
    provider.find(labels) ──▶ boxes            stop()                              labels: run, slot, generation, place

    in the box:   timeout -k 5 T bash -c COMMAND  2>&1 │ until its end │ first 4096 bytes, CUT, last 4096 ──▶ ≤ 8 KiB

Exit codes are Harbor's: 124 (TERM) and 137 (KILL) mean the time limit.  The output is cut inside the box, so 2 GB of
output do not fill this process's memory.  CUT is inserted there, too, because lengths change on the way: a provider
that returns text replaces each invalid byte by three.

`COMMAND &` does not hold the call: we return when the shell ends. What the background process writes later is dropped.

Not promised: a distinction between the time limit and a command's own exit code 124 or 137.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

HALF_OUTPUT = 4096  # bytes kept of the output's beginning, and of its end
CUT = "\n[… the middle of the output is cut …]\n"
KILL_AFTER_S = 5  # seconds between TERM and KILL
ANSWER_S = 20.0  # seconds for a provider's answer beyond a command's own limit
TTL_S = 3600.0  # seconds after which the provider itself stops a box
MADE_BY = {"made-by": "serverless-diloco"}  # a label, so that we never list other boxes of the account
USER = ("setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "env", "HOME=/tmp")
MOST_OUTPUT = 2 * HALF_OUTPUT + len(CUT)  # characters
MOST_WORD = (128 << 10) - 1  # bytes of one argument of a program (Linux's MAX_ARG_STRLEN, without the NUL at its end)
# one byte more than a half shows whether the middle was cut out; base64, because no bash variable can hold a NUL
LAST = f'last=$(tail -c {HALF_OUTPUT + 1} | base64 -w 0); last() {{ printf %s "$last" | base64 -d; }}'
MARK = f'[ "$(last | wc -c)" -gt {HALF_OUTPUT} ] && printf %s "$4"'
HALVES = f"{{ head -c {HALF_OUTPUT}; {LAST}; {MARK}; last | tail -c {HALF_OUTPUT}; }}"
# the pipe itself ends with the last background process.  Only `read -t 0` has a time limit at the pipe: a `read` that
# reaches its limit may have taken a NUL, which no variable shows.  dd takes bytes until it finds none
UNTIL_END = r"""
while read -t 0 -u 4; ended=$?; true; do
  if read -t 0; then
    IFS= read -r -d '' -n 1 byte || break
    if [ "$byte" ]; then printf %s "$byte"; else printf '\0'; fi
    ! read -t 0 || dd bs=64K count=512 iflag=nonblock
    pause=.001
  elif [ $ended != 0 ]; then
    read -t $pause -n 1 -u 4; if [ $pause = .001 ]; then pause=.01; else pause=.05; fi
  fi
  [ $ended != 0 ] || { until cat; do sleep .1; done <&0 >/dev/null 4>&- & break; }  # a background process may write on
done"""
# descriptor 4 is a pipe that gets a line when the shell has ended: a pause may take one byte, and the others are left.
# The last chunk is read after this line
WRAPPED = f"""exec 4<> <(:) 2>/dev/null
(trap 'echo ended >&4' EXIT; timeout -k "$2" "$1" bash -c "$3" 2>&1 </dev/null 4>&-) | {{ LC_ALL=C; pause=.001
{UNTIL_END}
}} | {HALVES}; exit ${{PIPESTATUS[0]}}"""


class ProviderFailed(RuntimeError):
    """A provider gave no answer, or no box. The box may exist all the same: look it up by its labels."""


class BuildFailed(ProviderFailed):
    """The provider cannot build a task's image. A second try would not change that; other tasks have boxes."""


class BoxGone(RuntimeError):
    """A box does not answer any more: the provider lost it, or its episode broke it (verdict.py decides)."""


@dataclass(frozen=True)
class BoxOwner:
    """The owner of a box: one rollout.   run: the run's name.   slot, generation: the session.   place: the rollout."""

    run: str
    slot: str
    generation: int
    place: str

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels that the box has at its provider."""
        return {"run": self.run, "slot": self.slot, "generation": str(self.generation), "place": self.place}

    @property
    def key(self) -> str:
        """Return a name for one create call: lowercase letters, digits and hyphens."""
        return re.sub(r"[^a-z0-9-]+", "-", "-".join(self.labels.values()).lower()).strip("-")[-200:]


@dataclass(frozen=True)
class BoxRecipe:
    """The first content of a box.   image: an image's name; "": the provider's default.   files: path -> content.

    programs: paths of executable files.   offline: whether the box has no network.   folders: further places of files
    that come later.   base: an image that a provider with images uses instead of its default.   build: a tar with a
    Dockerfile, which replaces both images."""

    image: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    programs: Sequence[str] = ()
    folder: str = "/app"
    ttl_s: float = TTL_S
    offline: bool = False
    folders: Sequence[str] = ()
    base: str = ""
    build: bytes = b""


@dataclass(frozen=True)
class Ran:
    """The result of a command.   code: the exit code.   output: at most 8 KiB, and a mark if it was cut."""

    code: int
    output: str

    @property
    def timed_out(self) -> bool:
        return self.code in (124, 137)


class Box(Protocol):
    """One box. Its verbs raise BoxGone without an answer; `stop` raises ProviderFailed, and succeeds for a gone box."""

    def exec(self, command: str, *, user: str, timeout_s: float) -> Ran: ...

    def read(self, path: str) -> bytes:
        """Return a file's content.   Raises FileNotFoundError."""
        ...

    def write(self, path: str, data: bytes) -> None: ...

    def stop(self) -> None: ...


class BoxProvider(Protocol):
    """A service that runs boxes.   price_per_hour: dollars for one box; None if it depends on the account."""

    @property
    def price_per_hour(self) -> float | None: ...

    def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> Box:
        """Create a box without the files, which BoxStarter writes.   Raises ProviderFailed.

        Raises InnerError if the provider refuses this box, and would refuse it again."""
        ...

    def find(self, labels: Mapping[str, str]) -> Sequence[Box]:
        """Return the boxes that have all these labels.   Raises ProviderFailed."""
        ...


def wrapped_command(command: str, timeout_s: float, folder: str = "") -> list[str]:
    """Return the words that run a command inside a box with its limits.   folder: where the command starts."""
    if folder:
        command = f"cd {shlex.quote(folder)} 2>/dev/null; {command}"  # the first command makes it, an episode may not
    return ["bash", "-c", WRAPPED, "_", f"{timeout_s:g}", str(KILL_AFTER_S), command, CUT]


def fitting_words(words: Sequence[str]) -> Sequence[str]:
    """Return the words.   Raise ValueError for a word that no program can get: the box would seem to have died."""
    for word in words:
        if "\0" in word or len(word.encode()) > MOST_WORD:  # half of a surrogate pair is a UnicodeEncodeError
            raise ValueError(f"the command has a NUL, or more than {MOST_WORD} bytes. Give another, or write a file.")
    return words


def with_variables(variables: Mapping[str, str], command: str) -> str:
    """Return the command, which runs with these environment variables.   Its line numbers stay as they are."""
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return f"export {' '.join(words)}; {command}" if words else command


def make_executable(box: Box, paths: Sequence[str]) -> None:
    """Make these files of a box executable.   One command gets 100 paths, because an argument has 128 KiB at most."""
    for at in range(0, len(paths), 100):
        box.exec(f"chmod a+x -- {shlex.join(paths[at : at + 100])}", user="root", timeout_s=60.0)


def as_user(user: str) -> tuple[str, ...]:
    """Return the words in front of a command in a box whose commands run as root: any other user is uid 1000."""
    return () if user == "root" else USER


def read_output(raw: bytes | str) -> str:
    """Return a wrapped command's output as text, cut here, too, if it is longer than the box's own cut allows."""
    text = raw if isinstance(raw, str) else raw.decode(errors="replace")
    return text if len(text) <= MOST_OUTPUT else CUT.join((text[:HALF_OUTPUT], text[-HALF_OUTPUT:]))
