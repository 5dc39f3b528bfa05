"""Ends a run's replicas, and proves that they have ended.

    control: stop ─▶ replicas offer their work and end   ─▶ after `grace_s`: no supervisor may launch any more
                                                         ─▶ cancel on every platform, kill -9 on this machine
                                                         ─▶ poll until each launch has ended
                                                         ─▶ search each platform's list for the run's label, until
                                                            it has no live process and can show no late one any more
                                                         ─▶ read heartbeats, until two more would have come
                                                         ─▶ stop the run's boxes, if it has any (boxes.py)
    no space for the request ─▶ SIGTERM, later SIGKILL to the supervisor and the replicas of this machine; replicas
                                elsewhere may live: without space, no heartbeat can change

    --purge: control: places, former ──▶ each executor's purge ──▶ descriptions

On Modal a purge removes the app (which costs nothing and has no containers) and the register of launches.  The run
itself (models, commits and logs) is never changed: it stays at the URL of --run, even if that is on Modal.

Not promised: an end of processes on machines that we cannot signal; `stop` reports a process whose heartbeat changes.
A purge does not remove images, secrets and weights, because other runs may use them.
"""

import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diloco.process import exitcodes, processes
from diloco.process.journal import Journal
from diloco.process.processes import host_name, host_words
from diloco.run.config import ConfigError
from diloco.run.founding import is_finished
from diloco.run.record import Run, decode_run, read_run
from diloco.runlog.reader import SUPERVISOR
from diloco.units import duration
from executors.platforms.base import FleetExecutor, Handle, State, Status
from executors.platforms.on_host.executor import REAP_S, claimed_process, newest_claims, unproven_process
from executors.platforms.places import build_executor
from executors.supervision.grace import GRACE_S, boundary_of, leave_s, lost_work, usual_s
from executors.supervision.holder import supervisor_of, timed_request_s
from executors.supervision.lease import Lease
from executors.supervision.outage import launch_name
from executors.supervision.slots.launches import LAG_S, Launches
from executors.supervision.slots.slot_state import begin_fields, end_fields
from executors.supervision.slots.slots import PUBLISH
from rendezvous import layout
from rendezvous.agreement.membership import REQUESTS, read_beat, read_control, read_leave
from rendezvous.agreement.salvage import read_standing_control
from rendezvous.agreement.stop import write_stop
from rendezvous.background import fetch_together, together_on
from rendezvous.clock import Clock
from rendezvous.errors import Fenced, RendezvousError, StoreFull
from rendezvous.machine import machine_name
from rendezvous.records.records import Beat, Claim
from rendezvous.store import Store

FRESH_S = 60.0  # a heartbeat older than this sets the replica's grace only after the heartbeat has changed
LOOK_S, LOOK_FAR_S = 1.0, 12.0  # silent: no change for so long; live heartbeats change every 0.2 s, or every 5 s
KILLED_S = REAP_S + 2.0  # time for a killed process to end, also if its exit code cannot be written
CANCEL_S, CANCELLED_S = 15.0, 120.0  # a platform's own grace, and its time to report the end of a process
PAUSE_S, ASK_S = 0.1, 1.0  # pauses between looks at this machine and the bucket, and at a platform


@dataclass(frozen=True)
class End:
    """The end of a slot's newest generation, a launch, the supervisor or the boxes.   live: no end is proven."""

    name: str
    live: bool
    text: str


class _TakenBack(Exception):
    """Since the request to stop, another command has let the run go on."""


class Patience:
    """The time, from the heartbeats, that the slowest replica may take to leave after the request; it never shrinks.

    A replica that has ended an inner step since the request uploads, and may take longer (grace.leave_s).
    grace_s: fixed seconds, or None to follow the heartbeats.
    silent_s: seconds without a change after which a heartbeat is silent.
    can_beat: whether the store has had room for each record. Without room, an unchanged heartbeat proves no end.
    """

    def __init__(self, store: Store, clock: Clock, grace_s: float | None) -> None:
        self.can_beat = True
        self.has_asked = False  # whether a request to stop stands in the control records
        self._store, self._clock, self._fixed = store, clock, grace_s
        self._boundary = 1
        with suppress(RendezvousError, ConfigError):  # replicas of a damaged run must end, too
            self._boundary = boundary_of(read_run(store.url))
        self._asked = {} if grace_s is not None else self._beats()
        self._seconds = 0.0
        request_s = timed_request_s(store, clock)
        self._usual = usual_s(request_s, GRACE_S)
        self.silent_s = (LOOK_S if getattr(store, "near", False) else LOOK_FAR_S) + REQUESTS * request_s
        self._changed: dict[str, tuple[Beat, float]] = {}  # slot -> newest heartbeat, and when it was first seen

    def hears(self, claim: Claim) -> bool:
        """Whether the claim's session has not left, and its heartbeat has changed within the time of two heartbeats."""
        beat = _beat_of_claim(self._store, claim)
        if beat is None or beat.phase == "left" or _has_ended_here(claim):
            return False
        newest, since = self._changed.get(claim.slot, (None, 0.0))
        if newest is None or (newest.generation, newest.n) != (beat.generation, beat.n):
            self._changed[claim.slot] = beat, (since := self._clock.now())
        return self._clock.now() - since < self.silent_s

    def seconds(self) -> float:
        if self._fixed is not None:
            return self._fixed
        now = self._clock.wall()
        for slot, beat in self._beats().items():
            asked = self._asked.get(slot)
            if now - beat.at < FRESH_S or beat != asked:  # a changed heartbeat is alive, even if clocks differ
                self._seconds = max(self._seconds, leave_s(beat, asked, self._boundary, self._usual))
        return self._seconds or self._usual

    def _beats(self) -> dict[str, Beat]:
        return {slot: beat for slot, beat in _newest_beats(self._store).items() if beat is not None}


def stop_run(
    store: Store, clock: Clock, grace_s: float | None, say: Callable[[str], None], executor: FleetExecutor | None = None
) -> list[End]:
    """Ask all replicas to leave, wait, end the rest, look again; return an End per slot, launch and supervisor.

    grace_s: seconds that replicas may take; None: by the pace of their inner steps.
    executor: the platforms of the replicas (default: those in the run's control records).
    """
    patience = Patience(store, clock, grace_s)
    if _is_over(store, clock.wall()):
        say("the run is finished and no replica sends a heartbeat; looking for processes that it left")
    else:
        _ask_to_leave(store, clock, patience, say)
    try:
        return _end_everything(store, clock, patience, say, executor)
    except _TakenBack:
        how = "another command (resume or train) has let the run go on"
        return [End("run", True, f"{how} since this one asked it to stop; nothing was killed")]


def _refuse_taken_back(store: Store, patience: Patience) -> None:
    with suppress(RendezvousError):  # replicas of a damaged run must end, too
        if patience.has_asked and not read_control(store).stop:
            raise _TakenBack


def _is_over(store: Store, now: float) -> bool:
    """Whether the run has all its outer steps, and no process that would read a stop request.   now: Unix time."""
    with suppress(RendezvousError, ConfigError):  # replicas of a damaged run are asked to leave, too
        read_run(store.url)
        beats = _newest_beats(store).values()
        heard = any(b is not None and b.phase != "left" and abs(now - b.at) < FRESH_S for b in beats)
        if heard or not is_finished(store, read_control(store)):
            return False
        return not _local_processes(store) and supervisor_of(store) is None
    return False


def _ask_to_leave(store: Store, clock: Clock, patience: Patience, say: Callable[[str], None]) -> None:
    try:
        lost = write_stop(store, clock)
    except StoreFull as error:
        patience.can_beat = False
        say(
            f"warning: the request to stop could not be written: {error}\nwarning: processes of this machine get a "
            "signal instead, and platforms cancel theirs; a supervisor and replicas elsewhere do not know of this stop"
        )
        return _signal_here(store, signal.SIGTERM)
    patience.has_asked = not lost  # after a loss, records do not tell whether another command took it back
    if lost:
        say(f"warning: {lost}\nwarning: places that only a lost record names are not asked; look at their consoles")
    say(f"asked every replica to leave; they offer what they have first, within {duration(patience.seconds())}")


def _signal_here(store: Store, number: signal.Signals) -> None:
    """Signal the run's processes on this machine: first the supervisor, which would start replicas again."""
    supervisor = _other_supervisor(store)
    claimed = [] if supervisor is None else [claimed_process(store.url, supervisor)]
    for process in [*claimed, *_local_processes(store)]:
        if process is not None:
            processes.send_signal(process.pid, process.started, number, run=store.url)


def _end_everything(
    store: Store, clock: Clock, patience: Patience, say: Callable[[str], None], executor: FleetExecutor | None
) -> list[End]:
    launches = Launches(store, executor)
    try:
        launches.cancel(launches.waiting, 0.0)  # these launches have no process yet that could read the request
        if not patience.can_beat:  # a process without a claim, as `publish`, has had no signal
            claimed = [(h.pid, h.started) for h in _local_processes(store)]
            for h in [h for h in _launched_here(launches) if (h.pid, h.started) not in claimed]:
                processes.send_signal(h.pid, h.started, signal.SIGTERM, run=store.url)
        _wait_until_ended(store, clock, patience, launches)
        launches.refresh()  # a supervisor may have launched something meanwhile
        lease = _seize_if_needed(store, clock, patience, launches)
        _end_remaining(store, clock, patience, say, launches)
        left = _sweep_until_none(clock, say, launches)
        if launches.strangers and lease is None:
            lease = _seize_if_needed(store, clock, patience, launches)
        _write_down(store, clock, lease, launches)
        found = [End("platform", True, text) for text in left] or _stranger_ends(launches)
        return [*prove_ends(store, clock, launches, patience), *found, *_end_boxes(store)]
    finally:
        launches.close()


def _end_boxes(store: Store) -> list[End]:
    """Stop the boxes of a run that uses boxes; return one End for all boxes."""
    with suppress(RendezvousError, ConfigError):  # a damaged run does not say whether it has boxes
        run = Run(store.url, store, decode_run(store.url, store.get(layout.RUN) or b""))  # read_run has no retries
        if run.config.inner.sampling.boxes is not None:
            from executors.supervision.boxes import sweep_boxes

            swept = sweep_boxes(run)
            return [End("boxes", not swept.none_left, swept.text)]
    return []


def _seize_if_needed(store: Store, clock: Clock, patience: Patience, launches: Launches) -> Lease | None:
    """Seize the supervisor's lease, so that no supervisor launches any more; None if no process is left to end.

    Without room for the claim, the processes of this machine are killed."""
    if not (launches.look() or launches.unbooked or launches.strangers) and supervisor_of(store) is None:
        return None
    try:
        return Lease.seize(store, clock)
    except Fenced:
        return None
    except StoreFull:
        patience.can_beat = False
        _signal_here(store, signal.SIGKILL)
        return None


def _end_remaining(
    store: Store, clock: Clock, patience: Patience, say: Callable[[str], None], launches: Launches
) -> None:
    """Kill or cancel every replica that has not left."""
    grace_s = patience.seconds()
    local = {(h.pid, h.started): h for h in [*_launched_here(launches), *_local_processes(store)]}
    for handle in local.values():
        if processes.send_signal(handle.pid, handle.started, signal.SIGKILL, run=store.url, group=True):
            say(f"{handle.slot}: pid {handle.pid} was still there after {grace_s:.0f} s; killed")
    rented = [h for h in launches.there if h.native]
    for h in rented:
        say(f"{h.slot}: {h.native} on {h.executor} was still there after {grace_s:.0f} s; it is cancelled now")
    launches.cancel(rented, CANCEL_S)
    if rented:
        _wait_until_ended(store, clock, patience, launches, CANCELLED_S)
    _wait_until_ended(store, clock, patience, launches, KILLED_S)


def _launched_here(launches: Launches) -> list[Handle]:
    return [h for h in launches.there if not h.native and h.host == machine_name()]


def _sweep_until_none(clock: Clock, say: Callable[[str], None], launches: Launches) -> list[str]:
    """Cancel processes with the run's label until no platform lists one for a while; return those that do not end."""
    if not launches.labelled:
        return []
    began = clock.now()
    shown = set[str]()
    lag_s = launches.lag_s(clock.wall())
    while True:
        there = launches.sweep()
        for text in [text for text in there if text not in shown]:
            shown.add(text)
            say(f"{text}: it had no supervisor; it is cancelled now")
        waited = clock.now() - began
        if (not there and waited >= lag_s) or waited >= CANCELLED_S or launches.out_of_reach:
            return there
        clock.sleep(ASK_S)


def _write_down(store: Store, clock: Clock, lease: Lease | None, launches: Launches) -> None:
    """Log the ends that no supervisor has logged, which closes their bills."""
    if lease is None:
        return
    journal = Journal(store, clock, SUPERVISOR, lease.generation)
    launches.read_log()  # a supervisor that has just ended may have logged some ends
    for handle in launches.strangers:
        journal.emit("found", **begin_fields(handle), why="found by `diloco stop`; the log does not name it")
        journal.emit("ended", **end_fields(Status(handle, State.CANCELLED, "one too many")), duplicate=True)
    for status in launches.unbooked:
        unseen = {} if (status.handle.slot, status.handle.attempt) in launches.seen_alive else {"unseen": True}
        lost = f"; lost: {work}" if (work := lost_work(read_beat(store, status.handle.slot))) else ""
        journal.emit("ended", **{**end_fields(status), "reason": status.reason + lost}, **unseen)
    journal.emit("stopped", code=exitcodes.LEFT, text="stopped by `diloco stop`")
    journal.flush()
    lease.beat("left")


# -------------------------------------------------------------------- the proof


def prove_ends(store: Store, clock: Clock, launches: Launches, patience: Patience) -> list[End]:
    """Return an End for each claimed slot and each launch on a platform, with the evidence of its end or its life."""
    over = launches.ended_places
    claims = newest_claims(store)
    elsewhere = [c for c in claims if c.host not in over and claimed_process(store.url, c) is None]
    before = {c.slot: _beat_of_claim(store, c) for c in claims}
    began = clock.now()
    while any(patience.hears(c) for c in elsewhere) and clock.now() - began < patience.silent_s:
        clock.sleep(PAUSE_S)
    found = [_prove_claim_end(store, c, before[c.slot], over, can_beat=patience.can_beat) for c in claims]
    found += [_launch_end(launches, h) for h in launches.there]
    done = (SUPERVISOR, PUBLISH) if store.get(layout.MODEL_MANIFEST) is not None else (SUPERVISOR,)
    found += _never_began(launches, {c.slot for c in claims}, done)
    supervisor = _other_supervisor(store)
    if supervisor is not None:
        where = host_words(supervisor.host)
        found.append(End("supervisor", True, f"pid {supervisor.pid} on {where} has not ended yet"))
    if launches.out_of_reach:
        found.append(End("platforms", True, f"not all of them could be asked: {launches.out_of_reach}"))
    return found


def _never_began(launches: Launches, claimed: set[str], done: Sequence[str]) -> list[End]:
    """Return the ends of launches whose slots were never claimed, so that there are no heartbeats.

    done: slots to leave out: the supervisor's slot, and the publisher's slot after θ₀ was written."""
    over = [s for s in launches.statuses.values() if s.state.ended and not s.stale]
    ended = [(s.handle, f"{s.state}, {s.reason}") for s in over if s.handle.slot not in (*claimed, *done)]
    found = [End(launch_name(h), False, f"{h.executor} ({h.native or 'no process'}): {how}") for h, how in ended]
    unseen = launches.there or launches.strangers or launches.out_of_reach
    if not (found or claimed or unseen) and launches.begun:
        text = f"the log has launches, and none of them runs; looked until {LAG_S:.0f} s after the last launch"
        found.append(End("launches", False, text))
    return found


def _stranger_ends(launches: Launches) -> list[End]:
    """Return the ends of replicas that the log does not name and that no platform lists any more."""
    return [
        End(launch_name(h), False, f"{h.executor} ({h.native or h.pid}): cancelled, it had no supervisor")
        for h in sorted(launches.strangers, key=lambda h: (h.slot, h.attempt, h.native))
    ]


def _launch_end(launches: Launches, handle: Handle) -> End:
    status = launches.statuses[handle.slot, handle.attempt]
    where = f"{handle.executor} ({handle.native or handle.pid})"
    text = f"{where} could not be asked: {status.trouble}" if status.stale else f"still {status.state} on {where}"
    return End(launch_name(handle), True, text)


def _prove_claim_end(store: Store, claim: Claim, before: Beat | None, over: set[str], *, can_beat: bool) -> End:
    name = f"{claim.slot}-{claim.generation}"
    process = claimed_process(store.url, claim)
    if process is not None:
        return End(name, True, f"pid {process.pid} still runs")
    if (process := unproven_process(store.url, claim)) is not None:
        text = f"pid {process.pid} runs here, and does not say for which run, so it was not killed; look at it yourself"
        return End(name, True, text)
    if old := _renamed_from(store, claim):
        text = f"pid {claim.pid} runs here for {old}, which has another name now. Rename it back and stop it there"
        return End(name, True, f"{text}, or `kill {claim.pid}`")
    now = _beat_of_claim(store, claim)
    last = now if now is not None and now.phase == "left" else None  # a late request may have overwritten that beat
    if left := last or read_leave(store, claim.slot, claim.generation):
        return End(name, False, f"left at outer step {left.step}")
    where = f"pid {claim.pid} on {host_words(claim.host) or 'an unknown machine'}"
    if now is not None and before is not None and now.n != before.n and claim.host not in over:
        return End(name, True, f"its heartbeat changes, so it may run elsewhere: {where}")
    if not can_beat and claim.host not in (*over, machine_name()):
        text = "its heartbeat cannot change while the store is full, so it may run elsewhere"
        return End(name, True, f"{text}: {where}. Free some space, and repeat the command")
    lost = f"; lost {work}" if (work := lost_work(now)) else ""
    seen = "" if now is None else f", last seen at outer step {now.step}{lost}"
    return End(name, False, f"gone without a leave record{seen}")


def _renamed_from(store: Store, claim: Claim) -> str:
    """Return the folder for which the claim's process works on this machine, if no folder has that name any more."""
    root = getattr(store, "root", None)
    for card in sorted(Path(root).glob("processes/*.json")) if root else ():
        with suppress(OSError, ValueError, KeyError, TypeError):  # any writer may have put the object there
            told = json.loads(card.read_bytes())
            known = (told["pid"], told["started"]) == (claim.pid, claim.started) and claim.host == machine_name()
            gone = known and not Path(told["run"].removeprefix("file://")).exists()
            if gone and processes.is_alive(claim.pid, claim.started) and processes.works_for(claim.pid, told["run"]):
                return told["run"]
    return ""


def _wait_until_ended(
    store: Store, clock: Clock, patience: Patience, launches: Launches, seconds: float | None = None
) -> None:
    """Wait until no replica and no other supervisor is left, for at most `seconds`, or for the replicas' patience."""
    began, limit = clock.now(), 0.0
    looked = asked = float("-inf")
    while True:
        if clock.now() - looked >= ASK_S or clock.now() >= began + limit:
            limit, looked = patience.seconds() if seconds is None else seconds, clock.now()
            if seconds is None:  # before a process is killed
                _refuse_taken_back(store, patience)
        if clock.now() >= began + limit:
            return
        if clock.now() - asked >= (ASK_S if any(h.native for h in launches.there) else 0.0):
            launches.look()
            asked = clock.now()
        over = launches.ended_places
        waiting = [c for c in newest_claims(store) if c.host not in over and _may_be_alive(store, c, patience)]
        if not waiting and not launches.there and _other_supervisor(store) is None:
            return
        clock.sleep(PAUSE_S)


def _other_supervisor(store: Store) -> Claim | None:
    """Return the supervisor's claim, unless it is the claim of this process, which seized the lease to end the run."""
    holder = supervisor_of(store)
    mine = holder is not None and (holder.host, holder.pid) == (host_name(), os.getpid())
    return None if mine else holder


def _may_be_alive(store: Store, claim: Claim, patience: Patience) -> bool:
    """Whether the claim's process runs here, or its heartbeat is not silent."""
    return claimed_process(store.url, claim) is not None or patience.hears(claim)


def _has_ended_here(claim: Claim) -> bool:
    """Whether the claim's process was on this machine, and has ended."""
    is_here = bool(claim.started) and claim.host == host_name() == machine_name()
    return is_here and not processes.is_alive(claim.pid, claim.started)


def _beat_of_claim(store: Store, claim: Claim) -> Beat | None:
    beat = read_beat(store, claim.slot)
    return beat if beat is not None and beat.generation == claim.generation else None


def _newest_beats(store: Store) -> dict[str, Beat | None]:
    """Return the heartbeat of each slot's newest claim; None without it."""
    claims = {claim.slot: claim for claim in newest_claims(store)}
    return fetch_together(together_on(store), lambda slot: _beat_of_claim(store, claims[slot]), claims)


def _local_processes(store: Store) -> list[Handle]:
    return [h for c in newest_claims(store) if (h := claimed_process(store.url, c)) is not None]


# -------------------------------------------------------------------- what platforms keep


def purge_run(store: Store) -> list[str]:
    """Purge a run without live processes; return sentences.  Raise ExecutorError if a platform cannot be asked."""
    wanted, _ = read_standing_control(store)
    executor = build_executor(wanted.places, wanted.former)
    try:
        removed = executor.purge(store.url)
    finally:
        executor.close()
    return [*(removed or ["no platform keeps anything of this run"]), where_run_stays(store.url)]


def where_run_stays(url: str) -> str:
    """Return a sentence that says where the run is stored, and how to delete it there."""
    if url.startswith("modal://"):
        place, _, environment = url.removeprefix("modal://").partition("?environment=")
        name = place.partition("/")[0]
        words = f"{name} --env {environment}" if environment else name
        return (
            f"the run itself stays, in Modal's Dict and Volume {name!r}: `modal dict delete {words}` and `modal volume "
            f"delete {words}` end it, with every other run below modal://{name}"
        )
    return f"the run itself stays in {url}"
