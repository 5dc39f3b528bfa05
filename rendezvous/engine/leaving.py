"""The end of a replica: within its grace period it offers its work and writes the blobs that other replicas need.

    asked ─ inner step ends ─▶ offer the work ──▶ own blobs ─▶ residual, baggage ─▶ leave/{slot}-{g}.json ─▶ θ_T
                            └────────────────────────── grace ────────────────────────┘

    asked while it waits or heals                  Leaving, at the next pause
    asked while work is not durable yet            the upload may use the whole grace, then Leaving
    a later generation holds the slot              Fenced, at the next pause

The leave record names a file with the codec's residual and the owner's baggage, which only the next generation of the
slot reads (residuals.py).  The owner is the engine's caller; its baggage is arrays that the engine only stores.  The
record also has the digest of the state: two leave records with the same digest confirm the last snapshot.

Not promised: a leave record.  A killed replica writes no such record, and the run continues without.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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

BAGGAGE = "own."  # prefix of the names of the owner's arrays


@dataclass(eq=False, repr=False)
class Departure:
    """Requests to this replica to leave.

    grace_s: seconds that the replica may take, from the end of the inner step during which the request came.
    """

    clock: Clock
    members: Membership
    grace_s: float
    asked_at: float | None = None  # when the platform or a person asked this process to leave
    _heard_at: float | None = None  # when the inner step that was running at `asked_at` ended

    def ask(self) -> None:
        """Ask this replica to leave.  Safe in a signal handler."""
        if self.asked_at is None:
            self.asked_at = self.clock.now()

    def hear(self) -> None:
        """Note that the inner step has ended, so that the grace begins now."""
        if self.asked_at is not None and self._heard_at is None:
            self._heard_at = self.clock.now()

    @property
    def is_asked(self) -> bool:
        """Whether this replica was asked to leave, by `ask` or by a control record."""
        return self.asked_at is not None or self.members.wanted.is_to_leave(self.members.slot)

    @property
    def left_s(self) -> float:
        """Seconds of the grace that are left."""
        now = self.clock.now()
        return self._began(now) + self.grace_s - now

    def _began(self, now: float) -> float:
        """Return the time at which the grace began, or `now` if `ask` was not called."""
        return next(at for at in (self._heard_at, self.asked_at, now) if at is not None)

    def check_before_pause(self) -> None:
        """Raise Fenced, HeartbeatLost or Leaving if this replica must end.  Called before every pause."""
        self.members.refuse_if_fenced()
        if not self.is_asked:
            return
        if self.left_s < 0 or self.members.status.phase in ("wait", "heal"):
            raise Leaving(f"{self.members.name} was asked to go; its offers are durable")


def hand_over(
    store: Store, members: Membership, unsent: Arrays, baggage: Arrays, *, bytes_per_s: float, left_s: float, emit: Emit
) -> tuple[str, str]:
    """Write the file for the next generation of this slot.   Return the file's key and digest, or ("", "").

    unsent: the codec's residuals.   baggage: the owner's arrays.   bytes_per_s: rate of the last upload.
    The upload may take half of `left_s`.  `unsent` is added first; either of the two is dropped and reported if it
    would make the file too large.
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
    """Read and delete the file of the generation before.   Return its codec's residuals and its baggage.

    No later generation can read it: after a kill, the residuals are lost.   sizes: elements per fragment.
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


def write_leave_record(
    store: Store, clock: Clock, members: Membership, *, step: int, base: str, reason: str, residual: tuple[str, str]
) -> None:
    """Write the leave record.   residual: key and digest of the residual's file."""
    record = Leave(
        slot=members.slot, generation=members.generation, step=step, base=base, reason=reason, nonce=new_nonce(),
        at=clock.wall(), residual=residual[0], residual_digest=residual[1],
    )  # fmt: skip
    put_once(store, clock, layout.leave_key(members.slot, members.generation), record.encode())


def has_left_alike(store: Store, chain: Chain, members: Membership, *, step: int, base: str) -> bool:
    """Whether a replica of another slot has left at this step with the same state."""
    others = [slot for slot in members.wanted.slot_names if slot != members.slot]
    fence = chain.fence_before(step)
    left = [record for slot in others for record in _leave_records(store, slot, fence.get(slot, 1))]
    return any(record.step == step and record.base == base for record in left)


def _leave_records(store: Store, slot: str, generation: int) -> Iterator[Leave]:
    """Yield the leave records of a slot's generations from `generation` on."""
    while store.get(layout.claim_key(slot, generation)) is not None:
        if (left := read_leave(store, slot, generation)) is not None:
            yield left
        generation += 1
