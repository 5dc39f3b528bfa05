"""Keeps one supervisor's view of a run's slots, and of all launches that may still run.

    platforms ──find, poll──┐                                        ┌─▶ observed     for the plan
    log: launched, ended ───┴──▶ by_slot: one SlotState each ────────┤
                                 replaced: replaced, maybe running   ├─▶ log: found, pending, running, lost, ended
                                 duplicates: processes that the log does not name, or two of one launch

Every launch that is not known to have ended is in one of these three sets, also after a restart of the supervisor.  If
a platform lists a process that the log does not name (the answer to its launch was lost), we log the process, so that
it is billed, and then end it.  If one launch has two processes, the platform's executor keeps the older process.

Not promised: the state of a launch while its platform does not answer; until then the last known state counts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from diloco.process import exitcodes
from diloco.run.record import Run
from diloco.runlog.reader import SUPERVISOR, Report
from executors.platforms.base import ExecutorError, FleetExecutor, Handle, State, Status
from executors.supervision.grace import GRACE_S, boundary_of, leave_s, lost_work, usual_s
from executors.supervision.outage import Outages, launch_name
from executors.supervision.slots.plan import Limits, Observation, SessionEnd, count_end
from executors.supervision.slots.slot_state import (
    BLAMELESS,
    History,
    SlotState,
    begin_fields,
    can_be_asked,
    end_fields,
    is_from_launch,
    past,
)
from rendezvous import layout
from rendezvous.clock import Clock

PUBLISH = "publish"  # the slot of the publisher, which is not a replica: it writes θ₀ into the bucket
AGAIN_S = 30.0  # seconds between two cancels of a process that does not end


class Slots:
    """All slots of a run.   fresh_s: a heartbeat that does not change for longer is silent.   emit: writes to the log.
    limits: has the pauses after failures of the reward."""

    def __init__(
        self, run: Run, executor: FleetExecutor, clock: Clock, fresh_s: float, emit: Callable[..., None], limits: Limits
    ) -> None:
        self.run = run
        self.executor = executor
        self.clock = clock
        self.fresh_s = fresh_s
        self.emit = emit
        self.limits = limits
        self.boundary = boundary_of(run)
        self.by_slot: dict[str, SlotState] = {}
        self.publisher = SlotState(PUBLISH)
        self.replaced: dict[Handle, float] = {}  # handle -> time of our last cancel
        self.duplicates: dict[Handle, float] = {}  # handle -> time of our last cancel
        self.outages = Outages(clock)
        self.opened: list[Handle] = []  # launches that had no end in the log when this supervisor began
        self._past: dict[str, History] | None = None  # None: the log was not read yet
        self._found: dict[str, Status] = {}

    def all(self) -> list[SlotState]:
        return [*self.by_slot.values(), self.publisher]

    @property
    def anybody(self) -> bool:
        return bool(self.replaced or self.duplicates) or any(t.running for t in self.all())

    def ask(self, read: Callable[[], Report]) -> dict[Handle, Status]:
        """Poll the platforms; call this before the report is read, so that the report is newer than each end."""
        if self._past is None:
            self._look_back(read())
        handles = [*(t.handle for t in self.all() if t.handle is not None and t.running), *self.replaced]
        return dict(zip(handles, self.outages.poll(self.executor, handles), strict=True))

    def look(self, report: Report, statuses: Mapping[Handle, Status]) -> None:
        for slot in report.wanted.member_names:
            if slot not in self.by_slot:
                self.by_slot[slot] = self._new_state(slot)
        known = [(t, t.handle) for t in self.all() if t.handle in statuses and t.running]
        for state, handle in known:
            if handle is not None and not (status := statuses[handle]).stale:
                self._adopt_older_process(state, status.handle)
                state.polled(status, self.clock.now())
                if status.state.ended:
                    self._count_end(state, status, report)
        for slot, beat in report.beats.items():
            self.by_slot[slot].heard(beat, self.clock.now(), self.fresh_s)
        for state, _ in known:
            status, handle = state.status, state.handle
            if handle and handle.native and status and (state.pending or status.state is State.PENDING):
                from executors.supervision.slots.waiting import log_wait

                log_wait(state, self.emit, self.clock.now())
        self._look_at_replaced(statuses)
        self._look_at_duplicates(report)
        for slot, state in self.by_slot.items():
            if slot in wanted_slots(report):
                if state.cancelled is None and not self._lease_over(report):
                    state.draining_at = None  # a replica that had already read the request to leave is replaced later
            elif not state.running and not report.done:
                state.forget()

    def _adopt_older_process(self, state: SlotState, runs: Handle) -> None:
        """Adopt the process that counts for this launch, if it is an older process than the known process: the answer
        to the older process's start was lost."""
        if state.handle is None or state.handle.native == runs.native:
            return
        self.book("found", runs, "it runs this launch; the answer that named it was lost")
        self.duplicates.setdefault(state.handle, self.clock.now())
        self.duplicates.pop(runs, None)
        state.handle = runs

    def _look_at_duplicates(self, report: Report) -> None:
        """Log processes that the log does not name, so that they are billed from their launch, and end them."""
        own = [*(t.handle for t in self.all() if t.handle is not None), *self.replaced]
        newest = {t.slot: t.attempt for t in self.all()}
        alive = [h for h in self.executor.orphans(self.run.store.url, own) if h.attempt <= newest.get(h.slot, 0)]
        for handle in alive:
            if handle not in self.duplicates:
                self.book("found", handle, "not in the log: a launch's second process, or one of a launch given up")
                self.duplicates[handle] = float("-inf")
        for handle in [h for h in self.duplicates if not any(h.native == a.native for a in alive)]:
            del self.duplicates[handle]
            self.emit("ended", **end_fields(Status(handle, State.CANCELLED, "one too many")), duplicate=True)
        self._end_duplicates()

    def _end_duplicates(self) -> None:
        """Cancel duplicates now, and again every AGAIN_S."""
        now = self.clock.now()
        due = [h for h, asked in self.duplicates.items() if now - asked > AGAIN_S and not self._is_run_by_us(h)]
        self.duplicates |= dict.fromkeys(due, now)
        if due:
            self.executor.cancel(due, 0.0)

    def _is_run_by_us(self, handle: Handle) -> bool:
        """Whether the handle's launch still runs.  A cancel would end the launch; its executor ends duplicates."""
        return any(t.running and t.handle and launch_name(t.handle) == launch_name(handle) for t in self.all())

    def _look_back(self, report: Report) -> None:
        """Find launches of earlier supervisors, from the platforms and the log."""
        before = past(report.events, self.run.store.url)
        self.opened = opened = [h for p in before.values() for h in p.open if can_be_asked(h)]
        opened.sort(key=lambda h: -h.launched_at)
        launches = {(h.slot, h.attempt): h for h in opened}  # of two processes of one launch, the older one counts
        booked = set(launches)
        written = {(h.slot, h.attempt, h.native) for h in opened}
        found = {(h.slot, h.attempt): h for h in self.executor.find(self.run.store.url) if h.slot != SUPERVISOR}
        launches |= found
        self.duplicates = {h: float("-inf") for h in opened if launches[h.slot, h.attempt].native != h.native}
        statuses = self.outages.poll(self.executor, list(launches.values()))
        best = {s.handle.slot: s for s in sorted(statuses, key=lambda s: (not s.state.ended, s.handle.attempt))}
        self._past = before
        self._found = best
        for s in statuses:
            h = s.handle
            if not s.state.ended and (h.slot, h.attempt, h.native) not in written:
                self.book("found", h, "found a running replica that the log does not name")
            if s is not best[h.slot] and (not s.state.ended or (h.slot, h.attempt) in booked):
                self.replaced[h] = float("-inf")
        self.publisher = self._new_state(PUBLISH)
        self.by_slot = {slot: self._new_state(slot) for slot in report.wanted.member_names}

    def _new_state(self, slot: str) -> SlotState:
        before = (self._past or {}).get(slot, History())
        return SlotState.after(slot, before, self._found.get(slot), self.clock.now(), self.clock.wall())

    def _look_at_replaced(self, statuses: Mapping[Handle, Status]) -> None:
        """Log the ends of replaced launches, and cancel the remaining launches again every AGAIN_S."""
        for handle in list(self.replaced):
            status = statuses.get(handle)
            if status is not None and status.state.ended and not status.stale:
                del self.replaced[handle]
                self.emit("ended", **end_fields(status))
            elif self.clock.now() - self.replaced[handle] > AGAIN_S:
                self.executor.cancel([handle], 0.0)
                self.replaced[handle] = self.clock.now()

    def _count_end(self, state: SlotState, status: Status, report: Report) -> None:
        """Count and log an end.  An end that was not requested is a loss; the count restarts if the work counted."""
        sessions = [x for x in report.sessions if x.slot == state.slot and is_from_launch(status.handle, x)]
        unseen = {"unseen": True} if state.unseen else {}
        asked = report.done or self._was_asked_to_end(state, report)
        session = max(sessions, key=lambda x: x.generation, default=None)
        who = {"pid": session.pid, "generation": session.generation} if session else {"pid": status.handle.pid}
        beat = report.beats.get(state.slot)
        own = asked and not report.done and beat is not None and is_from_launch(status.handle, beat)
        state.lost = lost_work(beat) if own else ""
        as_asked = asked and (status.state is State.CANCELLED or status.exit_code == exitcodes.LEFT)
        counted = sum(len(x.commits) for x in sessions)
        if layout.is_actor(state.slot) and beat is not None and is_from_launch(status.handle, beat):
            counted = beat.inner  # for an actor: the number of rollout bundles that it delivered
        awaited = any(t.strikes.by_reward and not t.running for t in self.by_slot.values() if t is not state)
        replaced = state.replacing_at is not None
        end = classify_end(status, report, counted=counted, replaced=replaced, awaited=awaited)
        if not asked:
            state.strikes = count_end(state.strikes, end)
        if not replaced and (as_asked or status.state is State.SUCCEEDED):
            self.emit("ended", **{**end_fields(status), **who}, **unseen)
            if state.lost:
                reason = f"killed, as it had not left in time; lost: {state.lost}"
                self.emit("killed", slot=state.slot, **who, reason=reason)
            return
        if replaced:
            seen = f" ({status.reason})" if status.reason else ""  # it may have ended by itself meanwhile
            status = replace(status, reason=f"its supervisor ended it, because it sent no heartbeat{seen}")
        elif status.state is State.CANCELLED:
            status = replace(status, reason=f"{status.reason or 'cancelled'}, and not by this run")
        from executors.supervision.slots.ended import reward_wait

        more = {**vars(end), "useful": end.counted > 0, "tail": self.tail(status.handle, 8)}
        self.emit("lost", **{**end_fields(status), **who}, **more, **reward_wait(state.strikes, self.limits), **unseen)

    def _was_asked_to_end(self, state: SlotState, report: Report) -> bool:
        """Whether this replica was asked to leave or cancelled for good, by this supervisor or by a control record."""
        asked = state.draining_at is not None or (state.cancelled is not None and state.replacing_at is None)
        return asked or self.hears(state.slot, report)

    def hears(self, slot: str, report: Report) -> bool:
        """Whether a control record asks this replica to leave."""
        return slot != PUBLISH and (report.wanted.is_to_leave(slot) or self._lease_over(report))

    def _lease_over(self, report: Report) -> bool:
        return 0 < report.wanted.until <= self.clock.wall()

    def observed(self, report: Report) -> list[Observation]:
        now = self.clock.now()
        beats = [(t, report.beats.get(t.slot)) for t in self.by_slot.values()]
        usual = usual_s(report.request_s, GRACE_S)
        may_take = [leave_s(beat, t.asked, self.boundary, usual) for t, beat in beats]
        seen = [t.observe(beat, now, self.fresh_s) for t, beat in beats]
        return [replace(one, leave_s=seconds) for one, seconds in zip(seen, may_take, strict=True)]

    def tail(self, handle: Handle, lines: int) -> list[str]:
        try:
            return self.executor.logs(handle, lines)
        except ExecutorError as error:
            return [f"(no log: {error})"]

    # ------------------------------------------------------------------ acting

    def cancel(self, states: Sequence[SlotState], grace_s: float) -> None:
        """Cancel the processes now, and again every AGAIN_S if `cancel` is called again."""
        now = self.clock.now()
        due = [t for t in states if t.cancelled is None or grace_s < t.cancelled[1] or now - t.cancelled[0] > AGAIN_S]
        for state in due:
            state.cancelled = (now, grace_s)
        if due:
            self.executor.cancel([t.handle for t in due if t.handle], grace_s)

    def book(self, event: str, handle: Handle, why: str) -> None:
        """Log a launch."""
        self.emit(event, **begin_fields(handle), why=why)


def wanted_slots(report: Report) -> list[str]:
    """Return the slots that should run, and the actors."""
    return [s for s in report.wanted.member_names if report.wanted.is_kept(s)]


def classify_end(status: Status, report: Report, *, counted: int, replaced: bool, awaited: bool) -> SessionEnd:
    """Return the end, with its cause.  The replica is not at fault if its reward failed but has worked in this run,
    or if the replica gave up while another slot waits for its reward (awaited)."""
    failed = status.state is State.FAILED and not replaced
    by_reward = failed and (
        (status.exit_code == exitcodes.NO_REWARD and report.head > 0)
        or (status.exit_code == exitcodes.GAVE_UP and awaited)
    )
    idle = status.state is State.SUCCEEDED and not counted and not report.done  # e.g. os._exit(0) in a reward
    own_fault = idle or (failed and not by_reward and status.exit_code not in BLAMELESS)
    return SessionEnd(counted, own_fault=own_fault, by_reward=by_reward)
