"""Keeps a run's replicas alive: observes, plans and acts until the run is done.

        ┌────────────────────────────────────────────────────────────────┐
        ▼                                                                │
    bucket, executor ──▶ observed ──▶ plan ──▶ launch · replace · fence · drain ──▶ log, screen
                             budget ──┘

    python -m executors.supervision.supervisor RUN_URL         `diloco train --detach` starts this, on any machine

All its state is in the bucket: the replicas' places (platforms/places.py), each slot's failures (slot_state.py) and
the costs (costs.py).  So a supervisor may be killed and started again on any machine, at any time, and the replicas of
a detached run do not notice.

Not promised: that a running supervisor uses places that change meanwhile; the next supervisor uses them.
"""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from diloco.model.last_sweep import sweep_after_end
from diloco.process import exitcodes
from diloco.process.journal import Journal
from diloco.run.founding import solo_warning
from diloco.run.record import Run
from diloco.runlog.reader import SUPERVISOR, Reader, Report
from diloco.runlog.scope import STATUS
from diloco.runlog.sessions import end_words
from executors.platforms.base import LAUNCH, REPLICA, ExecutorError, FleetExecutor, Handle, Unavailable, require_fleet
from executors.platforms.places import former_places, places_of
from executors.supervision.grace import GRACE_S, finish_s, leave_s, usual_s
from executors.supervision.lease import WATCHING, Lease
from executors.supervision.looks import Looks, RecordsWatch
from executors.supervision.notices.asked_for import alerts_of, end_with_run, tracker_child
from executors.supervision.outage import Outages
from executors.supervision.slots.plan import (
    Action,
    Cancel,
    Desired,
    Drain,
    Fence,
    GiveUp,
    Launch,
    Limits,
    Replace,
    plan,
)
from executors.supervision.slots.slot_state import LOST_LEASE, SlotState
from executors.supervision.slots.slots import Slots, wanted_slots
from executors.supervision.starts import Start, Starts
from rendezvous import layout
from rendezvous.agreement.membership import claim, newest_claim, read_control
from rendezvous.background import Emit
from rendezvous.clock import Clock
from rendezvous.errors import Fenced, RecordsLost, RendezvousError, StoreError, StoreFull, StoreUnclear

if TYPE_CHECKING:
    from executors.supervision.money.limit import SpendLimit

FAILED = 1
WAITING = "waiting for the store, as the replicas do"
TICK_S = 0.2
PATIENCE_S = 120.0
SAY_S = 60.0  # between two reports of a trouble
RENTED_GRACE_S = 40.0  # GRACE_S on a platform, which passes the request on; the rest of END_S is for its report
KEPT_STEPS = 100  # outer steps whose events stay in memory
PROOF_S = 600.0  # time to see the ends of all replicas


def publish_model(argv: list[str]) -> int:
    """Write the start model θ₀ into the bucket; the entry point of the publisher's process."""
    from diloco.model.publish import publish

    return publish(*argv)


@dataclass(frozen=True)
class Outcome:
    """The end of the supervision.   code: exit code for the shell."""

    code: int
    text: str


def end_code(error: Exception) -> int:
    """Return GAVE_UP for an error after which the same command may succeed later; else 1."""
    return exitcodes.GAVE_UP if isinstance(error, StoreFull | StoreUnclear | Unavailable) else FAILED


@dataclass
class Supervisor:
    """One supervisor of a run.

    parent: "PID:START" of a process; replicas of this machine end when it ends ("" for a detached run).
    alert: a webhook's address, or "".
    show(report): draws the report.   each_tick(supervisor, report): a hook (the demo uses it to kill a replica).
    """

    run: Run
    executor: FleetExecutor
    clock: Clock
    parent: str = ""
    entrypoint: str = REPLICA
    limits: Limits = field(default_factory=Limits)
    alert: str = field(default="", repr=False)  # the address may be a secret
    show: Callable[[Report], None] = lambda report: None
    each_tick: Callable[["Supervisor", Report], None] = lambda supervisor, report: None

    def __post_init__(self) -> None:
        require_fleet(self.executor)
        self.lease = Lease.take(self.run.store, self.clock)
        self._journal = Journal(self.run.store, self.clock, SUPERVISOR, self.lease.generation)
        self._reader = Reader(self.run.store, STATUS)
        timing = self.run.timing
        near = getattr(self.run.store, "near", False)
        self._looks = Looks(self._reader.refresh, self.clock, 0.0 if near else timing.beat)
        self.emit("started", pid=os.getpid(), executor=self.executor.name)
        wanted = read_control(self.run.store)
        if text := solo_warning(wanted):
            self.emit("warning", kind="solo", text=text)
        self.places = places_of(wanted.places)
        self._said = ("", "")  # phase and note of our last heartbeat
        self._tick_s = max(TICK_S, timing.poll)
        self.slots = Slots(self.run, self.executor, self.clock, 3 * timing.dead_after, self.emit, self.limits)
        self._ticked = False
        self.grace_s = 0.0  # seconds that replicas may take to leave
        self._published = self.run.config.script is not None  # a script brings its own model
        self._without = set[str]()  # actors that are not started again
        self._leaving = ""  # the reason if we end before the run is done
        self._killing = False
        self._verdict: Outcome | None = None
        self._records = RecordsWatch(self.run, self.clock)
        self._ending_since: float | None = None
        self._trouble_since: float | None = None
        self._said_at = float("-inf")  # when we last reported a trouble
        self._former = former_places(wanted.former)
        self._limit: SpendLimit | None = None
        self._trackers = tracker_child(
            self.run, self.clock, lambda text: self.emit("warning", kind="trackers", text=text)
        )
        self._alerts = alerts_of(self.alert, self.clock, self.emit)
        self._starts = Starts(
            self.slots, self.places, self._limit_for, self.lease, parent=self.parent, entrypoint=self.entrypoint
        )

    # ------------------------------------------------------------------ calls from signal handlers and others

    def leave(self, why: str = "interrupted") -> None:
        """Ask every replica to leave, then end.  Safe in a signal handler."""
        self._leaving = self._leaving or why

    def kill(self) -> None:
        """End every replica now.  Safe in a signal handler."""
        self._killing = True
        self.leave("killed")

    def handle(self, slot: str) -> Handle | None:
        """Return the running process of a slot, or None."""
        state = self.slots.by_slot.get(slot)
        return state.handle if state and state.running else None

    def emit(self, event: str, **fields: object) -> None:
        self._journal.emit(event, **fields)
        self._journal.flush()
        self._looks.forget()

    # ------------------------------------------------------------------ the loop

    def supervise(self) -> Outcome:
        """Supervise until the run is done, cannot continue, or we are asked to end."""
        try:
            self.show(self.lease.keep_while(self._reader.refresh))
            while (outcome := self._patient_tick()) is None:
                self.clock.sleep(self._tick_s)
            if outcome.code == exitcodes.DONE:
                self.lease.keep_while(lambda: _sweep_once_more(self.run, self.clock, self.emit))
            if outcome.code != LOST_LEASE and self.run.config.inner.sampling.boxes is not None:
                from executors.supervision.boxes import sweep_and_report

                self.lease.keep_while(lambda: sweep_and_report(self.run, self.emit))
            end_with_run(self._trackers, self.lease, outcome.code)
            self._alerts.close()
        except Exception as error:
            self._trackers.end(done=False)
            self.emit("crashed", code=end_code(error), text=f"{type(error).__name__}: {error}")
            if not isinstance(error, StoreUnclear | Unavailable):  # after these, a hosting platform restarts us
                self.lease.beat("left")
            raise
        self.emit("stopped", code=outcome.code, text=outcome.text)
        self.lease.beat("left")  # the next supervisor need not wait
        return outcome

    def _patient_tick(self) -> Outcome | None:
        try:
            outcome = self.tick()
            self._trouble_since = None
            if self.lease.trouble:  # a full disk: the replicas wait, and no event can report it
                self._say_waiting(f"{WAITING}: {self.lease.trouble}")
            else:
                self._said_at = float("-inf")
            return outcome
        except StoreError as error:  # the replicas wait for the store, too; nothing is lost meanwhile
            patience_s = self.run.timing.give_up if isinstance(error, StoreFull | StoreUnclear) else PATIENCE_S
            if self._killing:  # a second Ctrl-C kills without waiting for the store
                with suppress(ExecutorError):  # a later tick asks again
                    self.slots.cancel([t for t in self.slots.all() if t.running], 0.0)
            self._wait_out(error, f"{WAITING}: {error}", patience_s)
        except ExecutorError as error:
            if not (isinstance(error, Unavailable) or self.slots.anybody):
                return Outcome(exitcodes.USER_ERROR, str(error))
            patience_s = float("inf") if self.slots.anybody or self.slots.opened else PATIENCE_S
            self._wait_out(error, f"trying again; replicas that run continue: {error}", patience_s)
        except RecordsLost as lost:  # raised by a renewal of the lease; while we leave, no tick renews the lease
            if self._verdict is not None:
                raise
            self._verdict, self._leaving = Outcome(exitcodes.USER_ERROR, str(lost)), "the run's records are gone"
        return None

    def _wait_out(self, error: Exception, text: str, patience_s: float) -> None:
        now = self.clock.now()
        self._trouble_since = now if self._trouble_since is None else self._trouble_since
        self._say_waiting(text)
        if now - self._trouble_since > patience_s:
            raise error

    def _say_waiting(self, text: str) -> None:
        if self.clock.now() - self._said_at >= SAY_S:
            print(text, file=sys.stderr, flush=True)
            self._said_at = self.clock.now()

    def tick(self) -> Outcome | None:
        """Observe once, and act."""
        if self._looks.due("lease", 2) and self.lease.lost:
            if read_control(self.run.store).stop:  # `diloco stop` takes the lease to end replicas that do not leave
                return Outcome(exitcodes.LEFT, "stopped by `diloco stop`, which ended the replicas that did not leave")
            return Outcome(LOST_LEASE, "another supervisor has taken over; it keeps the replicas")
        said = (WATCHING if self._ticked else "starting", self.slots.outages.note)
        if self._looks.due("beat", 0.5) or said != self._said:
            self._said = said
            self.lease.beat(*said)
        self._trackers.tick()
        statuses = self.lease.keep_while(lambda: self.slots.ask(self._reader.refresh))
        if any(status.state.ended for status in statuses.values()):
            self._looks.forget()
        report = self._looks.report()
        self.slots.look(report, statuses)
        if not self._ticked:  # read again: the first look has logged ends, which the budget must count
            report = self._reader.refresh()
        self._reader.forget_events_before(report.head - KEPT_STEPS)
        _report_outages(self.slots.outages, self.emit)
        if self._verdict is None and (lost := self._records.why_lost(report)):
            self._verdict = Outcome(exitcodes.USER_ERROR, lost)
            self._leaving = "the run's records are gone"
        if (limit := self._limit_for(report)) is not None:
            self._leaving = self._leaving or limit.carry_out(limit.verdict(report), report)
        desired = Desired(frozenset(wanted_slots(report)), done=report.done, ending=bool(self._leaving))
        actions = plan(desired, self.slots.observed(report), self.clock.now(), self.limits)
        self._carry_out(actions, report)
        self.each_tick(self, report)
        self.show(report)
        self._ticked = True
        self.grace_s = max((self._grace_s(t, report) for t in self.slots.all() if t.running), default=0.0)
        outcome = self._outcome_if_ended(report)
        self._alerts.tick(report, last=outcome is not None)
        return outcome

    def _limit_for(self, report: Report) -> "SpendLimit | None":
        """Return the spending limit; None if the run has no budget and no lease, and all places are on this machine."""
        wanted = report.wanted
        names = {self.executor.name, *(place.executor for place in (*self.places, *self._former))}
        if self._limit is None and (names != {"local"} or wanted.until or wanted.max_usd or wanted.max_hours):
            from executors.supervision.money.limit import SpendLimit

            self._limit = SpendLimit(
                self.run.store, self.clock, self.executor, self.places, former=self._former, emit=self.emit
            )
        return self._limit

    def _outcome_if_ended(self, report: Report) -> Outcome | None:
        """Return the outcome if supervision is over and no replica runs any more, else None."""
        if (outcome := self._verdict or self._outcome_if_over(report)) is None:
            self._ending_since = None  # the user may revoke an end: `diloco resume`, or more steps
            return None
        now = self.clock.now()
        self._ending_since = since = self._ending_since if self._ending_since is not None else now
        running = [t for t in self.slots.all() if t.running]
        self.slots.cancel([t for t in running if self._killing or now - since > self._grace_s(t, report)], 0.0)
        if not self.slots.anybody:
            lost = "" if self._verdict else self._records.why_lost(report, again=True)
            return Outcome(exitcodes.USER_ERROR, lost) if lost else outcome
        return _given_up(outcome, self.slots) if now - since > PROOF_S + self.grace_s else None

    def _grace_s(self, state: SlotState, report: Report) -> float:
        """Return the seconds that a replica may take to end, from a request or from the run's end."""
        beat = report.beats.get(state.slot)
        least = RENTED_GRACE_S if state.handle and state.handle.native else GRACE_S
        usual = usual_s(report.request_s, least)
        if beat is None or self.clock.now() - state.still_since >= self.slots.fresh_s or self._records.lost:
            return usual
        over = report.done and not self._leaving and self._verdict is None
        if over:
            return finish_s(beat, report.wanted.steps, usual)
        return leave_s(beat, state.asked, self.slots.boundary, usual)

    def _outcome_if_over(self, report: Report) -> Outcome | None:
        if report.done:
            return Outcome(exitcodes.DONE, end_words(report))
        if self._leaving or report.wanted.stop:
            why = self._leaving or "stopped by `diloco stop`"
            where = f"at outer step {report.progress}"
            lost = ", ".join(f"{t.slot} lost {t.lost}" for t in self.slots.all() if t.lost)
            kept = f"{lost}; all work that was offered before is kept" if lost else "nothing is lost"
            return Outcome(exitcodes.LEFT, f"{why} {where}; {kept}")
        return None

    # ------------------------------------------------------------------ acting

    def _carry_out(self, actions: Sequence[Action], report: Report) -> None:
        starts: list[Start] = []
        for action in actions:
            state = self.slots.by_slot[action.slot]
            if isinstance(action, Launch | Replace) and not state.running:
                starts.append((state, action.why))
            else:
                self._act_on(state, action, report)
        publishing = [(self.slots.publisher, why) for why in self._publish_reasons(report)]
        starts = [*(starts if self._published else self._starts.put_off_rented(starts)), *publishing]
        if not starts:
            self.slots.outages.answered(LAUNCH)  # there is nothing to start, so no outage delays a start
            return
        may_start = self._verdict is None and not self.slots.outages.waits(LAUNCH) and not self.lease.lost
        if may_start and (why := self._starts.try_to_start(starts, report)):  # no budget, and no replica runs
            new = not report.of_kind("launched")
            self._verdict = Outcome(exitcodes.USER_ERROR if new else exitcodes.LEFT, why)

    def _act_on(self, state: SlotState, action: Action, report: Report) -> None:
        if isinstance(action, Replace):
            self.emit("replacing", slot=state.slot, why=action.why)
            state.replacing_at = self.clock.now()
            self.slots.cancel([state], 0.0)
        elif isinstance(action, Fence):
            self._fence(state, action.why)
        elif isinstance(action, Drain):
            self._drain(state, action.why, report)
        elif isinstance(action, Cancel):
            self.slots.cancel([state], self._grace_s(state, report))
        elif isinstance(action, GiveUp) and layout.is_actor(state.slot):
            self._go_on_without(state.slot, action.why)
        elif isinstance(action, GiveUp) and self._verdict is None:
            tail = self.slots.tail(state.handle, 12) if state.handle else []
            self._stop_for(state.slot, state.status.exit_code if state.status else None, action.why, tail)

    def _drain(self, state: SlotState, why: str, report: Report) -> None:
        """Ask a replica to leave: a control record asks it to leave, or else a cancel at the platform."""
        if state.draining_at is None:
            self.emit("draining", slot=state.slot, why=why)
            state.draining_at, state.asked = self.clock.now(), report.beats.get(state.slot)
        if not self.slots.hears(state.slot, report):
            self.slots.cancel([state], self._grace_s(state, report))

    def _fence(self, state: SlotState, why: str) -> None:
        """Claim the replica's slot for the next launch, so that only that launch can take the slot afterwards."""
        newest = newest_claim(self.run.store, state.slot)
        number = 2 + max(state.attempt, newest.generation if newest else 0)
        with suppress(Fenced):  # the replica claimed at the same moment: the next tick fences that claim
            claim(self.run.store, self.clock, state.slot, host=f"{SUPERVISOR}/{state.slot}.{number}", pid=os.getpid())
            assert state.handle is not None
            self.emit("fenced_off", slot=state.slot, attempt=state.handle.attempt, why=why)
            self.slots.replaced[state.handle] = self.clock.now()
            state.attempt = number - 1
            state.handle = state.status = None

    def _go_on_without(self, actor: str, why: str) -> None:
        """Log, once, that an actor is not started again: replicas then sample the completions themselves."""
        if actor not in self._without:
            self._without.add(actor)
            self.emit("actor_given_up", slot=actor, text=f"{actor}: {why}. Replicas make its rollouts themselves")

    def _stop_for(self, slot: str, exit_code: int | None, why: str, tail: list[str]) -> None:
        """End a run that cannot continue: all replicas leave, and the outcome says why."""
        code = exit_code if exit_code in (exitcodes.USER_ERROR, exitcodes.GAVE_UP) else FAILED
        last = ["Its last lines:", *(f"    {line}" for line in tail)] if tail else ["It printed nothing"]
        self._verdict = Outcome(code, f"{slot}: {why}. " + "\n".join(last))
        self._leaving = self._leaving or why
        self.emit("gave_up_on", slot=slot, why=why, tail=tail)

    # ------------------------------------------------------------------ θ₀

    def _publish_reasons(self, report: Report) -> list[str]:
        """Return the reason to start the process that writes θ₀ into the bucket, or []."""
        p = self.slots.publisher
        if self._published or self._leaving or report.wanted.stop or report.done or p.running:
            return []
        if self.run.store.get(layout.MODEL_MANIFEST) is not None:
            self._published = True
            if p.launches:
                self.emit("published", seconds=self.clock.now() - p.launched_at)
        elif p.status and (p.status.exit_code == exitcodes.USER_ERROR or p.strikes.losses >= self.limits.failures):
            tail = self.slots.tail(p.status.handle, 12)
            told = f"the start model cannot be published ({p.status.reason or 'its end has no reason'})"
            why = "your files, settings or model cannot be used" if p.status.exit_code == exitcodes.USER_ERROR else told
            self._stop_for("before the first step", p.status.exit_code, why, tail)
        else:
            return ["the run has no model yet"]
        return []


def _sweep_once_more(run: Run, clock: Clock, emit: Emit) -> None:
    """Collect garbage after all replicas have ended: the last replica may have been killed before it could do so."""
    try:
        sweep_after_end(run, clock, emit)
    except RendezvousError as error:
        emit("garbage_stays", trouble=str(error))


def _report_outages(outages: Outages, emit: Emit) -> None:
    """Report outages in the run's log and on stderr, once a minute."""
    for event in outages.news():
        emit(**event)
        if event["event"] == "platform_silent":
            from executors.supervision.silence import outage_in_words

            print(outage_in_words(event), file=sys.stderr, flush=True)


def _given_up(outcome: Outcome, slots: Slots) -> Outcome:
    there = [*(t.handle for t in slots.all() if t.running and t.handle), *slots.replaced, *slots.duplicates]
    names = ", ".join(f"{h.slot} on {h.executor} ({h.native or h.pid})" for h in there)
    text = f"{outcome.text}\n{names} may still run; `diloco stop {shlex.quote(slots.run.url)}` tries again"
    return Outcome(outcome.code or FAILED, text)


def main(argv: list[str] | None = None) -> int:
    """Be a detached run's supervisor; jobs and detached processes name this function."""
    return import_module("executors.supervision.alone").main(argv)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    sys.exit(main())
