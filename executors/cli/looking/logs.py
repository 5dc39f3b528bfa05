"""Prints the output of a replica on any platform.

    run, r01 ────find──▶ handle ──▶ lines · follow        the newest launch of a slot
    run, r01-1 ──log───▶ handle ──▶ lines · follow        the launch of one session, running or ended
                 └─ no handle, or its platform keeps no log: the session's data in the bucket (events, last lines)
    run, supervisor                                       the log of a detached supervisor

Not promised: separate lines for two sessions of one launch (after a restart by its platform).
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from diloco.events import LAUNCH_BEGINS
from diloco.process.journal import read_log
from diloco.process.processes import host_words
from diloco.run.record import Run, read_run
from diloco.runlog.reader import SUPERVISOR, Report, read_report, shown
from diloco.runlog.scope import COSTS
from diloco.runlog.sessions import SessionSummary
from executors.platforms.base import ExecutorError, FleetExecutor, Handle, last_lines
from executors.platforms.machine.logfile import LogFile
from executors.platforms.on_host.executor import process_folder
from executors.platforms.places import build_executor
from executors.preflight.quote import slots_of
from executors.preflight.run_url import UsageError
from executors.supervision.holder import supervisor_of
from executors.supervision.slots.slot_state import handle_in, is_from_launch
from rendezvous import layout
from rendezvous.agreement.membership import Wanted, newest_claim
from rendezvous.clock import SystemClock
from rendezvous.store import Store
from rendezvous.stores.ahead import Ahead
from rendezvous.stores.cache import cache_of
from rendezvous.stores.open import open_store

PAUSE_S = 0.2
SESSION = re.compile(r"([ra]\d+)-(\d+)")


@dataclass(frozen=True)
class OpenLog:
    """A log.   lines, follow: take the number of last lines (None: all).   handle: the launch's handle, or None."""

    lines: Callable[[int | None], list[str]]
    follow: Callable[[int | None], Iterator[str]]
    handle: dict[str, Any] | None = None


def _replica_log(executor: FleetExecutor, found: Handle) -> OpenLog:
    return OpenLog(partial(executor.logs, found), partial(executor.follow, found), found.to_dict())


def _supervisor_log(url: str, file: LogFile) -> OpenLog:
    """Return the log of a supervisor that is a process of this machine."""
    is_over = lambda: supervisor_of(open_store(url)) is None  # noqa: E731
    return OpenLog(file.lines, lambda tail: file.follow(tail, is_over, SystemClock(), PAUSE_S))


def bucket_log(words: Sequence[str]) -> OpenLog:
    """Return a log from the bucket: a replica's events, and the last log lines that its supervisor stored."""
    return OpenLog(partial(last_lines, words), lambda tail: iter(last_lines(words, tail)))


@contextmanager
def log_of(run: Run, wanted: Wanted, slot: str) -> Iterator[OpenLog]:
    """Open a log.   slot: r01, r01-2 or supervisor.   Raise UsageError for "" and for an unknown name.

    Platforms get the store's URL, as at the launch: `run.url` is as the user typed it."""
    url = run.url
    if not slot:
        there = ", ".join(dict.fromkeys([*slots_of(wanted.replicas), *wanted.member_names]))
        raise UsageError(
            f"which log? This run has logs of {there} and, if it is detached, of supervisor. For example: "
            f"diloco logs {shlex.quote(url)} r00"
        )
    executor = build_executor(wanted.places, wanted.former)
    try:
        if SESSION.fullmatch(slot):
            yield _log_of_session(url, slot, executor)
            return
        own = process_folder(url) / "supervisor.log"
        with suppress(FileNotFoundError, NotADirectoryError):
            os.scandir(own.parent).close()  # `find` sees nothing in a folder that this user may not read
        found = {h.slot: h for h in executor.find(run.store.url)}
        if slot in found:
            yield _replica_log(executor, found[slot])
        elif slot == SUPERVISOR and own.exists():
            yield _supervisor_log(url, LogFile(own))
        else:
            raise UsageError(_why_no_log(slot, run, wanted, found))
    finally:
        executor.close()


# -------------------------------------------------------------------- one session


def _log_of_session(url: str, name: str, executor: FleetExecutor) -> OpenLog:
    run = read_run(url)
    report = read_report(run.store, COSTS, cache_of(run.store, run.record.nonce))
    session = next((x for x in report.sessions if x.name == name), None)
    if session is None:
        sessions = ", ".join(x.name for x in report.sessions) or "none yet"
        raise UsageError(f"no session {name} has joined this run; there have been {sessions}")
    handle = _launch_of(session, report)
    if handle is not None and _has_a_log(executor, handle):
        return _replica_log(executor, handle)
    return bucket_log(tuple(_session_in_words(session, report, run.store)))


def _launch_of(session: SessionSummary, report: Report) -> Handle | None:
    """Return the launch of the session from the log; None if it is unknown."""
    launches = (handle_in(e, report.url) for e in report.of_kind(*LAUNCH_BEGINS) if e["slot"] == session.slot)
    return next((h for h in launches if h is not None and is_from_launch(h, session)), None)


def _has_a_log(executor: FleetExecutor, handle: Handle) -> bool:
    try:
        return bool(executor.logs(handle, 1))
    except (ExecutorError, PermissionError):  # the platform has no log any more, or does not answer; another user's log
        return False


def _session_in_words(session: SessionSummary, report: Report, store: Store) -> Iterator[str]:
    why = f", {session.why}" if session.why else ""
    yield f"({session.name}: {session.how}{why}; the bucket has these lines)"
    listed = store.list(layout.logs_prefix(session.slot, session.generation))
    keys = [key for key in listed if not layout.is_rollouts(key)]
    ahead = Ahead(store)
    ahead.ask(keys)
    for key in keys:
        yield from (json.dumps(shown(e), ensure_ascii=False) for e in read_log(ahead, key).events)
    for e in report.of_kind("lost"):
        if (e["slot"], e["generation"]) == (session.slot, session.generation) and isinstance(e.get("tail"), list):
            yield from map(str, e["tail"])


def _why_no_log(slot: str, run: Run, wanted: Wanted, found: dict[str, Handle]) -> str:
    there = sorted({*slots_of(wanted.replicas), *wanted.member_names, *found})
    if slot in there:
        if claim := newest_claim(run.store, slot):
            where = host_words(claim.host) or "the machine where it ran"
            bucket = f"diloco logs {shlex.quote(run.url)} {slot}-{claim.generation}"
            why = f"the log of {slot} is not here; the user who started it has it on {where}"
            return f"{why}. Part of it is in the bucket: {bucket}"
        return f"{slot} has not been launched yet; `diloco status` shows the reason for the wait"
    if slot == SUPERVISOR:
        return "no detached supervisor of this run has written a log on this machine; look where it was started"
    return f"there is no slot {slot!r} in this run; there are {', '.join(there)} (and sessions, as r00-1)"
