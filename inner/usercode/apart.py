"""Run the user's code apart from training: its changes to the process's state do not reach the trainer.

    trainer's state ──kept──▶ code's state ──▶ a call ──▶ code's state, kept ──▶ trainer's state, bit for bit

    random numbers of torch, CUDA, numpy, random     the rewards have their own, which continue from call to call
    grad mode, signals, sys.stdout, … (_SETTINGS)    after each call as before it; `take_notes` reports a change once
    sys.argv                                         [the file], so that its argparse sees none of our arguments
    os._exit(2)                                      raises SystemExit: a replica that ends with 2 would end the run

Async rewards overlap: the first one to begin puts the trainer's state away, and the last one to end brings it back.
An environment and the model take turns in one generation: `reset`, sampling, tools, sampling, tools, `get_reward`.

Not promised: to restore os.environ, the umask, sockets' time limits, or file descriptors that the code closes; to keep
threads apart that outlive the call or the turn.
"""

import inspect
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from threading import RLock
from typing import Any, NoReturn

from inner.errors import InnerError

_SETTINGS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "torch.set_grad_enabled": (lambda t: t.is_grad_enabled(), lambda t, was: t.set_grad_enabled(was)),
    "torch.set_default_dtype": (lambda t: t.get_default_dtype(), lambda t, was: t.set_default_dtype(was)),
    "torch.set_default_device": (
        lambda t: None if t.get_default_device().type == "cpu" else t.get_default_device(),
        lambda t, was: t.set_default_device(was),
    ),
    "torch.set_num_threads": (lambda t: t.get_num_threads(), lambda t, was: t.set_num_threads(was)),
    "torch.use_deterministic_algorithms": (
        lambda t: (t.are_deterministic_algorithms_enabled(), t.is_deterministic_algorithms_warn_only_enabled()),
        lambda t, was: t.use_deterministic_algorithms(was[0], warn_only=was[1]),
    ),
    "torch.set_float32_matmul_precision": (
        lambda t: t.get_float32_matmul_precision(), lambda t, was: t.set_float32_matmul_precision(was)
    ),
    "torch.autocast": (lambda t: _read_autocast(t), lambda t, was: _write_autocast(t, was)),
    "torch.autograd.set_detect_anomaly": (
        lambda t: t.is_anomaly_enabled(), lambda t, was: t.autograd.set_detect_anomaly(was)
    ),
    "numpy.seterr": (lambda t: sys.modules["numpy"].geterr(), lambda t, was: sys.modules["numpy"].seterr(**was)),
    "warnings.simplefilter": (lambda t: _error_filters(), lambda t, was: _write_error_filters(was)),
    "signal.signal": (lambda t: {n: signal.getsignal(n) for n in _SIGNALS}, lambda t, was: _write_signals(was)),
    "sys.setrecursionlimit": (lambda t: sys.getrecursionlimit(), lambda t, was: sys.setrecursionlimit(was)),
    "sys.stdout or sys.stderr": (
        lambda t: (sys.stdout, sys.stderr),
        lambda t, was: (setattr(sys, "stdout", was[0]), setattr(sys, "stderr", was[1])),
    ),
}  # fmt: skip
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGURG)  # of this project, not SIGALRM


class _Process:
    """The state of this process.   inside: number of open blocks.   own: rewards' random state; None before a call."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.inside = 0
        self.own: dict[str, Any] | None = None
        self.notes: list[str] = []
        self.told = set[str]()

    def enter(self, file: Path, *, draws: bool) -> None:
        with self.lock:
            self.inside += 1
            if self.inside > 1:
                return
            self.argv, self.folder, self.draws = sys.argv, _working_folder(), draws
            self.settings = _read_settings()
            self.random = _read_random()
            sys.argv = [str(file)]
            self.exit, os._exit = os._exit, partial(_exit, os._exit, os.getpid(), threading.get_ident())
            if draws and self.own is not None:
                _write_random(self.own)
            self.seed = _seed()

    def leave(self, what: str) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside:
                return
            sys.argv, os._exit = self.argv, self.exit
            seeded = ["torch.manual_seed"] if self.seed not in (None, _seed()) else []
            self.own = _read_random() if self.draws else self.own
            _write_random(self.random)
            self._tell(what, [*seeded, *self._restore_settings()])

    def _restore_settings(self) -> list[str]:
        """Restore settings and the working folder. Return the names of the functions that have changed them."""
        before = {**_fresh_settings(), **self.settings}
        changed = [name for name, was in before.items() if _SETTINGS[name][0](_torch()) != was]
        for name in changed:
            _SETTINGS[name][1](_torch(), before[name])
        if self.folder and _working_folder() != self.folder:
            changed.append("os.chdir")
            with suppress(OSError):
                os.chdir(self.folder)
        return changed

    def _tell(self, what: str, changed: list[str]) -> None:
        """Note the changes by this part of the user's code that were not noted before."""
        new = [name for name in changed if f"{what} {name}" not in self.told]
        self.told |= {f"{what} {name}" for name in new}
        if new:
            self.notes.append(
                f"{what} calls {', '.join(new)}, which would change the training around it. So the old state is "
                "restored after it. Leave the call out of the file, or undo it there"
            )


_PROCESS = _Process()


@contextmanager
def apart(file: Path, what: str, *, draws: bool = False) -> Iterator[None]:
    """Run the block apart from training.   what: the code's name in notes.   draws: it has the rewards' own random
    state; else the code begins with the trainer's state, like a newly loaded file."""
    _PROCESS.enter(file, draws=draws)
    try:
        yield
    finally:
        _PROCESS.leave(what)


class Turns:
    """Switches between a user's environment and the model, in one thread.   what: the code's name in notes."""

    def __init__(self, file: Path, what: str) -> None:
        self._file, self._what = file, what
        self._theirs = False

    @contextmanager
    def turn(self, theirs: bool) -> Iterator[None]:
        """Run the block apart from training (theirs), or in the trainer's state; then go back to the turn before."""
        before = self._theirs
        self._switch(theirs)
        try:
            yield
        except TypeError as error:
            _explain_observation(error)
            raise
        finally:
            self._switch(before)

    def _switch(self, theirs: bool) -> None:
        if theirs and not self._theirs:
            _PROCESS.enter(self._file, draws=True)
        elif self._theirs and not theirs:
            _PROCESS.leave(self._what)
        self._theirs = theirs


def _explain_observation(error: TypeError) -> None:
    """Raise InnerError if TRL could not append to the prompt what `reset` returned."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    found = at.tb_frame.f_locals if at is not None else {}
    if "observation" in found and "environment" in found:  # TRL's own frame, just after its call of `reset`
        raise InnerError(
            f"`reset` of {type(found['environment']).__name__} returned a {type(found['observation']).__name__}. "
            "Return None, or a text that is appended to the prompt."
        ) from error


def begin_session() -> None:
    """Forget the rewards' random state: their next call begins with the trainer's, as in a new process."""
    _PROCESS.own = None


@contextmanager
def own_numbers_kept() -> Iterator[None]:
    """Let the user's code begin with the state around it, as in a new session. Afterwards restore its random numbers.

    An evaluation uses this, so a run with evaluations gets the same rewards as a run without them."""
    before, _PROCESS.own = _PROCESS.own, None
    try:
        yield
    finally:
        _PROCESS.own = before


def take_notes() -> list[str]:
    """Return sentences about the changes that the user's code made since the last call of this function."""
    notes, _PROCESS.notes = _PROCESS.notes, []
    return notes


def keep_apart(function: Any, file: Path) -> Any:
    """Wrap a function of the user so that each call runs apart. A reward that is a model is returned as it is."""
    if _torch() is not None and isinstance(function, _torch().nn.Module):
        return function
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    name = getattr(inner, "__name__", type(inner).__name__)

    block = partial(apart, file, f"{file.name}:{name}", draws=True)

    async def awaited(answer: Any) -> Any:
        with block():
            return await answer

    @wraps(function, updated=())
    def sync(*args: Any, **columns: Any) -> Any:
        with block():
            answer = function(*args, **columns)
        return awaited(answer) if inspect.isawaitable(answer) else answer  # an async function below a plain decorator

    @wraps(function, updated=())
    async def later(*args: Any, **columns: Any) -> Any:
        with block():
            return await function(*args, **columns)

    kept: Any = later if any(map(inspect.iscoroutinefunction, (inner, inner.__call__))) else sync
    kept.__name__ = name
    kept.take_notes = take_notes
    return kept


def _torch() -> Any:
    """Return torch if this process has imported it, else None."""
    return sys.modules.get("torch")


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # the folder was deleted
        return ""


def _read_settings() -> dict[str, Any]:
    torch = _torch()
    return {
        name: read(torch)
        for name, (read, _) in _SETTINGS.items()
        if torch is not None or not name.startswith(("torch", "numpy"))
    }


def _exit(leave: Callable[[int], NoReturn], process: int, thread: int, code: int) -> None:
    """Take the place of os._exit.   leave: the real os._exit, for forked children and this project's own threads."""
    if (os.getpid(), threading.get_ident()) != (process, thread):
        leave(code)
    raise SystemExit(code)


def _error_filters() -> list[Any]:
    """Return the filters that make errors of warnings. Libraries add only others when they are imported."""
    return [kept for kept in warnings.filters if kept[0] == "error"]


def _write_error_filters(was: list[Any]) -> None:
    warnings.filters[:] = [kept for kept in warnings.filters if kept[0] != "error" or kept in was]  # type: ignore[index]


def _write_signals(was: dict[int, Any]) -> None:
    if threading.current_thread() is threading.main_thread():  # no other thread can have changed them
        for number, handler in was.items():
            signal.signal(number, handler)


def _read_autocast(torch: Any) -> tuple[Any, ...]:
    """Return (number of open blocks, (enabled, dtype) of the CPU, and of CUDA)."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nesting, *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))


def _write_autocast(torch: Any, was: tuple[Any, ...]) -> None:
    while _read_autocast(torch)[0] > was[0]:
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    for device, (enabled, dtype) in zip(("cpu", "cuda"), was[1:], strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _fresh_settings() -> dict[str, Any]:
    """Return the settings of a torch that the code itself has imported; {} if it has imported none."""
    if (torch := _torch()) is None:
        return {}
    fresh = {"grad_enabled": True, "default_dtype": torch.float32, "default_device": None}
    return {f"torch.set_{name}": value for name, value in fresh.items()}


def _seed() -> int | None:
    return None if _torch() is None else _torch().initial_seed()


def _read_random() -> dict[str, Any]:
    """Return the states of the random generators of the modules that this process has imported."""
    found: dict[str, Any] = {"random": random.getstate()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        found["numpy"] = numpy.get_state()
    if (torch := _torch()) is not None:
        found["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def _write_random(state: dict[str, Any]) -> None:
    random.setstate(state["random"])
    if "numpy" in state:
        sys.modules["numpy.random"].set_state(state["numpy"])
    if "torch" in state:
        _torch().set_rng_state(state["torch"])
    if "cuda" in state:
        _torch().cuda.set_rng_state_all(state["cuda"])
