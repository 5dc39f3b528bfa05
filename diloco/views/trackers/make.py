"""Make a tracker by its name, and check that this machine can use it.

    check_tracker   its package and its login, before it is opened       make_tracker   imports it

Not promised: that its server answers.
"""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from diloco.run.sections import TRACKERS
from diloco.views.trackers.logins import missing_login
from diloco.views.trackers.tracker import CurveTracker, TrackerError


def make_tracker(name: str, folder: Path) -> CurveTracker:
    """Make a tracker.   folder: for TensorBoard's event files."""
    if name == "wandb":
        from diloco.views.trackers.on_wandb import WandbTracker

        return WandbTracker()
    if name == "trackio":
        from diloco.views.trackers.on_trackio import TrackioTracker

        return TrackioTracker()
    if name == "tensorboard":
        from diloco.views.trackers.on_tensorboard import TensorBoardTracker

        return TensorBoardTracker(folder)
    raise TrackerError(f"there is no tracker {name!r}. Use one of: {', '.join(TRACKERS)}")


def check_tracker(name: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise TrackerError if its package or its login is missing on this machine.  Imports nothing, sends nothing."""
    if name not in TRACKERS:
        raise TrackerError(f"there is no tracker {name!r}. Use one of: {', '.join(TRACKERS)}")
    if find_spec(name) is None:
        raise TrackerError(
            f"{name} is not installed on this machine, and nothing was written to it. Install it: "
            f"pip install 'serverless-diloco[{name}]'"
        )
    if words := missing_login(name, environ):
        raise TrackerError(words)
