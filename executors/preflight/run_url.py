"""Checks a typed run URL: whether it is valid, and which processes can see the run.

    runs/mine · file:///an/absolute/path      a folder: processes of machines that share it
    s3:// gs:// az:// hf://buckets/…           a bucket: processes with its keys
    memory://                                  one process only, so not for a run of several replicas

Not promised: that the bucket answers; the first read shows that.  This module imports stores only when needed.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rendezvous import layout
from rendezvous.stores.open import folder_of, open_store

FSTAB, MOUNTS = Path("/etc/fstab"), Path("/proc/self/mounts")
_SCHEMES = "give a folder (runs/mine) or a bucket: s3://bucket/prefix, gs://…, az://…, hf://buckets/…"


class UsageError(ValueError):
    """The command or one of its options is not valid."""


def shareable_url(url: str) -> str:
    """Return the URL of a run that several processes can see.  Raises UsageError."""
    if url.startswith("memory://"):
        raise UsageError(f"{url} is the memory of one process; a run has several processes. Use --run runs/mine")
    return checked_url(url)


def checked_url(url: str) -> str:
    """Return the URL of a run that this version can open.  Raises UsageError."""
    url = str(Path(url).expanduser()) if url.startswith("~") else url  # shells do not expand --run=~/mine
    if url.startswith(("http://", "https://")):
        raise UsageError(f"{url} is a web page's address, and a run must be written to: {_SCHEMES}")
    try:
        store = open_store(url)
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from None
    return store.url if url.startswith("file://") and not url.startswith("file:///") else url  # file://localhost/x


def foreign_files(folder: Path, ours: Iterable[str]) -> str:
    """Return the names in a folder that are not in `ours`, as a text, or "".  Hidden files do not count."""
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    found = [name for name in names if name not in set(ours) and not name.startswith(".")]
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def unmounted_point(folder: Path, wanted: Path = FSTAB, mounted: Path = MOUNTS) -> str:
    """Return the mount point above the folder that the machine's table names and that is not mounted, or ""."""
    with suppress(OSError):
        away = _mount_points(wanted) - _mount_points(mounted)
        return str(max((point for point in away if point in folder.resolve().parents), default=""))
    return ""


def _mount_points(table: Path) -> set[Path]:
    lines = (line.split() for line in table.read_text(errors="surrogateescape").splitlines())
    return {Path(line[1].replace("\\040", " ")) for line in lines if len(line) > 1 and not line[0].startswith("#")}


def refuse_foreign_files(url: str) -> None:
    """Raise UsageError if the run's new folder holds other files, or would be below a mount that is away; raise
    RecordsLost if these are a run's files."""
    folder = folder_of(url)
    if folder is None or (folder / layout.RUN).exists():
        return
    if point := unmounted_point(folder):
        raise UsageError(
            f"{point} is not mounted now, though {FSTAB} names it, so a new run at {url} would be on another disk, and "
            f"a run of that name may be on the mount. Mount it (mount {point}), or use another --run"
        )
    if found := foreign_files(folder, (*layout.TOP, "report.html", "report.png")):
        from diloco.unreadable import foreign_words

        raise UsageError(foreign_words(url, found))


def make_folder(url: str) -> None:
    if (folder := folder_of(url)) is None:
        return
    refuse_foreign_files(url)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        from rendezvous.stores.urls import link_words

        why = link_words(folder) if isinstance(error, FileExistsError) else f"{error.strerror}. Use another --run"
        raise UsageError(f"cannot make the folder {url}: {why}") from None
