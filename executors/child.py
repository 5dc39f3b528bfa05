"""What runs inside a started process: one function, its output in a log file, its end in files beside it.

    stem.json     who it is (pid, start)      first
    stem.log      stdout and stderr
    stem.result   what the function returned  JSON, only if it is a result
    stem.exit     pid, start, exit code       last, by whoever reaped it

A fresh interpreter comes in by START with the request as JSON; the fork server calls `settle` and `run` directly.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executors.processes import start_ticks

START = "import sys; from executors.child import main; sys.exit(main(sys.argv[1:]))"


def settle(request: Mapping[str, Any]) -> None:
    """Become a process of its own: session, working files, name card."""
    os.environ.update(request["env"])
    log = os.open(request["files"] + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    me = {"pid": os.getpid(), "started": start_ticks(os.getpid())}
    write_json(request["files"] + ".json", {**request["handle"], **me})


def run(request: Mapping[str, Any]) -> int:
    """Call the entry point; -> the exit code.  A crash leaves its traceback in the log."""
    try:
        return _call(request)
    except SystemExit as leave:
        return _exit_code(leave.code)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _call(request: Mapping[str, Any]) -> int:
    module, _, function = request["entrypoint"].partition(":")
    target = getattr(importlib.import_module(module), function or "main")
    if request["kwargs"] is None:
        return _exit_code(target(list(request["argv"])))
    write_json(request["files"] + ".result", target(**request["kwargs"]))
    return 0


def _exit_code(code: object) -> int:
    """What sys.exit makes of its argument."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def write_json(path: str, value: Any) -> None:
    """Whole or not at all."""
    part = Path(f"{path}.{os.getpid()}.part")
    part.write_text(json.dumps(value))
    part.replace(path)


def main(argv: list[str]) -> int:
    request = json.loads(argv[0])
    sys.path[:] = request["path"]
    settle(request)
    sys.argv = [request["entrypoint"], *request["argv"]]
    return run(request)
