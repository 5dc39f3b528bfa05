"""The line of `status` about a run's supervisor.

    done                                             the run has all its steps, and no replica sends heartbeats
    supervised by pid 7 on modal/supervisor.1        its heartbeat is younger than UNHEARD_S
    … was last heard 3 h 2 min ago                   older: it was killed or cut off; how to replace it
    no supervisor; the last one ended: …             the reason, from the log

Not promised: that a silent supervisor is dead; another one takes over only if its heartbeat does not change.
"""

import shlex
from typing import Any

from diloco.process import exitcodes
from diloco.process.processes import host_words
from diloco.runlog.reader import SUPERVISOR, Report
from diloco.units import duration
from diloco.views.overview import silent_s
from executors.supervision import lease
from rendezvous.agreement.membership import read_beat
from rendezvous.clock import Clock
from rendezvous.records.records import Beat
from rendezvous.store import Readable

UNHEARD_S = 60.0  # clocks of two machines differ, and a look at a large run takes a while


def describe_supervision(store: Readable, clock: Clock, report: Report) -> tuple[str, dict[str, Any]]:
    """Return (one line, data for `--json`).   store: to read the supervisor's heartbeat; the report has its claim."""
    return describe_supervisor(read_beat(store, SUPERVISOR), clock, report)


def describe_supervisor(beat: Beat | None, clock: Clock, report: Report) -> tuple[str, dict[str, Any]]:
    """Return the same for a heartbeat that was read before."""
    holder = lease.still_holding(report.url, report.supervisor, beat)
    end = last_end(report)
    if holder is None:
        words = f"; the last one ended with code {end['code']}: {_first_line(end['text'])}" if end else ""
        return _done_words(report, clock) if report.done else f"no supervisor{words}", {
            "supervisor": None,
            "supervisor_end": end,
        }
    unheard = round(lease.unheard_s(holder, beat, clock), 1)
    about = {"pid": holder.pid, "host": holder.host, "unheard_s": unheard}
    who = f"pid {holder.pid} on {host_words(holder.host)}"
    line = f"supervised by {who}"
    if unheard >= UNHEARD_S:
        line = (
            f"! its supervisor ({who}) was last heard {duration(unheard)} ago, so lost replicas may not be "
            f"replaced; "
            f"`diloco resume {shlex.quote(report.url)} --detach` starts another if it is dead"
        )
    return _done_words(report, clock) if report.done else line, {"supervisor": about, "supervisor_end": end}


def _done_words(report: Report, clock: Clock) -> str:
    """Return "done", or the replicas that still work after the last outer step, with their notes."""
    beats = [b for b in report.beats.values() if b.phase != "left"]
    there = [b for b in beats if abs(clock.wall() - b.at) <= silent_s(report.url)]
    works = ", ".join(f"{b.slot} {b.note or 'is about to leave'}" for b in there)
    return f"all {report.head} outer steps are committed, but not all is done: {works}" if works else "done"


def last_end(report: Report) -> dict[str, Any] | None:
    """Return the newest end of a supervisor in the log; None if it ended well, or if there is none."""
    ends = [e for e in report.of_kind("stopped", "crashed") if e["who"].startswith(SUPERVISOR)]
    if not ends or ends[-1].get("code") in (None, exitcodes.DONE, exitcodes.LEFT):
        return None
    return {"code": ends[-1]["code"], "text": str(ends[-1].get("text", "")), "at": ends[-1]["at"]}


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
