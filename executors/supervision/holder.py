"""Whether the supervisor that holds a run's lease (lease.py) is alive.

    its process runs on this machine, or its heartbeat changes ──▶ alive       its last heartbeat says "left" ──▶ not

Not promised: that a supervisor elsewhere, whose heartbeats stop, has ended.
"""

from diloco.process import processes
from diloco.process.processes import host_name, works_for
from diloco.runlog.reader import SUPERVISOR
from rendezvous import layout
from rendezvous.agreement.membership import REQUESTS, newest_claim, read_beat
from rendezvous.clock import Clock
from rendezvous.machine import machine_name
from rendezvous.records.records import Beat, Claim
from rendezvous.store import Readable, Store


def supervisor_of(store: Readable) -> Claim | None:
    """Return the claim of the present supervisor; do not wait to see whether its heartbeat changes."""
    return still_holding(store.url, newest_claim(store, SUPERVISOR), read_beat(store, SUPERVISOR))


def still_holding(run: str, holder: Claim | None, beat: Beat | None) -> Claim | None:
    """Return the newest claim, unless its supervisor's last heartbeat is "left" or its process is known to be dead."""
    if holder is None or _has_left(holder, beat) or _known_dead(run, holder):
        return None
    return holder


def living_supervisor(store: Store, clock: Clock, fresh_s: float) -> Claim | None:
    """Return the claim of a live supervisor: its process runs here, or its heartbeat changes within `fresh_s`.

    A claim alone does not show a live supervisor: its process may have been killed long ago.
    """
    holder = newest_claim(store, SUPERVISOR)
    return holder if holder is not None and is_alive(store, clock, holder, fresh_s) else None


def is_alive(store: Store, clock: Clock, holder: Claim, fresh_s: float) -> bool:
    """Whether the claim's process runs here, or its heartbeat changes within `fresh_s`."""
    fresh_s += REQUESTS * timed_request_s(store, clock)
    first = read_beat(store, SUPERVISOR)
    until = clock.now() + fresh_s
    while not (_has_left(holder, first) or _known_dead(store.url, holder)):
        if _is_on_this_machine(holder) and works_for(holder.pid, store.url):
            return True
        if read_beat(store, SUPERVISOR) != first:
            return True
        if clock.now() >= until:
            return False
        clock.sleep(0.05)
    return False


def timed_request_s(store: Readable, clock: Clock) -> float:
    """Make one request, and return its seconds: REQUESTS of them may delay the next heartbeat of a process."""
    began = clock.now()
    store.get(layout.RUN)
    return clock.now() - began


def _has_left(holder: Claim, beat: Beat | None) -> bool:
    return beat is not None and beat.generation == holder.generation and beat.phase == "left"


def _is_on_this_machine(holder: Claim) -> bool:
    """Whether the claim names a process of this machine, this boot and this pid namespace."""
    return bool(holder.started) and holder.host == host_name() == machine_name()


def _known_dead(run: str, holder: Claim) -> bool:
    """Whether the claim's process was here, and has ended or works for another run, whose copy this run is."""
    if not _is_on_this_machine(holder):
        return False
    return not processes.is_alive(holder.pid, holder.started) or works_for(holder.pid, run) is False
