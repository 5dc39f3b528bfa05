"""The folder that `diloco export` writes a model into: a new one, or one of an earlier export.

    DIR/config.json, model.safetensors, …      the model
        diloco-export.json                     its run and outer step; a folder with this file may be overwritten

Not promised: that manual changes in a folder of an earlier export are kept.
"""

import json
import shlex
from pathlib import Path

from executors.preflight.run_url import UsageError, foreign_files
from rendezvous import layout

MARK = "diloco-export.json"


def refuse_export(to: Path) -> None:
    """Raise UsageError if the export would overwrite files that are not of an export, or write into a run."""
    if to.is_file():
        raise UsageError(f"{to} is a file, and a model is a folder. Name a new one")
    for above in (to, *to.resolve().parents):
        if (above / layout.RUN).is_file() and (above / "control").is_dir():
            raise UsageError(
                f"{to} lies in the run at {above}, whose own files it would write over. Name a folder beside it"
            )
    if not (to / MARK).is_file() and (found := foreign_files(to, ())):
        raise UsageError(
            f"{to} holds {found}, which no export has written; some of it would be written over. Name a new folder: "
            f"--to {shlex.quote(str(to / 'model'))}"
        )


def mark_export(to: Path, run: str, step: int) -> None:
    (to / MARK).write_text(json.dumps({"run": run, "outer_step": step}, indent=1), encoding="utf-8")
