"""Tries the user's code before the start (inner/usercode/rehearse.py), and tells what is different at the places.

    refused here                            ──▶ InnerError
    a package that only the places have     ──▶ a note (place_faults.py: about_missing)
    no sandbox here, or longer than TIME_S  ──▶ a note: "not checked: …"

Not promised: that code which works for a few rows here works for all rows there.
"""

from collections.abc import Sequence

from diloco.run.config import RunConfig
from executors.platforms.places import Place
from executors.preflight.place_faults import about_missing, about_sandbox
from inner.errors import InnerError
from inner.usercode.rehearse import TIME_S, rehearse


def rehearsal_notes(config: RunConfig, places: Sequence[Place]) -> list[str]:
    """Try the reward and other user code; return notes.  Raises InnerError if it cannot work."""
    notes = list[str]()
    found = rehearse(config.inner, config.user_files(), steps=config.fleet.steps * config.outer.interval)
    code = config.inner.own_code
    if found.late:
        notes.append(f"not checked: {code}: trying that here took longer than {TIME_S:.0f} s")
    elif found.missing:
        notes.append(about_missing(found.missing, code, found.refused, places))
    elif found.refused and not found.no_sandbox:
        raise InnerError(found.refused)
    if found.warning:
        notes.append(found.warning)
    if found.sandboxed:
        notes += about_sandbox(code, found.refused, places)
    return notes
