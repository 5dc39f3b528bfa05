"""The end of a replica: in time, with its work offered, and with the blobs that others need from it.

    asked ─ inner step ends ─▶ offer what there is ─▶ own blobs ─▶ residual, baggage ─▶ leave/{slot}-{g}.json ─▶ θ_T
                            └────────────────────────── grace ────────────────────────┘

    asked while it waits or heals                  Leaving, at the next pause
    asked while work is not durable yet            it may use the whole grace, then Leaving
    a later generation holds the slot              Fenced, at the next pause

The leave record is the last write of a generation.  It names a file with the codec's residual and the owner's baggage,
which only the next generation of the slot takes (residuals.py), and the digest of the state: two that left with the
same one confirm the last snapshot.  Baggage is arrays that the engine carries and does not understand.

Not promised: that a goodbye is said.  A replica that was killed has said none, and everything goes on without.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from rendezvous import layout
from rendezvous.agreement.chain import Chain
from rendezvous.agreement.membership import Membership, read_leave
from rendezvous.background import Emit
from rendezvous.clock import Clock
from rendezvous.errors import Leaving
from rendezvous.records.records import Leave, new_nonce
from rendezvous.snapshots.record import Arrays
from rendezvous.store import Store, put_once

BAGGAGE = "own."  # begins the names of arrays that are the owner's


class Departure:
    """Requests to this replica to leave.   grace_s: seconds that it may take, from when it hears of one.

    It hears of a request between two inner steps.
    """

    def __init__(self, clock: Clock, members: Membership, grace_s: float) -> None:
        self._clock = clock
        self._members = members
        self._grace_s = grace_s
        self.asked_at: float | None = None  # when the platform or a person asked this process to leave
        self._heard_at: float | None = None  # when the inner step of that moment had ended

    def ask(self) -> None:
        """Ask this replica to leave.  Safe in a signal handler."""
        if self.asked_at is None:
            self.asked_at = self._clock.now()

    def hear(self) -> None:
        """Note that no inner step goes on: from now on the grace is for saving the work."""
        if self.asked_at is not None and self._heard_at is None:
            self._heard_at = self._clock.now()

    @property
    def is_asked(self) -> bool:
        """Whether its process or a control record has asked it to leave."""
        return self.asked_at is not None or self._members.wanted.is_to_leave(self._members.slot)

    @property
    def left_s(self) -> float:
        """Seconds of the grace that are left."""
        now = self._clock.now()
        return self._began(now) + self._grace_s - now

    def _began(self, now: float) -> float:
        """Time at which the grace began, or `now` without a request to this process."""
        begins = (self._heard_at, self.asked_at, now)
        return next(at for at in begins if at is not None)

    def check_before_pause(self) -> None:
        """Raise Fenced, HeartbeatLost or Leaving where this replica must end.  Called before every pause."""
        self._members.refuse_if_fenced()
        if not self.is_asked:
            return
        if self.left_s < 0 or self._members.status.phase in ("wait", "heal"):
            raise Leaving(f"{self._members.name} was asked to go; what it offered is durable")


def hand_over(
    store: Store,
    members: Membership,
    unsent: Arrays,
    baggage: Arrays,
    *,
    bytes_per_s: float,
    left_s: float,
    emit: Emit,
) -> tuple[str, str]:
    """Write the file that the next generation of this slot may take over; -> key and digest, ("", "") for none.

    unsent: values that the codec has not sent.   baggage: the owner's own arrays, which go along if there is time.
    The file may take half of the time that is left, by the rate of the last upload; `unsent` or `baggage` that would
    exceed it is lost, and reported.
    """
    arrays = dict[str, np.ndarray]()
    named = {BAGGAGE + name: array for name, array in baggage.items()}
    for event, more in (("residual_dropped", unsent), ("baggage_dropped", named)):
        size = sum(a.nbytes for a in (*arrays.values(), *more.values()))
        if more and size > bytes_per_s * left_s / 2:
            emit(event, bytes=size, rate=bytes_per_s, left_s=left_s)
        else:
            arrays |= more
    if not arrays:
        return "", ""
    from rendezvous.engine.residuals import put_residuals

    return put_residuals(store, members.slot, members.generation, arrays)


def take_over(
    store: Store, members: Membership, sizes: Sequence[int], emit: Emit
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Take the file of the generation directly before: -> values that its codec had not sent, and its baggage.

    No other replica ever reads it: if this one dies without a goodbye, it is gone.   sizes: elements per fragment.
    """
    left = read_leave(store, members.slot, members.generation - 1)
    if left is None or not left.residual:
        return {}, {}
    from rendezvous.engine.residuals import take_residuals

    arrays = take_residuals(store, left, sizes, baggage=BAGGAGE)
    if arrays is None:
        emit("bad_residual", text=f"{left.residual} is missing or damaged; codec and optimizer start from zero")
        return {}, {}
    emit("inherited", of=left.generation, bytes=sum(a.nbytes for a in arrays.values()))
    baggage = {name.removeprefix(BAGGAGE): a for name, a in arrays.items() if name.startswith(BAGGAGE)}
    return {name: a for name, a in arrays.items() if not name.startswith(BAGGAGE)}, baggage


def write_goodbye(
    store: Store, clock: Clock, members: Membership, *, step: int, base: str, reason: str, residual: tuple[str, str]
) -> None:
    """Write the leave record.   residual: key and digest of the residual's file."""
    record = Leave(
        slot=members.slot,
        generation=members.generation,
        step=step,
        base=base,
        reason=reason,
        nonce=new_nonce(),
        at=clock.wall(),
        residual=residual[0],
        residual_digest=residual[1],
    )
    put_once(store, clock, layout.leave_key(members.slot, members.generation), record.encode())


def has_left_alike(store: Store, chain: Chain, members: Membership, *, step: int, base: str) -> bool:
    """Whether another slot's replica has left at this step with the same state."""
    others = [slot for slot in members.wanted.slot_names if slot != members.slot]
    fence = chain.fence_before(step)
    left = [record for slot in others for record in _leave_records(store, slot, fence.get(slot, 1))]
    return any(record.step == step and record.base == base for record in left)


def _leave_records(store: Store, slot: str, generation: int) -> Iterator[Leave]:
    """Leave records of a slot's generations from this one on."""
    while store.get(layout.claim_key(slot, generation)) is not None:
        if (left := read_leave(store, slot, generation)) is not None:
            yield left
        generation += 1
