"""A replica of K ranks on one machine: its process is rank 0, starts the others, and ends if one rank fails.

    the slot's process = rank 0 ── fork (or a fresh interpreter) ──▶ rank 1 … K − 1     RANK, WORLD_SIZE, LOCAL_RANK
         │                           they ignore SIGTERM: rank 0 leaves for all of them
         ├── a rank has failed ──▶ its last words, the other ranks are killed, the same end for this process
         ├── a rank has ended well, long before rank 0 ──▶ the same, as a crash
         ├── a rank is stopped (SIGSTOP) for half a minute ──▶ the same, as hung
         └── this process has ended, in any way ──▶ the other ranks end

So claim, heartbeat, signals, exit code and log are those of one process, on each platform.  `MEET` names the file in
which the ranks find each other, so no port has to be free.

Not promised: ranks on several machines; the reason of a rank that is killed; to see a stopped rank without /proc.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from diloco.process import exitcodes
from diloco.process.disk import Scratch
from diloco.process.processes import describe_exit
from diloco.process.signals import asking_signals, hear_asking

LAUNCHER = {"WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"}
LAUNCHERS = ("PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "TORCHELASTIC_")
MEET = "DILOCO_RANKS"  # variable with the path of the file where ranks meet
END_S = 10.0  # time for the other ranks to end after rank 0's work
EARLY_S = 10.0  # time for rank 0 to end, or to leave the run, after another rank has ended with code 0
SETTLE_S = 1.0  # time to see a rank's end after another rank has lost contact to it
STOPPED_LOOKS = 30  # looks, SETTLE_S apart, that see a rank stopped before the replica ends
LAST = "last"  # kind of the message in which a rank reports its end
_leader: list[Connection] = []  # the pipe to rank 0, if this process is another rank
_speaking = threading.Lock()


class RankLost(RuntimeError):
    """Another rank of this replica has ended, so this rank cannot continue."""


class Followed(RuntimeError):
    """Rank 0 has ended its replica, for the reason in this error's text; so this rank ends, too."""


class Followers:
    """The ranks 1 … count − 1, as children of this process.   follow: called in each; returns its exit code.

    on_loss: called with the words about a rank that has failed, before this process ends.
    on_told: called in the watching thread with a rank's number and its message. Set it before a rank sends one.
    is_over: whether rank 0 needs no other rank any more; before that, a rank that ends with code 0 counts as lost."""

    def __init__(self, count: int, follow: Callable[[], int]) -> None:
        self.on_loss: Callable[[str], None] = lambda text: None
        self.on_told: Callable[..., None] = lambda *told: None
        self.is_over: Callable[[], bool] = lambda: True
        self._ended_at: dict[int, float] = {}  # ranks that ended with exit code 0 while rank 0 continues
        self._said: dict[int, tuple[str, bool]] = {}  # last words, by rank
        self._stopped = Counter[int]()  # looks in a row that have seen a rank stopped, by rank
        self._count = count
        self._scratch = Scratch()  # after a kill of all ranks at once, the machine's next session removes it
        self._folder = str(self._scratch.__enter__())
        alone = threading.active_count() == 1 and hasattr(os, "fork") and sys.platform != "darwin"
        context: Any = multiprocessing.get_context("fork" if alone else "spawn")
        os.environ.update(rank_environment(0, count, self._folder))
        self._ranks: list[tuple[Any, Connection]] = []
        for index in range(1, count):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank_environment(index, count, self._folder), follow, theirs)
            self._ranks.append((context.Process(target=run_rank, args=arguments, name=f"rank {index}"), ours))
            self._ranks[-1][0].start()
            theirs.close()
        self._ending = self._settling = False
        self._failed = threading.Event()
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def settle(self) -> None:
        """Call this after an error: wait until it is known whether a lost rank caused it. Never return if one did.

        A rank that has ended with code 0 caused it, too, if rank 0 still needs it."""
        self._settling = True
        if self._failed.wait(2 * SETTLE_S):  # the watching thread looks once in SETTLE_S
            time.sleep(END_S + SETTLE_S)  # the watching thread ends this process

    def end(self, patience_s: float = END_S) -> str:
        """End the ranks, now that rank 0's work is done. Return a message about a rank that failed by itself, or "".

        patience_s: seconds before a rank is killed."""
        self._ending = True
        until = time.monotonic() + patience_s
        for process, _ in self._ranks:
            process.join(max(0.0, until - time.monotonic()))
        failed = self._first_failure()
        for process, _ in self._ranks:
            process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)
        return failed[0] if failed else ""

    def _watch(self) -> None:
        running = {process.sentinel for process, _ in self._ranks}
        pipes = {pipe: index for index, (_, pipe) in enumerate(self._ranks, 1)}
        while (running or not self.is_over()) and not self._ending:
            ready = wait([*running, *pipes], SETTLE_S)
            for pipe in pipes.keys() & set(ready):
                while pipe in pipes and pipe.poll():  # read all messages: the rank may have ended after the last one
                    if not self._hear(pipes[pipe], pipe):
                        del pipes[pipe]
            running -= set(ready)
            failed = self._first_failure() or (None if ready else self._first_stopped())
            if failed is not None and not self._ending:
                self._failed.set()
                return self._end_like(*failed)

    def _first_failure(self) -> tuple[str, int] | None:
        """Return a message about the rank whose end explains all others, and its exit code; None if all still run."""
        found: list[tuple[bool, bool, int, int]] = []
        for index, (process, pipe) in enumerate(self._ranks, 1):
            if wait([process.sentinel], 0):
                _learn_exit_code(process)
            if process.exitcode or (process.exitcode == 0 and self._is_missed(index)):
                while index not in self._said and self._hear(index, pipe):
                    pass
                _, follows = self._said.setdefault(index, ("", False))  # a killed rank sends no message
                found.append((follows, process.exitcode > 0, index, process.exitcode))
        if not found:
            return None
        _, _, index, code = min(found)
        words = f": {self._said[index][0]}" if self._said[index][0] else ""
        how = describe_exit(code) if code else "exit code 0, before the run was done"
        return f"rank {index} of {self._count} ended ({how}){words}; the replica ends with it", code

    def _first_stopped(self) -> tuple[str, int] | None:
        """Return a message about a rank that is stopped, and an exit code.

        We count looks and not seconds, because this process may have been stopped, too."""
        for index, (process, _) in enumerate(self._ranks, 1):
            self._stopped[index] = self._stopped[index] + 1 if _is_stopped(process.pid) else 0
            if self._stopped[index] > STOPPED_LOOKS:
                return f"rank {index} of {self._count} is stopped (SIGSTOP); the replica ends with it", exitcodes.HUNG
        return None

    def _is_missed(self, index: int) -> bool:
        """Whether a rank ended by itself, with exit code 0, some time ago, while rank 0 still continues."""
        ended_at = self._ended_at.setdefault(index, time.monotonic())
        is_late = self._settling or time.monotonic() - ended_at > EARLY_S
        return is_late and index not in self._said and not self.is_over()

    def _hear(self, index: int, pipe: Connection) -> bool:
        """Take one message of a rank. Return whether there may be more."""
        try:
            told: tuple[Any, ...] = pipe.recv()
        except (EOFError, OSError):
            return False
        if told[0] == LAST:
            self._said[index] = told[1:]  # type: ignore[assignment]
        else:
            with suppress(Exception):  # a faulty message must not hide the end of a rank
                self.on_told(index, *told)
        return True

    def _end_like(self, text: str, code: int) -> None:
        """End this process as the rank ended, so that its launcher judges it in the same way."""
        try:
            print(text, file=sys.stderr, flush=True)
            words = threading.Thread(target=self.on_loss, args=(text,), daemon=True)
            words.start()
            words.join(END_S)
        finally:
            for process, _ in self._ranks:
                process.kill()
            shutil.rmtree(self._folder, ignore_errors=True)
            if code < 0:
                os.kill(os.getpid(), signal.SIGKILL if -code in asking_signals() else -code)
                time.sleep(SETTLE_S)
            os._exit(code if code > 0 else exitcodes.CRASHED)


def _learn_exit_code(process: Any) -> None:
    """Wait until the exit code of an ended process is known. That takes a moment, above all if another thread asks.

    Each Process.start() asks for the codes of all children; if two threads ask, the second gets no code (ECHILD)."""
    until = time.monotonic() + SETTLE_S
    process.join(SETTLE_S)
    while process.exitcode is None and time.monotonic() < until:
        time.sleep(0.01)


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped this process; not a debugger, which Linux writes as "t"."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def rank_environment(index: int, count: int, folder: str) -> dict[str, str]:
    """Return the variables by which torch, accelerate and TRL know a rank.   folder: the replica's session's folder."""
    numbers = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return {MEET: os.path.join(folder, "meet"), **{name: str(number) for name, number in numbers.items()}}


def run_rank(environment: dict[str, str], follow: Callable[[], int], pipe: Connection) -> None:
    """Run this rank from its first line to its end. Send its last words to rank 0."""
    os.environ.update(environment)
    _leader.append(pipe)
    hear_asking(lambda: None)  # no SIG_IGN: programs that this rank starts would inherit it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code = exitcodes.CRASHED
    try:
        code = follow()
    except Followed:
        code = exitcodes.DONE  # rank 0's exit code counts
        tell_leader(LAST, "", True)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            code = exitcodes.DONE
        else:  # another sys.exit() is an error: scripts, environments and replicas have different exit codes
            _tell_error(error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed by the user's code, or on a full disk
                stream.flush()
        os._exit(code)


def _tell_error(error: BaseException) -> None:
    """Send this rank's error to rank 0 as its last words, and print it."""
    line = (str(error).splitlines() or [""])[0]
    tell_leader(LAST, f"{type(error).__name__}: {line}", isinstance(error, RankLost))
    with suppress(OSError, ValueError):
        traceback.print_exception(error)


def tell_leader(*message: Any) -> None:
    """Send a message to rank 0 (Followers.on_told).   Any thread of a rank may call this."""
    with _speaking, suppress(OSError):
        _leader[0].send(message)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        shutil.rmtree(os.path.dirname(os.environ[MEET]), ignore_errors=True)  # rank 0 had no time
        os._exit(exitcodes.CRASHED)


def forget_launcher() -> None:
    """Remove the variables by which torchrun, mpirun or srun tells this process that it is one of several ranks."""
    if found := [name for name in os.environ if name in LAUNCHER or name.startswith(LAUNCHERS)]:
        for name in (*found, "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)


def told_twice(count: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return why this process cannot start ranks: a launcher has already started it as a rank; "" if it can."""
    if (size := environ.get("WORLD_SIZE") or "1") == "1":
        return ""
    launcher = "torchrun" if environ.get("TORCHELASTIC_RUN_ID") else "a launcher that sets WORLD_SIZE"
    return (
        f"{launcher} has started this replica as one of {size} processes, and a replica starts its own ranks"
        f"{f' ({count} of them)' if count > 1 else ''}. Start it once, without that launcher, or unset WORLD_SIZE"
    )
