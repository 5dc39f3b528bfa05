"""Keeps the Hub's last list of each run's jobs: decides which job of a launch counts, and which jobs must be ended.

    list_once(run) ─▶ jobs that have not ended, the oldest first    kept: `alive` and `of_launches` make no request
    end(ids)      ─▶ cancelled now, or with the next poll if the Hub does not answer
    given_up      launches that got no answer; if such a launch did start a job, the next poll ends that job

Not promised: that a job which was just started is listed.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Sequence

from executors.platforms.base import ExecutorError, ReplicaSpec, Unavailable
from executors.platforms.executor import Launch, launch_of
from executors.platforms.on_hf_jobs.client import ENOUGH_S, Hub, HubJob, at_once
from rendezvous.clock import Clock

ANSWER_S = 10.0  # time limit of a poll's requests; a status without an answer by then is stale
LISTED_S = 5.0  # maximal age in seconds of the list of live jobs; every poll makes a new list


class JobLists:
    """The newest list of each run."""

    def __init__(self, hub: Hub, clock: Clock) -> None:
        self.given_up: set[Launch] = set()
        self._hub = hub
        self._clock = clock
        self._lists: dict[str, list[HubJob]] = {}
        self._listed_at: dict[str, float] = {}
        self._unwanted: set[str] = set()  # jobs that could not be cancelled yet

    def list_patiently(self, run: str) -> list[HubJob]:
        """List all jobs of a run, also those that have ended."""
        return self._hub.patient("list jobs", lambda: self.list_once(run, alive=False))

    def list_once(self, run: str, *, alive: bool = True) -> list[HubJob]:
        """List the live jobs of a run, or of all runs, without a retry."""
        self._listed_at[run] = self._clock.now()
        self._lists[run] = found = self._hub.jobs(run, alive=alive)
        return found

    def alive_now(self, run: str) -> list[HubJob]:
        """Return the live jobs in the run's list, read again if older than LISTED_S; [] if it was never read."""
        if self._clock.now() - self._listed_at.get(run, float("inf")) > LISTED_S:
            at_once([lambda: self.list_once(run)], ANSWER_S)  # without an answer the old list counts
        return self.alive(run)

    def alive(self, run: str) -> list[HubJob]:
        return [job for job in self._lists.get(run, ()) if not job.ended]

    def of_launches(self, launches: Collection[Launch]) -> list[str]:
        """Return the ids of all live jobs of these launches."""
        return [j.id for run in self._lists for j in self.alive(run) if (run, j.slot, j.attempt) in launches]

    def start_missing(
        self, run: str, specs: Sequence[ReplicaSpec], request: Callable[[ReplicaSpec], Callable[[], HubJob]]
    ) -> dict[Launch, HubJob | Exception | str]:
        """Start the jobs that do not exist yet, all at once; then check which jobs the Hub started."""
        there = {(run, j.slot, j.attempt): j for j in reversed(self.list_patiently(run))}  # the oldest counts
        new = [s for s in specs if launch_of(s) not in there]
        outcomes = at_once(list(map(request, new)))
        if new and len(new) == len(specs) and all(refused(x) for x in outcomes):
            raise next(x for x in outcomes if isinstance(x, Exception))
        started = dict(zip(map(launch_of, new), outcomes, strict=True))
        return {**there, **started, **self._settle_duplicates(run, started)}

    def _settle_duplicates(self, run: str, started: Collection[Launch]) -> dict[Launch, HubJob | str]:
        """End duplicate jobs and jobs with too short a time-out.

        Return the oldest job of each launch, or the reason if it was ended.
        """
        (listed,) = at_once([lambda: self.list_patiently(run)]) if started else ([],)
        if isinstance(listed, Exception):  # the jobs run all the same; a later poll ends duplicates
            return {}
        by_launch = [((run, j.slot, j.attempt), j) for j in listed]
        first = {launch: j for launch, j in reversed(by_launch) if launch in started}
        short = [j for j in first.values() if not j.ended and j.given_s is not None and j.given_s < j.limit_s]
        second = [j for launch, j in by_launch if launch in first and j not in first.values() and not j.ended]
        self.end(job.id for job in (*short, *second))
        text = "Hugging Face gave it a time-out of {} s and not the {} s that were asked for; cancelled"
        return {**first, **{(run, j.slot, j.attempt): text.format(j.given_s, j.limit_s) for j in short}}

    def is_of_run(self, run: str, job_id: str) -> bool:
        """Whether the job belongs to the run, by its label at the Hub (a forged log could name any job)."""
        return any(job.id == job_id for job in self.alive(run)) or self._hub.job(run, job_id) is not None

    def end(self, ids: Iterable[str], within_s: float = ENOUGH_S) -> None:
        at_once([lambda job=job: self._cancel(job) for job in dict.fromkeys(ids)], within_s)

    def end_later(self, ids: Iterable[str]) -> None:
        """Mark jobs to be ended at the next poll, if the Hub then lists them under a polled run."""
        self._unwanted.update(ids)

    def _cancel(self, job_id: str) -> None:
        try:
            self._hub.cancel(job_id)
            self._unwanted.discard(job_id)
        except ExecutorError as error:
            self._unwanted.add(job_id)
            print(f"warning: {error}; asking again", file=sys.stderr, flush=True)

    def end_unwanted(self, jobs: Iterable[tuple[str, HubJob]]) -> None:
        """End the jobs that `end_later` marked, jobs of abandoned launches, and duplicates."""
        alive = [(run, job) for run, job in jobs if not job.ended]
        ids = [j.id for run, j in alive if j.id in self._unwanted or (run, j.slot, j.attempt) in self.given_up]
        self.end([*ids, *(j.id for _, j in second_jobs(alive))], ANSWER_S)


def job_that_counts(jobs: Iterable[HubJob]) -> HubJob | None:
    """Return the job that counts for a launch: the oldest live job, else the oldest not cancelled, else the oldest."""
    rank = lambda job: (job.ended, job.stage == "CANCELED", *job.age)  # noqa: E731
    return min(jobs, key=rank, default=None)


def second_jobs(alive: Iterable[tuple[str, HubJob]]) -> list[tuple[str, HubJob]]:
    """Return all live jobs of each launch except the oldest."""
    found: list[tuple[str, HubJob]] = []
    there = set[Launch]()
    for run, job in sorted(alive, key=lambda pair: pair[1].age):
        launch = (run, job.slot, job.attempt)
        found += [(run, job)] if launch in there else []
        there.add(launch)
    return found


def best_last(jobs: Iterable[HubJob]) -> list[HubJob]:
    """Sort jobs, the best of each slot last.  A live job is better, then a newer attempt, then an older job."""
    youngest_first = sorted(jobs, key=lambda job: job.age, reverse=True)
    return sorted(youngest_first, key=lambda job: (not job.ended, job.attempt))


def refused(outcome: object) -> bool:
    """Whether it is certain that this outcome of a start left no job."""
    return isinstance(outcome, ExecutorError) and not isinstance(outcome, Unavailable)
