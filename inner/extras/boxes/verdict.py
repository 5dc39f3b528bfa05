"""Decide whether the provider lost a box or the episode broke it, with a fresh box.

    the box died at command n       a fresh box runs commands 1 … n again
        it survives n           ──▶ "provider"
        it dies at n            ──▶ another fresh box; the second death at n: "policy" (one may be chance)
        it dies earlier, no box ──▶ another fresh box; after TRIES boxes without a result: "provider"

"provider": reward None; the rollout leaves the group's mean and the batch (decision 025).  "policy": the reward counts,
but not above the group's worst (AtMostWorst, decision 065).  A time limit does not end a box.

Not promised: a verdict on commands whose effect is random.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from inner.extras.boxes.box import Box, BoxGone, ProviderFailed

TRIES = 4  # maximal number of fresh boxes for one verdict
DEATHS = 2  # deaths at the same command that show the policy's fault
Blamed = Literal["provider", "policy"]


def blame(
    actions: Sequence[Callable[[Box], object]],
    fresh: Callable[[int], Box],
    release: Callable[[int], None],
    *,
    survived: int | None = None,
) -> Blamed:
    """Return the cause of a box's death at the last action.

    actions: each repeats a call of the episode in a box.   fresh(n), release(n): make and stop the box of try n.
    survived: number of actions that the dead box surely survived, if two calls ran at once and either may be the cause.
    """
    deaths, first = 0, len(actions) - 1 if survived is None else survived
    for n in range(TRIES):
        try:
            died_at = _replay(actions, fresh(n))
        except ProviderFailed:
            continue
        finally:
            release(n)
        deaths += died_at is not None and died_at >= first
        if died_at is None or deaths == DEATHS:
            return "provider" if died_at is None else "policy"
    return "provider"


def _replay(actions: Sequence[Callable[[Box], object]], box: Box) -> int | None:
    """Return the index of the action at which the box died; None if the box survived all actions."""
    for i, run in enumerate(actions):
        try:
            run(box)
        except BoxGone:
            return i
        except (OSError, ValueError):  # for example a NUL in a command: the episode saw the same error
            continue
    return None
