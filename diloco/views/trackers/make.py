"""Make a tracker by its name, and check before any write that this machine can use it.

    check_tracker   tests its package and its login before it is opened       make_tracker   imports it

    wandb         WANDB_API_KEY · WANDB_IDENTITY_TOKEN_FILE · a line in ~/.netrc · api_key in wandb's settings
    trackio       for a Space: HF_TOKEN, or `hf auth login`; for your own server: a write token
    tensorboard   none

Not promised: that its server answers, or that a key is still valid; the server checks that when the tracker is opened.
"""

import configparser
import netrc
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlparse

from diloco.run.sections import TRACKERS
from diloco.views.trackers.tracker import CurveTracker, TrackerError


def make_tracker(name: str, folder: Path) -> CurveTracker:
    """Make a tracker.   folder: where TensorBoard's event files go."""
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
    """Raise TrackerError if the tracker's package or login is missing on this machine.  Imports and sends nothing."""
    if name not in TRACKERS:
        raise TrackerError(f"there is no tracker {name!r}. Use one of: {', '.join(TRACKERS)}")
    if find_spec(name) is None:
        raise TrackerError(
            f"{name} is not installed on this machine, and nothing was written to it. Install it: "
            f"pip install 'serverless-diloco[{name}]'"
        )
    if words := missing_login(name, environ):
        raise TrackerError(words)


def missing_login(name: str, environ: Mapping[str, str]) -> str:
    """Return the message for a user without a login; "" if there is one, or none is needed."""
    if name == "wandb":
        return _missing_wandb(environ)
    return _missing_trackio(environ) if name == "trackio" else ""


def _missing_wandb(environ: Mapping[str, str]) -> str:
    from diloco.views.trackers.on_wandb import OFFLINE

    settings = _wandb_settings(environ)
    if (mode := environ.get("WANDB_MODE", settings.get("mode", ""))) in OFFLINE:
        return ""
    if mode == "disabled":
        return "wandb is disabled (WANDB_MODE or its settings), so nothing would be written. Set WANDB_MODE=offline"
    host = urlparse(environ.get("WANDB_BASE_URL") or settings.get("base_url") or "https://api.wandb.ai").hostname or ""
    keys = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    if any(environ.get(key) for key in keys) or settings.get("api_key") or _has_netrc_line(host, environ):
        return ""
    return (
        f"no login to wandb at {host} on this machine, and nothing was written to it. Run `wandb login`, "
        "set WANDB_API_KEY, or set WANDB_MODE=offline and `wandb sync` later"
    )


def _wandb_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Read wandb's settings: the user's, overridden by those of this folder (`wandb offline` writes there)."""
    home = Path(environ.get("HOME") or Path.home())
    parser = configparser.ConfigParser(interpolation=None)
    places = [
        Path(environ.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb") / "settings",
        Path(environ.get("WANDB_DIR") or ".") / "wandb" / "settings",
    ]
    try:
        parser.read(places)
        return dict(parser["default"]) if "default" in parser else {}
    except (configparser.Error, OSError, UnicodeDecodeError):
        return {}


def _has_netrc_line(host: str, environ: Mapping[str, str]) -> bool:
    home = Path(environ.get("HOME") or Path.home())
    for path in [Path(environ["NETRC"])] if environ.get("NETRC") else [home / ".netrc", home / "_netrc"]:
        try:
            if netrc.netrc(str(path)).authenticators(host):
                return True
        except (netrc.NetrcParseError, OSError, UnicodeDecodeError):
            continue
    return False


def _missing_trackio(environ: Mapping[str, str]) -> str:
    if environ.get("TRACKIO_SPACE_ID"):
        home = Path(environ.get("HF_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache" / "huggingface")
        kept = Path(environ.get("HF_TOKEN_PATH") or home / "token")
        if environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN") or kept.is_file():
            return ""
        return (
            f"no login to Hugging Face on this machine, where trackio's Space {environ['TRACKIO_SPACE_ID']} "
            "is, and nothing was written to it. Run `hf auth login`, or unset TRACKIO_SPACE_ID to write to this machine"
        )
    server = environ.get("TRACKIO_SERVER_URL", "")
    if server and "write_token=" not in server and not environ.get("TRACKIO_WRITE_TOKEN"):
        return (
            f"trackio's server {server} wants a write token, and nothing was written to it. Set TRACKIO_WRITE_TOKEN, "
            "or use the write-access URL that `trackio show` prints"
        )
    return ""
