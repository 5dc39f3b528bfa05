"""Replicas as jobs of a Slurm cluster, through submitit.

    launch ──▶ {root}/r00.1/  submit.1   only the process that made it may submit     ──▶ sbatch ──▶ a node:
                              card.json  the handle: job id                                run_replica(spec)
                              {id}_0_log.out                                          ◀──     its output
                              cancelled  we asked the job to leave                            │
                              end.json   its end       ◀──────────────────────────────────────┘

    SlurmExecutor(partition="gpu", account="me", cpus_per_task=8)     sbatch's options, with submitit's names
    SlurmExecutor(cluster="local")                                    submitit's local mode: jobs as processes here

Every node must see this folder, and the run, if it is a folder.  submitit's file for a job is code, so it lies in a
folder where only its owner may write, never in the run.  We cancel a job by its id and its name together, because a
forged log could name the id of another job.  Slurm does not restart a job after a preemption (no_requeue), and submitit
does not after a time-out: the supervisor starts it again.  A secret is an environment variable of the launcher, which
sbatch passes to the job.

Not promised: a price (give `usd_per_hour` if your site bills), or how fast Slurm kills after the grace (KillWait).
"""

import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from diloco.process import processes
from diloco.process.own_files import make_private, write_json
from diloco.units import dollars, duration
from executors.platforms.base import ExecutorError, Handle, Refused, ReplicaSpec, State, Status, Unavailable, short_name
from executors.platforms.container import ended_as
from executors.platforms.executor import Executor
from executors.platforms.machine.logfile import LogFile
from executors.platforms.on_slurm import job as slurm_job
from executors.platforms.platform import NotStarted, launches_named, launches_wait, missing_secret
from rendezvous.clock import Clock
from rendezvous.stores.open import folder_of

Told = tuple[str, str]  # Slurm's words for a job's state, with the reason of its wait, and the job's name
PATIENCE_S = 15.0  # seconds until a file that a node wrote is visible on this machine; submitit uses the same value
DAY_S = 24 * 3600.0
SIGNAL_S = 0  # seconds from Slurm's USR2 to its limit.  0: a replica leaves earlier by its own clock.  Submitit's 90 s
# would make every session 90 s shorter, and would ask a session of one minute to leave at its start
AT_ONCE = 16
OWN_LINE = re.compile(r"submitit (INFO|WARNING|ERROR|CRITICAL) \(\d{4}-")
# errors of sbatch that do not blame the job: the controller, the connection, munge, a limit on submitted jobs
NOT_NOW = re.compile(
    r"unable to contact|timed out|communication|zero bytes|temporarily|standby|authentication|MaxSubmitJob", re.I
)
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
GOING = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED", "RESIZING", "COMPLETED")
LOG = "_0_log.out"  # the end of a log's name, behind the job's id
USUAL = ("None", "Priority", "Resources")  # reasons of jobs that wait for their turn
FORGOTTEN = "FORGOTTEN"  # our own word for a job that Slurm does not list any more
WHY_GONE = {
    "TIMEOUT": "Slurm's time limit",
    "DEADLINE": "Slurm's deadline",
    "OUT_OF_MEMORY": "out of memory",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node did not boot",
    "CANCELLED": "cancelled by another user or program",
    FORGOTTEN: "Slurm knows no such job any more",
}


class SlurmExecutor(Executor):
    """The executor for Slurm.   folder: has the jobs' files (default: ~/.diloco/slurm); only you may write there.

    sbatch: sbatch's options, with submitit's names.   timeout_s: the time limit of a spec that sets no limit.
    """

    name = slurm_job.NAME
    first_state = State.PENDING
    id_form = r"\d{1,19}(_\d{1,9})?"

    def __init__(
        self,
        *,
        folder: str | Path | None = None,
        cluster: str = "slurm",
        usd_per_hour: float | None = 0.0,
        timeout_s: float = DAY_S,
        clock: Clock | None = None,
        **sbatch: Any,
    ) -> None:
        super().__init__(clock)
        self._root = Path.home() / ".diloco" / "slurm" if folder is None else Path(folder).expanduser()
        self._cluster = cluster
        self.usd_per_hour = usd_per_hour
        self._timeout_s = timeout_s
        self._sbatch = sbatch
        self.pause_s = 0.1 if cluster == "local" else 2.0
        self._ended_since: dict[Handle, float] = {}

    # ------------------------------------------------------------------ starting

    def plan_line(self, spec: ReplicaSpec) -> str:
        gpu = spec.gpu[0] if spec.gpu else "no GPU"
        minutes = self._limit_minutes(spec)
        return f"{self._cluster} job {_job_name(spec)}, {gpu}, at most {minutes} min"

    def plan_notes(self, specs: Sequence[ReplicaSpec]) -> list[str]:
        price = None if self.usd_per_hour is None else self.usd_per_hour * len(specs)
        cost = "no price is known" if price is None else f"{dollars(price)} per hour" if price else "no bill of its own"
        return [f"all nodes must see {root}; {cost}" for root in {run_folder(self._root, s.run) for s in specs}]

    def nameless_run(self) -> str:
        return f"{slurm_job.NAME}://ranks-{time.time_ns():x}-{os.getpid()}"

    def submit(self, specs: Sequence[ReplicaSpec]) -> list[Handle | NotStarted]:
        with ThreadPoolExecutor(AT_ONCE) as pool:  # each sbatch waits for Slurm's answer
            return list(pool.map(self._launch_one, specs))

    def renew(self, handles: Sequence[Handle], until: float) -> bool:
        for folder in map(self._folder_of, handles):
            make_private(folder.parent.parent, folder.parent, folder)
            write_json(str(folder / slurm_job.UNTIL), until)
        return True

    def _launch_one(self, spec: ReplicaSpec) -> Handle | NotStarted:
        """Submit a job unless another launcher has submitted it; return the handle, or the fault of the job."""
        folder = self._folder_of(spec)
        try:
            with launches_wait("the jobs' files"):
                make_private(folder.parent.parent, folder.parent, folder)
                turn = 1
                while not slurm_job.create_exclusively(mine := folder / f"submit.{turn}"):
                    if (known := _wait_for_card(folder, self.new_handle(spec), self._clock)) is not None:
                        return known
                    turn += mine.exists()  # its launcher died without a card; a job of it finds no input and ends
            return _submit_in_turn(lambda: self._submit_job(spec, folder), mine)
        except (OSError, subprocess.SubprocessError, RuntimeError, NameError) as error:
            words = str(error)
            return NotStarted(words, State.LOST if NOT_NOW.search(words) else State.FAILED)

    def _submit_job(self, spec: ReplicaSpec, folder: Path) -> Handle:
        executor = _import_submitit().AutoExecutor(folder=folder, cluster=self._cluster)
        minutes = self._limit_minutes(spec)
        options = {f"slurm_{key}": value for key, value in self._sbatch.items()}
        if spec.gpu:
            options["slurm_gres"] = f"gpu:{spec.gpu[0]}"
        no_restart = {"no_requeue": True, **options.pop("slurm_additional_parameters", {})}
        executor.update_parameters(
            name=_job_name(spec), timeout_min=minutes, stderr_to_stdout=True,
            **{"slurm_signal_delay_s": SIGNAL_S, **options}, slurm_additional_parameters=no_restart,
        )  # fmt: skip
        job = executor.submit(slurm_job.run_job, {**spec.to_dict(), "timeout_s": 60.0 * minutes}, str(folder))
        pid = int(job.job_id) if self._cluster == "local" else 0
        handle = replace(
            self.new_handle(spec), native=job.job_id, pid=pid, started=processes.start_ticks(pid) or 0,
            files=str(folder), launched_at=self._clock.wall(), usd_per_hour=self.usd_per_hour,
        )  # fmt: skip
        write_json(str(folder / slurm_job.CARD), handle.to_dict())
        return handle

    def fault_of(self, spec: ReplicaSpec) -> str:
        _check_cluster(self._cluster)
        if why := missing_secret(spec):
            return why
        if spec.timeout_s and spec.timeout_s > (most := self._longest_s):
            return (
                f"the partition runs no job longer than {duration(most)}, so a job of {duration(spec.timeout_s)} would "
                "never begin. Give a shorter --timeout, or --option partition=NAME (sinfo -o '%P %l' shows the limits)"
            )
        if len(spec.gpu) > 1:
            return f"Slurm takes one kind of GPU per job, not a list ({', '.join(spec.gpu)}); give one --gpu"
        kind = spec.gpu[0].partition(":")[0] if spec.gpu else ""
        kinds = _gpu_kinds(self._cluster) if kind not in ("", "1") else None  # "1": any kind
        if kinds is not None and kind not in kinds:
            known = ", ".join(sorted(kinds)) or "none"
            return f"no node of this cluster has the GPU {''.join(spec.gpu)!r}; there are: {known} (sinfo -o %G)"
        return ""

    def _limit_minutes(self, spec: ReplicaSpec) -> int:
        seconds = spec.timeout_s or min(self._timeout_s, self._longest_s)
        return max(1, math.ceil(seconds / 60.0))

    @cached_property
    def _longest_s(self) -> float:
        """The longest time that the partition gives a job, in seconds; inf if sinfo names no limit."""
        asked = self._sbatch.get("partition")
        rows = [] if self._cluster == "local" else _sinfo("%P|%l", *([f"--partition={asked}"] if asked else []))
        named = [row.split("|") for row in rows if "|" in row and (asked or row.split("|")[0].endswith("*"))]
        return max((_seconds_in(limit) for _, limit in named), default=math.inf)

    def _folder_of(self, one: ReplicaSpec | Handle) -> Path:
        """Return the folder of the launch's files.  Do not use the handle's `files`: it may be forged."""
        return run_folder(self._root, one.run) / f"{one.slot}.{one.attempt}"

    # ------------------------------------------------------------------ watching

    def observe(self, handles: Sequence[Handle]) -> list[Status | ExecutorError]:
        """Return a status per handle, from a call of squeue, and a call of sacct for jobs unknown to squeue."""
        open_ones = [h for h in handles if slurm_job.written_end(self._folder_of(h)) is None]
        told, trouble = _ask_slurm(open_ones) if self._cluster == "slurm" and open_ones else ({}, None)
        return [self._status_or_error(h, told, trouble) for h in handles]

    def _status_or_error(
        self, handle: Handle, told: Mapping[str, Told], trouble: ExecutorError | None
    ) -> Status | ExecutorError:
        folder = self._folder_of(handle)
        if (end := slurm_job.written_end(folder)) is not None:
            return ended_as(handle, end, asked=slurm_job.was_cancelled(folder))
        if self._cluster == "local":
            return _local_status(handle, folder)
        state, name = told.get(handle.native, ("UNKNOWN", ""))
        if name and name != _job_name(handle):
            return Status(handle, State.LOST, f"Slurm's job {handle.native} is called {name}: it is not this run's")
        word, _, reason = state.partition(" ")
        if word == "UNKNOWN":
            return trouble or Unavailable(f"Slurm's answer does not have job {handle.native}")
        return self._status_from_word(handle, word.rstrip("+"), reason)

    def _status_from_word(self, handle: Handle, word: str, reason: str) -> Status:
        if word in WAITING:
            return Status(handle, State.PENDING, "" if reason in USUAL else reason)
        if word in GOING and word != "COMPLETED":
            return Status(handle, State.RUNNING)
        since = self._ended_since.setdefault(handle, self._clock.now())
        if self._clock.now() - since < PATIENCE_S and word in ("COMPLETED", "FAILED", FORGOTTEN):
            return Status(handle, State.RUNNING, "the job has ended, and its result is awaited")
        if slurm_job.was_cancelled(self._folder_of(handle)):
            began = (self._folder_of(handle) / f"{handle.native}{LOG}").exists()
            reason = "killed at the end of its grace period" if began else "cancelled before it began"
            return Status(handle, State.CANCELLED, reason)
        reason = WHY_GONE.get(word, f"Slurm says {word}, and the job left no result")
        return Status(handle, State.FAILED if word == "OUT_OF_MEMORY" else State.LOST, reason)

    def log_file(self, handle: Handle) -> LogFile:
        file = self._folder_of(handle) / f"{handle.native}{LOG}"
        return LogFile(file, lambda line: OWN_LINE.match(line) is None)

    def read_value(self, handle: Handle) -> Any:
        return (slurm_job.written_end(self._folder_of(handle)) or {}).get("value")

    # ------------------------------------------------------------------ ending

    def cancel(self, handles: Iterable[Handle], grace_s: float = 15.0) -> None:
        """Cancel jobs.  Poll first, so that a job that has ended by itself is not marked as cancelled."""
        super().cancel([s.handle for s in self.poll(handles) if not s.state.ended], grace_s)

    def stop(self, handles: Sequence[Handle], kill: bool) -> None:
        folders = {h: self._folder_of(h) for h in handles}
        going = [h for h, folder in folders.items() if slurm_job.written_end(folder) is None and folder.is_dir()]
        for handle in going:
            (folders[handle] / slurm_job.CANCELLED).touch()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            stop_here = lambda h, kill: slurm_job.stop_here(h, folders[h], kill)  # noqa: E731
            stop = _scancel if self._cluster == "slurm" else stop_here
            list(pool.map(stop, going, [kill] * len(going)))

    def discover(self, run: str) -> list[Handle]:
        launches = launches_named(run, slurm_job.NAME, (p.name for p in run_folder(self._root, run).glob("*.*")))
        cards = [slurm_job.submitted(self._folder_of(launch), launch) for launch in launches]
        return sorted((card for card in cards if card is not None), key=lambda card: card.attempt)


# -------------------------------------------------------------------- small things


def run_folder(root: Path, run: str) -> Path:
    """Return the folder of a run's jobs."""
    folder = folder_of(run)
    whole = run if folder is None else str(folder.absolute())
    return root / re.sub(r"[^\w.-]+", "_", whole.rstrip("/"))


def _check_cluster(cluster: str) -> None:
    _import_submitit()
    if cluster == "slurm" and shutil.which("sbatch") is None:
        raise ExecutorError(
            "there is no `sbatch` here, so this is not a machine that can submit Slurm jobs. Run the same command on "
            "your cluster's login node, or use --executor local"
        )


def _sinfo(columns: str, *options: str) -> list[str]:
    """Return what sinfo says of the cluster's partitions or nodes; [] if it gives no answer."""
    try:
        command = ["sinfo", "-h", "-o", columns, *options]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def _gpu_kinds(cluster: str) -> set[str] | None:
    """Return the kinds of GPU that the nodes have; None if sinfo does not show them."""
    found = re.findall(r"gpu:([A-Za-z][\w.-]*)", "\n".join([] if cluster == "local" else _sinfo("%G")))
    return set(found) if found or cluster == "local" else None


def _seconds_in(limit: str) -> float:
    """Return the seconds of a limit in sinfo's form (days-hours:minutes:seconds); inf for "infinite"."""
    days, _, clock = limit.strip().rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in [*parts, days or "0"]):
        return math.inf
    return 86400.0 * int(days or 0) + sum(60.0**place * int(part) for place, part in enumerate(reversed(parts)))


def _submit_in_turn(submit: Callable[[], Handle], turn: Path) -> Handle:
    """Submit a job.  After an error, delete the turn's file, so that a repeated launch does not wait for a card."""
    try:
        return submit()
    except Exception:
        turn.unlink(missing_ok=True)
        raise


def _wait_for_card(folder: Path, handle: Handle, clock: Clock) -> Handle | None:
    """Return the handle that the launch's submitter wrote; None if it writes none within PATIENCE_S."""
    until = clock.now() + PATIENCE_S
    while (card := slurm_job.submitted(folder, handle)) is None and clock.now() < until:
        clock.sleep(0.05)
    return card


def _import_submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise ExecutorError("Slurm needs submitit: pip install 'serverless-diloco[slurm]'") from None
    return submitit


def _job_name(one: ReplicaSpec | Handle) -> str:
    """Return the job's name in Slurm, which is unique to this launch of this run."""
    return f"diloco-{short_name(one.run.rstrip('/'))}-{one.slot}.{one.attempt}"


def _scancel(handle: Handle, kill: bool) -> None:
    """Cancel by id and name.  Slurm compares the name, and leaves a job with this id and another name alone."""
    one = [f"--name={_job_name(handle)}", "--", handle.native]
    if kill:
        _run_quietly(["scancel", *one])
    else:
        _run_quietly(["scancel", "--state=PENDING", *one])
        _run_quietly(["scancel", "--state=RUNNING", "--signal=TERM", *one])


def _local_status(handle: Handle, folder: Path) -> Status:
    if slurm_job.runs_here(handle, folder):
        return Status(handle, State.RUNNING)
    if (end := slurm_job.written_end(folder)) is not None:  # written since the previous check
        return ended_as(handle, end, asked=slurm_job.was_cancelled(folder))
    state = State.CANCELLED if slurm_job.was_cancelled(folder) else State.LOST
    return Status(handle, state, "the process is gone, and left no result")


def _ask_slurm(handles: Sequence[Handle]) -> tuple[dict[str, Told], ExecutorError | None]:
    """Return (job id -> state and name, the error if Slurm did not answer, else None)."""
    ids = [h.native for h in handles]
    told, trouble = _query_table(["squeue", "-h", "-t", "all", "-o", "%i|%T %r|%j", "-j", ",".join(ids)])
    if left := [i for i in ids if i not in told]:  # squeue forgets jobs some minutes after their end
        told |= _query_table(["sacct", "-X", "-n", "-P", "-o", "JobID,State,JobName", "-j", ",".join(left)])[0]
    return {**(dict.fromkeys(ids, (FORGOTTEN, "")) if trouble is None else {}), **told}, trouble


def _query_table(command: Sequence[str]) -> tuple[dict[str, Told], ExecutorError | None]:
    """Return (the "id|state|name" lines as a dict, the error if there was no answer, else None)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return {}, Unavailable(f"`{command[0]}` gave no answer: {error}")
    rows = [line.split("|") for line in done.stdout.splitlines() if "|" in line]
    known = done.returncode == 0 or "Invalid job id" in done.stderr
    return {row[0]: (row[1], "|".join(row[2:])) for row in rows}, None if known else _no_answer(command[0], done.stderr)


def _no_answer(command: str, said: str) -> ExecutorError:
    last = (said.strip().splitlines() or ["nothing"])[-1]
    if re.search(r"authentication|credential|permission|denied", said, re.I):
        return Refused(f"Slurm refuses `{command}`: {last}. Check that munge runs here, and that this is your cluster")
    return Unavailable(f"Slurm gave `{command}` no answer: {last}")


def _run_quietly(command: Sequence[str]) -> None:
    """Run a command and ignore its errors; show errors that do not say that the job has already ended."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60)
        shown = [line for line in done.stderr.splitlines() if "Invalid job id" not in line]
        sys.stderr.writelines(f"{line}\n" for line in shown)
