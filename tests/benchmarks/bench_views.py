"""How long a person waits for `diloco status`, `costs` and `report` of a long run, and what they ask of the bucket.

    python -m tests.benchmarks.bench_views [STEPS=1000] [REPLICAS=4] [MS=50]

The command is a process of its own, its start included; Python's bytecode is compiled before, as `pip install` does.
The bucket is an S3 server on this machine that answers every request MS milliseconds late.  "first": nothing is kept on
this machine yet.  CPU is that of the command alone; the server's own CPU time is in the wall clock, though, and both
share this machine's cores.
Not measured here: TLS, and a bucket that throttles.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time

from tests.support.long_run import copied, long_run
from tests.support.s3_server import S3Server

KEYS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}
COMMAND = [sys.executable, "-c", "import sys; from executors.cli.main import main; sys.exit(main())"]


def timed(s3: S3Server, home: str, *argv: str) -> tuple[float, float, int, str]:
    """-> wall and CPU seconds, requests, what it printed."""
    s3.requests.clear()
    cpu, began = _children_cpu(), time.monotonic()
    env = {**os.environ, **KEYS, "XDG_CACHE_HOME": home, "PYTHONPYCACHEPREFIX": f"{home}/bytecode"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([*COMMAND, *argv], capture_output=True, text=True, env=env, check=True)
    return time.monotonic() - began, _children_cpu() - cpu, len(s3.requests), done.stdout


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(steps: int, replicas: int, ms: int) -> None:
    with S3Server(latency_s=ms / 1000) as s3, tempfile.TemporaryDirectory() as scratch:
        url = copied(long_run(steps, replicas).store, s3)
        print(f"{steps} steps x {replicas} replicas, {ms} ms per request")
        for verb, more in (("status", ()), ("costs", ()), ("report", ("--to", f"{scratch}/page"))):
            home = f"{scratch}/home-{verb}"
            timed(s3, home, verb, copied(long_run(2, 2).store, s3, "short"), *more)  # compiles
            for look in ("first", "again", "again"):
                wall, cpu, requests, text = timed(s3, home, verb, url, *more)
                print(f"  {verb:8s} {look:6s} {wall:6.2f} s wall  {cpu:5.2f} s CPU  {requests:6d} requests", flush=True)
            if verb == "status":
                print(text)


if __name__ == "__main__":
    asked = [int(word) for word in sys.argv[1:]]
    main(*asked, *(1000, 4, 50)[len(asked) :])
