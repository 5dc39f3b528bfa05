"""One replica: a process that is given a run's URL and a slot, and nothing else.

    python -m diloco.replica RUN_URL --slot r00

    claim, beat ─▶ imports ─▶ θ₀, files ─▶ inner loop ─▶ heal ─▶ train … sync … train … sync ─▶ goodbye
    SIGTERM / SIGINT: offer the inner steps done so far, leave.   kill -9: the run goes on without.

The exit code says why it ended (diloco/exitcodes.py).  Not promised: several devices per replica.
"""

import argparse
import hashlib
import math
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco import exitcodes
from diloco.config import BUCKET, ConfigError, RunConfig, keep_bytes
from diloco.launch import ModelRecord, Run, fetch_files, fetch_model, read_run, refuse_layout
from diloco.learning import line
from diloco.life import Life, process_alive
from diloco.output import survive_full_disk
from diloco.room import in_room
from inner import InnerError, Seeds
from rendezvous import layout
from rendezvous.chain import head
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import BadDelta, Diverged, Fenced, Forged, GaveUp, Leaving, RendezvousError, StoreError, WrongRun
from rendezvous.garbage import Collected
from rendezvous.membership import read_control
from rendezvous.records import WireError

if TYPE_CHECKING:
    from diloco.lighthouse import LighthouseManager
    from diloco.manager import StoreManager
    from inner import InnerLoop

REJOIN_WARMUP = 3  # inner steps of lr warm-up for a life that starts with an empty Adam in the middle of a run


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    survive_full_disk()
    try:
        return _life_of(args.url, args.slot, _watcher(args.parent))
    except (ConfigError, InnerError, WrongRun, WireError, Forged) as error:
        return _say(args.slot, error, exitcodes.USER_ERROR)
    except (StoreError, GaveUp) as error:
        return _say(args.slot, error, exitcodes.GAVE_UP)


def _life_of(url: str, slot: str, parent_alive: Callable[[], bool]) -> int:
    run = read_run(url)
    if (end := too_late(run, SystemClock())) is not None:
        return _say(slot, end[1], end[0])
    try:
        life = Life(
            run.store, slot, run.timing, keep=keep_bytes(run.config.fleet.keep), parent_alive=parent_alive,
            hung_after_s=run.config.fleet.hung_after_s,
        )  # fmt: skip
    except Fenced as error:
        return _say(slot, error, exitcodes.FENCED)
    life.heard = lambda event, fields: _print_step(life, event, fields)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: life.ask_to_leave("got a signal to end"))
    try:
        return _live(replace(run, store=life.rv.store), life)  # that one is patient
    except RendezvousError as error:
        return _ended(life, error)
    except Exception as error:
        life.tell("crashed", error=f"{type(error).__name__}: {error}")
        life.flush()
        if isinstance(error, InnerError) and not _is_preflight(life):
            return _say(slot, error, exitcodes.CRASHED)
        raise


def _is_preflight(life: Life) -> bool:
    """May the user's files be wrong for everybody?  Not once a step was taken with them, nor where training began:
    what fails then is a moment's trouble, or one of this place, and costs this life alone (decision 025)."""
    return life.rv.members.status.phase == "boot" and head(life.rv.store) == 0


def too_late(run: Run, clock: Clock) -> tuple[int, str] | None:
    """(exit code, why) if there is nothing left to do for who starts now: asked before its slot is claimed.

    A machine that was waited for comes when it comes; nothing heavy has been imported or downloaded by then.
    """
    wanted = read_control(run.store)
    if wanted.steps and run.store.get(layout.commit(wanted.steps - 1)) is not None:
        return exitcodes.DONE, f"all {wanted.steps} outer steps are committed; nothing to do"
    if wanted.stop:
        return exitcodes.LEFT, "the run was stopped before this replica began; `diloco resume` goes on"
    if 0 < wanted.until <= clock.wall():
        return exitcodes.LEFT, "nobody looks after the run any more (its lease is over); `diloco resume` goes on"
    return None


def _live(run: Run, life: Life) -> int:
    record, stay = _wait_for_model(run, life), lambda: _leave_now(life)
    with tempfile.TemporaryDirectory(prefix="replica-") as scratch:
        model_dir, files = in_room(life, "the start model", lambda: _fetch(run, record, Path(scratch)), stay)
        life.rv.members.status.note = ""
        stay()
        return _train(run.config, life, record, model_dir, files)


def _fetch(run: Run, record: ModelRecord, scratch: Path) -> tuple[Path, dict[str, Path]]:
    """θ₀'s folder, and the user's own files."""
    return fetch_model(run.store, record, scratch / "model"), fetch_files(run, scratch / "code")


def _train(config: RunConfig, life: Life, record: ModelRecord, model_dir: Path, files: dict[str, Path]) -> int:
    import torch  # heavy imports only now: the slot is claimed and beating

    from diloco import lighthouse
    from diloco.flat import layout_of
    from diloco.life_host import LifeHost
    from diloco.manager import StoreManager
    from diloco.outer import make_diloco
    from inner import build_inner
    from inner.precision import PrecisionWarning, lost_updates

    if os.environ.get("OMP_NUM_THREADS") == "1":
        torch.set_num_threads(1)
    at = head(life.rv.store) if config.rendezvous == BUCKET else lighthouse.latest(life)
    warmup = REJOIN_WARMUP if at else 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)  # it goes into the journal, which prints it, too
        loop = build_inner(config.inner, model_dir, files, seeds(config, life, at), warmup)
    if text := lost_updates(loop.model.named_parameters(), config.inner.learning_rate):
        life.tell("warning", kind="bf16", text=text)
    refuse_layout(record.layout, layout_of(loop.model))
    manager = StoreManager(life) if config.rendezvous == BUCKET else lighthouse.connect(config.rendezvous, life)
    manager.stats = lambda: _told(loop, life, config.fleet.log_rollouts)
    loop.report_to(LifeHost(life))
    with make_diloco(loop.model, loop.optimizer, manager, config.outer, boundary=loop.boundary) as run:
        loop.follow(run.committed, run.theta)
        _run_inner(loop, manager)
    return exitcodes.LEFT if manager.left else exitcodes.DONE


def _run_inner(loop: "InnerLoop", manager: "StoreManager | LighthouseManager") -> None:
    if not manager.done:
        loop.train(lambda: manager.done)


def seeds(config: RunConfig, life: Life, at: int) -> Seeds:
    """Data order: fixed by (run, slot), entered where a replica stands at outer step `at`.  Noise: of this life."""
    slot, start = life.rv.slot, at * (config.outer.sync_every // config.outer.fragments)
    return Seeds(_seed(config.seed, slot), _seed(config.seed, slot, life.rv.generation), start)


def _seed(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little") >> 1


def _wait_for_model(run: Run, life: Life) -> ModelRecord:
    """θ₀'s manifest, which the launcher publishes while replicas start."""
    began = life.clock.now()
    while (body := run.store.get(layout.MODEL_MANIFEST)) is None:
        _leave_now(life)
        life.rv.members.status.note = "waits for the model"
        if life.clock.now() - began > life.timing.give_up:
            raise GaveUp(f"no model was published within {life.timing.give_up:.0f} s; look at the launcher's log")
        life.clock.sleep(life.timing.poll * 4)
    return ModelRecord.decode(body)


def _leave_now(life: Life) -> None:
    if life.rv.leaving:
        raise Leaving("asked to leave before the first inner step; nothing was lost")
    if life.rv.members.fenced_by > life.rv.generation:
        raise Fenced(f"{life.rv.slot} now belongs to generation {life.rv.members.fenced_by}; this process goes")


def _ended(life: Life, error: RendezvousError) -> int:
    """What the rendezvous says becomes an exit code and a last word in the journal."""
    codes: list[tuple[type[RendezvousError], int, str]] = [
        (Leaving, exitcodes.LEFT, "left"),
        (Fenced, exitcodes.FENCED, "fenced"),
        (Diverged, exitcodes.DIVERGED, "diverged"),
        (Collected, exitcodes.DIVERGED, "collected"),
        (GaveUp, exitcodes.GAVE_UP, "gave_up"),
        (BadDelta, exitcodes.BAD_DELTA, "bad_delta"),
        (WrongRun, exitcodes.USER_ERROR, "refused"),
        (WireError, exitcodes.USER_ERROR, "refused"),
        (Forged, exitcodes.USER_ERROR, "refused"),
        (RendezvousError, exitcodes.CRASHED, "crashed"),
    ]
    code, event = next((code, event) for kind, code, event in codes if isinstance(error, kind))
    life.tell(event, step=life.rv.step, text=str(error))
    if not isinstance(error, Fenced):
        life.rv.members.goodbye()
    life.end()
    return _say(life.rv.slot, error, code)


def _say(slot: str, error: Exception | str, code: int) -> int:
    print(f"{slot}: {error}", file=sys.stderr, flush=True)
    return code


def _print_step(life: Life, event: str, fields: dict[str, Any]) -> None:
    """One line per outer step, so that whoever reads this replica's output sees that it is well."""
    if event == "step":
        print(line(life.rv.name, fields, life.rv.wanted.steps), flush=True)


def _told(loop: "InnerLoop", life: Life, rollouts: int) -> dict[str, float]:
    life.watch(loop.sample(rollouts) if rollouts else {})
    return _finite(loop.harvest())


def _finite(stats: dict[str, float]) -> dict[str, float]:
    return {k: float(v) for k, v in stats.items() if math.isfinite(v)}


def _watcher(parent: str) -> Callable[[], bool]:
    """ "PID:STARTTIME" -> is that process still there?"""
    if not parent:
        return lambda: True
    pid, _, started = parent.partition(":")
    return lambda: process_alive(int(pid), started)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m diloco.replica", description="Run one replica of a run.")
    parser.add_argument("url", help="the run: a folder or a bucket, as for `diloco train --run`")
    parser.add_argument("--slot", default="r00", help="which replica this is (r00, r01, …)")
    parser.add_argument("--parent", default="", help="PID:STARTTIME of a process without which this replica leaves")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
