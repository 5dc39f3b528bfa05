"""Write a task as a Harbor folder, for TRL's HarborSpec, prime-rl and `harbor run`.

    task.toml         limits, no internet, the canary      environment/   Dockerfile, repo/ without the feature
    instruction.md    read by the agent                    tests/         test.sh ─▶ judge.py, inside.py, cases.json
    solution/         solve.sh, the original files/        reward         /logs/verifier/reward.txt: 1 or 0

Harbor copies tests/ into the container when the agent has finished. There, harbor_judge.py (as tests/judge.py) runs as
root, closes /tests to other users, starts each test as uid 65534, and compares values outside the test's process.

`read_harbor` reads such a folder back as a task.

Not promised: isolation by bubblewrap. The container is the sandbox. An agent that is root there may have changed the
interpreter; only a verifier in a separate container prevents that.
"""

import json
import shutil
from pathlib import Path

from inner.errors import InnerError
from inner.extras.deletion.judge import DeletionTask, HiddenTest
from inner.extras.deletion.sandbox import INSIDE, Surroundings, write_files

HERE = Path(__file__).parent
DOCKERFILE = "# {canary}\nFROM python:3.11-slim\n{run}COPY repo /work\nWORKDIR /work\n"
INSTALL = "RUN pip install --no-deps --target /packages {}\n"
WHERE = "\n\nThe package is in /work.\n"
TEST = """#!/bin/bash
# {canary}
rm -rf /logs/verifier/*
mkdir -p /logs/verifier
exec python3 -I -S /tests/judge.py --work /work --tests /tests --to /logs/verifier/reward.txt
"""
SOLVE = """#!/bin/bash
# {canary}
cp -r /solution/files/. /work
"""
TOML = """# {canary}
version = "1.0"

[metadata]
category = "programming"
tags = ["feature-deletion", "python"]
canary = {quoted}

[verifier]
timeout_sec = 300.0

[agent]
timeout_sec = 600.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 1024
storage_mb = 2048
allow_internet = false
"""


def write_harbor(task: DeletionTask, folder: Path) -> None:
    """Write the folder; delete its earlier contents."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("environment/repo", "tests", "solution/files"):
        (folder / name).mkdir(parents=True)
    (folder / "instruction.md").write_text(task.instruction + WHERE)
    (folder / "task.toml").write_text(TOML.format(canary=task.canary, quoted=json.dumps(task.canary)))
    around = task.around
    install = INSTALL.format(" ".join(around.requires)) if around.packages else ""
    (folder / "environment/Dockerfile").write_text(DOCKERFILE.format(canary=task.canary, run=install))
    write_files(folder / "environment/repo", task.files)
    write_files(folder / "solution/files", task.solution)
    (folder / "solution/solve.sh").write_text(SOLVE.format(canary=task.canary))
    (folder / "tests/test.sh").write_text(TEST.format(canary=task.canary))
    (folder / "tests/inside.py").write_text(INSIDE)
    shutil.copyfile(HERE / "harbor_judge.py", folder / "tests/judge.py")
    cases = [{"name": t.name, "run": t.run, "expect": t.expect} for t in task.tests]
    told = {"canary": task.canary, "fail_to_pass": list(task.fail_to_pass), "tests": cases}
    told["around"] = {"paths": list(around.roots), "beside": dict(around.beside)}
    told["requires"] = list(around.requires)
    (folder / "tests/cases.json").write_text(json.dumps(told, indent=1) + "\n")


def read_harbor(folder: Path, packages: str = "") -> DeletionTask:
    """Return the task that `write_harbor` wrote.   packages: a folder, for a task with a suite.   Raises InnerError."""
    try:
        told = json.loads((folder / "tests/cases.json").read_text())
        roots, beside = tuple(told["around"]["paths"]), told["around"]["beside"]
        return DeletionTask(
            folder.name,
            instruction=(folder / "instruction.md").read_text().removesuffix(WHERE),
            files=_read_texts(folder / "environment/repo"),
            solution=_read_texts(folder / "solution/files"),
            tests=[HiddenTest(**case) for case in told["tests"]],
            fail_to_pass=told["fail_to_pass"],
            canary=told["canary"],
            around=Surroundings(roots, packages if beside else "", tuple(told.get("requires", ())), beside),
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InnerError(
            f"{folder} is not a feature-deletion task ({error!r:.200}). Make one with "
            "`python -m inner.extras.deletion.generate --to`."
        ) from error


def _read_texts(folder: Path) -> dict[str, str]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes().decode() for path in found}
