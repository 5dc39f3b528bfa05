"""Sessions as views show them, and the reasons for their ends, from their own and their supervisor's events.

    r01-1 "crashed", error: CUDA out of memory …                its own last event, if it had time for one
    supervisor "lost", r01, exit code 1, tail: [… its log …]    the platform's reason, and the log's last lines
        └─▶ "exit code 1; OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"

Not promised: a reason for a session without a supervisor that emitted nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diloco.events import LAUNCH_ENDS, LOSS, SESSION_ENDS, kinds_of
from diloco.runlog.look import Owner
from rendezvous.agreement.membership import launch_of

if TYPE_CHECKING:
    from diloco.runlog.reader import Report

_TELLING = re.compile(
    r"\w(Error|Exception|Interrupt)\b|\b[Ee]rror:|out of memory|\b[Kk]illed\b|\bcannot (create|write) (?!.*; trying)"
)
_STAMP = re.compile(r"^\s*\S*\d\d:\d\d:\d\d\S*\s+")
LONGEST = 300  # at most so many characters of a reason
PLATFORMS = {"modal": "Modal", "hf-jobs": "Hugging Face", "sky": "SkyPilot"}
LOST_LATER = {"replaced": "lost", "done": "done, then failed"}  # a script may fail after its training
BAD_ENDS = tuple(kind.replace("_", " ") for kind in (*LAUNCH_ENDS, *SESSION_ENDS) if kind in kinds_of(LOSS))


@dataclass
class SessionSummary:
    """One generation of a slot.   how: running, killed, lost, replaced, left, done, fenced, fence, …

    seen, said: the reasons for its end that its supervisor saw, and that the session itself logged.
    device: the name of the training device, "" if unknown.
    versions: those of its libraries, by name; empty if unknown.
    restarted_by: the platform that restarted the same launch, or "".
    """

    slot: str
    generation: int
    pid: int
    host: str
    claimed: float
    joined: float | None = None
    joined_step: int = 0
    commits: list[tuple[int, float]] = field(default_factory=list)
    ended: float | None = None
    how: str = "running"
    seen: str = ""
    said: str = ""
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict[str, str])
    restarted_by: str = ""

    @property
    def name(self) -> str:
        return f"{self.slot}-{self.generation}"

    @property
    def preempted(self) -> bool:
        """Whether its platform asked it to leave, and restarted it."""
        return self.how == "left" and bool(self.restarted_by)

    @property
    def end(self) -> str:
        """The end of the session as text."""
        if self.preempted:
            return f"preempted by {self.restarted_by}, started again"
        return f"{self.how}, started again by {self.restarted_by}" if self.restarted_by else self.how

    @property
    def why(self) -> str:
        """The reason for its end in one line; "" while it runs, after a regular end, or if unknown."""
        if self.preempted or self.how in ("running", "done", "fence"):
            return ""
        return joined_words(self.seen, self.said)


def apply_event(sessions: Mapping[Owner, SessionSummary], e: dict[str, Any]) -> None:
    """Note an event in the session that it is about."""
    if e["event"] in LAUNCH_ENDS:
        if (session := _find_ended(sessions, e)) is None:
            return
        if e["event"] == "killed" or session.how == "running":
            session.ended, session.how = e["at"], e["event"]
        elif e["event"] == "lost" and session.how in LOST_LATER:
            session.ended, session.how = e["at"], LOST_LATER[session.how]
        session.seen = observed_words(e) or session.seen
        return
    session = sessions.get((e["slot"], e["generation"]))
    if session is not None and e["event"] in SESSION_ENDS:
        session.said = own_words(e)
    if session is not None and e.get("device"):
        session.device = str(e["device"])
    if session is not None and e["event"] == "claimed":
        session.versions = versions_in(str(e.get("versions", "")))
    if session is not None and e["event"] == "joined":
        session.joined, session.joined_step = e["at"], e.get("step", 0)
    if session is not None and e["event"] in SESSION_ENDS and session.how in ("running", "replaced", "lost"):
        session.ended, session.how = e["at"], e["event"].replace("_", " ")


def versions_in(text: str) -> dict[str, str]:
    """Return the versions in the text of `library_versions`, by name."""
    return dict(re.findall(r"([\w.-]+) ([\w.!+-]+)", text))


def _find_ended(sessions: Mapping[Owner, SessionSummary], e: Mapping[str, Any]) -> SessionSummary | None:
    """Return the session of an end event: by generation, by launch, or by pid, which rented machines may reuse."""
    if e["generation"]:
        return sessions.get((e["slot"], e["generation"]))
    of_slot = [x for x in sessions.values() if x.slot == e["slot"]]
    launched = [x for x in of_slot if (number := launch_of(x.host, x.slot)) and number == e.get("attempt")]
    return launched[-1] if launched else next((x for x in of_slot if x.pid and x.pid == e.get("pid")), None)


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
    """Join the platform's reason and the session's own.  The latter replaces the text after "; " in `seen`."""
    if not own:
        return seen
    reason = seen.partition("; ")[0]
    return f"{reason}; {own}" if reason else own


def end_words(report: "Report") -> str:
    """Describe the end of a finished run."""
    empty = sum(step.empty for step in report.steps)
    taught = f"; {empty} of them learned nothing, since all pseudogradients were zero" if empty else ""
    return f"all {report.head} outer steps are committed{taught}"
