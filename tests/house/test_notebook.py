"""The notebook of a first run, from its first cell to its last, in a process of its own.

A cell's magic `%%writefile` is written here, and IPython's `Image` is a stand-in, so no Jupyter is needed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CELLS = json.loads((ROOT / "examples" / "first_run.ipynb").read_text())["cells"]
MAGIC = "%%writefile "


def code_of(cell: dict) -> str:
    source = "".join(cell["source"])
    if not source.startswith(MAGIC):
        return source
    name, _, text = source.removeprefix(MAGIC).partition("\n")
    return f"import pathlib; pathlib.Path({name!r}).write_text({text!r})"


def test_the_notebook_is_kept_with_what_its_cells_showed() -> None:
    codes = [cell for cell in CELLS if cell["cell_type"] == "code"]
    for cell in codes:
        compile(code_of(cell), "a cell", "exec")
    assert [cell["execution_count"] for cell in codes] == list(range(1, len(codes) + 1))
    shown = json.dumps([cell["outputs"] for cell in codes])
    assert "image/png" in shown and "killed by SIGKILL" in shown and "everything that was compared is equal" in shown


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    stub = tmp_path / "stub" / "IPython"
    stub.mkdir(parents=True)
    (stub / "__init__.py").touch()
    (stub / "display.py").write_text("class Image:\n    def __init__(self, path, width): open(path).close()\n")
    (tmp_path / "cells.py").write_text("\n\n".join(code_of(cell) for cell in CELLS if cell["cell_type"] == "code"))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join([str(stub.parent), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "outer step 12 of 12" in done.stdout and "everything that was compared is equal" in done.stdout
    assert (tmp_path / "trained" / "model.safetensors").exists()
