"""Checks of a run's URL: of a bucket's URL (its store calls this check first), and of a URL that looks like a path.

Not promised: that the bucket exists.
"""

import os
import re
from pathlib import Path

NO_INODES = "Delete some files there: the disk has no inode left, though it may have space (df -i)"
HERE = ("localhost", "127.0.0.1")
MISTYPED = re.compile(r"(s3|gs|az|hf|modal|memory|file|https?|fsspec\+\w+)(:/?(?!/)|[;.,]?//)", re.IGNORECASE)


def plain_spelling(url: str) -> str:
    """Return the URL or path; file:///x for file://localhost/x.   Raise ValueError for a spelling of no store."""
    scheme, colon, rest = url.partition("://")
    shown = rest.rpartition("@")[2].partition("?")[0]  # no password, no query
    if not colon:
        refuse_mistyped(url)
    elif scheme != scheme.lower():
        raise ValueError(f"no store for {scheme}://: write it in lower case, {scheme.lower()}://{shown}")
    elif scheme == "file" and rest[:1] not in ("", "/"):
        host, _, path = rest.partition("/")
        if host.lower() in HERE and path:
            return f"file:///{path}"
        if host.lower() in HERE:
            raise ValueError(f"file://{rest} names this machine, and no folder of it: write file:///the/folder")
        raise ValueError(
            f"file://{rest} names the machine {host}, not a folder of this one: did you mean file:///{rest} or {rest}?"
        )
    return url


def room_words(root: Path) -> str:
    """Return what to free on the full disk of a run's folder."""
    try:
        disk = os.statvfs(root)
    except OSError:
        return "Free some space on that disk"
    return NO_INODES if disk.f_files and not disk.f_favail else "Free some space on that disk"


def refuse_mistyped(path: str) -> None:
    """Raise ValueError for a path that is a URL with a mistyped "://", unless a folder has that very name."""
    typed = MISTYPED.match(path)
    if typed is None or Path(path).exists():
        return
    scheme, rest = typed[1].lower(), path[typed.end() :].rpartition("@")[2].partition("?")[0]  # no password, no query
    meant = f"{scheme}:{'///' if scheme == 'file' else '//'}{rest}"
    raise ValueError(
        f"{typed[0]}{rest} would be a folder of this machine: did you mean {meant}? A folder is ./{typed[0]}…"
    )


def link_words(root: Path) -> str:
    """Return why the folder of a run, or a part of it, cannot be opened, and the next thing to do."""
    if file := next(filter(os.path.isfile, (root, *root.parents)), None):
        return f"{file} is a file where a folder belongs. A run is a folder or a URL (s3://…): use another one"
    if link := next((p for p in (root, *root.parents) if os.path.islink(p) and not os.path.exists(p)), None):
        return f"{link} is a link to {os.readlink(link)}, which is not there. Mount or make that, or use another folder"
    why = "a part of it is a link, a file where a folder belongs, a folder where a file belongs, or has too long a name"
    return f"{why}. Remove it, or use another one"


def plain_url(url: str) -> str:
    """Return a bucket's URL unchanged.   Raise ValueError for characters that URL parsers drop without an error.

    Parsers end a URL at "#" and remove tabs and line ends, so two different URLs could mean the same run.
    """
    if bad := next((c for c in url if c == "#" or not c.isprintable()), ""):
        raise ValueError(
            f"this {url.partition(':')[0]}:// URL has {bad!r} in it. A parser would drop it (and what follows a #). "
            "Write the URL without this character, e.g. exp-1 for exp#1"
        )
    if url != url.strip():
        raise ValueError(f"this {url.strip().partition(':')[0]}:// URL begins or ends with a blank; remove it")
    return url


def bucket_url(url: str) -> str:
    """Return a bucket's URL unchanged.   Raise ValueError as `plain_url` does, and for `.` and `..` in its path."""
    if dots := {".", ".."} & {*url.partition("?")[0].split("/")}:
        raise ValueError(
            f"this {url.partition(':')[0]}:// URL has {max(dots)!r} as the name of a folder, and a bucket knows no "
            "folder above or beside another. Write the URL without it"
        )
    return plain_url(url)
