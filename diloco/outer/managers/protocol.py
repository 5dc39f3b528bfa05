"""Types of the methods that an OuterLoop calls on a Manager, beside the eight that torchft's DiLoCo calls.

    OuterLoop ──▶ OuterManager.rounds ──▶ OuterRounds      StoreRounds (outer/rounds.py) or LighthouseRounds

Types alone: no module needs this one to run.  Not promised: a check that a Manager has these names.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from diloco.process.watchdog import Watchdog

if TYPE_CHECKING:
    from diloco.outer.loop import OuterLoop


class OuterRounds(Protocol):
    """The methods that an OuterLoop calls on a Manager beside torchft's eight; see rounds.py and lighthouse.py.

    leaving, fenced: this session should end soon; why: the reason as text.   behind: the next sync is due at once.
    h_cap: useful number of inner steps.   done_with_delta: after an outer step, nothing reads or writes its Δ.
    watchdog: the loop tells it when inner steps begin and end.
    alone: whether only this replica's Δ was in the last mean, and no gate changed this Δ.
    stats: the inner loop's numbers since the last call.
    round_began: the time when this round's inner steps began, by the rounds' clock; the log counts seconds from it.
    """

    done_with_delta: bool
    alone: bool
    round_began: float
    stats: Callable[[], dict[str, float]]
    watchdog: Watchdog

    @property
    def leaving(self) -> bool: ...
    @property
    def why(self) -> str: ...
    @property
    def fenced(self) -> bool: ...
    @property
    def behind(self) -> bool: ...
    @property
    def h_cap(self) -> int: ...
    def join(self, loop: "OuterLoop") -> None:
        """Heal the loop: load the run's newest known θ."""
        ...

    def progress(self, inner: int, rate: float) -> float:
        """Note this round's progress: `inner` steps are done, at `rate` seconds per step. Return the replica's rate."""
        ...

    def offer(self, delta: np.ndarray, h: int) -> None:
        """Offer Δ for the open step, durably."""
        ...

    def finish_round(self) -> int | None:
        """End the round after torchft's hook. Return the fragment whose outer step was just taken, or None."""
        ...

    def catch_up(self, late: Callable[[int], None]) -> None:
        """Apply the steps that were committed without this replica; call `late(step)` before each."""
        ...

    def close(self, reason: str) -> None:
        """Leave the run.   reason: "done" for the regular end."""
        ...


class OuterManager(Protocol):
    """A Manager with torchft's eight names, and its OuterRounds.   done: whether the run has all its outer steps."""

    @property
    def rounds(self) -> OuterRounds: ...
    @property
    def done(self) -> bool: ...
    def current_step(self) -> int: ...
