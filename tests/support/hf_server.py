"""The Hub's Jobs and buckets on loopback, for the real huggingface_hub; each job is a real process.

    with HFServer() as hub:                         hub.endpoint  http://127.0.0.1:PORT   (HF_ENDPOINT)
        hub.fault("503", method="POST", path="/api/jobs", times=2)
        hub.preempt(job_id)

kind       what the client sees                       a job that ends          stage, message
lost       effect done, connection dropped            exit code 0              COMPLETED
dropped    no effect, connection dropped              another exit code        ERROR, "Job failed with exit code: N"
503 429 …  that status, no effect                     killed, preempted        ERROR, "Job was terminated"
stream     the log stream is cut after some lines     its limit is over        ERROR, "Job timeout"
behind     a list without any job                     cancelled                CANCELED, once its process is gone

What is real: the client, HTTP, hf_xet and what it writes (its store is a folder: casUrl local://…), the processes,
their signals, their logs.  What is not: the container.  `uv` is a program of ours on the job's PATH that unpacks the
wheel which the requirements name, puts it first on PYTHONPATH, and becomes this Python; a mount is a folder, and the
paths in the command are changed to lead there.

Not promised: that the Hub does the same where its documents and its client do not tell: all messages but
"Job timeout", SIGTERM before SIGKILL, the seconds between them, whether a job tells its time-out.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from executors.platforms.base import Handle, ReplicaSpec
from executors.platforms.on_hf_jobs.executor import HFJobsExecutor
from tests.support.hf_http import ENDED, Handler, Http
from tests.support.turnstile import Turnstile

TOKEN = "hf_test_token"
#           dollars per minute, GPU
FLAVORS = {
    "cpu-basic": (0.000167, ""),
    "cpu-upgrade": (0.0005, ""),
    "t4-small": (0.00667, "T4"),
    "a10g-small": (0.01667, "A10G"),
}
DEFAULT_LIMIT_S = 1800
UV = r"""#!PYTHON
# Stands in for uv: uv run ... --with-requirements FILE python ARGS...
import ctypes, os, pathlib, re, sys, zipfile
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # SIGKILL when the server is gone, however it went
args = sys.argv[1:]
assert args[:2] == ["run", "--no-project"], args
if "--with-requirements" not in args:
    sys.exit("error: " + args[args.index("--with") + 1] + " was not found in the package registry")
at = args.index("--with-requirements") + 1
needs, command = pathlib.Path(args[at]), args[args.index("python", at) + 1 :]
assert (needs.parent / "constraints.txt").exists()
wheel = needs.parent / re.search(r"[^/]+\.whl", needs.read_text())[0]
site = pathlib.Path("SITES") / needs.parent.name
part = site.with_name(site.name + "." + str(os.getpid()))
if not site.exists():
    zipfile.ZipFile(wheel).extractall(part)
    try:
        part.rename(site)
    except OSError:
        pass  # another job was faster
os.environ["PYTHONPATH"] = str(site)
os.execv("PYTHON", ["PYTHON", *command])
"""


@dataclass
class Fault:
    """The next `times` requests that match go wrong."""

    kind: str
    method: str = ""
    path: str = ""  # regular expressions
    times: int = 1
    after: int = 0  # lines of a log stream

    def hits(self, method: str, path: str) -> bool:
        return self.times > 0 and bool(re.search(self.method, method) and re.search(self.path, path))


@dataclass
class Job:
    """asked: the body of the request.   why: what a test did to it, so that its end is told as the test's."""

    id: str
    namespace: str
    asked: dict[str, Any]
    limit_s: int
    stage: str = "SCHEDULING"
    message: str | None = None
    created: float = field(default_factory=time.time)
    started: float | None = None
    finished: float | None = None
    why: str = ""
    process: subprocess.Popen[bytes] | None = None
    lines: list[tuple[str, str]] = field(default_factory=list)
    news: threading.Condition = field(default_factory=threading.Condition)

    def say(self, text: str) -> None:
        with self.news:
            self.lines.append((_iso(time.time()), text))
            self.news.notify_all()

    def end(self, stage: str, message: str | None) -> None:
        with self.news:
            self.stage, self.message, self.finished = stage, message, time.time()
            self.news.notify_all()

    def signal(self, number: int, group: bool = False) -> None:
        if self.process is not None and self.process.poll() is None:
            (os.killpg if group else os.kill)(self.process.pid, number)


class HFServer:
    """token: who may ask.   page: jobs in one page of a list.   grace_s: between SIGTERM and SIGKILL.

    held: new jobs stay SCHEDULING.   limit_s: given to every job instead of its own (0: its own).
    tells_limit: does a job tell its time-out?   blind_after: 503 to lists after so many (0: never).
    plain: variables of every job, as a place sets them.   python: of every job.
    requests: (method, path) of all, in order of arrival.
    """

    def __init__(
        self, *, token: str = TOKEN, page: int = 50, grace_s: float = 5.0, python: str = sys.executable
    ) -> None:
        self.token, self.page, self.grace_s, self.python = token, page, grace_s, python
        self.held, self.limit_s, self.tells_limit, self.blind_after = False, 0, True, 0
        self.plain: dict[str, str] = {}
        self.turnstiles = list[tuple[str, str, Turnstile]]()
        self.flavors, self.faults, self.requests = dict(FLAVORS), list[Fault](), list[tuple[str, str]]()
        self.jobs: dict[str, Job] = {}
        self.buckets: dict[str, dict[str, str]] = {}  # path -> hash
        self._lock, self.closed = threading.RLock(), False
        self.root = Path(tempfile.mkdtemp(prefix="hf-"))
        self._stores: list[str] = []
        self._install_uv()
        self._http = Http(("127.0.0.1", 0), Handler)
        self._http.hub = self
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"

    def _install_uv(self) -> None:
        (self.root / "bin").mkdir()
        (self.root / "sites").mkdir()
        uv = self.root / "bin" / "uv"
        uv.write_text(
            UV.replace("PYTHONPATH", "\0")
            .replace("PYTHON", self.python)
            .replace("\0", "PYTHONPATH")
            .replace("SITES", str(self.root / "sites"))
        )
        uv.chmod(0o755)

    def __enter__(self) -> "HFServer":
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True
        for job in list(self.jobs.values()):
            job.signal(signal.SIGKILL, group=True)
            with job.news:
                job.news.notify_all()
        self._http.shutdown()
        self._http.server_close()
        shutil.rmtree(self.root, ignore_errors=True)

    # ------------------------------------------------------------------ what a test does to it

    def fault(self, kind: str, **when: Any) -> None:
        with self._lock:
            self.faults.append(Fault(kind, **when))

    def met(self, method: str, path: str) -> Fault | None:
        """The fault that this request runs into, used up once."""
        with self._lock:
            self.requests.append((method, path))
            fault = next((f for f in self.faults if f.hits(method, path)), None)
            if fault:
                fault.times -= 1
        return fault

    def gather(self, method: str, path: str, together: int) -> Turnstile:
        """Answer requests of this kind only once so many are in flight."""
        self.turnstiles.append((method, path, Turnstile(together)))
        return self.turnstiles[-1][-1]

    def wait_for_others(self, method: str, path: str) -> None:
        for asked, pattern, turnstile in self.turnstiles:
            if asked == method and re.search(pattern, path):
                with turnstile.request():
                    while not turnstile.is_open and not self.closed:
                        time.sleep(0.01)

    def count(self, method: str, path: str) -> int:
        return sum(m == method and bool(re.search(path, p)) for m, p in list(self.requests))

    def kill(self, job_id: str) -> None:
        """A lost host; a job with attempts left is started again, on another one."""
        self.jobs[job_id].why = "gone"
        self.jobs[job_id].signal(signal.SIGKILL, group=True)

    def preempt(self, job_id: str) -> None:
        """SIGTERM, grace, SIGKILL; a second start only for a job with attempts left."""
        self._ask(self.jobs[job_id], "gone")

    def time_out(self, job_id: str) -> None:
        self._ask(self.jobs[job_id], "timeout")

    def _ask(self, job: Job, why: str) -> None:
        job.why = job.why or why
        job.signal(signal.SIGTERM)
        threading.Timer(self.grace_s, lambda: job.signal(signal.SIGKILL, group=True)).start()

    def live(self) -> list[Job]:
        return [j for j in self.jobs.values() if j.process is not None and j.process.poll() is None]

    # ------------------------------------------------------------------ jobs

    def create(self, namespace: str, asked: dict[str, Any]) -> Job:
        with self._lock:
            number = f"{int(time.time()):08x}{len(self.jobs):016x}"
            limit = self.limit_s or asked.get("timeoutSeconds") or DEFAULT_LIMIT_S
            job = self.jobs[number] = Job(number, namespace, asked, limit)
        threading.Thread(target=self._run, args=(job,), daemon=True).start()
        return job

    def cancel(self, job: Job) -> None:
        with self._lock:
            if job.stage in ENDED:
                return
            if job.process is None:
                return job.end("CANCELED", None)
        self._ask(job, "cancelled")

    def _run(self, job: Job) -> None:
        while self.held and job.stage == "SCHEDULING" and not self.closed:
            time.sleep(0.02)
        if job.stage == "SCHEDULING" and not self.closed:
            try:
                for left in reversed(range(job.asked.get("attempts", 1))):
                    self._serve(job, left)
                    if job.stage != "SCHEDULING":
                        break
            except (OSError, RuntimeError):  # its folder goes with the server
                if not self.closed:
                    raise

    def _serve(self, job: Job, left: int) -> None:
        """left: how often it may still be started again."""
        folder = self.root / job.id
        folder.mkdir(exist_ok=True)
        command, env = self._command(job, folder), self._environ(job, folder)
        with self._lock:
            if job.stage != "SCHEDULING" or self.closed:
                return
            job.process = subprocess.Popen(
                command, cwd=folder, env=env, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            job.started, job.stage = time.time(), "RUNNING"
        job.say(f"===== Job started at {_iso(job.started)} =====")
        timer = threading.Timer(job.limit_s, lambda: self.time_out(job.id))
        timer.daemon = True
        timer.start()
        for line in job.process.stdout or ():
            job.say(line.decode(errors="replace").rstrip("\n"))
        self._ended(job, job.process.wait(), left)
        timer.cancel()

    def _ended(self, job: Job, code: int, left: int = 0) -> None:
        if left and code != 0 and job.why in ("", "gone"):
            with job.news:
                job.why, job.stage, job.process = "", "SCHEDULING", None
            return
        told = {
            "cancelled": ("CANCELED", None),
            "timeout": ("ERROR", "Job timeout"),
            "gone": ("ERROR", "Job was terminated"),
        }
        own = ("COMPLETED", None) if code == 0 else ("ERROR", f"Job failed with exit code: {code}")
        job.end(*told.get(job.why, own))

    def _command(self, job: Job, folder: Path) -> list[str]:
        command = [*job.asked["command"], *job.asked.get("arguments", ())]
        for n, volume in enumerate(job.asked.get("volumes", ())):
            place = folder / f"mount{n}"
            self._mount(volume["source"], place)
            command = [re.sub(rf"^{re.escape(volume['mountPath'])}(?=/|$)", str(place), part) for part in command]
        return command

    def _environ(self, job: Job, folder: Path) -> dict[str, str]:
        """Nothing of ours but what the job was given, and one thread for BLAS."""
        cpu = {"JOB_ID": job.id, "ACCELERATOR": "", "CPU_CORES": "1", "MEMORY": "1Gi", "OMP_NUM_THREADS": "1"}
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        return {
            "PATH": path,
            "HOME": str(folder),
            **cpu,
            **self.plain,
            **job.asked["environment"],
            **job.asked.get("secrets", {}),
        }

    def told(self, job: Job) -> dict[str, Any]:
        """A job as the Hub tells it: never the values of its secrets."""
        keep = ("command", "arguments", "environment", "flavor", "labels", "volumes", "dockerImage", "spaceId")
        ran = None if job.started is None else int((job.finished or time.time()) - job.started)
        return {
            **{k: job.asked[k] for k in keep if k in job.asked},
            **({"timeoutSeconds": job.limit_s} if self.tells_limit else {}),
            "id": job.id, "createdAt": _iso(job.created), "secrets": list(job.asked.get("secrets", ())),
            "startedAt": job.started and _iso(job.started), "finishedAt": job.finished and _iso(job.finished),
            "status": {"stage": job.stage, "message": job.message},
            "durations": {"schedulingSecs": 0, "runningSecs": ran, "totalSecs": ran},
            "owner": {"id": "1", "name": job.namespace, "type": "user"},
            "retry": job.asked.get("attempts", 1) - 1,
        }  # fmt: skip

    # ------------------------------------------------------------------ buckets

    def new_store(self) -> str:
        """For one upload: a client that is killed leaves its own folder half written, and never the Hub's store."""
        with self._lock:
            self._stores.append(f"local://{self.root / 'cas'}{len(self._stores)}")
            return self._stores[-1]

    def _mount(self, bucket: str, place: Path) -> None:
        for path, digest in self.buckets[bucket].items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.blob(digest), place / path)

    def blob(self, digest: str) -> Path:
        """The bytes behind a hash, as hf_xet itself reads them back."""
        from hf_xet import XetFileInfo, XetSession  # pyright: ignore[reportAttributeAccessIssue]

        found = self.root / "blobs" / digest
        with self._lock:
            for number, store in reversed([*enumerate(self._stores)]):
                if found.exists():
                    break
                part = found.with_name(f"{digest}.{number}")
                with suppress(Exception):  # the store of a killed job has no file, or an empty one
                    with XetSession().new_file_download_group(endpoint=store) as group:
                        group.start_download_file(XetFileInfo(digest), str(part))
                    if part.stat().st_size:
                        part.replace(found)
        return found


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class HFPlatform:
    """For the contract test (tests/support/platforms.py)."""

    name = "hf-jobs"
    recipe = "from executors.platforms.on_hf_jobs.executor import HFJobsExecutor\nexecutor = HFJobsExecutor()"

    def __init__(self) -> None:
        self.hub = HFServer(grace_s=2.0)
        self.environ = {"HF_ENDPOINT": self.hub.endpoint, "HF_TOKEN": self.hub.token}
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> "HFPlatform":
        self._before = {name: os.environ.get(name) for name in self.environ}
        os.environ.update(self.environ)
        self.hub.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.hub.__exit__(*error)
        for name, value in self._before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})

    def executor(self) -> HFJobsExecutor:
        return HFJobsExecutor(packages=("tests",))

    def url(self, name: str) -> str:
        return f"s3://bucket/{name}"

    def spoil(self, spec: ReplicaSpec) -> ReplicaSpec:
        return replace(spec, gpu=("no-such-gpu",))

    def kill(self, handle: Handle) -> None:
        self.hub.kill(handle.native)

    def preempt(self, handle: Handle) -> bool:
        return False  # the Hub tells of no restart with the same input

    def hold(self, on: bool) -> bool:
        self.hub.held = on
        return True

    def lose_reply(self) -> bool:
        self.hub.fault("lost", method="POST", path=r"^/api/jobs/[^/]+$")
        return True

    def drop_logs(self) -> bool:
        self.hub.fault("stream", path="/logs$", after=5)
        return True

    def live(self) -> int:
        return len(self.hub.live())
