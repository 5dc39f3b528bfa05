"""Detection of deleted newest commits in a run with a key: heartbeats and leave records name the replicas' steps.

Not promised: detection if heartbeats and leave records were deleted, too.
"""

from collections.abc import Iterable, Mapping

from rendezvous import layout
from rendezvous.agreement.membership import RESTORE, read_beat, read_leave
from rendezvous.background import Together, fetch_together, in_turn
from rendezvous.errors import RecordsLost
from rendezvous.store import Readable


def refuse_forgotten_steps(
    store: Readable, slots: Iterable[str], fence: Mapping[str, int], step: int, together: Together = in_turn
) -> None:
    """Raise RecordsLost if a heartbeat or a leave record names a later step t, and commit t − 1 is missing.

    step: the first step without a commit that a joining replica found.   fence: the newest commit's fence.
    Called only in runs with a key; in other runs any writer of the bucket may write a beat.
    """

    def reached_by(slot: str) -> int:
        beat = read_beat(store, slot)
        left = read_leave(store, slot, beat.generation if beat else fence.get(slot, 1))
        return max(beat.step if beat else 0, left.step if left else 0)

    for slot, reached in fetch_together(together, reached_by, slots).items():
        if reached > step and store.get(layout.commit_key(reached - 1)) is None:
            raise RecordsLost(
                f"{slot} has reached outer step {reached}, and the newest commit under {store.url} is of step "
                f"{step - 1}: later commits were deleted. The run would decide these steps again, with other results. "
                f"{RESTORE}"
            )
