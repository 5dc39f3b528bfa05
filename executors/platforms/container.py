"""The process in a rented container: it runs the replica as a child process, and reports its end as JSON.

    platform ──spec──▶ run_replica ─▶ can this container use the run's store?  ─▶ child: the entry point
                          │  SIGTERM, Ctrl-C, a cancelled input   ─▶ SIGTERM to the child, `grace_s`, SIGKILL
                          │  the platform's time limit is near    ─▶ the same, and the exit code is RESUME
                          └─▶ {"exit_code": 0, "reason": "done", "value": …, "tail": […]}

    python -m executors.platforms.container SPEC EXECUTOR     for platforms that start a command: the end is in its log
        diloco-started: r01.1                       the first line
        diloco-ended: {"exit_code": 0, …            the last lines: several, as log collectors cut long lines

The replica is a separate process, so the threads and signals of the platform's runtime do not affect it, and its crash
is also reported.  This module imports nothing heavy.

Not promised: a report after a SIGKILL.  The run continues, and the platform or the supervisor starts the replica again.
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
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from diloco.process import exitcodes
from diloco.process.disk import is_full
from diloco.process.full_disk import full_disk_words
from diloco.process.loopback import pass_the_proxy
from diloco.process.processes import PLACE_ENV, describe_exit, mark_run
from executors.platforms import entrypoint as entry
from executors.platforms.base import REPLICA, Handle, ReplicaSpec, State, Status, load_name
from executors.platforms.machine import oom
from executors.platforms.time_limit import staggered_s
from inner.masking import mask_secrets

START = "import sys; from executors.platforms.container import run_in_child; sys.exit(run_in_child(sys.argv[1]))"
STARTED = "diloco-started: "  # begins the first line of a container's log
ENDED = "diloco-ended: "  # begins each of the log's last lines, which together are the end as JSON
PIECE = 4000  # characters of that JSON in one line
TAIL = 12
CRASHED = 1
FOREVER_S = 1e9
TURN_S = 0.5
PATIENCE_S = 30.0  # seconds to wait for a store that does not answer the first request
GRACE_S = 12.0  # less than the fifteen seconds or so between a platform's SIGTERM and its SIGKILL
MARGIN, MARGIN_MOST_S = 0.1, 180.0  # part of the time limit that is left for a last offer, and its maximum


def run_replica(
    raw: Mapping[str, Any], executor: str, grace_s: float = GRACE_S, until: Callable[[], float] | None = None
) -> dict[str, Any]:
    """Run one spec to its end; return {"exit_code", "reason", "value", "tail", "began", "ended"}, JSON.

    began, ended: Unix times, for the bill if no supervisor saw the end.
    until(): Unix time at which the launcher's lease ends, for a spec with a lease; may raise.

    At an interruption (KeyboardInterrupt, or an exception of the platform), ask the child to leave, then raise it
    again, because the platform acts on it.
    """
    spec = ReplicaSpec.from_dict(raw)
    end, interruption = _run_timed(spec, executor, grace_s, LauncherWord(spec.lease_s, until))
    if interruption is not None:
        raise interruption
    return end


def _run_timed(
    spec: ReplicaSpec, executor: str, grace_s: float, lease: "LauncherWord"
) -> tuple[dict[str, Any], BaseException | None]:
    """Run the child; return (its end, the interruption or None)."""
    began = time.time()
    end, interruption = _run_child(spec, executor, grace_s, lease)
    return {**end, "began": began, "ended": time.time()}, interruption


class LauncherWord:
    """A launcher's lease, read again after each quarter of lease_s.   until: as in `run_replica`; None: no lease.

    The time in which the machine was suspended counts."""

    def __init__(self, lease_s: float, until: Callable[[], float] | None) -> None:
        self._ask = until if lease_s else None
        self._until, self._first = 0.0, _since_boot() + lease_s
        self._ends = self._first
        self.look_s = lease_s / 4 if self._ask else FOREVER_S

    @property
    def is_over(self) -> bool:
        if self._ask is None:
            return False
        with suppress(Exception):  # without an answer, the lease that we know stays in force
            if (until := self._ask()) > self._until:
                self._until, self._ends = until, max(self._first, _since_boot() + until - time.time())
        return _since_boot() > self._ends


def _since_boot() -> float:
    """Return seconds that never run backward; Linux's `time.monotonic` stands still while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _run_child(
    spec: ReplicaSpec, executor: str, grace_s: float, lease: LauncherWord
) -> tuple[dict[str, Any], BaseException | None]:
    began = time.monotonic()
    os.environ.update(spec.env)  # why_unreachable needs the store's variables, too
    pass_the_proxy(os.environ)
    try:
        unfit = why_unreachable(spec.run) if spec.entrypoint == REPLICA else None
    except BaseException as interruption:
        return _make_end(exitcodes.LEFT), interruption
    if unfit is not None:
        return _refuse_start(spec, executor, *unfit)
    try:
        temporary = tempfile.TemporaryDirectory(prefix="replica-", ignore_cleanup_errors=True)
    except OSError as error:
        if not is_full(error):
            raise
        why = f"{full_disk_words(error, 'temporary files')}; start the replica on another machine"
        return _refuse_start(spec, executor, CRASHED, why)
    with temporary as scratch:
        child = Child(spec, executor, Path(scratch) / "end")
        interruption = None
        kills = oom.Kills()
        try:
            child.start()
            code = child.wait(_time_left(spec, began), grace_s, lease, _late_grace_s(spec, grace_s))
        except BaseException as error:
            code = child.leave(grace_s)
            interruption = error
        tail = child.tail  # also waits for the last line to be passed on
        starved = kills.explain(code) if interruption is None else ""
        reason = child.why or starved or describe_exit(code, ours=spec.kwargs is None)
        value = child.value() if code == 0 else None
        return _make_end(code, reason=reason, value=value, tail=tail if code else ()), interruption


def _refuse_start(spec: ReplicaSpec, executor: str, code: int, why: str) -> tuple[dict[str, Any], None]:
    """Return the end of a spec whose child was never started."""
    reason = f"{spec.slot}: from inside {executor}: {why}"
    print(reason, file=sys.stderr, flush=True)
    return _make_end(code, reason=reason, tail=(reason,)), None


class Child:
    """The child process that runs the entry point.   tail: the child's last lines; all its lines also go to our output.

    why: the reason, if the child was ended because the launcher's lease was over; else "".
    """

    def __init__(self, spec: ReplicaSpec, executor: str, files: Path) -> None:
        self._spec = spec
        self._files = files
        self._lines = deque[str](maxlen=TAIL)
        self._place = f"{executor}/{spec.slot}.{spec.attempt}"
        self._process: subprocess.Popen[bytes] | None = None
        self.why = ""
        self._pump = threading.Thread(target=self._pass_on, name="output", daemon=True)

    def start(self) -> None:
        request = {**self._spec.to_dict(), "files": str(self._files), "parent": os.getpid()}
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        with _signals_held():  # a signal inside Popen would leave a child whose pid we do not know
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, json.dumps(request)],
                env={**os.environ, PLACE_ENV: self._place, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        self._pump.start()

    @property
    def tail(self) -> tuple[str, ...]:
        if self._pump.ident is not None:
            self._pump.join(timeout=5.0)
        return tuple(self._lines)

    def wait(self, seconds: float | None, grace_s: float, lease: LauncherWord, late_grace_s: float) -> int:
        """Wait for the child; return its exit code, or LEFT if the launcher's lease is over.

        After `seconds`, ask it to leave; return RESUME if the child leaves or is killed, `late_grace_s` later at most.

        """
        assert self._process is not None
        until = time.monotonic() + (FOREVER_S if seconds is None else seconds)
        try:
            while (left := until - time.monotonic()) > lease.look_s:
                with suppress(subprocess.TimeoutExpired):
                    return self._ended(lease.look_s)
                if lease.is_over:
                    self.why = "its launcher has not renewed the lease in time, so it leaves and is no longer billed"
                    print(self.why, file=sys.stderr, flush=True)
                    self.leave(grace_s)
                    return exitcodes.LEFT
            return self._ended(left)
        except subprocess.TimeoutExpired:
            print("this replica's time limit is near. It leaves, to be started again", file=sys.stderr, flush=True)
            code = self.leave(late_grace_s)
            return exitcodes.RESUME if code in (exitcodes.LEFT, -signal.SIGTERM, -signal.SIGKILL) else code

    def _ended(self, seconds: float) -> int:
        """Return the child's exit code.   Raise TimeoutExpired after `seconds`.

        A wait sleeps in the kernel (before Python 3.15: only a wait without a limit).  If another thread of the
        platform's runtime receives a signal, we hear it only after the wait. So we wait in turns.
        """
        assert self._process is not None
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > TURN_S:
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(TURN_S)
        return self._process.wait(max(0.0, left))

    def leave(self, grace_s: float) -> int:
        """Ask the child to leave, wait `grace_s`, then kill it.  A further interruption kills it at once."""
        if self._process is None:
            return exitcodes.LEFT
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            return self._ended(grace_s)
        except BaseException as over:
            self._process.kill()
            code = self._process.wait()
            if isinstance(over, subprocess.TimeoutExpired):
                return code
            raise

    def value(self) -> Any:
        """Return the entry point's return value; None without a file that holds it."""
        try:
            return json.loads(Path(f"{self._files}.result").read_text())
        except FileNotFoundError:
            return None

    def _pass_on(self) -> None:
        """Read all output and print it.  Read on even if printing fails, because a full pipe stops the child."""
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip("\n")
            self._lines.append(text)
            with suppress(Exception):  # our output is closed, cannot encode a letter, or is an object of the platform
                print(text, flush=True)


@contextmanager
def _signals_held() -> Generator[None]:
    """Delay the signals that ask this process to leave until the block is over."""
    if threading.current_thread() is not threading.main_thread():  # Python's handlers run only in the main thread
        yield
        return
    came = list[int]()
    asks = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in asks}
    heard = [number for number, handler in before.items() if callable(handler)]
    for number in heard:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])
    for number in came[:1]:
        signal.raise_signal(number)


def why_unreachable(run: str, patience_s: float = PATIENCE_S) -> tuple[int, str] | None:
    """Return (exit code, reason) if a replica in this container cannot use the run's store, else None.

    A refusal is a USER_ERROR: the user must repair it.  No answer for `patience_s` is CRASHED: a new start may succeed.
    """
    from rendezvous import layout
    from rendezvous.clock import SystemClock
    from rendezvous.errors import RendezvousError, StoreUnclear
    from rendezvous.stores.open import open_store
    from rendezvous.stores.race import why_unfit

    until = time.monotonic() + patience_s
    while True:
        try:
            store = open_store(run, make=False)
            store.get(layout.RUN)
            reason = why_unfit(store, SystemClock())
            return (exitcodes.USER_ERROR, reason) if reason else None
        except StoreUnclear as error:
            if time.monotonic() >= until:
                return CRASHED, f"its store gave no answer for {patience_s:.0f} s: {error}"
            time.sleep(1.0)
        except (RendezvousError, ValueError, ImportError, OSError) as error:
            return exitcodes.USER_ERROR, str(error)


def run_in_child(request: str) -> int:
    """Run the entry point in the child process, which ends with its parent."""
    raw = json.loads(request)
    _die_with(raw["parent"])
    sys.argv = [raw["entrypoint"], *raw["argv"]]
    return entry.run(raw)


def end_lines(end: Mapping[str, Any]) -> list[str]:
    """Return an end as the last lines of a log."""
    text = json.dumps(end)
    return [ENDED + text[at : at + PIECE] for at in range(0, len(text), PIECE)]


def read_end(lines: Sequence[str]) -> dict[str, Any] | None:
    """Return the end that a container's log reports (after its last start), or None if the log was cut off."""
    starts = [i for i, line in enumerate(lines) if line.startswith(STARTED)]
    lines = lines[starts[-1] if starts else 0 :]
    text = "".join(line.removeprefix(ENDED) for line in lines if line.startswith(ENDED))
    try:
        return json.loads(text)
    except ValueError:
        return None


def ended_as(handle: Handle, end: Mapping[str, Any], *, asked: bool = False, why: str = "") -> Status:
    """Return the status for an end that `run_replica` reported.   asked: whether an executor had cancelled the process.

    why: the platform's words for a lack of memory, or "".   Without an exit code, or by a signal, the end is LOST.
    """
    code, words = end["exit_code"], "; ".join(filter(None, [end["reason"], why]))
    outside = code is None or oom.from_outside(code, words)
    ended = State.CANCELLED if asked else State.LOST if outside else State.FAILED
    times = {"began_at": end.get("began", 0.0), "ended_at": end.get("ended", 0.0)}
    return Status(handle, State.SUCCEEDED if code == 0 else ended, words, code, **times)


def replica_lines(lines: Iterable[str]) -> list[str]:
    """Return the lines that the replica itself printed."""
    return [line for line in lines if not line.startswith((STARTED, ENDED))]


def main(argv: list[str]) -> int:
    """Run a spec.   argv: the spec as JSON, the executor's name, and for a lease the name of `until`'s function."""
    signal.signal(signal.SIGTERM, _raise_interrupt)
    spec = ReplicaSpec.from_dict(json.loads(argv[0]))
    mark_run(spec.run)
    print(f"{STARTED}{spec.slot}.{spec.attempt}", flush=True)
    lease = LauncherWord(spec.lease_s, load_name(argv[2]) if spec.lease_s and argv[2:] else None)
    end, _ = _run_timed(spec, argv[1], GRACE_S, lease)  # even after an interruption, report the child's end
    print("\n".join(end_lines(end)), flush=True)
    return end["exit_code"] if end["exit_code"] >= 0 else 128 - end["exit_code"]


def _make_end(code: int, *, reason: str = "", value: Any = None, tail: tuple[str, ...] = ()) -> dict[str, Any]:
    last = [mask_secrets(line) for line in tail]
    return {"exit_code": code, "reason": reason or describe_exit(code), "value": value, "tail": last}


def _time_left(spec: ReplicaSpec, began: float) -> float | None:
    if not spec.timeout_s:
        return None
    return max(0.0, began + _limit_s(spec) - _margin_s(spec) - time.monotonic())


def _late_grace_s(spec: ReplicaSpec, grace_s: float) -> float:
    """Return the seconds that a child gets to leave near the time limit: a replica ends an inner step and uploads.

    A supervisor gets only `grace_s`, because starting the next supervisor takes the rest of the margin.
    """
    return max(grace_s, _margin_s(spec) - grace_s) if spec.entrypoint == REPLICA else grace_s


def _limit_s(spec: ReplicaSpec) -> float:
    return staggered_s(spec.timeout_s, spec.slot) if spec.entrypoint == REPLICA else spec.timeout_s


def _margin_s(spec: ReplicaSpec) -> float:
    return min(MARGIN * _limit_s(spec), MARGIN_MOST_S)


def _raise_interrupt(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not cut the child's grace short
    raise KeyboardInterrupt


def _die_with(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent ends, for any reason (only on Linux, as all containers are)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before we asked
            sys.exit(exitcodes.LEFT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
