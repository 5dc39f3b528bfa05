"""The error for a URL without run.json.

    other records of a run are there ──▶ RecordsLost        none ──▶ ConfigError: there is no run

Not promised: that a URL without these records never had a run.
"""

import shlex

from diloco.run.config import ConfigError
from rendezvous import layout
from rendezvous.errors import RecordsLost
from rendezvous.store import Readable


def no_run(url: str, store: Readable) -> Exception:
    """Return the error for a URL without run.json: RecordsLost if other records of a run are there, or ConfigError."""
    beside = (layout.control_key(0), layout.commit_key(0), layout.claim_key("r00", 1))
    if stands := next((key for key in beside if store.get(key) is not None), ""):
        return RecordsLost(
            f"{url}/{layout.RUN} is lost, though {stands} is there: without it the run cannot be read. Restore it from "
            "a backup, or from the bucket's versions"
        )
    return ConfigError(
        f"there is no run at {url} (no run.json). Check the path, or start one: "
        f"diloco train CONFIG --run {shlex.quote(url)}"
    )
