"""`diloco track`: writes a run's curves to wandb, trackio or TensorBoard, from any machine that can read its bucket.

    names ─▶ package and login there? ─▶ lock ─▶ open each ─▶ look, write, look …    --follow: until the run is done
                 └─ TrackerError, nothing written                └─ SIGTERM, Ctrl-C: finish the written rows

A supervisor runs the same command as a child (supervision/notices/tracking.py), so a tracker that hangs or crashes
does not affect the run.

Not promised: that --follow ends for a stopped run, because `diloco resume` may continue it.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from diloco.process.processes import is_alive
from diloco.run.sections import PROJECT
from diloco.runlog.opening import open_view
from diloco.runlog.reader import Reader, Report
from diloco.runlog.scope import EVERYTHING
from diloco.views.samples import SampleReader
from diloco.views.trackers.feed import Feed, hold_alone
from diloco.views.trackers.make import check_tracker, make_tracker
from diloco.views.trackers.tracker import TrackedRun
from executors.cli.answers import Answer
from executors.cli.opening import ask_again
from rendezvous.clock import Clock

LOOK_S = 5.0  # seconds between two looks at a run on this machine
FAR_LOOK_S = 20.0  # between two looks at a bucket, where every look costs money


@dataclass(frozen=True)
class TrackRequest:
    """The options.   to: names of trackers.   samples: completions per outer step.   folder: for TensorBoard's files.

    parent: "PID:START" of a process; this command ends when that process ends.   "": no such process.
    """

    to: tuple[str, ...]
    follow: bool
    samples: int
    project: str | None
    folder: Path
    parent: str


def track(asked: TrackRequest, url: str, clock: Clock, say: Callable[[str], None]) -> Answer:
    """Write a run's curves to trackers.   Raises TrackerError before anything is written."""
    names = list(dict.fromkeys(asked.to))
    for name in names:
        check_tracker(name)
    view = ask_again(lambda: open_view(url, EVERYTHING), clock)
    record = view.run.record
    project = asked.project or os.environ.get("WANDB_PROJECT") or PROJECT
    config = {**record.config, "run": url}
    run = TrackedRun(name=str(record.config.get("name", "run")), nonce=record.nonce, project=project, config=config)
    locks = hold_alone(run, names)
    reader = Reader(view.run.store, EVERYTHING, view.cache, view.answers)
    trackers = [make_tracker(name, asked.folder) for name in names]
    samples = SampleReader(view.run.store, asked.samples)
    feed = Feed(run=run, reader=reader, samples=samples, trackers=trackers, clock=clock, say=say)
    must_end = _ending_signals(asked.parent)
    near = getattr(view.run.store, "near", False)
    try:
        feed.open_all()
        report = _feed_until(feed, must_end, asked.follow, LOOK_S if near else FAR_LOOK_S)
    finally:
        feed.close()
        for lock in locks:
            lock.close()
    return _in_words(url, feed, report, names)


def _feed_until(feed: Feed, must_end: Callable[[float], bool], follow: bool, look_s: float) -> Report:
    """Look twice, or until the run is done; the second look knows which sessions were over at the first.

    Look once more after a request to end, because a supervisor sends it after all replicas have left.
    """
    feed.look()
    report = feed.look()
    while follow and not feed.has_all(report):
        follow = not must_end(look_s)
        report = feed.look()
    return report


def _ending_signals(parent: str) -> Callable[[float], bool]:
    """Return a function that waits the given number of seconds, and returns whether this command must end."""
    asked = threading.Event()

    def hear(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hear)
    pid, _, started = parent.partition(":")

    def must_end(seconds: float) -> bool:
        gone = bool(parent) and not is_alive(int(pid), int(started))
        return gone or asked.wait(seconds)

    return must_end


def _in_words(url: str, feed: Feed, report: Report, names: Sequence[str]) -> Answer:
    states = dict(zip(names, feed.states, strict=True))
    lines = [
        f"{name}: {s.trouble}; run the same command again to continue after {name}'s newest row"
        if s.trouble
        else f"{name}: {s.written} rows written, up to outer step {report.head - max(0, feed.waiting)} of {report.head}"
        for name, s in states.items()
    ]
    if feed.waiting > 0:
        lines.append(f"{feed.waiting} outer steps wait for the logs of their replicas; --follow waits for them")
    told = {name: {"written": s.written, "trouble": s.trouble} for name, s in states.items()}
    data = {"run": url, "outer_step": report.head, "waiting": max(0, feed.waiting), "trackers": told}
    return Answer(data, lines, 1 if any(s.trouble for s in states.values()) else 0)
