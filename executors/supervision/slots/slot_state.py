"""A supervisor's knowledge about one slot.

    log in the bucket ──▶ past ──▶ SlotState ◀── polls (the platform's statuses)
                                     │      ◀── the replica's heartbeats
                                     └─▶ Observation, for the plan

A heartbeat belongs to a handle if it names the handle's place on a platform, or its pid on this machine.

Not promised: the time of an end while no supervisor runs; the next supervisor counts the end when it looks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from diloco.process import exitcodes
from diloco.runlog.reader import SUPERVISOR
from diloco.runlog.sessions import SessionSummary
from executors.platforms.base import Handle, State, Status
from executors.supervision.slots.plan import NO_STRIKES, Holder, Observation, SessionEnd, Strikes, count_end
from rendezvous.machine import machine_name
from rendezvous.records.records import Beat
from rendezvous.records.schema import from_json

LOCAL = "local"
LOST_LEASE = 3  # the exit code of a supervisor when another supervisor has taken over
BLAMELESS = (exitcodes.FENCED, exitcodes.LEFT, exitcodes.DIVERGED, exitcodes.RESUME, exitcodes.GAVE_UP)


def is_from_launch(handle: Handle, who: Beat | SessionSummary) -> bool:
    """Whether this heartbeat or session comes from that launch."""
    if handle.place:
        return who.host == handle.place
    return (who.host, who.pid) == (handle.host, handle.pid)


def can_be_asked(handle: Handle) -> bool:
    """Whether the handle's status can be polled; for a local process of another machine, we see only heartbeats."""
    return bool(handle.native) or handle.executor != LOCAL or handle.host == machine_name()


def begin_fields(handle: Handle) -> dict[str, Any]:
    """Return the fields of a launch for the log, where bills and the next supervisor find it."""
    about = {"slot": handle.slot, "pid": handle.pid, "attempt": handle.attempt, "executor": handle.executor}
    price = {"usd_per_hour": handle.usd_per_hour, "launched_at": handle.launched_at}
    return {**about, **price, "handle": handle.to_dict()}


def end_fields(status: Status) -> dict[str, Any]:
    """Return the fields of an end for the log."""
    h = status.handle
    about = {"slot": h.slot, "attempt": h.attempt, "executor": h.executor, "state": str(status.state)}
    times = {"began_at": status.began_at, "ended_at": status.ended_at} if status.ended_at else {}
    process = {"pid": h.pid} if h.pid and not h.native else {}
    return {**about, **process, "native": h.native, "exit_code": status.exit_code, "reason": status.reason, **times}


@dataclass(frozen=True)
class History:
    """A slot's past, from the log.

    attempt: the highest number used.   strikes: consecutive ends.   ended_at: Unix time of the last end.
    state, exit_code, reason: facts of that end.   open: launches without an end in the log.
    pending: whether the newest of them waited for a machine.
    """

    attempt: int = 0
    strikes: Strikes = NO_STRIKES
    ended_at: float = 0.0
    state: State | None = None
    exit_code: int | None = None
    reason: str = ""
    open: tuple[Handle, ...] = ()
    pending: bool = False


def past(events: Iterable[Mapping[str, Any]], run: str = "") -> dict[str, History]:
    """Return the past of each slot, from the events of supervisors (Report.events).   run: the run's URL.

    Strikes are reset after an end that the user has seen: the supervisor stopped, or gave the run up.
    """
    found: dict[str, History] = {}
    for e in events:
        if not e["who"].startswith(SUPERVISOR):
            continue
        kind = e["event"]
        slot = e["slot"]
        if kind == "gave_up_on" or (kind == "stopped" and e.get("code") != LOST_LEASE):
            found = {s: History(p.attempt, open=p.open, pending=p.pending) for s, p in found.items()}
        elif kind in ("pending", "running") and slot in found:
            found[slot] = replace(found[slot], pending=kind == "pending")
        elif kind in ("launched", "found", "lost", "ended"):
            found[slot] = _history_after(found.get(slot, History()), e, run)
    return found


def _history_after(p: History, e: Mapping[str, Any], run: str) -> History:
    attempt = e.get("attempt", p.attempt)
    native = native_of(e)  # None: the event is about all processes of its launch
    others = tuple(h for h in p.open if h.attempt != attempt or native not in (None, h.native))
    if e["event"] in ("launched", "found"):
        launched = handle_in(e, run)
        still = (*others, *([launched] if launched else []))
        return replace(p, attempt=max(p.attempt, attempt), open=still, pending=False)
    if e["event"] == "ended":
        return replace(p, open=others) if attempt < p.attempt or e.get("duplicate") else History(p.attempt, open=others)
    state = State(e["state"]) if e.get("state") in list(State) else State.LOST
    strikes = count_end(p.strikes, end_in(e))
    return History(p.attempt, strikes, e["at"], state, e.get("exit_code"), e.get("reason", ""), open=others)


def native_of(e: Mapping[str, Any]) -> str | None:
    """Return the platform's id of the process that an event is about; None if the event has none."""
    handle = e.get("handle") or {}
    found = e.get("native", handle.get("native"))
    return found if isinstance(found, str) else None


def handle_in(e: Mapping[str, Any], run: str = "") -> Handle | None:
    """Return the handle of the event's launch; None if the event has no valid handle.

    Any writer may have forged the event, so the handle must name the event's slot and attempt, and gets the log's run.
    """
    try:
        found = from_json(Handle, e["handle"])
    except (KeyError, ValueError):
        return None
    if (found.slot, found.attempt) != (e["slot"], e.get("attempt", found.attempt)):
        return None
    return replace(found, run=run or found.run)


def end_in(e: Mapping[str, Any]) -> SessionEnd:
    """Return the end in a "lost" event.  Older releases wrote no `counted`, and the oldest no `useful`."""
    counted = e.get("counted", int(e.get("useful", True)))
    return SessionEnd(counted, own_fault=e.get("own_fault", False), by_reward=e.get("by_reward", False))


@dataclass
class SlotState:
    """The state of one slot.

    handle, status: the slot's present or last process.   attempt: the highest number used so far.
    gone: the last ended launch.   beat: generation and number of the last heartbeat.   moves: number of its changes.
    running_since: when a poll first saw it running.   beaten: a heartbeat has come since.   ran: it may have run.
    pending: it waits for a machine (from the log).   unseen: this supervisor has not seen the process alive.
    replacing_at, draining_at: when we asked it to end, for a replacement or for good.
    cancelled: time and grace of our cancel at the platform.
    asked: the heartbeat at our request to leave.   lost: the work that the kill then lost, in words.
    """

    slot: str
    handle: Handle | None = None
    status: Status | None = None
    attempt: int = 0
    launches: int = 0
    launched_at: float = 0.0
    gone: Handle | None = None
    ended_at: float = 0.0
    strikes: Strikes = NO_STRIKES
    beat: tuple[int, int] | None = None
    beaten: bool = False
    moves: int = 0
    moved_at: float | None = None
    still_since: float = 0.0
    running_since: float | None = None
    ran: bool = False
    pending: bool = False
    waits: tuple[float, tuple[str, ...]] | None = None  # the wait for a machine: since when; its logged reasons
    unseen: bool = False
    replacing_at: float | None = None
    draining_at: float | None = None
    cancelled: tuple[float, float] | None = None
    asked: Beat | None = None
    lost: str = ""

    @classmethod
    def after(cls, slot: str, past: History, found: Status | None, clock_now: float, wall: float) -> "SlotState":
        """Make the state of a slot under a new supervisor.  A process with no counted end is treated as running.

        found: the status of the slot's present or last process.
        """
        number = max(past.attempt, found.handle.attempt if found else 0)
        uncounted = found is not None and any(h.attempt == found.handle.attempt for h in past.open)
        if found is not None and (not found.state.ended or uncounted):
            state = cls(slot, found.handle, Status(found.handle, State.STARTING), number)
            state.still_since = state.ended_at = clock_now
            state.pending = past.pending
            state.ran = not past.pending
            state.unseen = True
        else:
            state = cls(slot, attempt=number, gone=found.handle if found else None)
        state.strikes = past.strikes
        if state.handle is None and past.state is not None:
            ghost = found.handle if found else Handle("", slot, past.attempt, "")
            state.status = Status(ghost, past.state, past.reason, past.exit_code)
            state.ended_at = clock_now - max(0.0, wall - past.ended_at)
        return state

    @property
    def running(self) -> bool:
        return self.handle is not None and self.status is not None and not self.status.state.ended

    def launched(self, handle: Handle, now: float) -> None:
        """Record a new launch."""
        self.handle = handle
        self.status = Status(handle, State.STARTING)
        self.attempt = handle.attempt
        self.launches = self.launches + 1
        self.launched_at = now
        self.still_since = now
        self.beaten = False
        self.running_since = None
        self.ran = False
        self.pending = self.unseen = False
        self.asked, self.lost = None, ""
        self.replacing_at = self.draining_at = self.cancelled = None

    def forget(self) -> None:
        """Clear the slot: it is not desired any more, and its process has ended."""
        self.handle = None
        self.status = None
        self.strikes = NO_STRIKES
        self.replacing_at = self.draining_at = self.cancelled = None

    def polled(self, status: Status, now: float) -> None:
        """Record the platform's status."""
        was_running = self.running
        if status.state is State.RUNNING and (self.status is None or self.status.state is not State.RUNNING):
            self.running_since = now
            self.ran = True
        self.status = status
        if was_running and status.state.ended:
            self.ended_at = now
            self.gone = status.handle
        else:
            self.unseen = False

    def heard(self, beat: Beat, now: float, fresh_s: float) -> None:
        """Record the slot's heartbeat, which shows more reliably than the platform's status that the replica runs."""
        newest = (beat.generation, beat.n)
        if newest != self.beat:
            self.moves, self.moved_at = (0, None) if self.beat is None else (self.moves + 1, now)
            self.beat = newest
            self.still_since = now
        if self.handle is None or beat.phase == "left" or not is_from_launch(self.handle, beat):
            return
        self.beaten = self.running_since is None or self.still_since >= self.running_since
        s = self.status
        fresh = self.moved_at is not None and now - self.moved_at < fresh_s
        if fresh and s is not None and s.state in (State.PENDING, State.STARTING):
            self.polled(replace(s, state=State.RUNNING), now)

    def observe(self, beat: Beat | None, now: float, fresh_s: float) -> Observation:
        """Return the observation of this slot, for the plan."""
        s = self.status
        since = lambda at: None if at is None else now - at  # noqa: E731
        return Observation(
            slot=self.slot,
            state=s.state if s else None, exit_code=s.exit_code if s else None, reason=s.reason if s else "",
            ended_at=self.ended_at,
            holder=self._classify_holder(beat, now, fresh_s),
            silent_s=self._silent_s(beat, now), beaten=self.beaten,
            losses=self.strikes.losses, failures=self.strikes.failures,
            reward_failures=self.strikes.reward_failures if self.strikes.by_reward else 0,
            native=bool(self.handle and self.handle.native),
            replacing_s=since(self.replacing_at), draining_s=since(self.draining_at),
        )  # fmt: skip

    def _silent_s(self, beat: Beat | None, now: float) -> float:
        """Return seconds since the process began to run (again), or since its last new heartbeat, if that is later."""
        ran = 0.0 if self.running_since is None else now - self.running_since
        own = self.handle is not None and beat is not None and is_from_launch(self.handle, beat)
        return min(ran, now - self.still_since) if own else ran

    def _classify_holder(self, beat: Beat | None, now: float, fresh_s: float) -> Holder:
        if beat is None:
            return "none"
        if beat.phase == "left":
            return "left"
        if now - self.still_since >= fresh_s or (self.gone is not None and is_from_launch(self.gone, beat)):
            return "silent"
        return "beating" if self.moves else "unknown"
