"""The verifier of a Harbor folder (tests/judge.py): judge.py's comparison without bubblewrap.   Standard library only.

    python3 -I -S judge.py --work /work --tests /tests --to /logs/verifier/reward.txt

    /tests ── mode 700 ──▶ only root reads expected values       each test: a process of uid 65534, killed at 10 s
    judge.py writes reward 0 first: a reward that the agent forged is lost, and a judge that dies leaves 0

Not promised: more isolation than the container's. inside.py sets the limits of each test.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LIMITS = {"memory": 256 << 20, "cpu": 6, "file": 1 << 20}
SECONDS, MOST = 10, 64 << 10


def answer(inside: str, work: str, run: str) -> bytes:
    """Return the bytes that the test's process wrote; b"" if it was killed."""
    asked = json.dumps({"run": run, "path": work, "value": True, "limits": LIMITS}).encode()
    user: Any = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    with tempfile.TemporaryFile() as out:
        child: Any = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", inside], stdin=subprocess.PIPE, stdout=out,
            stderr=subprocess.DEVNULL, env={}, cwd="/", start_new_session=True, **user,
        )  # fmt: skip
        try:
            child.communicate(asked, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return b""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0)
        return out.read(MOST)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--work", "--tests", "--to"):
        parser.add_argument(name, required=True)
    told = parser.parse_args()
    Path(told.to).write_text("0\n")
    tests = Path(told.tests)
    os.chmod(tests, 0o700)
    inside = (tests / "inside.py").read_text()
    cases = json.loads((tests / "cases.json").read_text())["tests"]
    wrong = []
    for case in cases:
        expected = json.dumps(case["expect"], sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        if answer(inside, told.work, case["run"]) != expected:
            wrong.append(case["name"])
    print(f"{len(cases) - len(wrong)} of {len(cases)} passed")
    Path(told.to).write_text("0\n" if wrong or not cases else "1\n")


if __name__ == "__main__":
    main()
