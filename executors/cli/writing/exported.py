"""Manages the folder of an export: later exports replace, and --push uploads, only files that an export wrote.

    DIR/.export-x7f3/  ◀── the model, the card, the report          a fresh folder, which holds only the export
    DIR                ◀── its files, after the files of the previous export (listed in diloco-export.json) are removed

So a whole model never lies beside the adapter of an earlier export, and --push never uploads a file of the user.

Not promised: that manual changes in an exported file are kept; a complete folder if the export is killed.
"""

import json
import os
import shlex
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from executors.preflight import run_url
from rendezvous import layout

MARK = "diloco-export.json"  # in an exported folder: its run, outer step and files; such a folder may be overwritten


def refuse_export(to: Path) -> None:
    """Raise UsageError if the export would overwrite files that no export wrote, or would write into a run."""
    if to.is_file():
        raise run_url.UsageError(f"{to} is a file. Name a new folder: --to FOLDER")
    for above in (to, *to.resolve().parents):
        if (above / layout.RUN).is_file() and (above / "control").is_dir():
            where = f"{to} is inside the run at {above}, whose own files the export would overwrite"
            raise run_url.UsageError(f"{where}. Name a folder beside it")
    if not (to / MARK).is_file() and (found := run_url.foreign_files(to, ())):
        raise run_url.UsageError(
            f"{to} holds {found}, which no export has written; an export would overwrite some. Name a new folder: "
            f"--to {shlex.quote(str(to / 'model'))}"
        )


@contextmanager
def fresh_folder(to: Path) -> Generator[Path]:
    """Give an empty folder below `to` for the files of an export; it is always removed."""
    to.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=to, prefix=".export-", ignore_cleanup_errors=True) as made:
            yield Path(made)
    except (OSError, SafetensorError) as error:
        name = getattr(error, "filename", None) or str(to / MARK)  # a failed write() names no file
        error.filename = name  # pyright: ignore[reportAttributeAccessIssue]
        raise
    finally:
        with suppress(OSError):
            to.rmdir()  # if it is empty, as nothing was exported


def replace_export(to: Path, made: Path, run: str, step: int) -> list[str]:
    """Replace the files of the previous export in `to` by the files of `made`.   Return the new files' names."""
    names = sorted(p.relative_to(made).as_posix() for p in made.rglob("*") if p.is_file())
    mark_export(to, run, step, [*_earlier_files(to), *names])  # old and new files, in case of a kill
    for name in _earlier_files(to):
        if name not in names and (to / name).resolve().is_relative_to(to.resolve()):
            (to / name).unlink(missing_ok=True)
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(made / name, to / name)
    mark_export(to, run, step, names)
    return names


def mark_export(to: Path, run: str, step: int, files: Sequence[str] = ()) -> None:
    found = {"run": run, "outer_step": step, "files": sorted(set(files))}
    (to / MARK).write_text(json.dumps(found, indent=1), encoding="utf-8")


def _earlier_files(to: Path) -> list[str]:
    """Return the file names in the previous export's mark; [] if there is no mark, or an unreadable mark."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        names = json.loads((to / MARK).read_text(encoding="utf-8"))["files"]
        return [name for name in names if isinstance(name, str) and name not in ("", ".", MARK)]
    return []
