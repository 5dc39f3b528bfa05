"""How long a person waits for the first picture of `diloco watch`, what it asks of the bucket, and its memory.

    python -m tests.benchmarks.bench_watch [STEPS=1000] [REPLICAS=32] [MS=50] [SECONDS=600]

    S3 server, its own process, MS late per request ◀── `diloco watch` in a pty of 160 × 50, its own process
      ▲ a step every 43.2 s (1,000 in 12 hours), beats every 5 s

first paint: from the start of the process until the header with the outer step is on the terminal; nothing is kept on
this machine ("cold"), or what the run before kept ("warm").   whole: until the curves are there.   Then SECONDS of
requests and RSS.

Not measured: TLS, a bucket that throttles.  Server and view share this machine's cores.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

import tests.diloco.test_report
import tests.support.long_run
from tests.benchmarks.bench_views import KEYS
from tests.support.long_run import LongRun, copied, copy, long_run
from tests.support.s3_server import S3Server
from tests.support.terminal import Terminal

STEP_S = 43.2
COMMAND = [sys.executable, "-m", "executors.cli.main", "watch"]


class Server:
    """The bucket, in a process of its own."""

    def __init__(self, root: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.s3_server", "0", root], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().strip()

    def control(self, **wish: object) -> dict[str, int]:
        """Set something, or nothing; -> requests so far, by operation."""
        if wish:
            request = urllib.request.Request(f"{self.endpoint}/-/control", json.dumps(wish).encode())
            urllib.request.urlopen(request).read()
        return json.loads(urllib.request.urlopen(f"{self.endpoint}/-/control").read())

    @property
    def requests(self) -> int:
        return sum(self.control().values())


def go_on(run: LongRun, s3: S3Server, step: int, began: float) -> int:
    """Write the beats of now, and a step where one is due; -> outer steps."""
    before = set(run.store.list(f"steps/{step:010d}")) | set(run.store.list("log/"))
    if time.time() - began > STEP_S * (step - run.steps + 1):
        run.step(step)
        step += 1
        for key in {*run.store.list(f"steps/{step - 1:010d}"), *run.store.list("log/")} - before:
            copy(run.store, s3, key)
    run.beat(step, time.time())
    for key in run.store.list("alive/"):
        copy(run.store, s3, key)
    return step


def main(steps: int, replicas: int, ms: int, seconds: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root, tempfile.TemporaryDirectory() as home:
        tests.support.long_run.T0 = tests.diloco.test_report.T0 = time.time() - steps * STEP_S  # the run ends now
        run = long_run(steps, replicas, STEP_S)
        s3 = S3Server(root)
        copied(run.store, s3)
        server = Server(root)
        try:
            server.control(latency_s=ms / 1000)
            _measure(run, s3, server, home, seconds, f"{steps} steps x {replicas} replicas, {ms} ms per request")
        finally:
            server.process.terminate()


def _measure(run: LongRun, s3: S3Server, server: Server, home: str, seconds: int, title: str) -> None:
    url = f"s3://bucket/run?endpoint={server.endpoint}"
    env = {
        **os.environ,
        **KEYS,
        "XDG_CACHE_HOME": home,
        "PYTHONPYCACHEPREFIX": f"{home}/code",
        "TERM": "xterm-256color",
    }
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    print(title, flush=True)
    subprocess.run([*COMMAND, "--help"], env=env, capture_output=True, check=True)
    code = "import executors.cli.watch.app, executors.cli.watch.run"
    subprocess.run([sys.executable, "-c", code], env=env, check=True)  # compiles
    step = run.steps
    view = None
    for look in ("cold", "cold", "cold", "warm", "warm"):
        if view is not None:
            print(f"  q: gone after {view.end()[1]:.2f} s", flush=True)
        if look == "cold":
            shutil.rmtree(f"{home}/diloco", ignore_errors=True)
        before = server.requests
        view = Terminal([*COMMAND, url], env)
        first = view.wait_for(rf"outer step {step}")
        cpu, at_first = view.cpu_s, server.requests - before
        whole = view.wait_for("reward by outer step, 0 to")
        words = f"first paint {first:.2f} s ({cpu:.2f} CPU-s, {at_first} requests), whole {whole:.2f} s"
        print(f"  {look}: {words} ({server.requests - before} requests), RSS {view.rss_mb:.0f} MB", flush=True)
    assert view is not None
    _sit(run, s3, server, view, seconds)
    os.kill(view.pid, signal.SIGKILL)
    os.waitpid(view.pid, 0)


def _sit(run: LongRun, s3: S3Server, server: Server, view: Terminal, seconds: int) -> None:
    """Look on for so long."""
    began = time.time()
    step = run.steps
    view.read(5.0)
    start, at_start = time.monotonic(), server.requests
    while (passed := time.monotonic() - start) < seconds:
        step = go_on(run, s3, step, began)
        if int(passed) % 60 < 5:
            rate = (server.requests - at_start) / max(passed, 1e-9)
            print(
                f"  {passed:5.0f} s: {rate if passed > 1 else 0:.2f} requests per second, RSS {view.rss_mb:.1f} MB",
                flush=True,
            )
        view.drawn = view.drawn[-20000:]
        view.read(5.0)
    asked = server.requests - at_start
    words = f"{asked} requests, {asked / seconds:.2f} per second; RSS {view.rss_mb:.1f} MB; outer step {step}"
    print(f"  {seconds} s: {words}", flush=True)


if __name__ == "__main__":
    asked_for = [int(word) for word in sys.argv[1:]]
    main(*asked_for, *(1000, 32, 50, 600)[len(asked_for) :])
