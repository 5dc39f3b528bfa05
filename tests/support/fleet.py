"""Fleets of real replica processes on one machine, for tests.

    fleet = Fleet(tmp_path, steps=6)      a supervised run on a tiny model: founded and published
    Fleet(tmp_path, "s3://bucket/run", environ)   the same in a bucket; environ: for the children, credentials perhaps
    fleet.start("r00"); fleet.start("r01", die="after:create:/offer/@3")
    fleet.wait() -> {"r00": [0], "r01": [-9]}

Children come from a forkserver that has the heavy modules loaded, so that starting one costs a fraction of a second.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from multiprocessing import resource_tracker, spawn
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest.mock import patch

from diloco.model.publish import publish_model
from diloco.run.config import RunConfig
from diloco.run.founding import open_run
from diloco.run.record import Run
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.clock import SystemClock
from rendezvous.records.records import Beat, Commit
from rendezvous.store import PatientStore
from tests.support import victim
from tests.support.tables import merge_tables
from tests.support.warm_python import FLEET, WARM

ENDLESS = 100_000  # outer steps: such a run ends when a test says so, however long a replica takes to get there
WAIT_S = 150.0  # only a hang takes so long, on the busiest machine
TEXT = "".join(f"{i} plus {i + 1} is {2 * i + 1}. " for i in range(300))


@cache
def context() -> Any:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(FLEET)
    resource_tracker.ensure_running()  # a light process, from an ordinary Python
    python = os.environ.get(WARM, spawn.get_executable())
    with patch.dict(os.environ), patch.object(spawn, "_python_exe", os.fsencode(python)):
        # its children inherit its first environment, so no variable of the first test
        for name in [name for name in os.environ if name.startswith("DILOCO_")]:
            del os.environ[name]
        ensure_running()
    return forkserver


def config(folder: Path, **changes: Any) -> RunConfig:
    """A supervised run of a tiny model.  changes: per section, or a setting of none."""
    (folder / "text.txt").write_text(TEXT)
    base: dict[str, dict[str, Any]] = {
        "outer": {"sync_every": 4, "snapshot_every": 2},
        "inner": {
            "loop": "supervised",
            "model": "tiny",
            "data": {"text": "text.txt", "context_length": 16},
            "batch_size": 4,
        },
        "fleet": {"replicas": 3, "steps": 6, "give_up_s": 120.0},
    }
    top = {k: v for k, v in changes.items() if k not in base}
    return RunConfig.from_dict(
        {"name": "test", **top, **{s: merge_tables(v, changes.get(s, {})) for s, v in base.items()}}, folder
    )


class Fleet:
    """A run and its replica processes."""

    def __init__(self, folder: Path, url: str = "", environ: Mapping[str, str] | None = None, **changes: Any) -> None:
        self.folder, self.url, self.environ = folder, url or str(folder / "run"), dict(environ or {})
        self.config = config(folder, **changes)
        self.run: Run = open_run(self.config, self.url, SystemClock())
        self.store = PatientStore(self.run.store, SystemClock(), 10.0)
        self.model = publish_model(replace(self.run, store=self.store), SystemClock())
        self.sessions: dict[str, list[Any]] = {}
        self._seen: list[Commit] = []

    def start(self, slot: str, die: str = "", **environ: str) -> Any:
        child = context().Process(
            target=victim.replica, args=(self.url, slot, str(self.log(slot)), die, {**self.environ, **environ})
        )
        child.start()
        self.sessions.setdefault(slot, []).append(child)
        return child

    def start_all(self) -> None:
        for i in range(self.config.fleet.replicas):
            self.start(layout.slot_name(i))

    def wait(self, timeout: float = WAIT_S) -> dict[str, list[int | None]]:
        """Exit codes of every session of every slot, once all have ended."""
        end = time.monotonic() + timeout
        for child in [c for sessions in self.sessions.values() for c in sessions]:
            child.join(max(0.0, end - time.monotonic()))
        codes = {slot: [c.exitcode for c in sessions] for slot, sessions in self.sessions.items()}
        if any(code is None for sessions in codes.values() for code in sessions):
            self.kill_all()
            raise AssertionError(f"replicas still ran after {timeout} s: {codes}\n{self.logs()}")
        return codes

    def kill_all(self) -> None:
        for child in [c for sessions in self.sessions.values() for c in sessions]:
            child.kill()
            child.join()

    def signal(self, slot: str, number: signal.Signals) -> None:
        os.kill(self.sessions[slot][-1].pid, number)

    def wait_for(self, what: Any, timeout: float = WAIT_S) -> Any:
        """The first truthy value of `what()`."""
        end = time.monotonic() + timeout
        while not (value := what()):
            if time.monotonic() > end:
                raise AssertionError(f"did not happen within {timeout} s\n{self.logs()}")
            time.sleep(0.01)
        return value

    def beat(self, slot: str) -> Beat | None:
        body = self.store.get(layout.beat_key(slot))
        return Beat.decode(body) if body else None

    def training(self, slot: str, step: int) -> bool:
        """Is the slot inside the inner steps of outer step `step` or a later one?"""
        beat = self.beat(slot)
        return beat is not None and beat.step >= step and beat.inner >= 1 and beat.phase == "train"

    def commit(self, t: int) -> Commit | None:
        body = self.store.get(layout.commit_key(t))
        return Commit.decode(body) if body else None

    def commits(self) -> list[Commit]:
        """As they are now; `head` and `counted` read each of them once, which a test that waits does not pay for."""
        self._seen = []
        return self.seen_commits()

    def seen_commits(self) -> list[Commit]:
        while (commit := self.commit(len(self._seen))) is not None:
            self._seen.append(commit)
        return self._seen

    def head(self) -> int:
        return len(self.seen_commits())

    def counted(self, slot: str, generation: int = 1, since: int = 0) -> bool:
        """Did an offer of this generation or a later one count as fresh in one of the commits from `since` on?"""
        offers = [o for commit in self.seen_commits()[since:] for o in commit.fresh_offers]
        return any(o.slot == slot and o.generation >= generation for o in offers)

    def end_in(self, more: int) -> None:
        """End an ENDLESS run in so many outer steps, or as soon as the replicas hear of it."""
        write_control(self.store, SystemClock(), steps=self.head() + more)

    def log(self, slot: str) -> Path:
        return self.folder / f"{slot}.log"

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text()[-2000:]}" for p in sorted(self.folder.glob("*.log")))
