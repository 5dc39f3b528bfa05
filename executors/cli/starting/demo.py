"""`diloco demo`: a whole run on one machine, with a kill -9 in the middle.

    3 replicas ── outer step 4, half-way ── SIGKILL r01 ── replaced ── 12 of 12 outer steps ── report

The checks that it prints at the end read the bucket; the demo exits with 0 only if all of them hold.
"""

import os
import shlex
import shutil
import signal
import sys
import time
from contextlib import redirect_stdout
from importlib.resources import files
from pathlib import Path

from diloco.run.config import load_config
from diloco.run.founding import open_run
from diloco.run.record import Run
from diloco.runlog.reader import Report, first_and_last, read_report
from diloco.runlog.sessions import SessionSummary
from diloco.runlog.summary import Check, checks, summary
from diloco.views.overview import inner_steps_per_round
from diloco.views.page.charts import write_picture
from executors.cli.answers import Answer, say
from executors.cli.looking.report import write_page
from executors.cli.starting.foreground import supervise_here
from executors.preflight.run_url import shareable_url
from executors.supervision.supervisor import Supervisor
from rendezvous.clock import SystemClock
from rendezvous.errors import WrongRun
from rendezvous.records.records import Beat
from rendezvous.stores.open import open_store

DEFAULT_FOLDER = Path("runs/demo")
VICTIM = "r01"
FROM_STEP = 4
GOAL = 0.9  # mean reward of the last outer step; the warm start begins below 0.2


def demo_answer(url: str, *, as_json: bool) -> Answer:
    """Run the demo; return the answer of the command.   url: a folder's URL, as typed; "" for the default."""
    folder = Path(shareable_url(url).removeprefix("file://")) if url else None
    if not as_json:
        return Answer(code=demo(folder))
    with redirect_stdout(sys.stderr):
        code = demo(folder)
    return Answer({"code": code}, code=code)


def demo(folder: Path | None) -> int:
    """Run the demo (or the rest of it), report, print the next commands; return the exit code."""
    run = _open_demo_run(folder)
    path = Path(run.url.removeprefix("file://"))
    say(f"{'resuming' if run.resumed else 'starting'} the demo in {shown_path(path)}")
    outcome = supervise_here(run, each_tick=kill_one)
    report = read_report(run.store)
    if not report.done:
        say(f"{outcome.text}\nthe same command resumes it: diloco demo --run {shlex.quote(shown_path(path))}")
        return outcome.code or 1
    found = [*extra_checks(report)]
    print("\n" + summary(report))
    print("\n".join(f"  {'ok ' if c.ok else 'NO '} {c.text}" for c in found))
    write_page(report, run.store, path, time.time())
    write_picture(report, path)
    print(next_commands(path))
    return 0 if all(c.ok for c in [*checks(report), *found]) else 1


def _open_demo_run(folder: Path | None) -> Run:
    """Open the run in `folder`, or in the first of runs/demo, runs/demo-2, … that is new or unfinished."""
    if folder is not None:
        return _open_in(folder)
    number = 1
    folder = DEFAULT_FOLDER
    while True:
        if not (folder.exists() and read_report(open_store(str(folder))).done):
            try:
                return _open_in(folder)
            except WrongRun:  # a demo of another version: leave it alone
                pass
        number += 1
        folder = DEFAULT_FOLDER.with_name(f"{DEFAULT_FOLDER.name}-{number}")


def _open_in(folder: Path) -> Run:
    """Open a run in the folder, and write its config there, so that you can read, change and run it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = files("diloco").joinpath("demo.toml").read_text(encoding="utf-8")
    (folder / "demo.toml").write_text(text, encoding="utf-8")
    return open_run(load_config(folder / "demo.toml"), str(folder), SystemClock())


def kill_one(supervisor: Supervisor, report: Report) -> None:
    """Send SIGKILL to VICTIM, once per run, in the middle of an outer step."""
    handle = supervisor.handle(VICTIM)
    beat = report.beats.get(VICTIM)
    if handle is None or beat is None or beat.pid != handle.pid or report.of_kind("killed"):
        return
    if is_kill_due(beat, report):
        os.kill(handle.pid, signal.SIGKILL)
        supervisor.emit("killed", slot=VICTIM, pid=handle.pid, step=beat.step, inner=beat.inner)


def is_kill_due(beat: Beat, report: Report) -> bool:
    """Whether the heartbeat, which is a moment old, is in FROM_STEP or a later outer step, and not past its middle."""
    half = max(1, inner_steps_per_round(report) // 2)
    return beat.phase == "train" and beat.step >= FROM_STEP and 0 < beat.inner <= half


def extra_checks(report: Report) -> list[Check]:
    """Return the demo's own checks, in addition to the checks of every run."""
    killed = [x for x in report.sessions if x.how == "killed"]
    ends = first_and_last(report)
    reward = "no reward was logged" if ends is None else f"mean reward {ends[0]:.2f} -> {ends[1]:.2f} (goal {GOAL})"
    return [
        Check(bool(killed) and all(_is_replaced(x, report) for x in killed), _killed_words(killed, report)),
        Check(ends is not None and ends[1] >= GOAL > ends[0], reward),
    ]


def _is_replaced(session: SessionSummary, report: Report) -> bool:
    return any(x.slot == session.slot and x.generation > session.generation and x.commits for x in report.sessions)


def _killed_words(killed: list[SessionSummary], report: Report) -> str:
    if not killed:
        return "no replica was killed: the run ended too soon"
    step = report.of_kind("killed")[0]["step"]
    back = [x for x in report.sessions if x.slot == killed[0].slot and x.generation > killed[0].generation and x.joined]
    if not back:
        return f"{killed[0].name} killed in outer step {step}; no replacement joined"
    seconds = (back[0].joined or 0.0) - (killed[0].ended or 0.0)
    return f"{killed[0].name} killed in outer step {step}, {back[0].name} trains {seconds:.1f} s later"


def next_commands(path: Path) -> str:
    run = shlex.quote(shown_path(path))
    beside = shlex.quote(f"{shown_path(path)}-model")  # not in the run's folder, which has the start model
    diloco = command_name()
    rows = [
        (f"open {run}/report.html", "the curves, the kill, every commit"),
        (f"{diloco} export {run} --to {beside}", "a normal from_pretrained folder"),
        (f"{diloco} train {run}/demo.toml --run runs/mine", "the same job, yours to change"),
    ]
    width = max(len(command) for command, _ in rows)
    return "\nnext:\n" + "\n".join(f"  {command:{width}s}   {why}" for command, why in rows)


def command_name() -> str:
    """Return the name of this command: `diloco` if the shell finds it, else its path."""
    own = Path(sys.argv[0])
    return "diloco" if own.name != "diloco" or shutil.which("diloco") == str(own) else shown_path(own.absolute())


def shown_path(path: Path) -> str:
    """Return the path as you would type it from the working directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
