"""The start of a local process: it calls one function, and writes a log, its identity and its end into files.

    stem.json     process file: pid, start    written first, and only if there is none
    stem.log      stdout and stderr
    stem.result   the function's return value JSON, only for entry points called with keywords
    stem.exit     pid, start, exit code       written last, by the fork server; no file for a fresh interpreter
    stem.launchers  "PID:START" per line      short form only: the process ends once all these launchers have ended

A fresh interpreter runs START, with the request as JSON; the fork server calls `run_process` directly.  The
process file stem.json makes a launch happen once: if two launchers start the same (slot, attempt), the process
that finds the file of another process ends at once.

Not promised: a clean end at `timeout_s` for an entry point that ignores SIGTERM: such an entry point is killed.
"""

import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from diloco.process import exitcodes
from diloco.process.own_files import APPENDED, open_own, part_of, read_json, write_json
from diloco.process.processes import DEVICE_ENV, is_named_alive, mark_run, start_ticks
from executors.platforms.base import REPLICA, load_name
from executors.platforms.machine import gpu
from rendezvous.layout import is_actor

LAUNCHERS = ".launchers"
LOOK_S, GRACE_S = 1.0, 15.0  # seconds between two looks at the launchers; seconds from SIGTERM to SIGKILL
START = "import sys; from executors.platforms.entrypoint import main; sys.exit(main(sys.argv[1:]))"


def run_process(request: Mapping[str, Any]) -> int:
    """Run a started process from its first line to its end; return the exit code."""
    if not settle(request):
        return exitcodes.FENCED
    sys.argv = [request["entrypoint"], *request["argv"]]
    if request["lease_s"]:
        threading.Thread(target=leave_with, args=(request["files"] + LAUNCHERS,), name="leash", daemon=True).start()
    if not request["timeout_s"]:
        return run(request)
    is_replica = request["entrypoint"] == REPLICA
    limit_s = request["timeout_s"]
    from executors.platforms.time_limit import run_in_time, staggered_s

    limit_s = staggered_s(limit_s, request["slot"]) if is_replica else limit_s
    return run_in_time(lambda: run(request), limit_s)


def settle(request: Mapping[str, Any]) -> bool:
    """Set environment, cores, priority, log and process file.   Return False if another process runs this launch."""
    os.environ.update(request["env"])
    if cores := request.get("cores"):
        os.sched_setaffinity(0, cores)
    if is_actor(request["slot"]):  # lower priority: outer steps wait for replicas, never for actors
        os.nice(10)
    mark_run(request["run"])  # before the process file names this process
    log = open_own(request["files"] + ".log", APPENDED)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    me = {"pid": os.getpid(), "started": start_ticks(os.getpid())}
    card = create_process_file(request["files"], {**request["handle"], **me})
    return (card.get("pid"), card.get("started")) == (me["pid"], me["started"])


def create_process_file(stem: str, card: Mapping[str, Any]) -> dict[str, Any]:
    """Write the process file unless there is one; return the content of the file."""
    part = part_of(f"{stem}.json", card)
    with suppress(FileExistsError):
        try:
            os.link(part, f"{stem}.json")
        finally:
            part.unlink()
    return read_json(f"{stem}.json") or {}


def leave_with(launchers: str) -> None:
    """Wait for the end of all processes that the file names; then SIGTERM this process, and SIGKILL its group later."""
    names = list[str]()
    while True:
        with suppress(OSError), open(open_own(launchers), encoding="ascii") as file:
            names = file.read().split()
        if names and not any(map(is_named_alive, names)):
            break
        time.sleep(LOOK_S)
    print("the process that launched this one has ended, so this process leaves, too", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


def run(request: Mapping[str, Any]) -> int:
    """Call the entry point; return the exit code.  A crash leaves its traceback in the log."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # also in a file or pipe, so that you can follow the log
    try:
        return _call_entrypoint(request)
    except SystemExit as leave:
        return _exit_code(leave.code)
    except BaseException:
        sys.stdout.flush()  # print the function's output before its traceback
        traceback.print_exc()
        return 1
    finally:
        for output in (sys.stdout, sys.stderr):
            with suppress(OSError):  # a full disk: the output is lost, the exit code is not
                output.flush()


def _call_entrypoint(request: Mapping[str, Any]) -> int:
    if request["entrypoint"] == REPLICA and (code := _without_gpu(request["gpu"])):
        return code
    target = load_name(request["entrypoint"])
    if request["kwargs"] is None:
        return _exit_code(target(list(request["argv"])))
    write_json(request["files"] + ".result", target(**request["kwargs"]))
    return 0


def _without_gpu(asked: Sequence[str]) -> int:
    """Return an exit code if the requested GPU is missing, else 0.  Store the device's name for the replica's log."""
    build = gpu.torch_build()
    driver = gpu.driver_here()
    os.environ[DEVICE_ENV] = gpu.device_name(build, driver)
    if (why := gpu.missing_gpu(asked, build, driver)) is None:
        return 0
    print(why.text, file=sys.stderr, flush=True)
    return why.code


def _exit_code(code: object) -> int:
    """Return the exit code that sys.exit makes of its argument."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def write_end(stem: str, pid: int, started: int, code: int) -> None:
    """Write the exit code, unless the process file belongs to another process."""
    card = read_json(f"{stem}.json") or {}
    if (card.get("pid"), card.get("started")) == (pid, started):
        write_json(f"{stem}.exit", {"pid": pid, "started": started, "code": code})


def main(argv: list[str]) -> int:
    request = json.loads(argv[0])
    sys.path[:] = request["path"]
    return run_process(request)
