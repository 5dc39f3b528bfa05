"""Feature Deletion as an environment: tools to read, write and try code; get_reward runs the hidden tests.

    row["task"]  ──reset──▶  files in memory            list_files() read_file(path) write_file(path, text) edit_file(…)
                                  │                     run_python(program): in the sandbox, with the files read-only
                                  └──get_reward──▶ judge: a sandbox per hidden test ──▶ 1.0 or 0.0
                                                   monitor: flags ──▶ log, event `deletion_flagged`

    class World(FeatureDeletion):        in your file, for another rule
        _reward = "share"                the share of fail-to-pass tests; "all" (the default): 1.0 or 0.0
        _strict = True                   a flag sets the reward to 0

The repository is a dictionary of texts: it has no folder that a link could leave, no history, no bytecode. No sandbox
that runs the agent's programs contains hidden tests or the solution.

Not promised: a shell, or packages other than the task's and the standard library.
"""

import logging
from dataclasses import replace
from typing import Any, Literal

from inner.errors import InnerError
from inner.extras.deletion.judge import DeletionVerdict, judge, load_task
from inner.extras.deletion.monitor import find_flags
from inner.extras.deletion.sandbox import SandboxLimits, checked_path, require_sandbox, run_sandboxed
from inner.host import Host

LOG = logging.getLogger(__name__)
TRYING = SandboxLimits(seconds=5.0, output=4 << 10)
MOST_FILES, MOST_TEXT = 50, 200_000


class FeatureDeletion:
    """TRL's environment: one instance per rollout; its public methods are the tools."""

    _reward: Literal["all", "share"] = "all"
    _strict = False
    _host: Host | None = None

    def __init__(self) -> None:
        if self._reward not in ("all", "share"):
            raise InnerError(f'{type(self).__name__}._reward must be "all" or "share"; found {self._reward!r}.')
        require_sandbox()

    @classmethod
    def _report_to(cls, host: Host) -> None:
        cls._host = host

    def reset(self, task: str, **row: Any) -> None:
        """Begin the task of this row."""
        self._task = load_task(task)
        self._files = dict(self._task.files)
        self._programs: list[str] = []
        self._verdict: DeletionVerdict | None = None

    def list_files(self) -> str:
        """List the files of the repository."""
        return "\n".join(sorted(self._files))

    def read_file(self, path: str, first: int = 1, last: int = 1000) -> str:
        """Read lines of a file of the repository.

        Args:
            path: its path, as list_files gives it
            first: the first line
            last: the last line
        """
        return "".join(self._text(path).splitlines(keepends=True)[max(first, 1) - 1 : last])

    def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a text, which occurs once, in a file of the repository.

        Args:
            path: its path, as list_files gives it
            old: the text that goes
            new: the text that comes in its place
        """
        text = self._text(path)
        if not isinstance(old, str) or not isinstance(new, str):
            raise ValueError("old and new must be strings")
        if (found := text.count(old) if old else 0) != 1:
            raise ValueError(f"the old text occurs {found} times in {path}; give one that occurs once")
        return self.write_file(path, text.replace(old, new))

    def _text(self, path: str) -> str:
        if path not in self._files:
            raise ValueError(f"there is no file {path!r}; there are {', '.join(sorted(self._files))}")
        return self._files[path]

    def write_file(self, path: str, text: str) -> str:
        """Write a whole file of the repository.

        Args:
            path: its path, relative to the repository
            text: its new content
        """
        if not isinstance(path, str) or not isinstance(text, str):
            raise ValueError("path and text must be strings")
        after = {**self._files, checked_path(path): text}
        if len(after) > len(self._task.files) + MOST_FILES or len(text) > MOST_TEXT:
            raise ValueError(f"you may add at most {MOST_FILES} files, each of at most {MOST_TEXT} characters")
        if any(path.startswith(f"{other}/") or other.startswith(f"{path}/") for other in self._files):
            raise ValueError(f"{path!r} would be a file and a folder. Choose another path.")
        text.encode()  # raises for lone surrogates now, not when the tests run
        self._files = after
        return f"{path}: {len(text)} characters"

    def run_python(self, program: str) -> str:
        """Run a Python program in the repository's folder, which it can import from and not write to.

        Args:
            program: the program's text
        """
        if not isinstance(program, str) or len(program) > MOST_TEXT:
            raise ValueError(f"a program must be a string of at most {MOST_TEXT} characters")
        self._programs.append(program)
        ended = run_sandboxed(self._files, program, TRYING, around=replace(self._task.around, beside={}))
        said = ended.output.decode(errors="replace")
        return f"{said}\n[{ended.why}]" if ended.why else said

    def get_reward(self) -> float:
        """Return 1.0 if all hidden tests pass, else 0.0 (or their share)."""
        task, verdict = self._task, self._verdict
        if verdict is None:
            flags = find_flags(task.files, self._files, self._programs)
            verdict = judge(task, self._files, flags)
            if self._task is task:  # else the next episode has begun, and this call was too late
                self._verdict = verdict
                if verdict.flags:
                    self._tell(verdict)
        if self._strict and verdict.flags:
            return 0.0
        return verdict.share(task) if self._reward == "share" else verdict.reward

    def _tell(self, verdict: DeletionVerdict) -> None:
        said = f"{self._task.name}: {'; '.join(verdict.flags)}"
        if self._host is None:
            LOG.warning("feature deletion: %s", said)
        else:
            self._host.emit("deletion_flagged", said, flags=len(verdict.flags), solved=verdict.reward)
