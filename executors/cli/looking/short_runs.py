"""Commands for runs that `launch_replicas` started.  Such runs keep no records, so the platform supplies the data.

    diloco status|costs|stop  modal://sweep-3 · hf-jobs://… · slurm://… · sky://… · local://… · a folder with processes
          └─ find ─▶ poll ─▶ a line for each process: state, hours, dollars      stop: cancel ─▶ poll until all ended

Not promised: dollars of a process if its platform reports no price or no times; processes that another account
started (another namespace, another login).
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from diloco.units import dollars
from executors.cli.answers import Answer
from executors.platforms import EXECUTORS
from executors.platforms.base import FleetExecutor, State, Status
from executors.platforms.places import Place, make_executor
from executors.platforms.short_form import wait_for_all
from executors.preflight import run_url
from rendezvous import layout
from rendezvous.clock import Clock
from rendezvous.errors import RecordsLost
from rendezvous.stores.open import folder_of, open_store

VERBS = ("status", "costs", "stop")
GRACE_S, END_S, PAUSE_S = 15.0, 120.0, 1.0  # `stop` waits: for a process to leave; for its end; between two polls


def platform_of(url: str) -> str:
    """Return the platform of a run in the short form; "" for any other run."""
    if (folder := folder_of(url)) is not None:
        return "local" if not (folder / layout.RUN).exists() and any(folder.glob("processes/*.json")) else ""
    scheme = url.partition("://")[0]
    if scheme == "modal" and open_store(run_url.checked_url(url), make=False).get(layout.RUN) is not None:
        return ""  # an ordinary run whose store is inside Modal
    return scheme if scheme in EXECUTORS else ""


def has_lost_run_json(url: str) -> bool:
    """Whether a folder of this machine has records of an ordinary run, which has lost its run.json."""
    folder = Path(url.removeprefix("file://"))
    return any((folder / name).exists() for name in ("steps", "control", "replicas"))


@dataclass(frozen=True)
class ShortRun:
    """A run without records, which only its platform knows."""

    url: str
    executor: FleetExecutor
    clock: Clock

    def look(self) -> list[Status]:
        """Return the statuses of all its processes.   Raise UsageError if the platform knows none."""
        if handles := self.executor.find(self.url):
            return self.executor.poll(handles)
        raise run_url.UsageError(
            f"{self.executor.name} knows no process of {self.url}. Write {self.executor.name}:// and the "
            f"name in launch_replicas(run=…), and use the account that launched it"
        )

    def stop(self, grace_s: float | None) -> list[Status]:
        """Ask all processes to leave, and wait until the platform reports their ends."""
        handles = [s.handle for s in self.look()]
        self.executor.cancel(handles, GRACE_S if grace_s is None else grace_s)
        return wait_for_all(lambda: self.executor.poll(handles), self.clock, END_S + (grace_s or 0.0), PAUSE_S)

    def hours(self, status: Status) -> float | None:
        """Return the hours of the process so far; None if its beginning or its end is unknown."""
        if status.state is State.PENDING:  # the wait for a machine is not billed
            return 0.0
        began = status.began_at or status.handle.launched_at
        ended = status.ended_at if status.state.ended else self.clock.wall()
        return max(0.0, ended - began) / 3600 if began and ended else None

    def usd(self, status: Status) -> float | None:
        """Return the dollars of the process so far; None if its price or its hours are unknown."""
        price, hours = status.handle.usd_per_hour, self.hours(status)
        return 0.0 if price == 0 else None if price is None or hours is None else price * hours

    def lines(self, statuses: Sequence[Status]) -> list[str]:
        """Return a head line, and a line for each process."""
        known = [usd for s in statuses if (usd := self.usd(s)) is not None]
        unknown = f", and {len(statuses) - len(known)} of unknown cost" if len(known) < len(statuses) else ""
        live = sum(not s.state.ended for s in statuses)
        head = f"{self.url}: {live} of {len(statuses)} live, {dollars(sum(known))} so far{unknown}"
        lost = f"its {layout.RUN} is lost" if has_lost_run_json(self.url) else ""
        why = lost or "started by launch_replicas, so there is no outer step"
        return [f"{head}; {why}", *map(self._line, statuses)]

    def _line(self, status: Status) -> str:
        hours, usd = self.hours(status), self.usd(status)
        time = "" if hours is None else f"{hours:.2f} h"
        money = "?" if usd is None else dollars(usd)
        words = f"no news: {status.trouble}" if status.stale else status.reason
        name = f"{status.handle.slot}.{status.handle.attempt}"
        return f"  {name:8s} {status.state:10s} {time:>9s} {money:>8s}  {words}".rstrip()


def short_answer(run: ShortRun, verb: str, *, grace_s: float | None = None, purge: bool = False) -> Answer:
    """Answer one of VERBS.   Raise UsageError for other verbs, which need records.

    Raise RecordsLost for an ordinary run without run.json, for which only `stop` works: it ends the processes.
    """
    if verb != "stop" and has_lost_run_json(run.url):
        raise RecordsLost(
            f"{run.url}/{layout.RUN} is lost, though other records of the run are there. Restore it from a backup; "
            "`diloco stop` still ends the run's processes"
        )
    if verb not in VERBS:
        raise run_url.UsageError(
            f"{run.url} was started by launch_replicas, which keeps no records. Only these verbs know it: "
            f"{', '.join(VERBS)}. executor.logs(handle) reads its logs; executor.find(run) returns the handles"
        )
    with closing(run.executor):
        found = run.stop(grace_s) if verb == "stop" else run.look()
        purged = run.executor.purge(run.url) if verb == "stop" and purge else []
    rows = [{**s.to_dict(), "usd": run.usd(s)} for s in found]
    data = {"run": run.url, "replicas": rows, "purged": purged}
    code = 1 if verb == "stop" and not all(s.state.ended for s in found) else 0
    return Answer(data, [*run.lines(found), *purged], code)


def short_run(url: str, clock: Clock) -> ShortRun | None:
    """Return the run if it is in the short form; else None."""
    name = platform_of(url)
    return ShortRun(url, make_executor(Place(name)), clock) if name else None
