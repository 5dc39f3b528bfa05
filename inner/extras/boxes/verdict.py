"""Decide whether the provider lost a box or the episode broke it, with a fresh box.

    the box died at command n       a fresh box runs commands 1 … n again
        it survives n           ──▶ "provider"
        it dies at n            ──▶ another one; the second death at n: "policy" (one may be chance)
        it dies earlier, no box ──▶ another one; TRIES without an answer: "provider"

The provider's: reward None, the rollout leaves the group's mean and the batch (decision 025).  The policy's: the reward
counts, not above the group's worst (AtMostWorst, decision 065).  A time limit does not end a box.

Not promised: a verdict on commands whose effect is random.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from inner.extras.boxes.box import Box, BoxGone, ProviderFailed

TRIES = 4  # fresh boxes at most
DEATHS = 2  # at the same command, to blame the policy
Blamed = Literal["provider", "policy"]


@dataclass(frozen=True)
class BoxAction:
    """One call of the episode.   run: do it in a box; it raises BoxGone if that box dies."""

    run: Callable[[Box], object]


def blame(
    actions: Sequence[BoxAction],
    fresh: Callable[[int], Box],
    release: Callable[[int], None],
    *,
    survived: int | None = None,
) -> Blamed:
    """Return the cause of a box's death at the last action.   fresh, release: a box for try number n, and its end.

    survived: actions that the dead box survived, if several may have killed it: a call still ran beside the last.
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


def _replay(actions: Sequence[BoxAction], box: Box) -> int | None:
    """Return the action at which the box died; None if it survived all."""
    for i, action in enumerate(actions):
        try:
            action.run(box)
        except BoxGone:
            return i
        except OSError:  # the episode saw the same error: a file that is not there
            continue
    return None
