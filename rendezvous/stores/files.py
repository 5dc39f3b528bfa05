"""A store in a folder.

    put      write .tmp/x, then rename it to the key       readers see the old object or the new one
    create   write .tmp/x, then link it to the key         of concurrent links the kernel lets one succeed

A link of a finished temporary file is exclusive and complete.  O_EXCL on the final name would be exclusive, but a
reader could see half the file, and a crash would leave a truncated register for ever.  On file systems without hard
links (exFAT, some FUSE file systems) the file is renamed with RENAME_NOREPLACE, which is also exclusive.

A key cannot lead out of the folder: its parts are opened one below the other, and no part may be a link.  (The run's
folder itself may be a link.)  Only regular files are read, and opening a key never blocks: a FIFO, a socket or a folder
under a key is refused.

A store remembers the device and inode of the folder that it opened first, and keeps it open so that the inode is not
reused:

    the path does not exist       StoreGone: unmounted, renamed, deleted (a new store with make=True creates it)
    it is another folder          StoreGone: another disk, another folder
    it is the same folder again   the store continues

Not promised: survival of a power failure, because there is no fsync.  Nor a folder that machines share through a file
system without an atomic `link`; but if NFS loses an answer, the read in `put_once` finds the outcome.  A later
process does not know the folder's inode: rendezvous/agreement/closing.py compares the records with the chain instead.
"""

import ctypes
import errno
import os
import stat
import tempfile
import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rendezvous import layout
from rendezvous.errors import KeyExists, StoreError, StoreFull, StoreGone, StoreReadOnly, StoreRefused, StoreUnclear
from rendezvous.machine import name_in_files
from rendezvous.store import Body, Buffer, body_bytes, in_pieces, plain_key, plain_prefix

if TYPE_CHECKING:
    from rendezvous.stores.spares import Spares

LEAST = 1 << 20  # with so many bytes or more, a spare file (spares.py) is faster than a new file

_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_LINK = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENAMETOOLONG}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
_HERE, _NO_REPLACE = -100, 1  # constants of Linux: AT_FDCWD, RENAME_NOREPLACE
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_CHUNK = 8 << 20
_CACHED = 1 << 18
_PAGE = 4096
os.umask(_UMASK := os.umask(0))  # the umask can only be read by writing it
_MODE = 0o666 & ~_UMASK  # the usual mode of a new file: another user of a shared folder may read it


class FileStore:
    near = True  # this machine serves the store
    proven = True  # create-if-absent works here, without a test before a run is founded
    cheap = True  # a request costs no more than a copy

    def __init__(self, root: str | os.PathLike[str], *, make: bool = True) -> None:
        """Open a store in the folder `root`.   make: whether the first write creates the folder if it is missing."""
        if not str(root):
            raise ValueError("an empty path is not a folder for a run; give a folder, e.g. runs/demo")
        self.root = Path(root).absolute()
        self.url, self._folder = f"file://{self.root}", str(self.root)
        self._make = make
        self._first: tuple[int, int] | None = None  # device and inode of the folder that was opened first
        self._tmp = self.root / ".tmp"

    @cached_property
    def _spares(self) -> "Spares":
        from rendezvous.stores.spares import Spares

        return Spares(self._tmp)

    def put(self, key: str, body: Body) -> None:
        with self._temporary_file(key, body) as tmp, self._open_folder(key, make=True) as (folder, name):
            if body_bytes(body) >= LEAST:
                self._replace_and_keep(tmp, folder, name)
            else:
                os.replace(tmp, name, dst_dir_fd=folder)

    def create(self, key: str, body: Buffer) -> None:
        with self._temporary_file(key, body) as tmp, self._open_folder(key, make=True) as (folder, name):
            _link_new(tmp, name, folder, self.root)

    def get(self, key: str) -> bytes | None:
        with self._as_store_errors("read", key):
            try:
                with self._open_folder(key) as (folder, name), open(_open_regular(name, folder), "rb") as f:
                    return f.read(1 + min(layout.most_bytes(key), os.fstat(f.fileno()).st_size))
            except FileNotFoundError:
                return None

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        with self._as_store_errors("read", key):
            try:
                with self._open_folder(key) as (folder, name):
                    fd = _open_regular(name, folder)
            except FileNotFoundError:
                return False
            try:
                return _read_exactly(fd, out.cast("B"), start)
            finally:
                os.close(fd)

    def list(self, prefix: str) -> list[str]:
        folder = plain_prefix(prefix).rpartition("/")[0]
        found: list[str] = []
        with self._as_store_errors("list", prefix):
            with suppress(FileNotFoundError), self._open_folder(f"{folder}/x".lstrip("/")):
                pass  # raises an error if a part of the path is a link
            errors = list[OSError]()
            for path, folders, files in os.walk(os.path.join(self._folder, folder), onerror=errors.append):
                folders[:] = [name for name in folders if name != ".tmp"]
                below = path[len(self._folder) :].strip("/")
                found += [f"{below}/{name}" for name in files] if below else files
            if closed := [error for error in errors if not isinstance(error, FileNotFoundError | NotADirectoryError)]:
                raise closed[0]
        return sorted(k for k in found if k.startswith(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with (
                self._as_store_errors("delete", key),
                suppress(FileNotFoundError),
                self._open_folder(key) as (folder, name),
            ):
                os.unlink(name, dir_fd=folder)

    def close(self) -> None:
        """Free the space of deleted objects.  The store can still be used."""
        self._spares.drop_all()

    @contextmanager
    def _open_folder(self, key: str, *, make: bool = False) -> Generator[tuple[int, str]]:
        """Open the folder of a key.   Give its descriptor and the key's name in it.   make: create missing folders."""
        *folders, name = plain_key(key).split("/")
        at = self._open_root()
        try:
            for part in folders:
                above = at
                at = _open_subfolder(at, part, make)
                os.close(above)
            yield at, name
        finally:
            os.close(at)

    def _open_root(self) -> int:
        """Open the run's folder, and return its descriptor.   Raise StoreGone if another folder was opened first."""
        try:
            at = os.open(self._folder, _FOLDER)
        except FileNotFoundError:
            if self._first is None:
                raise
            raise StoreGone(_gone(self.root, "is not there any more: unmounted, renamed or deleted")) from None
        found = os.fstat(at)
        if self._first is None:
            self._first = found.st_dev, found.st_ino
            weakref.finalize(self, os.close, os.dup(at))
        elif (found.st_dev, found.st_ino) != self._first:
            os.close(at)
            raise StoreGone(_gone(self.root, "leads to another folder than before: another disk, or made anew"))
        return at

    def _replace_and_keep(self, tmp: str, folder: int, name: str) -> None:
        """Give the file its key, and keep a second name, so that its pages can be reused when the key is deleted."""
        link = f"{tmp}.link"
        try:
            os.link(tmp, link)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return os.replace(tmp, name, dst_dir_fd=folder)
        try:
            os.replace(link, name, dst_dir_fd=folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(link)
        self._spares.keep_name(tmp)

    @contextmanager
    def _temporary_file(self, key: str, body: Body) -> Generator[str]:
        """Give the path of a finished temporary file with `body`.  Afterwards no file has this path."""
        size = body_bytes(body)
        with self._as_store_errors("write", key):
            self._make_tmp()
            fd, tmp = tempfile.mkstemp(dir=self._tmp, prefix=f"put-{name_in_files(os.getpid())}-")
            try:
                with suppress(OSError):  # a mount without modes
                    os.fchmod(fd, _MODE)
                if size >= LEAST and self._spares.reuse_file(size, tmp):
                    os.close(fd)
                    fd = os.open(tmp, os.O_WRONLY)
                _write_body(fd, body)
                yield tmp
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(tmp)

    def _make_tmp(self) -> None:
        """Make the folder of temporary files, which must not be a link; with `make`, also a missing run's folder."""
        if self._make and self._first is None:
            with suppress(FileExistsError):
                self.root.mkdir(parents=True, exist_ok=True)
        try:
            at = self._open_root()
        except FileNotFoundError:
            raise StoreGone(_gone(self.root, "does not exist")) from None
        try:
            os.close(_open_subfolder(at, self._tmp.name, make=True))
        finally:
            os.close(at)

    @contextmanager
    def _as_store_errors(self, verb: str, key: str) -> Generator[None]:
        try:
            yield
        except StoreError:
            raise
        except FileExistsError as error:
            raise KeyExists(f"{self.url}/{key} exists") from error
        except OSError as error:
            from rendezvous.stores.urls import link_words, room_words

            where = f"cannot {verb} {self.url}/{key}: {error.strerror}"
            if error.errno in _LINK:
                raise StoreRefused(f"cannot {verb} {self.url}/{key}: {link_words(self.root)}") from error
            if error.errno in _READ_ONLY:
                how = "readable for this user" if verb in ("read", "list") else "writable"
                raise StoreReadOnly(f"{where}. Make the folder {how}, or use another one") from error
            if error.errno in _FULL:
                self._spares.drop_all()
                raise StoreFull(f"{where}. {room_words(self.root)}") from error
            raise StoreUnclear(where) from error


def _open_subfolder(folder: int, part: str, make: bool) -> int:
    if make:
        with suppress(FileExistsError):
            os.mkdir(part, dir_fd=folder)
    return os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def _open_regular(name: str, folder: int) -> int:
    """Open a file for reading.   Raise StoreRefused for a folder, a FIFO or a device; a FIFO could block the reader."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StoreRefused(f"{name} in the run's folder is no regular file. Remove it, or restore the run's own file")
    return fd


def _gone(root: Path, how: str) -> str:
    return (
        f"the folder {root} {how}. Nothing was written. Mount it, or give it its name back. The run continues, or, "
        "as a new mount counts as another folder, ends; then use `diloco resume`. A deleted folder ends the run"
    )


def _link_new(tmp: str, name: str, folder: int, root: Path) -> None:
    """Give a finished file its key.

    Raise FileExistsError if the key exists, and StoreRefused if the file system has neither links nor RENAME_NOREPLACE.
    """
    try:
        return os.link(tmp, name, dst_dir_fd=folder)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        no_links = error
    code = _rename_new(tmp, name, folder)
    if code in _NO_LINKS | {errno.EINVAL}:
        raise StoreRefused(
            f"cannot create {name} below {root}: its file system has no hard links ({no_links.strerror}) and cannot "
            "rename without replacing, so two replicas could commit the same step. Use a folder of another file "
            "system, or a bucket"
        )
    if code:
        raise OSError(code, os.strerror(code))


def _rename_new(tmp: str, name: str, folder: int) -> int:
    """Call renameat2 with RENAME_NOREPLACE, which Python does not offer.   Return 0 or an errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return errno.ENOSYS
    return 0 if libc.renameat2(_HERE, tmp.encode(), folder, name.encode(), _NO_REPLACE) == 0 else ctypes.get_errno()


def _write_body(fd: int, body: Body) -> None:
    try:
        for piece in in_pieces(body):
            done = 0
            while done < len(piece):
                done += os.write(fd, piece[done : done + _CHUNK])
    finally:
        os.close(fd)


def _read_exactly(fd: int, out: memoryview, start: int) -> bool:
    through = bytearray(_CACHED) if out and _overlaps_page(out, start) else None
    done = 0
    while done < len(out):
        piece = out[done : done + _CHUNK] if through is None else memoryview(through)[: len(out) - done]
        n = os.preadv(fd, [piece], start + done)
        if n == 0:
            return False
        if through is not None:
            out[done : done + n] = piece[:n]
        done += n
    return True


def _overlaps_page(out: memoryview, start: int) -> bool:
    """Whether the place of `out` on its memory page is a few bytes after the place of `start` on its page.

    CPUs then take each load for a read of bytes that were just written, and a direct read is 4 times slower than a read
    through another buffer.
    """
    return 0 < (ctypes.addressof(ctypes.c_char.from_buffer(out)) - start) % _PAGE < 32
