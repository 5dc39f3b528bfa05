"""Boxes on this machine: a folder per box, and bubblewrap around every command.

    ROOT/NAME/box.json    labels, deadline; written first and deleted last, so `find` also sees half-deleted boxes
                          start also removes late boxes, and folders that have had no box.json for an hour
    ROOT/NAME/root        app/ tests/ logs/ tmp/ …  are bound to /app /tests /logs /tmp, writable
    /usr /bin /lib /etc   this machine's, read-only      no network; own namespaces, shared by commands without root

`wrap` returns the words in front of a command; tests pass a function that needs no bubblewrap.

A background process lives until the box stops, or until a command of "root" begins, such as the verifier (kept.py).

Not promised: an image (the box has this machine's programs); several users (every command is uid 1000); limits for
memory, processes and disk beyond each command's time limit. Nothing runs without a sandbox: if bubblewrap is missing,
the provider raises SandboxMissing.
"""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from inner.errors import InnerError, SandboxMissing
from inner.extras.boxes.box import (
    ANSWER_S,
    KILL_AFTER_S,
    BoxGone,
    BoxOwner,
    BoxRecipe,
    ProviderFailed,
    Ran,
    read_output,
    wrapped_command,
)
from inner.extras.boxes.kept import BEGUN, KeptNamespaces, bare_environ, end_processes, kept_namespaces
from inner.tasks.harbor import MACHINES, build_fault, local_fault

HALF_MADE_S = 3600.0  # after this time, a folder without box.json is a leftover of a killed start
PROCESSES = "processes"  # in a box's folder: the number of the process that keeps the box's namespaces
FOLDERS = ("app", "tests", "logs", "tmp", "solution")
Wrap = Callable[[Path, str], list[str]]
LACKS = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.EIO, errno.EROFS}


@contextmanager
def faults_of_machine(kind: type[BoxGone] | type[ProviderFailed]) -> Iterator[None]:
    """Inside a `with`, raise `kind` for an OSError whose cause is this machine, not the task or the episode."""
    try:
        yield
    except OSError as error:
        if error.errno not in LACKS:
            raise
        raise kind(f"this machine cannot keep a local box: {error}. Free some space there, or end processes") from error


def bubblewrap(root: Path, user: str) -> list[str]:
    """Return the words of bwrap for a box.   root: the box's folder on this machine."""
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    words += ["--uid", "1000", "--gid", "1000", "--hostname", "box", "--dev", "/dev", "--proc", "/proc"]
    words += ["--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin", "--setenv", "HOME", "/tmp"]
    for path in MACHINES:
        words += ["--ro-bind-try", path, path]
    for path in sorted(root.iterdir()):
        words += ["--bind", str(path), f"/{path.name}"]
    words += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]  # also inside a task's own /etc
    return [*words, "--chdir", "/", "--"]


class LocalBoxes:
    """The provider.   root: the folder of all boxes here.   clock: seconds since 1970, for deadlines."""

    price_per_hour = 0.0

    def __init__(
        self, root: Path | None = None, *, wrap: Wrap = bubblewrap, clock: Callable[[], float] = time.time
    ) -> None:
        if wrap is bubblewrap and shutil.which("bwrap") is None:
            raise SandboxMissing("local boxes need `bwrap`, which is not on the PATH. `apt-get install bubblewrap`.")
        self._root = root or Path(tempfile.gettempdir()) / f"diloco-boxes-{os.getuid()}"
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._wrap, self._clock = wrap, clock

    def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> "LocalBox":
        """Make the box's folder.   timeout_s: not used, because no step waits."""
        self._remove_late()
        paths = (recipe.folder, *recipe.folders, *recipe.files)
        if fault := build_fault("local") if recipe.build else local_fault(recipe.image, paths):
            raise InnerError(fault)
        with faults_of_machine(ProviderFailed):
            home = Path(tempfile.mkdtemp(prefix="box-", dir=self._root))
            try:
                self._make_folders(home, owner, recipe)
            except OSError:
                _remove(home)
                raise
        return LocalBox(home, recipe.folder, self._wrap)

    def _make_folders(self, home: Path, owner: BoxOwner, recipe: BoxRecipe) -> None:
        told = {"labels": owner.labels, "until": self._clock() + recipe.ttl_s, "folder": recipe.folder}
        (home / "box.json").write_text(json.dumps(told))
        for name in {*FOLDERS, *(PurePosixPath(path).parts[1] for path in (recipe.folder, *recipe.folders))}:
            (home / "root" / name).mkdir(parents=True)
        (home / "root" / recipe.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def find(self, labels: Mapping[str, str]) -> Sequence["LocalBox"]:
        """Return the boxes of this machine that have these labels."""
        found = [(home, told) for home, told in self._told() if labels.items() <= told["labels"].items()]
        return [LocalBox(home, told["folder"], self._wrap) for home, told in found]

    def _told(self) -> list[tuple[Path, dict[str, Any]]]:
        found = list[tuple[Path, dict[str, Any]]]()
        for path in sorted(self._root.glob("*/box.json")):
            try:
                found.append((path.parent, json.loads(path.read_text())))
            except (OSError, ValueError):  # another process removes the file, or still writes it
                continue
        return found

    def _remove_late(self) -> None:
        for home, told in self._told():
            if told["until"] < self._clock():
                _remove(home)
        for home in self._root.glob("box-*"):
            if not (home / "box.json").exists() and _changed_at(home) < self._clock() - HALF_MADE_S:
                _remove(home)  # the box's start or removal was killed


class LocalBox:
    """One folder.   home: its folder on this machine.   folder: where its commands begin, inside."""

    def __init__(self, home: Path, folder: str, wrap: Wrap) -> None:
        self._home, self._folder, self._wrap = home, folder, wrap
        self._kept: KeptNamespaces | None = None
        self._can_keep, self._lock = True, threading.Lock()

    def exec(self, command: str, *, user: str, timeout_s: float) -> Ran:
        """Run a command. After its time limit, it ends."""
        ran, has_begun = self._exec_once(command, user=user, timeout_s=timeout_s)
        if not has_begun:  # the command before has just ended every process of the box
            self._end_processes()
            ran, _ = self._exec_once(command, user=user, timeout_s=timeout_s)
        return ran

    def _exec_once(self, command: str, *, user: str, timeout_s: float) -> tuple[Ran, bool]:
        """Run a command; return also whether it has begun: in namespaces that have just ended, it cannot begin."""
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)  # a process that forked meanwhile has `theirs`, too
        with open(ours, "rb", buffering=0) as told:
            try:
                with faults_of_machine(BoxGone):
                    words, enters = self._words(user)
                    child = subprocess.Popen(
                        [*words, *wrapped_command(command, timeout_s, self._folder)],
                        stdin=theirs if enters else subprocess.DEVNULL,
                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, env=bare_environ(),
                    )  # fmt: skip
            finally:
                os.close(theirs)
            ran = self._wait(child, timeout_s)
            return ran, not enters or told.read(1) == BEGUN

    def _wait(self, child: "subprocess.Popen[bytes]", timeout_s: float) -> Ran:
        try:
            raw, _ = child.communicate(timeout=timeout_s + KILL_AFTER_S + ANSWER_S)
            code = child.returncode  # below 0 if the command killed all processes of the box
            return Ran(code if code >= 0 else 128 - code, read_output(raw))
        except subprocess.TimeoutExpired:  # the command stopped `timeout`, and may have left its process group
            self._end_processes()
            return Ran(137, "")
        finally:
            if child.returncode is None:
                _kill_group(child)

    def _words(self, user: str) -> tuple[list[str], bool]:
        """Return the words in front of a command, and whether it enters the box's own namespaces, or gets new ones."""
        try:
            words = self._wrap(self._root(), user)
        except BoxGone:
            self._end_processes()
            raise
        with self._lock:
            # "root" is the verifier. Both have the episode's uid here, so end the episode's processes before it runs
            is_root = user == "root"
            if self._kept is not None and (is_root or not self._kept.is_alive):
                self._kept.close()
                self._kept = None
            if is_root or not self._can_keep:
                return words, False
            self._kept = self._kept or kept_namespaces(words, self._home / PROCESSES)
            self._can_keep = self._kept is not None
            with suppress(OSError):  # the episode has just ended all its processes
                return (words, False) if self._kept is None else (self._kept.words(), True)
            return words, False

    def _end_processes(self) -> None:
        with self._lock:
            if self._kept is not None:
                self._kept.close()
            self._kept = None

    def read(self, path: str) -> bytes:
        found = self._inside(path)
        if not found.is_file():  # reading a FIFO would never end
            raise FileNotFoundError(f"{path!r} is not a file in the box.")
        return found.read_bytes()

    def write(self, path: str, data: bytes) -> None:
        target = self._inside(path)
        first = target.relative_to(self._root().resolve()).parts[:1]
        if not self._root().joinpath(*first).exists():
            self._end_processes()  # the next namespaces have the new folder
        if os.path.lexists(target) and not target.is_file():  # a FIFO would wait for a reader
            raise FileExistsError(f"{path!r} is not a regular file in the box. Remove it.")
        with faults_of_machine(BoxGone):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    def stop(self) -> None:
        _remove(self._home)
        self._end_processes()

    def _root(self) -> Path:
        root = self._home / "root"
        if not (self._home / "box.json").is_file() or not root.is_dir():
            raise BoxGone(f"the local box {self._home.name} is not there any more.")
        return root

    def _inside(self, path: str) -> Path:
        """Return a box path's place on this machine. A link that the episode made may not lead out of the box."""
        root = self._root().resolve()
        # Path.resolve raises for links in a circle before Python 3.13
        found = Path(os.path.realpath(root / str(PurePosixPath(self._folder, path)).lstrip("/")))
        if not found.is_relative_to(root):
            raise FileNotFoundError(f"{path!r} is not in the box. Give a path like {self._folder}/file.")
        return found


def _remove(home: Path) -> None:
    """End a box's processes, and delete its folder, box.json last.

    If a file cannot be deleted, box.json stays, so `find` lists the box."""
    end_processes(home / PROCESSES)
    (home / PROCESSES).unlink(missing_ok=True)
    for path in [path for path in _entries(home) if path.name != "box.json"]:
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            _open_folders(path)
            shutil.rmtree(path, ignore_errors=True)
    if len(_entries(home)) <= 1:
        shutil.rmtree(home, ignore_errors=True)


def _open_folders(top: Path) -> None:
    """Restore permissions that an episode took from the folders below `top`. Do not follow links."""
    for at, names, _ in os.walk(top):
        for folder in (Path(at, name) for name in names):
            with suppress(OSError):
                if not folder.is_symlink():
                    folder.chmod(0o700)


def _entries(home: Path) -> list[Path]:
    with suppress(FileNotFoundError):  # another process removes the folder
        return list(home.iterdir())
    return []


def _changed_at(home: Path) -> float:
    """Return when a folder last changed; infinity if it is not there any more."""
    with suppress(FileNotFoundError):
        return home.stat().st_mtime
    return math.inf


def _kill_group(child: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdout is not None:
        child.stdout.close()
