"""Keeps a run's replicas alive: looks, plans, acts, until the run is done.

        ┌────────────────────────────────────────────────────┐
        ▼                                                    │
    bucket, executor ──▶ observed ──▶ plan ──▶ launch · replace · drain ──▶ log, screen

    python -m executors.supervisor RUN_URL         what `diloco train --detach` starts

It holds nothing that is not in the bucket, but for how often a slot has failed: it may be killed and started again at
any time, and the replicas of a detached run do not notice.

Not promised: replicas on other machines (an executor for those comes with its platform).
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco import exitcodes
from diloco.journal import Journal
from diloco.launch import Run, read_run, solo_warning
from diloco.report import SUPERVISOR, Reader, Report
from executors.base import REPLICA, Handle, ReplicaSpec, ServerlessExecutor, State, Status
from executors.lease import Lease
from executors.plan import Action, Desired, Drain, GiveUp, Holder, Launch, Limits, Replace, Seen, plan
from rendezvous import layout
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import RendezvousError, StoreError
from rendezvous.membership import read_control
from rendezvous.records import Beat

# What a replica imports, by name: the fork server has them ready.  A name that is missing is the replica's to report.
PRELOAD = ("diloco.replica", "diloco.manager", "diloco.outer", "inner.build", "inner.trainer", "inner.worlds.toolworld")
PUBLISH, PUBLISHER = "publish", "executors.supervisor:publish_model"
FAILED, LOST_LEASE = 1, 3
TICK_S, GRACE_S, PATIENCE_S = 0.2, 20.0, 120.0
BLAMELESS = (exitcodes.FENCED, exitcodes.LEFT, exitcodes.DIVERGED, exitcodes.RESUME, exitcodes.GAVE_UP)


def publish_model(argv: list[str]) -> int:
    """Entry point of the child that publishes θ₀."""
    from diloco.launch import publish

    return publish(*argv)


@dataclass(frozen=True)
class Outcome:
    """How the supervision ended.   code: for the shell."""

    code: int
    text: str


@dataclass
class Track:
    """What one slot has been through.

    handle, status: of the process that runs it or was the last to.   attempt: the highest number used so far.
    gone: (host, pid) of a process that is known to have ended.   beat: as last seen, since when, how often it moved.
    """

    slot: str
    handle: Handle | None = None
    status: Status | None = None
    attempt: int = 0
    launches: int = 0
    gone: tuple[str, int] = ("", 0)
    ended_at: float = 0.0
    losses: int = 0
    failures: int = 0
    beat: tuple[int, int] | None = None
    moves: int = 0
    still_since: float = 0.0

    @property
    def running(self) -> bool:
        return self.status is not None and not self.status.state.ended


@dataclass
class Supervisor:
    """parent: "PID:START" that replicas should not outlive ("" for a detached run).

    show(report): draws.   each_tick(supervisor, report): a hook, for who wants to meddle (the demo kills).
    """

    run: Run
    executor: ServerlessExecutor
    clock: Clock
    parent: str = ""
    entrypoint: str = REPLICA
    limits: Limits = field(default_factory=Limits)
    show: Callable[[Report], None] = lambda report: None
    each_tick: Callable[["Supervisor", Report], None] = lambda supervisor, report: None

    def __post_init__(self) -> None:
        self.lease = Lease.take(self.run.store, self.clock)
        self._journal = Journal(self.run.store, self.clock, SUPERVISOR, self.lease.generation)
        self.tell("started", pid=os.getpid(), executor=self.executor.name)
        if text := solo_warning(read_control(self.run.store)):
            self.tell("warning", kind="solo", text=text)
        self._reader = Reader(self.run.store)
        timing = self.run.timing
        self._fresh_s, self._tick_s = 3 * timing.dead_after, max(TICK_S, timing.poll)
        self._found = {s.handle.slot: s for s in self.executor.poll(self.executor.find(self.run.url))}
        self._tracks: dict[str, Track] = {}
        self._publisher = self._tracked(PUBLISH)
        self._published = False
        self._leaving = ""  # why we end before the run is done
        self._killing = False
        self._verdict: Outcome | None = None
        self._ending_since: float | None = None
        self._trouble_since: float | None = None

    # ------------------------------------------------------------------ from outside

    def leave(self, why: str = "interrupted") -> None:
        """Ask every replica to go, and end.  Safe in a signal handler."""
        self._leaving = self._leaving or why

    def kill(self) -> None:
        """End every replica now.  Safe in a signal handler."""
        self._killing = True
        self.leave("killed")

    def handle(self, slot: str) -> Handle | None:
        """The running process of a slot."""
        track = self._tracks.get(slot)
        return track.handle if track and track.running else None

    def tell(self, event: str, **fields: object) -> None:
        self._journal.tell(event, **fields)
        self._journal.flush()

    # ------------------------------------------------------------------ the loop

    def supervise(self) -> Outcome:
        """Until the run is done, or cannot go on, or somebody asks us to end."""
        self.show(self._reader.refresh())  # the first launch may take a while
        while (outcome := self._patient_tick()) is None:
            self.clock.sleep(self._tick_s)
        self.tell("stopped", code=outcome.code, text=outcome.text)
        self.lease.beat("left")
        return outcome

    def _patient_tick(self) -> Outcome | None:
        try:
            outcome, self._trouble_since = self.tick(), None
            return outcome
        except StoreError as error:  # the replicas wait for it too; nothing is lost meanwhile
            if self._trouble_since is None:
                print(f"waiting for the store, as the replicas do: {error}", file=sys.stderr, flush=True)
                self._trouble_since = self.clock.now()
            if self.clock.now() - self._trouble_since > PATIENCE_S:
                raise
            return None

    def tick(self) -> Outcome | None:
        """One look and what follows from it."""
        if self.lease.lost:
            return Outcome(LOST_LEASE, "another supervisor has taken over; it keeps the replicas")
        self.lease.beat("watching")
        report = self._reader.refresh()
        self._look(report)
        self._publish()
        for action in plan(self._desired(report), self._observed(report), self.clock.now(), self.limits):
            self._act(action)
        self.each_tick(self, report)
        self.show(report)
        return self._ended(report)

    def _desired(self, report: Report) -> Desired:
        wanted = report.wanted
        slots = frozenset(s for s in wanted.slots if not wanted.leaves(s))
        return Desired(slots, done=report.done, ending=bool(self._leaving))

    def _ended(self, report: Report) -> Outcome | None:
        """The outcome, once nobody runs any more."""
        over = self._verdict or self._over(report)
        if over is None:
            return None
        running = [t.handle for t in self._all() if t.running and t.handle]
        if self._ending_since is None:
            self._ending_since = self.clock.now()
        if self._killing or self.clock.now() - self._ending_since > GRACE_S:
            self.executor.cancel(running, grace_s=0.0)
        return None if running else over

    def _over(self, report: Report) -> Outcome | None:
        if report.done:
            return Outcome(exitcodes.DONE, f"all {report.head} outer steps are committed")
        if self._leaving or report.wanted.stop:
            why = self._leaving or "stopped by `diloco stop`"
            where = f"at outer step {report.head} of {report.wanted.steps}"
            return Outcome(exitcodes.LEFT, f"{why} {where}; nothing is lost")
        return None

    # ------------------------------------------------------------------ looking

    def _all(self) -> list[Track]:
        return [*self._tracks.values(), self._publisher]

    def _tracked(self, slot: str) -> Track:
        """A slot as it was before us: its process goes on if it runs, else only its number counts."""
        found = self._found.get(slot)
        if found is None:
            return Track(slot)
        h = found.handle
        if found.state.ended:
            return Track(slot, attempt=h.attempt, gone=(h.host, h.pid))
        return Track(slot, h, found, h.attempt, still_since=self.clock.now())

    def _look(self, report: Report) -> None:
        for slot in report.wanted.slots:
            if slot not in self._tracks:
                self._tracks[slot] = self._tracked(slot)
        known = {t.handle: t for t in self._all() if t.handle is not None}
        for status in self.executor.poll(list(known)):
            self._note(known[status.handle], status, report)
        for slot, beat in report.beats.items():
            self._note_beat(self._tracks[slot], beat)

    def _note(self, track: Track, status: Status, report: Report) -> None:
        was_running, track.status = track.running, status
        if was_running and status.state.ended:
            track.ended_at, track.gone = self.clock.now(), (status.handle.host, status.handle.pid)
            if status.state not in (State.SUCCEEDED, State.CANCELLED):
                self._count(track, status, report)

    def _count(self, track: Track, status: Status, report: Report) -> None:
        """An end before the run's: counted from zero if its life had brought something."""
        pid = status.handle.pid
        useful = any(x.slot == track.slot and x.pid == pid and x.commits for x in report.lives)
        track.losses = 1 + (0 if useful else track.losses)
        own_fault = status.state is State.FAILED and status.exit_code not in BLAMELESS
        track.failures = own_fault + (0 if useful else track.failures)
        tail = self.executor.logs(status.handle, 8)
        self.tell("lost", slot=track.slot, pid=pid, exit_code=status.exit_code, reason=status.reason, tail=tail)

    def _note_beat(self, track: Track, beat: Beat) -> None:
        seen = (beat.generation, beat.n)
        if seen != track.beat:
            track.moves += track.beat is not None
            track.beat, track.still_since = seen, self.clock.now()

    def _observed(self, report: Report) -> list[Seen]:
        return [self._seen(t, report.beats.get(t.slot)) for t in self._tracks.values()]

    def _seen(self, t: Track, beat: Beat | None) -> Seen:
        ours = beat is not None and t.handle is not None and (beat.host, beat.pid) == (t.handle.host, t.handle.pid)
        silent = self.clock.now() - t.still_since if ours else 0.0
        state, code = (t.status.state, t.status.exit_code) if t.status else (None, None)
        return Seen(t.slot, state, code, t.ended_at, self._holder(t, beat), silent, t.losses, t.failures)

    def _holder(self, t: Track, beat: Beat | None) -> Holder:
        if beat is None:
            return "none"
        if beat.phase == "left":
            return "left"
        still = self.clock.now() - t.still_since
        if still >= self._fresh_s or (beat.host, beat.pid) == t.gone:  # gone: no need to wait
            return "silent"
        return "beating" if t.moves else "unknown"

    # ------------------------------------------------------------------ acting

    def _act(self, action: Action) -> None:
        track = self._tracks[action.slot]
        if isinstance(action, Launch | Replace) and self._verdict is None:
            if isinstance(action, Replace) and track.running and track.handle:
                self.executor.cancel([track.handle], grace_s=0.0)
            self._launch(track, action.why)
        elif isinstance(action, Drain) and track.handle:
            self.executor.cancel([track.handle], GRACE_S)
        elif isinstance(action, GiveUp) and self._verdict is None:
            self._give_up(track, action.why)

    def _launch(self, track: Track, why: str) -> None:
        newest = track.beat[0] if track.beat else 0
        argv = (self.run.url, "--slot", track.slot, *(("--parent", self.parent) if self.parent else ()))
        self._start(
            track, ReplicaSpec(self.run.url, track.slot, 1 + max(track.attempt, newest), self.entrypoint, argv), why
        )

    def _start(self, track: Track, spec: ReplicaSpec, why: str) -> None:
        if self.lease.lost:
            return  # the next tick ends us
        (track.handle,) = self.executor.launch_replicas([spec])
        track.status = Status(track.handle, State.STARTING)
        track.attempt, track.launches, track.still_since = spec.attempt, track.launches + 1, self.clock.now()
        self.tell("launched", slot=spec.slot, pid=track.handle.pid, attempt=spec.attempt, why=why)

    def _give_up(self, track: Track, why: str) -> None:
        tail = self.executor.logs(track.handle, 12) if track.handle else []
        self._stop_for(track.slot, track.status.exit_code if track.status else None, why, tail)

    def _stop_for(self, slot: str, exit_code: int | None, why: str, tail: list[str]) -> None:
        """The run cannot go on: everybody leaves, and the caller hears why."""
        code = exit_code if exit_code in (exitcodes.USER_ERROR, exitcodes.GAVE_UP) else FAILED
        text = "\n".join([f"{slot}: {why}. Its last lines:", *(f"    {line}" for line in tail)])
        self._verdict = Outcome(code, text)
        self._leaving = self._leaving or why
        self.tell("gave_up_on", slot=slot, why=why, tail=tail)

    # ------------------------------------------------------------------ θ₀

    def _publish(self) -> None:
        """One child puts θ₀ into the bucket, beside the replicas that are starting."""
        p = self._publisher
        if self._published or self._leaving or p.running:
            return
        if self.run.store.get(layout.MODEL_MANIFEST) is not None:
            self._published = True
            if p.launches:
                self.tell("published", seconds=self.clock.now() - p.still_since)
        elif p.status and (p.status.exit_code == exitcodes.USER_ERROR or p.launches >= self.limits.failures):
            tail = self.executor.logs(p.status.handle, 12)
            self._stop_for("the start model", p.status.exit_code, "it cannot be published", tail)
        else:
            spec = ReplicaSpec(self.run.url, PUBLISH, p.attempt + 1, PUBLISHER, (self.run.url,))
            self._start(p, spec, "the run has no model yet")


def main(argv: list[str] | None = None) -> int:
    """A supervisor of its own, for a detached run: ends when told to, and its replicas stay."""
    from executors.local import LocalProcessExecutor

    parser = argparse.ArgumentParser(prog="python -m executors.supervisor", description="Keep a run's replicas alive.")
    parser.add_argument("url", help="the run")
    args = parser.parse_args(argv)
    executor = LocalProcessExecutor(PRELOAD)
    try:
        outcome = Supervisor(read_run(args.url), executor, SystemClock()).supervise()
    except RendezvousError as error:
        outcome = Outcome(FAILED, str(error))
    finally:
        executor.close()
    print(outcome.text, flush=True)
    return outcome.code


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    sys.exit(main())
