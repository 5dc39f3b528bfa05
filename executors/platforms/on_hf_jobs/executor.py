"""Replicas as Hugging Face Jobs: one job per launch, which is found again by its labels.

    spec ──recipe──▶ run_job(uv run … python -m executors.platforms.container SPEC …)   labels run, slot, attempt, limit
                 └─ listed again, at every poll ─▶ two jobs of one launch: the oldest stays, the others are cancelled
                                 ─▶ a shorter time-out than asked for: cancelled, with a reason

    SCHEDULING ▶ PENDING   RUNNING ▶ RUNNING   COMPLETED ▶ SUCCEEDED   CANCELED ▶ CANCELLED   DELETED ▶ LOST
    ERROR ▶ FAILED: the log has an exit code, no replica started, or memory ran out; LOST: no report, or a kill

The Hub starts a replica's job only once, because the supervisor must know about every replacement.  The Hub starts the
supervisor's own job again when the job's host dies; a new supervisor needs the lease, so two supervisors launch no
replica twice.  This machine stores nothing.

Not promised: a warning before the platform kills a job; the run survives a SIGKILL of a replica at any moment.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from diloco.process import processes
from diloco.runlog.reader import SUPERVISOR
from diloco.units import dollars
from executors.platforms.base import ExecutorError, Handle, ReplicaSpec, Result, State, Status, Unavailable
from executors.platforms.container import ENDED, STARTED, TAIL, read_end, replica_lines
from executors.platforms.executor import Executor, Launch, launch_of
from executors.platforms.machine import oom
from executors.platforms.on_hf_jobs.client import (
    Hub,
    HubJob,
    as_executor_error,
    at_once,
    is_access_denied,
    is_transient,
)
from executors.platforms.on_hf_jobs.job_spec import CPU, IMAGE, TIMEOUT_S, Recipe
from executors.platforms.on_hf_jobs.jobs import ANSWER_S, JobLists, best_last, job_that_counts, refused
from executors.platforms.platform import NotStarted
from rendezvous.clock import Clock

NAME = "hf-jobs"
HOSTED = "executors.supervision.hosted"  # the module of a supervisor's job
WATCH_S = 12 * 3600.0  # a supervisor's time limit, if its spec has none
WATCHES = 10  # the limit of the Hub's starts of a supervisor's job; after a good end there is no further start
DOWNLOAD_GB, DOWNLOAD_S = 4.0, 180.0  # size and download time of a replica's packages; a guess, never measured there
END_LINES = 64  # last lines of a log that are read to find its end


class HFJobsExecutor(Executor):
    """The executor for Hugging Face Jobs.

    hardware: default flavor of a replica (`hf jobs hardware` lists them).
    namespace: user or organization that pays ("": the token's own).   timeout_s: default time limit of a replica.
    secrets: names of environment variables of this process; their values go only into the jobs' secrets.
    env: plain variables of every job.   image: a container image with `uv` and the Python version that runs here.
    packages: your own top-level packages or modules that the entry point needs.
    code: a requirement to run instead of the installation here, as "serverless-diloco[train,diloco]==0.1.0"; or
    "image": `image` has this project and its dependencies, and a job downloads no package.
    pip: packages that your own reward needs, in addition to those of the project.
    vllm: replicas generate with vLLM, and get the versions of packages/versions.py.
    """

    name = NAME
    pause_s = 0.5
    own_grace = True
    labelled = True
    hosts_supervisor = True

    def __init__(
        self,
        hardware: str = CPU,
        namespace: str = "",
        *,
        timeout_s: float = TIMEOUT_S,
        secrets: Sequence[str] = ("HF_TOKEN",),
        env: Mapping[str, str] | None = None,
        image: str = IMAGE,
        packages: Sequence[str] = (),
        code: str = "",
        pip: Sequence[str] = (),
        vllm: bool = False,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(clock)
        self._options = {"hardware": hardware, "namespace": namespace, "timeout_s": timeout_s, "image": image}
        self._options |= {"secrets": _split_names(secrets), "packages": _split_names(packages), "env": {**(env or {})}}
        self._options |= {"code": code, "pip": _split_names(pip), "vllm": vllm}
        self._hub = Hub(namespace, self._clock)
        self._recipe = Recipe(self._hub, **{k: v for k, v in self._options.items() if k != "namespace"})
        self._jobs = JobLists(self._hub, self._clock)

    # ------------------------------------------------------------------ starting

    def plan_line(self, spec: ReplicaSpec) -> str:
        return self._recipe.line(spec, self._recipe.flavor(spec))

    def plan_notes(self, specs: Sequence[ReplicaSpec]) -> list[str]:
        names = sorted({name for s in specs for name in self._recipe.names(s)})
        if any(not self.fault_of(s) for s in specs):
            self._hub.login()
        loads = {_download_words(self._recipe.flavor(s), self.price_of(s)) for s in specs if self._recipe.downloads}
        secrets = f"secrets from this environment: {', '.join(names) or 'none'}"
        return [secrets, f"code: {self._recipe.code_words()}", *sorted(loads)]

    def price_of(self, spec: ReplicaSpec) -> float | None:
        return self._hub.prices().get(self._recipe.flavor(spec))

    def fault_of(self, spec: ReplicaSpec) -> str:
        return self._recipe.checked(spec)[1]

    def submit(self, specs: Sequence[ReplicaSpec]) -> list[Handle | NotStarted]:
        outcomes: dict[Launch, HubJob | Exception | str] = {}
        for run in dict.fromkeys(s.run for s in specs):
            request = partial(_start_request, self._hub, self._recipe, self._options)
            outcomes |= self._jobs.start_missing(run, [s for s in specs if s.run == run], request)
        answers = {launch_of(s): _answer_from(self._hub, s.run, outcomes[launch_of(s)]) for s in specs}
        lost = {launch for launch, x in answers.items() if isinstance(x, NotStarted) and x.state is State.LOST}
        self._jobs.given_up = self._jobs.given_up.difference(answers) | lost
        return [answers[launch_of(s)] for s in specs]

    def renew(self, handles: Sequence[Handle], until: float) -> bool:
        outcomes = at_once([lambda h=h: self._hub.renew(h, until) for h in handles if h.native])
        for error in (x for x in outcomes if isinstance(x, Exception)):
            raise as_executor_error("renew the launcher's lease", error) from error
        return True

    # ------------------------------------------------------------------ watching

    def memory_key(self, handle: Handle) -> Launch:
        """Return the handle's launch: all jobs of one launch share the status of the job that counts."""
        return launch_of(handle)

    def needs_look(self, handle: Handle) -> bool:
        """Whether a poll asks about the launch; True for an abandoned launch, too, whose late job must be ended."""
        return super().needs_look(handle) if handle.native else launch_of(handle) in self._jobs.given_up

    def observe(self, handles: Sequence[Handle]) -> list[Status | ExecutorError]:
        """Return a status per handle, from one list of live jobs per run; look up a job by its id if the list lacks it.

        Cancel second jobs of one launch.
        """
        runs = list(dict.fromkeys(h.run for h in handles))
        found = at_once([lambda run=run: self._jobs.list_once(run) for run in runs], ANSWER_S)
        lists = dict(zip(runs, found, strict=True))
        jobs = [(run, job) for run, found in lists.items() if isinstance(found, list) for job in found]
        asked = [h for h in handles if h.native and isinstance(lists[h.run], list)]
        listed = {h: [j for run, j in jobs if (run, j.slot, j.attempt) == launch_of(h)] for h in asked}
        seen = at_once([lambda h=h: _look_up_status(self._hub, h, listed[h]) for h in asked], ANSWER_S)
        self._jobs.end_unwanted(jobs)
        answers = {**{h: lists[h.run] for h in handles}, **dict(zip(asked, seen, strict=True))}
        return [_status_or_error(h, answers[h]) for h in handles]

    def read_log(self, handle: Handle, tail: int | None = None) -> list[str]:
        return replica_lines(_read_log(self._hub, handle, None if tail is None else tail + END_LINES))

    def stream_log(self, handle: Handle) -> Iterator[str]:
        """Stream the log.  The client resumes a dropped stream, but raises at a 503."""
        try:
            for line in self._hub.lines(handle.native, follow=True):
                yield from replica_lines([line])
        except Exception as error:
            raise as_executor_error(f"give the log of {handle.slot}", error) from error

    def make_results(self, statuses: Sequence[Status]) -> list[Result]:
        return [_result_or_raise(r) for r in at_once([lambda s=s: self.make_result(s) for s in statuses])]

    def read_value(self, handle: Handle) -> Any:
        lines = _read_log(self._hub, handle, END_LINES)
        if all(line.startswith(ENDED) for line in lines):  # a long end, which may begin before these lines
            lines = _read_log(self._hub, handle)
        return (read_end(lines) or {}).get("value")

    # ------------------------------------------------------------------ ending

    def may_run(self, handle: Handle) -> bool:
        """Whether the launch has or had a job; even after a job's end, a second job of the launch may run."""
        return bool(handle.native)

    def stop(self, handles: Sequence[Handle], kill: bool) -> None:
        """End all jobs of these launches.  If the Hub does not tell now to which run it belongs, end it later."""
        last = {h: self.known.last_status(h) for h in handles}
        going = [h for h, known in last.items() if not (known.state.ended and known.handle.native == h.native)]
        own = at_once([lambda h=h: self._jobs.is_of_run(h.run, h.native) for h in going], ANSWER_S)
        ids = [h.native for h, is_own in zip(going, own, strict=True) if is_own is True]
        self._jobs.end([*ids, *self._jobs.of_launches(set(map(launch_of, handles)))])
        self._jobs.end_later(h.native for h, is_own in zip(going, own, strict=True) if isinstance(is_own, Exception))

    def alive(self, run: str) -> list[Handle]:
        return [handle_of(self._hub, run, job) for job in self._jobs.alive_now(run)]

    def sweep_all(self, dry_run: bool = False) -> list[str]:
        """End all jobs in this namespace that have our labels; with `dry_run`, only list them."""
        found = self._hub.patient("list jobs", self._hub.all_jobs)
        alive = [job for job in found if not job.ended]
        self._jobs.end(() if dry_run else [job.id for job in alive])
        return [f"the job {job.id} on {self.name}, {job.slot}.{job.attempt} of {job.run}" for job in alive]

    def discover(self, run: str) -> list[Handle]:
        return [handle_of(self._hub, run, job) for job in best_last(self._jobs.list_patiently(run))]

    def start_supervisor(self, spec: ReplicaSpec, replicas: Sequence[ReplicaSpec]) -> Handle:
        """Start a supervisor's job, on the cheapest hardware."""
        return self.launch_specs([replace(spec, gpu=(CPU,), timeout_s=spec.timeout_s or WATCH_S)])[0]


def _download_words(flavor: str, price: float | None) -> str:
    """Return a note for the plan on the downloads of each launch, which are billed.   price: USD per hour."""
    cost = "" if price is None else f", about {dollars(price * DOWNLOAD_S / 3600)} on {flavor}"
    return (
        f"each launch downloads its packages first (torch for CUDA and the rest, some {DOWNLOAD_GB:g} GB: minutes, "
        f"say {DOWNLOAD_S / 60:.0f}{cost}) and then the start model; a replacement does so again"
    )


def _start_request(hub: Hub, recipe: Recipe, options: Mapping[str, Any], spec: ReplicaSpec) -> Callable[[], HubJob]:
    module = (HOSTED, json.dumps(options)) if spec.slot == SUPERVISOR else ()
    wanted = recipe.job(spec, recipe.flavor(spec), *module)
    limit = recipe.limit(spec)
    attempts = WATCHES if spec.slot == SUPERVISOR else 1
    return lambda: hub.start(spec.run, spec.slot, spec.attempt, limit, attempts, **wanted)


def _look_up_status(hub: Hub, handle: Handle, listed: Sequence[HubJob]) -> Status:
    """Return the status of one launch.   listed: the launch's live jobs."""
    is_listed = any(j.id == handle.native for j in listed)
    own = None if is_listed else hub.job(handle.run, handle.native)  # the job has ended, or the list is old
    others = [] if listed else hub.jobs(handle.run, handle.slot, handle.attempt)  # ended jobs, too
    job = job_that_counts([*listed, *others, *([] if own is None else [own])])
    if job is None or job.stage == "DELETED":
        return Status(handle, State.LOST, "Hugging Face knows no such job any more")
    if job.id != handle.native:
        handle = handle_of(hub, handle.run, job)
    if job.stage == "SCHEDULING":
        return Status(handle, State.PENDING, job.message)
    if not job.ended:
        return Status(handle, State.RUNNING, job.message)
    done = job.stage == "COMPLETED" and handle.slot != SUPERVISOR  # a failed supervisor's job completes, too
    lines = [] if done else _last_lines(hub, job.id)
    began_at = job.finished - job.ran_s if job.finished else 0.0
    return replace(ended(handle, job, lines), began_at=began_at, ended_at=job.finished)


def handle_of(hub: Hub, run: str, job: HubJob) -> Handle:
    price = hub.known_price(job.flavor)
    return Handle(run, job.slot, job.attempt, NAME, native=job.id, launched_at=job.created, usd_per_hour=price)


def _answer_from(hub: Hub, run: str, outcome: HubJob | Exception | str) -> Handle | NotStarted:
    if isinstance(outcome, HubJob):
        return handle_of(hub, run, outcome)
    return NotStarted(str(outcome), State.FAILED if isinstance(outcome, str) or refused(outcome) else State.LOST)


def _read_log(hub: Hub, handle: Handle, tail: int | None = None) -> list[str]:
    return hub.patient(f"give the log of {handle.slot}", lambda: list(hub.lines(handle.native, tail=tail)))


def _last_lines(hub: Hub, job_id: str) -> list[str]:
    """Return the last lines; [] if the Hub no longer has them.  Raise if the Hub may return them later."""
    try:
        return list(hub.lines(job_id, tail=END_LINES))
    except Exception as error:
        if is_transient(error) or is_access_denied(error):
            raise
        return []


def ended(handle: Handle, job: HubJob, lines: list[str]) -> Status:
    """Return the final status of a job, from its last log lines."""
    end = read_end(lines)
    code = end["exit_code"] if end else None
    late = _timed_out(job)
    if code == 0 or (code is None and job.stage == "COMPLETED"):  # also if the job ended just before it was cancelled
        return Status(handle, State.SUCCEEDED, processes.describe_exit(0), 0)
    if job.stage == "CANCELED":
        return Status(handle, State.CANCELLED, "cancelled", code)
    if end:
        outside = oom.from_outside(code, end["reason"], job.message)
        starved = job.message if oom.says_out_of_memory(job.message) else ""
        words = "; ".join(dict.fromkeys(filter(None, (end["reason"], late, starved))))
        return Status(handle, State.LOST if outside else State.FAILED, words, code)
    if late:
        return Status(handle, State.LOST, late)
    if oom.says_out_of_memory(job.message):
        return Status(handle, State.FAILED, job.message)
    if 0 < len(lines) < END_LINES and not any(line.startswith(STARTED) for line in lines):
        last = "\n".join([job.message or "no message", *deque(lines, TAIL)])
        return Status(handle, State.FAILED, f"the job ended before the replica started: {last}")
    return Status(handle, State.LOST, f"the job ended and left no report ({job.message or 'no message'})")


def _timed_out(job: HubJob) -> str:
    """Return the reason if the platform's time limit ended the job, else "".  The reason notes an early limit."""
    if "timeout" not in job.message.lower():
        return ""
    cut = f", and not the {job.limit_s} s that were asked for" if job.ran_s < 0.9 * job.limit_s else ""
    return f"{job.message}: ended by Hugging Face after {job.ran_s:.0f} s{cut}"


def _split_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names from a list, or from the command line's "A,B"."""
    return tuple(name for name in (names.split(",") if isinstance(names, str) else names) if name)


def _status_or_error(handle: Handle, answer: object) -> Status | ExecutorError:
    """Return a status, or the error of its request.   answer: a status, an error, or a list that lacks the launch."""
    if isinstance(answer, Status):
        return answer
    if isinstance(answer, Exception):
        return as_executor_error(f"say how {handle.slot} is", answer)
    return Unavailable("its launch was given up, and no job of it is known")


def _result_or_raise(result: Result | Exception) -> Result:
    if isinstance(result, Exception):
        raise result
    return result
