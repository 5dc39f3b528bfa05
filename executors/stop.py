"""End a run's replicas, and prove it.

    control: stop ─▶ replicas offer what they have and leave ─▶ after `grace_s`: kill -9 the local ones that did not
                                                             ─▶ every heartbeat looked at once more: none moves

Not promised: an end for processes on machines that we cannot signal; their heartbeat tells, and so do we.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass

from executors import processes
from executors.base import Handle
from executors.lease import supervisor_of
from executors.local import claimed_process, newest_claims
from rendezvous import layout
from rendezvous.clock import Clock
from rendezvous.membership import write_control
from rendezvous.records import Beat, Claim
from rendezvous.store import Store

LOOK_S = 1.0  # how long a heartbeat must stand still to be called silent; they move every 0.2 s
KILLED_S = 5.0  # how long a killed process may take to vanish


@dataclass(frozen=True)
class End:
    """What became of one slot's newest generation."""

    name: str
    live: bool
    text: str


def stop_run(store: Store, clock: Clock, grace_s: float, say: Callable[[str], None]) -> list[End]:
    """Ask everybody to leave, wait, kill what stays, look again; -> one End per slot and the supervisor's."""
    write_control(store, clock, stop=True)
    say("asked every replica to leave; they offer what they have first")
    _wait(store, clock, grace_s)
    for handle in _local(store):
        processes.send(handle.pid, handle.started, signal.SIGKILL)
        say(f"{handle.slot}: pid {handle.pid} was still there after {grace_s:.0f} s; killed")
    _wait(store, clock, KILLED_S)
    return ends(store, clock)


def ends(store: Store, clock: Clock) -> list[End]:
    """Everybody who ever claimed something, with the proof that it is over (or not)."""
    claims = newest_claims(store.url)
    before = {c.slot: _beat(store, c) for c in claims}
    if any(_may_beat(before[c.slot]) and claimed_process(store.url, c) is None for c in claims):
        clock.sleep(LOOK_S)
    found = [_end(store, c, before[c.slot]) for c in claims]
    supervisor = supervisor_of(store)
    if supervisor is not None:
        found.append(End("supervisor", True, f"pid {supervisor.pid} on {supervisor.host} has not ended yet"))
    return found


def _end(store: Store, claim: Claim, before: Beat | None) -> End:
    name = f"{claim.slot}-{claim.generation}"
    process = claimed_process(store.url, claim)
    if process is not None:
        return End(name, True, f"pid {process.pid} still runs")
    now = _beat(store, claim)
    if now is not None and now.phase == "left":
        return End(name, False, f"left at outer step {now.step}")
    if now is not None and before is not None and now.n != before.n:
        return End(name, True, f"its heartbeat moves, from {claim.host or 'an unknown machine'} (pid {claim.pid})")
    return End(name, False, "gone without a goodbye" + ("" if now is None else f", last seen at outer step {now.step}"))


def _wait(store: Store, clock: Clock, seconds: float) -> None:
    """Until nobody is there any more, at most so long."""
    until = clock.now() + seconds
    moved: dict[str, int] = {}
    while clock.now() < until:
        waiting = [c for c in newest_claims(store.url) if _there(store, c, moved)]
        if not waiting and supervisor_of(store) is None:
            return
        clock.sleep(0.1)


def _there(store: Store, claim: Claim, moved: dict[str, int]) -> bool:
    """Does it run here, or may it still beat elsewhere?  (Elsewhere: until it says goodbye or the time is over.)"""
    if claimed_process(store.url, claim) is not None:
        return True
    beat = _beat(store, claim)
    if not _may_beat(beat) or beat is None:
        return False
    first = moved.setdefault(claim.slot, beat.n)
    return beat.n != first


def _may_beat(beat: Beat | None) -> bool:
    return beat is not None and beat.phase != "left"


def _beat(store: Store, claim: Claim) -> Beat | None:
    body = store.get(layout.beat(claim.slot))
    beat = None if body is None else Beat.decode(body)
    return beat if beat is not None and beat.generation == claim.generation else None


def _local(store: Store) -> list[Handle]:
    return [h for c in newest_claims(store.url) if (h := claimed_process(store.url, c)) is not None]
