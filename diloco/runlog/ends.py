"""Why lives ended, in the words of those who saw it.

    r01-1 "crashed", error: CUDA out of memory …                its own last words, if it had time for them
    supervisor "lost", r01, exit code 1, tail: [… its log …]    what the platform said, and its last lines
        └─▶ "exit code 1; OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"

Not promised: a reason for a life that nobody supervised and that said nothing.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rendezvous.membership import launch_of

ENDS = ("killed", "lost", "ended")  # of a launch, told by its supervisor
LAST_WORDS = ("left", "fenced", "gave_up", "diverged", "crashed", "hung")  # events after which a life is over
ALSO_LAST = ("collected", "bad_delta", "refused")  # told before it says goodbye
_TELLING = re.compile(r"\w(Error|Exception|Interrupt)\b|\b[Ee]rror:|out of memory|\b[Kk]illed\b")
_STAMP = re.compile(r"^\s*\S*\d\d:\d\d:\d\d\S*\s+")
LONGEST = 300  # characters


def own_words(event: Mapping[str, Any]) -> str:
    """What a life said last of itself."""
    said = event.get("error") or event.get("text") or event.get("reason") or ""
    return _short("" if said in ("asked to leave", "done") else said)


def seen_words(event: Mapping[str, Any]) -> str:
    """What its supervisor saw: the platform's reason, and the line of its log that tells most."""
    code, reason = event.get("exit_code"), str(event.get("reason") or "")
    if not reason and code is not None:
        reason = f"exit code {code}"
    return _short("; ".join(part for part in (reason, telling_line(event.get("tail"))) if part))


def telling_line(tail: object) -> str:
    """The last line that speaks of an error; "" if none does."""
    lines = [str(line) for line in tail] if isinstance(tail, list) else []
    found = next((line for line in reversed(lines) if _TELLING.search(line)), "")
    return _STAMP.sub("", found).strip()


def _short(words: object) -> str:
    line = " ".join(str(words).split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def joined_words(seen: str, own: str) -> str:
    """Both, without saying the same twice."""
    if not own:
        return seen
    reason = seen.partition("; ")[0]  # its own words are better than a line of its log
    return f"{reason}; {own}" if reason else own


def never_lived(
    events: Iterable[Mapping[str, Any]], claimed_hosts: Collection[tuple[str, str]], claimed: Mapping[str, float]
) -> dict[str, Mapping[str, Any]]:
    """Slot -> the newest end of a launch that never claimed it, if nobody has claimed it since.

    claimed_hosts: (slot, host) of all lives.   claimed: slot -> when its newest life began (Unix time).
    """
    lived = {(slot, launch_of(host, slot)) for slot, host in claimed_hosts}
    newest: dict[str, Mapping[str, Any]] = {}
    for e in events:
        if e["event"] == "lost" and not e["generation"] and (e["slot"], e.get("attempt")) not in lived:
            newest[e["slot"]] = e
    return {slot: e for slot, e in newest.items() if e["at"] > claimed.get(slot, 0.0)}
