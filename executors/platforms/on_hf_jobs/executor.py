"""Replicas as Hugging Face Jobs: one job per launch, found again by its labels alone.

    spec ──recipe──▶ run_job(uv run … python -m executors.platforms.container SPEC …)   labels run, slot, attempt, limit
                 └─ listed again, at every poll ─▶ two of one launch: the oldest stays, the others are cancelled
                                 ─▶ a shorter time-out than asked for: cancelled, and told

    SCHEDULING ▶ PENDING   RUNNING ▶ RUNNING   COMPLETED ▶ SUCCEEDED   CANCELED ▶ CANCELLED   DELETED ▶ LOST
    ERROR ▶ FAILED with the exit code that its last log line tells; LOST if it was cut off before that line

A replica's job is attempted once: whoever replaces it (the supervisor) must know.  The supervisor's own job is started
again by the Hub when its host dies; it takes over by its lease, so two at once launch nobody twice.  Nothing is kept on
this machine.

Not promised: what the platform does before it kills a job; a replica survives a SIGKILL at any moment.
"""

import json
import sys
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from diloco import exitcodes
from executors.platforms import container, oom, processes
from executors.platforms.base import (
    RANK_ENV,
    REPLICA,
    ExecutorError,
    Handle,
    LaunchPlan,
    ReplicaSpec,
    Result,
    State,
    Status,
    Unavailable,
    ranked_specs,
    unanswered,
    wait_for_all,
)
from executors.platforms.container import ENDED, STARTED, TAIL, read_end, replica_lines
from executors.platforms.on_hf_jobs.client import (
    Hub,
    HubJob,
    as_executor_error,
    at_once,
    is_access_denied,
    is_transient,
)
from executors.platforms.on_hf_jobs.job_spec import CPU, IMAGE, TIMEOUT_S, Recipe
from executors.supervision.lease import supervisor_of
from executors.supervision.slot_state import LOST_LEASE
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import RendezvousError

SUPERVISOR = "supervisor"
WATCH_S = 12 * 3600.0
WATCHES = 10  # times that the Hub may start one supervisor's job: it ends well, and not again, once it has said goodbye
END_LINES = 64  # of a log: enough to see how it ended
ANSWER_S = 10.0  # a poll takes no longer; what is not known by then is stale
COLLECT_S, FOLLOW_S = 0.5, 0.5


class HFJobsExecutor:
    """hardware: a flavor, for replicas that ask for none (`hf jobs hardware` lists them).

    namespace: user or organization that pays ("": the token's own).   timeout_s: of a replica that asks for none.
    secrets: names of environment variables of this process; their values go into the jobs' secrets and nowhere else.
    env: plain variables of every job.   image: any with `uv`, and Python of the version that runs here.
    packages: top-level packages or modules of yours that the entry point needs.
    code: a requirement to run instead of what is installed here, as "serverless-diloco[train,diloco]==0.1.0".
    pip: packages that a reward of your own needs, beside those that the project needs.
    """

    name = "hf-jobs"

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
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._options = {"hardware": hardware, "namespace": namespace, "timeout_s": timeout_s, "image": image}
        self._options |= {"secrets": _split_names(secrets), "packages": _split_names(packages), "env": {**(env or {})}}
        self._options |= {"code": code, "pip": _split_names(pip)}
        self._hub = Hub(namespace, self._clock)
        self._recipe = Recipe(self._hub, **{k: v for k, v in self._options.items() if k != "namespace"})
        self._handles: dict[tuple[str, str, int], Handle] = {}
        self._failed: dict[Handle, str] = {}
        self._last: dict[tuple[str, str, int], Status] = {}  # by launch
        self._lists: dict[str, list[HubJob]] = {}  # the newest list of each run
        self._doubtful: set[tuple[str, str, int]] = set()  # launches that we gave up, and that may come to be
        self._unwanted: set[str] = set()  # jobs that could not be cancelled yet

    # ------------------------------------------------------------------ starting

    def plan(self, specs: Sequence[ReplicaSpec]) -> LaunchPlan:
        recipe = self._recipe
        checked = [recipe.checked(s) for s in specs]
        lines = [recipe.line(s, flavor) for s, (flavor, _) in zip(specs, checked, strict=True)]
        prices = [self._hub.prices().get(flavor) for flavor, _ in checked]
        total = None if None in prices else sum(p for p in prices if p is not None)
        names = sorted({name for s in specs for name in recipe.names(s)})
        lines += [f"secrets from this environment: {', '.join(names) or 'none'}", f"code: {recipe.code_words()}"]
        refused = tuple(dict.fromkeys(why for _, why in checked if why))
        return LaunchPlan((*lines, *refused), total, refused)

    def launch_replicas(
        self,
        specs: Sequence[ReplicaSpec] | None = None,
        *,
        n_replicas: int = 0,
        entrypoint: str = REPLICA,
        entrypoint_args: Mapping[str, Any] | None = None,
        rank_env: str = RANK_ENV,
    ) -> list[Handle]:
        if specs is None:
            specs = ranked_specs("", n_replicas, entrypoint, entrypoint_args, rank_env)
        nameless = f"{self.name}://{uuid.uuid4().hex}"
        specs = [s if s.run else replace(s, run=nameless) for s in specs]
        new = {_launch_key(s): s for s in specs if _launch_key(s) not in self._handles}
        for run in dict.fromkeys(s.run for s in new.values()):
            self._launch_run(run, [s for s in new.values() if s.run == run])
        return [self._handles[_launch_key(s)] for s in specs]

    def _launch_run(self, run: str, specs: Sequence[ReplicaSpec]) -> None:
        """Start the jobs that do not exist yet, all at once; then check what the Hub started."""
        checked = [self._recipe.checked(s) for s in specs]
        if all(why for _, why in checked):
            raise ExecutorError(checked[0][1])
        there = {(j.slot, j.attempt): j for j in reversed(self._list_patiently(run))}  # the oldest counts
        found: dict[tuple[str, int], HubJob | Exception | str] = {**there}
        pairs = list(zip(specs, checked, strict=True))
        found |= {(s.slot, s.attempt): why for s, (_, why) in pairs if why}
        new = [(s, flavor) for s, (flavor, _) in pairs if (s.slot, s.attempt) not in found]
        outcomes = at_once([self._start_request(s, flavor) for s, flavor in new])
        if new and not there and all(refused(x) for x in outcomes):
            raise next(x for x in outcomes if isinstance(x, Exception))
        started = {(s.slot, s.attempt): x for (s, _), x in zip(new, outcomes, strict=True)}
        found |= {**started, **self._settle_duplicates(run, started)}
        for spec in specs:
            self._keep_outcome(spec, found[spec.slot, spec.attempt])

    def _list_patiently(self, run: str) -> list[HubJob]:
        return self._hub.patient("list jobs", lambda: self._list_jobs(run))

    def _list_jobs(self, run: str) -> list[HubJob]:
        self._lists[run] = found = self._hub.jobs(run)
        return found

    def _start_request(self, spec: ReplicaSpec, flavor: str) -> Callable[[], HubJob]:
        module = (
            ("executors.platforms.on_hf_jobs.executor", json.dumps(self._options)) if spec.slot == SUPERVISOR else ()
        )
        wanted = self._recipe.job(spec, flavor, *module)
        limit = self._recipe.limit(spec)
        attempts = WATCHES if spec.slot == SUPERVISOR else 1
        return lambda: self._hub.start(spec.run, spec.slot, spec.attempt, limit, attempts, **wanted)

    def _settle_duplicates(self, run: str, started: Collection[tuple[str, int]]) -> dict[tuple[str, int], HubJob | str]:
        """Of several jobs of one launch the oldest; of one whose time-out was cut short, the reason to end it."""
        (listed,) = at_once([lambda: self._list_patiently(run)]) if started else ([],)
        if isinstance(listed, Exception):  # they have been started all the same
            return {}
        first = {(j.slot, j.attempt): j for j in reversed(listed) if (j.slot, j.attempt) in started}
        short = [j for j in first.values() if not j.ended and j.given_s is not None and j.given_s < j.limit_s]
        second = [j for j in listed if (j.slot, j.attempt) in first and j not in first.values() and not j.ended]
        at_once([lambda job=job: self._cancel_job(job.id) for job in (*short, *second)])
        told = "Hugging Face gave it a time-out of {} s and not the {} s that were asked for; cancelled"
        return {**first, **{(j.slot, j.attempt): told.format(j.given_s, j.limit_s) for j in short}}

    def _keep_outcome(self, spec: ReplicaSpec, outcome: HubJob | Exception | str) -> None:
        handle = Handle(spec.run, spec.slot, spec.attempt, self.name, launched_at=self._clock.wall())
        if isinstance(outcome, HubJob):
            handle = self._handle_for(spec.run, outcome)
        else:
            self._failed[handle] = str(outcome)
        if isinstance(outcome, Exception) and not refused(outcome):
            self._doubtful.add(_launch_key(spec))
        self._handles[_launch_key(spec)] = handle

    def _handle_for(self, run: str, job: HubJob) -> Handle:
        price = self._hub.prices().get(job.flavor)
        return Handle(run, job.slot, job.attempt, self.name, native=job.id, launched_at=job.created, usd_per_hour=price)

    # ------------------------------------------------------------------ watching

    def poll(self, handles: Iterable[Handle]) -> list[Status]:
        """One list of jobs per run; and once for each job that did not end well, its last lines.

        A handle means its launch: of several live jobs of one launch the oldest counts, and the others are cancelled.
        """
        handles = list(handles)
        runs = list(dict.fromkeys(h.run for h in handles if not self._is_over(h)))
        answers = at_once([lambda run=run: self._list_jobs(run) for run in runs], ANSWER_S)
        jobs = [(run, j) for run, js in zip(runs, answers, strict=True) if isinstance(js, list) for j in js]
        silent: dict[object, Exception] = {
            run: x for run, x in zip(runs, answers, strict=True) if isinstance(x, Exception)
        }
        asked = [h for h in handles if h.native and h.run not in silent and not self._is_over(h)]
        launches = {_launch_key(h): [j for run, j in jobs if (run, j.slot, j.attempt) == _launch_key(h)] for h in asked}
        seen = at_once([lambda h=h: self._look_up_status(h, launches[_launch_key(h)]) for h in asked], ANSWER_S)
        self._last |= {_launch_key(h): s for h, s in zip(asked, seen, strict=True) if isinstance(s, Status)}
        silent |= {_launch_key(h): x for h, x in zip(asked, seen, strict=True) if isinstance(x, Exception)}
        self._end_unwanted(jobs)
        return [self._status_of(h, silent.get(h.run) or silent.get(_launch_key(h))) for h in handles]

    def _is_over(self, handle: Handle) -> bool:
        if not handle.native:
            return _launch_key(handle) not in self._doubtful
        return _launch_key(handle) in self._last and self._last[_launch_key(handle)].state.ended

    def _status_of(self, handle: Handle, trouble: Exception | None) -> Status:
        if not handle.native:
            return Status(handle, State.FAILED, self._failed.get(handle, "it could not be started"))
        known = self._last.get(_launch_key(handle)) or Status(handle, State.STARTING)
        if known.handle.native == handle.native:
            known = replace(known, handle=handle)
        if trouble is None or known.state.ended:
            return known
        return unanswered(known, as_executor_error(f"say how {handle.slot} is", trouble))

    def _look_up_status(self, handle: Handle, listed: Sequence[HubJob]) -> Status:
        """listed: the jobs of its launch."""
        own = [] if any(j.id == handle.native for j in listed) else [self._hub.job(handle.native)]  # a list may lag
        job = job_that_counts([*listed, *(j for j in own if j is not None)])
        if job is None or job.stage == "DELETED":
            return Status(handle, State.LOST, "Hugging Face knows no such job any more")
        if job.id != handle.native:
            handle = self._handle_for(handle.run, job)
        if job.stage == "SCHEDULING":
            return Status(handle, State.PENDING, job.message)
        if job.stage == "COMPLETED" and handle.slot != SUPERVISOR:  # a supervisor's job ends well however it ended
            return Status(handle, State.SUCCEEDED, processes.describe_exit(0), 0)
        if not job.ended:
            return Status(handle, State.RUNNING, job.message)
        return ended(handle, job, self._last_lines(job.id))

    def _last_lines(self, job_id: str) -> list[str]:
        """Empty if the Hub has none any more; raises if it may give them later."""
        try:
            return list(self._hub.lines(job_id, tail=END_LINES))
        except Exception as error:
            if is_transient(error) or is_access_denied(error):
                raise
            return []

    def logs(self, handle: Handle, tail: int | None = None) -> list[str]:
        if not handle.native:
            return self._failed.get(handle, "").splitlines()
        told = None if tail is None else tail + END_LINES
        lines = replica_lines(self._read_log(handle, told))
        return lines if tail is None else lines[-tail:] if tail > 0 else []

    def _read_log(self, handle: Handle, tail: int | None = None) -> list[str]:
        what = f"give the log of {handle.slot}"
        return self._hub.patient(what, lambda: list(self._hub.lines(handle.native, tail=tail)))

    def follow(self, handle: Handle, tail: int | None = None) -> Iterator[str]:
        """The client resumes a dropped stream; where it gives up (a 503 is enough), we count what was told."""
        if not handle.native:
            yield from self.logs(handle, tail)
            return
        told = 0 if tail is None else max(0, len(self.logs(handle)) - tail)
        while True:
            over = self.poll([handle])[0].state.ended
            at = 0
            try:
                for line in self._hub.lines(handle.native, follow=True):
                    if not replica_lines([line]):
                        continue
                    at += 1
                    if at > told:
                        told = at
                        yield line
                if over:
                    return
            except Exception as error:
                if not is_transient(error):
                    raise as_executor_error(f"give the log of {handle.slot}", error) from error
            self._clock.sleep(FOLLOW_S)

    def collect(self, handles: Sequence[Handle], timeout: float | None = None) -> list[Result]:
        statuses = wait_for_all(lambda: self.poll(handles), self._clock, timeout, COLLECT_S)
        return [_result_or_raise(r) for r in at_once([lambda s=s: self._make_result(s, timeout) for s in statuses])]

    def _make_result(self, status: Status, timeout: float | None) -> Result:
        handle = status.handle
        state = status.state
        reason = status.reason
        code = status.exit_code
        if not state.ended:
            return Result(handle, state, f"still running after {timeout:g} s", code)
        if not handle.native:
            return Result(handle, state, reason, tail=tuple(reason.splitlines()[-TAIL:]))
        if state is State.SUCCEEDED:
            return Result(handle, state, reason, code, self._returned_value(handle))
        return Result(handle, state, reason, code, tail=tuple(self.logs(handle, TAIL)))

    def _returned_value(self, handle: Handle) -> Any:
        lines = self._read_log(handle, END_LINES)
        if all(line.startswith(ENDED) for line in lines):  # a long one: it may begin before these lines
            lines = self._read_log(handle)
        return (read_end(lines) or {}).get("value")

    # ------------------------------------------------------------------ ending

    def cancel(self, handles: Iterable[Handle], grace_s: float = 15.0) -> None:
        """The platform asks, and kills when it likes: it takes no grace."""
        handles = [h for h in handles if h.native]
        going = [
            h.native for h in handles if not (self._is_over(h) and self._last[_launch_key(h)].handle.native == h.native)
        ]
        launches = {_launch_key(h) for h in handles}
        listed = [(run, job) for run, jobs in self._lists.items() for job in jobs]
        others = [j.id for run, j in listed if (run, j.slot, j.attempt) in launches and not j.ended]
        at_once([lambda job=job: self._cancel_job(job) for job in dict.fromkeys([*going, *others])])

    def _cancel_job(self, job_id: str) -> None:
        """Now, or if the Hub does not listen with the next poll."""
        try:
            self._hub.cancel(job_id)
            self._unwanted.discard(job_id)
        except ExecutorError as error:
            self._unwanted.add(job_id)
            print(f"warning: {error}; asking again", file=sys.stderr, flush=True)

    def _end_unwanted(self, jobs: Iterable[tuple[str, HubJob]]) -> None:
        """End those that we wanted to end, what came of launches that we gave up, and second jobs of one launch."""
        alive = [(run, job) for run, job in jobs if not job.ended]
        ids = [j.id for run, j in alive if j.id in self._unwanted or (run, j.slot, j.attempt) in self._doubtful]
        ids += [j.id for _, j in second_jobs(alive)]
        at_once([lambda job=job: self._cancel_job(job) for job in dict.fromkeys(ids)], ANSWER_S)

    def orphans(self, run: str, known: Collection[Handle]) -> list[Handle]:
        """Live jobs of the run, in its newest list, that none of `known` names."""
        natives = {h.native for h in known}
        alive = [j for j in self._lists.get(run, ()) if not j.ended and j.id not in natives]
        return [self._handle_for(run, job) for job in alive]

    def sweep(self, run: str) -> list[str]:
        """Cancel every job of the run that lives, whoever started it; -> those that did."""
        alive = [job for job in self._list_patiently(run) if not job.ended]
        at_once([lambda job=job: self._cancel_job(job.id) for job in alive])
        return [f"{job.slot}.{job.attempt}: {job.id} on {self.name}" for job in alive]

    def find(self, run: str) -> list[Handle]:
        """Per slot the job that runs, else the one that was launched last."""
        found: dict[str, HubJob] = {}
        for job in self._list_patiently(run):
            best = found.get(job.slot)
            if best is None or _rank_for_slot(job) > _rank_for_slot(best):
                found[job.slot] = job
        return [self._handle_for(run, found[slot]) for slot in sorted(found)]

    def close(self) -> None:
        """Nothing to let go."""

    # ------------------------------------------------------------------ who watches

    def supervise(self, run: str) -> Handle:
        """A supervisor for the run as a job on the cheapest hardware; the one that runs already, if there is one."""
        found = [h for h in self.find(run) if h.slot == SUPERVISOR]
        if found and not self.poll(found)[0].state.ended:
            return found[0]
        return self.start_supervisor(run, 1 + max((h.attempt for h in found), default=0))

    def start_supervisor(self, run: str, attempt: int) -> Handle:
        """With what the replicas are given, since it starts them."""
        from executors.platforms.multi import places_of  # which imports us
        from rendezvous.membership import read_control
        from rendezvous.seal import open_sealed

        here = [p for p in places_of(read_control(open_sealed(run)).places) if p.executor == self.name]
        env = {name: value for place in here for name, value in place.env.items()}
        secrets = tuple(dict.fromkeys(name for place in here for name in place.secrets))
        entry = ReplicaSpec(
            run, SUPERVISOR, attempt, "executors.supervision.supervisor:main", (run,), env=env, gpu=(CPU,)
        )
        return self.launch_replicas([replace(entry, secrets=secrets, timeout_s=WATCH_S)])[0]


def main(argv: list[str]) -> int:
    """A supervisor's job: as any other, and at its time limit it starts the next one.

    The Hub starts it again after any exit code but 0, so only an end without a word to the run has another.
    """
    code = container.main(argv[:2])
    spec = ReplicaSpec.from_dict(json.loads(argv[0]))
    if code == exitcodes.RESUME:
        HFJobsExecutor(**json.loads(argv[2])).start_supervisor(spec.run, spec.attempt + 1)
        return 0
    return code if _cut_off(spec.run, code) else 0


def _cut_off(run: str, code: int) -> bool:
    """Did a supervisor end without a goodbye, and is nobody else there?"""
    from rendezvous.seal import open_sealed

    if code in (exitcodes.DONE, exitcodes.USER_ERROR, LOST_LEASE):
        return False
    try:
        return supervisor_of(open_sealed(run)) is not None
    except RendezvousError:
        return True


def ended(handle: Handle, job: HubJob, lines: list[str]) -> Status:
    """The final status of a job, from its last log lines."""
    told = read_end(lines)
    code = told["exit_code"] if told else None
    late = _timed_out(job)
    if code == 0 or (code is None and job.stage == "COMPLETED"):  # it was done before it could be cancelled
        return Status(handle, State.SUCCEEDED, processes.describe_exit(0), 0)
    if job.stage == "CANCELED":
        return Status(handle, State.CANCELLED, "cancelled", code)
    if told:
        outside = oom.from_outside(code, told["reason"], job.message)
        words = "; ".join(
            dict.fromkeys(
                x for x in (told["reason"], late, job.message if oom.says_out_of_memory(job.message) else "") if x
            )
        )
        return Status(handle, State.LOST if outside else State.FAILED, words, code)
    if late:
        return Status(handle, State.LOST, late)
    if oom.says_out_of_memory(job.message):
        return Status(handle, State.FAILED, job.message)
    if 0 < len(lines) < END_LINES and not any(line.startswith(STARTED) for line in lines):
        last = "\n".join([job.message or "no message", *deque(lines, TAIL)])
        return Status(handle, State.FAILED, f"the job ended before the replica started: {last}")
    return Status(handle, State.LOST, f"gone without a word ({job.message or 'no message'})")


def _timed_out(job: HubJob) -> str:
    """Did the platform's time limit end it?  If that came before its time: with what was asked for."""
    if "timeout" not in job.message.lower():
        return ""
    cut = f", and not the {job.limit_s} s that were asked for" if job.ran_s < 0.9 * job.limit_s else ""
    return f"{job.message}: ended by Hugging Face after {job.ran_s:.0f} s{cut}"


def job_that_counts(jobs: Iterable[HubJob]) -> HubJob | None:
    """Of the jobs of one launch the one that runs it: the oldest that lives, else the oldest that nobody cancelled."""
    rank = lambda job: (job.ended, job.stage == "CANCELED", *job.age)  # noqa: E731
    return min(jobs, key=rank, default=None)


def second_jobs(alive: Iterable[tuple[str, HubJob]]) -> list[tuple[str, HubJob]]:
    """Of the live jobs of each launch all but the oldest."""
    found: list[tuple[str, HubJob]] = []
    there = set[tuple[str, str, int]]()
    for run, job in sorted(alive, key=lambda pair: pair[1].age):
        launch = (run, job.slot, job.attempt)
        found += [(run, job)] if launch in there else []
        there.add(launch)
    return found


def refused(outcome: object) -> bool:
    """Is it certain that no job came of it?"""
    return isinstance(outcome, ExecutorError) and not isinstance(outcome, Unavailable)


def _split_names(told: Sequence[str]) -> tuple[str, ...]:
    """Names as a list, or as the command line gives them: "A,B"."""
    return tuple(name for name in (told.split(",") if isinstance(told, str) else told) if name)


def _launch_key(spec: ReplicaSpec | Handle) -> tuple[str, str, int]:
    return spec.run, spec.slot, spec.attempt


def _rank_for_slot(job: HubJob) -> tuple[bool, int, float]:
    """Higher is rather the one that a slot's handle should name; of two of one attempt it is the oldest."""
    return not job.ended, job.attempt, -job.created


def _result_or_raise(result: Result | Exception) -> Result:
    if isinstance(result, Exception):
        raise result
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
