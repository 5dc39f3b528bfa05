"""The base class of all platforms' executors: launch, poll, cancel and collect, in terms of a platform's methods.

    launch_replicas ─▶ fault_of(spec) ─▶ submit(specs)     a handle each, FAILED with a reason if it could not start
    poll            ─▶ deadlines ─▶ observe(handles)       one batch; without an answer the last status, as stale
    cancel          ─▶ stop(handles, kill=False)           after the grace a later poll calls stop(handles, kill=True)
    collect         ─▶ poll until all have ended           then read_value(handle), or the last lines of its log
    logs, follow    ─▶ read_log(handle, tail)              each line once, also after a dropped connection
    find            ─▶ discover(run)                       the newest process of each slot
    orphans, sweep  ─▶ alive(run)                          only on a platform that labels its processes

A platform is a subclass that implements the methods on the right (platform.py).  The subclass stores its connection;
`KnownLaunches` stores the status of processes.  We chose a subclass, not a member, because users call its constructor,
`SkyExecutor(infra="aws")`, and `--option KEY=VALUE` is checked against that one signature.

Several threads may use one executor.  Its requests run one after the other (`in_turn`), except waiting, and reading or
following logs.

Not promised: that a poll answers during another thread's launch; it waits for that launch.
"""

import re
import threading
from abc import ABC
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from executors.platforms.base import (
    ExecutorError,
    FleetExecutor,
    Handle,
    LaunchPlan,
    ReplicaSpec,
    Result,
    State,
    Status,
    Unavailable,
    last_lines,
    unanswered,
)
from executors.platforms.platform import NotStarted, Platform
from rendezvous.clock import Clock, SystemClock

if TYPE_CHECKING:
    from executors.platforms.short_form import Leash

GRACE_S, END_S = 15.0, 120.0  # at the end of a `with` block: seconds for processes to leave, and to wait for their ends
Launch = tuple[str, str, int]
P = ParamSpec("P")
T = TypeVar("T")


def in_turn(method: "Callable[Concatenate[Executor, P], T]") -> "Callable[Concatenate[Executor, P], T]":
    """Decorate a method so that only one thread at a time runs one of the decorated methods."""

    @wraps(method)
    def alone(self: "Executor", *args: P.args, **kwargs: P.kwargs) -> T:
        with self.turn:
            return method(self, *args, **kwargs)

    return alone


class KnownLaunches:
    """The launches of one executor: their handles, and the platform's last answer about each process."""

    def __init__(self, platform: Platform) -> None:
        self.handles: dict[Launch, Handle] = {}
        self._platform = platform
        self._not_started: dict[Handle, NotStarted] = {}
        self._known: dict[Hashable, Status] = {}

    def keep(self, spec: ReplicaSpec, answer: Handle | NotStarted, at: float) -> Handle:
        """Store the platform's answer to a launch at Unix time `at`; return its handle, which may have no process."""
        if isinstance(answer, Handle):
            self.handles[launch_of(spec)] = answer
            return answer
        handle = replace(self._platform.new_handle(spec), launched_at=at)
        self._not_started[handle] = answer
        return handle

    def forget(self, run: str) -> None:
        self.handles = {launch: handle for launch, handle in self.handles.items() if launch[0] != run}

    def note(self, handle: Handle, answer: Status) -> None:
        self._known[self._platform.memory_key(handle)] = answer

    def why_not_started(self, handle: Handle) -> NotStarted | None:
        """Return the reason why a handle has no process; None if it has one."""
        if handle in self._not_started:
            return self._not_started[handle]
        platform = self._platform
        if handle.native and re.fullmatch(platform.id_form, handle.native, re.ASCII) is None:
            return NotStarted(f"{handle.native!r} is not an id of {platform.name}, so it names no process there")
        return None if platform.is_started(handle) else NotStarted("it could not be started")

    def last_status(self, handle: Handle) -> Status:
        """Return the status that the platform reported last."""
        return self._known.get(self._platform.memory_key(handle)) or Status(handle, self._platform.first_state)

    def has_ended(self, handle: Handle) -> bool:
        """Whether an earlier poll saw the end of this process."""
        return self.last_status(handle).state.ended


class Executor(Platform, FleetExecutor, ABC):
    """The processes that were launched on one platform."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.turn = threading.RLock()
        self.known = KnownLaunches(self)
        self._cancelled: set[Handle] = set()
        self._deadlines: dict[Handle, float] = {}  # when a cancelled process is killed
        self._functions: set[Handle] = set()  # called with keywords: exit codes do not mean what exitcodes.py says
        self._leash: Leash | None = None  # the launcher's lease, if a launch has one

    # ------------------------------------------------------------------ starting

    def plan(self, specs: Sequence[ReplicaSpec]) -> LaunchPlan:
        faults = [self.fault_of(s) for s in specs]
        refused = tuple(dict.fromkeys(why for why in faults if why))
        prices = [None if why else self.price_of(s) for s, why in zip(specs, faults, strict=True)]
        lines = [f"{s.slot}: {self.plan_line(s)}" for s in specs]
        return LaunchPlan((*lines, *self.plan_notes(specs), *refused), total_price(prices), refused)

    def launch_replicas(self, specs: Sequence[ReplicaSpec] | None = None, **short: Any) -> list[Handle]:
        """Launch these specs; or, in the short form, one function n times, with its rank in an environment variable.

        `rank_specs` explains the short form's arguments.
        """
        if specs is None:
            from executors.platforms.short_form import rank_specs

            specs = rank_specs(self.name, **{**short, "run": short.get("run") or self.nameless_run()})
        return self.launch_specs(specs)

    @in_turn
    def launch_specs(self, specs: Sequence[ReplicaSpec]) -> list[Handle]:
        """Launch specs.  Skip a launch whose process exists already; repeat a launch that failed before."""
        new = {launch_of(s): s for s in specs if launch_of(s) not in self.known.handles}
        faults = {launch: why for launch, s in new.items() if (why := self.fault_of(s))}
        if new and len(faults) == len(new):
            raise ExecutorError(next(iter(faults.values())))
        good = {launch: s for launch, s in new.items() if launch not in faults}
        lease_s = max((s.lease_s for s in good.values()), default=0.0)
        leash = _leash_of(self) if lease_s > 0 else None
        leased = leash is not None and leash.begin(list(good.values()), lease_s)
        answers: dict[Launch, Handle | NotStarted] = {launch: NotStarted(why) for launch, why in faults.items()}
        answers |= dict(zip(good, self.submit(list(good.values())) if good else (), strict=True))
        unclear = [x.reason for x in answers.values() if isinstance(x, NotStarted) and x.state is State.LOST]
        if unclear and len(unclear) == len(specs):
            raise Unavailable(unclear[0])  # the same launch may be repeated, and is no replica's failure
        at = self._clock.wall()
        kept = {launch: self.known.keep(new[launch], answer, at) for launch, answer in answers.items()}
        handles = self.known.handles | kept
        if leash is not None and leased:
            leash.hold([handles[launch] for launch in good], lease_s)
        self._functions |= {handles[launch_of(s)] for s in specs if s.kwargs is not None}
        return [handles[launch_of(s)] for s in specs]

    # ------------------------------------------------------------------ watching

    @in_turn
    def poll(self, handles: Iterable[Handle]) -> list[Status]:
        handles = list(handles)
        _kill_due(self, self.known, self._deadlines, self._clock.now())
        asked = list(dict.fromkeys(h for h in handles if self.is_ours(h) and self.needs_look(h)))
        answers = dict(zip(asked, _answers_of(self, asked), strict=True))
        for handle, answer in answers.items():
            if isinstance(answer, Status) and not answer.stale:
                self.known.note(handle, answer)
        return [_status_of(self, h, answers.get(h)) for h in handles]

    def needs_look(self, handle: Handle) -> bool:
        """Whether a poll asks the platform about this process."""
        return self.known.why_not_started(handle) is None and not self.known.has_ended(handle)

    def collect(self, handles: Sequence[Handle], timeout: float | None = None) -> list[Result]:
        from executors.platforms.short_form import wait_for_all

        statuses = wait_for_all(lambda: self.poll(handles), self._clock, timeout, self.pause_s)
        late = f"still running after {timeout or 0:g} s"
        return self.make_results([s if s.state.ended else replace(s, reason=late) for s in statuses])

    def make_results(self, statuses: Sequence[Status]) -> list[Result]:
        """Return results, made one after the other; a platform overrides this if each result needs requests."""
        return [self.make_result(status) for status in statuses]

    def make_result(self, status: Status) -> Result:
        """Return the result of a process, with its value or its last lines."""
        from executors.platforms.short_form import result_of

        return result_of(self, status)

    def logs(self, handle: Handle, tail: int | None = None) -> list[str]:
        if not self.is_ours(handle):
            raise ExecutorError(_whose(handle))
        if (why := self.known.why_not_started(handle)) is not None:
            return last_lines(why.reason.splitlines(), tail)
        return [] if tail == 0 else last_lines(self.read_log(handle, tail), tail)

    def follow(self, handle: Handle, tail: int | None = None) -> Iterator[str]:
        if not self.is_ours(handle) or self.known.why_not_started(handle) is not None:
            return iter(self.logs(handle, tail))
        return self.follow_log(handle, tail, lambda: self.poll([handle])[0].state.ended)

    def follow_log(self, handle: Handle, tail: int | None, ended: Callable[[], bool]) -> Iterator[str]:
        """Yield the log's new lines, again and again, until `ended()`."""
        if (file := self.log_file(handle)) is not None:
            yield from file.follow(tail, ended, self._clock, self.pause_s)
            return
        from executors.platforms.machine.logfile import follow_stream

        shown = 0 if tail is None else max(0, len(self.logs(handle)) - tail)
        yield from follow_stream(lambda: self.stream_log(handle), shown, ended, lambda: self._clock.sleep(self.pause_s))

    # ------------------------------------------------------------------ ending

    @in_turn
    def cancel(self, handles: Iterable[Handle], grace_s: float = 15.0) -> None:
        going = [h for h in handles if self.is_ours(h) and self.known.why_not_started(h) is None and self.may_run(h)]
        new = [h for h in going if h not in self._cancelled]
        self._cancelled.update(going)
        if self.own_grace:
            _stop(self, going, kill=False)
            return
        until = self._clock.now() + grace_s
        self._deadlines |= {h: min(until, self._deadlines.get(h, until)) for h in going}
        if grace_s > 0:
            _stop(self, new, kill=False)
        _kill_due(self, self.known, self._deadlines, self._clock.now())

    def may_run(self, handle: Handle) -> bool:
        """Whether the process may still run, according to its last known status."""
        return self.is_started(handle) and not self.known.has_ended(handle)

    @in_turn
    def find(self, run: str) -> list[Handle]:
        best = {handle.slot: handle for handle in self.discover(run)}
        return [best[slot] for slot in sorted(best)]

    @in_turn
    def orphans(self, run: str, known: Collection[Handle]) -> list[Handle]:
        return [h for h in self.alive(run) if h.native not in {other.native for other in known}]

    @in_turn
    def sweep(self, run: str) -> list[str]:
        list(self.discover(run))  # to refresh the list that `alive` reads
        alive = list(self.alive(run))
        _stop(self, alive, kill=True)
        return [f"{h.slot}.{h.attempt}: job {h.native} on {self.name}" for h in alive]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes that the block launched, and wait for their ends."""
        from executors.platforms.short_form import wait_for_all

        handles = list(self.known.handles.values())
        try:
            self.cancel(handles, GRACE_S)
            wait_for_all(lambda: self.poll(handles), self._clock, END_S, self.pause_s)
        finally:
            self.close()

    @in_turn
    def close(self) -> None:
        """Release resources.  Remove unnamed runs from the platform if all their processes have ended."""
        if self._leash is not None:
            self._leash.let_go()
        known = self.known
        for run in {launch[0] for launch in known.handles if re.fullmatch(f"{self.name}://[0-9a-f]{{32}}", launch[0])}:
            if all(known.has_ended(h) for launch, h in known.handles.items() if launch[0] == run):
                with suppress(ExecutorError):
                    self.purge(run)


def _leash_of(executor: Executor) -> "Leash":
    from executors.platforms.short_form import Leash

    executor._leash = executor._leash or Leash(executor, executor._clock)
    return executor._leash


def launch_of(one: ReplicaSpec | Handle) -> Launch:
    return one.run, one.slot, one.attempt


def total_price(prices: Iterable[float | None]) -> float | None:
    """Return the sum; None if one of the prices is unknown."""
    known = list(prices)
    return None if None in known else sum(price for price in known if price is not None)


def _whose(handle: Handle) -> str:
    return f"{handle.slot} runs on {handle.executor}, which is not one of the run's places; add the place to reach it"


def _stop(platform: Platform, handles: Sequence[Handle], kill: bool) -> Collection[Handle]:
    """Ask processes to leave, or kill them; return the processes that the platform could not reach."""
    return (platform.stop(handles, kill) or ()) if handles else ()


def _kill_due(platform: Platform, known: KnownLaunches, deadlines: dict[Handle, float], now: float) -> None:
    """Kill the processes whose grace is over; try again later for processes that the platform could not reach."""
    due = [h for h, until in deadlines.items() if until <= now]
    for handle in due:
        del deadlines[handle]
    alive = [h for h in due if not known.has_ended(h)]
    try:
        unheard = _stop(platform, alive, kill=True)
    except ExecutorError:
        unheard = alive
    deadlines |= dict.fromkeys(unheard, now)


def _answers_of(platform: Platform, handles: Sequence[Handle]) -> Sequence[Status | ExecutorError]:
    """Return one answer for each handle."""
    try:
        return platform.observe(handles) if handles else ()
    except ExecutorError as error:
        return [error] * len(handles)


def _status_of(executor: Executor, handle: Handle, answer: Status | ExecutorError | None) -> Status:
    """Return the status by the newest answer; without an answer, the last known status."""
    if not executor.is_ours(handle):
        return unanswered(Status(handle, State.RUNNING, why := _whose(handle)), why)
    if (why := executor.known.why_not_started(handle)) is not None:
        return Status(handle, why.state, why.reason)
    known = answer if isinstance(answer, Status) else executor.known.last_status(handle)
    if known.handle.native == handle.native:  # else another process runs this launch: report its handle
        known = replace(known, handle=handle)
    return unanswered(known, answer) if isinstance(answer, ExecutorError) and not known.state.ended else known
