"""What runs inside a rented container: the replica as a child process, and its end as data.

    platform ──spec──▶ run_replica ─▶ can the run's store carry it, from here? ─▶ child: the entry point
                          │  SIGTERM, Ctrl-C, a cancelled input   ─▶ SIGTERM to the child, `grace_s`, SIGKILL
                          │  the platform's time limit is near    ─▶ the same, and the exit code is RESUME
                          └─▶ {"exit_code": 0, "reason": "done", "value": …, "tail": […]}

    python -m executors.container SPEC     for platforms that start a command: the same, its end as the last line

A child of its own, so that whatever the platform's runtime does with threads and signals is not the replica's
business, and so that a crash is data too.  Light: nothing heavy is imported here.

Not promised: anything after a SIGKILL.  The run goes on without, and the platform or the supervisor starts it again.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from diloco import exitcodes
from diloco.life import PLACE_ENV
from executors import child
from executors.base import REPLICA, ReplicaSpec
from executors.processes import describe

START = "import sys; from executors.container import inside; sys.exit(inside(sys.argv[1]))"
ENDED = "diloco-ended: "  # begins the last line of a container's log; an end as JSON follows
TAIL = 12
GRACE_S = 12.0  # platforms give about fifteen seconds between asking and killing
MARGIN, MARGIN_MOST_S = 0.1, 180.0  # of the time limit: left for a last offer


def run_replica(raw: Mapping[str, Any], executor: str, grace_s: float = GRACE_S) -> dict[str, Any]:
    """Run one spec to its end; -> {"exit_code", "reason", "value", "tail"}, JSON.

    An interruption (KeyboardInterrupt, or whatever the platform raises) is passed on to the child and then raised
    again: the platform knows what it wanted.
    """
    began, spec = time.monotonic(), ReplicaSpec.from_dict(raw)
    if spec.entrypoint == REPLICA and (reason := unreachable(spec.run)):
        reason = f"{spec.slot}: from inside {executor}: {reason}"
        print(reason, file=sys.stderr, flush=True)
        return _end(exitcodes.USER_ERROR, reason=reason, tail=(reason,))
    with tempfile.TemporaryDirectory(prefix="replica-") as scratch:
        process = Child(spec, executor, Path(scratch) / "end")
        try:
            code = process.wait(_time_left(spec, began), grace_s)
        except BaseException:
            process.leave(grace_s)
            raise
        return _end(code, value=process.value() if code == 0 else None, tail=process.tail if code else ())


class Child:
    """The entry point in a process of its own.   tail: its last lines; all of them go on to our own output."""

    def __init__(self, spec: ReplicaSpec, executor: str, files: Path) -> None:
        self._files, self._lines = files, deque[str](maxlen=TAIL)
        place = {PLACE_ENV: f"{executor}/{spec.slot}.{spec.attempt}"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, json.dumps({**spec.to_dict(), "files": str(files)})],
            env={**os.environ, **spec.env, **place, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._pump = threading.Thread(target=self._pass_on, name="output", daemon=True)
        self._pump.start()

    @property
    def tail(self) -> tuple[str, ...]:
        self._pump.join(timeout=5.0)
        return tuple(self._lines)

    def wait(self, seconds: float | None, grace_s: float) -> int:
        """-> the exit code; after `seconds` it is asked to leave, and if it does, the code is RESUME."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            print("the platform's time limit is near; leaving, to be started again", file=sys.stderr, flush=True)
            code = self.leave(grace_s)
            return exitcodes.RESUME if code in (exitcodes.LEFT, -signal.SIGTERM, -signal.SIGKILL) else code

    def leave(self, grace_s: float) -> int:
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            return self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def value(self) -> Any:
        """What the entry point returned, if it was called with keywords."""
        try:
            return json.loads(Path(f"{self._files}.result").read_text())
        except FileNotFoundError:
            return None

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip("\n")
            self._lines.append(text)
            print(text, flush=True)


def unreachable(run: str) -> str | None:
    """Why the run's store cannot carry a run from here, or None."""
    from rendezvous.clock import SystemClock
    from rendezvous.errors import RendezvousError
    from rendezvous.probe import unfit
    from rendezvous.store import open_store

    try:
        return unfit(open_store(run), SystemClock())
    except (RendezvousError, ValueError, ImportError, OSError) as error:
        return str(error)


def inside(request: str) -> int:
    """In the child: ends with its parent, then the entry point."""
    _die_with_parent()
    raw = json.loads(request)
    sys.argv = [raw["entrypoint"], *raw["argv"]]
    return child.run(raw)


def read_end(lines: list[str]) -> dict[str, Any] | None:
    """The end that a container's log tells, or None if it was cut off."""
    told = [line.removeprefix(ENDED) for line in lines[-TAIL:] if line.startswith(ENDED)]
    return json.loads(told[-1]) if told else None


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        end = run_replica(json.loads(argv[0]), argv[1])
    except KeyboardInterrupt:
        end = _end(exitcodes.LEFT)
    print(ENDED + json.dumps(end), flush=True)
    return end["exit_code"] if end["exit_code"] >= 0 else 128 - end["exit_code"]


def _end(code: int, *, reason: str = "", value: Any = None, tail: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"exit_code": code, "reason": reason or describe(code), "value": value, "tail": list(tail)}


def _time_left(spec: ReplicaSpec, began: float) -> float | None:
    if not spec.timeout_s:
        return None
    margin = min(MARGIN * spec.timeout_s, MARGIN_MOST_S)
    return max(0.0, began + spec.timeout_s - margin - time.monotonic())


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _die_with_parent() -> None:
    """SIGTERM when the parent is gone, however it went (Linux; containers are)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
