"""How long a person waits for `diloco watch --web` in a real browser, what it asks of the bucket, and their memory.

    python -m tests.benchmarks.bench_web [STEPS=1000] [REPLICAS=32] [MS=50] [SECONDS=600]

    S3 server, MS late per request ◀── `diloco watch --web`, its own process ◀── a tab of headless Chromium
      ▲ a step every 43.2 s (1,000 in 12 hours), beats every 5 s

first paint: from the start of `watch --web` until the tab, opened as soon as there is an address, shows the outer step;
nothing is kept on this machine.   whole: until the curves have their last step.   Then SECONDS of requests, RSS of the
server, and the tab's JavaScript heap after a collection.

Not measured: TLS, a browser with extensions.  Everything shares this machine's cores.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import tests.diloco.test_report
import tests.support.long_run
from tests.benchmarks.bench_views import KEYS
from tests.benchmarks.bench_watch import STEP_S, Server, go_on
from tests.support.chromium import Chromium, Tab
from tests.support.long_run import LongRun, copied, long_run
from tests.support.s3_server import S3Server

COMMAND = [sys.executable, "-m", "executors.cli.main", "watch"]


def rss_mb(pid: int) -> float:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


def heap_mb(tab: Tab) -> float:
    tab.call("HeapProfiler.collectGarbage")
    return tab.call("Runtime.getHeapUsage")["usedSize"] / 1e6


def main(steps: int, replicas: int, ms: int, seconds: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root, tempfile.TemporaryDirectory() as home:
        tests.support.long_run.T0 = tests.diloco.test_report.T0 = time.time() - steps * STEP_S  # the run ends now
        run = long_run(steps, replicas, STEP_S)
        s3 = S3Server(root)
        copied(run.store, s3)
        server = Server(root)
        try:
            server.control(latency_s=ms / 1000)
            print(f"{steps} steps x {replicas} replicas, {ms} ms per request", flush=True)
            with Chromium() as browser:
                for _ in range(3):
                    _look(run, s3, server, browser, f"{home}/{time.time()}", 0)
                _look(run, s3, server, browser, f"{home}/last", seconds)
        finally:
            server.process.terminate()


def _look(run: LongRun, s3: S3Server, server: Server, browser: Chromium, cache: str, seconds: int) -> None:
    environ = {**os.environ, **KEYS, "XDG_CACHE_HOME": cache}
    before, began = server.requests, time.monotonic()
    url = f"s3://bucket/run?endpoint={server.endpoint}"
    view = subprocess.Popen([*COMMAND, url, "--web", "--port", "0", "--json"], stdout=subprocess.PIPE, env=environ)
    assert view.stdout is not None
    try:
        address = json.loads(view.stdout.readline())["address"]
        with browser.open(address) as tab:
            step = run.steps
            tab.wait_for(f"document.body.innerText.includes('{step}')")
            first, asked = time.monotonic() - began, server.requests - before
            tab.wait_for("document.querySelectorAll('.u-wrap canvas').length >= 10")
            whole = time.monotonic() - began
            words = f"first paint {first:.2f} s ({asked} requests), curves {whole:.2f} s"
            print(f"  {words} ({server.requests - before} requests), server {rss_mb(view.pid):.0f} MB", flush=True)
            if seconds:
                _sit(run, s3, server, tab, view.pid, seconds)
    finally:
        view.kill()
        view.wait()


def _sit(run: LongRun, s3: S3Server, server: Server, tab: Tab, pid: int, seconds: int) -> None:
    """Look on for so long."""
    time.sleep(10.0)
    step, began = run.steps, time.time()
    start, at_start, told = time.monotonic(), server.requests, -60.0
    while (passed := time.monotonic() - start) < seconds:
        step = go_on(run, s3, step, began)
        if passed - told >= 60:
            told = passed
            print(f"  {passed:5.0f} s: server {rss_mb(pid):.1f} MB, tab's heap {heap_mb(tab):.2f} MB", flush=True)
        time.sleep(5.0)
    asked: Any = server.requests - at_start
    shown = tab.evaluate(f"document.body.innerText.includes('{step}')")
    words = f"{asked / seconds:.2f} requests per second; server {rss_mb(pid):.1f} MB, heap {heap_mb(tab):.2f} MB"
    print(f"  {seconds} s: {words}; outer step {step} shown: {shown}; errors {tab.errors}", flush=True)


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*given, *(1000, 32, 50, 600)[len(given) :])
