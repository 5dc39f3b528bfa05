"""Reasons for the ends of sessions, from their own last events and their supervisor's events.

    r01-1 "crashed", error: CUDA out of memory …                its own last event, if it had time for one
    supervisor "lost", r01, exit code 1, tail: [… its log …]    the platform's reason, and the log's last lines
        └─▶ "exit code 1; OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"

Not promised: a reason for a session without a supervisor that emitted nothing.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rendezvous.agreement.membership import launch_of

if TYPE_CHECKING:
    from diloco.runlog.reader import Report

_TELLING = re.compile(r"\w(Error|Exception|Interrupt)\b|\b[Ee]rror:|out of memory|\b[Kk]illed\b")
_STAMP = re.compile(r"^\s*\S*\d\d:\d\d:\d\d\S*\s+")
LONGEST = 300  # most characters of a reason
PLATFORMS = {"modal": "Modal", "hf-jobs": "Hugging Face", "sky": "SkyPilot"}


def restarted_by(host: str, slot: str, successor: str) -> str:
    """Return the platform that restarted this session's launch by itself; "" if none did.

    host, successor: the hosts of two successive claims.

    Only a platform starts the same launch twice, so two successive sessions of one launch mean a restart.
    """
    name = host.partition("/")[0]
    return PLATFORMS.get(name, name) if host == successor and launch_of(host, slot) else ""


def own_words(event: Mapping[str, Any]) -> str:
    """Return the reason in a session's own last event."""
    said = event.get("error") or event.get("text") or event.get("reason") or ""
    return _shorten("" if said in ("asked to leave", "done") else said)


def observed_words(event: Mapping[str, Any]) -> str:
    """Return the reason in a supervisor's event: the platform's reason, and the log's last line with an error."""
    code = event.get("exit_code")
    reason = str(event.get("reason") or "")
    if not reason and code is not None:
        reason = f"exit code {code}"
    return _shorten("; ".join(part for part in (reason, most_telling_line(event.get("tail"))) if part))


def most_telling_line(tail: object) -> str:
    """Return the last line about an error, or ""."""
    lines = [str(line) for line in tail] if isinstance(tail, list) else []
    found = next((line for line in reversed(lines) if _TELLING.search(line)), "")
    return _STAMP.sub("", found).strip()


def _shorten(words: object) -> str:
    line = " ".join(str(words).split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def joined_words(seen: str, own: str) -> str:
    """Join both reasons without a repetition."""
    if not own:
        return seen
    reason = seen.partition("; ")[0]  # the session's own reason is better than a line of its log
    return f"{reason}; {own}" if reason else own


def never_began(
    events: Iterable[Mapping[str, Any]], claimed_hosts: Collection[tuple[str, str]], claimed: Mapping[str, float]
) -> dict[str, Mapping[str, Any]]:
    """Return slot -> the newest end of a launch that never claimed the slot, if no session claimed it since then.

    claimed_hosts: (slot, host) of all sessions.   claimed: slot -> begin of its newest session (Unix time).
    """
    lived = {(slot, launch_of(host, slot)) for slot, host in claimed_hosts}
    newest: dict[str, Mapping[str, Any]] = {}
    for e in events:
        if e["event"] == "lost" and not e["generation"] and (e["slot"], e.get("attempt")) not in lived:
            newest[e["slot"]] = e
    return {slot: e for slot, e in newest.items() if e["at"] > claimed.get(slot, 0.0)}


def end_words(report: "Report") -> str:
    """Describe the end of a finished run."""
    empty = sum(step.empty for step in report.steps)
    taught = f"; {empty} of them learned nothing, since all pseudogradients were zero" if empty else ""
    return f"all {report.head} outer steps are committed{taught}"
