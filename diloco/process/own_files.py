"""Open files in shared folders without following a link that another process put there.

    open_own(path, flags)    a regular file with one name: no link, hard link, FIFO, device or directory
    state_folder("x", "y")   XDG_STATE_HOME/diloco/x/y (~/.local/state/…); only this user owns and may write each folder

Not promised: protection from root or the folder's owner, if one of them changes it during the check.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

APPENDED = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class ForeignFile(OSError):
    """The error for another program's object under one of this project's paths."""


def open_own(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file; other users cannot read a new file. Return a descriptor.   Raises OSError, never blocks.

    A file to be written must have only this name.  A file to be read may for a moment have two names (`os.link`).
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    about = os.fstat(fd)
    if stat.S_ISREG(about.st_mode) and (flags & os.O_ACCMODE == os.O_RDONLY or about.st_nlink <= 1):
        return fd
    os.close(fd)
    raise ForeignFile(
        f"{path} is not a regular file with one name: another program put it there. Remove it, then run the same "
        "command again"
    )


@contextmanager
def appended(path: str | Path) -> Iterator[IO[bytes]]:
    with open(open_own(path, APPENDED), "ab") as file:
        yield file


def read_json(path: str | Path) -> Any:
    """Read a JSON file with `open_own`; None if it is missing or cannot be read."""
    with suppress(OSError, ValueError, RecursionError), open(open_own(path), "rb") as file:
        return json.loads(file.read())
    return None


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file completely or not at all."""
    part_of(path, value).replace(path)


def part_of(path: str | Path, value: Any) -> Path:
    """Write the value as JSON into a new file beside `path`, which the caller renames to `path`."""
    part = Path(f"{path}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    with open(open_own(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
        file.write(json.dumps(value))
    return part


def make_plain(folder: Path) -> Path:
    """Make a folder if it is missing.   Raises ForeignFile if a link is in its place."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink():
        raise ForeignFile(
            f"{folder} is a link: another program may have put it there. Remove it, then run the same command again"
        )
    return folder


def make_private(*folders: Path) -> Path:
    """Make nested folders and return the last.   Raises ForeignFile if other users own one or may write there."""
    for folder in folders:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        if {about.st_uid, folder.lstat().st_uid} != {os.geteuid()} or about.st_mode & 0o022:
            raise ForeignFile(
                f"{folder} belongs to another user, or others may write there: `chmod 700`, or move it away"
            )
    return folders[-1]


def state_folder(*names: str) -> Path:
    """Return the state folder's path, without making it."""
    home = os.environ.get("XDG_STATE_HOME", "")
    base = Path(home) if home.startswith("/") else Path.home() / ".local" / "state"
    return base.joinpath("diloco", *names)


def make_state_folder(*names: str) -> Path:
    return make_private(*(state_folder(*names[:n]) for n in range(len(names) + 1)))
