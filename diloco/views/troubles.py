"""Find a run's troubles, as data: one detector per kind, in one table.  Pure functions, without torch.

    Report, now, Spending ──▶ find_troubles ──▶ [Trouble, …]     `diloco status`, `diloco watch`, `--alert URL`

    docs/troubles.md has a section for each kind; a test compares them.

Costs are an argument, because only executors know prices (executors/supervision/costs.py). Executors also add troubles
that only they know: platforms, disks, rewards that are retried (executors/supervision/notices/messages.py).

Not promised: a judgement.  A detector reports its observation.
"""

from collections.abc import Callable, Mapping

from diloco.runlog.reader import Report
from diloco.views import fleet_troubles as fleet
from diloco.views import learning_troubles as learning
from diloco.views.learning_troubles import flagged_steps as flagged_steps
from diloco.views.trouble import PAGE as PAGE
from diloco.views.trouble import Spending as Spending
from diloco.views.trouble import Trouble as Trouble

Detector = Callable[[Report, float, Spending | None], list[Trouble]]
DETECTORS: Mapping[str, Detector] = {  # the most urgent first
    "diverged": fleet.diverged,
    "forged": fleet.forged,
    "stalled": fleet.stalled,
    "slot_lost": fleet.slot_lost,
    "budget": fleet.budget,
    "no_signal": learning.no_signal,
    "reward_broken": learning.reward_broken,
    "reward_hacking": learning.reward_hacking,
    "overfitting": learning.overfitting,
    "held_out_differs": learning.held_out_differs,
    "tool_failures": learning.tool_failures,
    "masked": learning.masked,
    "replay_falls": learning.replay_falls,
    "bad_records": fleet.bad_records,
    "gated": fleet.gated,
    "waits": fleet.waits,
    "snapshot_late": fleet.snapshot_late,
    "clock": fleet.clock,
    "versions": fleet.versions,
}


def find_troubles(report: Report, now: float, spent: Spending | None = None) -> list[Trouble]:
    """Return the run's troubles at time `now` (Unix).   spent: the run's costs; None if unknown."""
    return [found for detector in DETECTORS.values() for found in detector(report, now, spent)]
