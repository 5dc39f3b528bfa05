"""The calls to the Hugging Face Hub that the Jobs executor needs, with the retries that its client lacks.

    request ─▶ answered            return the answer
            ├▶ 408 429 5xx, no connection, no answer ─▶ pause ─▶ again          reads, cancel
            │                                          └▶ look by label first, then again    start: the job may exist
            ├▶ 401 403             Refused: no retry, because only a token with other rights would help
            └▶ any other refusal   ExecutorError: what the Hub says and, if we know it, what to do next

    labels of a job: run (readable part - digest of the run's URL), slot, attempt, limit (the seconds asked for), and
                     until: the Unix time at which the lease of a launcher without a supervisor ends (short_form.py)

Not promised: that the Hub lists a new job at once.  So `start` may start a second job; a later poll ends that job.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from executors.platforms.base import ExecutorError, Handle, Refused, Unavailable, short_name
from executors.platforms.packages.wheel import Shipment
from inner.network import network_words
from rendezvous.clock import Clock, SystemClock

T = TypeVar("T")
PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds between tries
ANSWER_S = 20.0  # limit for one answer of the Hub
ENOUGH_S = 120.0  # limit for a request with all its tries
PRICES_AGAIN_S = 60.0  # seconds between two requests for the prices of existing jobs
UNTIL = "until"  # the job label with the end of the lease
ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETED")  # a job in any other stage, also an unknown stage, is alive
NAMESPACE = "DILOCO_JOBS_NAMESPACE"  # environment variable of a job with a lease
PER_HOUR = {"second": 3600, "minute": 60, "hour": 1}
HINTS = {
    401: "the token is not valid: `hf auth login`, or set HF_TOKEN",
    402: "Jobs are paid in advance: add credits at https://huggingface.co/settings/billing",
    403: "Jobs need a Pro, Team or Enterprise plan and a token that may write and start jobs: "
    "https://huggingface.co/settings/tokens",
}


@dataclass(frozen=True)
class HubJob:
    """One job of a run, as the Hub reports it.

    limit_s: the requested time-out.   given_s: the Hub's time-out for the job; None if the Hub reports none.
    ran_s: the billed seconds.   finished: Unix time of the end; 0 until the job has ended.
    run: the run's label.
    """

    id: str
    slot: str
    attempt: int
    stage: str
    message: str = ""
    created: float = 0.0
    flavor: str = ""
    limit_s: int = 0
    given_s: int | None = None
    ran_s: float = 0.0
    finished: float = 0.0
    run: str = ""

    @property
    def ended(self) -> bool:
        return self.stage in ENDED

    @property
    def age(self) -> tuple[float, str]:
        """A key that sorts jobs from old to new, in the same order in every process."""
        return self.created, self.id


class Hub:
    """A client for one namespace of the Hub.   namespace: a user or organization; "": the token's own namespace."""

    def __init__(self, namespace: str, clock: Clock) -> None:
        try:
            import huggingface_hub
        except ImportError:
            raise ExecutorError(
                "HF Jobs need the package huggingface_hub: pip install 'serverless-diloco[serverless]'"
            ) from None
        self._sdk = huggingface_hub
        self._clock = clock
        self._namespace = namespace
        self._login = ""
        self._endpoint = os.environ.get("HF_ENDPOINT") or None  # the SDK reads it only once, at its import
        self._prices: dict[str, float | None] = {}
        self._prices_again = float("-inf")  # the time from which `known_price` may request prices again
        self._live = {stage.value for stage in huggingface_hub.JobStage}.difference(ENDED)  # new ones are added
        self._lock = threading.Lock()

    # ------------------------------------------------------------------ account

    @property
    def token(self) -> str:
        if not (token := self._sdk.get_token()):
            raise Refused(
                "no credentials for Hugging Face: neither HF_TOKEN nor a login was found. Next: `hf auth login`"
            )
        return token

    @property
    def api(self) -> Any:
        """A client with the present token of this process.  Its requests end after ANSWER_S: the SDK sets no limit."""
        self._sdk.utils.get_session().timeout = ANSWER_S
        return self._sdk.HfApi(endpoint=self._endpoint, token=self.token)

    @property
    def namespace(self) -> str:
        return self._namespace or self.login()

    def login(self) -> str:
        """Return the account's name, requested once.  Raise Refused if the Hub does not know this token."""
        with self._lock:
            self._login = self._login or self.patient("whoami", lambda: self.api.whoami()["name"])
            return self._login

    # ------------------------------------------------------------------ patience

    def patient(self, what: str, request: Callable[[], T], pauses: Sequence[float] = PAUSES) -> T:
        """Return the answer to a request.  After a transient error, repeat the request, once after each pause.

        Raise any other error at once, as an ExecutorError.   what: the request, for the error's text."""
        for pause in (*pauses, None):
            try:
                return request()
            except Exception as error:
                if pause is None or not is_transient(error):
                    raise as_executor_error(what, error) from error
                self._clock.sleep(pause)
        raise AssertionError("the last try returns or raises")

    # ------------------------------------------------------------------ hardware

    def prices(self) -> dict[str, float | None]:
        """Return dollars per hour of each flavor; None if we do not know the Hub's unit of time."""
        if not self._prices:
            rows = self.patient("list the hardware", lambda: self.api.list_jobs_hardware())
            units = {row.name: PER_HOUR.get(row.unit_label) for row in rows}
            self._prices = {r.name: None if (n := units[r.name]) is None else r.unit_cost_usd * n for r in rows}
        return self._prices

    def known_price(self, flavor: str) -> float | None:
        """Return the flavor's price; None (not an error, which would hide a job) if the Hub lists no prices now."""
        if not self._prices and self._clock.now() >= self._prices_again:
            self._prices_again = self._clock.now() + PRICES_AGAIN_S
            with suppress(ExecutorError):
                self.prices()
        return self._prices.get(flavor)

    # ------------------------------------------------------------------ jobs

    def jobs(self, run: str, slot: str = "", attempt: int = 0, *, alive: bool = False) -> list[HubJob]:
        """Return all jobs of a run, or of one launch, the oldest first.  One try: the caller handles an error.

        alive: only jobs that have not ended, because a long run has thousands of ended jobs.
        """
        labels = {"run": run_label(run)} | ({"slot": slot, "attempt": str(attempt)} if slot else {})
        jobs = self._list_jobs(labels, sorted(self._live) if alive else ())
        return sorted((job for job in jobs if job.run == labels["run"]), key=lambda job: job.age)

    def all_jobs(self) -> list[HubJob]:
        """List the jobs of all runs, of any launcher: a job with a run, a slot and an attempt is ours.  One try."""
        return [job for job in self._list_jobs({}) if job.run and job.slot and job.attempt]

    def _list_jobs(self, labels: Mapping[str, str], stages: Sequence[str] = ()) -> Iterator[HubJob]:
        """Yield jobs, page by page.  The client's `list_jobs` would hide the Hub's time-out, and retry for too long."""
        from huggingface_hub.utils import get_session, hf_raise_for_status

        api = self.api
        url: str | None = f"{api.endpoint}/api/jobs/{self.namespace}"
        params: Any = [("stage", stage) for stage in stages]
        params += [("label", f"{key}={value}") for key, value in labels.items()]
        while url:
            headers = self._sdk.utils.build_hf_headers(token=api.token)
            reply = get_session().get(url, params=params, headers=headers, timeout=ANSWER_S)
            hf_raise_for_status(reply)
            for row in reply.json():
                yield self._job_from(self._sdk.JobInfo(**row), row.get("timeoutSeconds", row.get("timeout")))
            url = reply.links.get("next", {}).get("url")
            params = None

    def job(self, run: str, job_id: str) -> HubJob | None:
        """Return one job of the run; None if the Hub does not know the job, or if another run owns it.  One try."""
        try:
            info = self.api.inspect_job(job_id=job_id, namespace=self.namespace)
        except Exception as error:
            if status_of(error) == 404:
                return None
            raise
        job = self._job_from(info)
        return job if job.run == run_label(run) else None

    def start(self, run: str, slot: str, attempt: int, limit_s: int, attempts: int = 1, **wanted: Any) -> HubJob:
        """Start one job, which the Hub starts at most `attempts` times.

        After an unclear answer, look for the job before the next try, which would start a second job.
        """
        labels = {"run": run_label(run), "slot": slot, "attempt": str(attempt), "limit": str(limit_s)}
        asked = {**wanted, "timeout": limit_s, "attempts": attempts, "labels": labels, "namespace": self.namespace}
        name = f"{labels['run']}-{slot}-{attempt}"[:100]
        known: list[HubJob] = []
        for pause in (*PAUSES, None):
            try:
                return known[0] if known else self._job_from(self.api.run_job(**asked, name=name))
            except Exception as error:
                if pause is None or not is_transient(error):
                    raise as_executor_error(f"start {slot}", error) from error
                self._clock.sleep(pause)
                known = self.patient("list jobs", lambda: self.jobs(run, slot, attempt))
        raise AssertionError("the last try returns or raises")

    def cancel(self, job_id: str) -> None:
        """Cancel a job, in at most two tries.  A job that the Hub does not know is not an error."""
        self.patient(f"cancel {job_id}", lambda: self._cancel(job_id), PAUSES[:1])

    def _cancel(self, job_id: str) -> None:
        try:
            self.api.cancel_job(job_id=job_id, namespace=self.namespace)
        except Exception as error:
            if status_of(error) != 404:
                raise

    def renew(self, handle: Handle, until: float) -> None:
        """Write into the job's labels the Unix time at which its launcher's lease ends."""
        job = self.job(handle.run, handle.native)
        if job is not None and not job.ended:
            labels = {"run": job.run, "slot": job.slot, "attempt": str(job.attempt), "limit": str(job.limit_s)}
            labels[UNTIL] = str(int(until))
            self.api.update_job_labels(job_id=job.id, labels=labels, namespace=self.namespace)

    def lines(self, job_id: str, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """Yield the lines of a job.   follow: until the job ends; else until the output pauses for a few seconds."""
        yield from self.api.fetch_job_logs(job_id=job_id, namespace=self.namespace, follow=follow, tail=tail)

    def _job_from(self, info: Any, given: Any = None) -> HubJob:
        """Return a job.   given: the Hub's time-out, which the client's JobInfo lacks."""
        labels = info.labels or {}
        ran = (info.durations and info.durations.running_secs) or 0.0
        began, finished = (at.timestamp() if at else 0.0 for at in (info.started_at, info.finished_at))
        if began and abs(finished - began - ran) < 1.0:  # the Hub's duration is in whole seconds
            ran = finished - began
        number = labels.get("attempt", "")
        limit = labels.get("limit", "")
        stage = str(getattr(info.status.stage, "value", info.status.stage))
        self._live |= {stage}.difference(ENDED)
        return HubJob(
            id=info.id, run=labels.get("run", ""), slot=labels.get("slot", ""),
            attempt=int(number) if number.isdecimal() else 0,
            stage=stage, message=info.status.message or "",
            created=info.created_at.timestamp() if info.created_at else 0.0,
            flavor=str(getattr(info.flavor, "value", info.flavor)),
            limit_s=int(limit) if limit.isdecimal() else 0, given_s=given if isinstance(given, int) else None,
            ran_s=ran, finished=finished,
        )  # fmt: skip

    # ------------------------------------------------------------------ code

    def upload(self, bucket: str, shipment: Shipment) -> str:
        """Upload the files to {digest}/ of the private bucket, unless they exist there; return the bucket's id."""
        bucket_id = f"{self.namespace}/{bucket}"
        files = [(body, f"{shipment.digest}/{name}") for name, body in shipment.files.items()]
        what = f"upload the code to the bucket {bucket_id}"
        self.patient(what, lambda: self.api.create_bucket(bucket_id, private=True, exist_ok=True))
        names = [name for _, name in files]
        there = self.patient(what, lambda: {f.path for f in self.api.get_bucket_paths_info(bucket_id, names)})
        missing = [(body, name) for body, name in files if name not in there]
        if missing:
            self.patient(what, lambda: self._add_files(bucket_id, missing))
        return bucket_id

    def _add_files(self, bucket_id: str, files: list[tuple[bytes, str]]) -> None:
        """Add files without the client's progress bars."""
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

        quiet = are_progress_bars_disabled()
        disable_progress_bars()
        try:
            self.api.batch_bucket_files(bucket_id, add=files)
        finally:
            if not quiet:
                enable_progress_bars()


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later.  (The Hub may have executed it in spite of the error.)"""
    if (status := status_of(error)) is not None:
        return status in (408, 425, 429) or status >= 500
    client = any(c.__module__.startswith(("httpx", "httpcore")) for c in type(error).__mro__)
    return client or isinstance(error, ConnectionError | TimeoutError)


def is_access_denied(error: BaseException) -> bool:
    """Whether the Hub denies access, which says nothing about the request itself."""
    return status_of(error) in (401, 403)


def status_of(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def as_executor_error(what: str, error: Exception) -> ExecutorError:
    """Return the Hub's error as an ExecutorError, with the next thing to do if the status tells it."""
    if isinstance(error, ExecutorError):
        return error
    words = network_words(error) if is_transient(error) else " ".join(str(error).split())
    said = getattr(error, "server_message", None) or f"{type(error).__name__}: {words}"
    hint = HINTS.get(status_of(error) or 0)
    kind = Unavailable if is_transient(error) else Refused if is_access_denied(error) else ExecutorError
    return kind(f"Hugging Face would not {what}: {said}" + (f". Next: {hint}" if hint else ""))


def until_here() -> float:
    """Return the time that `renew` wrote last into the labels of this process's job; 0 if they lack it."""
    hub = Hub(os.environ.get(NAMESPACE, ""), SystemClock())
    labels = hub.api.inspect_job(job_id=os.environ["JOB_ID"], namespace=hub.namespace).labels or {}
    return float(labels.get(UNTIL, 0.0))


def run_label(run: str) -> str:
    """Return the label of a run, the same for a URL with and without a slash at its end."""
    return short_name(run.rstrip("/"), 16)


def at_once(requests: Sequence[Callable[[], T]], within_s: float = ENOUGH_S) -> list[T | Exception]:
    """Run all requests in parallel; return the value or exception of each, a TimeoutError for a missing answer."""
    found: list[T | Exception] = [TimeoutError(f"no answer within {within_s:.0f} s") for _ in requests]

    def run(i: int, request: Callable[[], T]) -> None:
        try:
            found[i] = request()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i, r), daemon=True) for i, r in enumerate(requests)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return list(found)
