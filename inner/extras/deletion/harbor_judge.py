"""The verifier of a Harbor folder (tests/judge.py): judge.py's comparison in a container.   Standard library only.

    python3 -I -S judge.py --work /work --tests /tests --to /logs/verifier/reward.txt

    root          /tests ── mode 700 ──▶ only root reads expected values    each test: a process of uid 65534
    another user  each test in bubblewrap: the disk read-only, /tests empty, no other processes
                  without bubblewrap ──▶ no verdict: no reward, exit code 1
    judge.py writes reward 0 first: a reward that the agent forged is lost, and a judge that dies leaves 0

Not promised: more isolation than the container's, if it runs as root; a verdict if judge.py cannot write the
reward's file (the exit code is then 1, and the old file stays). A test is killed after 20 s; inside.py sets its limits.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LIMITS = {"memory": 256 << 20, "cpu": 21, "file": 1 << 20}
SECONDS, MOST = 20, 64 << 10


def answer(inside: str, asked: "dict[str, Any]", tests: Path) -> bytes:
    """Return what the test's process wrote, at most MOST bytes; b"" at the time limit.   tests: hidden from it."""
    with tempfile.TemporaryDirectory() as room, tempfile.TemporaryFile() as out:
        is_root = os.geteuid() == 0
        user: Any = {"user": 65534, "group": 65534, "extra_groups": []} if is_root else {}
        os.chmod(room, 0o777)
        child: Any = subprocess.Popen(
            [*([] if is_root else wall(room, tests)), sys.executable, "-s", "-P", "-S", "-B", "-c", inside],
            stdin=subprocess.PIPE, stdout=out, stderr=subprocess.DEVNULL, env={"PYTHONHASHSEED": "0"}, cwd="/",
            start_new_session=True, **user,
        )  # fmt: skip
        try:
            child.communicate(json.dumps({**asked, "room": room, "value": True, "limits": LIMITS}).encode(), SECONDS)
        except subprocess.TimeoutExpired:
            return b""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0)
        return out.read(MOST)


def wall(room: str, tests: Path) -> "list[str]":
    """Return bubblewrap's words in front of a test's command, for a user without the right to become another user."""
    words = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session"]
    words += ["--cap-drop", "ALL", "--ro-bind", "/", "/", "--dev", "/dev", "--bind", room, room]
    for hidden in ("/proc", str(tests)):  # a sandbox around this one may forbid a new /proc
        words += ["--tmpfs", hidden, "--remount-ro", hidden]
    return [*words, "--"]


def refuse_without_a_wall(tests: Path, reward: Path) -> None:
    """Exit, without a reward, if tested code could read the expected values, or write the reward."""
    with tempfile.TemporaryDirectory() as room, contextlib.suppress(OSError):
        if os.geteuid() == 0 or subprocess.run([*wall(room, tests), "true"], capture_output=True).returncode == 0:
            return
    reward.unlink()  # a reward of 0 would mean a wrong solution
    sys.exit(
        f"judge.py runs as uid {os.geteuid()}, and bubblewrap cannot make a sandbox here, so tested code could read "
        "the expected values. There is no reward. Run it as root, or install bubblewrap."
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--work", "--tests", "--to"):
        parser.add_argument(name, required=True)
    parser.add_argument("--packages", default="/packages")  # the Dockerfile's
    told = parser.parse_args()
    reward = Path(told.to).absolute()
    try:
        reward.unlink(missing_ok=True)
        reward.write_text("0\n")
    except OSError as error:
        sys.exit(f"judge.py cannot write the reward: {error}. Ignore a reward in that file; run judge.py as its owner.")
    tests = Path(told.tests).absolute()
    refuse_without_a_wall(tests, reward)
    if os.geteuid() == 0:
        os.chmod(tests, 0o700)
    inside, asked = (tests / "inside.py").read_text(), json.loads((tests / "cases.json").read_text())
    cases, around = asked["tests"], {**asked["around"], "packages": [told.packages]}
    around["paths"] = [os.path.join(told.work, root) for root in around["paths"]]
    wrong: list[str] = []
    for case in cases:
        expected = json.dumps(case["expect"], sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        if answer(inside, {**around, "run": case["run"]}, tests) != expected:
            wrong.append(case["name"])
    print(f"{len(cases) - len(wrong)} of {len(cases)} passed")
    reward.write_text("0\n" if wrong or not cases else "1\n")


if __name__ == "__main__":
    main()
